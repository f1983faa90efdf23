"""`forge-env sandbox audit`: what it lists, runs, prints and ends with."""

from __future__ import annotations

import pytest

from forge_env.cli.main import main
from forge_env.sandbox_audit.attacks import ATTACKS, LEAK, Attack
from tests.sandboxes.conftest import require


def test_list_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "audit", "--list", "--group", "network", "--group", "escape"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(attack.group in ("network", "escape") for attack in ATTACKS)


@pytest.mark.parametrize("option", [("--group", "cooking"), ("--attack", "ask nicely")])
def test_unknown_names_are_refused(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "audit", *option]) == 2
    assert repr(option[1]) in capsys.readouterr().err


@pytest.mark.slow
def test_what_holds_and_what_does_not(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    require("local")
    assert main(["sandbox", "audit", "--engine", "local", "--attack", "ptrace", "--attack", "exits"]) == 0
    assert "2 of 2 contained" in capsys.readouterr().out
    leak = Attack("leak", "escape", "Reach what it must not.", f"print('{LEAK} of all')")
    monkeypatch.setattr("forge_env.cli.sandbox.ATTACKS", (leak,))
    assert main(["sandbox", "audit", "--engine", "local"]) == 1
    printed = capsys.readouterr().out
    assert "LEAK of all" in printed
    assert "0 of 1 contained" in printed
