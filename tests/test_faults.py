"""Faults at chosen moments, played with a trainer in miniature: all of a run but actors and sandboxes is real.

`make chaos` plays the same faults with real training.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.chaos.faults import FAULTS, NotPossibleError, play
from tests import miniature

ROOT = Path(__file__).resolve().parents[1]
NEEDS_ACTORS = ("/dev/shm", "disk slow")


@pytest.fixture(scope="module")
def cache() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fc-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in FAULTS if not name.startswith(NEEDS_ACTORS)])
def test_a_run_survives_it_or_ends_as_it_should(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() and name.startswith(("disk", "folder")):
        pytest.skip("NOT RUN: mounts and immutable folders take root")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as place:
        try:
            death = play(name, Path(place), cache, {"method": f"{miniature.__name__}:train"})
        except NotPossibleError as error:
            pytest.skip(f"NOT RUN: {error}")
    assert death.problems == []
