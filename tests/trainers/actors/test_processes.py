"""Processes of actors: those that can't be started, and how one ends."""

from __future__ import annotations

import os
import subprocess
import sys

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

from trainers.actors.processes import leave_as_it_stands


class Held:
    def __del__(self):
        print("taken apart")


held = Held()
leave_as_it_stands()
atexit.register(print, "told to")
if not (pid := os.fork()):
    sys.exit(7)
print("a fork's code:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_process_leaves_as_it_stands_with_all_said_and_done() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING], check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["a fork's code: 7", "told to"]
    assert lines.count("taken apart") == 1, "the fork was, the process was not"
