"""The small model is trained through other people's loops, installed from the package index: a kit of conformance."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.apps.test_program_agent import trained

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("program", ["pydantic_ai", "openai_agents"])
def test_a_program_of_others_is_trained(program: str, tmp_path: Path) -> None:
    trained(tmp_path, f"environment.options.program={program}")
