"""Placement: every GPU to one unit, by the recipe's wish or by need, or refused with figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from forge_env.config import RunConfig
from forge_env.errors import ForgeError, UsageError
from forge_env.job.addresses import Address, own_address, worker_addresses
from forge_env.job.card import Card
from forge_env.job.plan import Plan, make_plan, units

GPU_RECIPE = {
    "generator": {"num_replicas": 2, "procs": 2, "with_gpus": True},
    "trainer": {"procs": 4, "with_gpus": True},
    "rollouts": {"workers": 2},
}


def card(number: int, gpus: int = 0, memory_gb: float = 64.0) -> Card:
    ids = [f"GPU-{number}-{index}" for index in range(gpus)]
    return Card("0", "", f"node{number}", "python", "3.11", 8, memory_gb, ids)


def recipe(cards: Sequence[Card], job: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    workers = [f"tcp://10.0.0.{number}:26700" for number in range(1, len(cards) + 1)]
    job = {"kind": "hosts", "workers": workers, **(job or {})}
    return RunConfig.model_validate({"environment": {"name": "x"}, "job": job, **sections})


def planned(cards: Sequence[Card], job: dict[str, Any] | None = None, **sections: Any) -> Plan:
    config = recipe(cards, job, **sections)
    return make_plan(config, worker_addresses(config.job), cards)


def hosts(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {name: place.hosts for name, place in plan.places.items()}


def test_gpus_go_to_those_that_need_them_and_each_to_one() -> None:
    plan = planned([card(0), card(1, gpus=4), card(2, gpus=4)], **GPU_RECIPE)
    where = hosts(plan)
    assert where["rollouts0"] == where["rollouts1"] == (0,)
    [home] = where["trainer"]
    assert where["buffer"] == (home,)
    assert where["generator0"] == where["generator1"] == (3 - home,)
    taken = [gpu for place in plan.places.values() for each in place.gpus for gpu in each]
    assert len(taken) == len(set(taken)) == 8


def test_roles_that_share_gpus_have_the_same_ones() -> None:
    places = planned([card(0, gpus=4)], {"share_gpus": True}, **GPU_RECIPE).places
    assert places["generator0"].gpus[0] + places["generator1"].gpus[0] == places["trainer"].gpus[0]
    with pytest.raises(UsageError, match="no host has room for generator1: it needs 2 GPUs"):
        planned([card(0, gpus=3)], {"share_gpus": True}, **{**GPU_RECIPE, "trainer": {}})


def test_roles_stay_where_the_recipe_wants_them_and_take_turns_there() -> None:
    wish = {"place": {"generator": [1, 2], "trainer": [0], "rollouts": [2]}}
    where = hosts(planned([card(0), card(1), card(2)], wish, generator={"num_replicas": 4}))
    assert where["trainer"] == (0,)
    assert where["rollouts0"] == (2,)
    assert sorted(where[f"generator{number}"] for number in range(4)) == [(1,), (1,), (2,), (2,)]


def test_an_actor_is_spread_over_hosts() -> None:
    cards = [card(0), card(1, gpus=2), card(2, gpus=2)]
    plan = planned(cards, trainer={"procs": 4, "hosts": 2, "with_gpus": True})
    assert plan.places["trainer"].hosts == (1, 2)
    assert plan.places["trainer"].gpus == (("GPU-1-0", "GPU-1-1"), ("GPU-2-0", "GPU-2-1"))


def test_no_room_is_said_with_figures() -> None:
    with pytest.raises(UsageError, match=r"trainer: it needs 4 GPUs and .* GiB.*node1\), 2 GPUs and 64.0 GiB"):
        planned([card(0), card(1, gpus=2)], trainer={"procs": 4, "with_gpus": True})
    with pytest.raises(
        UsageError, match=r"no host has room for generator1: .* on 0 .*, 0 GPUs and 1\.. GiB \(used by trainer, g"
    ):
        planned([card(0, memory_gb=4.5)], generator={"num_replicas": 2})
    with pytest.raises(UsageError, match="trainer is placed on worker 3, but there are 2"):
        planned([card(0), card(1)], {"place": {"trainer": [3]}})


@pytest.mark.parametrize(("on_loss", "found"), [("place", (1,)), ("wait", None)])
def test_what_was_on_a_lost_host_goes_elsewhere_or_waits(on_loss: str, found: tuple[int, ...] | None) -> None:
    cards = [card(0), card(1)]
    plan = planned(cards, {"on_loss": on_loss})
    trainer = next(unit for unit in units(recipe(cards)) if unit.role == "trainer")
    assert plan.places["trainer"].hosts == (0,)
    place = plan.replace(trainer, {1})
    assert (place and place.hosts) == found


def test_without_room_elsewhere_it_waits_even_if_it_may_move() -> None:
    cards = [card(0, gpus=1), card(1)]
    plan = planned(cards, trainer={"with_gpus": True})
    [trainer] = [unit for unit in units(recipe(cards, trainer={"with_gpus": True})) if unit.role == "trainer"]
    assert plan.replace(trainer, {1}) is None
    assert plan.places["trainer"].hosts == (0,)


def test_kinds_of_job_differ_in_where_addresses_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(kind: str, **more: Any) -> list[str]:
        config = RunConfig.model_validate({"environment": {"name": "x"}, "job": {"kind": kind, **more}})
        return [str(address) for address in worker_addresses(config.job)]

    assert found("local") == []
    with pytest.raises(UsageError, match=r"SLURM_JOB_NODELIST is not set .*`forge-env job FILE --write`"):
        found("slurm")
    monkeypatch.setenv("SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2\n")
    assert found("skypilot") == ["tcp://10.0.0.1:26700", "tcp://10.0.0.2:26700"]
    monkeypatch.setenv("FORGE_ENV_WORKERS", "forge-0.forge, forge-1.forge")
    assert found("kubernetes", port=7) == ["tcp://forge-0.forge:7", "tcp://forge-1.forge:7"]


def test_the_controller_listens_where_its_way_to_the_workers_begins() -> None:
    config = recipe([card(0)])
    assert own_address(config.job, [Address.of("tcp://127.0.0.7:1")]) == "127.0.0.1"
    with pytest.raises(ForgeError, match=r"tcp://no-such-host.invalid:1 can't be reached"):
        own_address(config.job, [Address.of("tcp://no-such-host.invalid:1")])
    assert own_address(recipe([card(0)], {"address": "10.1.1.1"}).job, []) == "10.1.1.1"


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"kind": "hosts"}, "needs job.workers"),
        ({"workers": ["tcp://a:1"]}, "set job.kind to hosts"),
        ({"kind": "hosts", "workers": ["a:1"]}, "write tcp://HOST:PORT"),
        ({"kind": "hosts", "workers": ["tcp://a:1", "tls://b:1"]}, "for all of them, or tls://"),
        ({"kind": "hosts", "workers": ["tcp://a:1", "tcp://a:1"]}, "occurs twice"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(job: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate({"environment": {"name": "x"}, "job": job})


def test_processes_are_spread_evenly_over_several_hosts_only() -> None:
    with pytest.raises(ValueError, match=r"trainer.hosts=2 needs several hosts"):
        RunConfig.model_validate({"environment": {"name": "x"}, "trainer": {"procs": 2, "hosts": 2}})
    with pytest.raises(ValueError, match=r"generator.procs=3 can't be spread evenly"):
        recipe([card(0)], generator={"procs": 3, "hosts": 2})
