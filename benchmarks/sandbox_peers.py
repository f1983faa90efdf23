"""Run peers' sandboxes in an interpreter with swe-rex, aiohttp and inspect_ai; started by `benchmarks.sandbox`.

Prints the names of the ways that work, then answers one request per line until its input ends, all in JSON. Does not
import forge-env.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

SANDBOXES = 2
Run = Callable[[str], Awaitable[None]]


def write_command(folder: Path) -> None:
    """Write the command that starts SWE-ReX's container."""
    folder.chmod(0o755)
    command = folder / "swerex-remote"
    command.write_text("#!/usr/bin/python3\nfrom swerex.server import main\nmain()\n")
    command.chmod(0o755)


async def swerex_docker(stack: contextlib.AsyncExitStack, image: str) -> Run:
    """Run in SWE-ReX containers, started as documented, but with the package mounted, not built into the image."""
    from swerex.deployment.docker import DockerDeployment  # type: ignore[import-not-found]
    from swerex.runtime.abstract import Command  # type: ignore[import-not-found]

    tools = stack.enter_context(tempfile.TemporaryDirectory())
    write_command(Path(tools))
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    mounts = ["-v", f"{packages}:/peers:ro", "-e", "PYTHONPATH=/peers", "-v", f"{tools}:/usr/local/bin:ro"]
    started = []
    for _ in range(SANDBOXES):
        deployment = DockerDeployment(image=image, pull="never", docker_args=mounts, startup_timeout=60)
        await deployment.start()
        stack.push_async_callback(deployment.stop)
        started.append(deployment.runtime)
    runtimes = itertools.cycle(started)

    async def run(source: str) -> None:
        result = await next(runtimes).execute(Command(command=["python3", "-I", "-c", source]))
        assert result.exit_code == 0, result

    return run


async def inspect_local(stack: contextlib.AsyncExitStack, image: str) -> Run:
    """Run in inspect_ai's local sandbox: no isolation. Its Docker sandbox needs Docker 24 and the compose plug-in."""
    from inspect_ai.util._sandbox.local import LocalSandboxEnvironment  # type: ignore[import-not-found]

    sandbox = LocalSandboxEnvironment()

    async def run(source: str) -> None:
        result = await sandbox.exec([sys.executable, "-I", "-c", source])
        assert result.success, result

    return run


WAYS = {
    "swe-rex docker": swerex_docker,
    "inspect_ai local, no isolation": inspect_local,
}


async def measure(run: Callable[[], Awaitable[None]], seconds: float, callers: int, singles: int) -> dict[str, Any]:
    """Measure single runs in sequence, in milliseconds, then runs per second with `callers`."""
    await run()
    latency = []
    for _ in range(singles):
        start = time.perf_counter()
        await run()
        latency.append((time.perf_counter() - start) * 1e3)
    start = time.perf_counter()

    async def caller() -> int:
        count = 0
        while time.perf_counter() - start < seconds:
            await run()
            count += 1
        return count

    done = sum(await asyncio.gather(*(caller() for _ in range(callers))))
    return {"latency": latency, "rate": done / (time.perf_counter() - start)}


async def main(image: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of peers goes to stderr, to keep the answers apart
    async with contextlib.AsyncExitStack() as stack:
        ways: dict[str, Run] = {}
        for name, make in WAYS.items():
            try:
                ways[name] = await make(stack, image)
                await ways[name]("pass")
            except Exception as error:  # noqa: BLE001  a peer that can't run here is reported and skipped
                ways.pop(name, None)
                print(f"{name} does not run here: {type(error).__name__}: {error}", file=sys.stderr)
        print(json.dumps(list(ways)), file=answers)
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, source, *options = json.loads(line)
            print(json.dumps(await measure(partial(ways[name], source), *options)), file=answers)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
