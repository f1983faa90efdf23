"""`-m` doesn't import modules of which it takes no test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conftest import pytest_ignore_collect

LIGHT = "not slow and not docker and not stack"


@pytest.mark.parametrize(
    ("pytestmark", "expression", "is_left"),
    [
        ("pytest.mark.stack", LIGHT, True),
        ("[pytest.mark.stack, pytest.mark.timeout(600)]", LIGHT, True),
        ("pytest.mark.asyncio(loop_scope='module')", LIGHT, False),
        ("pytest.mark.stack", "", False),
        ("pytest.mark.stack", "stack", False),
        ("pytest.mark.stack", "stack and slow", False),  # one of its tests may be slow
        ("pytest.mark.stack", "slow and not stack", True),
        ("pytest.mark.stack", "docker or not stack", False),
        ("pytest.mark.slow", "stack", False),
    ],
)
def test_a_module_without_a_chosen_test_is_not_imported(
    tmp_path: Path, pytestmark: str, expression: str, is_left: bool
) -> None:
    module = tmp_path / "test_it.py"
    module.write_text(f"import pytest\n\npytestmark = {pytestmark}\n")
    config = cast(Any, SimpleNamespace(getoption={"markexpr": expression}.__getitem__))
    assert pytest_ignore_collect(module, config) is (True if is_left else None)
