"""The program in docs/services.md runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("monarch")

DOCUMENT = (Path(__file__).parents[3] / "docs" / "services.md").read_text(encoding="utf-8")


@pytest.mark.stack
def test_the_program_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    (tmp_path / "judge.py").write_text(program)
    done = subprocess.run([sys.executable, "judge.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == [
        "(1.0, 7)",
        str([(1.0, 7)] * 8),
        str([(1.0, 7)] * 2),
        "raised there, raised here: 'ugly'",
    ]
