"""Checks of an environment's class, before any of its code runs."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any
from weakref import WeakSet

from forge_env.environment.optional import PROTOCOLS
from forge_env.errors import PluginError, misfit

if TYPE_CHECKING:
    from pydantic import BaseModel

CALLED = (
    *("task", "tasks", "num_tasks", "prompt", "setup", "cleanup", "is_final", "respond", "reset", "step", "truncate"),
    *("close", "files"),
    *("argv", "environment", "run", "spec_of", "score"),
)
"""Methods that the platform calls and an author may override."""
OPTIONAL: dict[str, Any] = {
    name: method for one in PROTOCOLS for name, method in vars(one).items() if not name.startswith("_")
}
"""Methods by which an environment opts into more (`forge_env.environment.optional`)."""
EITHER = ("prompt",)
"""Methods that an author may make async, although the platform's are not."""
KEPT = ("answer", "reusable")
"""Properties of the platform's classes; an author's plain attribute of the same name would hide them."""
_MADE = ("bash", "python", "files", "submit")
"""Functions of `fe.tools` that make a tool; a class must hold their result, not the function."""
READY_MADE = "forge_env.environment.ready_made"


_SOUND: WeakSet[type] = WeakSet()
"""Classes that passed the check, which takes milliseconds: a run makes thousands of environments."""


def check_definition(cls: type, *, anew: bool = False) -> None:
    """Check methods and attributes of an environment's class; `anew`: even if it has passed before.

    Raises:
        PluginError: a method can't be called as the platform does, or an attribute has a wrong type.
    """
    if cls in _SOUND and not anew:
        return
    for name in (*CALLED, *OPTIONAL):
        _check_method(cls, name)
    for name in KEPT:
        ours = [base for base in cls.__mro__ if is_ours(base) and isinstance(vars(base).get(name), property)]
        if ours and not isinstance(inspect.getattr_static(cls, name), property):
            raise PluginError(f"{cls.__name__}.{name} hides {ours[0].__name__}.{name}", fix="call it something else")
    for name, attribute in vars(cls).items():
        if not isinstance(attribute, FunctionType) or attribute.__module__ != READY_MADE:
            continue
        if (made := attribute.__qualname__) in _MADE:
            raise PluginError(f"{cls.__name__}.{name} is not a tool yet", fix=f"write `{name} = fe.tools.{made}()`")
    for name in ("splits", "seats"):
        value: Any = inspect.getattr_static(cls, name, ())
        texts = isinstance(value, tuple | list) and all(isinstance(item, str) for item in value)
        if not (texts or isinstance(value, property)) or (name == "splits" and not value):
            example = '("train", "eval")' if name == "splits" else '("first", "second")'
            raise PluginError(f"{cls.__name__}.{name} is {value!r}", fix=f"write {example}")
        if texts and (twice := next((item for item in value if value.count(item) > 1), None)) is not None:
            raise PluginError(f"{cls.__name__}.{name} has {twice!r} twice", fix="give each a unique name")
    _check_tools(cls)
    check_defaults(inspect.getattr_static(cls, "config_class"))
    prompt = inspect.getattr_static(cls, "system_prompt", None)
    if not (prompt is None or isinstance(prompt, str | property)):
        raise PluginError(f"{cls.__name__}.system_prompt is {prompt!r}", fix="write a text")
    _SOUND.add(cls)


def check_defaults(config_class: type[BaseModel]) -> None:
    """Check that the default of every option fits its type, unless pydantic does (`validate_default`).

    Raises:
        PluginError: a default doesn't fit.
    """
    every = config_class.model_config.get("validate_default", False)
    for name, field in config_class.model_fields.items():
        validated = every if field.validate_default is None else field.validate_default
        if field.is_required() or field.default_factory is not None or validated:
            continue
        hint: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        if (reason := misfit(field.default, hint)) is not None:
            what = f"{config_class.__name__}.{name}: its default {reason}"
            raise PluginError(what, fix="correct the default, or the type hint")


def _check_tools(cls: type) -> None:
    from forge_env.types import ToolSpec

    given: Any = inspect.getattr_static(cls, "tools", ())
    if wrong := [one for one in given if not isinstance(one, ToolSpec)] if isinstance(given, tuple | list) else []:
        fix = "derive from fe.ToolEnvironment and put @fe.tool on its methods, or list fe.ToolSpec"
        raise PluginError(f"{cls.__name__}.tools has a {type(wrong[0]).__name__}", fix=fix)


def _check_method(cls: type, name: str) -> None:
    ours = OPTIONAL.get(name)
    if ours is None:
        ours = next((vars(base)[name] for base in reversed(cls.__mro__) if name in vars(base) and is_ours(base)), None)
    given = inspect.getattr_static(cls, name, None)
    if ours is None or given is None or given is ours or not isinstance(ours, FunctionType):
        return
    what = f"{cls.__name__}.{name}"
    signature = inspect.signature(ours)
    head = "async def" if inspect.iscoroutinefunction(ours) else "def"
    shown = ", ".join(_shown(parameter) for parameter in signature.parameters.values())
    fix = f"write `{head} {name}({shown})`"
    plain = given.__func__ if isinstance(given, staticmethod | classmethod) else given
    if not callable(plain):
        raise PluginError(f"{what} is a {type(given).__name__}", fix=fix)
    if inspect.iscoroutinefunction(plain) and head == "def" and name not in EITHER:
        raise PluginError(f"{what} is a coroutine function", fix=f"{fix}, without `async`")
    if not isinstance(plain, FunctionType):
        return  # a callable object, or a function in C
    parameters = list(signature.parameters.values())
    names = [one for one in inspect.signature(plain).parameters if one in signature.parameters]
    if names != (known := [one for one in signature.parameters if one in names]):
        raise PluginError(f"{what}: takes {', '.join(names)} instead of {', '.join(known)}", fix=fix)
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    named = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
    try:
        inspect.signature(plain).bind(*positional[isinstance(given, staticmethod) :], **named)
    except TypeError as error:
        raise PluginError(f"{what}: {error}", fix=fix) from error


def _shown(parameter: inspect.Parameter) -> str:
    default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
    star = "*, " if parameter.name == "seed" else ""  # the first keyword-only parameter of `reset`
    return f"{star}{parameter.name}{default}"


def is_ours(base: type) -> bool:
    """Whether a class is defined by the platform."""
    return base.__module__.startswith("forge_env.")
