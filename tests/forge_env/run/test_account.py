"""Time accounts, the timeline and the watchdog."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.config import load_config
from forge_env.config.recipe import WatchdogSection
from forge_env.errors import ForgeError
from forge_env.run import Run, RunFolder
from forge_env.run.account import Account, Accounts
from forge_env.run.timeline import Timeline


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.sampled_from(["train", "wait", "push"]), st.floats(0, 100), st.booleans()), max_size=30))
def test_the_parts_of_an_account_sum_to_its_time(changes: list[tuple[str, float, bool]]) -> None:
    clock = Clock()
    account = Account("trainer", "start", clock=clock)
    taken = 0.0
    for doing, seconds, take in changes:
        account.enter(doing)
        clock.now += seconds
        if take:
            taken += sum(account.take().values())
    assert sum(account.seconds().values()) == pytest.approx(clock.now - 100.0)
    assert taken + sum(account.take().values()) == pytest.approx(clock.now - 100.0)


def test_during_goes_back_to_what_was_done_before() -> None:
    clock, spans = Clock(), []
    account = Account("trainer", "wait", clock=clock, on_span=lambda *span: spans.append(span))
    clock.now += 1
    with account.during("save"):
        clock.now += 2
    clock.now += 3
    assert account.doing == "wait"
    assert account.seconds() == {"wait": 4.0, "save": 2.0}
    assert spans == [("trainer", "wait", 100.0, 101.0), ("trainer", "save", 101.0, 103.0)]


def test_accounts_of_many_sum_open_and_closed_ones() -> None:
    clock, accounts = Clock(), Accounts()
    a, b = Account("a", "reset", clock=clock), Account("b", "generate", clock=clock)
    accounts.open(a)
    accounts.open(b)
    clock.now += 2
    accounts.close(b)
    a.enter("generate")
    clock.now += 1
    assert [account.actor for account in accounts.open_accounts] == ["a"]
    assert accounts.take() == {"generate": 3.0, "reset": 2.0}
    clock.now += 5
    accounts.close(a)
    clock.now += 50
    assert accounts.open_accounts == []
    assert accounts.take() == {"generate": 5.0, "reset": 0.0}


def test_a_timeline_opens_also_when_its_process_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path, start=10.0)
    timeline.span("trainer", "train", 10.5, 11.0, step=3)
    timeline.overlapping("groups", "group 1", "group 1", 10.0, 12.0)
    timeline.counter("tokens/s", 11.0, sampled=5.0)
    killed = json.loads(path.read_text() + "]")
    timeline.close()
    events = json.loads(path.read_text())
    assert killed == events
    train = next(event for event in events if event["name"] == "train")
    assert (train["ph"], train["ts"], train["dur"], train["args"]) == ("X", 500_000.0, 500_000.0, {"step": 3})
    names = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert names["trainer"] == train["tid"]
    assert [event["ph"] for event in events if event.get("cat") == "groups"] == ["b", "e"]


def test_a_recipe_can_do_without_a_timeline(tmp_path: Path) -> None:
    run = Run(load_config("coding_rlvr", ["logging.timeline=false"]), RunFolder(tmp_path))
    assert run.timeline is None
    run.account("trainer", "train").enter("wait")
    run.close()
    assert not run.folder.timeline.exists()


class TestWatchdog:
    def make(self, run: Run, clock: Clock, end_s: float) -> object:
        watchdog = pytest.importorskip("trainers.loop.watchdog")
        run.config.watchdog = WatchdogSection(warn_s=60, end_s=end_s)
        return watchdog.Watchdog(run, lambda: "the trainer is in 'train'", clock=clock)

    async def test_warns_once_for_each_standstill_and_ends_the_run(self, tmp_path: Path) -> None:
        run, clock = Run(load_config("coding_rlvr"), RunFolder(tmp_path)), Clock()
        watchdog = self.make(run, clock, 300)
        for tokens in (1, 2, 2, 2, 3, 3, 3):
            await watchdog.look(tokens)
            clock.now += 50
        assert list(run.state.warnings) == ["no progress for 1m40s: the trainer is in 'train'"]
        assert list(run.state.warnings.values()) == [2]
        await watchdog.look(3)
        clock.now += 1e6  # somebody has stopped the whole run, and let it go on
        await watchdog.look(3)
        clock.now += 50
        await watchdog.look(3)
        clock.now += 50
        with pytest.raises(ForgeError, match=r"no progress for 5m10s: the trainer is in 'train'"):
            await watchdog.look(3)

    async def test_never_ends_a_run_that_wants_none(self, tmp_path: Path) -> None:
        run, clock = Run(load_config("coding_rlvr"), RunFolder(tmp_path)), Clock()
        watchdog = self.make(run, clock, 0)
        await watchdog.look(1)
        clock.now += 1e6
        await watchdog.look(1)


@given(ends=st.lists(st.floats(0, 1e5), min_size=2, max_size=20), start=st.floats(0, 1e6))
def test_spans_never_overlap(ends: list[float], start: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Perfetto drops those that do, be it by a nanosecond."""
    path = tmp_path_factory.mktemp("timeline") / "timeline.json"
    timeline, moments = Timeline(path, start), sorted(start + end for end in ends)
    for begun, ended in pairwise(moments):
        timeline.span("trainer", "train", begun, ended)
    timeline.close()
    spans = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    assert all(type(span["ts"]) is int and type(span["dur"]) is int and span["dur"] >= 0 for span in spans)
    assert all(one["ts"] + one["dur"] == two["ts"] for one, two in pairwise(spans))
