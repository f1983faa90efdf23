"""A stand-in for a sandbox engine: trusted test code only, in this process, with the answers of a real one."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from forge_env.errors import SandboxError
from forge_env.sandbox import CallOutcome, CallsResult, ExecResult, Judging, Limits, Sandbox, SandboxEngine, SandboxSpec


class FakeSandbox(Sandbox, Judging):
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.seen: list[tuple[str, list[str]]] = []

    async def run_calls(self, code: str, calls: Sequence[str], *, limits: Limits | None = None) -> CallsResult:
        self.engine.runs += 1
        if self.engine.runs in self.engine.lose:
            raise SandboxError("the sandbox was lost")
        self.seen.append((code, list(calls)))
        namespace: dict[str, Any] = {}
        printed = io.StringIO()
        outcomes = []
        with redirect_stdout(printed):
            try:
                exec(code, namespace)
            except Exception as error:  # noqa: BLE001 - as a sandbox does
                text = error.msg if isinstance(error, SyntaxError) else str(error)
                failed = ExecResult(exit_code=1, stderr=f"{type(error).__name__}: {text}")
                return CallsResult(outcomes=[], execution=failed)
            for call in calls:
                try:
                    outcomes.append(CallOutcome(value=eval(call, namespace)))
                except Exception as error:  # noqa: BLE001 - as a sandbox does
                    outcomes.append(CallOutcome(error=type(error).__name__, message=str(error)))
        return CallsResult(outcomes=outcomes, execution=ExecResult(exit_code=0, stdout=printed.getvalue()))

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        raise NotImplementedError

    async def write_file(self, path: str, data: str | bytes) -> None:
        raise NotImplementedError

    async def read_file(self, path: str) -> bytes:
        raise NotImplementedError


class FakeEngine(SandboxEngine):
    """`lose`: the runs (counted from 1) in which the sandbox is lost."""

    name = "fake"

    def __init__(self, lose: Sequence[int] = ()) -> None:
        self.lose = set(lose)
        self.runs = 0
        self.handed_out: list[FakeSandbox] = []
        self.open = 0

    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        self.open += 1
        self.handed_out.append(FakeSandbox(self))
        return self.handed_out[-1]

    async def release(self, sandbox: Sandbox) -> None:
        self.open -= 1
