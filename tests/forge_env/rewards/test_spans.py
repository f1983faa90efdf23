"""Reading what a model marked: as the regular expression would, but in linear time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from forge_env.rewards.code import extract_code
from forge_env.rewards.judge import _SCORE
from forge_env.rewards.math import marked_answer
from forge_env.rewards.spans import last_between, spans, without
from forge_env.rewards.text import ThinkingReward, similarity

TEXT = st.lists(st.sampled_from(["<a>", "</a>", "x", " ", "\n", "<", ">"]), max_size=12).map("".join)
PATTERN = re.compile(r"<a>(.*?)</a>", re.DOTALL)


@given(TEXT)
def test_it_is_what_the_regular_expression_says(text: str) -> None:
    found = PATTERN.findall(text)
    assert [text[start:end] for start, end in spans(text, "<a>", "</a>")] == found
    assert without(text, "<a>", "</a>") == PATTERN.sub(" ", text)
    last = last_between(text, "<a>", "</a>")
    assert last == (found[-1].rpartition("<a>")[2] if found else None)


@pytest.mark.parametrize(
    "text",
    [
        "<answer>" * 100_000,
        "</answer>" * 100_000,
        "<think>" * 100_000,
        "\\boxed{" * 100_000,
        "\\boxed{{" * 50_000,
        "\\boxed{" + "{a}" * 100_000,
        "####" * 100_000,
        "####" + " " * 500_000,
        "####\n" * 100_000,
        "9" * 500_000,
        "9," * 250_000,
        "+ " * 250_000,
        "1/" * 250_000,
        "-" * 500_000,
        "\\frac{1}{" * 50_000,
        "\\text{" * 100_000,
        "Score:" + " " * 500_000,
        "```" * 150_000,
        "```python\n" * 50_000,
        "< " * 250_000,
    ],
    ids=lambda text: repr(text[:10]),
)
@pytest.mark.timeout(60)
def test_text_made_to_be_slow_is_not(text: str) -> None:
    marked_answer(text)
    fe.rewards.MathReward()("", text, "1")
    fe.rewards.MathReward()("", f"<answer>{text}</answer>", "1")
    ThinkingReward()("", text)
    fe.rewards.ExactMatch()(text, "x")
    fe.rewards.FuzzyMatch()(text, "x" * 3000)
    extract_code(text)
    _SCORE.findall(text)


@given(st.text("abc", max_size=9), st.text("abc", max_size=9))
def test_similarity_is_by_the_longest_common_subsequence(one: str, two: str) -> None:
    table = [[0] * (len(two) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(two):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    length = len(one) + len(two)
    assert similarity(one, two) == similarity(two, one) == (2 * table[-1][-1] / length if length else 1.0)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("Use ```x``` so:\n```py\ny\n``` or\n```\nz```", "z"),
        ("no code", "no code"),
        ("```python\nunfinished", "```python\nunfinished"),
        ("```inline```", "```inline```"),
    ],
)
def test_the_last_block_of_code(text: str, code: str) -> None:
    assert extract_code(text) == code
