"""What a tool's docstring says, in the styles that people write."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel

import forge_env as fe
from forge_env.tools.schema import Tool, as_text, parse_docstring

GOOGLE = """
Look up words.

In a book, by
number.

Args:
    page (int, optional): number of the page,
        from 1 on.
    *rest: more of them. Defaults to none.

Returns:
    The words: all of them.

Raises:
    ToolError: there is no such page.
"""
NUMPY = """
Look up words.

In a book, by
number.

Parameters
----------
page : int, optional
    number of the page,
    from 1 on.
*rest
    more of them. Defaults to none.

Returns
-------
str
    the words
"""
SPHINX = """
Look up words.

In a book, by
number.

:param int page: number of the page,
    from 1 on.
:param rest: more of them. Defaults to none.
:returns: the words
:raises ToolError: there is no such page
"""


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX], ids=["google", "numpy", "sphinx"])
def test_styles(text: str) -> None:
    description, arguments = parse_docstring(inspect.cleandoc(text))
    assert description == "Look up words.\n\nIn a book, by\nnumber."
    assert arguments == {"page": "number of the page, from 1 on.", "rest": "more of them. Defaults to none."}


def test_several_names_of_one_entry() -> None:
    assert parse_docstring("Add.\n\nParameters\n----------\na, b : int\n    numbers")[1] == {
        "a": "numbers",
        "b": "numbers",
    }


@pytest.mark.parametrize(
    "text", ["", "Just this.", "A list:\n  - one: two", "Add.\n\nArgs:\n    a without a colon", ":param"]
)
def test_what_has_no_style_is_the_description(text: str) -> None:
    assert parse_docstring(text) == (text, {})


def test_importing_the_platform_does_not_load_the_parser() -> None:
    code = "import sys, forge_env as fe; fe.tool; sys.exit('docstring_parser' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_answers_that_json_cannot_write_are_text() -> None:
    circular: list[object] = []
    circular.append(circular)
    deep: list[object] = []
    for _ in range(10_000):
        deep = [deep]
    assert as_text({(1, 2): "x"}, "look") == "{(1, 2): 'x'}"
    assert as_text(["x", 10**5000], "look") == "['x', <an integer of about 5001 digits>]"
    assert as_text(circular, "look").startswith("[[[[")
    assert as_text(deep, "look").startswith("[[[[")


class Point(BaseModel):
    n: int = 0


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ('{"a": true}', "a"),
        ('{"a": 1, "b": false}', "b"),
        ('{"a": 1, "c": [1, true]}', "c.1"),
        ('{"a": 1, "d": {"x": {"n": true}}}', "d.x.n"),
        ('{"a": 1, "e": true, "f": true, "c": null}', None),
    ],
)
def test_a_boolean_is_not_a_number(arguments: str, path: str | None) -> None:
    def function(
        a: int,
        b: float | None = None,
        c: list[int] | None = None,
        d: dict[str, Point] | None = None,
        e: int | bool = 0,
        f: Any = None,
    ) -> str:
        return ""

    tool = Tool(function)
    if path is None:
        assert tool.parse(arguments)["e"] is True
    else:
        with pytest.raises(fe.ToolError, match=f"wrong arguments: {path}: should be a number, not true or false"):
            tool.parse(arguments)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", '"NaN"', '"-inf"', "1" + "0" * 400])
@pytest.mark.parametrize("argument", ["amount", "amounts"])
def test_a_number_is_finite(argument: str, number: str) -> None:
    def pay(amount: float = 1, amounts: list[float] | None = None) -> str:
        return f"{amount} {amounts}"

    tool = Tool(pay)
    assert tool.parse('{"amount": 1e5}')["amount"] == 1e5
    with pytest.raises(fe.ToolError):
        tool.parse(f'{{"{argument}": {f"[{number}]" if argument == "amounts" else number}}}')
