"""The embedded engine for an ordinary user, where the tests themselves run as root."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from forge_env.sandbox_audit.attacks import ATTACKS

NOBODY = 65534
_BASE = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]  # behind any virtual environment


class Nobody:
    """Runs this installation as a user without any rights, whose home and cache are below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        os.chown(self.home, NOBODY, NOBODY)
        for parent in folder.parents[: len(folder.parents) - 2]:
            parent.chmod(parent.stat().st_mode | 0o011)
        folder.chmod(0o755)
        self.interpreter, self.before = _BASE, ""
        if not self._can_run():  # such as one in root's home: show it to nobody elsewhere, in mounts of their own
            shown = folder / "python"
            shown.mkdir()
            self.interpreter = shown / _BASE.relative_to(sys.base_prefix)
            self.before = f"mount --bind {shlex.quote(sys.base_prefix)} {shlex.quote(str(shown))} && "

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = shlex.join([str(self.interpreter), "-B", *words])
        drop = f"exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups --inh-caps=-all {command}"
        path = os.pathsep.join(
            entry for entry in [os.getcwd(), *sys.path] if "site-packages" in entry or entry == os.getcwd()
        )
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", self.before + drop],
            cwd="/",
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )

    def _can_run(self) -> bool:
        return self.run("-c", "import os, sys; os.stat(sys._base_executable); import json").returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_catalogue_as_an_ordinary_user() -> None:
    if os.geteuid() != 0:
        pytest.skip("not root: test_attacks.py has run as an ordinary user already")
    with tempfile.TemporaryDirectory() as folder:  # any other session of pytest closes pytest's own to others
        _play(Nobody(Path(folder)))


def _play(nobody: Nobody) -> None:
    probe = nobody.run("-c", "import forge_env.sandbox, sandboxes.local")
    if probe.returncode:
        pytest.skip(f"an ordinary user can't read this installation: {probe.stderr.strip()[-300:]}")
    result = nobody.run("-m", "forge_env", "sandbox", "audit", "--engine", "local")
    if "the kernel forbids namespaces" in result.stderr:
        pytest.skip(f"the machine lets no ordinary user make sandboxes: {result.stderr.strip()[-300:]}")
    assert f"{len(ATTACKS)} of {len(ATTACKS)} contained" in result.stdout, result.stdout + result.stderr
    assert result.returncode == 0
