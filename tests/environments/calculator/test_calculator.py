"""Word problems with a calculator: sound, and the tool calculates nothing but arithmetic."""

from __future__ import annotations

import pytest

from environments.calculator import Calculator
from environments.calculator.environment import calculated
from forge_env.errors import ToolError


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 3 * 4", "14"), ("(7 - 2) / 5", "1"), ("-3", "-3"), ("1 / 3", "0.3333"), (" 2*2 ", "4")],
)
def test_what_is_calculated(expression: str, value: str) -> None:
    assert calculated(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["2 ** 9", "__import__('os')", "1 +", "1 / 0", "9 " * 99, "True", "x", "1e300*1e300/7", "*".join(["1e300"] * 20)],
)
def test_what_is_not(expression: str) -> None:
    with pytest.raises(ToolError, match="can't be calculated"):
        Calculator().calculate(expression)
