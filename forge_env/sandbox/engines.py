"""Finding a sandbox engine: the named one, or the best this machine allows."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, cast

from forge_env.errors import NotRegisteredError, SandboxUnavailableError
from forge_env.sandbox.protocol import SandboxEngine

GROUP = "forge_env.sandboxes"
PREFERENCE = ("docker", "local")


def load_engine(name: str) -> type[SandboxEngine]:
    """The engine class registered under `name`."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise NotRegisteredError(f"no sandbox engine {name!r}", fix=f"installed: {', '.join(sorted(found)) or 'none'}")
    return cast("type[SandboxEngine]", found[name].load())


def available_engines() -> dict[str, str | None]:
    """Every installed engine with the reason it can't work here (None: it can), in order of preference."""
    names = [entry.name for entry in entry_points(group=GROUP)]
    names.sort(key=lambda name: PREFERENCE.index(name) if name in PREFERENCE else len(PREFERENCE))
    return {name: load_engine(name).unavailable_reason() for name in names}


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
