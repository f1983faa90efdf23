"""What goes to run.log, and that a program's own logging goes on."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from forge_env.logs import captured_output, log_to


def test_a_log_leaves_the_program_s_own_logging_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, foreign = logging.getLogger("forge_env.test"), logging.getLogger("elsewhere")
    with caplog.at_level(logging.DEBUG, "forge_env"), log_to(tmp_path / "run.log", level=logging.WARNING):
        own.debug("detail")
        own.warning("careful")
        foreign.info("chatter")
        foreign.warning("trouble")
    assert [record.message for record in caplog.records] == ["detail", "careful", "trouble"]
    log = (tmp_path / "run.log").read_text()
    assert [word in log for word in ("detail", "careful", "chatter", "trouble")] == [False, True, False, True]
    own.warning("afterwards")
    assert "afterwards" not in (tmp_path / "run.log").read_text()


def test_a_log_without_lines_is_no_file(tmp_path: Path) -> None:
    with log_to(tmp_path / "run.log"):
        pass
    assert not (tmp_path / "run.log").exists()


def test_printing_where_nothing_can_be_written_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with captured_output(Path("/dev/full")) as terminal:
        for _ in range(3):
            print("x" * 10_000)
        terminal.write("shown\n")
    assert capfd.readouterr().out == "shown\n"


def test_a_log_on_a_full_disk_ends_nothing() -> None:
    level = logging.getLogger("forge_env").level
    with log_to(Path("/dev/full")):
        logging.getLogger("forge_env.run").warning("the disk is full")
    assert logging.getLogger("forge_env").level == level
