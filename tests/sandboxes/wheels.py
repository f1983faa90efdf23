"""An index of wheels in a folder: packages of this environment, packed again, so that pip needs no network."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

_WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
OPENAI = (
    "openai",
    "annotated-types",
    "anyio",
    "h11",
    "httpcore2",
    "httpx2",
    "idna",
    "jiter",
    "pydantic",
    "pydantic-core",
    "sniffio",
    "truststore",
    "typing-extensions",
    "typing-inspection",
)
"""The client and what it needs."""
PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")


def use_wheels(folder: Path, monkeypatch: pytest.MonkeyPatch, names: Iterable[str] = PYTEST) -> None:
    """Have pip know only the packages `names`, and whatever else lies in `folder`."""
    for name in names:
        pack(name, folder)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())  # pip takes a blank for the end of a path


def use_client(folder: Path, monkeypatch: pytest.MonkeyPatch, factory: pytest.TempPathFactory) -> None:
    """Have pip know the client in `folder`; it is installed once, for all the tests of a session."""
    use_wheels(folder, monkeypatch, OPENAI)
    session = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # which has a folder of its own in there
        session = session.parent
    monkeypatch.setenv("XDG_CACHE_HOME", str(session / "cache"))


def pack(name: str, folder: Path) -> Path:
    """The wheel of an installed package, with its requirements as far as they apply here."""
    found = distribution(name)
    base = re.sub(r"[-_.]+", "_", found.metadata["Name"])
    path = folder / f"{base}-{found.version}-py3-none-any.whl"
    info = f"{base}-{found.version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for file in found.files or ():
            if file.parts[0] != ".." and not file.parts[0].endswith(".dist-info") and file.suffix != ".pyc":
                archive.write(file.locate(), str(file))
        required = [Requirement(line) for line in found.requires or ()]
        lines = [f"Requires-Dist: {item.name}" for item in required if not item.marker or item.marker.evaluate()]
        text = "\n".join(["Metadata-Version: 2.1", f"Name: {base}", f"Version: {found.version}", *lines, ""])
        archive.writestr(f"{info}/METADATA", text)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        scripts = found.read_text("entry_points.txt")
        if scripts:
            archive.writestr(f"{info}/entry_points.txt", scripts)
        archive.writestr(f"{info}/RECORD", "")
    return path


def write_wheel(name: str, version: str, source: str, folder: Path) -> Path:
    """A wheel with one module."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", source)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name}-run = {name}:main\n")
        archive.writestr(f"{info}/RECORD", "")
    return path
