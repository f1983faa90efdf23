"""Wrong versions of Python code and of other answers."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence

import pytest

import forge_env as fe
from forge_env.grading.answers import mutants_of
from forge_env.grading.mutants import Mutant, python_mutants
from forge_env.grading.pieces import Kind, Piece, kind_of, pieces

CODE = '''"""What it does."""
import math


def over(xs: list[int], limit=6, *, name="x") -> int:
    """How many are over `limit`."""
    total = 0
    for x in xs:
        if x > limit and not x % 2 == 1:
            total += 1
    if total < 0:
        raise ValueError(f"{name} is {total}")
    return max(total, 0)


if __name__ == "__main__":
    print(over([7]))
'''


def changes(mutants: Sequence[Mutant]) -> set[tuple[str, str]]:
    return {(mutant.kind, mutant.change) for mutant in mutants}


def test_every_kind_of_mutant_is_made() -> None:
    mutants = python_mutants(CODE, most=100)
    expected = {
        ("boundary", "x > limit -> x >= limit"),
        ("operator", "x > limit -> x <= limit"),
        ("operator", "x % 2 -> x // 2"),
        ("operator", "x > limit and (not x % 2 == 1) -> x > limit or not x % 2 == 1"),
        ("swapped operands", "x % 2 -> 2 % x"),
        ("dropped operand", "x % 2 -> x"),
        ("dropped operand", "x > limit and (not x % 2 == 1) -> x > limit"),
        ("off by one", "2 -> 3"),
        ("wrong default", "6 -> 7"),
        ("wrong default", "'x' -> ''"),
        ("branch", "x > limit and (not x % 2 == 1) -> not (x > limit and (not x % 2 == 1))"),
        ("dropped line", "total += 1 -> pass"),
        ("dropped line", "if total < 0: -> pass"),
        ("wrong result", "max(total, 0) -> None"),
        ("call", "max(total, 0) -> min(total, 0)"),
    }
    assert expected <= changes(mutants)


def test_mutants_are_valid_python_and_all_different() -> None:
    mutants = python_mutants(CODE, most=100)
    assert len({ast.dump(ast.parse(mutant.text)) for mutant in mutants} - {ast.dump(ast.parse(CODE))}) == len(mutants)


@pytest.mark.parametrize(
    "left",
    ['"""What it does."""', "import math", "list[int]", '"""How many', 'f"{name} is {total}"', "print(over([7]))"],
)
def test_what_has_no_effect_on_results_is_left_alone(left: str) -> None:
    assert all(left in mutant.text or mutant.kind == "dropped line" for mutant in python_mutants(CODE, most=100))


def test_the_draw_is_even_by_kind_and_the_same_every_time() -> None:
    drawn = python_mutants(CODE, most=6, seed="a")
    assert len({mutant.kind for mutant in drawn}) == 6
    assert drawn == python_mutants(CODE, most=6, seed="a")


def test_functions_that_a_solution_changes_come_first() -> None:
    code = "def one(x):\n    return x + 1\n\n\ndef two(x):\n    return x - 1 if x > 3 else x * 2\n"
    drawn = python_mutants(code, most=5, first={6})
    assert {mutant.line for mutant in drawn} == {6}


def test_equivalent_by_byte_code_is_left_out() -> None:
    assert not [mutant for mutant in python_mutants("def f():\n    x = 1 * 1\n", most=9) if "1 * 1" in mutant.change]


@pytest.mark.parametrize("code", ["def f(:", "x = 1 + 2\nreturn x", f"x = {'-' * 50_000}1"])
def test_text_that_is_not_python_has_no_mutants(code: str) -> None:
    assert python_mutants(code, most=3) == []


@pytest.mark.parametrize(
    ("text", "language", "kind"),
    [
        ("def f(x): return x", "", "python"),
        ("x = 1\nprint(x)", "", "python"),
        ("rm -f a", "bash", "shell"),
        ("SELECT name FROM t", "", "sql"),
        ("-1,204.5", "", "number"),
        ("$12", "", "number"),
        ('{"a": 1}', "", "json"),
        ("amber, basil", "", "list"),
        ("the butler did it", "", "text"),
    ],
)
def test_kinds_of_answers(text: str, language: str, kind: str) -> None:
    assert kind_of(text, language) == kind


@pytest.mark.parametrize(
    ("text", "kind", "made"),
    [
        ("42", "number", {"43", "41", "420", "-42"}),
        ("-1,204", "number", {"-1,205", "-1,203", "-12,040", "1,204"}),
        ("a, b, c", "list", {"b, c", "a, c", "a, b"}),
        ('{"a": 1, "b": true}', "json", {'{"b": true}', '{"a": 2, "b": true}', '{"a": 1, "b": false}'}),
        ("yes", "text", {"no"}),
        ("grep x a.log | head -3 > out", "shell", {"grep x a.log | head -4 > out", "grep x a.log | tail -3 > out"}),
        (
            "awk '$1 > 3 { s += $2 } END { print s }' a",
            "shell",
            {
                "awk '$1 >= 3 { s += $2 } END { print s }' a",
                "awk '$1 > 4 { s += $2 } END { print s }' a",
                "awk '$1 > 3 { s -= $2 } END { print s }' a",
            },
        ),
        (
            "SELECT MAX(n) FROM t WHERE n > 5 AND m = 'a'",
            "sql",
            {
                "SELECT MIN(n) FROM t WHERE n > 5 AND m = 'a'",
                "SELECT MAX(n) FROM t WHERE n >= 5 AND m = 'a'",
                "SELECT MAX(n) FROM t WHERE n > 5 OR m = 'a'",
                "SELECT MAX(n) FROM t WHERE n > 5",
                "SELECT MAX(n) FROM t",
            },
        ),
    ],
)
def test_other_answers_are_made_wrong_by_type(text: str, kind: str, made: set[str]) -> None:
    piece = Piece("answer", kind_of(text, "bash" if kind == "shell" else ""), text, lambda text: [text])
    assert piece.kind == kind
    assert made <= {mutant.text for mutant in mutants_of(piece, most=100, seed="")}


@pytest.mark.parametrize(
    ("text", "kind"), [("1" * 40, "number"), ("0", "number"), ("[1e16]", "json"), ("[1e400]", "json")]
)
def test_wrong_numbers_have_another_value(text: str, kind: Kind) -> None:
    piece = Piece("answer", kind, text, lambda text: [text])
    values = [json.loads(mutant.text) for mutant in mutants_of(piece, most=100, seed="")]
    assert values
    assert json.loads(text) not in values


def test_unpaired_surrogates_stay_escaped() -> None:
    piece = Piece("answer", "json", r'{"a": "\ud800 one"}', lambda text: [text])
    assert [mutant.text.encode() for mutant in mutants_of(piece, most=100, seed="")]


@pytest.mark.parametrize("text", ["0", "0.0", "false", "[]", "{}", "null", "[1]", "7", "true"])
def test_an_emptied_value_is_another_one(text: str) -> None:
    piece = Piece("tool.value", "json", text, lambda text: [text])
    assert json.loads(piece.emptied) != json.loads(text)


class Answers(fe.SingleTurnEnvironment):
    """Answers in a box, after an explanation."""

    rubric = fe.Rubric(lambda response: 1.0)

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id="0", split=split, prompt="?", gold="2 + 2 is\n#### 4\n")


def test_only_the_marked_answer_of_a_message_is_a_piece() -> None:
    env = Answers()
    (piece,) = pieces(env, env.task("train", 0))
    assert (piece.kind, piece.text) == ("number", "4")
    (message,) = piece.submit("5")
    assert isinstance(message, fe.Message)
    assert message.content == "2 + 2 is\n#### 5\n"
