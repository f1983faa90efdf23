"""A real vLLM server with the default recipe's small model, started by `vllm:PATH`: tools, tokens, transcripts."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import forge_env as fe
from forge_env.config import RunConfig, load_config
from forge_env.trajectory import Trajectory
from forge_env.types import FunctionCall, ToolCall
from tests.leftovers import assert_no_shared_memory, shared_memory

if TYPE_CHECKING:
    from forge_env.trajectory import Segment
    from trainers.model.chat import Chat

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(1500)]
LENGTH = 1024
"""Room for the other environment's instructions: twice what the bundled model has."""
RECIPE = [f"model.max_length={LENGTH}"]
STEPS = 52
"""That the bundled model needs to learn the other environment's call beside its own."""
OPTIONS: dict[str, dict[str, Any]] = {"coding_rlvr": {}, "terminal": {"families": ["count_lines"]}}
"""One kind of task at the shell: that others are to be told apart would take it longer to learn."""
TOOLS = {"coding_rlvr": ("python", "code"), "terminal": ("bash", "command")}


@pytest.fixture(scope="module")
def recipe() -> RunConfig:
    return load_config("coding_rlvr/base", RECIPE)


@pytest.fixture(scope="module")
def checkpoint(recipe: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, which knows the recipe's environment: of the other it is shown how to look around."""
    from forge_env.config.finding import bundled_models
    from forge_env.config.recipe import OptimizerSection
    from trainers.loop.warmup import MICROBATCH_TOKENS, Demonstrations
    from trainers.losses.sft import SFTLoss
    from trainers.model.chat import Chat, FolderTokenizer
    from trainers.titan.device import use_device
    from trainers.titan.engine import TitanEngine
    from trainers.titan.model import TitanModel

    folder, trained = bundled_models()["coding_rlvr_base"], tmp_path_factory.mktemp("models") / "small"
    environment = fe.make(recipe.environment.name, **recipe.environment.options)
    device, optimizer = use_device(with_gpus=False), OptimizerSection(lr=3e-3, beta2=0.99)
    model = TitanModel(folder, max_length=recipe.model.max_length, device=device.torch)
    engine = TitanEngine(model, optimizer, device=device, steps=STEPS, microbatch_tokens=MICROBATCH_TOKENS, threads=2)
    chat = Chat(FolderTokenizer(folder), recipe.model.renderer)
    lessons = Demonstrations(environment, chat, batch_size=2, max_length=512, seed=0)
    for step in range(STEPS):
        engine.train([*lessons.batch(), *(look_around(chat, 2 * step + number) for number in range(2))], SFTLoss())
    model.save_hf(trained)
    return trained


def look_around(chat: Chat, index: int) -> Segment:
    """A task of the other environment, and `ls`."""
    from forge_env.trajectory import Segment

    environment = fe.make("terminal", **OPTIONS["terminal"])
    call = ToolCall(id="call_0", function=FunctionCall(name="bash", arguments='{"command": "ls"}'))
    question = environment.prompt(environment.task("train", index))  # type: ignore[attr-defined]
    answer = fe.Message(role="assistant", tool_calls=[call])
    return Segment(*chat.render_training([*question, answer], environment.tools))


@pytest.fixture(scope="module")
def result(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> fe.EvaluationResult:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as temporary:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")  # one small function of vLLM's, for which a C++ compiler takes long
        patch.setenv("TMPDIR", temporary)
        patch.setenv("VLLM_API_KEY", "for another server")
        patch.setattr(tempfile, "tempdir", temporary)
        result = evaluated(checkpoint, tmp_path_factory.mktemp("results") / "out")
        assert [path.name for path in Path(temporary).iterdir() if path.is_socket()] == []
        return result


def evaluated(checkpoint: Path, out: Path) -> fe.EvaluationResult:
    before = shared_memory()
    result = fe.evaluate(
        [{"name": name, "options": {"max_turns": 3, **OPTIONS[name]}} for name in TOOLS],
        f"vllm:{checkpoint}",
        num_tasks=8,
        seed=1,
        temperature=0.7,
        send_seed=True,
        max_tokens=96,
        sandbox="local",
        out=out,
        vllm_args=[
            "--dtype",
            "float32",
            "--enforce-eager",
            "--hf-overrides",
            json.dumps({"max_position_embeddings": LENGTH}),
        ],
    )
    assert_no_shared_memory(before)
    return result


def played(result: fe.EvaluationResult, name: str) -> Iterator[Trajectory]:
    return (item for item in result.trajectories() if item.environment == name)


def test_two_environments_are_played_to_their_end(result: fe.EvaluationResult) -> None:
    assert (result.summary.status, result.error, result.summary.request_errors) == ("complete", None, {})
    for name in TOOLS:
        summary = result.summary.environments[name]
        assert (summary.samples, summary.invalid) == (8, {})
        assert summary.score is not None


@pytest.mark.parametrize("name", TOOLS)
def test_the_servers_tool_calls_are_played(result: fe.EvaluationResult, name: str) -> None:
    """Calls come parsed from the server, and the next turn begins with what the tool answered."""
    (tool, argument), right = TOOLS[name], 0
    for trajectory in played(result, name):
        for turn, following in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            for call, answer in zip(turn.message.tool_calls, following.observation, strict=True):
                assert (answer.role, answer.tool_call_id) == ("tool", call.id)
                assert answer.content
                right += call.function.name == tool and set(json.loads(call.function.arguments)) == {argument}
    assert right >= 4


def calls(message: fe.Message) -> list[tuple[str, Any]]:
    """Names and arguments of calls; of a malformed one, no name and its text."""
    return [
        (call.function.name, json.loads(call.function.arguments) if call.function.name else call.function.arguments)
        for call in message.tool_calls
    ]


def test_tokens_are_exact(result: fe.EvaluationResult, recipe: RunConfig, checkpoint: Path) -> None:
    """Prompts are what training renders; what was sampled spells the transcript; and every token is counted."""
    from trainers.model.chat import Chat, FolderTokenizer

    chat = Chat(FolderTokenizer(checkpoint), recipe.model.renderer)
    for name in TOOLS:
        tools = fe.make(name).tools
        trajectories = list(played(result, name))
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
        summary = result.summary.environments[name]
        assert summary.completion_tokens == sum(item.num_sampled_tokens for item in trajectories)
        assert summary.prompt_tokens == sum(turn.reply.prompt_length for item in trajectories for turn in item.turns)


def test_turns_continue_the_tokens_before_them(result: fe.EvaluationResult) -> None:
    pairs = [pair for name in TOOLS for item in played(result, name) for pair in itertools.pairwise(item.turns)]
    turns = [turn for before, turn in pairs if all(call.function.name for call in before.message.tool_calls)]
    assert len(turns) >= 8  # after a malformed call, which goes back in another form, a turn may fork
    assert sum(turn.reply.forked for turn in turns) <= len(turns) // 4  # the server writes arguments its own way
    assert any(len(item.turns) > 1 and len(item.segments()) == 1 for item in played(result, "coding_rlvr"))
