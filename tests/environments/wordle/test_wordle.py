"""The marks, the course of a game, the split of the words."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from environments.wordle.environment import guess_of, marks
from environments.wordle.words import LENGTH, words_of

FIVE = st.text("abc", min_size=LENGTH, max_size=LENGTH)


@pytest.mark.parametrize(
    ("guess", "word", "expected"),
    [
        ("crane", "crane", "GGGGG"),
        ("eerie", "crane", "--Y-G"),
        ("allow", "label", "YYY--"),
        ("speed", "abide", "--Y-Y"),
        ("geese", "these", "--GGG"),
        ("zzzzz", "crane", "-----"),
    ],
)
def test_marks(guess: str, word: str, expected: str) -> None:
    assert marks(guess, word) == expected


@given(FIVE, FIVE)
def test_a_letter_is_marked_as_often_as_the_word_has_it(guess: str, word: str) -> None:
    given_marks = marks(guess, word)
    assert [mark == "G" for mark in given_marks] == [a == b for a, b in zip(guess, word, strict=True)]
    for letter, count in Counter(guess).items():
        marked = sum(mark != "-" for mark, other in zip(given_marks, guess, strict=True) if other == letter)
        assert marked == min(count, word.count(letter))


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("<guess>Crane</guess>", "crane"),
        ("First <guess>house</guess>, no: <guess> crane </guess>", "crane"),
        ("crane", "crane"),
        (" Crane.\n", "crane"),
        ("I guess crane", None),
        ("", None),
        ("<guess>cr4ne</guess>", None),
    ],
)
def test_how_a_guess_is_read(text: str, guess: str | None) -> None:
    assert guess_of(text) == guess


def test_the_splits_share_no_word_and_a_round_has_every_word_once() -> None:
    train, held_out = words_of("train"), words_of("eval")
    assert not set(train) & set(held_out)
    assert len(train) > 400
    assert len(held_out) > 80
    assert all(len(word) == LENGTH and word.isascii() and word.islower() for word in (*train, *held_out))
    env = fe.make("wordle")
    assert {env.task("eval", index).data["answer"] for index in range(len(held_out))} == set(held_out)


async def test_a_game() -> None:
    env = fe.make("wordle", max_turns=4)
    task = fe.Task(id="one", prompt="Find the word.", data={"answer": "crane"})
    await env.reset(options={"task": task})
    said = [
        (await env.step(text))[0][0].content
        for text in ("<guess>crate</guess>", "hello there", "<guess>cranes</guess>")
    ]
    assert said[0] == "crate\nGGG-G\n3 guesses left."
    assert said[1].startswith("That is not a guess")
    assert said[2] == "cranes has 6 letters; the word has 5.\n1 guesses left."
    observation, reward, terminated, truncated, info = await env.step("crane")
    assert (observation, reward, terminated, truncated) == ([], 1.0, True, False)
    assert (info["metrics"]["solved"], info["metrics"]["guesses"]) == (1.0, 2.0)


async def test_a_lost_game_gives_partial_credit_and_does_not_tell_the_word() -> None:
    env = fe.make("wordle", max_turns=1)
    task = fe.Task(id="one", prompt="Find the word.", data={"answer": "crane"})
    await env.reset(options={"task": task})
    observation, reward, terminated, truncated, info = await env.step("<guess>crate</guess>")
    assert reward == pytest.approx(0.2)
    assert (terminated, truncated, info["truncation"]) == (False, True, "turns")
    assert "crane" not in observation[0].content
