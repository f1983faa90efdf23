"""Selection of a sandbox engine, by name or the best available, opened at once or on first use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from forge_env.config.reader import arguments, construct
from forge_env.errors import PluginError, SandboxUnavailableError
from forge_env.plugins import check_registered, installed, load_plugin
from forge_env.sandbox.capabilities import Images, Inventory
from forge_env.sandbox.protocol import Sandbox, SandboxEngine
from forge_env.sandbox.spec import SandboxSpec
from forge_env.working_time import waiting

logger = logging.getLogger(__name__)
GROUP = "forge_env.sandboxes"
PREFERENCE = ("docker", "local")
_WISHES = {"concurrency", "warm"}
OTHERS = "choose another engine, or auto; forge-env doctor lists them"


def load_engine(name: str) -> type[SandboxEngine]:
    """The engine class registered as `name`, or at the import path `module:attribute`.

    `NotRegisteredError`: no engine has this name. `PluginError`: it can't be loaded, or is not a `SandboxEngine`.
    """
    engine = load_plugin(GROUP, name)
    if not (isinstance(engine, type) and issubclass(engine, SandboxEngine)):
        raise PluginError(f"sandbox engine {name!r} is {engine!r}", fix="name a subclass of SandboxEngine")
    return engine


def available_engines() -> dict[str, str | None]:
    """Engines that `auto` may choose, preferred ones first, each with the reason it can't run here (None: it can)."""
    names = sorted(installed(GROUP), key=lambda name: PREFERENCE.index(name) if name in PREFERENCE else len(PREFERENCE))
    reasons: dict[str, str | None] = {}
    for name in names:
        try:
            if (engine := load_engine(name)).automatic:
                reasons[name] = engine.unavailable_reason()
        except PluginError as error:  # a broken plug-in must not affect the others
            reasons[name] = str(error)
    return reasons


def reap_abandoned() -> int:
    """Remove the leftovers of dead owners, with every engine that can be loaded. Returns the number of items."""
    count = 0
    for name in installed(GROUP):
        try:
            engine = load_engine(name)
            if issubclass(engine, Inventory):
                count += engine.reap_abandoned()
        except Exception:  # task boundary: no error of a plug-in's engine may stop the command
            logger.debug("engine %s could not remove its leftovers", name, exc_info=True)
    return count


def open_engine(name: str = "auto", **options: Any) -> SandboxEngine:
    """An engine, for use in `async with`. `auto` selects the first that can run here: docker, then local.

    A `docker_host` selects docker. Engines without a pool may lack the options `concurrency` and `warm`, which are then
    ignored; all other options must be known to the engine. Options that are None are left out.

    Args:
        name: `auto`, a registered engine (docker, local, kubernetes, e2b), or `module:Class`.
        options: options of the engine, such as `concurrency`, `warm`, `base_image`.

    Raises:
        UsageError: the engine has no such option.
        SandboxUnavailableError: no engine can run here; the reasons are listed. There is no unsandboxed fallback.

    Examples:
        >>> import asyncio
        >>> import forge_env as fe
        >>> async def main():
        ...     async with fe.open_engine("local", concurrency=1) as engine, engine.session() as sandbox:
        ...         return (await sandbox.run_python("print(6 * 7)")).stdout
        >>> asyncio.run(main())
        '42\\n'
    """
    options = _given(options)
    if name == "auto" and "docker_host" in options:
        name = "docker"
    if name != "auto":
        engine = _made(load_engine(name), name, options)
        if reason := engine.unusable_reason():
            raise SandboxUnavailableError(f"sandbox engine {name!r} can't run here: {reason}", fix=OTHERS)
        return engine
    reasons = available_engines()
    for candidate, reason in reasons.items():
        if reason is None:
            return _made(load_engine(candidate), candidate, options)
    raise SandboxUnavailableError(
        "no sandbox engine can run here, so no code is run: "
        + "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items()),
        fix="start Docker, or allow unprivileged user namespaces",
    )


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {option: value for option, value in options.items() if value is not None}


def _made(engine: type[SandboxEngine], name: str, options: dict[str, Any]) -> SandboxEngine:
    known, takes_any = arguments(engine)
    accepted = {
        option: value for option, value in options.items() if takes_any or option in known or option not in _WISHES
    }
    made: SandboxEngine = construct(engine, accepted, owner=f"sandbox engine {name!r}")
    return made


class LazyEngine(SandboxEngine, Images):
    """A stand-in for `open_engine(name, **options)`, which is opened when the first sandbox is acquired."""

    def __init__(self, name: str = "auto", **options: Any) -> None:
        if name != "auto":
            check_registered(GROUP, name)
        self.name = name
        self._options = options
        self._engine: SandboxEngine | None = None
        self._opening = asyncio.Lock()
        self._checked: set[SandboxSpec] = set()

    def check(self, spec: SandboxSpec) -> None:
        """Check with the real engine. With `auto`, nothing is checked until one is open."""
        if self._engine is not None:
            self._engine.check(spec)
        elif self.name != "auto" and spec not in self._checked:
            _made(load_engine(self.name), self.name, _given(self._options)).check(spec)
            self._checked.add(spec)

    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        """Acquire a sandbox of the real engine, and start that first if needed. Raises `SandboxUnavailableError`."""
        engine = self._engine or await self._open()
        return await engine.acquire(spec)

    async def build(self, image: str | SandboxSpec | None = None) -> str:
        """Build the image with the real engine."""
        return await Images.of(self._engine or await self._open()).build(image)

    async def _open(self) -> SandboxEngine:
        with waiting():
            async with self._opening:
                if self._engine is None:
                    engine = open_engine(self.name, **self._options)
                    try:
                        await engine.start()
                    except BaseException:  # also when cancelled: no half-started engine may be left behind
                        await engine.close()
                        raise
                    self._engine = engine
                return self._engine

    async def release(self, sandbox: Sandbox) -> None:
        """Release a sandbox."""
        if self._engine is not None:
            await self._engine.release(sandbox)

    async def close(self) -> None:
        """Close the real engine, if it was opened."""
        async with self._opening:
            engine, self._engine = self._engine, None
            if engine is not None:
                await engine.close()

    def stats(self) -> dict[str, Any]:
        """Counters of the real engine."""
        return self._engine.stats() if self._engine is not None else {}
