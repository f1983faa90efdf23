"""`@fe.tool`: decorator that makes methods callable by the agent, with options."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from forge_env.errors import UsageError, suggestion

Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "__forge_tool__"


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """Options of `@fe.tool(...)`."""

    name: str | None = None
    description: str | None = None
    timeout_s: float | None = None
    max_calls: int | None = None
    thread: bool = True

    def __post_init__(self) -> None:
        """Validate the options. `UsageError`: one is invalid."""
        if self.name is not None and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", str(self.name)) is None:
            raise UsageError(f"a tool can't be named {self.name!r}", fix="use letters, digits, _ and -, at most 64")
        seconds = self.timeout_s
        if seconds is not None and not (_is_number(seconds, float) and 0 < seconds < math.inf):
            raise UsageError(f"timeout_s={seconds!r} of a tool is not valid", fix="give seconds above 0")
        if self.max_calls is not None and not (_is_number(self.max_calls, int) and self.max_calls >= 0):
            raise UsageError(f"max_calls={self.max_calls!r} of a tool is not valid", fix="give a whole number")


PLAIN = ToolOptions()


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, int | kind) and not isinstance(value, bool)


@overload
def tool(function: Function, /) -> Function: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = None,
    max_calls: int | None = None,
    thread: bool = True,
) -> Callable[[Function], Function]: ...
def tool(function: Any = None, /, **options: Any) -> Any:
    """Make a method callable by the agent; the method itself is unchanged.

    Args:
        function: the method, sync or async. Every parameter needs a type hint.
        options: `name` and `description` override the method's name and docstring; `timeout_s` is wall time in seconds
            (default: the environment's `tool_timeout_s`); `max_calls` limits the calls in one episode, further ones
            are answered with an error; `thread=False` runs a sync method on the event loop: quicker, but it blocks
            every other episode while it runs and its timeout can't be enforced.

    Raises:
        UsageError: an option is not valid, or the decorated object is not a method.

    Examples:
        >>> import forge_env as fe
        >>> class Calculator(fe.ToolEnvironment):
        ...     rubric = fe.Rubric(fe.rewards.ExactMatch())
        ...
        ...     @fe.tool(max_calls=5)
        ...     def add(self, a: int, b: int) -> int:
        ...         \"\"\"Add two numbers.
        ...
        ...         Args:
        ...             a: the first.
        ...             b: the second.
        ...         \"\"\"
        ...         return a + b
        >>> Calculator().tools[0].description
        'Add two numbers.'
    """

    for name in options:
        if name not in ToolOptions.__slots__:
            fix = suggestion(name, ToolOptions.__slots__, f"options: {', '.join(ToolOptions.__slots__)}")
            raise UsageError(f"@fe.tool has no option {name!r}", fix=fix)
    checked = ToolOptions(**options)

    def mark(function: Function) -> Function:
        plain = getattr(function, "__func__", function)  # of a staticmethod or classmethod
        if not (inspect.isroutine(plain) and callable(plain)):
            kind = "property" if isinstance(function, property) else type(function).__name__
            fix = f"write @fe.tool(name={function!r})" if isinstance(function, str) else "put it on a method"
            raise UsageError(f"@fe.tool can't be put on a {kind}", fix=fix)
        setattr(plain, MARK, checked)
        return function

    return mark(function) if function is not None else mark


def options_of(attribute: Any) -> ToolOptions | None:
    """Options given to `@fe.tool`, or None; also found if another decorator wraps the marked function."""
    for inner in (attribute, *(getattr(attribute, name, None) for name in ("__func__", "fget", "func"))):
        if isinstance(options := getattr(inner, MARK, None), ToolOptions):
            return options
    return None
