"""Soak test: mixed executions with random kills must lose no result, return no wrong one and leave nothing behind.

python -m benchmarks sandbox_soak [--engine docker] [--count 10000] [--kill-every 200] [--kill-daemon-every 2000]

The correct answer of every program is known. Sandboxes are killed from outside at random, and `--kill-daemon-every` (as
root) also kills and restarts a Docker daemon of its own, with separate folders, socket, containerd and bridge. A call
that fails with `SandboxError` is repeated on another sandbox, as in a rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.frame import main
from forge_env.errors import SandboxError
from forge_env.sandbox import Limits, Sandbox, SandboxEngine, open_engine
from forge_env.sandbox.engines import load_engine

DAEMON = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nprint({n})"
LEFT = "open('/tmp/left', 'w').write('x'); open('left', 'w').write('x'); print({n})"
CHEAT = "import os\ndef f(x): os._exit(0)"
KINDS = {
    "print": 50, "fail": 10, "calls": 15, "wrong": 5, "tests": 5, "wrong tests": 3, "daemon": 4, "left": 4, "shell": 2,
    "late": 2,
}  # fmt: skip
"""Kinds of programs and their weights."""
CALLERS = 4
WAIT_S = 0.2
"""Seconds before a call is repeated, since its engine may be restarting."""
BRIDGE, SUBNET = "forge-soak0", "172.31.254.1/24"


class OwnDaemon:
    """Private Docker daemon with its own containerd in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/docker.sock"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start dockerd, and containerd unless it is running, and wait until dockerd answers."""
        sock = self.folder / "containerd.sock"
        if not self._running:
            options = ["--root", f"{self.folder}/cd", "--state", f"{self.folder}/cds", "--address", str(sock)]
            self._spawn("containerd", options, sock.exists)
        options = [
            "--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec",
            "--pidfile", f"{self.folder}/pid", "-H", self.host, "--containerd", str(sock),
            "--bridge", BRIDGE, "--iptables=false", "--ip6tables=false", "--ip-masq=false", "--ip-forward=false",
        ]  # fmt: skip
        self._spawn("dockerd", options, self._answers)

    def _answers(self) -> bool:
        version = ["docker", "-H", self.host, "version"]
        return subprocess.run(version, capture_output=True, check=False).returncode == 0

    def _spawn(self, program: str, options: list[str], answers: Callable[[], bool]) -> None:
        with open(self.folder / f"{program}.log", "ab") as log:
            process = subprocess.Popen([program, *options], stdout=log, stderr=log, start_new_session=True)
        self._running[program] = process
        deadline = time.monotonic() + 60
        while not answers():
            if time.monotonic() > deadline:
                raise SystemExit(f"{program} did not start")
            time.sleep(0.1)

    def kill(self) -> None:
        """Send SIGKILL to the daemon; its containers keep running and are adopted by the next daemon."""
        self._running["dockerd"].kill()
        self._running["dockerd"].wait()
        (self.folder / "pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """Stop both processes."""
        for process in reversed(self._running.values()):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()


@contextlib.contextmanager
def own_daemon() -> Iterator[OwnDaemon]:
    """Run a private daemon for the block, with `DOCKER_HOST` set to it."""
    folder = Path(tempfile.mkdtemp(prefix="forge-soak-"))
    daemon, before = OwnDaemon(folder), os.environ.get("DOCKER_HOST")
    subprocess.run(["ip", "link", "add", BRIDGE, "type", "bridge"], check=True)
    try:
        subprocess.run(["ip", "addr", "add", SUBNET, "dev", BRIDGE], check=True)
        subprocess.run(["ip", "link", "set", BRIDGE, "up"], check=True)
        os.environ["DOCKER_HOST"] = daemon.host
        daemon.start()
        yield daemon
    finally:
        daemon.stop()
        os.environ.pop("DOCKER_HOST", None)
        if before is not None:
            os.environ["DOCKER_HOST"] = before
        subprocess.run(["ip", "link", "del", BRIDGE], check=True)
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for mount in reversed([path for path in mounts if path.startswith(f"{folder}/")]):
            subprocess.run(["umount", "-l", mount], check=False)
        shutil.rmtree(folder, ignore_errors=True)


async def one(sandbox: Sandbox, kind: str, number: int) -> bool:
    """Run one program; return whether its outcome is correct."""
    if kind == "print":
        return (await sandbox.run_python(f"print({number} * 7)")).stdout == f"{number * 7}\n"
    if kind == "fail":
        result = await sandbox.run_python(f"raise SystemExit({number % 200 + 1})")
        return result.exit_code == number % 200 + 1
    if kind in ("calls", "wrong"):
        code = "def f(x): return x * 3" if kind == "calls" else CHEAT
        outcomes = (await sandbox.run_calls(code, [f"f({number})", "f(2)"])).outcomes
        right = [outcome.value for outcome in outcomes] == [number * 3, 6]
        return right if kind == "calls" else not outcomes
    if kind in ("tests", "wrong tests"):
        code = "def f(x): return x * 3" if kind == "tests" else CHEAT
        judged = await sandbox.run_tests(code, f"from solution import f\nassert f({number}) == {number * 3}")
        return judged.passed is (kind == "tests")
    if kind in ("daemon", "left"):
        source = (DAEMON if kind == "daemon" else LEFT).replace("{n}", str(number))
        return (await sandbox.run_python(source)).stdout == f"{number}\n"
    if kind == "shell":
        shell = await sandbox.shell()
        await shell.run(f"x={number}")
        return (await shell.run("echo $x")).stdout == f"{number}\n"
    return (await sandbox.run_python("while True: pass", limits=Limits(wall_s=0.2))).timed_out


async def soak(engine: SandboxEngine, args: argparse.Namespace, daemon: OwnDaemon | None) -> collections.Counter[str]:
    """Run every number once, with several callers; return the counts of outcomes."""
    chance, work, lock = random.Random(0), iter(range(args.count)), asyncio.Lock()
    seen: collections.Counter[str] = collections.Counter()

    async def caller() -> None:
        for number in work:
            (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
            if daemon and number and number % args.kill_daemon_every == 0:
                async with lock:
                    await asyncio.to_thread(daemon.kill)
                    seen["daemon killed"] += 1
                    await asyncio.to_thread(daemon.start)
            while True:
                try:
                    async with engine.session() as sandbox:
                        if args.kill_every and chance.randrange(args.kill_every) == 0:
                            seen["killed"] += await asyncio.to_thread(kill_one, engine.name, chance)
                        seen["right" if await one(sandbox, kind, number) else f"WRONG {kind}"] += 1
                    break
                except SandboxError:
                    seen["repeated"] += 1
                    await asyncio.sleep(WAIT_S)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return seen


def kill_one(engine: str, chance: random.Random) -> int:
    """Kill one of this process's sandboxes from outside; return the number killed, 0 or 1."""
    candidates = [box for box in load_engine(engine).running() if box.owner_pid == os.getpid()]
    if not candidates:
        return 0
    victim = chance.choice(candidates).id
    command = ["kill", "-9", victim] if engine == "local" else ["docker", "kill", victim]
    return int(subprocess.run(command, capture_output=True, check=False).returncode == 0)


def left_behind(engine: type[SandboxEngine]) -> list[str]:
    """Return sandboxes, socket folders, control groups and runners of this process that still exist."""
    left = [box.id for box in engine.running() if box.owner_pid == os.getpid()]
    for folder, pattern in ((Path(tempfile.gettempdir()), ""), (Path("/sys/fs/cgroup"), "**/")):
        left += [str(path) for path in folder.glob(f"{pattern}forge-env-*.{os.getpid()}.*")]
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text()
            left += [f"process {pid}"] * ("runner" in command or "launch" in command)
    return left


async def run(args: argparse.Namespace, daemon: OwnDaemon | None) -> list[str]:
    async with open_engine(args.engine, concurrency=CALLERS) as engine:
        start = time.perf_counter()
        seen = await soak(engine, args, daemon)
        seconds = time.perf_counter() - start
    left = left_behind(type(engine))
    lines = [
        f"{args.engine}: {args.count} executions in {seconds:.0f} s ({args.count / seconds:.0f}/s): {dict(seen)}",
        f"left behind: {left or 'nothing'}",
    ]
    if seen["right"] != args.count or left:
        raise SystemExit("\n".join(lines))
    return lines


def measure(args: argparse.Namespace) -> list[str]:
    with own_daemon() if args.kill_daemon_every else contextlib.nullcontext() as daemon:
        return asyncio.run(run(args, daemon))


if __name__ == "__main__":
    main("Sandboxes under fire", measure, engine="docker", count=10_000, kill_every=200, kill_daemon_every=0)
