"""The table of kits: every one has its tests, and docs/conformance.md has a row of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import conformance
from benchmarks.conformance import KITS, VENVS, Kit, Venv, interpreter, read, recorded, verdict
from tests.conftest import PEERS

ROOT = Path(__file__).parents[1]
REPORT = """<testsuites><testsuite>
<testcase classname="a" name="test_one"><properties><property name="passed" value="3 of 3" /></properties></testcase>
<testcase classname="a" name="test_two[x]"><skipped type="pytest.xfail" message="has no sound" /></testcase>
<testcase classname="a" name="test_two[y]"><skipped type="pytest.xfail" message="has no sound" /></testcase>
<testcase classname="a" name="test_three"><failure message="assert 1 == 2">long</failure></testcase>
<testcase classname="b" name="test_one"><skipped type="pytest.skip" message="no Docker" /></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("kit", KITS, ids=lambda kit: kit.name)
def test_a_kit_has_its_tests(kit: Kit) -> None:
    assert kit.venv in ("", *VENVS)
    for test in kit.tests.split():
        file, _, name = test.partition("::")
        function, _, case = name.removesuffix("]").partition("[")
        text = (ROOT / file).read_text()
        assert f"def {function}" in text
        assert not case or f'"{case}"' in text


def test_what_needs_a_package_of_others_belongs_to_a_kit() -> None:
    apart = {test.partition("::")[0] for kit in KITS if kit.venv for test in kit.tests.split()}
    assert {f"tests/{path}" for paths in PEERS.values() for path in paths.split()} <= apart


def test_the_page_has_a_row_of_every_kit() -> None:
    assert list(recorded()) == [kit.name for kit in KITS]


def test_a_row_says_what_passed_and_why_the_rest_did_not(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    checks = read(tmp_path / "report.xml")
    row = verdict(Kit("", "", "", "a.py"), checks)
    assert row == ("1 of 4: 3 of 3", "has no sound (2); FAILED test_three")
    assert verdict(Kit("", "", "", "a.py::test_two"), checks) == ("0 of 2", "has no sound (2)")
    assert verdict(Kit("", "", "", "a.py::test_two[x]"), checks) == ("0 of 1", "has no sound")
    assert verdict(Kit("", "", "", "b.py"), checks) == ("0 of 1", "SKIPPED no Docker")


@pytest.mark.parametrize(("ci", "status"), [("true", 1), ("", 0)])
def test_a_kit_that_cannot_be_run_fails_in_continuous_integration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ci: str, status: int
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(conformance, "lacking", lambda venv: "not run: needs Python 3.99")
    monkeypatch.setattr(conformance, "run", lambda *_: pytest.fail("it can't be run"))
    assert conformance.main(["Schemathesis"]) == status
    assert "not run: needs Python 3.99" in capsys.readouterr().out


def test_the_newest_releases_have_no_pins() -> None:
    venv = conformance.newest(
        Venv("-e .[a,b] one==0.2.1 two>=4", npm="@some/kit@0.1.16 plain@22.3 early@0.2.0-beta.4", override="x>=1")
    )
    assert (venv.packages, venv.override) == ("-e .[a,b] one two>=4", "x>=1")
    assert venv.npm == "@some/kit plain early@0.2.0-beta.4"  # npm's newest release may be older than a pre-release


def test_newest_beside_recorded_results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [
        conformance.Check(
            "tests/trainers/losses/test_losses_peers.py", "test_trls_losses_are_the_same", "failed", "moved", ""
        )
    ]

    def run(
        name: str, kits: object, *_: object, use_newest: bool
    ) -> tuple[int, list[conformance.Check], dict[str, str]]:
        assert (name, use_newest) == ("losses", True)
        return 1, checks, {"trl": "9.9"}

    monkeypatch.setattr(conformance, "run", run)
    assert conformance.main(["TRL", "--newest"]) == 1
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith(f"| TRL | {recorded()['TRL'][1]} | 9.9 |")
    assert "| 0 of 1 | FAILED moved |" in row


def test_packages_beside_ours_are_run_by_our_interpreter() -> None:
    assert interpreter(Venv("", beside=True, python="3.99")) == sys.executable
    assert interpreter(Venv("", python="3.99")) is None
