"""What the run's processes are at, for whoever asks why nothing moves: the stack of each, or why there is none.

In every process a thread waits to be asked, and then writes the stacks of all threads into memory that this process
reads. That needs no privilege, no debugger and no event loop that turns. A process that was stopped, or that never lets
Python run, can't write; the kernel says so. (A signal handler, as `faulthandler` has it, would get by without Python,
but it ends processes whose threads run meanwhile.)
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
from typing import NamedTuple

import psutil

MEMORY = "forge-env-stacks-"
"""Name of the memory, less the number of the descriptor through which the process is asked."""
NAME = "HYPERACTOR_PROCESS_NAME"
"""By this variable Monarch tells a process what it is called."""
WRITE_S = 5.0
"""How long a process may take to write its stacks; a starved one takes a while."""
LOOK_S = 0.05
SHOWN_FRAMES = 4
_STDLIB = sysconfig.get_path("stdlib")
_MONARCH = str(Path(sysconfig.get_path("purelib"), "monarch"))
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
END = "(all threads)\n"


def offer_stack() -> None:
    """Let others ask this process for its stacks; it is called once, at its start."""
    ask = os.pipe2(os.O_CLOEXEC)
    memory = os.memfd_create(f"{MEMORY}{ask[0]}", os.MFD_CLOEXEC)
    threading.Thread(target=_answer, args=(*ask, memory), name="forge-env-stacks", daemon=True).start()


def _answer(asked: int, ask: int, memory: int) -> None:
    while os.read(asked, 1):  # `ask` is open too, so it never ends
        own = threading.get_ident()
        text = "".join(_written(number, frame) for number, frame in sys._current_frames().items() if number != own)
        os.ftruncate(memory, 0)
        os.pwrite(memory, f"{text}{END}".encode(errors="replace"), 0)


def _written(thread: int, frame: FrameType) -> str:
    calls = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=100, lookup_lines=False)
    lines = (f'  File "{call.filename}", line {call.lineno} in {call.name}\n' for call in calls)
    return f"Thread 0x{thread:016x} (most recent call first):\n{''.join(lines)}\n"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What a process is at.

    Attributes:
        name: "generator0-1": what it is called, and its rank.
        pid: its id.
        doing: in words.
        stacks: of all its threads, or nothing.
    """

    name: str
    pid: int
    doing: str
    stacks: str = ""

    @property
    def stands(self) -> bool:
        """Whether it does, or waits for, something: it does not merely wait to be called."""
        return self.doing != WAITS

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}) {self.doing}"


WAITS = "waits for calls"


async def look_at_processes() -> list[ProcessState]:
    """What each process that this one has started for actors is at."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if name := child.environ().get(NAME):
                found.append((name.partition(" @ ")[0], child))
    return list(await asyncio.gather(*(_look_at(name, process) for name, process in sorted(found, key=_by_name))))


def _by_name(item: tuple[str, psutil.Process]) -> tuple[str, int]:
    return item[0], item[1].pid


async def _look_at(name: str, process: psutil.Process) -> ProcessState:
    pid = process.pid
    try:
        status = process.status()
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return ProcessState(name, pid, "is stopped, by SIGSTOP or a debugger (kill -CONT lets it go on)")
        if status == psutil.STATUS_ZOMBIE:
            return ProcessState(name, pid, "has ended")
        text = await _stacks(pid)
        if not text:
            return ProcessState(name, pid, f"does not say what it is at: the kernel has it as '{status}'{_in(pid)}")
        return ProcessState(name, pid, in_words(text), text)
    except (psutil.Error, OSError):  # ended meanwhile
        return ProcessState(name, pid, "has ended")


def _in(pid: int) -> str:
    """In which wait of the kernel, where it tells."""
    with suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
        return f" in {where}" if where else ""
    return ""


async def _stacks(pid: int) -> str:
    """What a process writes of itself; nothing where it can't."""
    if (memory := _memory(pid)) is None:
        return ""
    os.truncate(memory, 0)
    ask = os.open(f"/proc/{pid}/fd/{os.readlink(memory).partition(MEMORY)[2].split()[0]}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(ask, b"?")
    finally:
        os.close(ask)
    for _ in range(round(WRITE_S / LOOK_S)):
        await asyncio.sleep(LOOK_S)  # nothing tells when it has written all
        if (text := memory.read_text(errors="replace")).endswith(END):
            return text.removesuffix(END)
    return ""


def _memory(pid: int) -> Path | None:
    """Where a process writes its stacks; None: it does not."""
    return next((path for path in Path(f"/proc/{pid}/fd").iterdir() if MEMORY in os.readlink(path)), None)


def in_words(stacks: str) -> str:
    """The stack that says most of what a process is at, innermost call first."""
    threads = [_frames(part) for part in re.split(r"^(?:Current t|T)hread .*$", stacks, flags=re.MULTILINE)]
    known = [[frame for frame in frames if not _machinery(frame.file)] for frames in threads]
    rank = [(bool(own) and own[0] == frames[0], len(own)) for frames, own in zip(threads, known, strict=True)]
    busy, length = max(rank, default=(False, 0))
    if not length:
        return WAITS
    shown = known[rank.index((busy, length))][:SHOWN_FRAMES]
    calls = " < ".join(f"{frame.function} ({Path(frame.file).name}:{frame.line})" for frame in shown)
    return f"{'is' if busy else 'waits'} in {calls}"


class _Frame(NamedTuple):
    file: str
    line: str
    function: str


def _frames(part: str) -> list[_Frame]:
    return [_Frame(*match.groups()) for line in part.splitlines() if (match := _FRAME.match(line))]


def _machinery(file: str) -> bool:
    """Whether it is code that every process waits in."""
    return file.startswith(("<frozen ", _MONARCH)) or (file.startswith(_STDLIB) and "-packages" not in file)
