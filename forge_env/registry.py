"""Registry of environments: look up and create them by name.

    env = fe.make("coding_rlvr", max_turns=4)

A name is registered by an entry point `forge_env.environments` of an installed package or by `fe.register`, or is an
import path `module:Class`. `NAME:VALUE` sets the one required option of an environment: `reasoning_gym:chain_sum`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_env.config.reader import Source, validate
from forge_env.environment.base import API_VERSION, Environment, EnvironmentConfig
from forge_env.environment.definition import check_definition, is_ours
from forge_env.errors import PluginError, UsageError, environment_code
from forge_env.plugins import ENVIRONMENTS, check_registered, in_code, installed, load_plugin, source_of
from forge_env.visible import shown

if TYPE_CHECKING:
    from forge_env.sandbox import SandboxEngine

GROUP = ENVIRONMENTS
INIT = "def __init__(self, config=None, **context): super().__init__(config, **context)"

_REGISTERED: dict[str, type[Environment] | str] = in_code(GROUP)
_LISTENERS: list[Callable[[], None]] = []


def on_register(listener: Callable[[], None]) -> None:
    """Call `listener` after every `register`; adding the same listener again has no effect."""
    if listener not in _LISTENERS:
        _LISTENERS.append(listener)


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    """One registered environment. If it can't be used, `error` has the reason and `cls` is None."""

    name: str
    target: str
    """Import path `module:Class`."""
    source: str
    """Package and version that registered it, or "code" for `fe.register`."""
    cls: type[Environment] | None = None
    error: str | None = None

    @property
    def summary(self) -> str:
        """First line of the class's docstring."""
        return summary_of(self.cls) if self.cls else ""

    @property
    def needs(self) -> list[str]:
        """Required options: those without a default."""
        fields = self.cls.config_class.model_fields if self.cls else {}
        return [name for name, field in fields.items() if field.is_required()]


def summary_of(cls: type[Environment]) -> str:
    """First line of a class's docstring."""
    return next(iter((cls.__doc__ or "").strip().splitlines()), "")


def register(name: str, target: type[Environment] | str) -> None:
    """Make `target` (a class, or an import path `module:Class`) available as `name` in this process.

    A name registered here comes before an installed one; registering it again replaces it.

    Args:
        name: letters, digits, `_` and `-`.
        target: the class or its import path.

    Raises:
        PluginError: the class is invalid, or written for another API version.

    Examples:
        >>> import forge_env as fe
        >>> class Hello(fe.SingleTurnEnvironment):
        ...     def task(self, split, index):
        ...         return fe.Task(id=f"{split}-{index}", prompt="Say hello.", gold="hello", split=split)
        ...
        ...     reward = fe.rewards.ExactMatch()
        >>> fe.register("hello", Hello)
        >>> fe.make("hello").task("train", 0).prompt
        'Say hello.'
    """
    if not isinstance(target, str):
        _checked(name, target, anew=True)
    _REGISTERED[name] = target
    for listener in _LISTENERS:
        listener()


def unregister(name: str) -> None:
    """Undo `register`."""
    _REGISTERED.pop(name, None)


def names() -> list[str]:
    """All registered names, including those that can't be loaded."""
    return sorted({*_REGISTERED, *installed(GROUP)})


def given_in(name: str) -> tuple[str, dict[str, Any]]:
    """Split `NAME:VALUE` into the environment's name and its required option; other names have no option."""
    head, colon, value = name.partition(":")
    if not colon or head not in {*_REGISTERED, *installed(GROUP)}:
        return name, {}
    fields = environment_class(head).config_class.model_fields
    needed = [option for option, field in fields.items() if field.is_required()]
    return (head, {needed[0]: value}) if len(needed) == 1 and value else (name, {})


def environment_class(name: str | type[Environment]) -> type[Environment]:
    """Return the class registered as `name`, or `name` itself if it is an environment class.

    Raises:
        UsageError: it is neither a name nor a class.
        NotRegisteredError: nothing of that name is installed; the most similar name is suggested.
        PluginError: it can't be imported, is not an environment, or was written for another API version.
    """
    if isinstance(name, type):
        return _checked(name.__name__, name)
    if not isinstance(name, str):
        what = f"{shown(name)} is neither the name nor the class of an environment"
        fix = f"pass its class: {type(name).__name__}" if isinstance(name, Environment) else "`forge-env info`"
        raise UsageError(what, fix=fix)
    name, _ = given_in(name)
    target = _REGISTERED.get(name, name)
    if not isinstance(target, str):
        return target
    check_registered(GROUP, name, _REGISTERED)
    return _checked(name, load_plugin(GROUP, target))


def make(name: str | type[Environment], /, *, sandboxes: SandboxEngine | None = None, **options: Any) -> Environment:
    """Create an environment.

    Args:
        name: registered name, `NAME:VALUE`, import path `module:Class`, or the class itself.
        sandboxes: started engine for its sandboxes, if it uses any.
        options: fields of its `config_class`; unknown ones are refused.

    Raises:
        UsageError: there is no such environment or option, or an argument is invalid.
        PluginError: its class is invalid.

    Examples:
        >>> import forge_env as fe
        >>> env = fe.make("calculator", max_turns=4)
        >>> env.config.max_turns
        4
    """
    return maker(name, options, sandboxes=sandboxes)()


def maker(
    environment: str | type[Environment],
    options: dict[str, Any],
    at: str = "",
    /,
    *,
    sandboxes: SandboxEngine | None = None,
) -> Callable[[], Environment]:
    """Return a function that creates environments as `make` does, but validates the options only once.

    Args:
        options: fields of its `config_class`.
        at: dotted key of the options in a file; empty if they are not from a file.
    """
    if sandboxes is not None:
        from forge_env.sandbox.protocol import SandboxEngine

        if not isinstance(sandboxes, SandboxEngine):
            fix = "async with fe.open_engine(ENGINE) as engine: fe.make(NAME, sandboxes=engine)"
            raise UsageError(f"sandboxes={sandboxes!r} is not a started engine", fix=fix)
    cls = environment_class(environment)
    name = environment if isinstance(environment, str) else cls.__name__
    config = make_config(name, cls, options, at)
    try:
        inspect.signature(cls).bind(config, sandboxes=sandboxes)
    except TypeError as error:
        raise PluginError(f"environment {name!r}: {cls.__name__}.__init__: {error}", fix=INIT) from error

    def make_one() -> Environment:
        with environment_code(f"environment {name!r}: {cls.__name__}.__init__"):
            env = cls(config, sandboxes=sandboxes)
        if vars(env).get("config") is not config:
            raise PluginError(f"environment {name!r}: {cls.__name__}.__init__ does not call its base's", fix=INIT)
        return env

    return make_one


def make_config(name: str, cls: type[Environment], options: dict[str, Any], at: str = "") -> EnvironmentConfig:
    """Validate `options`, and the option in the name, against the environment's config model.

    Args:
        at: dotted key of the options in a file; empty if they are not from a file.
    """
    options = {**given_in(name)[1], **options}
    source = Source("" if at else f"environment {name!r}", options)
    return validate(cls.config_class, options, source, tuple(at.split(".")) if at else ())


def list_environments() -> list[EnvironmentEntry]:
    """List all environments by name, including those that can't be loaded (with the reason).

    Examples:
        >>> import forge_env as fe
        >>> {entry.name: entry.target for entry in fe.list_environments()}["calculator"]
        'environments.calculator:Calculator'
    """
    entries = []
    for name in names():
        target = _REGISTERED.get(name)
        if target is None:
            rivals = installed(GROUP).rivals.get(name, [installed(GROUP)[name]])
            source = " and ".join(map(source_of, rivals))
            path = installed(GROUP)[name].value
        else:
            source = "code"
            path = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
        try:
            entries.append(EnvironmentEntry(name, path, source, cls=environment_class(name)))
        except PluginError as error:
            entries.append(EnvironmentEntry(name, path, source, error=str(error)))
    return entries


def _checked(name: str, target: Any, *, anew: bool = False) -> type[Environment]:
    if not (isinstance(target, type) and issubclass(target, Environment)):
        fix = f"name the class, {type(target).__name__}, not an object" if isinstance(target, Environment) else None
        raise PluginError(f"environment {name!r}: {target!r} is not a subclass of fe.Environment", fix=fix)
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        raise PluginError(f"environment {name!r}: {target.__name__} lacks {', '.join(missing)}", fix="define them")
    bases = (base for base in target.__mro__ if is_ours(base) and "config_class" in vars(base))
    wanted = vars(next(bases))["config_class"]
    if not (isinstance(target.config_class, type) and issubclass(target.config_class, wanted)):
        from forge_env import __all__ as public

        where = f"{'fe' if wanted.__name__ in public else wanted.__module__}.{wanted.__name__}"
        fix = f"derive it from {where}, the options of the base class of {target.__name__}"
        raise PluginError(f"environment {name!r}: config_class is {target.config_class!r}", fix=fix)
    check_definition(target, anew=anew)
    highest = target.max_reward
    if not (isinstance(highest, property) or (isinstance(highest, int | float) and math.isfinite(highest))):
        raise PluginError(f"environment {name!r}: max_reward is {highest!r}", fix="write a number, such as 1.0")
    if type(target.api_version) is not int:
        raise PluginError(f"environment {name!r}: api_version is {target.api_version!r}", fix=f"write {API_VERSION}")
    if target.api_version != API_VERSION:
        raise PluginError(
            f"environment {name!r} was written for environment API {target.api_version}, this is API {API_VERSION}",
            fix="update forge-env" if target.api_version > API_VERSION else "update the environment's package",
        )
    return target
