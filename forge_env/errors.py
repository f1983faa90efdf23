"""Every error that forge-env raises on purpose.

The distinction that matters runs through the whole platform: what the *agent* did wrong is an
observation, never an exception; what the *infrastructure* did wrong is an `InfrastructureError`,
retried and then excluded from statistics; what the *user* wrote wrong is a `UsageError`, shown in one
line with its fix.
"""

from __future__ import annotations

import difflib
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from forge_env.redaction import redact
from forge_env.visible import shown

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_STDLIB = sysconfig.get_path("stdlib") + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PLATFORM = tuple(os.path.join(_HERE, room, "") for room in ("forge_env", "sandboxes", "trainers"))
_BUNDLED = os.path.join(_HERE, "environments", "")


class ForgeError(Exception):
    """Base of every deliberate error. `fix` says what the person can do about it.

    Args:
        message: what is wrong, and where.
        fix: what to do; shown in brackets.

    Examples:
        >>> import forge_env as fe
        >>> str(fe.ForgeError("the disk is full", fix="remove old runs"))
        'the disk is full (remove old runs)'
    """

    exit_code = 1
    truncates = False
    """Whether it ends an episode as truncated, also when a policy's own code raises it."""

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} ({self.fix})" if self.fix else self.message

    def __reduce__(self) -> tuple[object, ...]:  # keeps `fix` when an actor in another process raises it
        return partial(type(self), fix=self.fix), (self.message,)


class UsageError(ForgeError):
    """The command line, a recipe or a call is wrong: nothing was started.

    Args:
        message: what is wrong, and where.
        fix: what to do.

    Examples:
        >>> import forge_env as fe
        >>> fe.make("calculatr")
        Traceback (most recent call last):
        forge_env.errors.NotRegisteredError: ...
    """

    exit_code = 2


class ConfigError(UsageError):
    """A recipe does not validate."""


class NotRegisteredError(UsageError):
    """No environment, engine, trainer or loss of that name is installed."""


class PluginError(ForgeError):
    """An installed plug-in can't be loaded, or speaks another API version; the others go on working."""


class ToolError(ForgeError):
    """Raised inside a tool: the agent used it wrongly. The message becomes the tool's answer to the model.

    Args:
        message: what the agent reads.
        fix: shown to it in brackets.

    Examples:
        >>> import forge_env as fe
        >>> def divide(a: float, b: float) -> float:
        ...     if b == 0:
        ...         raise fe.ToolError("can't divide by zero")
        ...     return a / b
        >>> divide(1, 0)
        Traceback (most recent call last):
        forge_env.errors.ToolError: can't divide by zero
    """


class SandboxPathError(UsageError):
    """A path that is not inside a sandbox's work folder. In a tool it is the agent's mistake, and answered."""


class SandboxFileError(OSError):
    """A file of a sandbox that can't be read or written. In a tool it is the agent's mistake, and answered."""

    def __str__(self) -> str:
        return f"{self.strerror}: {self.filename}"


class SandboxFileNotFoundError(SandboxFileError, FileNotFoundError):
    """A sandbox has no such file."""


class ContextLengthExceeded(ForgeError):
    """The conversation no longer fits the model's context: the policy raises it, the episode is truncated."""

    truncates = True


class ChatFormatError(ForgeError):
    """The model's chat format can't write what the conversation has become: the policy raises it, the episode is
    truncated. Programs send what they like, and some formats take a system message only at the beginning."""

    truncates = True


class EnvironmentBugError(ForgeError):
    """The environment's own code (prompt, tool, reward function) raised; shown with its task, never scored as zero."""

    place = ""
    """What raised, and where, in the process that met it."""

    @property
    def same(self) -> str:
        """The same for the same bug on other tasks, as far as that is known."""
        return self.place or self.message


class AgentError(ForgeError):
    """The agent's own code raised (a scripted agent, a policy's function, a program). The episode scores 0."""


class ProgramCrashError(EnvironmentBugError):
    """The program of a `ProgramEnvironment` failed before its first request to the model.

    In training, where nothing was sampled, it is a bug of the environment; in an evaluation, it is a crash of the
    agent, which scores 0.
    """


class HeldUpError(BaseException):
    """Thrown into code that holds up the event loop (`environment_code` makes an `EnvironmentBugError` of it), and into
    tools in threads that go on when their episode is over.

    No `Exception`, so that an author's `except Exception` doesn't keep an endless loop going.
    """


class InfrastructureError(ForgeError):
    """Something outside the agent's control failed: retry it, then mark the episode invalid.

    Args:
        message: what failed.
        fix: what to do.

    Examples:
        >>> import forge_env as fe
        >>> issubclass(fe.SandboxError, fe.InfrastructureError)
        True
    """

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(redact(message), fix=fix)  # servers repeat the keys that they refuse


class SandboxError(InfrastructureError):
    """A sandbox or its engine was lost, could not start, or answered out of protocol.

    Args:
        message: what failed.
        fix: what to do.

    Examples:
        >>> import forge_env as fe
        >>> raise fe.SandboxError("the sandbox was lost")
        Traceback (most recent call last):
        forge_env.errors.SandboxError: the sandbox was lost
    """


class ContractError(ForgeError):
    """What is trained is not what was sampled, served or asked: going on would train something else (docs/trust.md)."""


class SandboxUnavailableError(ForgeError):
    """This machine can't isolate code the way the engine needs; execution is refused."""


class ImageError(SandboxUnavailableError):
    """An image can't be built here; others may."""


class GeneratorError(InfrastructureError):
    """The model endpoint or generator died or refused a request."""


def did_you_mean(name: str, choices: Iterable[str]) -> str | None:
    """The choice that `name` was probably meant to be, or None."""
    return next(iter(difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)), None)


def suggestion(name: str, choices: Iterable[str], otherwise: str) -> str:
    """The fix for a name that isn't known: the choice that was probably meant, or else what to do otherwise."""
    guess = did_you_mean(name, choices)
    return f"did you mean {guess!r}?" if guess else otherwise


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line."""
    return next(iter(redact(str(error)).strip().splitlines()), type(error).__name__)[:300]


def root_cause(error: BaseException) -> BaseException:
    """The exception to show for a group of them: a deliberate one where there is one, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [root_cause(inner) for inner in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, ForgeError)), causes[0])


def is_library(filename: str) -> bool:
    """Whether this frame is of the standard library or pydantic, and so not where the mistake is."""
    if f"{os.sep}pydantic{os.sep}" in filename:
        return True
    return filename.startswith(("<frozen", _STDLIB)) and "site-packages" not in filename


def _is_mistake(error: BaseException) -> bool:
    """Whether code that raised this failed: also by `sys.exit`, or a cancellation that nobody asked its task for.

    Passed on, the one would end the program without a word, and the other a rollout.
    """
    import asyncio

    if isinstance(error, Exception | SystemExit):
        return True
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


def in_words(item: ErrorDetails) -> str:
    """What one of pydantic's errors says, without its key: `should be a valid integer, not 'x'`."""
    kind, given = item["type"], item["input"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return "unknown key"
    if kind in ("missing", "missing_argument"):
        return "missing"
    if kind in ("value_error", "assertion_error"):  # an author's own words
        return item["msg"].partition(", ")[2]
    if kind in ("model_type", "dataclass_type", "dict_type", "model_attributes_type"):
        message = "should be a mapping of keys to values"
    else:
        message = item["msg"].removeprefix("Input ").partition(", unable to")[0]
        message = message[:1].lower() + message[1:]
    text = shown(given, 61)
    return message if len(text) > 60 or isinstance(given, dict) else f"{message}, not {text}"


def mistakes(error: ValidationError, most: int = 5) -> str:
    """What pydantic refused, in one line: `a.b: should be a valid integer, not 'x'; c: missing`."""
    items = error.errors(include_url=False)[:most]
    return "; ".join(": ".join(filter(None, [".".join(map(str, item["loc"]))[:80], in_words(item)])) for item in items)


def misfit(default: object, hint: Any) -> str | None:
    """Why a default doesn't fit its type hint, which pydantic itself never looks at; None where it does."""
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    try:
        fitting: Any = TypeAdapter(hint).validate_python(default)
    except ValidationError as error:
        return mistakes(error, most=1)
    except PydanticUserError:  # a hint that pydantic doesn't know: whoever uses it says so
        return None
    if fitting is default or fitting == default or isinstance(fitting, float):
        return None
    return f"should be {shown(fitting)}, not {shown(default)}"


@contextmanager
def agent_code(what: str, function: object = None) -> Iterator[None]:
    """Run an agent's own code: what it raises becomes `AgentError`, whatever its class.

    These propagate: what truncates an episode, and errors that forge-env raised, such as those of an endpoint or a
    sandbox that the agent uses. A `UsageError` of a call that the agent made is the agent's mistake.

    Args:
        what: is run.
        function: that is called; its first line is named where none of its own frames raised (a wrong signature).
    """
    try:
        yield
    except BaseException as error:  # anything that the agent's code raises, even SystemExit
        if isinstance(error, ForgeError):
            called = bool(_authors(traceback.extract_tb(error.__traceback__)))
            agents = called and (isinstance(error, UsageError) or not raised_by_platform(error))
            if error.truncates or not agents:
                raise
        elif not _is_mistake(error):
            raise
        raise crash_of(what, error, function) from error


def raised_by_platform(error: BaseException) -> bool:
    """Whether forge-env raised an exception: the innermost function of its traceback, libraries aside, is its own."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    return bool(frames) and is_platform(frames[-1])


def crash_of(what: str, error: BaseException, function: object = None) -> AgentError:
    """The `AgentError` for an exception of the agent's code: `half raised KeyError: 'x' [half, agents.py:30]`."""
    frames = _authors(traceback.extract_tb(error.__traceback__))
    where = f"{frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno}" if frames else _definition(function)
    return AgentError(f"{what} raised {type(error).__name__}: {error}{where and f' [{where}]'}")


def _definition(function: object) -> str:
    """`name, file:line` of a function, or of an object's `__call__`."""
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "" if code is None else f"{code.co_name}, {code.co_filename}:{code.co_firstlineno}"


def with_place(error: BaseException) -> str:
    """`KeyError: 'x' [file:line]`."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} [{frame.filename}:{frame.lineno}]"


def is_platform(filename: str) -> bool:
    """Whether a file is one of forge-env's own."""
    return filename.startswith(_PLATFORM)


def author_place(stack: traceback.StackSummary, called: Callable[..., object] | None = None) -> str:
    """`judge (file.py:12)`: the innermost function of a stack that is neither a library's nor the platform's own.

    Args:
        stack: innermost function last.
        called: the author's function that was called. Its definition is named if the stack has no code of an author,
            because the call has not begun or has just ended.
    """
    code = getattr(called, "__code__", None)
    definition = [traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)] if code else []
    frame = (_authors(stack) or definition or stack)[-1]
    return f"{frame.name} ({frame.filename}:{frame.lineno})"


def _authors(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The functions of a stack that are neither a library's nor the platform's own."""
    return [frame for frame in stack if not (is_library(frame.filename) or is_platform(frame.filename))]


def is_environments(stack: traceback.StackSummary) -> bool:
    """Whether the innermost function of a stack, libraries aside, is not the platform's, and forge_env called it.

    That is code of an environment: losses and other plug-ins of training are called by `trainers`.
    """
    own = [frame.filename for frame in stack if not is_library(frame.filename)]
    callers = [filename for filename in own if filename.startswith(_PLATFORM)]
    return bool(callers) and own[-1] != callers[-1] and callers[-1].startswith(_PLATFORM[0])


CODE_TIMEOUT_S = 120.0
"""For an environment's code that was given no limit of its own."""
CODE_LIMIT_S: ContextVar[float] = ContextVar("code_limit_s", default=0.0)
"""How long the code of an environment that runs now may hold everything up, in seconds; 0: there is no
`environment_code` around it that would catch a `HeldUpError`."""
CODE_BLOCK: ContextVar[object] = ContextVar("code_block", default=None)
"""The outermost `environment_code` that runs now: what it may take begins with it."""
GIVEN_UP: ContextVar[list[str] | None] = ContextVar("given_up", default=None)
"""Where code was that a time limit cancelled, innermost first, for whoever set the limit."""


@contextmanager
def environment_code(what: str, task_id: str | None = None, *, limit_s: float = 0.0) -> Iterator[None]:
    """Run an environment author's code: its unexpected exceptions become `EnvironmentBugError`, typed ones pass.

    Args:
        what: is run.
        task_id: for which task.
        limit_s: seconds that it may hold everything up; 0: what is around it says.
    """
    place = "" if task_id is None else f" on task {task_id!r}"
    token = CODE_LIMIT_S.set(limit_s or CODE_LIMIT_S.get() or CODE_TIMEOUT_S)
    block = CODE_BLOCK.set(CODE_BLOCK.get() or object())
    try:
        yield
    except HeldUpError as error:
        bug = EnvironmentBugError(f"{what} {error}{place}", fix="end the loop there")
        bug.place = f"{what} {error}"
        raise bug from error
    except ForgeError as error:
        if isinstance(error, ToolError):  # outside a tool there is no model to tell
            raise EnvironmentBugError(f"{what} raised ToolError{place}: {error}") from error
        own = _authors(traceback.extract_tb(error.__traceback__))
        if isinstance(error, UsageError) and own and not own[-1].filename.startswith(_BUNDLED):
            where = f" [{own[-1].name}, {own[-1].filename}:{own[-1].lineno}]"  # who calls the platform wrongly
            error.message = error.message.removesuffix(where) + where
        raise
    except BaseException as error:  # the boundary of the author's code, which may even exit; what is no mistake goes on
        if not _is_mistake(error):
            if (given_up := GIVEN_UP.get()) is not None:
                given_up.append(f"{what}, in {author_place(traceback.extract_tb(error.__traceback__))}")
            raise
        from pydantic import ValidationError

        frames = traceback.extract_tb(error.__traceback__)
        own = _authors(frames) or [frame for frame in frames if not is_library(frame.filename)] or frames
        where = f"{own[-1].name}, {own[-1].filename}:{own[-1].lineno}"
        said = mistakes(error) if isinstance(error, ValidationError) else str(error)
        bug = EnvironmentBugError(f"{what} raised {type(error).__name__}{place}: {said} [{where}]")
        bug.place = f"{what} {type(error).__name__} [{where}]"
        raise bug from error
    finally:
        CODE_LIMIT_S.reset(token)
        CODE_BLOCK.reset(block)
