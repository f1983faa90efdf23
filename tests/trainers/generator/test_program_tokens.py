"""A model behind a program's real client reads and says, to the last id, what it does in the process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("renderers")

from numpy.typing import NDArray

import forge_env as fe
from environments.coding_rlvr import CodingRLVR
from environments.coding_rlvr.program import CodingProgram
from forge_env.rollout.episode import run_episode
from tests.sandboxes.conftest import require
from tests.sandboxes.wheels import use_client
from trainers.generator.policy import GeneratorPolicy
from trainers.generator.types import Completion, SamplingOptions
from trainers.model.chat import Chat, FolderTokenizer
from trainers.model.folder import local_folder

pytestmark = [pytest.mark.stack, pytest.mark.slow]


async def test_tokens_through_the_gateway_are_those_in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    require("local")
    use_client(tmp_path, monkeypatch, tmp_path_factory)
    folder = local_folder("coding_rlvr_base")
    assert folder is not None
    chat = Chat(FolderTokenizer(folder))
    task = CodingRLVR().task("train", 0)
    code = task.gold.removeprefix("```python\n").removesuffix("\n```")
    said = [
        fe.call_tool("python", code=code.replace("return ", "return 0 and ")),
        fe.call_tool("python", code=code),
        fe.Message(role="assistant", content="Done"),
    ]

    async def play(make: type[fe.Environment]) -> fe.Trajectory:
        asked: list[NDArray[np.int32]] = []

        async def generate(prompt: NDArray[np.int32], options: SamplingOptions, conversation: object) -> Completion:
            asked.append(prompt)
            ids = spelled(chat, said[len(asked) - 1])
            return Completion(
                *(np.empty(0, np.int32), ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop", 0)
            )

        policy = GeneratorPolicy(chat, generate, max_length=4000, max_tokens=200)
        return await run_episode(lambda: make(sandboxes=engine), policy, task=task, seed=1)

    async with fe.open_engine("local", concurrency=2) as engine:
        inside, through = await play(CodingRLVR), await play(CodingProgram)
    assert (inside.reward, through.reward) == (1.0, 1.0)
    first, *later = through.turns
    assert len(later) == 2
    assert not first.reply.continues
    assert all(turn.reply.continues for turn in later), "a request that goes on continues the very tokens"
    [one], [other] = inside.segments(), through.segments()
    np.testing.assert_array_equal(one.token_ids, other.token_ids)
    np.testing.assert_array_equal(one.mask, other.mask)


def spelled(chat: Chat, message: fe.Message) -> NDArray[np.int32]:
    """As a model spells it: with spaces where JSON needs none."""
    text = message.content
    for call in message.tool_calls:
        text += (
            f'<tool_call>\n{{"arguments":  {call.function.arguments}, "name": "{call.function.name}"}}\n</tool_call>'
        )
    return np.array(chat.tokenizer.encode(text) + chat.stop_token_ids[:1], np.int32)
