"""What other tools' own readers find in what `forge-env export` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_env.cli.main import main
from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, TrajectoryWriter, Turn
from forge_env.types import Message, call_tool

WHY = "NOT RUN: atif and inspect_ai are not installed (`make conformance` makes an environment for them)"
atif = pytest.importorskip("atif", reason=WHY)
log = pytest.importorskip("inspect_ai.log", reason=WHY)
USER, SYSTEM = Message(role="user", content="6 * 7?"), Message(role="system", content="Be brief.")
RESULT = Message(role="tool", content="42", tool_call_id="call-0", name="times")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three episodes: with exact tokens and two conversations, with a broken call and a lost one."""
    said = call_tool("times", a=6, b=7)
    first = Reply(said, [1, 2, 3], [4, 5], [-0.5, -0.25], [7, 7])
    second = Reply(Message(role="assistant", content="42", reasoning_content="six sevens"), [6], [8], [-1.0], [7])
    second.continues = 5
    again = Reply(Message(role="assistant", content="43"), [1, 2, 3], [9], [-2.0], [7], stop_reason="length")
    exact = Trajectory(
        "s-1",
        "sums",
        "t1",
        turns=[
            Turn([SYSTEM, USER], first, seat="c1"),
            Turn([RESULT], second, reward=1.0, seat="c1"),
            Turn([USER, said, RESULT], again, seat="c2"),
        ],
        final_observation=[Message(role="user", content="[the end]")],
        reward=1.0,
        answer="43",
        metrics={"right": 1.0},
        terminated=True,
        wall_s=2.0,
        waited_s=0.5,
    )
    broken = call_tool("times")
    broken.tool_calls[0].function.arguments = "{a: "
    plain = Reply(broken, metadata={"usage": {"prompt_tokens": 11, "completion_tokens": 3}})
    other = Trajectory("s-2", "sums", "t1", turns=[Turn([USER], plain)], truncated=True, truncation="turns")
    lost = Trajectory("s-3", "sums", "t2", valid=False, error="GeneratorError: gone")
    path = tmp_path / "eval.jsonl"
    with TrajectoryWriter(path) as writer:
        for trajectory in (exact, other, lost):
            writer.write(trajectory)
    return path


def test_atif_reads_its_documents(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "atif"
    assert main(["export", str(source), str(out), "--format", "atif", "--model-name", "small"]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["s-1.json", "s-2.json", "s-3.json"]
    read = {file.stem: atif.Trajectory.model_validate(json.loads(file.read_text())) for file in out.iterdir()}
    exact = read["s-1"]
    assert (exact.schema_version, exact.agent.model_name, exact.extra["reward"]) == ("ATIF-v1.8", "small", 1.0)
    assert [step.source for step in exact.steps] == ["system", "user", "agent", "agent"]
    called, answered = exact.steps[2:]
    assert called.tool_calls[0].arguments == {"a": 6, "b": 7}
    assert (called.observation.results[0].source_call_id, called.observation.results[0].content) == ("call-0", "42")
    assert (answered.metrics.prompt_tokens, answered.metrics.completion_token_ids) == (6, [8])
    assert (answered.reasoning_content, answered.metrics.logprobs) == ("six sevens", [-1.0])
    [other] = exact.subagent_trajectories
    assert [step.is_copied_context for step in other.steps] == [None, True, None, None]
    assert other.steps[1].observation.results[0].content == "42"
    assert other.trajectory_id == "c2"
    [_, plain] = read["s-2"].steps
    assert plain.tool_calls[0].arguments == {"arguments": "{a: "}
    assert (plain.metrics.prompt_tokens, plain.metrics.completion_token_ids) == (11, None)
    assert (read["s-3"].steps, read["s-3"].extra["error"]) == ([], "GeneratorError: gone")


def test_inspect_reads_its_log(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "evals" / "sums.eval"
    assert main(["export", str(source), str(out), "--format", "inspect", "--model-name", "small"]) == 0
    read = log.read_eval_log(str(out))
    assert (read.status, read.eval.task, read.eval.model, read.eval.config.epochs) == ("success", "sums", "small", 2)
    assert (read.results.total_samples, read.results.completed_samples) == (3, 2)
    assert {name: metric.value for name, metric in read.results.scores[0].metrics.items()} == {
        "mean": 0.5,
        "stderr": 0.5,
    }
    samples = {sample.uuid: sample for sample in read.samples}
    exact = samples["s-1"]
    assert (exact.id, exact.epoch, exact.scores["reward"].value, exact.scores["reward"].answer) == (
        "sums/t1",
        1,
        1.0,
        "43",
    )
    assert [message.role for message in exact.messages][:4] == ["system", "user", "assistant", "tool"]
    assert exact.messages[2].tool_calls[0].arguments == {"a": 6, "b": 7}
    assert (exact.messages[3].text, exact.messages[3].tool_call_id) == ("42", "call-0")
    assert exact.output.choices[0].stop_reason == "max_tokens"
    assert (exact.total_time, exact.working_time) == (2.0, 1.5)
    assert samples["s-2"].epoch == 2
    assert samples["s-3"].error.message == "GeneratorError: gone"
    assert log.read_eval_log(str(out), header_only=True).results.total_samples == 3
