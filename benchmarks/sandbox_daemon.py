"""A private Docker daemon that `benchmarks.sandbox_soak` can kill. Needs root and `dockerd`.

It has separate folders, socket, containerd and bridge, so that it does not affect another daemon on this machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

BRIDGE, SUBNET = "forge-soak0", "172.31.254.1/24"
START_TIMEOUT_S = 60.0


class OwnDaemon:
    """Private Docker daemon with its own containerd in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/docker.sock"
        self._containerd: subprocess.Popen[bytes] | None = None
        self._dockerd: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start dockerd, and containerd unless it is running, and wait until dockerd answers."""
        sock = self.folder / "containerd.sock"
        if self._containerd is None:
            options = ["--root", f"{self.folder}/cd", "--state", f"{self.folder}/cds", "--address", str(sock)]
            self._containerd = self._spawn("containerd", options)
            _until(sock.exists, "containerd")
        self._dockerd = self._spawn(
            "dockerd",
            [
                "--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec",
                "--pidfile", f"{self.folder}/pid", "-H", self.host, "--containerd", str(sock),
                "--bridge", BRIDGE, "--iptables=false", "--ip6tables=false", "--ip-masq=false", "--ip-forward=false",
            ],
        )  # fmt: skip
        _until(self.answers, "dockerd")

    def answers(self) -> bool:
        """Whether the daemon answers a client."""
        done = subprocess.run(["docker", "-H", self.host, "version"], capture_output=True, check=False)
        return done.returncode == 0

    def kill(self) -> None:
        """Send SIGKILL to the daemon; its containers keep running and are adopted by the next daemon."""
        if self._dockerd is not None:
            self._dockerd.kill()
            self._dockerd.wait()
            (self.folder / "pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """Stop both processes."""
        for process in (self._dockerd, self._containerd):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                process.kill()
                process.wait()

    def _spawn(self, program: str, options: list[str]) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{program}.log", "ab") as log:
            return subprocess.Popen([program, *options], stdout=log, stderr=log, start_new_session=True)


@contextlib.contextmanager
def own_daemon() -> Iterator[OwnDaemon]:
    """Run a private daemon for the block, with `DOCKER_HOST` set to it."""
    folder = Path(tempfile.mkdtemp(prefix="forge-soak-"))
    daemon = OwnDaemon(folder)
    subprocess.run(["ip", "link", "add", BRIDGE, "type", "bridge"], check=True)
    before = os.environ.get("DOCKER_HOST")
    try:
        subprocess.run(["ip", "addr", "add", SUBNET, "dev", BRIDGE], check=True)
        subprocess.run(["ip", "link", "set", BRIDGE, "up"], check=True)
        os.environ["DOCKER_HOST"] = daemon.host
        daemon.start()
        yield daemon
    finally:
        daemon.stop()
        os.environ.pop("DOCKER_HOST")
        if before is not None:
            os.environ["DOCKER_HOST"] = before
        subprocess.run(["ip", "link", "del", BRIDGE], check=True)
        for mount in reversed(_mounts_below(folder)):
            subprocess.run(["umount", "-l", mount], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _mounts_below(folder: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [path for path in (line.split()[1] for line in lines) if path.startswith(f"{folder}/")]


def _until(true: object, what: str) -> None:
    assert callable(true)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not start")
        time.sleep(0.1)
