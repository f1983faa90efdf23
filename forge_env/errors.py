"""Exceptions that forge-env raises deliberately.

The whole platform distinguishes three kinds of failure. A mistake of the *agent* is an observation, never an
exception. A failure of the *infrastructure* is an `InfrastructureError`: it is retried, then excluded from statistics.
A mistake of the *user* is a `UsageError`, shown in one line with its fix.
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
    """Base class of all deliberate errors. `fix` is advice to the user.

    Args:
        message: the problem and its location.
        fix: what to do about it; shown in brackets.

    Examples:
        >>> import forge_env as fe
        >>> str(fe.ForgeError("the disk is full", fix="remove old runs"))
        'the disk is full (remove old runs)'
    """

    exit_code = 1
    truncates = False
    """Whether the error ends an episode as truncated, even if a policy's own code raises it."""

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} ({self.fix})" if self.fix else self.message

    def __reduce__(self) -> tuple[object, ...]:  # preserves `fix` across processes
        return partial(type(self), fix=self.fix), (self.message,)


class UsageError(ForgeError):
    """Invalid command line, recipe or call; nothing was started.

    Args:
        message: the problem and its location.
        fix: what to do about it.

    Examples:
        >>> import forge_env as fe
        >>> fe.make("calculatr")
        Traceback (most recent call last):
        forge_env.errors.NotRegisteredError: ...
    """

    exit_code = 2


class ConfigError(UsageError):
    """Invalid recipe."""


class NotRegisteredError(UsageError):
    """A name under which no environment, engine, trainer or loss is installed."""


class PluginError(ForgeError):
    """A plug-in that can't be loaded or has an incompatible API version; other plug-ins still work."""


class ToolError(ForgeError):
    """Raised by a tool that the agent used wrongly. The message becomes the tool's answer to the model.

    Args:
        message: text that the agent reads.
        fix: advice to the agent, shown in brackets.

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
    """A path outside a sandbox's work folder. In a tool it is the agent's mistake and becomes the tool's answer."""


class SandboxFileError(OSError):
    """An unreadable or unwritable sandbox file. In a tool it is the agent's mistake and becomes the tool's answer."""

    def __str__(self) -> str:
        return f"{self.strerror}: {self.filename}"


class SandboxFileNotFoundError(SandboxFileError, FileNotFoundError):
    """A file that doesn't exist in the sandbox."""


class ContextLengthExceeded(ForgeError):
    """Raised by a policy when the conversation no longer fits the model's context; the episode is truncated."""

    truncates = True


class ChatFormatError(ForgeError):
    """Raised by a policy when the model's chat format can't render the conversation; the episode is truncated.

    Programs send arbitrary messages, and some formats allow a system message only at the beginning.
    """

    truncates = True


class EnvironmentBugError(ForgeError):
    """An exception in the environment's own code (prompt, tool, reward); shown with its task, never scored as 0."""

    place = ""
    """The failing code and its location, in the process where it failed."""

    @property
    def same(self) -> str:
        """Key that the same bug has on every task: the location if known, else the message."""
        return self.place or self.message


class AgentError(ForgeError):
    """An exception in the agent's own code (a scripted agent, a policy function, a program); the episode scores 0."""


class ProgramCrashError(EnvironmentBugError):
    """The program of a `ProgramEnvironment` failed before its first request to the model.

    In training this is a bug of the environment, as nothing was sampled; in an evaluation it is a crash of the agent,
    which scores 0.
    """


class HeldUpError(BaseException):
    """Raised asynchronously in code that blocks the event loop, and in tool threads that outlive their episode.

    `environment_code` converts it to an `EnvironmentBugError`. It doesn't derive from `Exception`, so an author's
    `except Exception` can't keep an endless loop running.
    """


class InfrastructureError(ForgeError):
    """A failure outside the agent's control; the episode is retried, then marked invalid.

    Args:
        message: description of the failure.
        fix: what to do about it.

    Examples:
        >>> import forge_env as fe
        >>> issubclass(fe.SandboxError, fe.InfrastructureError)
        True
    """

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(redact(message), fix=fix)  # servers quote rejected keys in their errors


class SandboxError(InfrastructureError):
    """A sandbox or engine that was lost, could not start, or violated its protocol.

    Args:
        message: description of the failure.
        fix: what to do about it.

    Examples:
        >>> import forge_env as fe
        >>> raise fe.SandboxError("the sandbox was lost")
        Traceback (most recent call last):
        forge_env.errors.SandboxError: the sandbox was lost
    """


class ContractError(ForgeError):
    """Trained data differs from the data sampled, served or requested; continuing would be wrong (docs/trust.md)."""


class SandboxUnavailableError(ForgeError):
    """This machine lacks the isolation that the sandbox engine needs; execution is refused."""


class ImageError(SandboxUnavailableError):
    """An image that can't be built on this machine; other images may still work."""


class GeneratorError(InfrastructureError):
    """A model endpoint or generator that died or refused a request."""


MIN_SIMILARITY = 0.85
"""Minimum share of equal characters (difflib's ratio) of two names, of which one may be a misspelling of the other."""


def did_you_mean(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that `name` probably misspells, or None: one edit apart, or `MIN_SIMILARITY` alike."""
    choices = list(choices)
    similar = difflib.get_close_matches(name, choices, n=1, cutoff=MIN_SIMILARITY)
    return next(iter(similar), None) or next((choice for choice in choices if _one_edit_apart(name, choice)), None)


def _one_edit_apart(name: str, other: str) -> bool:
    """Whether one character is added, removed, replaced or swapped with its neighbour."""
    start = _common_prefix(name, other)
    end = _common_prefix(name[start:][::-1], other[start:][::-1])
    one, two = name[start : len(name) - end], other[start : len(other) - end]
    alike = max(len(one), len(two)) <= 1 or (len(one) == 2 and one == two[::-1])
    return alike and start + end > 0 and len(name) + len(other) > 4


def _common_prefix(name: str, other: str) -> int:
    same = [one == two for one, two in zip(name, other, strict=False)]
    return [*same, False].index(False)


def suggestion(name: str, choices: Iterable[str], otherwise: str) -> str:
    """Return the fix for an unknown name: the most similar choice, or else `otherwise`."""
    guess = did_you_mean(name, choices)
    return f"did you mean {guess!r}?" if guess else otherwise


def first_line(error: BaseException) -> str:
    """First line of the message of another library's exception."""
    return next(iter(redact(str(error)).strip().splitlines()), type(error).__name__)[:300]


def root_cause(error: BaseException) -> BaseException:
    """The exception to show for an exception group: its first `ForgeError`, else its first exception."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [root_cause(inner) for inner in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, ForgeError)), causes[0])


def is_library(filename: str) -> bool:
    """Whether a frame belongs to the standard library or pydantic, and so not to the code at fault."""
    if f"{os.sep}pydantic{os.sep}" in filename:
        return True
    return filename.startswith(("<frozen", _STDLIB)) and "site-packages" not in filename


def _is_mistake(error: BaseException) -> bool:
    """Whether an exception is a failure of the code that raised it.

    `SystemExit` is one, and so is a cancellation that the current task did not request. If propagated, the former would
    end the program silently, and the latter a rollout.
    """
    import asyncio

    if isinstance(error, BaseExceptionGroup):
        return error.subgroup((KeyboardInterrupt, GeneratorExit)) is None
    if not isinstance(error, asyncio.CancelledError):  # a panic of a library in Rust is no Exception
        return not isinstance(error, KeyboardInterrupt | GeneratorExit | HeldUpError)
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


def in_words(item: ErrorDetails) -> str:
    """Message of one pydantic error, without its key: `should be a valid integer, not 'x'`."""
    kind, given = item["type"], item["input"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return "unknown key"
    if kind in ("missing", "missing_argument"):
        return "missing"
    if kind in ("value_error", "assertion_error"):  # the author's own message
        return item["msg"].partition(", ")[2]
    if kind in ("model_type", "dataclass_type", "dict_type", "model_attributes_type"):
        message = "should be a mapping of keys to values"
    elif kind == "path_type":
        message = "should be a path"
    else:
        message = item["msg"].removeprefix("Input ").partition(", unable to")[0]
        message = message[:1].lower() + message[1:]
    text = shown(given, 61)
    return message if len(text) > 60 or isinstance(given, dict) else f"{message}, not {text}"


def mistakes(error: ValidationError, most: int = 5) -> str:
    """Summary of a validation error in one line: `a.b: should be a valid integer, not 'x'; c: missing`."""
    items = error.errors(include_url=False)[:most]
    return "; ".join(": ".join(filter(None, [".".join(map(str, item["loc"]))[:80], in_words(item)])) for item in items)


def misfit(default: object, hint: Any) -> str | None:
    """The reason why a default doesn't fit its type hint (pydantic doesn't validate defaults), or None if it does."""
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    try:
        fitting: Any = TypeAdapter(hint).validate_python(default)
    except ValidationError as error:
        return mistakes(error, most=1)
    except PydanticUserError:  # a hint unknown to pydantic is reported on use
        return None
    if fitting is default or fitting == default or isinstance(fitting, float):
        return None
    return f"should be {shown(fitting)}, not {shown(default)}"


@contextmanager
def agent_code(what: str, function: object = None) -> Iterator[None]:
    """Run an agent's own code; exceptions of any class become `AgentError`.

    Two kinds propagate unchanged: errors that truncate an episode, and errors raised by forge-env, such as those of an
    endpoint or a sandbox that the agent uses. A `UsageError` caused by the agent's call is the agent's mistake.

    Args:
        function: the function called; its first line is named if the traceback has no frame of it (a wrong signature).
    """
    try:
        yield
    except BaseException as error:  # the agent's code may raise anything, even SystemExit
        if isinstance(error, ForgeError):
            called = bool(_authors(traceback.extract_tb(error.__traceback__)))
            agents = called and (isinstance(error, UsageError) or not raised_by_platform(error))
            if error.truncates or not agents:
                raise
        elif not _is_mistake(error):
            raise
        raise crash_of(what, error, function) from error


def raised_by_platform(error: BaseException) -> bool:
    """Whether forge-env raised an exception: the innermost non-library frame of its traceback belongs to forge-env."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    return bool(frames) and is_platform(frames[-1])


def crash_of(what: str, error: BaseException, function: object = None) -> AgentError:
    """The `AgentError` for an exception of the agent's code: `half raised KeyError: 'x' [half, agents.py:30]`."""
    frames = _authors(traceback.extract_tb(error.__traceback__))
    where = f"{frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno}" if frames else _definition(function)
    return AgentError(f"{what} raised {type(error).__name__}: {error}{where and f' [{where}]'}")


def _definition(function: object) -> str:
    """Definition of a function, or of an object's `__call__`, as `name, file:line`."""
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "" if code is None else f"{code.co_name}, {code.co_filename}:{code.co_firstlineno}"


def with_place(error: BaseException) -> str:
    """Describe an exception with its location: `KeyError: 'x' [file:line]`."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} [{frame.filename}:{frame.lineno}]"


def is_platform(filename: str) -> bool:
    """Whether a file belongs to forge-env."""
    return filename.startswith(_PLATFORM)


def author_place(stack: traceback.StackSummary, called: Callable[..., object] | None = None) -> str:
    """Innermost frame of a stack that belongs to neither a library nor the platform, as `judge (file.py:12)`.

    Args:
        called: the author's function that was called. Its definition is used if the stack has no frame of an author,
            because the call has not begun or has just ended.
    """
    code = getattr(called, "__code__", None)
    definition = [traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)] if code else []
    frame = (_authors(stack) or definition or stack)[-1]
    return f"{frame.name} ({frame.filename}:{frame.lineno})"


def _authors(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Frames of a stack that belong to neither a library nor the platform."""
    return [frame for frame in stack if not (is_library(frame.filename) or is_platform(frame.filename))]


def is_environments(stack: traceback.StackSummary) -> bool:
    """Whether a stack ends in an environment's code.

    That is: its innermost non-library frame is not the platform's, and the platform frame that called it is in
    `forge_env`. Losses and other training plug-ins are called by `trainers` instead.
    """
    filenames = [frame.filename for frame in stack if not is_library(frame.filename)]
    callers = [filename for filename in filenames if filename.startswith(_PLATFORM)]
    return bool(callers) and filenames[-1] != callers[-1] and callers[-1].startswith(_PLATFORM[0])


CODE_TIMEOUT_S = 120.0
CODE_LIMIT_S: ContextVar[float] = ContextVar("code_limit_s", default=0.0)
"""Seconds that the running environment code may block the event loop; 0 outside of `environment_code`, which would
catch a `HeldUpError`."""
CODE_BLOCK: ContextVar[object] = ContextVar("code_block", default=None)
"""Identity of the outermost running `environment_code`, at whose start the time limit begins."""
GIVEN_UP: ContextVar[list[str] | None] = ContextVar("given_up", default=None)
"""Locations in code that a time limit cancelled, innermost first; read by the code that set the limit."""


@contextmanager
def environment_code(
    what: str, task_id: str | None = None, *, limit_s: float = 0.0, fix: str | None = None
) -> Iterator[None]:
    """Run an environment author's code; unexpected exceptions become `EnvironmentBugError`, typed ones propagate.

    Args:
        limit_s: seconds that it may block the event loop; 0 inherits the limit of the enclosing block.
        fix: advice on its unexpected exceptions.
    """
    suffix = "" if task_id is None else f" on task {task_id!r}"
    token = CODE_LIMIT_S.set(limit_s or CODE_LIMIT_S.get() or CODE_TIMEOUT_S)
    block = CODE_BLOCK.set(CODE_BLOCK.get() or object())
    try:
        yield
    except HeldUpError as error:
        bug = EnvironmentBugError(f"{what} {error}{suffix}", fix="end the loop there")
        bug.place = f"{what} {error}"
        raise bug from error
    except ForgeError as error:
        if isinstance(error, ToolError):  # outside a tool there is no model to answer
            raise EnvironmentBugError(f"{what} raised ToolError{suffix}: {error}") from error
        stack = _authors(traceback.extract_tb(error.__traceback__))
        if isinstance(error, UsageError) and stack and not stack[-1].filename.startswith(_BUNDLED):
            where = f" [{stack[-1].name}, {stack[-1].filename}:{stack[-1].lineno}]"  # the author's wrong call
            error.message = error.message.removesuffix(where) + where
        raise
    except BaseException as error:  # the author's code may even exit; a requested cancellation propagates
        if not _is_mistake(error):
            if (given_up := GIVEN_UP.get()) is not None:
                given_up.append(f"{what}, in {author_place(traceback.extract_tb(error.__traceback__))}")
            raise
        from pydantic import ValidationError

        frames = traceback.extract_tb(error.__traceback__)
        stack = _authors(frames) or [frame for frame in frames if not is_library(frame.filename)] or frames
        where = f"{stack[-1].name}, {stack[-1].filename}:{stack[-1].lineno}"
        reason = mistakes(error) if isinstance(error, ValidationError) else str(error)
        bug = EnvironmentBugError(f"{what} raised {type(error).__name__}{suffix}: {reason} [{where}]", fix=fix)
        bug.place = f"{what} {type(error).__name__} [{where}]"
        raise bug from error
    finally:
        CODE_LIMIT_S.reset(token)
        CODE_BLOCK.reset(block)
