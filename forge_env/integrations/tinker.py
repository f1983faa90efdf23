"""Tinker: groups of episodes for the training loop of `tinker_cookbook`.

    from forge_env.integrations.tinker import ForgeDatasetBuilder

    train.Config(dataset_builder=ForgeDatasetBuilder(environment="calculator", model_name=MODEL, renderer_name="qwen3"))

The cookbook's renderer writes and reads the messages. The environment judges an answer that a limit of tokens cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forge_env.environment.host import get_host
from forge_env.integrations import needs
from forge_env.integrations.episode import Episode
from forge_env.tools.turns import malformed
from forge_env.types import FunctionCall, Message, Observation, ToolCall

with needs("the Tinker cookbook", "tinker-cookbook==0.6.1"):
    import chz
    import tinker
    from tinker_cookbook.renderers import Renderer, get_renderer
    from tinker_cookbook.renderers.base import ToolCall as TheirCall
    from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
    from tinker_cookbook.tokenizer_utils import get_tokenizer


class ForgeEnv(Env):  # type: ignore[misc]
    """One episode as tokens; the reward of the whole episode comes with its last step."""

    def __init__(self, episode: Episode, renderer: Renderer) -> None:
        self._episode = episode
        self._renderer = renderer
        self._chat: list[Any] = []

    async def initial_observation(self) -> tuple[tinker.ModelInput, Any]:
        """Reset the environment, and render its messages and tools."""
        observation = await get_host().call(self._episode.start())
        if tools := [tool.model_dump() for tool in self._episode.tools]:
            system = observation[0].content if observation[0].role == "system" else ""
            self._chat = list(self._renderer.create_conversation_prefix_with_tools(tools, system))
            observation = observation[1:] if system else observation
        return self._asked(observation)

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        """Apply the sampled tokens of an answer."""
        message, _ = self._renderer.parse_response(action)
        self._chat.append(message)
        cut = (extra or {}).get("stop_reason") == "length"
        observation = await get_host().call(self._episode.answer(_ours(message), cut=cut))
        if observation is None:
            record = self._episode.trajectory
            return StepResult(record.reward, True, tinker.ModelInput.empty(), [], metrics=dict(record.metrics))
        following, stop = self._asked(observation)
        return StepResult(0.0, False, following, stop)

    async def close(self) -> None:
        """Release what the episode holds."""
        await get_host().call(self._episode.close())

    def _asked(self, observation: Observation) -> tuple[tinker.ModelInput, Any]:
        self._chat += [_theirs(message) for message in observation]
        return self._renderer.build_generation_prompt(self._chat), self._renderer.get_stop_sequences()


class ForgeGroupBuilder(EnvGroupBuilder):  # type: ignore[misc]
    """The episodes of one task."""

    def __init__(self, builder: ForgeDatasetBuilder, index: int) -> None:
        self._builder = builder
        self._index = index
        self._envs: list[ForgeEnv] = []

    async def make_envs(self) -> Sequence[ForgeEnv]:
        """Make the group's environments."""
        builder = self._builder
        renderer = get_renderer(builder.renderer_name, get_tokenizer(builder.model_name))
        at: dict[str, Any] = {"split": builder.split, "index": self._index, "sandboxes": builder.sandboxes}
        episodes = [Episode(builder.environment, **at, **builder.options) for _ in range(builder.group_size)]
        self._envs = [ForgeEnv(episode, renderer) for episode in episodes]
        return self._envs

    async def cleanup(self) -> None:
        """Close the episodes that are not over."""
        for env in self._envs:
            await env.close()

    def logging_tags(self) -> list[str]:
        """The environment's name."""
        return [self._builder.environment]


class ForgeDataset(RLDataset):  # type: ignore[misc]
    """Batches of groups: the tasks of a split in order, repeated if there are too few for all batches."""

    def __init__(self, builder: ForgeDatasetBuilder) -> None:
        self._builder = builder

    def get_batch(self, index: int) -> Sequence[ForgeGroupBuilder]:
        """The groups of a batch."""
        size = self._builder.batch_size
        return [ForgeGroupBuilder(self._builder, task) for task in range(index * size, (index + 1) * size)]

    def __len__(self) -> int:
        return self._builder.num_batches


@chz.chz
class ForgeDatasetBuilder(RLDatasetBuilder):  # type: ignore[misc]
    """Which tasks of which environment, and how they are rendered."""

    environment: str
    model_name: str
    renderer_name: str
    options: dict[str, Any] = chz.field(default_factory=dict)
    split: str | None = None
    """None: the environment's first."""
    sandboxes: str = "auto"
    batch_size: int = 8
    group_size: int = 8
    num_batches: int = 100

    async def __call__(self) -> tuple[ForgeDataset, None]:
        """Make the training data."""
        Episode(self.environment, split=self.split, sandboxes=self.sandboxes, **self.options)  # mistakes show here
        return ForgeDataset(self), None


def _theirs(message: Message) -> dict[str, Any]:
    data: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        calls = [(call.id, call.function) for call in message.tool_calls]
        data["tool_calls"] = [
            TheirCall(id=id, function=TheirCall.FunctionBody(name=made.name, arguments=made.arguments))
            for id, made in calls
        ]
    known = {"tool_call_id": message.tool_call_id, "name": message.name}
    return {**data, **{name: value for name, value in known.items() if value is not None}}


def _ours(message: Any) -> Message:
    calls = [
        ToolCall(
            id=call.id or f"call_{number}",
            function=FunctionCall(name=call.function.name, arguments=call.function.arguments),
        )
        for number, call in enumerate(message.get("tool_calls") or ())
    ]
    calls += [malformed(call.raw_text) for call in message.get("unparsed_tool_calls") or ()]
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    thoughts = "\n".join(part["thinking"] for part in parts if part["type"] == "thinking")
    text = "".join(part["text"] for part in parts if part["type"] == "text")
    return Message(role="assistant", content=text, tool_calls=calls, reasoning_content=thoughts or None)
