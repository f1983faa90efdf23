"""How many files and functions of the project one sandboxed tool call enters: maximums, to be lowered only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import forge_env as fe
from forge_env.sandbox.engines import load_engine

ROOT = Path(__file__).parents[1]
MAX_FILES, MAX_FUNCTIONS = 18, 76
"""62 functions are always entered; the others only if the pool is still cleaning the previous call's sandbox."""


@contextmanager
def traced() -> Iterator[set[tuple[str, str]]]:
    """Collect file and name of the project's functions that this thread enters in the block."""
    entered: set[tuple[str, str]] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / ".venv"):
            entered.add((str(path), frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield entered
    finally:
        sys.setprofile(before)


async def test_a_sandboxed_tool_call_enters_few_files() -> None:
    if reason := load_engine("local").unavailable_reason():
        pytest.skip(reason)
    async with fe.open_engine("local", concurrency=2) as engine:
        env = fe.make("coding_rlvr", sandboxes=engine)
        call = fe.call_tool("python", code="def f(n): return n")
        await env.reset(seed=0)
        await env.step(call)  # so that caches are warm
        with traced() as entered:
            await env.step(call)
        await env.close()
    files = {path for path, _ in entered if path != __file__}
    assert len(files) <= MAX_FILES, sorted(files)
    assert len(entered) <= MAX_FUNCTIONS + 1, sorted(entered)
