"""What lives on between calls."""

from __future__ import annotations

import pytest

from forge_env.errors import SandboxError
from forge_env.sandbox.protocol import Sandbox, SandboxEngine
from forge_env.sandbox.types import ExecResult, Limits, OutputChunk

SHORT = Limits(wall_s=0.6)


class SessionTests:
    """Shells, Python sessions, background programs, streams."""

    async def test_shell_session(self, sandbox: Sandbox) -> None:
        """Variables, functions and the folder live on; statuses and output belong to their command."""
        shell = await sandbox.shell(env={"A": "1"})
        await shell.run("mkdir -p d; cd d; f() { echo f$A; }; B=2; false")
        home = (await sandbox.exec(["pwd"])).stdout.strip()
        result = await shell.run("pwd; f; echo $B >&2; (exit 5)")
        assert (result.stdout.split(), result.stderr, result.exit_code) == ([f"{home}/d", "f1"], "2\n", 5)
        assert (await sandbox.exec(["ls"])).stdout == "d\n"
        assert (await shell.run("cat; echo 'a\nb'")).stdout == "a\nb\n"
        late = await shell.run("sleep 30; echo no", limits=SHORT)
        assert late.timed_out
        assert shell.alive
        assert (await shell.run("f")).stdout.endswith("f1\n")
        assert (await shell.run("echo bye; exit 3")).exit_code == 3
        assert not shell.alive

    async def test_python_session(self, sandbox: Sandbox) -> None:
        """Names live on; the last expression is shown; an error or a time-out leaves the session usable."""
        python = await sandbox.python()
        assert (await python.run("x = 20\nx + 1")).stdout == "21\n"
        failed = await python.run("def f():\n    return 1 / 0\nf()")
        assert failed.exit_code == 1
        assert "return 1 / 0" in failed.stderr
        assert (await python.run("while True: pass", limits=SHORT)).timed_out
        assert python.alive
        assert (await python.run("print(x)")).stdout == "20\n"
        await python.close()
        assert not python.alive

    async def test_stubborn_session_ends(self, sandbox: Sandbox) -> None:
        """A session that resists an interrupt ends with its command, and only it."""
        python = await sandbox.python()
        stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
        result = await python.run(stubborn, limits=SHORT)
        assert result.timed_out
        assert not python.alive
        assert (await sandbox.run_python("print(1)")).ok

    async def test_background_process(self, sandbox: Sandbox) -> None:
        """A program in the background reads, writes, outlives other calls, and ends when told."""
        process = await sandbox.spawn(["cat"])
        await process.write(b"one\n")
        assert (await sandbox.exec(["true"])).ok
        seen = ""
        while "one" not in seen:
            seen += (await process.read())[0]
        await process.write(b"two\n", end=True)
        result = await process.wait(10)
        assert result is not None
        assert (result.stdout, result.exit_code) == ("two\n", 0)
        sleeper = await sandbox.spawn(["sleep", "100"])
        assert await sleeper.wait(0.05) is None
        await sleeper.kill()
        ended = await sleeper.wait(5)
        assert ended is not None
        assert ended.signal == 9

    async def test_streaming(self, sandbox: Sandbox) -> None:
        """Output arrives while the program runs, and the result at the end."""
        line = "echo a; sleep 0.2; echo b >&2; exit 4"
        seen = [item async for item in sandbox.stream(["sh", "-c", line])]
        *chunks, result = seen
        assert [(c.stream, c.data) for c in chunks if isinstance(c, OutputChunk)] == [
            ("stdout", b"a\n"),
            ("stderr", b"b\n"),
        ]
        assert isinstance(result, ExecResult)
        assert (result.exit_code, result.stdout, result.stderr) == (4, "a\n", "b\n")

    async def test_released_sessions_are_gone(self, engine: SandboxEngine) -> None:
        """Release ends sessions and background programs; the next user sees none of them."""
        for _ in range(3):
            async with engine.session() as sandbox:
                shell = await sandbox.shell()
                await shell.run("sleep 1000 & touch /tmp/x")
                await sandbox.spawn(["sleep", "1000"])
                await sandbox.run_python("print(1)")
            with pytest.raises(SandboxError):
                await sandbox.shell()
        async with engine.session() as sandbox:
            assert "sleep" not in (await sandbox.exec(["ps", "ax"])).stdout
            assert (await sandbox.exec(["ls", "/tmp"])).stdout == ""
