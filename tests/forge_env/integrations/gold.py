"""A model that knows the answers to `calculator`, for the loops of other trainers."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import forge_env as fe
from forge_env.types import Message, as_message

MODEL = Path(__file__).parents[3] / "apps/coding_rlvr/coding_rlvr_base"
TASKS = 4


class GoldModel:
    """Answers with the gold actions, as Qwen writes them; with a text that is wrong for tasks of an odd index."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def actions(self) -> dict[str, list[str]]:
        """Answers to each prompt."""
        env = fe.make("calculator")
        assert isinstance(env, fe.ToolEnvironment)
        tasks = [env.task(split, index) for split in env.splits for index in range(TASKS)]
        return {
            task.prompt: [written(as_message(action)) for action in env.gold_actions(task)]
            if int(task.id.rpartition("-")[2]) % 2 == 0
            else ["#### -1"]
            for task in tasks
        }

    def text(self, conversation: str) -> str:
        """The next answer in a conversation that ends with the opening of an answer."""
        [answers] = [answers for prompt, answers in self.actions.items() if prompt in conversation]
        return answers[conversation.count("<|im_start|>assistant") - 1]

    def __call__(self, ids: list[int]) -> list[int]:
        """Tokens of the next answer."""
        answer = self.text(self.tokenizer.decode(ids))
        return [*self.tokenizer.encode(answer, add_special_tokens=False), self.tokenizer.eos_token_id]


def written(message: Message) -> str:
    """A message as Qwen writes it."""
    calls = [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments)} for call in message.tool_calls
    ]
    return message.content + "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
