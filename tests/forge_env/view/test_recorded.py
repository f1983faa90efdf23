"""A recorded run in Python and in notebooks."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import forge_env as fe
from tests.forge_env.view.made import evaluation, hostile_run, training_run


def test_names_are_completed_without_those_of_python() -> None:
    assert {"Environment", "evaluate", "open_run", "rewards"} <= {*dir(fe)}
    assert {*dir(fe)} == {*fe.__all__}, "no Any, TYPE_CHECKING or import_module"
    assert all(hasattr(fe, name) for name in dir(fe))


def test_a_run_is_five_lines_and_in_a_notebook_a_table_and_a_curve(tmp_path: Path) -> None:
    run = fe.open_run(training_run(tmp_path / "first", steps=6))
    lines = repr(run).splitlines()
    assert len(lines) == 5
    assert lines[0] == "first: made \u00b7 made-up \u00b7 6 steps \u00b7 30.0s \u00b7 finished"
    assert lines[1].startswith("Did it learn? ")
    assert lines[-1] == str(tmp_path / "first")
    page = ElementTree.fromstring(run._repr_html_())
    assert len(page.findall("table/tr")) == 4
    (chart,) = page.findall("svg")
    assert len(chart.findall("polyline")) == 2, "training and held-out"
    assert [key.text or (key[0].tail or "") for key in page.findall("div/span")] == [
        "training solved",
        "held-out solved",
    ]
    assert (len(run.metrics), run.summary["exit"]) == (7, "success")
    assert list(pytest.importorskip("pandas").Series(run.to_frame()["step"])) == [*range(7)]


def test_an_evaluation_is_five_lines_and_a_table(tmp_path: Path) -> None:
    run = fe.open_run(os.fspath(evaluation(tmp_path / "eval-a", tasks=4)))
    assert len(repr(run).splitlines()) == 5
    assert "What is the score?" in run._repr_html_()
    assert "<svg" not in run._repr_html_()
    for several in ("calculator", ["calculator", "wordle"], ["calculator", "wordle", "tic_tac_toe"]):
        result = fe.evaluate(several, "random", num_tasks=2, out=str(tmp_path / f"out-{len(several)}"))
        lines = repr(result).splitlines()
        assert len(lines) == 5
        assert re.match(r"random: finished, \d of \d samples in ", lines[0])
        assert lines[-1] == str(result.folder)
        assert result._repr_html_().startswith("<table><caption>random</caption>")


def test_texts_of_strangers_stay_text_in_a_notebook(tmp_path: Path) -> None:
    page = fe.open_run(hostile_run(tmp_path / "hostile"))._repr_html_()
    assert "<script" not in page
    assert "\x1b" not in page


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(fe.UsageError, match="is neither a run nor an evaluation"):
        fe.open_run(tmp_path)
