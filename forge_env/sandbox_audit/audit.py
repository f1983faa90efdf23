"""The sandbox audit: runs hostile programs and checks that each was contained.

    async for finding in audit(engine, ATTACKS): ...

An attack is contained if it reached nothing outside, ended in time in one of three runs, left the sandbox exactly as
clean as a new one for the next user, did not keep the engine busy, and did not disturb a neighbour working in the same
engine. A cheating solution must earn what it would have earned without its tricks. `forge-env sandbox audit` prints
the results.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from forge_env.errors import ForgeError
from forge_env.figures import duration
from forge_env.sandbox.capabilities import Interpreter, Interpreters, Judging, Process, Programs
from forge_env.sandbox.protocol import Sandbox, SandboxEngine
from forge_env.sandbox.results import ExecResult
from forge_env.sandbox.spec import Limits
from forge_env.sandbox_audit.attacks import BAIT, EXPECTED, LEAK, TESTS, Attack

LOOK = """\
import builtins, fcntl, glob, json, os, resource, signal, socket, sys, threading
def lines(path):
    try:
        with open(path) as file: return file.read().splitlines()[1:]
    except OSError: return []
def attributes(path):
    info = os.stat(path)
    try: flags = fcntl.ioctl(os.open(path, os.O_RDONLY), 0x80086601, bytes(8)).hex()
    except OSError: flags = ''
    return [oct(info.st_mode), info.st_mtime_ns, os.listxattr(path), flags]
folders = [os.getcwd(), '/tmp', '/dev/shm']
everywhere = [*folders, '/dev/mqueue', '/var/tmp', '/run', '/dev', '/']
look = {
    'processes': len([p for p in os.listdir('/proc') if p.isdigit()]),
    'named sockets': len([line for line in lines('/proc/net/unix') if len(line.split()) > 7]),
    'connections': [line for name in ('tcp', 'tcp6', 'udp', 'udp6', 'raw') for line in lines('/proc/net/' + name)],
    'files': sorted(f'{folder}/{name}' for folder in filter(os.path.isdir, everywhere) for name in os.listdir(folder)),
    'folders': {folder: attributes(folder) for folder in folders},
    'terminals': sorted(glob.glob('/dev/pts/*')),
    'mounts': len(lines('/proc/self/mountinfo')),
    'keys': lines('/proc/keys'),
    'host name': socket.gethostname(),
    'environment': dict(os.environ),
    'limits': [resource.getrlimit(number) for number in range(16)],
    'processors': len(os.sched_getaffinity(0)),
    'priority': os.getpriority(0, 0),
    'umask': os.umask(0o22),
    'signals': [str(signal.getsignal(number)) for number in range(1, 32)],
    'blocked signals': sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    'alarms': signal.getitimer(signal.ITIMER_REAL),
    'module path': sys.path,
    'modules': sorted(sys.modules),
    'builtins': sorted(vars(builtins)),
    'recursion': sys.getrecursionlimit(),
    'threads': threading.active_count(),
    'out-of-memory score': open('/proc/self/oom_score_adj').read(),
}
with open('new', 'w') as file: file.write('x')
look['new files'] = oct(os.stat('new').st_mode)
os.unlink('new')
print(json.dumps(look))
"""
"""A program that prints, as JSON, everything that an earlier program could have changed."""
_AT_MOST = ("processes", "named sockets")


def differences(result: ExecResult, usual: dict[str, Any]) -> list[str]:
    """Differences between the output of the program `LOOK` and that from a clean sandbox, in words."""
    try:
        now = json.loads(result.stdout)
    except ValueError:
        how = "it timed out" if result.timed_out else result.stderr[-200:].strip()
        return [f"the next program does not work: {how}"]
    return [
        f"{name} were left: {_short(now.get(name))} instead of {_short(expected)}"
        for name, expected in usual.items()
        if (now[name] > expected if name in _AT_MOST else now[name] != expected)
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


_LATE_S = 5.0
_TRIES = 3
"""Runs of an attack that ends late: on a busy machine a harmless program may, but not each time."""
_ENGINE_CPU_S = 2.0
"""CPU seconds that one attack may cost the engine's own thread."""
_PATIENT = Limits(wall_s=30.0)
_HONEST = f"def f(x): return {{1: {EXPECTED[0]}, 2: {EXPECTED[1]}}}[x]"
_WRONG = "def f(x): return 0"
_SHOWN = 300


@dataclass(frozen=True)
class Finding:
    """The outcome of one attack."""

    attack: Attack
    problems: list[str]
    """Empty if the attack was contained."""


class Neighbour:
    """A well-behaved user of the same engine, whose file, session and process must survive all attacks."""

    sandbox: Sandbox
    session: Interpreter
    process: Process
    usual: dict[str, Any]
    """Output of `LOOK` in a clean sandbox."""

    def __init__(self, engine: SandboxEngine) -> None:
        self._engine = engine
        self._turns = 0

    async def settle(self) -> None:
        """Acquire a sandbox and start a session and a process in it."""
        self.sandbox = await self._engine.acquire()
        self.usual = json.loads((await self.sandbox.run_python(LOOK, limits=_PATIENT)).stdout)
        await self.sandbox.write_file("mine", b"untouched")
        self.session = await Interpreters.of(self.sandbox).python()
        await self.session.run("turns = 0")
        self._turns = 0
        self.process = await Programs.of(self.sandbox).spawn(["cat"])

    async def leave(self) -> None:
        """Release the sandbox."""
        await self._engine.release(self.sandbox)

    async def work(self) -> list[str]:
        """Do a step of work and return its disturbances. After one the neighbour starts afresh, to report it once."""
        self._turns += 1
        problems = []
        try:
            if (await self.session.run("turns += 1; turns", limits=_PATIENT)).stdout != f"{self._turns}\n":
                problems.append("the neighbour's session lost its state")
            if await self.process.wait(0.001) is not None:
                problems.append("the neighbour's process ended")
            if await self.sandbox.read_file("mine") != b"untouched":
                problems.append("the neighbour's file was changed")
            if (await self.sandbox.run_python("print(6 * 7)", limits=_PATIENT)).stdout != "42\n":
                problems.append("the neighbour's program went wrong")
        except (ForgeError, OSError) as error:
            problems.append(f"the neighbour lost its sandbox: {error}")
        if problems:
            await self.leave()
            await self.settle()
        return problems


@asynccontextmanager
async def neighbour(engine: SandboxEngine) -> AsyncIterator[Neighbour]:
    """A neighbour that works in `engine` during the block."""
    resident = Neighbour(engine)
    await resident.settle()
    try:
        yield resident
    finally:
        await resident.leave()


async def audit(engine: SandboxEngine, attacks: Iterable[Attack]) -> AsyncIterator[Finding]:
    """Run every attack on `engine`, which must allow two sandboxes at once, and ideally no more: see `try_attack`."""
    async with neighbour(engine) as witness:
        for attack in attacks:
            yield Finding(attack, await try_attack(engine, attack, witness))


async def try_attack(engine: SandboxEngine, attack: Attack, witness: Neighbour) -> list[str]:
    """Run one attack next to `witness`. Returns the problems, in words.

    If the engine has room for exactly these two sandboxes, the next user is certain to get the attacked one.
    """
    started = time.thread_time()
    problems: list[str] = []
    try:
        async with engine.session() as sandbox:
            achieved, disturbed = await asyncio.gather(carry_out(sandbox, attack), witness.work())
            problems += achieved + disturbed
        async with engine.session() as sandbox:
            result = await sandbox.run_python(LOOK, limits=_PATIENT)
            problems += differences(result, witness.usual)
    except ForgeError as error:
        problems.append(f"the engine lost a sandbox: {error}")
    except Exception as error:  # noqa: BLE001  task boundary: any error that an attack makes an engine raise is a finding
        problems.append(f"the engine raised {type(error).__name__}: {error}")
    if (spent := time.thread_time() - started) > _ENGINE_CPU_S:
        problems.append(f"it cost the engine {duration(spent)}")
    return problems + await witness.work()


async def carry_out(sandbox: Sandbox, attack: Attack) -> list[str]:
    """Run one attack in `sandbox`. Returns what it achieved there, in words."""
    problems = await (_cheat if attack.group == "cheating" else _run)(sandbox, attack)
    if attack.bait:
        problems += await _take_bait(sandbox)
    if (await sandbox.run_python("print(1 + 1)", limits=_PATIENT)).stdout != "2\n":
        problems.append("the sandbox no longer works")
    return problems


async def _run(sandbox: Sandbox, attack: Attack) -> list[str]:
    soonest = math.inf
    for _ in range(_TRIES):
        result = await _play(sandbox, attack)
        if problems := [line[:_SHOWN] for line in result.stdout.splitlines() if line.startswith(LEAK)][:9]:
            return problems
        soonest = min(soonest, result.usage.wall_s)
        if soonest <= attack.limits.wall_s + _LATE_S:
            return []
    return [f"ended late {_TRIES} times, at best after {duration(soonest)}"]


async def _play(sandbox: Sandbox, attack: Attack) -> ExecResult:
    if not attack.session:
        return await sandbox.run_python(attack.code, limits=attack.limits)
    session = await Interpreters.of(sandbox).python()
    await sandbox.run_python("")
    return await session.run(attack.code, limits=attack.limits)


async def _take_bait(sandbox: Sandbox) -> list[str]:
    started = time.monotonic()
    try:
        data = await sandbox.read_file(BAIT)
        return [f"the engine read {len(data)} bytes of the bait"]
    except OSError:
        late = time.monotonic() - started > _LATE_S
        return ["the engine was held up by the bait"] if late else []


async def _cheat(sandbox: Sandbox, attack: Attack) -> list[str]:
    if attack.plant:
        await sandbox.run_python(attack.plant, limits=attack.limits)
    problems = await _judge(sandbox, "it", attack.code, attack.tests, attack.earns, attack.limits)
    problems += await _judge(sandbox, "a wrong solution after it", _WRONG, TESTS, 0, _PATIENT)
    return problems + await _judge(sandbox, "an honest solution after it", _HONEST, TESTS, len(EXPECTED), _PATIENT)


async def _judge(sandbox: Sandbox, who: str, code: str, tests: str, earns: int, limits: Limits) -> list[str]:
    """Judge a solution by calls and by tests. `earns` is the number of right answers that it should get."""
    problems = []
    judge = Judging.of(sandbox)
    outcomes = (await judge.run_calls(code, ["f(1)", "f(2)"], limits=limits)).outcomes
    right = [
        outcome.error is None and type(outcome.value) is int and outcome.value == expected
        for outcome, expected in zip(outcomes, EXPECTED, strict=False)
    ]
    if sum(right) != earns:
        problems.append(f"{who} earned {sum(right)} answers instead of {earns}")
    passed = (await judge.run_tests(code, tests, limits=limits)).passed
    if passed is not (earns == len(EXPECTED)):
        problems.append(f"{who} {'passed' if passed else 'failed'} its tests")
    return problems
