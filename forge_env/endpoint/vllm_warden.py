"""Run a server in a separate process group, and end the whole group when the program that started it has ended.

Run as a script (`python vllm_warden.py GRACE_S FOLDER COMMAND...`) with a pipe as stdin, whose other end the starter
holds. The pipe closes however the starter ends: the group then gets SIGTERM, and SIGKILL after the grace period, and
FOLDER is removed. A signal from the starter to its child would not be enough: a server that is starting ignores
SIGTERM, and its helpers would not receive it. The kernel also sends SIGUSR1, in case a fork of the starter holds the
pipe open.
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
"""Offset of the exit status of a process killed by a signal, as in shells: the status is 128 + signal number."""


def on_death_of_starter(number: signal.Signals) -> None:
    """Have the kernel send this process `number` when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def main(grace_s: float, folder: str, command: list[str]) -> int:
    """Run `command` until it or the starter ends; return its exit status (128 + signal number if it was killed)."""
    signals, signals_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(signals_in)  # the number of every handled signal is written to this pipe
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # meant for the server; a handler, unlike SIG_IGN, is not inherited
    on_death_of_starter(signal.SIGUSR1)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: on_death_of_starter(signal.SIGKILL))
    ended = os.pidfd_open(server.pid)
    while True:
        ready, _, _ = select.select([sys.stdin.fileno(), ended, signals], [], [])
        if ended in ready:
            status = server.wait()
            return status if status >= 0 else KILLED - status
        if sys.stdin.fileno() in ready or signal.SIGUSR1 in os.read(signals, 100):
            break
    os.killpg(0, signal.SIGTERM)
    try:
        server.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # the rest of the group, including this process
    return 1


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2], sys.argv[3:]) & 0xFF)
