"""What attacks look like where nothing guards against them: plain processes, and a judge in the solution's process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_env.sandbox import (
    CallsResult,
    ExecResult,
    Judging,
    Limits,
    Sandbox,
    SandboxEngine,
    SandboxSpec,
    TestsResult,
    Usage,
)

PYTHON = (sys.executable, "-S")
"""Without the packages that are installed: it starts in a third of the time."""
_JUDGE = """\
import sys
sys.path.insert(0, '.')
names = {'__name__': 'tests'}
source = open('tests.py').read()
exec(compile(source, 'tests.py', 'exec'), names)
for name, value in list(names.items()):
    if any(base.__name__ == 'TestCase' for base in getattr(value, '__mro__', ())):
        import unittest
        if not unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(value)).wasSuccessful():
            raise SystemExit(1)
    elif name.startswith('test'):
        value()
"""


class UnguardedSandbox(Sandbox, Judging):
    """A folder and plain processes of this user. For attacks that are known to be harmless."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=self.folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), 60)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        text = output.decode("utf-8", "replace"), errors.decode("utf-8", "replace")
        return ExecResult(process.returncode, None, *text, usage=Usage())

    async def run_python(
        self,
        code: str,
        *,
        stdin: str | bytes = "",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        return await self.exec([*PYTHON, "-c", code])

    async def run_calls(self, code: str, calls: Sequence[str], *, limits: Limits | None = None) -> CallsResult:
        return CallsResult([], ExecResult(0))

    async def run_tests(self, code: str, tests: str, *, limits: Limits | None = None) -> TestsResult:
        for name, text in (("solution.py", code), ("tests.py", tests), ("judge.py", _JUDGE)):
            (self.folder / name).write_text(text)
        result = await self.exec([*PYTHON, "-B", "judge.py"])
        return TestsResult(result.exit_code == 0, 1, [], result)

    async def write_file(self, path: str, data: str | bytes) -> None:
        (self.folder / path).write_bytes(data.encode() if isinstance(data, str) else data)

    async def read_file(self, path: str) -> bytes:
        return (self.folder / path).read_bytes()


class ForgetfulEngine(SandboxEngine):
    """Hands out one and the same sandbox without cleaning it in between."""

    name = "forgetful"

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        return self.sandbox

    async def release(self, sandbox: Sandbox) -> None: ...


def all_powerful() -> bool:
    """Whether this process is root with root's usual rights, not a root whose rights a container has taken."""
    with open("/proc/self/status") as file:
        fields: dict[str, Any] = dict(line.split(":", 1) for line in file)
    sys_admin, net_raw = 1 << 21, 1 << 13
    held = int(fields["CapEff"], 16)
    return os.geteuid() == 0 and bool(held & sys_admin and held & net_raw)
