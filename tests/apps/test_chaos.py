"""Real runs in which something dies at a random moment: they heal, or are resumed, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEATH = "generator:stopped"
"""`test_deaths.py` and `test_resume.py` have others."""


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_in_which_something_dies() -> None:
    """As `make chaos` does at length."""
    command = [sys.executable, "-m", "benchmarks.chaos", "--seed", "7", "--runs", "1", "--only", DEATH]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
