"""Small packages (`packages.yaml`) with bugs to plant, visible tests that miss them, and hidden tests that don't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug that replaces `right` by `wrong` in the file `path`; `report` describes the symptom to the agent."""

    name: str
    path: str
    right: str
    wrong: str
    report: str


@dataclass(frozen=True, slots=True)
class Package:
    """A package with its correct files by path; `visible` and `hidden` are unittest files that import them."""

    name: str
    level: int
    split: str
    files: dict[str, str]
    visible: str
    hidden: str
    bugs: tuple[Bug, ...]

    def with_bug(self, bug: Bug) -> dict[str, str]:
        """The files with a bug planted."""
        return {**self.files, bug.path: self.files[bug.path].replace(bug.right, bug.wrong)}


def _tests(imports: str, cases: Mapping[str, str]) -> str:
    """Source of a unittest file; a case is a name and one line of code."""
    methods = "".join(f"\n    def test_{name}(self):\n        {line}\n" for name, line in cases.items())
    return f"import unittest\n\n{imports}\n\n\nclass Tests(unittest.TestCase):{methods}"


def _package(name: str, data: dict[str, Any]) -> Package:
    visible, hidden = (_tests(data["imports"], data[kind]) for kind in ("visible", "hidden"))
    bugs = tuple(Bug(bug, **fields) for bug, fields in data["bugs"].items())
    return Package(name, data["level"], data["split"], data["files"], visible, hidden, bugs)


_DATA = yaml.safe_load(Path(__file__).with_name("packages.yaml").read_text(encoding="utf-8"))
PACKAGES = tuple(_package(name, data) for name, data in _DATA.items())


def chosen(split: str, levels: Sequence[int]) -> list[tuple[Package, Bug]]:
    """All bugs, with their packages, of a split and one of these levels."""
    return [(p, bug) for p in PACKAGES if p.split == split and p.level in levels for bug in p.bugs]
