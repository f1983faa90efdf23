"""Evaluating from Python: figures, limits, failures, resuming, folders."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.config.evaluation import EvaluationConfig
from forge_env.errors import ConfigError, UsageError
from forge_env.evaluation.comparison import compare_folders
from forge_env.evaluation.estimates import Estimate
from forge_env.evaluation.evaluation import Evaluation
from forge_env.evaluation.rescoring import rescore
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.rollout.scripted import FunctionPolicy
from forge_env.trajectory import Trajectory, TrajectoryWriter, read_trajectories
from tests.forge_env.endpoint.server import Server, completion, http
from tests.forge_env.evaluation.toys import Broken, Counted, Dying, Sums, Unlucky, answer_even, model_answer
from tests.forge_env.test_files import Disk

PRICES = "Counted: {input: 1.0, output: 10.0}\nm: {input: 1.0, output: 10.0, cached_input: 0.1}\n"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results"


def scores(result: fe.EvaluationResult) -> dict[str, float]:
    return {sample.id: sample.score for sample in result.samples}


def test_gold_scores_full_marks_and_random_does_not(out: Path) -> None:
    gold = fe.evaluate(Sums, "gold", out=out)
    summary = gold.summary.environments["Sums"]
    assert (gold.summary.status, summary.samples, summary.tasks) == ("complete", 12, 12)
    assert summary.score == Estimate(1.0, 0.0, 1.0, 1.0)
    assert fe.evaluate(Sums, "random", out=out.with_name("random")).summary.environments["Sums"].score.value < 0.5


def test_figures_by_epoch_difficulty_and_tag(out: Path) -> None:
    result = fe.evaluate(Sums, f"{answer_even.__module__}:answer_even", epochs=3, num_tasks=9, out=out)
    item = result.summary.environments["Sums"]
    assert (item.samples, item.tasks, item.score.value) == (27, 9, pytest.approx(5 / 9))
    assert item.pass_at.keys() == {1, 2, 3}
    assert item.pass_at[3].value == item.pass_all[3].value == pytest.approx(5 / 9)
    assert {name: (group.samples, group.score.value) for name, group in item.by_difficulty.items()} == {
        "1": (15, 1.0),
        "2": (12, 0.0),
    }
    assert item.by_tag["all"].tasks == 9
    assert item.by_tag["mod0"].score.value == pytest.approx(2 / 3)
    assert len(set(scores(result))) == 27


def test_the_folder_holds_config_transcripts_summary_and_report(out: Path) -> None:
    result = fe.evaluate(Sums, "gold", num_tasks=3, out=out)
    assert json.loads((out / "summary.json").read_text()) == json.loads(json.dumps(result.summary.to_dict()))
    assert "| Sums (eval) | 3 | 3 | 1.000" in (out / "report.md").read_text()
    stored = list(read_trajectories(out / "trajectories" / "eval.jsonl"))
    assert sorted(trajectory.id for trajectory in stored) == sorted(sample.id for sample in result.samples)
    assert [trajectory.turns[0].message.content for trajectory in result.trajectories()] == ["1", "2", "3"]
    assert sorted(path.name for path in out.rglob("*") if path.is_file()) == [
        "config.yaml",
        "eval.index.jsonl",
        "eval.jsonl",
        "report.md",
        "summary.json",
    ]


@pytest.mark.slow  # importing pandas takes seconds
def test_a_frame_has_a_row_for_every_sample(out: Path) -> None:
    pytest.importorskip("pandas")
    frame = fe.evaluate(Sums, "gold", num_tasks=3, out=out).to_frame()
    assert list(frame["score"]) == [1.0, 1.0, 1.0]
    assert "metrics.exact_match" in frame.columns


async def test_it_can_be_called_where_a_loop_runs(out: Path) -> None:
    result = fe.evaluate(Sums, "gold", num_tasks=2, out=out)
    again = await fe.evaluate_async(Sums, "gold", num_tasks=2, out=out.with_name("again"))
    assert scores(result) == scores(again)


def test_several_environments_and_another_score(out: Path) -> None:
    choices = [
        {"name": "tests.forge_env.evaluation.toys:Sums", "label": label, "num_tasks": n}
        for label, n in (("a", 2), ("b", 4))
    ]
    result = fe.evaluate(choices, "gold", score="turns", success=1.0, out=out)
    assert {label: item.samples for label, item in result.summary.environments.items()} == {"a": 2, "b": 4}
    assert result.summary.score_name == "turns"
    with pytest.raises(UsageError, match="no metric 'elegance'"):
        fe.evaluate(choices, "gold", score="elegance", out=out.with_name("other"))


class Graded(Sums):
    """Tells metrics of its own at the end of an episode."""

    async def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = await super().step(action)
        return observation, reward, terminated, truncated, {**info, "metrics": {"grade": 1.0}}


def test_a_score_that_is_none_is_named_before_a_sample_where_that_can_be_known(out: Path) -> None:
    choices = [
        {"name": f"{__name__}:Graded", "num_tasks": 4},
        {"name": "tests.forge_env.evaluation.toys:Sums", "num_tasks": 4},
    ]
    with pytest.raises(UsageError, match="Sums has no metric 'grade'") as refused:
        fe.evaluate(choices, "gold", score="grade", out=out)
    assert refused.value.fix == "its metrics: exact_match, turns, tool_calls, tool_errors"
    assert not out.exists()
    with pytest.raises(UsageError, match="Graded has no metric 'elegance'") as refused:
        fe.evaluate(choices[0], "gold", score="elegance", out=out, max_samples=1)
    assert refused.value.fix == "its metrics: grade"
    assert len((out / "trajectories" / "eval.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("limit", "name", "policy"),
    [
        ({"turn_limit": 2}, "turns", Counted(5)),
        ({"token_limit": 150}, "tokens", Counted(5)),
        ({"tool_call_limit": 1}, "tool_calls", Counted(5, calls=2)),
        ({"cost_limit": 0.003}, "cost", Counted(5)),
        ({"time_limit": 0.05}, "time", FunctionPolicy(lambda messages, tools: asyncio.Event().wait())),
        ({"working_limit": 0.05}, "working_time", FunctionPolicy(lambda messages, tools: asyncio.Event().wait())),
    ],
)
def test_limits_truncate_and_are_counted_apart(limit: Any, name: str, policy: Any, out: Path) -> None:
    prices = out.with_name("prices.yaml")
    prices.write_text(PRICES)
    result = fe.evaluate(
        Sums, policy, num_tasks=2, out=out, **({"prices": prices} if "cost_limit" in limit else {}), **limit
    )
    item = result.summary.environments["Sums"]
    assert (item.truncated, item.samples, item.invalid) == ({name: 2}, 2, {})
    assert item.untruncated is None


def test_the_budget_stops_the_run_and_more_continues_it(out: Path) -> None:
    prices = out.with_name("prices.yaml")
    prices.write_text(PRICES)  # a reply costs 0.002, a sample of two 0.004
    settings: dict[str, Any] = {"prices": prices, "out": out, "max_samples": 1}
    first = fe.evaluate(Sums, Counted(2), budget=0.009, **settings)
    assert "budget" in str(first.error)
    assert first.summary.status == "incomplete"
    assert first.summary.environments["Sums"].samples == 2
    assert first.summary.environments["Sums"].score == Estimate(1.0, 0.0, 1.0, 1.0)
    second = fe.evaluate(Sums, Counted(2), budget=1.0, resume=True, **settings)
    assert (second.summary.status, second.error) == ("complete", None)
    assert second.summary.cost == pytest.approx(first.summary.cost + 10 * 0.004)


def test_lost_samples_are_no_zeros_and_are_played_again(out: Path) -> None:
    first = fe.evaluate(Unlucky, "gold", out=out, sample_retries=0)
    item = first.summary.environments["Unlucky"]
    assert (item.samples, item.invalid, item.score.value) == (6, {"SandboxError": 6}, 1.0)
    assert first.summary.status == "lossy"
    before = [trajectory.id for trajectory in read_trajectories(out / "trajectories" / "eval.jsonl")]
    fe.evaluate(Unlucky, "gold", out=out, sample_retries=0, resume=True)
    after = [trajectory.id for trajectory in read_trajectories(out / "trajectories" / "eval.jsonl")]
    assert sorted(after[len(before) :]) == sorted(f"Unlucky/eval/{index}/0" for index in range(1, 12, 2))


def test_a_bug_of_the_environment_costs_only_its_own_sample(out: Path) -> None:
    result = fe.evaluate(Broken, "gold", out=out)
    item = result.summary.environments["Broken"]
    assert (item.samples, item.bugs, item.invalid) == (11, 1, {})
    (bad,) = [sample for sample in result.samples if not sample.valid]
    assert "no such picture" in (bad.error or "")
    assert "no such picture" in (out / "run.log").read_text()


def test_a_function_plays_and_what_cannot_play_is_named_before_anything_starts(out: Path) -> None:
    result = fe.evaluate(Sums, answer_even, out=out)
    assert (result.summary.status, result.summary.model) == ("complete", "tests.forge_env.evaluation.toys:answer_even")
    assert result.summary.environments["Sums"].score.value == 0.5
    local = fe.evaluate(Sums, lambda messages, tools: "1", out=out.with_name("local"))
    assert (local.summary.status, local.summary.model) == ("complete", "<lambda>")

    class Named(Counted):
        def name(self) -> str:
            return "x"

    assert fe.evaluate(Sums, Named(), out=out.with_name("named")).summary.model == "Named"
    nothing = out.with_name("nothing")
    for wrong, message in [(Counted, "Counted is a class"), (3, "'3' is not a model"), (None, "'None' is not a model")]:
        with pytest.raises(UsageError, match=message):
            fe.evaluate(Sums, wrong, out=nothing)
    assert not nothing.exists()


def test_what_cannot_be_recorded_costs_only_its_own_sample(out: Path) -> None:
    class Telling(Policy, PolicySession):
        def session(self, tools: Any, *, seed: int | None = None) -> Any:
            return self

        async def reply(self, observation: Any) -> Reply:
            known: Any = object() if observation[-1].content.startswith("3") else 1
            return Reply(message=fe.Message(role="assistant", content="1"), metadata={"known": known})

    result = fe.evaluate(Sums, Telling(), out=out)
    item = result.summary.environments["Sums"]
    assert (item.samples, item.invalid) == (11, {"TypeError": 1})
    assert len(list(read_trajectories(out / "trajectories" / "eval.jsonl"))) == 12


def test_a_reset_without_end_is_lost(out: Path) -> None:
    class Endless(Sums):
        async def setup(self, task: fe.Task) -> None:
            await asyncio.Event().wait()

    result = fe.evaluate(Endless, "gold", out=out, num_tasks=2, time_limit=0.05, sample_retries=0)
    assert result.summary.environments["Endless"].invalid == {"InfrastructureError": 2}
    assert "reset did not end within 0.05 s" in (result.samples[0].error or "")


def test_a_dying_endpoint_ends_the_run_early(out: Path) -> None:
    policy = Dying(lives=3)
    result = fe.evaluate(Sums, policy, out=out, sample_retries=0, max_failures=4, max_samples=1)
    assert "last 4 samples were all lost" in str(result.error)
    item = result.summary.environments["Sums"]
    assert (item.samples, item.invalid, item.missing) == (3, {"EndpointFailureError": 4}, 5)
    assert item.score.value == 1.0
    resumed = fe.evaluate(Sums, Dying(lives=100), out=out, resume=True)
    assert (resumed.summary.status, resumed.summary.environments["Sums"].samples) == ("complete", 12)


async def test_a_refused_key_ends_the_run_at_once(out: Path) -> None:
    async with Server(lambda request, n: http({"error": {"message": "bad key"}}, 401)) as server:
        result = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, max_samples=2)
    assert "rejects every request" in str(result.error)
    assert "OPENAI_API_KEY" in (result.error.fix or "")
    assert len(server.requests) <= 4


async def test_the_address_is_recorded_wherever_it_came_from(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: dict[str, Any], n: int) -> Any:
        return http({"error": {"message": "bad key"}}, 401)

    async with Server(refuse) as server:
        address = server.url
        monkeypatch.setenv("OPENAI_BASE_URL", address)
        await fe.evaluate_async(Sums, "m", out=out)
        assert f"base_url: {address}" in (out / "config.yaml").read_text()
        monkeypatch.delenv("OPENAI_BASE_URL")
        asked = len(server.requests)
        again = await fe.evaluate_async(Sums, "m", out=out, resume=True)
        assert "rejects every request" in str(again.error)
        assert len(server.requests) > asked
    assert f"base_url: {address}" in (out / "config.yaml").read_text()
    fe.evaluate(Sums, "gold", out=out.with_name("gold"))
    assert "base_url" not in (out.with_name("gold") / "config.yaml").read_text()


async def test_an_endpoint_end_to_end_with_usage_and_cost(out: Path) -> None:
    prices = out.with_name("prices.yaml")
    prices.write_text(PRICES)

    def behave(request: dict[str, Any], n: int) -> Any:
        answer = completion(model_answer(request["messages"][-1]["content"], request["seed"]))
        answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 4}
        return http({}, 503) if n % 5 == 1 else answer

    async with Server(behave) as server:
        result = await fe.evaluate_async(
            Sums, "m", base_url=server.url, out=out, epochs=2, prices=prices, send_seed=True, first_delay_s=0.0
        )
    item = result.summary.environments["Sums"]
    assert (item.samples, item.invalid, item.requests) == (24, {}, 24)
    assert result.summary.request_errors == {"EndpointOverloadedError": len(server.requests) - 24}
    assert (item.prompt_tokens, item.completion_tokens, item.cached_tokens) == (240, 120, 96)
    assert item.cost == pytest.approx((144 * 1.0 + 96 * 0.1 + 120 * 10.0) / 1e6)
    assert 0 < item.score.value < 1


async def test_stopping_lets_samples_finish_and_resuming_completes(out: Path) -> None:
    evaluation = Evaluation(
        EvaluationConfig.model_validate(
            {"environments": "tests.forge_env.evaluation.toys:Sums", "model": "x", "out": out, "max_samples": 2}
        ),
        policy=FunctionPolicy(lambda messages, tools: evaluation.stop() or answer_even(messages, tools)),
    )
    result = await evaluation.run()
    assert result.summary.status == "incomplete"
    assert 1 <= len(result.samples) <= 2
    assert all(sample.valid for sample in result.samples)


async def test_cancelling_keeps_what_is_finished(out: Path) -> None:
    reached = asyncio.Event()

    async def stick(messages: Any, tools: Any) -> str:
        if messages[-1].content.startswith("3"):
            reached.set()
            await asyncio.Event().wait()
        return answer_even(messages, tools)

    running = asyncio.create_task(fe.evaluate_async(Sums, FunctionPolicy(stick), out=out, max_samples=1))
    await reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert json.loads((out / "summary.json").read_text())["environments"]["Sums"]["samples"] == 3


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_torn_last_line_is_played_again(cut: int, out: Path) -> None:
    whole = fe.evaluate(Sums, "gold", num_tasks=4, out=out)
    path = out / "trajectories" / "eval.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert scores(fe.evaluate(Sums, "gold", num_tasks=4, out=out, resume=True)) == scores(whole)
    assert len(list(read_trajectories(path))) == 4


def test_more_samples_can_be_added_and_nothing_else_changed(out: Path) -> None:
    fe.evaluate(Sums, "gold", num_tasks=3, out=out)
    grown = fe.evaluate(Sums, "gold", num_tasks=5, epochs=2, out=out, resume=True)
    assert len(grown.samples) == 10
    assert len((out / "trajectories" / "eval.jsonl").read_text().splitlines()) == 10
    with pytest.raises(UsageError, match="another seed"):
        fe.evaluate(Sums, "gold", num_tasks=5, seed=7, out=out, resume=True)
    with pytest.raises(UsageError, match="already contains an evaluation"):
        fe.evaluate(Sums, "gold", num_tasks=5, out=out)


def test_the_collector_is_left_as_it_was(out: Path) -> None:
    before, during = gc.get_threshold(), []

    def look(messages: Any, tools: Any) -> str:
        during.append(gc.get_threshold()[0])
        fe.evaluate(Sums, "gold", num_tasks=1, out=out.with_name(f"inner-{len(during)}"))
        during.append(gc.get_threshold()[0])
        return "1"

    fe.evaluate(Sums, FunctionPolicy(look), num_tasks=2, out=out, max_samples=1)
    assert gc.get_threshold() == before
    assert len(during) == 4
    assert min(during) > before[0]


def test_wrong_settings_are_named(out: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean temperature\?"):
        fe.evaluate(Sums, "gold", temprature=1, out=out)
    with pytest.raises(ConfigError, match="needs `prices`"):
        fe.evaluate(Sums, "gold", budget=1.0, out=out)
    value: Any
    for value in (None, 3):
        with pytest.raises(ConfigError, match=f"environments: {value} is not an environment"):
            fe.evaluate(value, "gold", out=out)
    with pytest.raises(UsageError, match="no split 'exam'"):
        fe.evaluate(Sums, "gold", split="exam", out=out)
    assert not out.exists()


def test_two_processes_cannot_share_a_folder(out: Path) -> None:
    def inside(messages: Any, tools: Any) -> str:
        with pytest.raises(UsageError, match="another process"):
            fe.evaluate(Sums, FunctionPolicy(inside), num_tasks=1, out=out, resume=True)
        return "1"

    fe.evaluate(Sums, FunctionPolicy(inside), num_tasks=1, out=out)


def test_scoring_again_and_comparing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fe.evaluate("tests.forge_env.evaluation.toys:Sums", f"{answer_even.__module__}:answer_even", epochs=2, out=out)
    same = asyncio.run(rescore(out, out.with_name("same")))
    assert (same.changed, same.diverged) == ([], [])
    monkeypatch.setattr(Sums, "rubric", fe.Rubric(lambda answer: float(answer == "no")))
    other = asyncio.run(rescore(out, out.with_name("other")))
    assert len(other.changed) == 24
    found = compare_folders(out, out.with_name("other"))
    difference = found.environments["Sums"]
    assert (difference.tasks, difference.better, difference.worse) == (12, 6, 6)


def test_rescoring_keeps_truncations_and_sees_other_tool_answers(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fe.evaluate("tests.forge_env.evaluation.toys:Sums", Counted(5), num_tasks=2, turn_limit=3, out=out)
    same = asyncio.run(rescore(out, out.with_name("same")))
    assert [sample.truncation for sample in same.result.samples] == ["turns", "turns"]
    assert same.diverged == []
    monkeypatch.setattr(Sums, "prompt", lambda self, task: [fe.Message(role="user", content="0 what?")])
    assert len(asyncio.run(rescore(out, out.with_name("other"))).diverged) == 2


class Moving(Sums):
    """An environment whose tasks can be exchanged, taken away, or made to fail."""

    version, count, broken = "a", 4, -1

    def task(self, split: str, index: int) -> fe.Task:
        if index == Moving.broken:
            raise KeyError("the row is missing")
        return super().task(split, index).model_copy(update={"id": f"{Moving.version if index else 'a'}-{index}"})

    def num_tasks(self, split: str) -> int | None:
        return Moving.count


@pytest.mark.parametrize(
    ("change", "reason", "left"),
    [
        ({"version": "b"}, "its task is now 'b-3' instead of 'a-3'", 1),
        ({"count": 3}, "no longer has this task", 3),
        ({"broken": 3}, "its task can't be created: Moving.task raised KeyError on task 'eval/3': 'the row", 3),
    ],
)
def test_scoring_again_names_what_can_no_longer_be_scored(
    change: dict[str, Any], reason: str, left: int, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{__name__}:Moving"
    fe.evaluate(name, "gold", out=out)
    for attribute, value in change.items():
        monkeypatch.setattr(Moving, attribute, value)
    again = asyncio.run(rescore(out, out.with_name("again")))
    assert reason in again.unscored["Moving/eval/3/0"]
    assert (len(again.unscored), again.result.summary.environments["Moving"].samples) == (4 - left, left)
    assert json.loads((out.with_name("again") / "rescored.json").read_text())["unscored"] == again.unscored
    monkeypatch.setattr(
        Moving, "task", lambda self, split, index: fe.Task(id=f"x{index}", prompt="1 + 1 = ?", gold="2")
    )
    with pytest.raises(UsageError, match=r"none of the 4 valid samples .* can be scored again"):
        asyncio.run(rescore(out, out.with_name("nothing")))


def test_transcripts_scored_again_cannot_be_resumed_with_the_model(out: Path) -> None:
    fe.evaluate("tests.forge_env.evaluation.toys:Sums", "gold", num_tasks=2, out=out)
    asyncio.run(rescore(out, out.with_name("again")))
    with pytest.raises(UsageError, match="rescored"):
        fe.evaluate(
            "tests.forge_env.evaluation.toys:Sums", "gold", num_tasks=5, out=out.with_name("again"), resume=True
        )


def test_an_interrupt_in_a_notebook_gives_up_the_evaluation(out: Path) -> None:
    """The caller's own loop runs, so the evaluation has a thread, which must not go on alone."""

    async def interrupt(messages: Any, tools: Any) -> str:
        if messages[-1].content.startswith("2"):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.Event().wait()
        return "1"

    async def cell() -> None:
        fe.evaluate(Sums, FunctionPolicy(interrupt), out=out, max_samples=1)

    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(cell())
    loop.close()
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.name == "forge-env-evaluate":
            thread.join()
    assert json.loads((out / "summary.json").read_text())["environments"]["Sums"]["samples"] == 2


@pytest.mark.parametrize("begun", [True, False])
def test_interrupt_as_a_notebooks_thread_starts(begun: bool, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come before `start` has returned: when the thread plays already, and when it has yet to begin."""
    playing, start, threads = threading.Event(), threading.Thread.start, []

    async def answer(messages: Any, tools: Any) -> str:
        playing.set()
        await asyncio.Event().wait()
        return ""

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != "forge-env-evaluate":
            start(thread)
            return
        threads.append(thread)
        if begun:
            start(thread)
            playing.wait()
        raise KeyboardInterrupt

    async def cell() -> None:
        fe.evaluate(Sums, FunctionPolicy(answer), out=out)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(cell())
    loop.close()
    (thread,) = threads
    if not begun:
        start(thread)  # it comes late, and finds that nobody wants it
    thread.join()
    assert (out / "summary.json").exists() == begun


def test_what_fails_behind_an_evaluation_in_a_notebook_is_shown(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's end is nobody's to raise: it is told as Python tells of threads."""
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    close = asyncio.Runner.close

    def broken(runner: asyncio.Runner) -> None:
        close(runner)
        raise RuntimeError("it does not close")

    async def cell() -> None:
        monkeypatch.setattr(asyncio.Runner, "close", broken)
        assert fe.evaluate(Sums, "gold", num_tasks=1, out=out).summary.environments["Sums"].samples == 1
        monkeypatch.undo()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(cell())
    loop.close()
    assert [str(each.exc_value) for each in told] == ["it does not close"]


def test_a_full_disk_tears_no_record_and_loses_none(tmp_path: Path) -> None:
    path, disk = tmp_path / "eval.jsonl", Disk(500)
    writer = TrajectoryWriter(path, reserve=1000, write=disk)
    reserve = path.with_name("eval.jsonl.reserve")
    assert reserve.exists()
    for number in range(5):
        writer.write(Trajectory(id=str(number), environment="e", task_id="t"))
    assert writer.full
    assert not reserve.exists()
    assert writer.held > 0
    assert len(list(read_trajectories(path))) == 5 - writer.held
    disk.room = 100_000
    assert writer.flush()
    writer.close()
    assert [trajectory.id for trajectory in read_trajectories(path)] == ["0", "1", "2", "3", "4"]


HALF = "cut \ud83d"


@pytest.mark.parametrize(
    "more", [{"id": HALF}, {"tags": [HALF]}, {"prompt": HALF}, {"gold": HALF}, {"data": {"x": HALF}}]
)
def test_a_task_with_half_a_surrogate_pair_is_recorded(more: dict[str, Any], tmp_path: Path) -> None:
    """As in a data set whose texts were cut in the middle of an emoji."""

    class Ask(fe.SingleTurnEnvironment):
        rubric = fe.Rubric(lambda answer: 1.0)

        def tasks(self, split: str) -> list[fe.Task]:
            return [fe.Task(**{"id": f"{split}-0", "prompt": "?", "split": split, **more})]

    result = fe.evaluate(Ask, lambda messages, tools: f"4 {HALF}", out=tmp_path)
    [episode] = result.trajectories()
    assert result.summary.environments["Ask"].samples == 1
    assert HALF not in (episode.task_id, *episode.tags)
    for path in tmp_path.rglob("*.*"):
        path.read_text(encoding="utf-8")
    again = fe.evaluate(Ask, lambda messages, tools: "5", out=tmp_path, resume=True)
    assert [episode.answer for episode in again.trajectories()] == [episode.answer], "it is played once"


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
@pytest.mark.parametrize("when", [3, 12])
def test_samples_of_a_lost_folder_are_saved_elsewhere(out: Path, how: str, when: int) -> None:
    played = 0

    def answer(messages: list[fe.Message], tools: list[fe.ToolSpec]) -> str:
        nonlocal played
        played += 1
        if played == when:
            if how == "renamed":
                out.rename(out.with_name("elsewhere"))
            else:
                shutil.rmtree(out)
            if how == "replaced":
                out.mkdir()
        return "1"

    result = fe.evaluate(Sums, answer, out=out, max_samples=1)
    rescued = out.with_name(f"{out.name}.rescued-1")
    assert result.folder == rescued
    assert str(result.error) == (
        f"{out} was removed, renamed or replaced while it was written to (all that could be saved is in {rescued})"
    )
    assert played == when
    stored = [*read_trajectories(rescued / "trajectories" / "eval.jsonl")]
    assert [trajectory.id for trajectory in stored] == [sample.id for sample in result.samples]
    assert len(stored) == when
    assert {path.name for path in rescued.iterdir()} >= {"config.yaml", "summary.json", "report.md", "run.log"}
    assert out.exists() == (how == "replaced")
    again = fe.evaluate(Sums, answer, out=rescued, resume=True)
    assert (again.error, len(again.samples)) == (None, 12)


def test_samples_of_other_tasks_are_not_mixed_on_resuming(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moving, "broken", -1)
    fe.evaluate(Moving, "gold", num_tasks=2, out=out)
    before = (out / "config.yaml").read_text()
    task = Moving.task

    def other(self: Moving, split: str, index: int) -> fe.Task:
        change = {"data": {"answer": "7"}} if index else {}
        return task(self, split, index).model_copy(update=change)

    monkeypatch.setattr(Moving, "task", other)
    with pytest.raises(UsageError, match=r"tasks of 1 finished samples have changed .*: Moving/eval/1/0") as refused:
        fe.evaluate(Moving, "gold", num_tasks=4, out=out, resume=True)
    assert "another --out" in (refused.value.fix or "")
    assert (out / "config.yaml").read_text() == before
    monkeypatch.setattr(Moving, "task", task)
    assert len(fe.evaluate(Moving, "gold", num_tasks=4, out=out, resume=True).samples) == 4
