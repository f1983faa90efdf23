"""Plug-ins of every kind (environments, sandboxes, trainers, losses, loggers), found by entry points.

A package adds one with a line of its own pyproject.toml:

    [project.entry-points."forge_env.environments"]
    my_env = "my_package:MyEnvironment"
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import traceback
from collections.abc import Iterable, Mapping
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
"""Packages installed beside `forge_env`; plain words, so a user's own folder may hide them."""


class Installed(dict[str, EntryPoint]):
    """Entry points by name."""

    rivals: dict[str, list[EntryPoint]]
    """Those of names that more than one package registers."""


@cache
def installed(group: str) -> Installed:
    """Entry points of a group by name, read once a process; `installed.cache_clear()` reads them again."""
    of_name: dict[str, list[EntryPoint]] = {}
    for entry in _entry_points(group):
        known = of_name.setdefault(entry.name, [])
        if not known or (entry.value, source_of(entry)) not in [(other.value, source_of(other)) for other in known]:
            known.append(entry)
    found = Installed({name: of_name[name][0] for name in sorted(of_name)})
    found.rivals = {name: entries for name, entries in of_name.items() if len(entries) > 1}
    return found


def _entry_points(group: str) -> list[EntryPoint]:
    try:
        return list(entry_points(group=group))
    except Exception as error:  # noqa: BLE001 - one package's file can't be parsed: the others' are read all the same
        log.debug("reading entry points of every package by itself: %s", error)
    found: list[EntryPoint] = []
    for distribution in distributions():
        try:
            found += distribution.entry_points.select(group=group)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, it is named, and the rest goes on
            log.warning("the entry points of %s can't be read: %s", distribution.metadata["Name"], error)
    return found


def source_of(entry: EntryPoint) -> str:
    """Package and version that an entry point comes from."""
    if entry.dist is None:
        return "unknown"
    about = entry.dist.metadata  # read anew each time
    return f"{about['Name']} {about['Version']}"


def kind_of(group: str) -> str:
    """`"forge_env.losses"` -> `"loss"`, for messages."""
    plural = group.rpartition(".")[2]
    kinds = {"losses": "loss", "sandboxes": "sandbox engine", "trainers": "training method"}
    return kinds.get(plural, plural.removesuffix("s").replace("_", " "))


def load_plugin(group: str, name: str) -> Any:
    """The object registered as `name` in `group`, or at the import path `module:attribute`.

    Raises:
        NotRegisteredError: there is no such entry; the nearest name is suggested.
        PluginError: it is installed but its import fails; the reason is named.
    """
    if rivals := installed(group).rivals.get(name):
        said = ", ".join(f"{source_of(entry)} ({entry.value})" for entry in rivals)
        fix = f"uninstall all but one, or write the import path: {rivals[0].value}"
        raise PluginError(f"{len(rivals)} packages register the {kind_of(group)} {name!r}: {said}", fix=fix)
    if name in installed(group):
        return load_entry(installed(group)[name])
    check_registered(group, name)
    if EntryPoint.pattern.match(name) is None:
        raise NotRegisteredError(f"{name!r} is not an import path", fix="write module:Class")
    return load_entry(EntryPoint(name=name, value=name, group=group))


def check_registered(group: str, name: str, own: Iterable[str] = ()) -> None:
    """`NotRegisteredError` when a name is neither installed in `group`, nor one of our `own`, nor an import path."""
    known = [*own, *installed(group)]
    if name not in known and ":" not in name:
        fix = suggestion(name, known, f"there are: {', '.join(known) or 'none'}")
        raise NotRegisteredError(f"there is no {kind_of(group)} {name!r}", fix=fix)


def make_plugin(
    group: str,
    name: str,
    options: dict[str, Any],
    *,
    name_at: str,
    options_at: str,
    own: Mapping[str, Any] | None = None,
) -> Any:
    """What the class (or function) registered as `name` makes of its options.

    Args:
        group: entry-point group.
        name: registered name, or import path `module:attribute`.
        options: its arguments by name; unknown ones are refused, with the one that was probably meant.
        name_at: dotted key of the recipe that names it.
        options_at: dotted key that its options stand at.
        own: classes of ours by name, which need no entry point.

    Raises:
        NotRegisteredError: there is none of that name.
        PluginError: it can't be imported, is not a class, or makes what can't be called.
        UsageError: it doesn't take these options.
    """
    from forge_env.config.reader import construct

    own = own or {}
    check_registered(group, name, own)
    make = own[name] if name in own else load_plugin(group, name)
    if not callable(make):
        raise PluginError(f"{name_at}: {name!r} is not a class")
    made = construct(make, options, options_at)
    if not callable(made):
        raise PluginError(f"{name_at}: {name!r} makes a {type(made).__name__}, which can't be called")
    return made


def load_entry(entry: EntryPoint) -> Any:
    """Import what an entry point names; `PluginError` says why it can't be."""
    kind = kind_of(entry.group)
    if EntryPoint.pattern.match(entry.value) is None:
        text = f"{kind} {entry.name!r} can't be loaded: {entry.value!r} is not an import path"
        raise PluginError(text, fix=f"write module:attribute in the pyproject.toml of {source_of(entry)}")
    try:
        return entry.load()
    except (KeyboardInterrupt, HeldUpError):
        raise
    except BaseException as error:  # whatever another's module does at import, the rest goes on
        if hidden := shadowed(entry.module):
            raise PluginError(
                f"{kind} {entry.name!r} can't be loaded: {hidden}", fix="rename that folder, or run from another"
            ) from error
        fix = error.fix if isinstance(error, ForgeError) else _fix_of(entry, error)
        said = error.message if isinstance(error, ForgeError) else first_line(error)
        stack = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
        own = [frame for frame in stack if not is_platform(frame.filename)]
        place = f" [{author_place(traceback.StackSummary.from_list(own))}]" if own else ""
        reason = f"{type(error).__name__}: {said}{place}"
        raise PluginError(f"{kind} {entry.name!r} ({entry.value}) can't be loaded: {reason}", fix=fix) from error


def _fix_of(entry: EntryPoint, error: BaseException) -> str | None:
    """What to do about an error of a library's, where its own words don't say."""
    from pydantic import PydanticUserError

    module = sys.modules.get(entry.module)
    if isinstance(error, AttributeError) and error.obj is module and module is not None:
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == entry.module]
        return suggestion(entry.attr, own, f"it has {', '.join(own) or 'none'}")
    if isinstance(error, PydanticUserError) and error.code == "model-field-missing-annotation":
        return "give it a type: `name: int = 3`"
    return None


def shadowed(module: str) -> str | None:
    """One sentence when a folder hides the installed package that `module` lives in, else None.

    A folder of the same name in the current directory does so: a package if it comes first, and even without
    an `__init__.py` where the package was installed in editable mode.
    """
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec belongs to no package
        spec = None
    if spec is None:
        return None
    places = [Path(place).resolve() for place in spec.submodule_search_locations or []]
    found = places[0] if places else spec.origin
    if top not in SIBLINGS:
        return f"the folder {found} hides the installed package {top!r}" if places and spec.origin is None else None
    if Path(__file__).resolve().parent.parent / top in places:
        return None
    return f"your own {found} hides the package {top!r} that comes with forge-env"
