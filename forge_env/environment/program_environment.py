"""Environments whose agent is a program with its own loop, which calls the policy as its model.

    class Repair(fe.ProgramEnvironment):
        command = ("python", "agent.py", "{instruction}")
        rubric = fe.Rubric(hidden_tests_pass)

        def files(self, task):
            return {"agent.py": AGENT, "broken.py": task.data["public_code"]}

The program runs unchanged in the episode's sandbox, which has no network except the model's address. It sends requests
to the model at OPENAI_BASE_URL or ANTHROPIC_BASE_URL (`forge_env.gateway`). A request is an observation, and the
policy's action is its answer. When the program ends, its sandbox is returned, and the rubric scores its files outside
of a sandbox or in a fresh one:

    reset()       starts the program, waits for its first request
    step(action)  answers the request, waits for the next one, or for the program's end

A program may rewrite its history, send concurrent requests and have sub-agents: a request that doesn't continue an
earlier conversation starts a new one (`forge_env.gateway.conversations`), named in `info["seat"]`.
"""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field

from forge_env.concurrency import to_its_end
from forge_env.environment.base import EnvironmentConfig
from forge_env.environment.sandbox_environment import SandboxEnvironment, SandboxEnvironmentConfig, as_text
from forge_env.errors import (
    AgentError,
    EnvironmentBugError,
    InfrastructureError,
    ProgramCrashError,
    UsageError,
    crash_of,
    raised_by_platform,
)
from forge_env.gateway.conversations import Conversation, Conversations
from forge_env.gateway.request import Answer, ModelRequest
from forge_env.gateway.server import Access, shared_gateway
from forge_env.http.limits import RefusedRequestError
from forge_env.policy import READS_IMAGES
from forge_env.rewards.reasons import explain
from forge_env.sandbox import ExecResult, Limits, Programs
from forge_env.sandbox.spec import ORIGIN_URL
from forge_env.types import Action, Branch, Message, Observation, ResetResult, StepResult, Task, ToolSpec, as_message
from forge_env.working_time import limited_elsewhere

_DIRECT = dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1")
"""Variables by which clients bypass the proxy for the model: some can't use a proxy for a local address."""
MOST_FILES = 100
"""Maximum number of a program's files that the record names."""


class ProgramEnvironmentConfig(SandboxEnvironmentConfig):
    """Limits of the program.

    Examples:
        >>> import forge_env as fe
        >>> fe.ProgramEnvironmentConfig(max_turns=10).lifetime_s
        3600.0
    """

    max_turns: int = Field(50, ge=1)
    """Requests to the model in one episode before it is truncated."""
    wall_s: float = Field(120.0, gt=0)
    """Maximum seconds from the program's start or an answer to its next request or end, without the model's time."""
    lifetime_s: float = Field(3600.0, gt=0)
    """Maximum seconds of the program in total, including the model's time."""
    grace_s: float = Field(2.0, ge=0)
    """Seconds for the program to end after its requests are no longer answered; then it is killed."""
    memory_mb: int = Field(512, ge=32)
    """Maximum memory of each of the program's processes, MiB."""
    output_chars: int = Field(4096, ge=0)
    """Maximum characters in the record: of the program's output (its end), and of its files (their beginnings)."""


@dataclass(eq=False, slots=True)
class _Asked:
    """A model request of the program that waits for its answer."""

    request: ModelRequest
    answer: asyncio.Future[Message]


class ProgramEnvironment(SandboxEnvironment):
    """An environment whose agent is a program; the module's docstring describes an episode.

    Args:
        config: options, an object of `config_class`; None: the defaults.
        context: `sandboxes`, the started engine.

    Examples:
        >>> import forge_env as fe
        >>> class Writer(fe.ProgramEnvironment):
        ...     command = ("python", "agent.py", "{instruction}")
        ...     rubric = fe.Rubric(lambda completion: float("done" in completion))
        ...
        ...     def task(self, split, index):
        ...         return fe.Task(id=f"{split}-{index}", prompt="Write a poem.", split=split)
        >>> env = Writer()
        >>> env.argv(env.task("eval", 0))
        ['python', 'agent.py', 'Write a poem.']
    """

    config_class: ClassVar[type[EnvironmentConfig]] = ProgramEnvironmentConfig
    command: ClassVar[Sequence[str]] = ()
    """The program and its arguments, run in the work folder; `{instruction}` is replaced by the task's prompt."""
    ended: ExecResult | None = None
    """Result of the program, for reward functions; None: it is still running."""

    def __init__(self, config: EnvironmentConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        if isinstance(self.command, str):
            fix = f"set `command = {tuple(self.command.split())}`, one string for each argument"
            raise UsageError(f"{type(self).__name__}.command is a string", fix=fix)
        self._access: Access | None = None
        self._program: asyncio.Task[ExecResult] | None = None
        self._asked: asyncio.Queue[_Asked] = asyncio.Queue()
        self._current: tuple[_Asked, Conversation] | None = None
        self._branch: Branch | None = None
        self._conversations = Conversations()
        self._left_out: Counter[str] = Counter()
        """Requests that offered tools of a type that runs on the provider's servers, by type."""
        self._reads_images = True
        self._overdue = False
        self._stopped = ""
        """Why the gateway has stopped the program, or an empty string."""
        self._crash: AgentError | None = None
        """Exception of an author's `run` method."""

    # Methods that an author may override.

    def argv(self, task: Task) -> Sequence[str]:
        """The program and its arguments for a task; `command` by default.

        Args:
            task: the task of this episode.
        """
        if not self.command:
            raise UsageError(f"{type(self).__name__} has no command", fix='set `command = ("python", "agent.py")`')
        return [part.replace("{instruction}", task.prompt) for part in self.command]

    def environment(self, task: Task) -> dict[str, str]:
        """Environment variables of the program, besides those with the model's address and key.

        Args:
            task: the task of this episode.
        """
        return {}

    async def run(self, task: Task, access: Access) -> ExecResult:
        """Run the program in the sandbox until it ends. Override it for a trusted program that runs elsewhere.

        It is cancelled to end the program early.

        Args:
            task: the task to solve.
            access: access to the model.
        """
        process = await Programs.of(self.sandbox).spawn(
            list(self.argv(task)), env={**_DIRECT, **access.environment, **self.environment(task)}, limits=self.limits
        )
        try:
            await process.write(b"", end=True)  # some read their standard input to its end
            result = await process.wait(self.config.lifetime_s)
            return ExecResult(exit_code=None, timed_out=True) if result is None else result
        except asyncio.CancelledError:
            output = await to_its_end(asyncio.ensure_future(process.read()))
            self.ended = ExecResult(exit_code=None, stdout=output[0], stderr=output[1], timed_out=self._overdue)
            raise
        finally:
            await to_its_end(asyncio.ensure_future(process.kill()))

    # Implementation.

    @property
    def limits(self) -> Limits:
        """The config's limits of the program."""
        return replace(super().limits, wall_s=self.config.lifetime_s)

    @property
    def tools(self) -> list[ToolSpec]:
        """Tools that the current request offers."""
        return [] if self._current is None else self._current[1].tools

    @property
    def answer(self) -> str:
        """The program's standard output; empty while it runs."""
        return "" if self.ended is None else self.ended.stdout.strip()

    @property
    def conversations(self) -> dict[str, list[Message]]:
        """Messages of each conversation as the program knows them, by the names that `credits` uses."""
        return {each.name: list(each.messages) for each in self._conversations}

    def prompt(self, task: Task) -> Observation:
        """Return no messages: the program writes the prompts."""
        return []

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start the program and wait for its first request.

        Raises:
            EnvironmentBugError: the program ended or timed out before its first request.
        """
        _, info = await super().reset(seed=seed, options=options)
        gateway = await shared_gateway()
        self._access = gateway.open(self._ask, url=ORIGIN_URL if self._sandboxed else None)
        self._program = asyncio.create_task(self.run(self.current_task, self._access))
        observation = await self._next()
        if observation is None:
            await self._finish("it sent no request")
            within, fix = "", "send its requests to OPENAI_BASE_URL or ANTHROPIC_BASE_URL"
            if self._stopped:
                within = f" that could be answered ({self._stopped})"
            if self._overdue:
                within = f" within {self.config.wall_s:g} s"
                fix += "; on a busy machine, or if it starts slowly, raise environment.options.wall_s"
            failed = self.ended is not None and self.ended.exit_code not in (0, None)
            raise (ProgramCrashError if failed else EnvironmentBugError)(
                f"the program of task {self.current_task.id!r} sent no request to the model{within}: {self._told()}",
                fix=fix,
            )
        return observation, {**info, **self._whose()}

    async def step(self, action: Action) -> StepResult:
        """Answer the current request, and wait for the next one or for the program's end."""
        if self._state != "running" or self._current is None:
            raise UsageError("step() without a running episode", fix="call reset() first")
        self.turns += 1
        self._reply(as_message(action))
        observation = await self._next()
        if observation is not None and self.turns < self.config.max_turns:
            return observation, 0.0, False, False, self._whose()
        if observation is not None:
            truncation: str | None = "turns"
            await self._finish(f"all {self.config.max_turns} requests of this episode are used up")
        else:
            truncation = "program_time" if self._overdue else "refused_requests" if self._stopped else None
            await self._finish("the episode has ended")
        if self._crash is not None and truncation is None:
            self._state = "ended"
            return self._last_words(), 0.0, True, False, {"metrics": self._counted(), "crash": self._crash}
        reward, metrics = await self._scored()
        if self.ended is not None and self.ended.exit_code and truncation is None:
            explain("agent crashed", [self._told()])
        info: dict[str, Any] = {"metrics": metrics}
        if truncation is not None:
            info["truncation"] = truncation
        return self._last_words(), reward, truncation is None, truncation is not None, info

    async def truncate(self, reason: str) -> tuple[float, dict[str, float]]:
        """End the episode because of an external limit: the program gets no more answers and `grace_s` to end."""
        if self._state == "running":
            await self._finish(f"the episode has ended: its limit of {reason} is reached")
        return await super().truncate(reason)

    def counters(self) -> dict[str, float]:
        """Metrics of every episode, besides the rubric's."""
        ended = self.ended
        counts = {
            "turns": float(self.turns),
            "conversations": float(len(self._conversations)),
            **self._conversations.reasons(),
            **self._conversations.rewrites(),
            **{f"left_out/{kind}": float(count) for kind, count in self._left_out.items()},
        }
        if ended is not None:
            counts["exit_code"] = float(-1 if ended.exit_code is None else ended.exit_code)
        return counts

    async def _scored(self) -> tuple[float, dict[str, float]]:
        await self._give_back()  # its files are scored in a fresh sandbox
        return await super()._scored()

    # --- the program

    @property
    def _sandboxed(self) -> bool:
        return type(self).run is ProgramEnvironment.run

    async def _begin(self, task: Task) -> None:
        gateway = await shared_gateway()
        if self._sandboxed:
            self._origin = f"127.0.0.1:{gateway.port}"
        self.ended = self._current = self._crash = None
        self._asked = asyncio.Queue()
        self._conversations = Conversations()
        self._left_out.clear()
        self._reads_images = READS_IMAGES.get()
        self._overdue = False
        self._stopped = ""
        await super()._begin(task)

    async def _end(self) -> None:
        try:
            await self._finish("the episode has ended")
        finally:
            await super()._end()

    async def _ask(self, request: ModelRequest) -> Message:
        """Queue a request and wait for its answer; requests are answered one at a time."""
        if request.images and not self._reads_images:
            why = "a message has an image: this model reads text only"
            raise RefusedRequestError(why, code="unsupported_content")
        asked = _Asked(request, asyncio.get_running_loop().create_future())
        self._asked.put_nowait(asked)
        return await asked.answer

    async def _next(self) -> Observation | None:
        """Wait for the next request; return its conversation's new messages, or None if the program ended or timed out.

        None is also returned after the gateway has stopped the program.
        """
        assert self._program is not None
        assert self._access is not None
        self._current = None
        asking = asyncio.ensure_future(self._asked.get())
        stopped = asyncio.ensure_future(self._access.stopped.wait())
        try:
            with limited_elsewhere():
                async with asyncio.timeout(self.config.wall_s):
                    while True:
                        await asyncio.wait([asking, stopped, self._program], return_when=FIRST_COMPLETED)
                        if stopped.done():
                            self._stopped = self._access.closed
                            return None
                        if self._program.done():  # its background processes may still send requests
                            return None
                        asked = asking.result()
                        if not asked.answer.done():
                            break
                        asking = asyncio.ensure_future(self._asked.get())  # the client has disconnected
        except TimeoutError:
            self._overdue = True
            return None
        finally:
            asking.cancel()
            stopped.cancel()
        conversation, new, self._branch = self._conversations.place(asked.request.messages, asked.request.tools)
        self._current = asked, conversation
        self._left_out.update({*asked.request.left_out})
        self.messages += new
        return new

    def _whose(self) -> dict[str, Any]:
        """Entries of `info`: the current conversation, and the branch with which it started, if any."""
        assert self._current is not None
        began = {} if self._branch is None else {"branch": self._branch.model_dump()}
        return {"seat": self._current[1].name, **began}

    def _reply(self, message: Message) -> None:
        assert self._current is not None
        asked, conversation = self._current
        self.messages.append(message)
        answer = Answer.of(message, asked.request.stop).message
        shown = self._conversations.answered(conversation, answer, cut=answer is not message)
        if not asked.answer.done():
            asked.answer.set_result(shown)

    async def _finish(self, reason: str) -> None:
        """Stop answering requests, and end the program: kill it if it takes longer than `grace_s`."""
        self._current = None
        if self._access is not None:
            self._access.close(reason)
            self._access = None
        program, self._program = self._program, None
        if program is None:
            return
        try:
            with limited_elsewhere():
                await asyncio.wait([program], timeout=0.0 if self._overdue else self.config.grace_s)
        finally:
            program.cancel()
            await to_its_end(asyncio.ensure_future(asyncio.wait([program])))
        if program.cancelled():
            self.ended = self.ended or ExecResult(exit_code=None, timed_out=self._overdue)
        elif (error := program.exception()) is None:
            self.ended = program.result()
        elif isinstance(error, EnvironmentBugError) or (
            isinstance(error, InfrastructureError | UsageError) and raised_by_platform(error)
        ):
            raise error
        else:  # raised by an author's `run` method
            self._crash = crash_of(f"{type(self).__name__}.run", error)
            self.ended = ExecResult(exit_code=1, stderr=f"{type(error).__name__}: {error}")

    def _told(self) -> str:
        text = "it was still running" if self.ended is None else as_text(self.ended)
        return text[max(0, len(text) - self.config.output_chars) :]

    def _last_words(self) -> Observation:
        """Final message for the record: the program's output, exit status and files. The policy doesn't see it."""
        lines = ["[the program has ended]", self._told(), *self._wrote()]
        return [Message(role="user", content="\n".join(lines))]

    def _wrote(self) -> Iterator[str]:
        """Describe the files that the program wrote or changed."""
        room = self.config.output_chars
        begun = {name: text.encode() if isinstance(text, str) else text for name, text in self._given.items()}
        wrote = [(name, data) for name, data in (self._left or {}).items() if data != begun.get(name)]
        for name, data in wrote[:MOST_FILES]:
            text = "" if b"\0" in data else data[: 4 * room].decode("utf-8", "replace")[:room]
            room -= len(text)
            yield f"[it wrote {name}: {len(data)} bytes]\n{text}".rstrip("\n")
        if len(wrote) > MOST_FILES:
            yield f"[and {len(wrote) - MOST_FILES} more files]"
