"""Targets that are more than a number: compared by math-verify, in processes that hostile answers can't harm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from forge_env.errors import EnvironmentBugError, UsageError
from forge_env.rewards import equivalence
from forge_env.rewards.math import is_expression, last_boxed, marked_answer

r = fe.rewards
needs_math_verify = pytest.mark.skipif(not equivalence.available(), reason="NOT RUN: pip install 'forge-env[math]'")


async def score(target: str, answer: str) -> float:
    task = fe.Task(id="t-1", prompt="?", data={"answer": target})
    return (await fe.Rubric(r.MathReward()).score(task=task, answer=answer)).reward


RIGHT = [
    (r"\frac{\sqrt{3}}{2}", r"so \boxed{\frac{\sqrt{3}}{2}}"),
    (r"\frac{\sqrt{3}}{2}", "<answer>sqrt(3)/2</answer>"),
    (r"$2\pi$", r"\boxed{\pi + \pi}"),
    ("2*pi", r"#### 2\pi"),
    (r"x^2 - 1", r"\boxed{(x-1)(x+1)}"),
    ("x**2 - 1", r"\boxed{x^{2}-1}"),
    ("(0, 1]", r"\boxed{x \in (0,1]}"),
    ("[1,2)", r"<answer>$[1, 2)$</answer>"),
    (r"\{1, 2\}", r"\boxed{2, 1}"),
    ("x = 1 or x = 2", r"\boxed{1, 2}"),
    (r"\boxed{\sqrt{8}}", r"\boxed{2\sqrt{2}}"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}"),
    ("3 + 2i", r"\boxed{2i + 3}"),
]
WRONG = [
    (r"2\pi", r"\boxed{2}"),
    (r"x^2 - 1", r"\boxed{(x-1)^2}"),
    ("(0, 1]", r"\boxed{(0, 1)}"),
    ("[1,2)", r"[1,2)"),  # not marked
    ("[1,2)", r"\boxed{}"),
    (r"\sqrt{8}", r"\boxed{\text{I don't know}}"),
    (r"\sqrt{8}", r"\boxed{\frac{1}{}}"),
    (r"\sqrt{8}", r"\boxed{__import__('os').system('touch /tmp/hacked')}"),
    (r"\sqrt{8}", "<answer>" + "9" * 5000 + "</answer>"),
    (r"\sqrt{8}", "<answer>" + "\\sqrt{" * 150 + "</answer>"),
]


@needs_math_verify
@pytest.mark.parametrize(("target", "answer"), RIGHT)
async def test_what_means_the_same_is_right(target: str, answer: str) -> None:
    assert is_expression(target.removeprefix(r"\boxed{"))
    assert await score(target, answer) == 1.0


@needs_math_verify
@pytest.mark.parametrize(("target", "answer"), WRONG)
async def test_what_does_not_is_wrong(target: str, answer: str) -> None:
    assert await score(target, answer) == 0.0


@pytest.mark.slow
@needs_math_verify
async def test_an_answer_that_never_ends_costs_its_time_and_nothing_else() -> None:
    tower = r"\boxed{9^{9^{9^{9^{9}}}}!}"
    steps = 0

    async def count() -> None:
        nonlocal steps
        while True:
            await asyncio.sleep(0.01)
            steps += 1

    counting = asyncio.create_task(count())
    assert await score(r"\sqrt{8}", tower) == 0.0
    counting.cancel()
    assert steps > 10  # the event loop went on
    assert await score(r"\sqrt{8}", r"\boxed{2\sqrt{2}}") == 1.0


@needs_math_verify
async def test_many_at_once() -> None:
    started = time.monotonic()
    found = await asyncio.gather(*(score("x^2 - 1", rf"\boxed{{x^2 - {number}}}") for number in range(12)))
    assert found == [float(number == 1) for number in range(12)]
    assert time.monotonic() - started < 100


@needs_math_verify
async def test_a_target_that_cant_be_read_is_the_datas_fault() -> None:
    with pytest.raises(EnvironmentBugError, match=r"ValueError on task 't-1'.* not an expression"):
        await score("(((", r"\boxed{1}")


async def test_without_math_verify_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence, "available", lambda: False)
    with pytest.raises(UsageError, match=r"more than a number.*forge-env\[math\]"):
        await score(r"2\pi", r"\boxed{2\pi}")
    assert await score("18 m", r"\boxed{18}") == 1.0


@pytest.mark.parametrize(
    "target", ["5", "-3", "1,234.5", "$5", "3/4", "50%", "\\frac{1}{2}", "18 apples", "x = 7", "5 km"]
)
def test_numbers_stay_numbers(target: str) -> None:
    assert not is_expression(target)
    assert isinstance(r.MathReward()("", f"<answer>{target}</answer>", target), float)


@pytest.mark.parametrize(
    "target", [r"2\pi", r"3\sqrt{2}", r"2x", r"(1, 2)", r"[3, 5]", r"1, 2", r"x^2", r"a/b", r"x = 1 or x = 2", r"2*pi"]
)
def test_expressions_are_expressions(target: str) -> None:
    assert is_expression(target)
    scoring = r.MathReward()("", "4", target)
    assert isinstance(scoring, Coroutine)
    scoring.close()


@pytest.mark.parametrize("target", ["four", "", "no idea"])
def test_words_are_neither(target: str) -> None:
    assert not is_expression(target)


def test_boxes_may_hold_braces() -> None:
    assert marked_answer(r"a \boxed{1} b \boxed{\frac{1}{\sqrt{\frac{2}{3}}}} c") == r"\frac{1}{\sqrt{\frac{2}{3}}}"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{1} \boxed{2") == "1"
    assert last_boxed("no box {1}") is None
    begun = time.perf_counter()
    last_boxed(r"\boxed{" * 100_000)
    assert time.perf_counter() - begun < 5


@given(st.text(alphabet="\\boxed{}12 ", max_size=60))
def test_any_text_has_a_box_or_none(text: str) -> None:
    found: Any = last_boxed(text)
    assert found is None or f"{{{found}}}" in text
