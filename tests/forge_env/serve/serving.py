"""A server in this process, and the environments that it serves."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import forge_env as fe
from forge_env.errors import SandboxError
from forge_env.registry import unregister

PAGE = Path(__file__).parents[3] / "docs" / "environments" / "serve.md"


class Adder(fe.ToolEnvironment):
    """Add what you are told."""

    rubric = fe.Rubric(fe.rewards.exact_match)
    opened = 0
    """Episodes that hold something now, of all objects."""

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(
            id=f"{split}-{index}",
            split=split,
            prompt=f"{index} + 1 = ?",
            data={"answer": str(index + 1)},
            gold=str(index + 1),
        )

    async def setup(self, task: fe.Task) -> None:
        type(self).opened += 1
        self.gate = asyncio.Event()

    async def cleanup(self) -> None:
        type(self).opened -= 1

    @fe.tool
    async def add(self, a: int, b: int = 1) -> int:
        """Add two numbers.

        Args:
            a: first number.
            b: second number.
        """
        return a + b

    @fe.tool(timeout_s=1000)
    async def wait(self) -> str:
        """Wait until somebody opens the gate."""
        await self.gate.wait()
        return "opened"

    @fe.tool
    async def lose(self) -> str:
        """Lose the sandbox."""
        raise SandboxError("gone")

    @fe.tool
    async def crash(self) -> str:
        """Fail."""
        raise ZeroDivisionError("no")


@asynccontextmanager
async def running(app: Any, port: int = 0, **options: Any) -> AsyncIterator[int]:
    """The port of an ASGI application that runs in this process."""
    from forge_env.http.server import serve

    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(app, "127.0.0.1", port, ready=ready.set_result, **options))
    try:
        yield await ready
    finally:
        server.cancel()
        await asyncio.wait([server])


@asynccontextmanager
async def serving(cls: type[fe.Environment] = Adder, port: int = 0, **limits: Any) -> AsyncIterator[Any]:
    """`(url, sessions)` of a running server."""
    from forge_env.config.serving import ServeLimits
    from forge_env.serve.openenv import app_of

    fe.register("adder", cls)
    app = app_of("adder", limits=ServeLimits(**limits))
    try:
        async with running(app, port) as number:
            yield f"http://127.0.0.1:{number}", app.state.sessions
    finally:
        unregister("adder")


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until something has happened."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def run_printed(name: str, url: str) -> None:
    """Run a program of the page on other frameworks, word for word but for the server's address."""
    (program,) = re.findall(rf"<!-- client: {name} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert program.count("http://localhost:8000") == 1
    program = program.replace("http://localhost:8000", url)
    await eval(compile(program, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), {})
