"""What attacks look like where nothing guards against them: plain processes, and a judge in the solution's process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from forge_env.sandbox import CallsResult, ExecResult, Judging, Limits, TestsResult
from tests.forge_env.sandbox.plain import PlainSandbox

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


class UnguardedSandbox(PlainSandbox, Judging):
    """A folder and plain processes of this user. For attacks that are known to be harmless."""

    async def run_python(self, code: str, **_: Any) -> ExecResult:
        return await self.exec([*PYTHON, "-c", code])

    async def run_calls(self, code: str, calls: Sequence[str], *, limits: Limits | None = None) -> CallsResult:
        return CallsResult([], ExecResult(0))

    async def run_tests(self, code: str, tests: str, *, limits: Limits | None = None) -> TestsResult:
        for name, text in (("solution.py", code), ("tests.py", tests), ("judge.py", _JUDGE)):
            (self.folder / name).write_text(text)
        result = await self.exec([*PYTHON, "-B", "judge.py"])
        return TestsResult(result.exit_code == 0, 1, [], result)


def all_powerful() -> bool:
    """Whether this process is root with root's usual rights, not a root whose rights a container has taken."""
    with open("/proc/self/status") as file:
        fields: dict[str, Any] = dict(line.split(":", 1) for line in file)
    sys_admin, net_raw = 1 << 21, 1 << 13
    held = int(fields["CapEff"], 16)
    return os.geteuid() == 0 and bool(held & sys_admin and held & net_raw)
