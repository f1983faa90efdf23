"""Sessions of served environments, one environment per client, and the messages that clients exchange with them.

The messages are those of OpenEnv's WebSocket protocol:

    -> {"type": "reset", "data": {"seed": 7}}
    <- {"type": "observation", "data": {"observation": {...}, "reward": null, "done": false}}
    -> {"type": "step", "data": {"message": "hello"}}
    -> {"type": "step", "data": {"type": "call_tool", "tool_name": "add", "arguments": {"a": 1}}}
    -> {"type": "state"}    <- {"type": "state", "data": {"episode_id": "...", "step_count": 1}}
    <- {"type": "error", "data": {"message": "...", "code": "VALIDATION_ERROR"}}

We add fields that OpenEnv's clients pass on or ignore: `messages`, `terminated`, `truncated`, `info` and `metadata`
in an observation, `request_id` in an answer to a message that had one.

A session is attached to at most one connection. If the connection breaks, the session finishes the running step and
waits (`ServeLimits.reconnect`) for `reset(resume=SESSION_ID)` on a new connection, which takes the session over. The
answer is the newest observation, with `step_count` in its metadata, so that a client knows whether its last step
arrived. The id is in the metadata of every observation and can't be guessed. Without a connection, each request names
its session, which ends by itself when it is idle.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_env.config.serving import ServeLimits
from forge_env.environment.base import Environment
from forge_env.errors import ForgeError, InfrastructureError, UsageError, mistakes
from forge_env.http.limits import RefusedRequestError, check_structure
from forge_env.types import FunctionCall, Message, ToolCall, ToolSpec

log = logging.getLogger(__name__)

# --- messages


class WireError(Exception):
    """Error that is sent to the client as an error message.

    `code`: INVALID_JSON, UNKNOWN_TYPE, VALIDATION_ERROR, EXECUTION_ERROR, CAPACITY_REACHED, FACTORY_ERROR or
    SESSION_ERROR.
    """

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.details = details

    def reply(self) -> dict[str, Any]:
        """The error as a message."""
        return {"type": "error", "data": {"message": str(self), "code": self.code, **self.details}}


class AssistantAction(BaseModel):
    """What the agent says: the text of its message, and tool calls in OpenAI's format."""

    model_config = ConfigDict(extra="forbid")

    message: str = Field(description="text of the assistant's message")
    tool_calls: list[ToolCall] = Field(default_factory=list, description="tool calls in OpenAI's format")
    metadata: dict[str, Any] = Field(default_factory=dict)


class CallTool(BaseModel):
    """One tool call, as OpenEnv's tool clients send it."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["call_tool"]
    tool_name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)


class ListTools(BaseModel):
    """A look at the tools, which is not a step."""

    type: Literal["list_tools"]


class TextObservation(BaseModel):
    """What the agent sees next: the new messages, in OpenAI's format."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    text: str = ""
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)


class Result(BaseModel):
    """What `reset` and `step` answer."""

    observation: TextObservation
    reward: float | None
    done: bool


class EpisodeState(BaseModel):
    """The state of an episode."""

    episode_id: str | None = None
    step_count: int = 0
    task_id: str | None = None


class Refusal(BaseModel):
    """The answer to a request that was refused; `code` as in `WireError`."""

    model_config = ConfigDict(extra="allow")

    detail: str
    code: str


RESET: dict[str, Any] = {
    "seed": {"type": ["integer", "null"], "minimum": 0},
    "index": {"type": ["integer", "null"], "minimum": 0},
    "split": {"type": ["string", "null"]},
    "episode_id": {"type": ["string", "null"]},
    "metadata": {},
}
"""JSON schemas of the keys that `reset` accepts."""


def schemas() -> dict[str, Any]:
    """JSON schemas of action, observation and state, as returned by `/schema`."""
    return {
        "action": AssistantAction.model_json_schema(),
        "observation": TextObservation.model_json_schema(),
        "state": EpisodeState.model_json_schema(),
    }


def parse_json(text: str | bytes) -> Any:
    """Parse the JSON of a message or a body. `WireError`: it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError("INVALID_JSON", f"not valid JSON: {str(error)[:200]}") from None


def parse_message(text: str) -> Any:
    """Check the structure of a WebSocket message and parse it; return its value, or the `WireError` to answer."""
    try:
        check_structure(text.encode("utf-8", "surrogatepass"))
        return parse_json(text)
    except RefusedRequestError as error:
        return WireError("INVALID_JSON", f"not valid JSON: {error.message}")
    except WireError as error:
        return error


def message_of(data: Any) -> dict[str, Any]:
    """Validate one message of a client."""
    if isinstance(data, WireError):
        raise data
    if not isinstance(data, dict) or not isinstance(data.get("data", {}), dict):
        raise WireError("VALIDATION_ERROR", "a message must be an object with a type, and data that is an object")
    return data


def parse_action(data: Mapping[str, Any], call_id: str) -> Message:
    """Convert the data of a `step` into an assistant message. `WireError`: the data is not a valid action."""
    try:
        if data.get("type") == "call_tool":
            call = CallTool.model_validate(data)
            function = FunctionCall(name=call.tool_name, arguments=json.dumps(call.arguments))
            return Message(role="assistant", tool_calls=[ToolCall(id=call_id, function=function)])
        action = AssistantAction.model_validate(data)
    except ValidationError as error:
        raise WireError("VALIDATION_ERROR", f"{mistakes(error)}; an action is {{'message': text}}") from None
    return Message(role="assistant", content=action.message, tool_calls=action.tool_calls)


def _whole(value: Any) -> Any:
    """Convert floats such as 3.0 to integers; JSON Schema counts them as integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def observation_reply(
    messages: Sequence[Message],
    metadata: Mapping[str, Any],
    *,
    reward: float | None = None,
    terminated: bool = False,
    truncated: bool = False,
    info: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the answer to `reset` or `step`; `extra` is merged into the observation."""
    observation = TextObservation(
        messages=[message.to_openai() for message in messages],
        text="\n\n".join(message.content for message in messages),
        terminated=terminated,
        truncated=truncated,
        info=json.loads(json.dumps(dict(info or {}), default=str), parse_constant=str),  # NaN isn't JSON
        metadata=dict(metadata),
    )
    data = {
        "observation": {**observation.model_dump(), **(extra or {})},
        "reward": reward,
        "done": terminated or truncated,
    }
    return {"type": "observation", "data": data}


def tool_entry(spec: ToolSpec) -> dict[str, Any]:
    """A tool in the format of OpenEnv's list of tools."""
    return {"name": spec.name, "description": spec.description, "input_schema": spec.parameters}


# --- sessions


class Session:
    """One client's environment and its last answer."""

    def __init__(self, make_env: Callable[[], Environment], limits: ServeLimits, counts: Counter[str]) -> None:
        self._make_env = make_env
        self.env = make_env()
        self.limits = limits
        self._counts = counts
        self.state = EpisodeState()
        self.id = uuid.uuid4().hex
        self.let_go: Callable[[], None] | None = None
        """Called when another connection takes the session over; None without a connection."""
        self.turn: asyncio.Lock | None = None
        """Serializes the requests that name it; None if it has a connection, waits for one, or is closed."""
        self.ending: asyncio.Task[None] | None = None
        """Task that closes the session when its time limit has passed."""
        self.working: asyncio.Task[dict[str, Any]] | None = None
        """Task that computes the current answer."""
        self.opening: list[dict[str, Any]] = []
        """First messages of the episode, in OpenAI's format."""
        self._last: dict[str, Any] | None = None
        self._playing = False

    @property
    def waiting(self) -> bool:
        """Whether its connection broke and its client may still reconnect."""
        return self.ending is not None and self.turn is None

    @property
    def started(self) -> bool:
        """Whether an episode was started; it may have ended."""
        return self._last is not None

    async def work(self, answer: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Compute an answer; the computation continues if the caller is cancelled."""
        self.working = asyncio.create_task(answer)
        await asyncio.wait([self.working])
        if self.working.cancelled():
            raise WireError("EXECUTION_ERROR", "cancelled: the client sent another message")
        return self.working.result()

    async def finish(self, *, cancel: bool = False) -> None:
        """Wait for the current answer, or cancel it."""
        if self.working is not None and not self.working.done():
            if cancel:
                self.working.cancel()
            await asyncio.wait([self.working])

    async def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Start an episode. Accepted keys are `seed`, `episode_id`, `split` and `index`; others are errors."""
        if unknown := data.keys() - RESET.keys():
            raise WireError(
                "VALIDATION_ERROR", f"reset has no key {sorted(unknown)[0]!r}; use seed, episode_id, split, index"
            )
        data = {name: _whole(value) for name, value in data.items() if value is not None}
        for name, kind in (("seed", int), ("index", int), ("split", str), ("episode_id", str)):
            if name in data and (not isinstance(data[name], kind) or isinstance(data[name], bool)):
                raise WireError("VALIDATION_ERROR", f"{name} is not of type {kind.__name__}")
            if kind is int and data.get(name, 0) < 0:
                raise WireError("VALIDATION_ERROR", f"{name} is below 0")
        options: dict[str, Any] = {name: data[name] for name in ("split", "index") if name in data}
        self._playing = False
        async with self._in_time("reset"):
            if not self.env.reusable:  # a tool call that timed out still runs in it
                previous, self.env = self.env, self._make_env()
                await previous.close()
            observation, info = await self.env.reset(seed=data.get("seed"), options=options or None)
        self._playing = True
        self.state = EpisodeState(
            episode_id=data.get("episode_id") or uuid.uuid4().hex, task_id=str(info.get("task_id", "")) or None
        )
        self._last = observation_reply(observation, self._metadata(), info=info)
        self.opening = self._last["data"]["observation"]["messages"]
        return self._last

    async def step(self, data: Mapping[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Run an assistant message or a tool call, or list the tools (which is not a step).

        Args:
            timeout_s: wall-clock limit in seconds, if lower than the server's.
        """
        if data.get("type") == "list_tools":
            tools = [tool_entry(spec) for spec in self.env.tools]
            return observation_reply([], self._metadata(), extra={"tools": tools})
        if not self._playing:
            raise WireError("SESSION_ERROR", "there is no running episode: reset first")
        action = parse_action(data, f"call-{self.state.step_count}")
        async with self._in_time("step", timeout_s):
            observation, reward, terminated, truncated, info = await self.env.step(action)
        self.state.step_count += 1
        self._playing = not (terminated or truncated)
        extra = None
        if data.get("type") == "call_tool":
            answer = next((message.content for message in observation if message.role == "tool"), None)
            extra = {"tool_name": data["tool_name"], "result": answer, "error": None}
        self._last = observation_reply(
            observation,
            self._metadata(),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info=info,
            extra=extra,
        )
        return self._last

    def last_reply(self) -> dict[str, Any]:
        """The newest observation again, for a client that reconnected."""
        if self._last is None:
            raise WireError("SESSION_ERROR", "there is no running episode: reset first")
        return self._last

    def _metadata(self) -> dict[str, Any]:
        return {**self.state.model_dump(), "session_id": self.id}

    @asynccontextmanager
    async def _in_time(self, what: str, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Run the environment's code with a time limit; any error ends the episode and is raised as `WireError`."""
        seconds = self.limits.step_timeout if timeout_s is None else min(timeout_s, self.limits.step_timeout)
        self._counts[what] += 1
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            self._playing = False
            self._counts["failed"] += 1
            text = f"{what} took longer than {seconds:g} s; reset"
            raise WireError("EXECUTION_ERROR", text, retriable=True) from None
        except WireError:
            raise
        except UsageError as error:  # a mistake of the client, such as an unknown split
            self._playing = False
            raise WireError("VALIDATION_ERROR", str(error)) from error
        except asyncio.CancelledError:
            self._playing = False
            raise
        except Exception as error:  # errors of one environment must not stop the server
            self._playing = False
            self._counts["failed"] += 1
            if not isinstance(error, ForgeError):
                log.exception("%s of a served environment failed", what)
            retriable = isinstance(error, InfrastructureError)
            raise WireError("EXECUTION_ERROR", f"{type(error).__name__}: {error}", retriable=retriable) from error


class Sessions:
    """All sessions of a server: those attached to connections, and those named by requests."""

    def __init__(self, make_env: Callable[[], Environment], limits: ServeLimits) -> None:
        self.make_env = make_env
        self.limits = limits
        self.counts: Counter[str] = Counter()
        """Number of calls of `reset` and `step`, and of those that `failed`."""
        self._sessions: dict[str, Session] = {}
        """Sessions by id; those waiting for their client are in the order in which they lost their connection."""

    def __len__(self) -> int:
        return len(self._sessions)

    async def open(self, *, named: bool = False) -> Session:
        """Open a session. If all are in use, the one that has waited longest for its client is closed to make room.

        Args:
            named: whether requests name the session, instead of a connection holding it.
        """
        count = len(self._sessions)
        if count >= self.limits.max_sessions:
            oldest = next((session for session in self._sessions.values() if session.waiting), None)
            if oldest is None:
                raise WireError(
                    "CAPACITY_REACHED", f"all {count} sessions are in use", active_sessions=count, max_sessions=count
                )
            await self.close(oldest)
        try:
            session = Session(self.make_env, self.limits, self.counts)
        except ForgeError as error:
            raise WireError("FACTORY_ERROR", str(error)) from error
        self._sessions[session.id] = session
        if named:
            session.turn = asyncio.Lock()
            self._end_in(session, self.limits.idle_timeout)
        return session

    async def begin(self, data: Mapping[str, Any]) -> tuple[Session, dict[str, Any]]:
        """Open a session for requests to name, and start an episode; return the session and the answer of `reset`."""
        session = await self.open(named=True)
        try:
            return session, await self.use(session, session.reset(data))
        except BaseException:  # also if cancelled: the client doesn't know the session yet
            await self.close(session)
            raise

    def find(self, session_id: str) -> Session:
        """Return the session that a request names. `WireError`: it doesn't exist, or not any more."""
        session = self._sessions.get(session_id)
        if session is None or session.turn is None:
            raise WireError("SESSION_ERROR", f"there is no session {session_id[:64]!r}: reset first")
        return session

    async def use(self, session: Session, answer: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Compute an answer. Requests that name a session take turns; a connection sends one at a time anyway."""
        if session.let_go is not None:
            return await session.work(answer)
        async with session.turn or asyncio.Lock():
            if session.turn is None:
                answer.close()
                raise WireError("SESSION_ERROR", "the session was closed")
            self._stay(session)
            try:
                return await session.work(answer)
            finally:
                if session.turn is not None:
                    self._end_in(session, self.limits.idle_timeout)

    def take(self, session_id: str, let_go: Callable[[], None]) -> Session | None:
        """Attach the session of this id to a connection and return it; None if it doesn't exist, or not any more."""
        session = self._sessions.get(session_id)
        if session is None:
            return None
        self._stay(session)
        session.turn = None
        if session.let_go is not None and session.let_go != let_go:
            session.let_go()
        session.let_go = let_go
        return session

    def detach(self, session: Session) -> None:
        """Keep a session whose connection broke for `ServeLimits.reconnect` seconds."""
        if self._sessions.pop(session.id, None) is not None:
            self._sessions[session.id] = session
            session.let_go = None
            self._end_in(session, self.limits.reconnect)

    async def close(self, session: Session) -> None:
        """Close a session and its environment; further calls have no effect."""
        self._stay(session)
        session.turn = None
        if self._sessions.pop(session.id, None) is not None:
            await session.finish(cancel=True)
            try:
                await session.env.close()
            except ForgeError:
                log.warning("closing a served environment failed", exc_info=True)

    async def close_all(self) -> None:
        """Close all sessions, when the server shuts down."""
        for session in list(self._sessions.values()):
            await self.close(session)

    def _end_in(self, session: Session, seconds: float) -> None:
        async def end() -> None:
            await asyncio.sleep(seconds)
            session.ending = None  # it is this task, which must not be cancelled any more
            await self.close(session)

        self._stay(session)
        session.ending = asyncio.create_task(end())

    def _stay(self, session: Session) -> None:
        if session.ending is not None:
            session.ending.cancel()
            session.ending = None
