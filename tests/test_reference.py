"""The pages of docs/reference are those that the docstrings make; what is public there has one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/reference.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_field_is_described() -> None:
    text = (ROOT / "docs" / "reference" / "task.md").read_text()
    fields = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", text, re.MULTILINE)
    assert [name for name, _ in fields] == ["id", "prompt", "data", "gold", "difficulty", "tags", "split"]
    assert all(len(description) > 10 for _, description in fields)
