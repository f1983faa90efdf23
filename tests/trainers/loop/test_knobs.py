"""Every key has a tested effect: each key of the recipe is changed once, and something observable has to change."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

from forge_env.cli import train
from forge_env.cli.command import Parser
from forge_env.config import RunConfig
from forge_env.config.reader import Override
from forge_env.config.recipe import ModelSection, TinyModel
from forge_env.errors import ConfigError
from forge_env.job.addresses import own_address, worker_addresses
from forge_env.job.card import Question, write_card
from forge_env.job.plan import make_plan, units
from forge_env.run import Run, RunFolder
from forge_env.run.launch import launch
from forge_env.run.metrics import open_loggers
from forge_env.run.outcome import RunOutcome
from forge_env.run.preflight import Ready
from trainers.loop.stack import prepare_controller

prepare_controller()

from tests.trainers.loop.dry_run import BASE, dry_run, make_config  # noqa: E402
from tests.trainers.loop.knob_observers import small_model, titan, vllm  # noqa: E402
from tests.trainers.loop.knobs import KNOBS, WARM, Change, leaves  # noqa: E402
from tests.trainers.loop.stand_ins import Events  # noqa: E402
from tests.trainers.titan.ranks import VOCABULARY, sequences  # noqa: E402
from trainers.losses.sft import SFTLoss  # noqa: E402
from trainers.titan.device import use_device  # noqa: E402
from trainers.titan.engine import TitanEngine  # noqa: E402
from trainers.titan.model import TitanModel  # noqa: E402

pytestmark = [pytest.mark.stack, pytest.mark.slow]
STEPS = 12


def weights(overrides: Mapping[str, Any], root: Path) -> Any:
    """What a trainer makes of the optimizer's section: weights after a few steps, passes and threads on the way."""
    config = make_config(overrides, root)
    phase: Any = config.trainer if config.lora else config.warmup or config.trainer
    device = use_device(with_gpus=False)
    engine = TitanEngine(
        TitanModel(root / "small", max_length=128, device=device.torch, lora=config.lora),
        phase.optimizer,
        device=device,
        steps=STEPS,
        microbatch_tokens=config.trainer.microbatch_tokens,
        threads=phase.threads,
    )
    passes: list[int] = []
    forward = engine.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        passes.append(threading.get_ident())
        return forward(*args, **kwargs)

    engine.forward = counted
    data = sequences(4)
    for _ in range(STEPS):
        engine.train(data, SFTLoss(), minibatches=config.trainer.minibatches)
    digest = blake2b(b"".join(tensor.numpy().tobytes() for tensor in engine.model.state_dict_hf().values()))
    return len(passes), threading.get_ident() in passes, digest.hexdigest()


def command(overrides: Mapping[str, Any], root: Path) -> Any:
    """What `forge-env train` would launch, and where."""
    seen: list[Any] = []

    def launch(config: RunConfig, folder: RunFolder, load_trainer: Callable[[], Any], **options: Any) -> RunOutcome:
        where = re.sub(r"\d", "0", str(folder.root.relative_to(root)))
        seen.append((where, load_trainer().__module__))
        return RunOutcome("success", 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("forge_env.run.preflight.check", lambda config, folder: Ready("none"))
        patch.setattr("forge_env.cli.train.tidy", lambda: None)
        patch.setattr("forge_env.run.launch.launch", launch)
        Path("recipe.yaml").write_text(json.dumps(BASE))
        given = [Override(key, json.dumps(value), False) for key, value in overrides.items()]
        parser = Parser(prog="forge-env train")
        train.add_arguments(parser)
        chosen = vars(parser.parse_args([])) | {"words": ["recipe.yaml"], "overrides": given, "debug": False}
        train.run(argparse.Namespace(**chosen))
    return seen


def wandb(overrides: Mapping[str, Any], root: Path) -> Any:
    """What Weights & Biases is told."""
    told: list[str] = []

    class Record(ModuleType):
        """Stands for the package, for its run, and for its settings."""

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: told.append(name) or self

    folder = RunFolder(root / "runs" / "wandb")
    folder.create()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", Record("wandb"))
        for logger in open_loggers(make_config(overrides, root), folder, lambda: 0.0):
            logger.log(1, {"reward/mean": 0.5})
            logger.close()
    folder.release()
    return told


def terminated(overrides: Mapping[str, Any], root: Path) -> Any:
    """How a run ends that is sent SIGTERM in a long step."""
    ended: list[str] = []

    async def train(run: Run) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await run.stop.wait()
        await asyncio.sleep(1.2)
        ended.append("the step")

    launch(make_config(overrides, root), RunFolder(root / "runs" / "terminated"), lambda: train)
    return ended


def placed(overrides: Mapping[str, Any], root: Path) -> Any:
    """Where everything is placed, and goes when the first host is lost."""
    config = make_config(overrides, root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKYPILOT_NODE_IPS", "127.0.0.4\n127.0.0.5")
        addresses = worker_addresses(config.job)
    if not addresses:
        return None
    plan = make_plan(config, addresses, [replace(write_card(Question()), free_memory_gb=99.0) for _ in addresses])
    places = dict(plan.places)
    moved = [plan.replace(unit, {1}) for unit in units(config)]
    return addresses, own_address(config.job, addresses), places, moved


OBSERVERS: dict[str, Callable[[Mapping[str, Any], Path], Any]] = {
    "run": dry_run,
    "weights": weights,
    "command": command,
    "wandb": wandb,
    "terminated": terminated,
    "placed": placed,
    "titan": titan,
    "vllm": vllm,
}
Look = Callable[[str, Mapping[str, Any]], Any]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a whole model for `model.path`, and a small one to train."""
    root = tmp_path_factory.mktemp("knobs")
    dry_run({}, root)
    [built] = (root / "cache" / "models").glob("tiny-*")
    TitanModel(built, max_length=160, device=use_device(with_gpus=False).torch).save_hf(root / "model")
    shape = TinyModel(layers=1, dim=64, heads=2, kv_heads=2, hidden_dim=96, vocab_size=VOCABULARY)
    small_model(root / "small", ModelSection(tiny=shape))
    yield root
    vllm.close()
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def look(root: Path) -> Look:
    """An observer's view of a recipe, kept for the other knobs that start from the same one."""
    seen: dict[str, Any] = {}

    def look(observer: str, overrides: Mapping[str, Any]) -> Any:
        key = f"{observer} {overrides}"
        if key not in seen:
            seen[key] = OBSERVERS[observer](overrides, root)
        return seen[key]

    return look


def refusal(seen: Any) -> str:
    """Why a recipe is refused before anything starts, or an empty string."""
    first = seen[0] if seen else None
    return first[2] if isinstance(first, tuple) and first[1:2] == ("refused",) else ""


def test_every_knob_is_turned() -> None:
    assert set(KNOBS) == set(leaves())


def test_equal_recipes_leave_equal_traces(root: Path) -> None:
    for overrides in ({}, WARM, {"grpo.max_off_policy_steps": 0}):
        assert dry_run(overrides, root) == dry_run(overrides, root)


def test_a_dry_run_is_a_run(root: Path) -> None:
    events: Events = dry_run({"checkpoint.every": 2, "evaluation.extra_splits": ["unseen"]}, root)
    calls = [what for _, what, _ in events]
    assert calls.count("trainer.begin_push") == calls.count("generator0.update_weights") == 5
    assert calls.count("trainer.begin_save") == calls.count("trainer.saved") == 3
    assert sum(what == "shutdown" for what in calls) == 4
    assert not {"failed", "refused"} & set(calls)


def test_generators_sleep_while_the_trainer_computes_and_only_then(root: Path) -> None:
    gpus = {"generator.with_gpus": True, "trainer.with_gpus": True, "job.share_gpus": True}
    calls = [what for _, what, _ in dry_run({"generator.sleep": True, **gpus}, root)]
    turns = ("generator0.sleep", "trainer.train_on", "trainer.release_memory", "generator0.wake")
    seen = [what for what in calls if what in turns]
    assert seen == list(turns) * 5
    assert calls.count("generator0.update_weights") == 5
    assert "generator0.sleep" not in [what for _, what, _ in dry_run(gpus, root)]


def test_a_warm_up_shows(look: Look) -> None:
    assert look("run", {}) != look("run", WARM)


@pytest.mark.parametrize("key", KNOBS)
def test_turning_it_shows(key: str, look: Look, root: Path) -> None:
    change: Change = KNOBS[key]
    value = change.value.format(root=root) if isinstance(change.value, str) else change.value
    for observer in change.where:
        before, after = look(observer, change.needs), look(observer, {**change.needs, key: value})
        assert not refusal(before)
        assert before != after, f"{key}={value} changes nothing that '{observer}' sees"
        assert bool(refusal(after)) == change.refused, refusal(after)
        if change.refused:
            assert key.rpartition(".")[2] in refusal(after)


def test_no_value_is_the_default() -> None:
    for key, change in KNOBS.items():
        try:
            changed, before = (
                make_config({**change.needs, key: change.value}, Path("/")),
                make_config(change.needs, Path("/")),
            )
        except ConfigError:
            assert change.refused
            continue
        assert changed != before, key
