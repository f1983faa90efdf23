"""Loading of tasksets of verifiers 0.4, and of packages with `load_environment` for its releases up to 0.2."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import Field

from environments.verifiers.endpoint import MODEL
from forge_env.environment.base import EnvironmentConfig
from forge_env.errors import UsageError
from forge_env.sharing import Shared
from forge_env.tasks.datasets import Stream

OWN_ENVIRONMENT = "in a virtual environment of its own"
EMPTY = "EmptyModelResponseError"
"""Error name in releases up to 0.2 for a message without text and tool calls."""
NO_KEY = "FORGE_ENV_NO_KEY"
"""Name of an unset variable for the API key: the endpoint requires no key."""


class VerifiersConfig(EnvironmentConfig):
    """Taskset, seats, and the program that runs the episodes."""

    taskset: str
    """Name of an installed taskset of verifiers, or of a package with `load_environment`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the taskset."""
    seat: str = ""
    """Seat of the agent, if the taskset has several."""
    others: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Configuration of the other seats by name, in the format of verifiers: `{model: ..., client: {base_url: ...}}`."""
    harness: str = "null"
    """Program that sends the requests to the model; null: a plain conversation with the taskset's tools."""
    runtime: str = "subprocess"
    """Runtime of that program: subprocess, docker, ..."""
    num_tasks: int | None = Field(None, ge=1)
    """Maximum number of tasks to read. Unset: tasks are read on demand and start over after the last."""
    max_turns: int = Field(32, ge=1)
    """Maximum number of assistant messages before the episode is truncated."""
    answer_s: float = Field(600.0, gt=0)
    """Time limit between two messages, in seconds."""


@dataclass(frozen=True)
class Row:
    """One task, with its object in verifiers."""

    id: str
    prompt: str
    theirs: Any


@dataclass(frozen=True)
class Played:
    """Result of an episode, as reported by verifiers."""

    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    limited: bool = False
    """Whether one of the episode's limits ended it."""
    failure: str = ""


Play: TypeAlias = Callable[[Row, str], Awaitable[Played]]
"""Function that runs an episode of a row against the model at a URL."""


class Package(ABC):
    """An environment of verifiers; its tasks are read once per process and only on demand."""

    def __init__(self, num_tasks: int | None) -> None:
        self.num_tasks = num_tasks
        self.rows = Stream(lambda: islice(self.read(), num_tasks))

    @abstractmethod
    def read(self) -> Iterator[Row]:
        """Iterate over all tasks in order."""

    @abstractmethod
    def open(self) -> Any:
        """Async context manager for a `Play` that can run many episodes concurrently."""


class Taskset(Package):
    """A taskset of verifiers 0.4; `max_turns`, harness and runtime apply to the agent's seat."""

    def __init__(self, settings: Any, seat: str, num_tasks: int | None) -> None:
        from verifiers.v1.utils.loaders import load_environment

        self._load: Callable[[], Any] = lambda: load_environment(settings)
        self._taskset = self._load().taskset
        self._seat = seat
        super().__init__(num_tasks)

    def read(self) -> Iterator[Row]:
        """Iterate over the tasks in the order of the taskset."""
        for index, task in enumerate(self._taskset):
            data = task.data
            yield Row(str(data.id or data.name or index), data.prompt_text or data.name or f"task {index}", task)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Play]:
        """Start the taskset's servers once for all episodes, as verifiers does."""
        import verifiers.v1 as vf
        from verifiers.v1.clients import ModelContext

        theirs = self._load()

        async def play(row: Row, url: str) -> Played:
            client = vf.EvalClientConfig(base_url=url, api_key_var=NO_KEY)
            return self._result(await theirs.run_episode(row.theirs, ModelContext(model=MODEL, client=client)))

        async with theirs.serving():
            yield play

    def _result(self, episode: Any) -> Played:
        if not episode.ok or not episode.traces:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            failure = f"{errors[-1].type}: {errors[-1].message}" if errors else "it ended without a word"
            return Played(failure=failure)
        trace = next((t for t in reversed(episode.traces) if t.agent.name == self._seat), episode.traces[-1])
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        metrics |= {name: float(item.value) for name, item in trace.rewards.items() if item is not None}
        return Played(float(trace.reward), metrics, trace.stop_condition is not None)


class OldPackage(Package):
    """A package with `load_environment`, for verifiers' releases up to 0.2."""

    def __init__(self, theirs: Any, num_tasks: int | None) -> None:
        self._theirs = theirs
        super().__init__(num_tasks)

    def read(self) -> Iterator[Row]:
        """Iterate over the rows of the training dataset, or of the evaluation dataset if there is none."""
        theirs = self._theirs
        rows = theirs.get_dataset() if theirs.build_dataset() is not None else theirs.get_eval_dataset()
        for index, row in enumerate(rows):
            prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
            yield Row(str(row.get("example_id", index)), str(prompt), row)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Play]:
        """Provide a `Play`; these packages need no servers."""
        from verifiers.types import ClientConfig

        async def play(row: Row, url: str) -> Played:
            client = ClientConfig(api_base_url=url, api_key_var=NO_KEY, max_retries=0)
            output = await self._theirs.run_rollout(row.theirs, client, MODEL, {})
            if (error := output.get("error")) is not None:
                if isinstance(error, dict) and error.get("error") == EMPTY:
                    return Played()  # caused by the agent, although verifiers reports a failure of its endpoint
                return Played(failure=str(error.get("error_chain_str") if isinstance(error, dict) else error))
            metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items()}
            limited = output.get("stop_condition") == "max_turns_reached" or bool(output.get("is_truncated"))
            return Played(float(output.get("reward") or 0.0), metrics, limited)

        yield play


@lru_cache(maxsize=16)
def load(config_json: str) -> Package:
    """Load the package of a `VerifiersConfig`, cached per process. `UsageError`: it can't be loaded here."""
    config = VerifiersConfig.model_validate_json(config_json)
    name = config.taskset
    try:
        release = version("verifiers")
    except PackageNotFoundError as error:
        fix = f'pip install "forge-env[verifiers]" {OWN_ENVIRONMENT}'
        raise UsageError("the package verifiers is not installed", fix=fix) from error
    try:
        if hasattr(_module(name), "load_environment"):
            return _old(config, release)
        return _taskset(config, release)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        if _is_old(name):
            _refuse_old(name, release, error)
        fix = f"is it installed, and made for verifiers {release}?"
        raise UsageError(f"verifiers can't load {name!r}: {str(error)[:500]}", fix=fix) from error


def _module_name(taskset: str) -> str:
    return taskset.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")


def _module(taskset: str) -> Any:
    """Module that verifiers would import for this name; None if it is a built-in taskset or doesn't exist."""
    name = _module_name(taskset)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def _is_old(taskset: str) -> bool:
    """Whether the source of a package that can't be imported defines `load_environment`."""
    try:
        spec = importlib.util.find_spec(_module_name(taskset))
    except (ImportError, ValueError):
        return False
    return spec is not None and bool(spec.origin) and b"def load_environment" in Path(str(spec.origin)).read_bytes()


def _refuse_old(taskset: str, release: str, cause: Exception | None = None) -> None:
    """Raise a `UsageError` if the installed verifiers no longer supports such packages."""
    import verifiers

    if not hasattr(verifiers, "load_environment"):
        raise UsageError(
            f"{taskset!r} needs verifiers 0.2 or older, but {release} is installed",
            fix=f'pip install "verifiers<0.3" {OWN_ENVIRONMENT}',
        ) from cause


def _old(config: VerifiersConfig, release: str) -> Package:
    import verifiers

    _refuse_old(config.taskset, release)
    theirs = verifiers.load_environment(config.taskset, **config.options)
    if (limit := getattr(theirs, "max_turns", 0)) == -1 or limit > config.max_turns:
        theirs.max_turns = config.max_turns
    return OldPackage(theirs, config.num_tasks)


def _taskset(config: VerifiersConfig, release: str) -> Package:
    try:
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.utils.loaders import env_config_type, resolve_env_config
    except ImportError as error:
        raise UsageError(
            f"tasksets need verifiers 0.4, but {release} is installed ({error})",
            fix=f'pip install "verifiers==0.4.0" {OWN_ENVIRONMENT}',
        ) from error
    fields = env_config_type(config.taskset).model_fields
    seats = {name: field.default for name, field in fields.items() if isinstance(field.default, AgentConfig)}
    seat = config.seat or (next(iter(seats)) if len(seats) == 1 else "")
    if seat not in seats:
        has = f"{config.taskset!r} has the seats {', '.join(seats)}"
        raise UsageError(has if not seat else f"{has}, not {seat!r}", fix="choose the agent's with seat=NAME")
    program = {"harness": {"id": config.harness}, "runtime": {"type": config.runtime}}
    given: dict[str, Any] = {seat: {**program, "max_turns": config.max_turns}}
    for name, default in seats.items():
        if name == seat:
            continue
        given[name] = {**program, **config.others.get(name, {})}
        if client := given[name].get("client"):
            given[name]["client"] = {"type": "eval", **client}
        elif default.client is None:
            fix = f"others={{{name}: {{model: NAME, client: {{base_url: URL}}}}}}"
            raise UsageError(f"{config.taskset!r}: no model plays the seat {name!r}", fix=fix)
    settings = resolve_env_config({"taskset": {"id": config.taskset, **config.options}, **given})
    for name in seats:
        _check_runtime(getattr(settings, name))
    return Taskset(settings, seat, config.num_tasks)


def _check_runtime(seat: Any) -> None:
    from verifiers.v1.utils.loaders import harness_class

    if harness_class(seat.harness.id).EXECUTES_CODE and seat.runtime.type == "subprocess":
        raise UsageError(f"harness {seat.harness.id!r} runs code that the model writes", fix="give runtime=docker")


PLAYERS: Shared[str, Play] = Shared(lambda config_json: load(config_json).open())
"""Running packages by their configuration as JSON."""
