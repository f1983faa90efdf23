"""Conformance tests that every sandbox engine must pass. Third parties run them on their own engines:

    class TestMyEngine(SandboxConformance):
        @pytest_asyncio.fixture(scope="class", loop_scope="class")
        @classmethod
        async def engine(cls):
            async with MyEngine(concurrency=2) as engine:
                yield engine

Needs pytest and pytest-asyncio. The engine must allow at least two sandboxes at once. Tests of capabilities that it
lacks are skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio

from forge_env.errors import SandboxError, SandboxFileError, SandboxPathError, UsageError
from forge_env.sandbox.capabilities import Archives, Interpreters, Judging, Programs
from forge_env.sandbox.protocol import Capability, Sandbox, SandboxEngine
from forge_env.sandbox.results import ExecResult, How, OutputChunk
from forge_env.sandbox.spec import Limits, SandboxSpec

SHORT = Limits(wall_s=0.6)
C = TypeVar("C", bound=Capability)


def needed(of: Callable[[object], C], provider: object) -> C:
    """Call a capability's `of`; skip the test if the engine lacks the capability."""
    try:
        return of(provider)
    except UsageError as error:
        pytest.skip(str(error))


class LifeTests:
    """The life of a sandbox from acquire to release: wiping, waiting, cancelling, neighbours."""

    async def test_released_is_wiped(self, engine: SandboxEngine) -> None:
        """No file of one user reaches the next."""
        for _ in range(4):
            async with engine.session() as sandbox:
                look = "ls -A . /tmp /dev/shm | grep -v :; true"
                assert (await sandbox.exec(["sh", "-c", look])).stdout.split() == []
                await sandbox.exec(["sh", "-c", "touch here /tmp/there /dev/shm/everywhere"])

    async def test_use_after_release_is_refused(self, engine: SandboxEngine) -> None:
        """A released sandbox can't be used, and releasing it twice has no effect."""
        sandbox = await engine.acquire()
        await engine.release(sandbox)
        with pytest.raises(SandboxError):
            await sandbox.run_python("print(1)")
        await engine.release(sandbox)

    async def test_more_users_than_sandboxes(self, engine: SandboxEngine) -> None:
        """Requests beyond the number of sandboxes wait and are served."""

        async def one(number: int) -> str:
            async with engine.session() as sandbox:
                return (await sandbox.run_python(f"print({number})")).stdout

        assert await asyncio.gather(*map(one, range(40))) == [f"{number}\n" for number in range(40)]

    async def test_cancelled_call(self, engine: SandboxEngine) -> None:
        """A cancelled call stops its program, and the engine keeps working."""
        sandbox = await engine.acquire()
        call = asyncio.ensure_future(sandbox.run_python("import time; time.sleep(60)", limits=Limits(wall_s=60)))
        await sandbox_has_started(sandbox)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await engine.release(sandbox)
        async with engine.session() as another:
            assert (await another.run_python("print(1)")).ok

    async def test_neighbours_are_apart(self, engine: SandboxEngine) -> None:
        """Two sandboxes see neither each other's files nor each other's processes."""
        async with engine.session() as left, engine.session() as right:
            await left.write_file("secret", b"1")
            with pytest.raises(FileNotFoundError):
                await right.read_file("secret")


async def sandbox_has_started(sandbox: Sandbox) -> None:
    """Give a call that was just scheduled the chance to be sent."""
    for _ in range(3):
        await asyncio.sleep(0)


class ProgramTests:
    """Programs and their resources: output, input, limits, files."""

    async def test_output_and_exit_code(self, sandbox: Sandbox) -> None:
        """A program's output, errors and status are returned."""
        result = await sandbox.run_python("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(7)")
        assert (result.exit_code, result.stdout, result.stderr) == (7, "out\n", "err\n")
        assert result.signal is None
        assert not result.ok

    async def test_stdin(self, sandbox: Sandbox) -> None:
        """Standard input is the given text, and empty by default."""
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
        """`run_python` behaves like `python main.py`: names, exit handlers, threads, and no leftovers."""
        await sandbox.run_python("import json; json.dumps = None; leftover = 1")
        code = (
            "import atexit, json, threading, time\n"
            "atexit.register(lambda: print('bye'))\n"
            "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
            "print(__name__, json.dumps([1]), 'leftover' in globals())\n"
        )
        assert (await sandbox.run_python(code)).stdout == "__main__ [1] False\nthread\nbye\n"

    async def test_exec_environment_and_folder(self, sandbox: Sandbox) -> None:
        """`exec` runs in the work folder, or below it, with only the given variables and a few fixed ones."""
        await sandbox.write_file("sub/x", b"")
        line = "echo $A; basename $PWD; ls"
        result = await sandbox.exec(["sh", "-c", line], env={"A": "1 2"}, cwd="sub")
        assert result.stdout == "1 2\nsub\nx\n"
        assert (await sandbox.exec(["no-such-program"])).exit_code == 127

    async def test_bad_arguments_are_usage_errors(self, sandbox: Sandbox) -> None:
        """Arguments that can't be passed to any program raise `UsageError`."""
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
        """A sleeping program is ended at its wall limit, and its output so far is returned."""
        result = await sandbox.run_python("print('before')\nimport time; time.sleep(60)", limits=SHORT)
        assert result.timed_out
        assert result.stdout == "before\n"

    async def test_cpu_time(self, sandbox: Sandbox) -> None:
        """A spinning program is ended at its CPU limit."""
        result = await sandbox.run_python("while True: pass", limits=Limits(cpu_s=1, wall_s=20))
        assert result.timed_out
        assert result.usage.wall_s < 15

    async def test_memory(self, sandbox: Sandbox) -> None:
        """Exceeding the memory limit is reported as such, and the sandbox stays usable."""
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
        """Process, file-size and descriptor limits hold, and exceeding them is the program's own error."""
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
        """Reported CPU time, wall time and peak memory are the program's."""
        result = await sandbox.run_python("x = bytearray(60 << 20)\nfor _ in range(2_000_000): pass")
        assert result.usage.cpu_s > 0.01
        assert result.usage.wall_s > 0
        assert 60 < result.usage.peak_memory_mb < 300

    async def test_files_round_trip(self, sandbox: Sandbox) -> None:
        """Written files are read back, by programs and by the caller, as long as the sandbox is held."""
        data = bytes(range(256)) * 1000
        await sandbox.write_file("a/b.bin", data)
        await sandbox.run_python("open('c.bin', 'wb').write(open('a/b.bin', 'rb').read()[::-1])")
        assert await sandbox.read_file("c.bin") == data[::-1]
        result = await sandbox.run_python("import m; print(m.X)", files={"m.py": "X = 'ä'"})
        assert result.stdout == "ä\n"
        await sandbox.write_text("t.txt", "ö")
        assert await sandbox.read_text("t.txt") == "ö"
        assert (await sandbox.run_python("print(input())", stdin="ü".encode())).stdout == "ü\n"

    async def test_folders_are_copied(self, sandbox: Sandbox, tmp_path: Path) -> None:
        """A folder is copied in and out with executable modes, but without links, pipes and files outside of it."""
        (tmp_path / "in/deep").mkdir(parents=True)
        (tmp_path / "in/run.sh").write_text("#!/bin/sh\necho ran\n")
        (tmp_path / "in/run.sh").chmod(0o755)
        (tmp_path / "in/deep/x.bin").write_bytes(bytes(range(256)))
        (tmp_path / "in/away").symlink_to("/etc/passwd")
        await sandbox.copy_in(tmp_path / "in", "repo")
        modes = await sandbox.exec(["sh", "-c", "ls -l run.sh deep/x.bin | cut -c4; sh run.sh"], cwd="repo")
        assert modes.stdout.split() == ["-", "x", "ran"]
        await sandbox.exec(["sh", "-c", "cd repo; mkfifo pipe; ln -s /etc e; ln -s /etc/passwd p; echo 1 > 'a b'"])
        await sandbox.copy_out("repo", tmp_path / "out")
        out = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")}
        assert out == {"run.sh", "deep", "deep/x.bin", "a b"}
        assert (tmp_path / "out/deep/x.bin").read_bytes() == bytes(range(256))
        assert (await sandbox.read_files("repo/deep")).keys() == {"x.bin"}
        assert "repo/deep/x.bin" in await sandbox.read_files()
        with pytest.raises(UsageError, match="already exists"):
            await sandbox.copy_out("repo", tmp_path / "out")
        with pytest.raises(UsageError, match="is not a folder"):
            await sandbox.copy_in(tmp_path / "nowhere")
        with pytest.raises(SandboxFileError, match="nope"):
            await sandbox.read_files("nope")
        with pytest.raises(SandboxPathError):
            await sandbox.read_files("../up")

    async def test_whatever_a_program_left_is_read(self, sandbox: Sandbox) -> None:
        """Whatever a program does to its files, the others can be read: locked or deep files, odd names, links."""
        deep = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
        lock = "mkdir -p s/t; echo 1 > s/t/x; echo 2 > y; chmod 0 s/t/x s/t s y; ln -s . l; ln -s n n; mkfifo p"
        await sandbox.run_python(deep)
        await sandbox.exec(["sh", "-c", lock])
        assert await sandbox.read_files() == {"s/t/x": b"1\n", "y": b"2\n"}
        assert await sandbox.read_files("s") == {"t/x": b"1\n"}
        look = "stat -c %a s y; chmod 700 s; stat -c %a s/t; chmod 700 s/t; stat -c %a s/t/x"
        modes = await sandbox.exec(["sh", "-c", look])
        assert modes.stdout.split() == ["0"] * 4

    async def test_read_errors(self, sandbox: Sandbox) -> None:
        """Reading a missing, special or outside path fails without hanging, as an agent's mistake."""
        await sandbox.exec(["sh", "-c", "mkdir d; mkfifo f; ln -s /dev/zero z"])
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("nope")
        for path in ("d", "f", "z"):
            with pytest.raises(SandboxFileError, match=path):
                await sandbox.read_file(path)
        for path in ("../up", "/etc/passwd", ""):
            with pytest.raises(SandboxPathError, match="is not inside the work folder"):
                await sandbox.read_file(path)


class WritableTests:
    """Writable folders besides the work folder. An engine without them must refuse such a specification early."""

    SPEC = SandboxSpec(writable=("/app", "/data"), disk_mb=8)

    async def test_writable_folders(self, engine: SandboxEngine) -> None:
        """Folders of the spec, and no others, are writable, up to their size, and can hold programs."""
        if (sandbox := await acquired(engine, self.SPEC)) is None:
            return
        script = "printf '#!/bin/sh\\necho ran' > /app/x; chmod +x /app/x; /app/x; touch /y /etc/y; rm -rf /usr/bin/env"
        ran = await sandbox.exec(["sh", "-c", f"{script}; ls -d /y /etc/y; ls /usr/bin/env"])
        assert ran.stdout == "ran\n/usr/bin/env\n"
        full = "import os\nfor i in range(9): open(f'/data/{i}', 'wb').write(bytes(2 << 20))"
        assert "No space left" in (await sandbox.run_python(full)).stderr
        await sandbox.write_file("/app/deep/file", b"1")
        assert await sandbox.read_file("/app/../app/deep/file") == b"1"
        assert (await sandbox.read_files("/app")).keys() == {"x", "deep/file"}
        for path in ("/etc/passwd", "/apple", "/app/../etc/x", "/"):
            with pytest.raises(SandboxPathError):
                await sandbox.write_file(path, b"")
        await engine.release(sandbox)

    async def test_writable_folders_are_wiped(self, engine: SandboxEngine) -> None:
        """Nothing in these folders reaches the next user, however it was hidden."""
        for _ in range(4):
            if (sandbox := await acquired(engine, self.SPEC)) is None:
                return
            seen = await sandbox.exec(["sh", "-c", "ls -A /app /data; stat -c %a /app"])
            assert seen.stdout.split() == ["/app:", "/data:", "755"]
            hide = (
                "mkdir -p /app/a/b; echo 1 > /app/a/b/.c; ln -s /app /data/l; mkfifo /data/p; chmod 0 /app/a/b /app/a"
            )
            await sandbox.exec(["sh", "-c", f"{hide}; chmod 500 /app"])
            await engine.release(sandbox)

    async def test_folders_are_packed(self, engine: SandboxEngine) -> None:
        """Packed folders move with links, modes, empty folders and unreadable files, and without removed ones."""
        if (left := await acquired(engine, self.SPEC)) is None:
            return
        make = "cd /app; mkdir -p e d/no; echo 1 > d/a; ln -s d/a l; ln d/a h; echo 2 > d/no/x; chmod 750 d/a; mkfifo p"
        await left.exec(["sh", "-c", make])
        hide = "cd /data; mkdir s; echo 3 > s/x; ln s/x y; chmod 0 s/x s"
        hidden = await left.exec(["sh", "-c", hide])
        assert hidden.ok, hidden.stderr[-500:]
        archive = await needed(Archives.of, left).pack(["/app", "/data"], leave_out=["/app/d/no"])
        async with engine.session(self.SPEC) as right:
            target = needed(Archives.of, right)
            await right.exec(["sh", "-c", "echo old > /app/old; echo kept > /data/kept"])
            await target.unpack(archive, instead_of=["/app"])
            modes = await right.exec(["sh", "-c", "cd /data; stat -c %a s y; chmod 700 s; rm -rf s y"])
            assert modes.stdout.split() == ["0", "0"]
            look = await right.exec(["sh", "-c", "cd /app; find . | sort; stat -c %a d/a; cat l h; ls /data"])
            assert look.stdout.split() == [".", "./d", "./d/a", "./e", "./h", "./l", "750", "1", "1", "kept"]
            with pytest.raises(SandboxFileError):
                await target.unpack(b"no archive")
            with pytest.raises(SandboxPathError):
                await target.pack(["/etc"])
        await engine.release(left)


async def acquired(engine: SandboxEngine, spec: SandboxSpec) -> Sandbox | None:
    """A sandbox of this kind, or None if the engine refuses the kind."""
    try:
        return await engine.acquire(spec)
    except UsageError:
        return None


class SessionTests:
    """Persistent processes (shells, Python sessions, background programs), and streaming."""

    async def test_shell_session(self, sandbox: Sandbox) -> None:
        """Variables, functions and working directory persist; statuses and output belong to their command."""
        interpreters = needed(Interpreters.of, sandbox)
        shell = await interpreters.shell(env={"A": "1"})
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
        """Names persist; the last expression is printed; an error or a time-out leaves the session usable."""
        interpreters = needed(Interpreters.of, sandbox)
        python = await interpreters.python()
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
        """A session that resists an interrupt ends with its command, without affecting others."""
        interpreters = needed(Interpreters.of, sandbox)
        python = await interpreters.python()
        stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
        result = await python.run(stubborn, limits=SHORT)
        assert result.timed_out
        assert not python.alive
        assert (await sandbox.run_python("print(1)")).ok

    async def test_background_process(self, sandbox: Sandbox) -> None:
        """A background program reads, writes, outlives other calls, and ends when killed."""
        programs = needed(Programs.of, sandbox)
        process = await programs.spawn(["cat"])
        await process.write(b"one\n")
        assert (await sandbox.exec(["true"])).ok
        seen = ""
        while "one" not in seen:
            seen += (await process.read())[0]
        await process.write(b"two\n", end=True)
        result = await process.wait(10)
        assert result is not None
        assert (result.stdout, result.exit_code) == ("two\n", 0)
        sleeper = await programs.spawn(["sleep", "100"])
        assert await sleeper.wait(0.05) is None
        await sleeper.kill()
        ended = await sleeper.wait(5)
        assert ended is not None
        assert ended.signal == 9

    async def test_streaming(self, sandbox: Sandbox) -> None:
        """Output arrives while the program runs, and the result at the end."""
        programs = needed(Programs.of, sandbox)
        line = "echo a; sleep 0.2; echo b >&2; exit 4"
        *chunks, result = [item async for item in programs.stream(["sh", "-c", line])]
        assert chunks == [OutputChunk("stdout", b"a\n"), OutputChunk("stderr", b"b\n")]
        assert isinstance(result, ExecResult)
        assert (result.exit_code, result.stdout, result.stderr) == (4, "a\n", "b\n")

    async def test_released_sessions_are_gone(self, engine: SandboxEngine) -> None:
        """Release ends sessions and background programs, and the next user sees none of them."""
        for _ in range(3):
            async with engine.session() as sandbox:
                interpreters = needed(Interpreters.of, sandbox)
                shell = await interpreters.shell()
                await shell.run("sleep 1000 & touch /tmp/x")
                await needed(Programs.of, sandbox).spawn(["sleep", "1000"])
                await sandbox.run_python("print(1)")
            with pytest.raises(SandboxError):
                await interpreters.shell()
        async with engine.session() as sandbox:
            assert "sleep" not in (await sandbox.exec(["ps", "ax"])).stdout
            assert (await sandbox.exec(["ls", "/tmp"])).stdout == ""


class JudgingTests:
    """Judging untrusted code: calls whose values are compared outside, and tests apart from the code."""

    async def test_calls_return_exact_plain_types(self, sandbox: Sandbox) -> None:
        """Values of plain types arrive equal and of the same type."""
        judge = needed(Judging.of, sandbox)
        expected: list[object] = [1, -(2**80), True, None, 1.5, float("inf"), 1j, "ä\n", b"\0"]
        expected += [[1, [2]], (1,), {1: {2}}, {"a": (1, 2)}, {}, set(), frozenset({1})]
        code = "inf = float('inf')\ndef same(x): return x"
        result = await judge.run_calls(code, [f"same({value!r})" for value in expected])
        values = [outcome.value for outcome in result.outcomes]
        assert values == expected
        assert [type(value) for value in values] == [type(value) for value in expected]

    async def test_calls_raise(self, sandbox: Sandbox) -> None:
        """An exception is the outcome of one call; a broken definition has no outcomes."""
        judge = needed(Judging.of, sandbox)
        result = await judge.run_calls("def f(x): return 1 / x", ["f(0)", "exit()", "f(1)", "g()"])
        assert [outcome.error for outcome in result.outcomes] == ["ZeroDivisionError", "SystemExit", None, "NameError"]
        broken = await judge.run_calls("def f(:", ["f()"])
        assert broken.outcomes == []
        assert broken.execution.exit_code == 1

    async def test_objects_do_not_travel(self, sandbox: Sandbox) -> None:
        """Only exact plain types are returned: an object that claims to equal everything is an error, not a value."""
        judge = needed(Judging.of, sandbox)
        code = (
            "class E(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\n"
            "def f(): return E(7)\ndef g(): return [E(7)]\ndef deep():\n    x = []\n"
            "    for _ in range(5000): x = [x]\n    return x\n"
        )
        result = await judge.run_calls(code, ["f()", "g()", "E", "deep()", "1"])
        assert [outcome.error for outcome in result.outcomes] == ["TypeError"] * 4 + [None]

    async def test_leaving_early_gives_no_values(self, sandbox: Sandbox) -> None:
        """A program that exits answers only the calls made before."""
        judge = needed(Judging.of, sandbox)
        for code in ("import os; os._exit(0)", "import sys; sys.exit(0)"):
            result = await judge.run_calls(code + "\ndef f(): return 1", ["f()"])
            assert result.outcomes == []
        result = await judge.run_calls("import os\ndef f(): return 1\ndef g(): os._exit(0)", ["f()", "g()", "f()"])
        assert [outcome.value for outcome in result.outcomes] == [1]

    async def test_tests_run_apart_from_the_code(self, sandbox: Sandbox) -> None:
        """unittest cases, test functions and plain asserts judge code in another process."""
        judge = needed(Judging.of, sandbox)
        code = "class Stack:\n    def __init__(s): s.x = []\n    def push(s, v): s.x.append(v)\n"
        code += "    def pop(s): return s.x.pop()\ndef double(x): return x * 2\ndef fail(): raise KeyError('k')\n"
        cases = (
            "import unittest\nfrom solution import Stack, double\nclass T(unittest.TestCase):\n"
            "    def test_a(self): self.assertEqual(double(4), 8)\n"
            "    def test_b(self):\n        s = Stack(); s.push(3); self.assertEqual(s.pop(), 3)\n"
            "        self.assertRaises(IndexError, s.pop)\n"
        )
        result = await judge.run_tests(code, cases)
        assert (result.passed, result.total, result.failures) == (True, 2, []), result
        functions = "def test_a(): assert double(1) == 2\ndef test_b(): assert double(1) == 3\n"
        result = await judge.run_tests(code, functions)
        assert (result.passed, result.total, len(result.failures)) == (False, 2, 1), result
        assert (await judge.run_tests(code, "assert double('a') == 'aa'")).passed
        assert not (await judge.run_tests("x = (", "pass")).passed
        assert not (await judge.run_tests("import os\ndef f(): os._exit(0)", "f()\nassert True")).passed
        undecodable = "def f(data): return data.decode()"
        for expected in ("UnicodeDecodeError", "ValueError"):
            checks = f"try: f(bytes([255]))\nexcept {expected}: pass\nelse: assert False"
            assert (await judge.run_tests(undecodable, checks)).passed

    async def test_files_are_judged_by_test_files(self, sandbox: Sandbox) -> None:
        """Test files judge packages, apart or counted; code that ends the process earns nothing."""
        judge = needed(Judging.of, sandbox)
        files = {"src/pkg/__init__.py": "from pkg.box import Box, size\n"}
        files["src/pkg/box.py"] = (
            "class Box:\n    def __init__(s, n): s.n = n\n    def __eq__(s, o): return s.n == o.n\n"
        )
        files["src/pkg/box.py"] += "def size(box): return len(box)\n"
        case = "import unittest\nfrom pkg import {0}\nclass T(unittest.TestCase):\n    def test(self): "
        calls = {"tests/test_a.py": case.format("size") + "self.assertEqual(size([1, 2]), 2)\n"}
        objects = {"tests/test_a.py": case.format("Box") + "self.assertEqual(Box(1), Box(1))\n"}
        ways: tuple[tuple[dict[str, str], How], ...] = ((calls, "apart"), (objects, "apart"), (objects, "counted"))
        for tests, how in ways:
            result = await judge.run_tests(files=files, tests=tests, how=how)
            assert (result.passed, result.total, result.failures, result.how) == (True, 1, [], how)
            for code in ("import os\nos._exit(0)\n", "size = Box = lambda *a: 0\nraise SystemExit(0)\n"):
                cheat = await judge.run_tests(files={**files, "src/pkg/box.py": code}, tests=tests, how=how)
                assert (cheat.passed, cheat.how) == (False, how)


@pytest.mark.asyncio(loop_scope="class")
class SandboxConformance(ProgramTests, JudgingTests, WritableTests, SessionTests, LifeTests):
    """The complete suite. Subclass it and provide the fixture `engine`, with class scope."""

    @pytest_asyncio.fixture(loop_scope="class")
    async def sandbox(self, engine: SandboxEngine) -> AsyncIterator[Sandbox]:
        """A clean sandbox."""
        async with engine.session() as sandbox:
            yield sandbox
