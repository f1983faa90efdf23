"""Faults at chosen moments, played with a trainer in miniature: all of a run but actors and sandboxes is real.

`make chaos` plays these faults and more with real training, and with `--method tests.miniature:train` as here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.chaos.faults import NotPossibleError, play
from tests import miniature

MENDED = ("disk without inodes for a while", "folder immutable at training", "controller terminated at report")
"""Of all faults these, which cost the suite the least for what they try."""


@pytest.fixture(scope="module")
def cache() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fc-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MENDED)
def test_a_run_survives_it_or_ends_as_it_should(name: str, cache: Path) -> None:
    if os.geteuid() and not name.startswith("controller"):
        pytest.skip("NOT RUN: mounts and immutable folders take root")
    with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as place:
        try:
            death = play(name, Path(place), cache, {"method": f"{miniature.__name__}:train"})
        except NotPossibleError as error:
            pytest.skip(f"NOT RUN: {error}")
    assert death.problems == []
