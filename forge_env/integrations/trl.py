"""TRL: environments for its `GRPOTrainer`, in two ways.

    from forge_env.integrations.trl import Rollouts, reward

    rollouts = Rollouts("text_world", max_turns=10)
    GRPOTrainer(model, reward, args, train_dataset=Dataset.from_list(rollouts.rows(1000)), rollout_func=rollouts)

`Rollouts` plays whole episodes, of every environment with one conversation. `environment_factory` makes the class of
tools that TRL's own loop calls; it suits environments whose tools take plain arguments and whose agent ends the episode
with a message. TRL's loop runs each call as a turn, and leaves an episode at a message without calls.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import keyword
from collections.abc import Sequence
from typing import Any, Literal

from forge_env.environment.host import get_host
from forge_env.errors import InfrastructureError, UsageError
from forge_env.integrations.episode import Episode, as_chat
from forge_env.registry import make
from forge_env.tools.turns import read_turn
from forge_env.types import FunctionCall, Message, Observation, ToolCall, ToolSpec

REWARD = "episode_reward"
"""Field of the rollouts that TRL passes to `reward`."""

MARK = "(the answer)"
"""Placeholder for an answer, in a conversation of which only the end is used."""


class Rollouts:
    """A `rollout_func`: plays an episode for each prompt, all of them concurrently, turn by turn.

    Prompts are the rows of `rows`; the conversation begins with the environment's messages. Turns are joined as tokens,
    so what was sampled is trained on; log-probs are those of the trainer's vLLM, if it has one.
    """

    def __init__(self, environment: str, *, sandboxes: str = "auto", **options: Any) -> None:
        self._environment = environment
        self._options = {"sandboxes": sandboxes, **options}
        Episode(environment, **self._options)  # mistakes are reported here

    def rows(self, count: int, split: str | None = None) -> list[dict[str, Any]]:
        """Rows of the trainer's dataset.

        Args:
            count: number of tasks, from the first on; a split with fewer repeats them.
            split: split of the tasks; None: the environment's first.
        """
        return [{"prompt": [{"role": "user", "content": f"{split or ''}/{index}"}]} for index in range(count)]

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Play the prompts' episodes with the model of a trainer.

        Args:
            prompts: prompts of `rows`, each repeated for its group.

        Returns:
            `prompt_ids`, `completion_ids`, `logprobs`, `env_mask` (1 for sampled tokens), and `episode_reward`: None if
            the infrastructure failed, which TRL leaves out.
        """
        games = [self._game(prompt[-1]["content"], trainer) for prompt in prompts]
        run = get_host().run
        try:
            run(_all(game.start() for game in games))
            while waiting := [game for game in games if game.waiting]:
                prompts_now = [game.ids for game in waiting]
                sampled, logprobs = trainer._generate_single_turn(prompts_now, None, {}, 1)  # as TRL's own loop
                known = logprobs or [None] * len(waiting)
                run(_all(game.take(*each) for game, *each in zip(waiting, sampled, known, strict=True)))
        finally:
            run(_all(game.episode.close() for game in games))
        return {
            "prompt_ids": [game.prompt for game in games],
            "completion_ids": [game.completion for game in games],
            "logprobs": [game.logprobs for game in games] if trainer.use_vllm else None,
            "env_mask": [game.mask for game in games],
            REWARD: [game.reward for game in games],
        }

    def _game(self, address: str, trainer: Any) -> _Game:
        split, slash, index = address.rpartition("/")
        if not slash or not index.isdecimal():
            raise UsageError(f"the prompt {address[:80]!r} is no task", fix="make the dataset with `rows`")
        return _Game(Episode(self._environment, split=split or None, index=int(index), **self._options), trainer)


async def _all(coroutines: Any) -> None:
    await asyncio.gather(*coroutines)


def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """The reward function for `Rollouts` and for `environment_factory`: the episodes' rewards; None for lost ones."""
    if REWARD in columns:
        return list(columns[REWARD])
    return [tools._finish(said) for tools, said in zip(columns["environments"], completions, strict=True)]


class _Game:
    """An episode and its tokens.

    Attributes:
        waiting: whether the model is asked next.
        prompt: tokens of the first prompt.
        completion: tokens after it, sampled and observed.
        mask: 1 for each that was sampled.
        logprobs: log-prob of each; 0 for observed ones.
        reward: reward of the episode; None if it is lost.
    """

    def __init__(self, episode: Episode, trainer: Any) -> None:
        self.episode = episode
        self.waiting = False
        self.prompt: list[int] = []
        self.completion: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.reward: float | None = None
        self._trainer = trainer
        self._tokenizer = trainer._tokenizer
        self._turns = 0

    @property
    def ids(self) -> list[int]:
        """The conversation."""
        return self.prompt + self.completion

    async def start(self) -> None:
        """Reset the environment and render its messages."""
        try:
            observation = await self.episode.start()
        except InfrastructureError:
            self.prompt = self.completion = [self._tokenizer.eos_token_id]  # TRL can't have an empty row
            self.mask, self.logprobs = [0], [0.0]
            return
        self.prompt = self._tokens(self._render(as_chat(observation), self.episode.tools))
        self.waiting = True

    async def take(self, sampled: list[int], logprobs: Sequence[float] | None) -> None:
        """Give the environment the model's answer, and append its own."""
        room = self._trainer.max_completion_length - len(self.completion)
        sampled = sampled[:room]
        ends = self._trainer.eos_token_ids
        cut = sampled[-1] not in ends
        self._append(sampled, 1, (logprobs or [0.0] * len(sampled))[: len(sampled)])
        text = self._tokenizer.decode([token for token in sampled if token not in ends])  # calls may be special tokens
        message = read_turn(text, tools=bool(self.episode.tools), turn=self._turns)
        self._turns += 1
        self.waiting = False
        try:
            observation = await self.episode.answer(message, cut=cut)
            if observation is not None:
                following = self._following(observation, ended=not cut)
                if len(self.completion) + len(following) < self._trainer.max_completion_length:
                    self._append(following, 0, [0.0] * len(following))
                    self.waiting = True
                    return
                await self.episode.truncate("tokens")
            self.reward = self.episode.trajectory.reward
        except InfrastructureError:
            self.reward = None

    def _append(self, ids: Sequence[int], sampled: int, logprobs: Sequence[float]) -> None:
        self.completion += ids
        self.mask += [sampled] * len(ids)
        self.logprobs += logprobs

    def _render(self, chat: list[dict[str, Any]], tools: Sequence[ToolSpec] = ()) -> str:
        text: str = self._trainer.processing_class.apply_chat_template(
            chat,
            tools=[tool.to_openai() for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
            **self._trainer.chat_template_kwargs,
        )
        return text

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _following(self, observation: Observation, *, ended: bool) -> list[int]:
        """Tokens between two answers, as the template writes them for `observation`."""
        answer: dict[str, Any] = {"role": "assistant", "content": MARK}
        if observation[0].role == "tool":
            function = {"name": observation[0].name or "tool", "arguments": {}}
            answer["tool_calls"] = [{"type": "function", "function": function}]
        text = self._render([{"role": "user", "content": "?"}, answer, *as_chat(observation)])
        ends = [self._tokenizer.decode([token]) for token in self._trainer.eos_token_ids]
        start, end = min((at, end) for end in ends if (at := text.find(end, text.index(MARK))) >= 0)
        return self._tokens(text[start + len(end) if ended else start :])


# ---
# `environment_factory`


INSTEAD = "give TRL a rollout_func: Rollouts(...)"


class _Tools:
    """Base of the classes that `environment_factory` makes. An object plays one episode at a time."""

    _environment: str
    _options: dict[str, Any]
    _episode: Episode | None = None

    def reset(self, **row: Any) -> str:
        """Start the episode of a row of the dataset."""
        self._close()
        at = {"split": row.get("split"), "index": row.get("index", 0)}
        self._episode, self._turns, self._lost = Episode(self._environment, **at, **self._options), 0, False
        try:
            observation = get_host().run(self._episode.start())
        except InfrastructureError as error:
            self._lost = True
            return f"The environment failed: {error}"
        return "\n\n".join(message.content for message in observation)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        call = ToolCall(id=f"call_{self._turns}", function=FunctionCall(name=name, arguments=json.dumps(arguments)))
        return self._say(Message(role="assistant", tool_calls=[call]))

    def _say(self, message: Message) -> str:
        if self._episode is None or self._episode.over or self._lost:
            return "The episode is over."
        self._turns += 1
        try:
            observation = get_host().run(self._episode.answer(message))
        except InfrastructureError as error:
            self._lost = True
            return f"The environment failed: {error}"
        return "\n\n".join(each.content for each in observation or [])

    def _finish(self, completion: Any) -> float | None:
        """Give the environment the last message, and return the episode's reward; None if it is lost."""
        if self._episode is None:
            return None
        last = completion[-1]
        if last["role"] == "assistant" and not last.get("tool_calls"):
            self._say(read_turn(last.get("content") or "", tools=False))
        if not self._lost:
            try:
                get_host().run(self._episode.truncate("tokens"))
            except InfrastructureError:
                self._lost = True
        earned = None if self._lost else self._episode.trajectory.reward
        self._close()
        return earned

    def _close(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            get_host().run(episode.close())


def environment_factory(environment: str, *, sandboxes: str = "auto", **options: Any) -> type:
    """Make the class for TRL's `environment_factory`; `reward` is its reward function.

    Rows of the dataset have `prompt` (a user message, to which the environment's is appended), `index`, and `split`.

    Raises:
        UsageError: the environment has no tools, or one that can't be a method.
    """
    tools = make(environment, **options).tools
    if not tools:
        raise UsageError(f"{environment} has no tools", fix=INSTEAD)
    for tool in tools:
        if tool.name.startswith("_") or hasattr(_Tools, tool.name):
            raise UsageError(f"the tool {tool.name!r} has a name that the class for TRL uses itself", fix=INSTEAD)
        for name in tool.parameters.get("properties", {}):
            if name == "self" or not name.isidentifier() or keyword.iskeyword(name):
                raise UsageError(f"the tool {tool.name!r} has the argument {name!r}, no name in Python", fix=INSTEAD)
    methods = {tool.name: _method(tool) for tool in tools}
    context = {"_environment": environment, "_options": {"sandboxes": sandboxes, **options}}
    return type(environment, (_Tools,), {**context, **methods})


_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}


def _method(tool: ToolSpec) -> Any:
    """A method from which transformers reads the tool's schema: names, types, choices and descriptions."""

    def method(self: _Tools, **arguments: Any) -> str:
        return self._call(tool.name, arguments)

    schema = tool.parameters
    parameters, described = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)], []
    for name, given in schema.get("properties", {}).items():
        kind: Any = Literal[tuple(given["enum"])] if given.get("enum") else _TYPES.get(given.get("type"), Any)
        default = inspect.Parameter.empty if name in schema.get("required", ()) else given.get("default")
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
        described.append(f"    {name}: {given.get('description') or name}")
    method.__name__ = method.__qualname__ = tool.name
    method.__doc__ = (
        "\n".join([tool.description or tool.name, "", "Args:", *described]) if described else tool.description
    )
    method.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    method.__annotations__ = {each.name: each.annotation for each in parameters[1:]} | {"return": str}
    return method
