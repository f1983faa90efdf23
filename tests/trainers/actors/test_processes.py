"""Processes of actors that can't be started."""

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
