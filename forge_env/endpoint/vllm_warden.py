"""Runs a server as a process group of its own, and ends the whole group when the program that started it is gone.

Started as a script (`python vllm_warden.py GRACE_S FOLDER COMMAND...`), with a pipe as stdin of which the starter
holds the other end. However the starter ends, the pipe then does: the group gets SIGTERM, and SIGKILL after the grace;
FOLDER is removed. A signal to the starter's own child would do neither: a server that is starting swallows SIGTERM, and
its helpers would not get it. The kernel tells us too (SIGUSR1), should a fork of the starter hold the pipe open.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
KILLED = 128
"""Exit status by a signal, less the signal's number, as shells say it."""


def on_death_of_starter(number: signal.Signals) -> None:
    """Have the kernel send this process `number` when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def main(grace_s: float, folder: str, command: list[str]) -> int:
    """Run `command` until it ends (its exit status, 128 more than the signal that killed it) or the starter does."""
    told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(tell)  # every signal that has a handler writes its number there
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # meant for the server; a handler, unlike SIG_IGN, is not inherited
    on_death_of_starter(signal.SIGUSR1)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: on_death_of_starter(signal.SIGKILL))
    ended = os.pidfd_open(server.pid)
    while True:
        ready, _, _ = select.select([sys.stdin.fileno(), ended, told], [], [])
        if ended in ready:
            status = server.wait()
            return status if status >= 0 else KILLED - status
        if sys.stdin.fileno() in ready or signal.SIGUSR1 in os.read(told, 100):
            break
    os.killpg(0, signal.SIGTERM)
    try:
        server.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # what is left of the group, ourselves included
    return 1


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2], sys.argv[3:]) & 0xFF)
