"""Over how many samples a score is, what is left out of it, and that it is the same wherever it is shown."""

from __future__ import annotations

import json
import sys
from html import unescape
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from forge_env.cli.main import main
from forge_env.endpoint.answers import read_answer
from forge_env.errors import GeneratorError, InfrastructureError, UsageError
from forge_env.evaluation.comparison import compare_folders
from forge_env.evaluation.estimates import Times, bounds, compare
from forge_env.evaluation.rescoring import rescore
from forge_env.evaluation.tables import figure, headline, interval
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.view.app import Pages
from forge_env.view.runs import Runs
from tests.forge_env.endpoint.test_opponents import Wishes
from tests.forge_env.evaluation.toys import Broken, Sums, answer_even

ROWS = [{"question": f"{index} + 1 = ?", "answer": str(index + 1)} for index in range(10)]


def raises_from(first: int) -> Any:
    """An agent that solves the tasks below a number, and crashes on the others."""

    def agent(messages: list[fe.Message], tools: Any) -> str:
        number = int(messages[-1].content.split()[0])
        if number >= first:
            raise KeyError(messages[-1].content)
        return str(number + 1)

    return agent


class Class(Policy, PolicySession):
    """An agent that is a class with a mistake."""

    def session(self, tools: Any, *, seed: int | None = None) -> Any:
        return self

    async def reply(self, observation: Any) -> Reply:
        return Reply(message=observation["last"])


class Unopened(Policy):
    """An agent whose session can't be opened."""

    def session(self, tools: Any, *, seed: int | None = None) -> Any:
        raise ValueError("no weights")


def leaves(messages: Any, tools: Any) -> str:
    sys.exit(3)


async def later(messages: Any, tools: Any) -> str:
    return str(messages["no such key"])


def wants_an_environment(env: Any) -> str:
    return "x"


def returns_nothing(messages: Any, tools: Any) -> None:
    """Forgets its answer."""


AGENTS = [Class(), Unopened(), leaves, later, wants_an_environment, raises_from(0), returns_nothing]


@pytest.mark.parametrize("agent", AGENTS)
def test_whatever_an_agents_own_code_raises_scores_0_with_its_place(agent: Any, tmp_path: Path) -> None:
    result = fe.evaluate(Sums, agent, num_tasks=3, out=tmp_path / "out")
    item = result.summary.environments["Sums"]
    assert (item.samples, item.crashed, item.score.value, item.invalid) == (3, 3, 0.0, {})
    assert "test_denominators.py:" in (item.first_crash or "")
    assert result.summary.status == "complete"
    assert (fe.evaluate(Sums, agent, num_tasks=3, out=tmp_path / "out", resume=True).samples) == result.samples


def test_a_crash_on_most_tasks_is_no_perfect_score_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    result = fe.evaluate(Sums, raises_from(4), out=tmp_path / "out")
    item = result.summary.environments["Sums"]
    assert figure(item.score).startswith("0.333")
    assert "agent crashed on 8 (scored 0)" in caplog.text, "the return value is not the only word"
    assert main(["show", str(tmp_path / "out")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "8 agent crashed" in shown
    assert "[agent, " in shown
    assert "agent crashed on 8 (scored 0)" in (tmp_path / "out" / "report.md").read_text()


def test_a_metric_counts_0_for_a_crash_too(tmp_path: Path) -> None:
    result = fe.evaluate(Sums, raises_from(6), score="exact_match", out=tmp_path / "out")
    assert result.summary.environments["Sums"].score.value == 0.5


async def test_a_crash_is_one_when_its_transcript_is_scored_again(tmp_path: Path) -> None:
    first = await fe.evaluate_async(Sums, raises_from(6), out=tmp_path / "out")
    again = (await rescore(tmp_path / "out", tmp_path / "again")).result
    one, two = (result.summary.environments["Sums"] for result in (first, again))
    assert (two.crashed, two.score, two.first_crash) == (one.crashed, one.score, one.first_crash)


def test_an_opponents_crash_is_not_the_agents(tmp_path: Path) -> None:
    result = fe.evaluate(
        Wishes, answer_even, num_tasks=2, opponents={"user": f"{__name__}:leaves"}, out=tmp_path / "out"
    )
    item = result.summary.environments["Wishes"]
    assert (item.samples, item.crashed, item.bugs, item.invalid) == (0, 0, 2, {})


@pytest.mark.parametrize("kind", [InfrastructureError, UsageError, fe.SandboxError, GeneratorError, fe.ForgeError])
def test_errors_of_forge_env_that_an_agent_raises_are_its_crashes(kind: type[fe.ForgeError], tmp_path: Path) -> None:
    def agent(messages: list[fe.Message], tools: Any) -> str:
        raise kind("mine")

    item = fe.evaluate(Sums, agent, num_tasks=2, out=tmp_path / "out").summary.environments["Sums"]
    assert (item.samples, item.crashed, item.invalid) == (2, 2, {})


def test_a_call_of_forge_env_that_an_agent_makes_wrongly_is_its_crash(tmp_path: Path) -> None:
    def agent(messages: list[fe.Message], tools: Any) -> str:
        return str(fe.load_tasks("nothing.jsonl"))

    item = fe.evaluate(Sums, agent, num_tasks=2, out=tmp_path / "out").summary.environments["Sums"]
    assert (item.crashed, item.invalid) == (2, {})
    assert "there is no file nothing.jsonl" in (item.first_crash or "")


def lost_on(*numbers: int) -> Any:
    def agent(messages: list[fe.Message], tools: Any) -> str:
        if int(messages[-1].content.split()[0]) in numbers:
            read_answer({"error": "it is gone"})  # forge-env raises what an endpoint reports
        return answer_even(messages, tools)

    return agent


def test_a_score_over_fewer_samples_says_so_first_with_its_bounds(tmp_path: Path) -> None:
    result = fe.evaluate(Sums, lost_on(0, 1, 2), sample_retries=0, out=tmp_path / "out")
    item = result.summary.environments["Sums"]
    assert (item.planned, item.samples, item.bounds) == (12, 9, (4 / 12, 7 / 12))
    first = str(result).splitlines()[0]
    assert "over 9 of 12 samples; 3 lost (3 EndpointFailureError); " in first
    assert first.endswith("0.333 to 0.583")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["environments"]["Sums"]["bounds"] == [
        pytest.approx(4 / 12),
        pytest.approx(7 / 12),
    ]


def test_bugs_of_the_environment_are_within_the_bounds(tmp_path: Path) -> None:
    item = fe.evaluate(Broken, "gold", out=tmp_path / "out").summary.environments["Broken"]
    assert item.bounds == (11 / 12, 1.0)
    assert "1 failed by environment bugs" in headline(item, "reward")


@given(
    st.lists(st.floats(-5, 5), max_size=20),
    st.integers(1, 20),
    st.floats(0.1, 10),
    st.lists(st.floats(0, 1), min_size=20),
)
def test_bounds_cover_every_score(scores: list[float], unscored: int, highest: float, shares: list[float]) -> None:
    found = bounds(scores, unscored, highest=highest)
    whole = [*scores, *(share * highest for share in shares[:unscored])]
    assert found[0] - 1e-9 <= sum(whole) / len(whole) <= found[1] + 1e-9
    assert bounds(scores, 0) is None


def test_more_than_there_is_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["eval", "tests.forge_env.evaluation.toys:Sums", "--model", "gold", "-n", "50", "--out", out]) == 0
    said = capsys.readouterr()
    assert "50 samples of Sums (eval) were requested, 12 are available" in said.err
    assert said.out.splitlines()[0].endswith("over 12 samples; 50 requested, 12 available")
    item = fe.evaluate(Sums, "gold", num_tasks=5, epochs=2, out=tmp_path / "b").summary.environments["Sums"]
    assert (item.asked, item.planned) == (10, 10)


@pytest.mark.parametrize("split", [None, "train", "eval"])
def test_a_file_without_splits_is_wholly_what_is_asked_for(split: str | None, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))

    class Rows(fe.SingleTurnEnvironment):
        reward = fe.rewards.exact_match

        def tasks(self, split: str) -> Any:
            return fe.load_tasks(fe.DatasetConfig(path=str(path), columns={"prompt": "question"}), split)

    for n, played in ((None, 10), (5, 5), (10, 10)):
        result = fe.evaluate(Rows, answer_even, num_tasks=n, split=split, out=tmp_path / f"out-{n}")
        item = result.summary.environments["Rows"]
        assert (item.asked, item.samples) == (played, played)


def test_training_on_a_source_that_is_also_held_out_is_refused(tmp_path: Path) -> None:
    from forge_env.config.recipe import RunConfig
    from trainers.loop.checks import check_environment

    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(json.dumps({"question": f"{index} + 1?", "answer": f"#### {index + 1}"}) for index in range(40))
    )
    dataset = {"path": str(path), "columns": {"prompt": "question"}}

    def check(**more: Any) -> None:
        options = {"dataset": {**dataset, **more}}
        model = {"path": "Qwen/Qwen3-0.6B"}
        check_environment(
            RunConfig.model_validate(
                {"environment": {"name": "gsm8k", "options": options}, "model": model, "warmup": None}
            )
        )

    with pytest.raises(UsageError, match=r"has the training data, .*eval_fraction=0\.1"):
        check()
    check(eval_fraction=0.2)


async def test_terminal_and_page_show_the_same_figures(tmp_path: Path) -> None:
    """Scores of many values, in an order of tasks that differs between the two."""

    class Partly(fe.SingleTurnEnvironment):
        max_reward = 3.0

        def task(self, split: str, index: int) -> fe.Task:
            return fe.Task(id=f"{(index * 7) % 23}-{index}", prompt=str(index), split=split, gold="x")

        def num_tasks(self, split: str) -> int:
            return 23

        def reward(self, prompt: str) -> float:
            return (int(prompt) ** 2 % 17) / 5.7

    root = tmp_path / "runs" / "one"
    result = await fe.evaluate_async(Partly, "gold", epochs=2, confidence=0.9, out=root)
    score = result.summary.environments["Partly"].score
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(Pages(Runs(root.parent, cache=tmp_path / "cache")).application()),
        base_url="http://x",
    ) as client:
        page = unescape((await client.get("/run/one")).text)
    assert f"90 % interval {interval(score)}, over 23 tasks and 46 samples" in page
    assert f'{score.value:.3f} <span class="soft">± {score.stderr:.3f}' in page


@given(st.floats(0.001, 100), st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_a_time_account_adds_up(wall: float, shares: list[float]) -> None:
    scale = max(1.0, sum(shares))
    times = Times(wall, *(wall * share / scale for share in shares), waited=0.0)
    assert sum(times.parts.values()) == pytest.approx(wall)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=18))
def test_a_verdict_goes_by_p_and_its_interval_agrees(pairs: list[tuple[float, float]]) -> None:
    a, b = ({str(place): [pair[side]] for place, pair in enumerate(pairs)} for side in (0, 1))
    found = compare(a, b)
    leaves_out_0 = found.difference.low > 0 or found.difference.high < 0
    assert (found.verdict != "noise") == (found.p_value < 0.05) == leaves_out_0
    assert found.difference.low - 1e-9 <= found.difference.value <= found.difference.high + 1e-9


def test_three_tasks_are_never_enough_to_be_worse(tmp_path: Path) -> None:
    a, b = ({str(task): [score] for task in range(3)} for score in (1.0, 0.0))
    found = compare(a, b)
    assert (found.p_value, found.verdict, found.difference.low, found.difference.high) == (0.25, "noise", -1.0, 1.0)
    for name, agent in (("a", "gold"), ("b", answer_even)):
        fe.evaluate(Sums, agent, out=tmp_path / name)
    one = compare_folders(tmp_path / "a", tmp_path / "b").environments["Sums"]
    assert (one.verdict, one.p_value) == ("worse", pytest.approx(2 / 2**6))
