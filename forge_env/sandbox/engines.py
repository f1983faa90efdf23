"""Finding a sandbox engine: the named one, or the best this machine allows; opened at once or when first needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from forge_env.config.reader import arguments, construct
from forge_env.errors import PluginError, SandboxUnavailableError
from forge_env.plugins import installed, load_plugin
from forge_env.rollout.working_time import waiting
from forge_env.sandbox.protocol import Sandbox, SandboxEngine, SandboxSpec

logger = logging.getLogger(__name__)
GROUP = "forge_env.sandboxes"
PREFERENCE = ("docker", "local")
_WISHES = {"concurrency", "warm"}
OTHERS = "choose another engine, or auto; forge-env doctor lists them"


def load_engine(name: str) -> type[SandboxEngine]:
    """The engine class registered as `name`, or at the import path `module:attribute`.

    Raises:
        NotRegisteredError: there is none of that name.
        PluginError: it can't be loaded, or is not a `SandboxEngine`.
    """
    found = load_plugin(GROUP, name)
    if not (isinstance(found, type) and issubclass(found, SandboxEngine)):
        raise PluginError(f"sandbox engine {name!r} is {found!r}", fix="name a subclass of SandboxEngine")
    return found


def available_engines() -> dict[str, str | None]:
    """Every engine that `auto` may choose, with the reason it can't work here (None: it can), the preferred first."""
    names = sorted(installed(GROUP), key=lambda name: PREFERENCE.index(name) if name in PREFERENCE else len(PREFERENCE))
    return {name: _unavailable_reason(name) for name in names if _is_automatic(name)}


def _is_automatic(name: str) -> bool:
    try:
        return load_engine(name).automatic
    except PluginError:  # listed, with what is wrong
        return True


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

    A `docker_host` means docker. `concurrency` and `warm` are wishes that an engine without a pool need not know; it
    must take every other option. An option that is None is not given.

    Args:
        name: `auto`, a registered engine (docker, local, kubernetes), or `module:Class`.
        options: of the engine, such as `concurrency`, `warm`, `base_image`.

    Raises:
        UsageError: the engine has no such option.
        SandboxUnavailableError: none works; the reasons are listed. There is no unsandboxed fallback.

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
        "no sandbox engine can run here, so no code will be run: "
        + "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items()),
        fix="start Docker, or allow unprivileged user namespaces",
    )


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {option: value for option, value in options.items() if value is not None}


def _made(engine: type[SandboxEngine], name: str, options: dict[str, Any]) -> SandboxEngine:
    known, takes_any = arguments(engine)
    kept = {option: value for option, value in options.items() if takes_any or option in known or option not in _WISHES}
    made: SandboxEngine = construct(engine, kept, owner=f"sandbox engine {name!r}")
    return made


class LazyEngine(SandboxEngine):
    """Stands for `open_engine(name, **options)`, opened by the first sandbox asked of it.

    For callers that can't know whether one will be: an environment that runs no code never opens it.
    """

    def __init__(self, name: str = "auto", **options: Any) -> None:
        self.name = name
        self._options = options
        self._engine: SandboxEngine | None = None
        self._opening = asyncio.Lock()
        self._checked: set[SandboxSpec] = set()

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Known only when it is opened."""
        return None

    def check(self, spec: SandboxSpec) -> None:
        """What the real engine says; `auto` finds one that can, or none when it is opened."""
        if self._engine is not None:
            self._engine.check(spec)
        elif self.name != "auto" and spec not in self._checked:
            _made(load_engine(self.name), self.name, _given(self._options)).check(spec)
            self._checked.add(spec)

    async def start(self) -> None:
        """Nothing yet."""
        return

    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        """A sandbox of the real engine, which starts now if it hasn't.

        Raises:
            SandboxUnavailableError: no engine works here.
        """
        with waiting():
            await self._open()
        assert self._engine is not None
        return await self._engine.acquire(spec)

    async def build(self, image: str | SandboxSpec | None = None) -> str:
        """Have the real engine build it."""
        with waiting():
            await self._open()
        assert self._engine is not None
        return await self._engine.build(image)

    async def _open(self) -> None:
        async with self._opening:
            if self._engine is None:
                engine = open_engine(self.name, **self._options)
                try:
                    await engine.start()
                except BaseException:  # cancelled too: no half-started engine may be left
                    await engine.close()
                    raise
                self._engine = engine

    async def release(self, sandbox: Sandbox) -> None:
        """Give a sandbox back."""
        if self._engine is not None:
            await self._engine.release(sandbox)

    async def close(self) -> None:
        """Close the real engine if there is one."""
        async with self._opening:
            engine, self._engine = self._engine, None
            if engine is not None:
                await engine.close()

    def stats(self) -> dict[str, Any]:
        """Counters of the real engine."""
        return self._engine.stats() if self._engine is not None else {}
