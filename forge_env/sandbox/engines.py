"""Finding a sandbox engine: the named one, or the best this machine allows."""

from __future__ import annotations

import logging
from typing import Any, cast

from forge_env.errors import PluginError, SandboxUnavailableError
from forge_env.plugins import installed, load_plugin
from forge_env.sandbox.protocol import SandboxEngine

logger = logging.getLogger(__name__)
GROUP = "forge_env.sandboxes"
PREFERENCE = ("docker", "local")


def load_engine(name: str) -> type[SandboxEngine]:
    """The engine class registered under `name`."""
    return cast("type[SandboxEngine]", load_plugin(GROUP, name))


def available_engines() -> dict[str, str | None]:
    """Every installed engine with the reason it can't work here (None: it can), in order of preference."""
    names = sorted(installed(GROUP), key=lambda name: PREFERENCE.index(name) if name in PREFERENCE else len(PREFERENCE))
    return {name: _unavailable_reason(name) for name in names}


def _unavailable_reason(name: str) -> str | None:
    try:
        return load_engine(name).unavailable_reason()
    except PluginError as error:  # one broken plug-in must not take the others down
        return str(error)


def reap_abandoned() -> int:
    """Remove what dead owners left, with every installed engine that can be asked; returns how many things."""
    count = 0
    for name in installed(GROUP):
        try:
            count += load_engine(name).reap_abandoned()
        except Exception:  # task boundary: whatever a plug-in's engine raises, tidying stops no command
            logger.debug("engine %s could not tidy up", name, exc_info=True)
    return count


def open_engine(name: str = "auto", **options: Any) -> SandboxEngine:
    """An engine to be used as `async with`. `auto` takes the first that works: docker, then local.

    Raises:
        SandboxUnavailableError: none works; the reasons are listed. There is no unsandboxed fallback.
    """
    if name != "auto":
        engine = load_engine(name)
        if reason := engine.unavailable_reason():
            raise SandboxUnavailableError(f"sandbox engine {name!r} can't run here: {reason}")
        return engine(**options)
    reasons = available_engines()
    for candidate, reason in reasons.items():
        if reason is None:
            return load_engine(candidate)(**options)
    raise SandboxUnavailableError(
        "no sandbox engine can run here, so no code will be run: "
        + "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items()),
        fix="start a Docker daemon, or allow unprivileged user namespaces",
    )
