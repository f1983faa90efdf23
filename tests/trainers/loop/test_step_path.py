"""The files that docs/architecture.md names are those that a training step passes through."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

pytest.importorskip("torch")

from trainers.buffer.types import Reservation
from trainers.loop.stack import prepare_controller
from trainers.loop.system import System

prepare_controller()

from tests.trainers.loop.dry_run import dry_run  # noqa: E402

pytestmark = [pytest.mark.stack, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[3]
MOST = 15
BESIDE = {
    "trainers/actors/replicas.py": "restarts what dies",
    "trainers/loop/stack.py": "restarts what dies, and ends the run when asked to",
    "trainers/loop/healing.py": "checkpoints",
    "trainers/loop/contract.py": "checks",
    "trainers/loop/record.py": "metrics",
    "trainers/loop/status.py": "metrics",
    "trainers/loop/watchdog.py": "metrics",
}
"""Files that observe a step or keep it alive, by what they do; a step is the same without them."""
ENGINES = {"trainers/generator/generator.py": "generate", "trainers/titan/trainer.py": "train_on"}
"""Actors that stand-ins replace here, and the endpoint that a step calls."""


def listed() -> list[str]:
    page = (ROOT / "docs" / "architecture.md").read_text()
    block = page.partition("To follow a training step")[2].split("```")[1]
    return re.findall(r"^(?:trainers|forge_env)/\S+\.py", block, re.MULTILINE)


@contextmanager
def coroutines(entered: set[str]) -> Iterator[None]:
    """Note the files of the coroutines of `trainers` and of an episode that are entered during the third step."""
    seen: set[CodeType] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code not in seen:
            seen.add(code)
            path = Path(code.co_filename)
            if code.co_flags & inspect.CO_COROUTINE and path.is_relative_to(ROOT):
                entered.add(str(path.relative_to(ROOT)))

    finish_step = System.finish_step

    async def finished(self: System, batch: Reservation, metrics: dict[str, float]) -> None:
        await finish_step(self, batch, metrics)
        sys.setprofile(look if self.step == 2 else None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(System, "finish_step", finished)
        try:
            yield
        finally:
            sys.setprofile(None)


def test_a_training_step_passes_through_the_files_that_the_page_names(tmp_path: Path) -> None:
    entered: set[str] = set()
    with coroutines(entered):
        events = dry_run({"evaluation.every": 0}, tmp_path)
    assert not [details for _, what, details in events if what in ("refused", "failed")]
    parts = {file for file in entered if file.startswith(("trainers/", "forge_env/rollout/"))}
    files = listed()
    assert set(files) == (parts - BESIDE.keys()) | ENGINES.keys()
    assert len(files) <= MOST
    assert parts >= BESIDE.keys(), "remove what a step doesn't enter"


@pytest.mark.parametrize(("file", "endpoint"), ENGINES.items())
def test_the_path_ends_at_actors_that_the_page_names(file: str, endpoint: str) -> None:
    called: Any = (ROOT / file).read_text()
    assert f"async def {endpoint}(" in called
