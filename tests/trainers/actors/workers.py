"""Workers of `forge-env worker` at addresses of this machine, each a host of its own as far as that goes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

READY_S = 120.0
NAMESPACES = ["unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child=KILL", "--mount-proc"]
HOST = 'hostname "$0"; exec "$@"'


class Worker:
    """One; where this is root, in namespaces, so that nothing works because it is the same machine after all."""

    def __init__(self, number: int, scheme: str, folder: Path, environment: Mapping[str, str]) -> None:
        host = f"127.0.0.{number}"
        with socket.create_server((host, 0)) as free:
            self.address = f"{scheme}://{host}:{free.getsockname()[1]}"
        apart = [*NAMESPACES, "sh", "-c", HOST, f"host{number}"] if os.geteuid() == 0 else []
        self._command = [*apart, sys.executable, "-m", "forge_env", "worker", self.address]
        self._log = folder / f"worker{number}.log"
        self._environment = {**os.environ, **environment}

    def start(self) -> None:
        """Begin a life; `wait` until it is ready."""
        self._log.write_text("")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def wait(self) -> None:
        with subprocess.Popen(["tail", "-f", "-n", "+1", self._log], stdout=subprocess.PIPE, text=True) as tail:
            assert tail.stdout is not None
            assert next((line for line in tail.stdout if "worker ready" in line), ""), self._log.read_text()
            tail.kill()

    def family(self) -> list[psutil.Process]:
        """It, and all that it has started; not what runs it in namespaces."""
        try:
            found = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        own = [] if self._command[0] == "unshare" else [psutil.Process(self._process.pid)]
        return [process for process in [*own, *found] if process.status() != psutil.STATUS_ZOMBIE]

    def kill(self) -> None:
        """The host is lost, at once, with all that runs on it."""
        family = self.family()
        self._process.kill()
        for process in family:
            if process.is_running():
                process.kill()
        self._process.wait()

    def interrupt(self) -> None:
        self.family()[0].send_signal(signal.SIGINT)
        self._process.wait(60)

    @property
    def said(self) -> str:
        return self._log.read_text()


def certificates(folder: Path) -> dict[str, str]:
    """Of an authority, and one for all hosts up to 127.0.0.4; the variables that name the files."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    names = ",".join(f"IP:127.0.0.{number}" for number in range(1, 5))
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1"  # made at once, where RSA's takes a tenth of a second
    (folder / "names").write_text(f"subjectAltName={names}\n")
    for command in (
        f"req -x509 {key} -nodes -keyout ca.key -out ca.crt -days 2 -subj /CN=authority",
        f"req {key} -nodes -keyout host.key -out host.csr -subj /CN=hosts",
        "x509 -req -in host.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out host.crt -days 2 -extfile names",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    files = {"CERT": "host.crt", "KEY": "host.key", "CA": "ca.crt"}
    return {f"HYPERACTOR_TLS_{name}": str(folder / file) for name, file in files.items()}


@contextmanager
def workers(
    count: int, folder: Path, scheme: str = "tcp", environment: Mapping[str, str] | None = None
) -> Iterator[list[Worker]]:
    """So many, ready; killed at the end."""
    started = [Worker(number, scheme, folder, environment or {}) for number in range(2, 2 + count)]
    try:
        for worker in started:
            worker.start()
        for worker in started:
            worker.wait()
        yield started
    finally:
        for worker in started:
            worker.kill()
