"""Stack dumps of a run's processes, to explain why a run makes no progress.

In every process a thread waits for a request, and then writes the stacks of all threads into memory that this process
reads. That needs no privileges, no debugger and no responsive event loop. A process that is stopped, or that never
releases the GIL, can't answer; then the kernel's state of the process is reported. (A signal handler such as
`faulthandler`'s would work without the GIL, but it crashes processes whose threads run meanwhile.)
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import sysconfig
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

MEMORY = "forge-env-stacks-"
"""Name prefix of the shared memory; the number of the descriptor that takes requests follows."""
NAME = "HYPERACTOR_PROCESS_NAME"
"""Variable in which Monarch passes a process its name."""
WRITE_S = 5.0
"""Seconds that a process has to write its stacks; one that gets little CPU time is slow."""
LOOK_S = 0.05
SHOWN_FRAMES = 4
_STDLIB = sysconfig.get_path("stdlib")
_MONARCH = str(Path(sysconfig.get_path("purelib"), "monarch"))
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
"""File, line and function of a call."""
END = "(all threads)\n"


def offer_stack() -> None:
    """Start the thread that answers requests for this process's stacks; call it once, at the process's start."""
    ask = os.pipe2(os.O_CLOEXEC)
    memory = os.memfd_create(f"{MEMORY}{ask[0]}", os.MFD_CLOEXEC)
    threading.Thread(target=_answer, args=(*ask, memory), name="forge-env-stacks", daemon=True).start()


def _answer(asked: int, ask: int, memory: int) -> None:
    while os.read(asked, 1):  # never at end of file, since `ask` stays open here
        this_one = threading.get_ident()
        text = "".join(_written(number, frame) for number, frame in sys._current_frames().items() if number != this_one)
        os.ftruncate(memory, 0)
        os.pwrite(memory, f"{text}{END}".encode(errors="replace"), 0)


def _written(thread: int, frame: FrameType) -> str:
    calls = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=100, lookup_lines=False)
    lines = (f'  File "{call.filename}", line {call.lineno} in {call.name}\n' for call in calls)
    return f"Thread 0x{thread:016x} (most recent call first):\n{''.join(lines)}\n"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """State of a process.

    Attributes:
        name: its name and rank, such as "generator0-1".
        stacks: stacks of all its threads; empty if it didn't answer.
    """

    name: str
    pid: int
    doing: str
    stacks: str = ""

    @property
    def stands(self) -> bool:
        """Whether the process does something other than wait for calls."""
        return self.doing != WAITS

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}) {self.doing}"


WAITS = "waits for calls"


async def look_at_processes() -> list[ProcessState]:
    """Return the state of each process that this one has started for actors."""
    actors = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if name := child.environ().get(NAME):
                actors.append((name.partition(" @ ")[0], child))
    actors.sort(key=lambda actor: (actor[0], actor[1].pid))
    return list(await asyncio.gather(*(_look_at(name, process) for name, process in actors)))


async def _look_at(name: str, process: psutil.Process) -> ProcessState:
    pid = process.pid
    try:
        status = process.status()
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return ProcessState(name, pid, "is stopped, by SIGSTOP or a debugger (kill -CONT continues it)")
        if status == psutil.STATUS_ZOMBIE:
            return ProcessState(name, pid, "has ended")
        text = await _stacks(pid)
        if not text:
            return ProcessState(name, pid, f"can't be inspected: the kernel reports '{status}'{_in(pid)}")
        return ProcessState(name, pid, in_words(text), text)
    except (psutil.Error, OSError):  # it has ended meanwhile
        return ProcessState(name, pid, "has ended")


def _in(pid: int) -> str:
    """The kernel function that a process waits in, after ' in '; empty if unknown."""
    with suppress(OSError):
        function = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
        return f" in {function}" if function else ""
    return ""


async def _stacks(pid: int) -> str:
    """Request a process's stacks; empty if it doesn't answer within `WRITE_S`."""
    if (memory := _memory(pid)) is None:
        return ""
    os.truncate(memory, 0)
    ask = os.open(f"/proc/{pid}/fd/{os.readlink(memory).partition(MEMORY)[2].split()[0]}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(ask, b"?")
    finally:
        os.close(ask)
    for _ in range(round(WRITE_S / LOOK_S)):
        await asyncio.sleep(LOOK_S)  # there is no event for the end of its writing
        if (text := memory.read_text(errors="replace")).endswith(END):
            return text.removesuffix(END)
    return ""


def _memory(pid: int) -> Path | None:
    """Path of the memory that a process writes its stacks to; None if it has none."""
    return next((path for path in Path(f"/proc/{pid}/fd").iterdir() if MEMORY in os.readlink(path)), None)


def in_words(stacks: str) -> str:
    """Describe a process by its most informative stack: calls of user code, innermost first.

    Threads that run user code are preferred to those that wait in it, then deeper stacks to shallower ones.
    """
    parts = re.split(r"^(?:Current t|T)hread .*$", stacks, flags=re.MULTILINE)
    threads = [_FRAME.findall(part) for part in parts]
    known = [[frame for frame in frames if not _machinery(frame[0])] for frames in threads]
    rank = [(bool(user) and user[0] == frames[0], len(user)) for frames, user in zip(threads, known, strict=True)]
    busy, length = max(rank, default=(False, 0))
    if not length:
        return WAITS
    shown = known[rank.index((busy, length))][:SHOWN_FRAMES]
    calls = " < ".join(f"{function} ({Path(file).name}:{line})" for file, line, function in shown)
    return f"{'is' if busy else 'waits'} in {calls}"


def _machinery(file: str) -> bool:
    """Whether a file belongs to Monarch or the standard library, in which every process waits."""
    return file.startswith(("<frozen ", _MONARCH)) or (file.startswith(_STDLIB) and "-packages" not in file)
