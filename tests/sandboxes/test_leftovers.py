"""What a program does to the folders themselves is undone before the next one, and is no reason to give a box up."""

from __future__ import annotations

import pytest

from forge_env.sandbox import SandboxEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")
LOOK = (
    "import os\nfor name in ('.', '/tmp', '/dev/shm'):\n    info = os.stat(name)\n"
    "    print(oct(info.st_mode), info.st_mtime_ns, os.listxattr(name), os.listdir(name), os.statvfs(name).f_ffree)\n"
)
TOUCHES = [
    "os.chmod('.', 0)",
    "os.chmod('.', 0o500); os.chmod('.', 0o700)",
    "os.utime('.', (1, 2))",
    "os.setxattr('.', 'user.left', b'1')",
    "open('x', 'w').close(); os.unlink('x')",
    "open('x', 'w').write('x' * 100_000)",
    "os.makedirs('a/' * 300); os.chmod('a/a/a', 0)",
    "os.symlink('/etc', 'etc'); os.mkfifo('pipe')",
    "open('/tmp/x', 'w').close(); os.chmod('/tmp/x', 0)",
    "os.mkdir('/dev/shm/x'); open('/dev/shm/x/y', 'w').close(); os.chmod('/dev/shm/x', 0)",
    "open('a', 'w').close(); open('b', 'w').close(); os.rename('a', 'b'); os.link('b', 'c'); os.truncate('c', 1 << 20)",
]


@pytest.mark.parametrize("touch", TOUCHES)
async def test_folders_are_as_new(engine: SandboxEngine, touch: str) -> None:
    async with engine.session() as sandbox:
        usual = (await sandbox.run_python(LOOK)).stdout
        assert usual.count("\n") == 3
    async with engine.session() as sandbox:
        result = await sandbox.run_python(f"import os\ntry:\n    {touch}\nexcept OSError as error:\n    print(error)\n")
        assert result.ok, result
    for _ in range(2):
        async with engine.session() as sandbox:
            assert (await sandbox.run_python(LOOK)).stdout == usual
    stats = engine.stats()
    assert "poisoned" not in stats, stats["dirt"]


async def test_a_programs_folder_is_its_own_again(engine: SandboxEngine) -> None:
    async with engine.session() as sandbox:
        await sandbox.run_python("import os; os.chmod('.', 0)")
        assert (await sandbox.run_python("open('x', 'w').close(); import os; print(os.listdir())")).stdout == "['x']\n"


async def test_no_program_reaches_the_runner(engine: SandboxEngine) -> None:
    """Limits, priorities and CPUs of other processes: the runner's have the same user in the embedded engine."""
    code = (
        "import os, resource\nothers = {int(pid) for pid in os.listdir('/proc') if pid.isdigit()} - {os.getpid()}\n"
        "for pid in others:\n"
        "    for call in (lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (5, 5)),\n"
        "                 lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),\n"
        "                 lambda: os.sched_setaffinity(pid, {0}), lambda: os.kill(pid, 19), lambda: os.kill(pid, 2)):\n"
        "        try:\n            call()\n        except OSError: pass\n"
        "os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))\n"
    )
    async with engine.session() as sandbox:
        assert (await sandbox.run_python(code)).ok
        limit = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 9)"
        assert (await sandbox.run_python(limit)).stdout == "True\n"
    async with engine.session() as sandbox:
        assert (await sandbox.run_python(limit)).stdout == "True\n"
    assert "poisoned" not in engine.stats()
    assert "lost" not in engine.stats()
