"""Looking for a text in a run's records: what was found is right, however far a search has come."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from forge_env.trajectory import TrajectoryWriter
from forge_env.view.filter import Filter
from forge_env.view.index import RunIndex
from forge_env.view.queries import Queries
from tests.forge_env.view.made import episode, write


def test_a_search_says_how_far_it_is_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run", range(60))
    index = RunIndex(tmp_path / "run", tmp_path)
    index.update()
    queries = Queries(index)
    monkeypatch.setattr("forge_env.view.search.SEARCH_S", 0.0)
    chosen, shares = Filter.of({"q": "XS by 3."}), list[float]()
    while (share := queries.listed(chosen).searched) is not None:
        shares.append(share)
    assert shares == sorted(shares)
    assert len(shares) > 1
    groups = [group for group in range(60) if group % 7 == 3]
    assert queries.facets(chosen).total == 4 * len(groups)
    assert {row["grp"] for row in queries.listed(chosen).rows} == {str(group) for group in groups}


def test_a_search_goes_on_with_what_has_come(tmp_path: Path) -> None:
    write(tmp_path / "run", range(4))
    write(tmp_path / "run", range(4), "eval-00000")
    index = RunIndex(tmp_path / "run", tmp_path)
    index.update()
    queries, chosen = Queries(index), Filter.of({"q": "xs by 3."})
    assert queries.listed(chosen).searched is None
    assert queries.facets(chosen).total == 8
    write(tmp_path / "run", range(10, 11))  # to the file that is not the newest any more
    index.update()
    queries.listed(chosen)
    assert queries.facets(chosen).total == 12


def test_a_search_knows_capitals_of_every_alphabet(tmp_path: Path) -> None:
    made = episode(0, 0, 0, 0.5, random.Random(0))
    made.answer = "Größe \u0416"
    with TrajectoryWriter(tmp_path / "run" / "trajectories" / "train.jsonl") as writer:
        writer.write(made)
    index = RunIndex(tmp_path / "run", tmp_path)
    index.update()
    queries = Queries(index)
    for text, number in (("GRÖSSE", 0), ("gRÖßE", 1), ("\u0436", 1), ("gro", 0)):
        assert len(queries.listed(Filter.of({"q": text})).rows) == number, text
