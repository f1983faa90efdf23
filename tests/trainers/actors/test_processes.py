"""Processes of actors: those that can't be started, and how one ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytest.importorskip("monarch")

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
SCRIPT = """
import asyncio

import psutil

from forge_env.errors import ForgeError
from trainers.actors.processes import start_processes


async def main():
    try:
        await start_processes(1, "trainer")
    except ForgeError as error:
        print(error)
    print(*(child.pid for child in psutil.Process().children()))


asyncio.run(main())
"""


def test_processes_that_do_not_start_in_time_are_named_and_ended() -> None:
    """As on a machine that is so busy that a process doesn't get to its first line."""
    impatient = {**os.environ, "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "1ms"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=impatient, check=True, capture_output=True, text=True)
    assert "the processes of trainer did not start: " in done.stdout
    assert "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE=10m" in done.stdout
    begun = [pid for pid in done.stdout.splitlines()[-1].split() if psutil.pid_exists(int(pid))]
    _, left = psutil.wait_procs([psutil.Process(int(pid)) for pid in begun], timeout=60)
    assert not left


LEAVING = """
import atexit
import os
import sys

from trainers.actors.processes import leave_as_it_stands, settle_imports


class Held:
    def __del__(self):
        print("taken apart")


held = Held()
text, data = open(sys.argv[1], "w"), open(sys.argv[2], "wb")
settle_imports()
leave_as_it_stands()
atexit.register(print, "told to")
if not (pid := os.fork()):
    sys.exit(7)
print("a fork's code:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
text.write("text")
data.write(b"data")
"""


def test_a_process_leaves_as_it_stands_with_all_said_and_done(tmp_path: Path) -> None:
    files = [tmp_path / "text", tmp_path / "data"]
    command = [sys.executable, "-c", LEAVING, *map(str, files)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["a fork's code: 7", "told to"]
    assert lines.count("taken apart") == 1, "the fork was, the process was not"
    assert [file.read_text() for file in files] == ["text", "data"], "what was left open is written"
