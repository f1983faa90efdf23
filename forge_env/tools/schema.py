"""Tools: methods that an agent may call.

    class Calculator(fe.ToolEnvironment):
        @fe.tool
        async def add(self, a: int, b: int = 0) -> int:
            \"\"\"Add two numbers.

            Args:
                a: first number.
                b: second number.
            \"\"\"
            return a + b

The JSON schema is made from type hints and docstring, and arguments are validated against it. Mistakes of the
agent (an unknown tool, invalid JSON, a wrong argument, `fe.ToolError`, a timeout) are answered with a message
that it can act on. Errors in the tool's code raise `EnvironmentBugError`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from typing import Any, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from forge_env.concurrency import Running, result_of, start_in_thread
from forge_env.errors import (
    EnvironmentBugError,
    SandboxFileError,
    SandboxPathError,
    ToolError,
    UsageError,
    author_place,
    did_you_mean,
    environment_code,
    misfit,
    mistakes,
)
from forge_env.tools.decorator import PLAIN, ToolOptions, options_of
from forge_env.tools.decorator import tool as tool
from forge_env.tools.json_text import BadJSONError, read_json
from forge_env.tools.turns import explain, is_malformed
from forge_env.types import SlottedModel, ToolCall, ToolSpec
from forge_env.visible import shown

log = logging.getLogger(__name__)
LONGEST_NAME = 64
"""Maximum length of tool names accepted by endpoints."""
_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False)  # "NaN" is not a number, and passes any `if amount > limit`
UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
"""Characters that endpoints don't accept in tool names."""


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Parse a Google, NumPy, Sphinx or Epydoc docstring into its description and the descriptions of arguments."""
    from docstring_parser import ParseError, parse

    try:
        parsed = parse(text)
    except ParseError:
        return text.strip(), {}
    if not parsed.meta:  # no section of any style
        return text.strip(), {}
    arguments = {
        name.strip().lstrip("*"): " ".join((parameter.description or "").split())
        for parameter in parsed.params
        for name in parameter.arg_name.split(",")
    }
    return (parsed.description or "").strip(), arguments


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's answer to one call."""

    text: str
    error: bool = False


@dataclass(slots=True, eq=False)
class CallScope:
    """State of one tool call in an episode of an environment."""

    owner: Any
    """The environment."""
    episode: int
    given_up: bool = False
    """Whether its answer is dropped, because it timed out or was cancelled."""
    thread: Running | None = None
    """The running function, if it runs in a thread."""

    @property
    def runs_on(self) -> bool:
        """Whether its thread is still running."""
        return self.thread is not None and not self.thread.done()

    async def ended(self, timeout_s: float) -> bool:
        """Wait for its thread to end; False if it still runs after `timeout_s` seconds."""
        if self.thread is not None and self.runs_on:
            waiting = asyncio.wrap_future(self.thread)
            await asyncio.wait([waiting], timeout=timeout_s)
            waiting.cancel()  # in case the loop is closed before the thread ends
        return not self.runs_on


CURRENT_CALL: ContextVar[CallScope | None] = ContextVar("current_tool_call", default=None)
"""The call that the running code belongs to; None outside of tools."""


_BOOLS_IN = {bool: ("boolean", "integer", "number"), dict: ("object",), list: ("array",)}
"""Python type of a JSON value that is or may contain a boolean -> types of a schema that could accept it."""


def _misplaced_bool(value: Any, schema: Any, definitions: Mapping[str, Any]) -> tuple[str | int, ...] | None:
    """Path of the first boolean in place of a number, which pydantic would convert to 1 or 0; None if there is none."""
    kinds = _BOOLS_IN.get(type(value))
    if kinds is None or not isinstance(schema, dict):
        return None
    if "$ref" in schema:
        return _misplaced_bool(value, definitions.get(str(schema["$ref"]).rpartition("/")[2]), definitions)
    options = [each for each in schema.get("anyOf") or schema.get("oneOf") or () if each.get("type", kinds[0]) in kinds]
    if options:
        paths = [_misplaced_bool(value, option, definitions) for option in options]
        return None if None in paths else paths[0]
    if isinstance(value, bool):
        return () if schema.get("type") in ("integer", "number") else None
    inner: Iterable[tuple[str | int, Any, Any]] = ()
    if isinstance(value, dict):
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties")
        inner = ((name, item, properties.get(name, rest)) for name, item in value.items())
    elif isinstance(value, list):
        first, rest = schema.get("prefixItems", []), schema.get("items")
        inner = ((at, item, first[at] if at < len(first) else rest) for at, item in enumerate(value))
    for name, item, part in inner:
        if (path := _misplaced_bool(item, part, definitions)) is not None:
            return (name, *path)
    return None


class _Schema(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # a title only repeats the name


class Tool:
    """A function with the schema of its arguments."""

    def __init__(self, function: Callable[..., Any], options: ToolOptions = PLAIN, *, method: bool = False) -> None:
        self.function = function
        self.timeout_s = options.timeout_s
        self.max_calls = options.max_calls
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise UsageError(
                f"tool {options.name or function.__name__!r} is a generator", fix="return the whole answer"
            )
        self.is_async = inspect.iscoroutinefunction(function)
        self.in_thread = options.thread and not self.is_async
        self._method = method
        name = options.name or function.__name__
        if UNSAFE.search(name) or not 0 < len(name) <= LONGEST_NAME:
            raise UsageError(
                f"tool {name!r}: endpoints accept names of up to {LONGEST_NAME} letters, digits, _ and - only",
                fix='give it another: @fe.tool(name="...")',
            )
        description, documented = parse_docstring(inspect.getdoc(function) or "")
        self._names, self._model = _arguments_model(name, function, documented, skip_first=method)
        schema = self._model.model_json_schema(schema_generator=_Schema)
        schema.pop("title", None)
        schema.setdefault("properties", {})
        self.spec = ToolSpec(name=name, description=options.description or description, parameters=schema)

    def read(self, arguments: str) -> dict[str, Any]:
        """Parse the JSON object in a call's arguments. `ToolError`: they are not a JSON object."""
        try:
            data = read_json(arguments) if arguments.strip() else {}
        except BadJSONError as error:
            raise ToolError(f"the arguments are not valid JSON: {error}. {self.usage()}") from None
        if not isinstance(data, dict):
            raise ToolError(f"the arguments must be a JSON object, got {type(data).__name__}. {self.usage()}")
        return data

    def parse(self, arguments: str) -> dict[str, Any]:
        """Validate the JSON text of a call; return keyword arguments. `ToolError`: an argument is wrong."""
        data, schema = self.read(arguments), self.spec.parameters
        has_bool = "true" in arguments or "false" in arguments
        if has_bool and (path := _misplaced_bool(data, schema, schema.get("$defs", {}))) is not None:
            name = ".".join(map(str, path))
            raise ToolError(f"wrong arguments: {name}: should be a number, not true or false. {self.usage()}")
        try:
            parsed = self._model.model_validate(data)
        except ValidationError as error:
            raise ToolError(f"wrong arguments: {mistakes(error)}. {self.usage()}") from None
        return {name: getattr(parsed, field) for field, name in self._names.items()}

    def usage(self) -> str:
        """One line that explains to the model how to call this tool."""
        properties, required = self.spec.parameters["properties"], self.spec.parameters.get("required", [])
        shown = [
            f'"{name}": {_kind(value)}{"" if name in required else " (optional)"}' for name, value in properties.items()
        ]
        return f"Call {self.spec.name} with {{{', '.join(shown)}}}"

    async def invoke(self, arguments: dict[str, Any], scope: CallScope) -> Any:
        """Run the function with validated arguments."""
        call = partial(self.function, *([scope.owner] if self._method else []), **arguments)
        if self.in_thread:
            scope.thread = start_in_thread(call)
            return await result_of(scope.thread)
        return await call() if self.is_async else call()

    async def answer(self, arguments: str, scope: CallScope, *, timeout_s: float, task_id: str) -> ToolResult:
        """Run one call with the model's arguments. Raises `InfrastructureError` and `EnvironmentBugError`."""
        deadline = asyncio.timeout(timeout_s)
        try:
            parsed = self.parse(arguments)
            fix = "if the agent caused it, raise fe.ToolError: the agent reads its message"
            with environment_code(f"tool {self.spec.name!r}", task_id, fix=fix):
                try:
                    async with deadline:
                        value = await self.invoke(parsed, scope)
                except TimeoutError as error:
                    if not deadline.expired():
                        raise
                    scope.given_up = True
                    _report_timeout(self.spec.name, self.function, timeout_s, error, scope)
                    return ToolResult(f"Error: {self.spec.name} timed out after {timeout_s:g} s", error=True)
                except (ToolError, SandboxPathError, SandboxFileError) as error:
                    return ToolResult(f"Error: {error}", error=True)
                return ToolResult(as_text(value, self.spec.name))
        except ToolError as error:  # from parse: a mistake of the agent
            return ToolResult(f"Error: {error}", error=True)


def _kind(schema: Any) -> str:
    """Type required by a JSON schema, which may be a boolean, as one word."""
    choices = schema.get("anyOf", [schema]) if isinstance(schema, Mapping) else [schema]
    kinds = [choice.get("type", "value") if isinstance(choice, Mapping) else "value" for choice in choices]
    kinds = [each for kind in kinds for each in (kind if isinstance(kind, list) else [kind])]
    return next((str(kind) for kind in kinds if kind != "null"), "null")


TELL: ContextVar[Callable[[str], object] | None] = ContextVar("tell", default=None)


@contextmanager
def telling(tell: Callable[[str], object]) -> Iterator[None]:
    """Inside the block, call `tell` with each report of a tool timeout, in addition to logging it."""
    token = TELL.set(tell)
    try:
        yield
    finally:
        TELL.reset(token)


_REPORTED: set[tuple[str, object]] = set()
"""Name and code of tools whose timeouts have been reported."""


def _report_timeout(
    name: str, function: Callable[..., Any], limit_s: float, error: TimeoutError, scope: CallScope
) -> None:
    """Log, once per tool, the function and line in which it timed out."""
    function = inspect.unwrap(function)
    tool = (name, getattr(function, "__code__", function))
    if tool in _REPORTED:
        return
    _REPORTED.add(tool)
    cancelled = error.__cause__ or error.__context__  # before Python 3.11.4, only the context is set
    stack = traceback.extract_tb(cancelled.__traceback__ if cancelled else None)
    thread = scope.thread if scope.runs_on else None
    if thread is not None and (frame := sys._current_frames().get(thread.ident or 0)) is not None:
        stack = traceback.extract_stack(frame)
    text = f"tool {name!r} timed out after {limit_s:g} s: it was in {author_place(stack, function)}"
    log.warning(text)
    if (tell := TELL.get()) is not None:
        tell(text)


def _arguments_model(
    name: str, function: Callable[..., Any], documented: Mapping[str, str], *, skip_first: bool
) -> tuple[dict[str, str], type[BaseModel]]:
    """`(model field -> parameter name, pydantic model of the arguments)`.

    Fields are numbered, with the parameter as alias: a parameter may then have any name ("json", "schema").
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        fix = "import what they name, not only under TYPE_CHECKING"
        raise UsageError(f"tool {name!r}: its type hints can't be resolved: {error}", fix=fix) from error
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    parameters = list(inspect.signature(function).parameters.values())[1 if skip_first else 0 :]
    for position, parameter in enumerate(parameters):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(f"tool {name!r}: {parameter} is not a named parameter", fix="name every parameter")
        if parameter.name not in hints:
            raise UsageError(f"tool {name!r}: parameter {parameter.name!r} has no type hint", fix="add one")
        default = ... if parameter.default is parameter.empty else parameter.default
        if default is not ... and (problem := misfit(default, hints[parameter.name])) is not None:
            none = f"write `{parameter.name}: ... | None = None`"
            fix = none if default is None else "correct the default, or the type hint"
            raise UsageError(f"tool {name!r}: the default of {parameter.name!r} {problem}", fix=fix)
        field = Field(default, alias=parameter.name, description=documented.get(parameter.name))
        fields[f"field_{position}"] = (hints[parameter.name], field)
        names[f"field_{position}"] = parameter.name
    try:
        model = create_model(f"{name}_arguments", __config__=_CONFIG, **fields)
    except PydanticUserError as error:
        text = error.message.partition(". ")[0].splitlines()[0]
        raise UsageError(f"tool {name!r}: {text}", fix="use JSON types or pydantic models") from error
    return names, model


_TOOLS_OF: WeakKeyDictionary[type, dict[str, Tool]] = WeakKeyDictionary()


OPTIONAL_NAMES = (
    *("credits", "demonstrate", "given_answer", "gold_actions", "gold_files", "hand_in", "luck", "random_action"),
    *("score_group", "seats", "unplayable"),
)
"""Names that the platform looks up in an environment (`forge_env.environment.optional`)."""


def tools_of(cls: type) -> dict[str, Tool]:
    """The `@fe.tool` methods of a class by tool name, base classes first, in order of definition."""
    if cls in _TOOLS_OF:
        return _TOOLS_OF[cls]
    attributes = {name: None for base in reversed(cls.__mro__) for name in vars(base)}
    result: dict[str, Tool] = {}
    for attribute in attributes:
        # A method that overrides a tool without repeating `@fe.tool` is still that tool.
        versions = [vars(base)[attribute] for base in cls.__mro__ if attribute in vars(base)]
        options = next((given for version in versions if (given := options_of(version)) is not None), None)
        if options is None:
            continue
        _check_hides_nothing(cls, attribute)
        made = _tool_of(cls, attribute, versions[0], options)
        if made is None:
            continue
        if made.spec.name in result:
            raise UsageError(f"{cls.__name__} has two tools named {made.spec.name!r}", fix="rename one")
        result[made.spec.name] = made
    _TOOLS_OF[cls] = result
    return result


def _check_hides_nothing(cls: type, attribute: str) -> None:
    """Refuse a tool whose attribute hides one of the platform, such as `answer` or `step`."""
    ours = [
        base.__name__ for base in cls.__mro__ if base.__module__.startswith("forge_env.") and attribute in vars(base)
    ]
    if attribute in OPTIONAL_NAMES:
        ours = ["Environment"]
    if ours and attribute != "submit":  # a `submit` tool may call the method that it overrides
        raise UsageError(
            f"the tool {cls.__name__}.{attribute} hides {ours[0]}.{attribute}",
            fix=f'call the attribute something else, such as {attribute}_tool; name="{attribute}" names the tool',
        )


def _check_belongs(cls: type, name: str, attribute: Any) -> None:
    """Check that a tool fits the class; the type of a ready-made tool's first parameter is the required base class."""
    if inspect.isfunction(attribute) and not inspect.signature(attribute).parameters:
        raise UsageError(f"the tool {cls.__name__}.{name} has no `self`", fix=f"write `def {name}(self)`")
    if not inspect.isfunction(attribute) or not (hints := attribute.__annotations__):
        return
    first = next(iter(inspect.signature(attribute).parameters), None)
    if first is None or first not in hints or first == "self":
        return
    needed = get_type_hints(attribute).get(first)
    if isinstance(needed, type) and not needed.__module__.startswith("forge_env."):
        raise UsageError(f"the tool {cls.__name__}.{name} has no `self`", fix=f"write `def {name}(self, {first}, ...)`")
    if isinstance(needed, type) and not issubclass(cls, needed):
        raise UsageError(
            f"the tool {cls.__name__}.{name} needs a {needed.__name__}",
            fix=f"derive {cls.__name__} from fe.{needed.__name__}",
        )


def _tool_of(cls: type, name: str, attribute: Any, options: ToolOptions) -> Tool | None:
    """Make the tool of a class attribute; None if a subclass removed it (`name = None`)."""
    if attribute is None:
        return None
    _check_belongs(cls, name, attribute)
    if isinstance(attribute, staticmethod):
        return Tool(attribute.__func__, options)
    if isinstance(attribute, classmethod):
        return Tool(attribute.__get__(None, cls), options)
    if not (inspect.isroutine(attribute) and callable(attribute)):
        kind = type(attribute).__name__
        raise UsageError(f"{cls.__name__}.{name} is a tool, and a {kind}", fix="make it a method, or None to drop it")
    return Tool(attribute, options, method=True)


def unknown_tool(call: ToolCall, tools: Collection[str]) -> ToolResult:
    """Answer to a call of an unknown tool, or to a malformed call (`turns.is_malformed`)."""
    name = call.function.name
    available = f"available tools: {', '.join(tools)}" if tools else "there are no tools: answer in plain text"
    if is_malformed(call):
        text = f"the tool call could not be read: {explain(call.function.arguments)}"
        form = 'Write one JSON object, {"name": "TOOL", "arguments": {...}}'
        return ToolResult(f"Error: {text}. {form}; {available}", error=True)
    guess = did_you_mean(name[:80], tools)
    hint = f"; did you mean {guess!r}?" if guess else ""
    return ToolResult(f"Error: there is no tool {name[:80]!r}{hint}; {available}", error=True)


MOST_SHOWN = 100_000
"""Maximum length of a tool's answer whose value JSON can't represent."""


def as_text(value: Any, name: str) -> str:
    """Convert a tool's return value to text for the model: strings unchanged, other values as JSON.

    Raises:
        EnvironmentBugError: it is or contains an object without a text representation.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray) or inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        fix = "decode them: return text" if isinstance(value, bytes | bytearray) else "await it, in an `async def`"
        raise EnvironmentBugError(f"tool {name!r} returned {type(value).__name__}, which a model can't read", fix=fix)
    try:
        return json.dumps(value, ensure_ascii=False, default=partial(_plain, name=name))
    except (TypeError, ValueError, RecursionError):  # keys that JSON lacks, huge numbers, deep or circular references
        return shown(value, MOST_SHOWN)


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, BaseModel | SlottedModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    kind: Any = type(value)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        raise EnvironmentBugError(
            f"tool {name!r} returned a {kind.__name__}, which a model can't read",
            fix="return text, a dataclass, a pydantic model, or JSON values",
        )
    return str(value)


def shorten(text: str, limit: int) -> str:
    """Shorten `text` to its first and last characters, `limit` in total, with a note in between."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[-tail:]}"
