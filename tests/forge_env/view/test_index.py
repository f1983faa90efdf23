"""The index of a run's trajectories: complete whatever the folder holds, and whatever happens to it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from forge_env.trajectory_index import index_path
from forge_env.view import news
from forge_env.view.index import RunIndex
from forge_env.view.queries import Queries
from forge_env.view.runs import Runs
from tests.forge_env.view.made import write


def ids(index: RunIndex) -> list[str]:
    return [row["id"] for row in index.connection().execute("select id from t order by key")]


@pytest.mark.parametrize("rows", [True, False])
def test_records_with_and_without_rows_are_indexed_alike(rows: bool, tmp_path: Path) -> None:
    write(tmp_path / "run", range(20))
    records = tmp_path / "run" / "trajectories" / "train.jsonl"
    if not rows:
        index_path(records).unlink()
    index = RunIndex(tmp_path / "run", tmp_path)
    assert index.update()
    assert index.progress().whole
    assert ids(index) == [f"train-{group}-{member}" for group in range(20) for member in range(4)]
    line = index.connection().execute("select * from t where id = 'train-7-2'").fetchone()
    assert b'"train-7-2"' in index.read(line["key"], line["length"])
    assert not index.update(), "nothing is new"


def test_records_without_rows_are_read_a_part_at_a_time_from_the_newest_file_on(tmp_path: Path) -> None:
    write(tmp_path / "run", range(20))
    write(tmp_path / "run", range(2), "eval-00000")
    for kind in ("train", "eval-00000"):
        index_path(tmp_path / "run" / "trajectories" / f"{kind}.jsonl").unlink()
    os.utime(tmp_path / "run" / "trajectories" / "train.jsonl", (1e9, 1e9))
    index = RunIndex(tmp_path / "run", tmp_path)
    index.update(budget=1)
    assert [row["kind"] for row in index.connection().execute("select kind from t")] == ["eval-00000"]
    assert 0 < index.progress().share < 1
    while not index.progress().whole:
        index.update(budget=20_000)
    assert len(ids(index)) == 88


def test_what_is_appended_is_read_on_and_what_is_replaced_anew(tmp_path: Path) -> None:
    write(tmp_path / "run", range(3))
    index = RunIndex(tmp_path / "run", tmp_path)
    index.update()
    write(tmp_path / "run", range(3, 5))
    write(tmp_path / "run", range(2), "eval-00000")
    assert index.update()
    assert len(ids(index)) == 28
    records = tmp_path / "run" / "trajectories" / "train.jsonl"
    records.unlink()
    index_path(records).unlink()
    assert index.update()
    assert len(ids(index)) == 8
    write(tmp_path / "run", range(1))
    index.update()
    assert len(ids(index)) == 12


def test_of_two_records_of_one_id_the_later_counts(tmp_path: Path) -> None:
    write(tmp_path / "run", range(2))
    write(tmp_path / "run", range(1))
    index = RunIndex(tmp_path / "run", tmp_path)
    index.update()
    assert sorted(ids(index)) == [f"train-{group}-{member}" for group in range(2) for member in range(4)]
    assert ids(index)[0] == "train-1-0", "group 0 stands last"


def test_a_file_that_is_cut_short_is_read_anew(tmp_path: Path) -> None:
    write(tmp_path / "run", range(5))
    index = RunIndex(tmp_path / "run", tmp_path)
    index.update()
    records = tmp_path / "run" / "trajectories" / "train.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    with records.open("r+b") as file:
        file.truncate(sum(map(len, lines[:8])) + 10)
    index.update()
    assert len(ids(index)) == 8


def test_a_damaged_cache_is_made_anew(tmp_path: Path) -> None:
    write(tmp_path / "run", range(2))
    first = RunIndex(tmp_path / "run", tmp_path)
    first.update()
    first.path.write_bytes(b"no database" * 1000)
    second = RunIndex(tmp_path / "run", tmp_path)
    second.update()
    assert len(ids(second)) == 8


async def test_an_open_page_reads_the_rest_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run", range(20))
    index_path(tmp_path / "run" / "trajectories" / "train.jsonl").unlink()
    monkeypatch.setattr(news, "AT_ONCE", 1)
    monkeypatch.setattr(news, "LEAST_S", 0.001)
    runs, ended = Runs(tmp_path / "run", tmp_path), asyncio.Event()
    view = runs.get("run")
    assert view is not None
    assert not view.index.progress().whole
    told = 0
    async for _ in news.news(runs, view, ended):
        told += 1
        if view.index.progress().whole:
            ended.set()
    assert told > 20
    assert len(ids(view.index)) == 80


def test_what_another_viewer_has_read_is_news_here(tmp_path: Path) -> None:
    """Two viewers share one cache: one reads on, and the other keeps no answer from before."""
    write(tmp_path / "run", range(3))
    one, other = (RunIndex(tmp_path / "run", tmp_path) for _ in range(2))
    one.update()
    asked = Queries(other)
    assert asked.count() == 12
    write(tmp_path / "run", range(3, 5))
    one.update()
    other.update()
    assert asked.count() == 20
    dropped = other.dropped
    shutil.rmtree(tmp_path / "run")
    write(tmp_path / "run", range(2))
    one.update()
    assert asked.count() == 8
    assert other.dropped > dropped


MAKE = """
import sys
from pathlib import Path
from forge_env.view.index import RunIndex
for cache in sys.argv[2:]:
    sys.stdin.readline()
    index = RunIndex(Path(sys.argv[1]), Path(cache))
    index.update()
    print(index.connection().execute("select count(*) from t").fetchone()[0], flush=True)
"""


def test_viewers_that_begin_at_once_make_one_index(tmp_path: Path) -> None:
    write(tmp_path / "run", range(50))
    caches = [tmp_path / f"cache-{attempt}" for attempt in range(3)]
    words = [sys.executable, "-c", MAKE, tmp_path / "run", *caches]
    started = [subprocess.Popen(words, stdin=PIPE, stdout=PIPE, text=True) for _ in range(3)]
    for _ in caches:
        for process in started:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        assert [process.stdout.readline().strip() for process in started if process.stdout] == ["200"] * 3
    assert [process.communicate()[0] for process in started] == [""] * 3
