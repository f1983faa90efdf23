"""Counting of a sample's tokens and cost, and enforcement of its limits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from forge_env.config.evaluation import EvaluationConfig
from forge_env.config.reader import read_file, validate
from forge_env.endpoint.policy import EndpointPolicy
from forge_env.environment.base import Environment
from forge_env.errors import ConfigError, ForgeError, InfrastructureError, agent_code, suggestion
from forge_env.policy import LimitReached, Policy, PolicySession, Reply
from forge_env.rollout.episode import open_session
from forge_env.trajectory import Turn
from forge_env.types import Observation, Task, ToolSpec


class Price(BaseModel):
    """Price per million tokens, in any currency."""

    model_config = ConfigDict(extra="forbid")

    input: float = Field(ge=0)
    output: float = Field(ge=0)
    cached_input: float | None = Field(None, ge=0)


def read_price(path: Path, model: str) -> Price:
    """Read the price of `model` from a price file. Raises `ConfigError` if the file doesn't have it."""
    source = read_file(path)
    if model not in source.data:
        fix = suggestion(model, map(str, source.data), f"add `{model}: {{input: 0.5, output: 1.5}}`")
        raise ConfigError(f"{path} has no price for {model!r}", fix=fix)
    return validate(Price, source.data[model], source, (model,))


@dataclass(slots=True)
class TokenUsage:
    """Numbers of tokens and requests, and their cost."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    """Prompt tokens that the endpoint had cached."""
    cost: float = 0.0
    requests: int = 0
    estimated: int = 0
    """Number of requests whose tokens are estimated, since the endpoint did not report them."""

    def add(self, other: TokenUsage) -> None:
        """Add the values of another `TokenUsage`."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class BudgetExhaustedError(ForgeError):
    """Error of a sample left unfinished as the budget is used up; it is played again on resuming with a larger one."""


@dataclass(slots=True)
class Meter:
    """Usage of the whole run, and its budget."""

    price: Price | None = None
    budget: float | None = None
    total: TokenUsage = field(default_factory=TokenUsage)
    asking: int = 0
    """Number of replies being waited for."""
    early: int = 0
    """Number of running samples that have not requested a reply yet."""

    @property
    def exhausted(self) -> bool:
        """Whether the budget is used up."""
        return self.budget is not None and self.total.cost >= self.budget

    def of(self, reply: Reply) -> TokenUsage:
        """Usage of one reply; if the policy doesn't report it, the reply's tokens are counted."""
        reported = reply.metadata.get("usage") or {}
        usage = TokenUsage(
            prompt=reported.get("prompt", reply.prompt_length),
            completion=reported.get("completion", len(reply.token_ids)),
            cached=reported.get("cached", 0),
            requests=1,
            estimated=reported.get("estimated", 0),
        )
        if (price := self.price) is not None:
            cached = price.input if price.cached_input is None else price.cached_input
            fresh = (usage.prompt - usage.cached) * price.input
            usage.cost = (fresh + usage.cached * cached + usage.completion * price.output) / 1e6
        return usage


class MeteredPolicy(Policy):
    """Wraps the policy for one sample: counts every reply and ends the episode, with all its seats, at a limit."""

    def __init__(self, policy: Policy, meter: Meter, config: EvaluationConfig, on_turn: Callable[[], object]) -> None:
        self.policy = policy
        self.meter = meter
        self.config = config
        self.on_turn = on_turn
        """Called before and after every reply."""
        self.usage = TokenUsage()
        """Usage of all attempts of the sample."""
        self.tried = TokenUsage()
        """Usage of the last attempt."""
        self.turns: list[Turn] = []
        """Turns of the last attempt, recorded if the environment's code fails."""
        self._env: Environment | None = None
        self._early = True
        meter.early += 1

    def begun(self) -> None:
        """Record that the sample has requested its first reply or has ended without one."""
        self.meter.early -= self._early
        self._early = False

    def session_inside(self, env: Environment, task: Task, *, seed: int | None = None) -> PolicySession:
        """Open a conversation; another environment than before marks a new attempt. Scripted policies see the task."""
        with self.code("session"):
            inner = open_session(self.policy, env, task, seed=seed)
        if env is not self._env:
            self._env, self.tried, self.turns = env, TokenUsage(), []
        return _MeteredSession(self, inner)

    def code(self, method: str) -> AbstractContextManager[None]:
        """Context for calls of the policy. Exceptions become `AgentError`, except those of `EndpointPolicy`."""
        if isinstance(self.policy, EndpointPolicy):
            return nullcontext()
        return agent_code(f"{type(self.policy).__name__}.{method}", getattr(type(self.policy), method, None))


class _MeteredSession(PolicySession):
    """One conversation of a sample."""

    def __init__(self, owner: MeteredPolicy, inner: PolicySession) -> None:
        self._owner = owner
        self._inner = inner

    async def reply(self, observation: Observation) -> Reply:
        """Request a reply of the policy and count it.

        Raises:
            LimitReached: the sample has reached a limit, or its reply exceeded one or was cut at one.
            BudgetExhaustedError: the run's budget is used up.
        """
        owner, config, tried = self._owner, self._owner.config, self._owner.tried
        if owner.meter.exhausted:
            raise BudgetExhaustedError(f"the budget of {config.budget:g} is used up")
        if config.token_limit is not None and tried.completion >= config.token_limit:
            raise LimitReached("tokens")
        if config.cost_limit is not None and tried.cost >= config.cost_limit:
            raise LimitReached("cost")
        if config.token_limit is not None:
            self.limit_reply(config.token_limit - tried.completion)  # for policies that support it
        owner.begun()
        owner.meter.asking += 1
        owner.on_turn()
        try:
            with owner.code("reply"):
                reply = await self._inner.reply(observation)
        finally:
            owner.meter.asking -= 1
            owner.on_turn()
        used = owner.meter.of(reply)
        for usage in (tried, owner.usage, owner.meter.total):
            usage.add(used)
        owner.turns.append(Turn(observation, reply))
        calls = sum(len(turn.reply.message.tool_calls) for turn in owner.turns)
        if config.tool_call_limit is not None and calls > config.tool_call_limit:
            raise LimitReached("tool_calls", reply=reply)
        if config.token_limit is not None and tried.completion + reply.was_cut > config.token_limit:
            raise LimitReached("tokens", reply=reply)
        if config.cost_limit is not None and tried.cost > config.cost_limit:
            raise LimitReached("cost", reply=reply)
        return reply

    def limit_reply(self, tokens: int) -> None:
        """Forward to the wrapped session."""
        self._inner.limit_reply(tokens)

    def fork(self, turns: int, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession | None:
        """Fork the wrapped session; the fork is counted too."""
        forked = self._inner.fork(turns, tools, seed=seed)
        return None if forked is None else _MeteredSession(self._owner, forked)

    def unanswered(self) -> InfrastructureError | None:
        """Forward to the wrapped session."""
        return self._inner.unanswered()
