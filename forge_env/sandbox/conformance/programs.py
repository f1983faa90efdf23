"""What programs do and may use, and files."""

from __future__ import annotations

import pytest

from forge_env.errors import UsageError
from forge_env.sandbox.protocol import Sandbox
from forge_env.sandbox.types import Limits

SHORT = Limits(wall_s=0.6)


class ProgramTests:
    """Output, input, limits, files."""

    async def test_output_and_exit_code(self, sandbox: Sandbox) -> None:
        """A program's output, errors and status come back."""
        result = await sandbox.run_python("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(7)")
        assert (result.exit_code, result.stdout, result.stderr) == (7, "out\n", "err\n")
        assert result.signal is None
        assert not result.ok

    async def test_stdin(self, sandbox: Sandbox) -> None:
        """Standard input is what was given, and empty by default."""
        assert (await sandbox.run_python("print(input()[::-1])", stdin="abc\n")).stdout == "cba\n"
        assert (await sandbox.exec(["cat"], stdin="x" * 300_000)).truncated
        assert "EOFError" in (await sandbox.run_python("input()")).stderr

    async def test_traceback_shows_the_program_only(self, sandbox: Sandbox) -> None:
        """A traceback names the program's own lines and nothing of the engine."""
        result = await sandbox.run_python("def f():\n    return 1 / 0\n\nf()\n")
        assert result.exit_code == 1
        assert "return 1 / 0" in result.stderr
        assert result.stderr.count("File ") == 2

    async def test_is_a_fresh_main_module(self, sandbox: Sandbox) -> None:
        """`run_python` behaves like `python main.py`: names, exit handlers, threads, nothing left from before."""
        await sandbox.run_python("import json; json.dumps = None; leftover = 1")
        code = (
            "import atexit, json, threading, time\n"
            "atexit.register(lambda: print('bye'))\n"
            "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
            "print(__name__, json.dumps([1]), 'leftover' in globals())\n"
        )
        assert (await sandbox.run_python(code)).stdout == "__main__ [1] False\nthread\nbye\n"

    async def test_exec_environment_and_folder(self, sandbox: Sandbox) -> None:
        """`exec` runs in the work folder, or one below, with exactly the variables given besides a fixed few."""
        await sandbox.write_file("sub/x", b"")
        line = "echo $A; basename $PWD; ls"
        result = await sandbox.exec(["sh", "-c", line], env={"A": "1 2"}, cwd="sub")
        assert result.stdout == "1 2\nsub\nx\n"
        assert (await sandbox.exec(["no-such-program"])).exit_code == 127

    async def test_bad_arguments_are_usage_errors(self, sandbox: Sandbox) -> None:
        """What no program could be given is the caller's mistake, not the program's."""
        for path in ("/etc/passwd", "../x", "a/../../x", ""):
            with pytest.raises(UsageError):
                await sandbox.write_file(path, b"")
        for argv in ("ls -l", [], ["echo", "a\0b"], ["echo", 1]):
            with pytest.raises(UsageError):
                await sandbox.exec(argv)  # type: ignore[arg-type]
        for env in ({"": "x"}, {"A=B": "x"}, {"A": "\0"}, {"A": 1}):
            with pytest.raises(UsageError):
                await sandbox.exec(["true"], env=env)  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            await sandbox.exec(["true"], cwd="\0")
        with pytest.raises(UsageError):
            await sandbox.run_python(b"print(1)")  # type: ignore[arg-type]

    async def test_hostile_bytes(self, sandbox: Sandbox) -> None:
        """Output that is not text, and source that can't be encoded, do not break the call."""
        result = await sandbox.run_python("import os; os.write(1, b'\\xff\\x00\\n')")
        assert result.stdout == "\ufffd\x00\n"
        assert (await sandbox.run_python("print('\ud800')")).exit_code in (0, 1)
        assert (await sandbox.run_python("x = '\0'")).exit_code == 1

    async def test_wall_time(self, sandbox: Sandbox) -> None:
        """A sleeping program ends at its wall limit, with what it printed until then."""
        result = await sandbox.run_python("print('before')\nimport time; time.sleep(60)", limits=SHORT)
        assert result.timed_out
        assert result.stdout == "before\n"

    async def test_cpu_time(self, sandbox: Sandbox) -> None:
        """A spinning program ends at its CPU limit."""
        result = await sandbox.run_python("while True: pass", limits=Limits(cpu_s=1, wall_s=20))
        assert result.timed_out
        assert result.usage.wall_s < 15

    async def test_memory(self, sandbox: Sandbox) -> None:
        """Too much memory is reported as such, and the sandbox lives on."""
        result = await sandbox.run_python("x = bytearray(400 << 20)", limits=Limits(memory_mb=200))
        assert result.out_of_memory
        assert not result.ok
        assert (await sandbox.run_python("print(1)")).ok

    async def test_output_keeps_head_and_tail(self, sandbox: Sandbox) -> None:
        """Long output is cut in the middle, visibly."""
        code = "print('head')\nfor _ in range(3000): print('x' * 1000)\nprint('tail')"
        result = await sandbox.run_python(code, limits=Limits(output_bytes=10_000))
        assert result.truncated
        assert result.exit_code == 0
        assert result.stdout.startswith("head\n")
        assert result.stdout.endswith("tail\n")
        assert "left out" in result.stdout
        assert len(result.stdout) < 11_000

    async def test_processes_files_and_descriptors(self, sandbox: Sandbox) -> None:
        """Process, file-size and descriptor limits hold and are the program's own errors."""
        limits = Limits(processes=8, file_size_mb=1, open_files=20)
        forks = (
            "import os, signal\nn = 0\ntry:\n    while True:\n        if os.fork() == 0: signal.pause()\n"
            "        n += 1\nexcept OSError:\n    print(n)"
        )
        assert int((await sandbox.run_python(forks, limits=limits)).stdout) <= 8
        big = "try:\n    open('big', 'wb', 0).write(b'x' * (2 << 20))\n    print(open('big', 'rb').seek(0, 2))\n"
        big += "except OSError: print(0)"
        result = await sandbox.run_python(big, limits=limits)
        assert result.signal == 25 or int(result.stdout) <= 1 << 20
        files = "x = []\ntry:\n    while True: x.append(open('/dev/null'))\nexcept OSError: print(len(x))"
        assert int((await sandbox.run_python(files, limits=limits)).stdout) <= 20

    async def test_usage_is_measured(self, sandbox: Sandbox) -> None:
        """CPU, wall time and peak memory are those of the program."""
        result = await sandbox.run_python("x = bytearray(60 << 20)\nfor _ in range(2_000_000): pass")
        assert result.usage.cpu_s > 0.01
        assert result.usage.wall_s > 0
        assert 60 < result.usage.peak_memory_mb < 300

    async def test_files_round_trip(self, sandbox: Sandbox) -> None:
        """Files written are read back, by programs and by the caller, for the life of the sandbox."""
        data = bytes(range(256)) * 1000
        await sandbox.write_file("a/b.bin", data)
        await sandbox.run_python("open('c.bin', 'wb').write(open('a/b.bin', 'rb').read()[::-1])")
        assert await sandbox.read_file("c.bin") == data[::-1]
        result = await sandbox.run_python("import m; print(m.X)", files={"m.py": "X = 'ä'"})
        assert result.stdout == "ä\n"

    async def test_read_errors(self, sandbox: Sandbox) -> None:
        """Reading what is not there, or not a file, fails without hanging."""
        await sandbox.exec(["sh", "-c", "mkdir d; mkfifo f; ln -s /dev/zero z"])
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("nope")
        for path in ("d", "f", "z"):
            with pytest.raises(OSError, match=path):
                await sandbox.read_file(path)
