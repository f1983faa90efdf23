"""Plug-ins of every kind (environments, sandboxes, trainers, losses, loggers), discovered by entry points.

A package registers one in its pyproject.toml:

    [project.entry-points."forge_env.environments"]
    my_env = "my_package:MyEnvironment"
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import traceback
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, distributions, entry_points
from pathlib import Path
from typing import Any

from forge_env.errors import (
    ForgeError,
    HeldUpError,
    NotRegisteredError,
    PluginError,
    author_place,
    first_line,
    is_library,
    is_platform,
    suggestion,
)

log = logging.getLogger(__name__)
SIBLINGS = ("environments", "sandboxes", "trainers", "apps")
"""Packages installed together with `forge_env`; a user's folder of the same name may shadow them."""


ENVIRONMENTS = "forge_env.environments"
"""Entry-point group of environments."""
_IN_CODE: dict[str, dict[str, Any]] = {}


class Installed(dict[str, EntryPoint]):
    """Entry points by name."""

    rivals: dict[str, list[EntryPoint]]
    """Entry points of each name that several packages register."""


@cache
def installed(group: str) -> Installed:
    """Entry points of a group by name, read once per process; `installed.cache_clear()` resets this."""
    of_name: dict[str, list[EntryPoint]] = {}
    for entry in _entry_points(group):
        known = of_name.setdefault(entry.name, [])
        if not known or (entry.value, source_of(entry)) not in [(other.value, source_of(other)) for other in known]:
            known.append(entry)
    result = Installed({name: of_name[name][0] for name in sorted(of_name)})
    result.rivals = {name: entries for name, entries in of_name.items() if len(entries) > 1}
    return result


def in_code(group: str) -> dict[str, Any]:
    """Plug-ins of a group that code of this process has registered, by name; callers add to it."""
    return _IN_CODE.setdefault(group, {})


def is_registered(group: str, name: str) -> bool:
    """Whether a plug-in of that name is installed or registered by code."""
    return name in in_code(group) or name in installed(group)


def _entry_points(group: str) -> list[EntryPoint]:
    try:
        return list(entry_points(group=group))
    except Exception as error:  # noqa: BLE001 - one package's file is invalid: the others are read below
        log.debug("reading entry points of every package by itself: %s", error)
    result: list[EntryPoint] = []
    for distribution in distributions():
        try:
            result += distribution.entry_points.select(group=group)
        except Exception as error:  # noqa: BLE001 - a broken package is logged and skipped
            log.warning("the entry points of %s can't be read: %s", distribution.metadata["Name"], error)
    return result


def source_of(entry: EntryPoint) -> str:
    """Package and version that define an entry point."""
    if entry.dist is None:
        return "unknown"
    about = entry.dist.metadata  # parsed on every access
    return f"{about['Name']} {about['Version']}"


def kind_of(group: str) -> str:
    """Name of a group's kind for messages: `"forge_env.losses"` -> `"loss"`."""
    plural = group.rpartition(".")[2]
    kinds = {"losses": "loss", "sandboxes": "sandbox engine", "trainers": "training method"}
    return kinds.get(plural, plural.removesuffix("s").replace("_", " "))


def load_plugin(group: str, name: str) -> Any:
    """Load the object registered as `name` in `group`, or at the import path `module:attribute`.

    Raises:
        NotRegisteredError: there is no such entry; the most similar name is suggested.
        PluginError: several packages register it, or its import fails; the message has the reason.
    """
    if rivals := installed(group).rivals.get(name):
        listed = ", ".join(f"{source_of(entry)} ({entry.value})" for entry in rivals)
        fix = f"uninstall all but one, or write the import path: {rivals[0].value}"
        raise PluginError(f"{len(rivals)} packages register the {kind_of(group)} {name!r}: {listed}", fix=fix)
    if name in installed(group):
        return load_entry(installed(group)[name])
    check_registered(group, name)
    if EntryPoint.pattern.match(name) is None:
        raise NotRegisteredError(f"{name!r} is not an import path", fix="write module:Class")
    return load_entry(EntryPoint(name=name, value=name, group=group))


def check_registered(group: str, name: str, own: Iterable[str] = ()) -> None:
    """Raise `NotRegisteredError` unless a name is installed in `group`, in `own`, or an import path."""
    known = [*own, *installed(group)]
    if name not in known and ":" not in name:
        fix = suggestion(name, known, f"available: {', '.join(known) or 'none'}")
        raise NotRegisteredError(f"there is no {kind_of(group)} {name!r}", fix=fix)


def load_entry(entry: EntryPoint) -> Any:
    """Import the object of an entry point; raise `PluginError` with the reason if that fails."""
    kind = kind_of(entry.group)
    if EntryPoint.pattern.match(entry.value) is None:
        text = f"{kind} {entry.name!r} can't be loaded: {entry.value!r} is not an import path"
        raise PluginError(text, fix=f"write module:attribute in the pyproject.toml of {source_of(entry)}")
    try:
        return entry.load()
    except (KeyboardInterrupt, HeldUpError):
        raise
    except BaseException as error:  # a third-party module may raise anything on import
        if hidden := shadowed(entry.module):
            raise PluginError(
                f"{kind} {entry.name!r} can't be loaded: {hidden}", fix="rename that folder, or run from another"
            ) from error
        fix = error.fix if isinstance(error, ForgeError) else _fix_of(entry, error)
        message = error.message if isinstance(error, ForgeError) else first_line(error)
        stack = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
        author_frames = [frame for frame in stack if not is_platform(frame.filename)]
        location = f" [{author_place(traceback.StackSummary.from_list(author_frames))}]" if author_frames else ""
        reason = f"{type(error).__name__}: {message}{location}"
        raise PluginError(f"{kind} {entry.name!r} ({entry.value}) can't be loaded: {reason}", fix=fix) from error


def _fix_of(entry: EntryPoint, error: BaseException) -> str | None:
    """Advice on a library's error whose message has none, or None."""
    from pydantic import PydanticUserError

    module = sys.modules.get(entry.module)
    if isinstance(error, AttributeError) and error.obj is module and module is not None:
        available = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == entry.module]
        return suggestion(entry.attr, available, f"it has {', '.join(available) or 'none'}")
    if isinstance(error, PydanticUserError) and error.code == "model-field-missing-annotation":
        return "give it a type: `name: int = 3`"
    last = traceback.extract_tb(error.__traceback__)[-1].line or ""
    if isinstance(error, TypeError) and last.startswith("@fe.tools"):
        return "the decorator of a method is @fe.tool; fe.tools is the module of ready-made tools"
    return None


def shadowed(module: str) -> str | None:
    """Describe, in one sentence, a folder that shadows the installed package of `module`; None if there is none.

    A folder of the same name in the current directory can shadow it: as a package if it comes first on the path, and
    even without an `__init__.py` if the package was installed in editable mode.
    """
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # modules without a spec are not in a package
        spec = None
    if spec is None:
        return None
    folders = [Path(folder).resolve() for folder in spec.submodule_search_locations or []]
    location = folders[0] if folders else spec.origin
    if top not in SIBLINGS:
        return f"the folder {location} hides the installed package {top!r}" if folders and spec.origin is None else None
    if Path(__file__).resolve().parent.parent / top in folders:
        return None
    return f"your own {location} hides the package {top!r} that comes with forge-env"
