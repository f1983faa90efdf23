"""Layers of Python packages, installed once with pip from the index configured on this machine, and cached.

A layer is a folder with `site/` (importable packages) and `bin/` (their programs). Its name is derived from the
requested packages and the target Python. Only wheels are installed: no code of a package runs on this machine.
"""

from __future__ import annotations

import compileall
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_env.errors import SandboxUnavailableError, UsageError
from forge_env.machine import has_pip
from forge_env.sandbox import SandboxSpec
from sandboxes.images import cache

TIMEOUT_S = 900.0
_OLDEST_GLIBC = 5
_MISSING = re.compile(
    r"(?:No matching distribution found for|Could not find a version that satisfies the requirement) (\S+)"
)

_INTERPRETER = re.compile(rb"\A(?:#![^\n]*python[^\n]*|#!/bin/sh\n\x27{3}exec\x27 [^\n]*python[^\n]*\n\x27 \x27{3})\n")
"""First lines of a Python program. pip writes the second form if the interpreter's path is long or contains a space."""


@dataclass(frozen=True)
class Python:
    """A Python that packages are installed for."""

    version: str
    """`3.12`"""
    machine: str
    """`x86_64`"""
    libc: str
    """`glibc 2.36`, or empty for another C library."""
    site: str
    """Absolute path of its package folder."""
    scripts: str
    """Absolute path of the folder for packages' programs."""
    program: str = "/usr/bin/python3"
    """Interpreter that runs those programs."""


def this_python(site: str, scripts: str) -> Python:
    """This machine's Python, as copied into a root filesystem."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return Python(version, platform.machine(), " ".join(platform.libc_ver()), site, scripts)


def asked(packages: Sequence[str]) -> str:
    """Canonical text of a list of packages, independent of order and spaces."""
    return "\n".join(sorted({package.replace(" ", "") for package in packages}))


def ensure_layer(packages: Sequence[str], python: Python) -> Path:
    """The folder with packages, installed if missing. Raises `UsageError` and `SandboxUnavailableError`."""
    digest = hashlib.sha256(f"{asked(packages)}\n{python}".encode()).hexdigest()[:16]
    return cache.ensure(f"packages-{digest}", lambda folder: _install(packages, python, folder))


def has_pytest(spec: SandboxSpec) -> bool:
    """Whether pytest is among the packages, so that the runner should preload it."""
    return "pytest" in map(bare_name, spec.packages)


def bare_name(package: str) -> str:
    """The name of a package without version and extras."""
    return re.split(r"[^\w.-]", package)[0]


def _install(packages: Sequence[str], python: Python, folder: Path) -> None:
    site = folder / "site"
    if not has_pip():
        fix = f"{sys.executable} -m ensurepip, or an image that has them"
        raise SandboxUnavailableError("installing packages for sandboxes needs pip, which is missing", fix=fix)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-compile", "--only-binary=:all:", "--target", str(site), *_for_another(python), "--", *packages]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            umask=0o022,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxUnavailableError(f"installing {', '.join(packages)} took over {TIMEOUT_S:g} s") from error
    if done.returncode:
        if match := _MISSING.search(done.stderr):
            raise UsageError(
                f"package {match[1]!r} is not in the index that pip uses, as a wheel for Python {python.version}",
                fix="correct its name or version, or configure pip's index (`pip config list` shows it)",
            )
        lines = [line for line in done.stderr.strip().splitlines() if line]
        raise SandboxUnavailableError(f"pip could not install {', '.join(packages)}: {' '.join(lines[-3:])}")
    _arrange(folder, python)


def _for_another(python: Python) -> list[str]:
    """pip options for a Python other than the running one."""
    if python == this_python(python.site, python.scripts):
        return []
    options = ["--python-version", python.version, "--implementation", "cp"]
    name, _, version = python.libc.partition(" ")
    if name == "glibc":
        newest = int(version.split(".")[1])
        platforms = [f"manylinux_2_{minor}_{python.machine}" for minor in range(newest, _OLDEST_GLIBC - 1, -1)]
        platforms += [f"{kind}_{python.machine}" for kind in ("manylinux2014", "manylinux2010", "manylinux1")]
    else:
        platforms = [f"musllinux_1_{minor}_{python.machine}" for minor in (2, 1)]
    return [*options, *(word for name in platforms for word in ("--platform", name))]


def _arrange(folder: Path, python: Python) -> None:
    """Move programs beside the packages, set their interpreter, and byte-compile: layers are read-only in sandboxes."""
    site, scripts = folder / "site", folder / "bin"
    site.mkdir(exist_ok=True)
    scripts.mkdir()
    for script in sorted((site / "bin").glob("*")) if (site / "bin").is_dir() else ():
        data = _INTERPRETER.sub(f"#!{python.program}\n".encode(), script.read_bytes(), count=1)
        (scripts / script.name).write_bytes(data)
        (scripts / script.name).chmod(0o755)
        script.unlink()
    if python.version == this_python("", "").version:
        compileall.compile_dir(str(site), ddir=python.site, quiet=2, maxlevels=20)
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
