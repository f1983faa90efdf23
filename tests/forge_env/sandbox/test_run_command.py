"""`forge-env sandbox run`: what a program printed, for a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from forge_env.cli.main import main
from tests.sandboxes.conftest import require

PROGRAM = r"""
import sys
print("\x1b]0;title\x07\x1b[2Jgone\x9b31m \u202eevil\ttab\r\nline\rhidden")
print("\x1b[1Aup", file=sys.stderr)
"""


@pytest.mark.slow
def test_terminal_controls(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    require("local")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    (tmp_path / "program.py").write_text(PROGRAM)
    assert main(["sandbox", "run", "--engine", "local", str(tmp_path / "program.py")]) == 0
    printed = capfd.readouterr()
    assert printed.out == "\\x1b]0;title\\x07\\x1b[2Jgone\\x9b31m \\u202eevil\ttab\nline\\rhidden\n"
    assert printed.err == "\\x1b[1Aup\n"
