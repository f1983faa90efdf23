"""What a controller leaves on other hosts when it is killed: nothing, after its lease."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

pytest.importorskip("monarch")

pytestmark = [pytest.mark.slow, pytest.mark.stack]

HOST = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""
CONTROLLER = """
import asyncio, sys, time
from trainers.loop.stack import prepare_controller
prepare_controller()
from monarch.actor import attach_to_workers, enable_transport
from trainers.actors.lease import Lease
from trainers.actors.processes import survive_deaths

async def main():
    survive_deaths()
    enable_transport("tcp://127.0.0.1:0")
    host = attach_to_workers(name="h2", ca="trust_all_connections", workers=[sys.argv[1]])
    await host.initialized
    mesh = host.spawn_procs(per_host={"procs": 2}, name="left")
    await mesh.initialized
    lease = Lease(mesh, lease_s=1.0, last_chance_s=0.5, renew_s=0.1)
    time.sleep(4.0)  # the event loop is held up, for longer than a lease
    print("READY", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    lease.end()
    await mesh.stop()
    print("STOPPED", flush=True)
    await host.shutdown()

asyncio.run(main())
"""


@pytest.fixture
def host() -> Iterator[tuple[str, psutil.Process]]:
    """A Monarch host at another address of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        address = f"tcp://127.0.0.2:{free.getsockname()[1]}"
    process = subprocess.Popen([sys.executable, "-c", HOST, address], stdin=subprocess.DEVNULL)
    own = psutil.Process(process.pid)
    family = [own]
    try:
        yield address, own
        family += own.children(recursive=True) if own.is_running() else []
    finally:
        for member in family:
            member.kill()
        process.wait()


def controller(address: str) -> subprocess.Popen[str]:
    """One that holds two processes on the host, when this returns."""
    command = [sys.executable, "-c", CONTROLLER, address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = next((line for line in process.stdout if "READY" in line), "")
    assert line, "it has ended"
    return process


def test_a_killed_controllers_processes_end_by_themselves_on_other_hosts(host: tuple[str, psutil.Process]) -> None:
    address, machine = host
    first = controller(address)
    held = machine.children(recursive=True)
    assert len(held) >= 2
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    _, left = psutil.wait_procs(held, timeout=30)
    assert not left
    assert machine.is_running()
    second = controller(address)  # the host serves the next one
    assert second.stdout is not None
    second.stdin.write("\n")
    second.stdin.flush()
    assert "STOPPED" in next((line for line in second.stdout if "STOPPED" in line), "")
    second.wait(60)
