"""A real vLLM server with the default recipe's small model, started by `vllm:PATH`: tools, tokens, transcripts."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.config import RunConfig, load_config
from forge_env.config.finding import bundled_models
from tests.leftovers import assert_no_shared_memory, shared_memory

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(1500)]
ENVIRONMENT = "coding_rlvr"


@pytest.fixture(scope="module")
def recipe() -> RunConfig:
    return load_config("coding_rlvr")


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    """The bundled model, which writes the environment's tool calls."""
    return bundled_models()["coding_rlvr_base"]


@pytest.fixture(scope="module")
def result(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> fe.EvaluationResult:
    out = tmp_path_factory.mktemp("results") / "out"  # before `TMPDIR` is set: pytest's first call makes its root there
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as temporary:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")  # one small function of vLLM's, for which a C++ compiler takes long
        patch.setenv("TMPDIR", temporary)
        patch.setenv("VLLM_API_KEY", "for another server")
        patch.setattr(tempfile, "tempdir", temporary)
        result = evaluated(checkpoint, out)
        assert [path.name for path in Path(temporary).iterdir() if path.is_socket()] == []
        return result


def evaluated(checkpoint: Path, out: Path) -> fe.EvaluationResult:
    before = shared_memory()
    result = fe.evaluate(
        [{"name": ENVIRONMENT, "options": {"max_turns": 3}}],
        f"vllm:{checkpoint}",
        num_tasks=16,
        seed=1,
        temperature=0.7,
        send_seed=True,
        max_tokens=96,
        sandbox="local",
        out=out,
        vllm_args=["--dtype", "float32", "--enforce-eager"],
    )
    assert_no_shared_memory(before)
    return result


def test_every_sample_is_scored(result: fe.EvaluationResult) -> None:
    assert (result.summary.status, result.error, result.summary.request_errors) == ("complete", None, {})
    summary = result.summary.environments[ENVIRONMENT]
    assert (summary.samples, summary.invalid) == (16, {})
    assert summary.score is not None


def test_tool_calls_parsed_by_the_server_are_answered(result: fe.EvaluationResult) -> None:
    right = 0
    for trajectory in result.trajectories():
        for turn, following in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            for call, answer in zip(turn.message.tool_calls, following.observation, strict=True):
                assert (answer.role, answer.tool_call_id) == ("tool", call.id)
                assert answer.content
                right += call.function.name == "python" and set(json.loads(call.function.arguments)) == {"code"}
    assert right >= 4


def calls(message: fe.Message) -> list[tuple[str, Any]]:
    """Return names and arguments of calls; a malformed call has no name, and its text."""
    return [
        (call.function.name, json.loads(call.function.arguments) if call.function.name else call.function.arguments)
        for call in message.tool_calls
    ]


def test_tokens_are_exact(result: fe.EvaluationResult, recipe: RunConfig, checkpoint: Path) -> None:
    """Prompts equal those rendered in training, sampled tokens spell the transcript, and usage counts every token."""
    from trainers.model.chat import Chat

    chat, tools = Chat.of(checkpoint, recipe.model), fe.make(ENVIRONMENT).tools
    trajectories = list(result.trajectories())
    for trajectory in trajectories:
        first, prompt = trajectory.turns[0], []
        assert first.reply.prompt_ids.tolist() == chat.render(first.observation, tools)
        for turn in trajectory.turns:
            reply, sampled = turn.reply, turn.reply.token_ids.tolist()
            assert len(sampled) == len(reply.logprobs) == reply.metadata["usage"]["completion"] > 0
            assert reply.prompt_length == reply.metadata["usage"]["prompt"]
            prompt = prompt[: reply.continues] + reply.prompt_ids.tolist()
            if turn.message.tool_calls:
                assert calls(chat.parse(sampled, tools, prompt)) == calls(turn.message)
            prompt = prompt + sampled
    summary = result.summary.environments[ENVIRONMENT]
    assert summary.completion_tokens == sum(item.num_sampled_tokens for item in trajectories)
    assert summary.prompt_tokens == sum(turn.reply.prompt_length for item in trajectories for turn in item.turns)


def test_turns_continue_the_tokens_before_them(result: fe.EvaluationResult) -> None:
    trajectories = list(result.trajectories())
    pairs = [pair for item in trajectories for pair in itertools.pairwise(item.turns)]
    turns = [turn for before, turn in pairs if all(call.function.name for call in before.message.tool_calls)]
    assert len(turns) >= 8  # after a malformed call, which goes back in another form, a turn may fork
    assert sum(turn.reply.forked for turn in turns) <= len(turns) // 4  # the server formats arguments differently
    assert any(len(item.turns) > 1 and len(item.segments()) == 1 for item in trajectories)
