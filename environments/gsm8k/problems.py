"""Word problems assembled from sentences: a person has a number of things, and each sentence changes that count.

Every sentence carries its effect on the count, so the answer and a worked solution are generated with the question.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated

from pydantic import AfterValidator

LEVELS = (1, 2, 3, 4, 5, 6)
PEOPLE = ("Ada", "Ben", "Clara", "Dan", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jun", "Kofi", "Lena", "Mira", "Noor")
LARGEST = 5_000
"""Default upper bound of counts, which keeps the arithmetic at grade school level."""


def _known(levels: list[int]) -> list[int]:
    if wrong := [level for level in levels if level not in LEVELS]:
        raise ValueError(f"no level {wrong[0]}; levels are {LEVELS[0]} to {LEVELS[-1]}")
    return sorted(set(levels))


Levels = Annotated[list[int], AfterValidator(_known)]
"""A selection of `LEVELS`, sorted and without duplicates."""

SLIPS = (-10, -2, -1, 1, 2, 10)
"""Offsets that a miscalculation adds to the right result."""


@dataclass(frozen=True, slots=True)
class Story:
    """The counted things and the sentence templates for their changes."""

    name: str
    things: str
    start: str
    gain: str
    gain_groups: str
    lose: str
    other: str


STORIES = (
    Story("apples", "apples", "{who} has {n} apples.", "{who} picks {n} more.",
          "{who} buys {a} bags with {b} apples each.", "{who} eats {n} of them.", "a neighbour"),
    Story("stamps", "stamps", "{who} owns {n} stamps.", "{who} finds {n} more in the attic.",
          "{who} is given {a} envelopes that hold {b} stamps each.", "{who} sells {n} of them.", "a friend"),
    Story("coins", "coins", "There are {n} coins in {who}'s jar.", "{who} drops in {n} more.",
          "On each of {a} days {who} adds {b} coins.", "{who} takes out {n} of them.", "a sister"),
    Story("books", "books", "{who} starts a library with {n} books.", "A visitor donates {n} books.",
          "{who} unpacks {a} boxes of {b} books.", "{n} books are worn out and thrown away.", "another library"),
    Story("tiles", "tiles", "{who} has {n} tiles for a floor.", "{who} finds {n} more in the shed.",
          "A truck brings {a} crates of {b} tiles.", "{n} tiles break.", "a builder next door"),
    Story("pages", "pages", "{who} has written {n} pages.", "In the evening {who} writes {n} more.",
          "On {a} mornings {who} writes {b} pages each.", "{who} throws {n} of the pages away.", "a colleague"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with its answer; `level` is the number of changes in it."""

    question: str
    answer: int
    solution: str
    level: int
    story: str

    @property
    def held_out(self) -> bool:
        """Whether the problem belongs to held-out evaluation; depends on its text alone."""
        return hashlib.sha256(self.question.encode()).digest()[0] < 26  # 26 of 256: one in ten


@dataclass(frozen=True, slots=True)
class Change:
    """One sentence, its calculation, and the resulting count."""

    sentence: str
    working: str
    count: int


Maker = Callable[[Random, Story, str, int], Change | None]


def _gain(rng: Random, story: Story, who: str, count: int) -> Change | None:
    n = rng.randint(2, 60)
    return Change(story.gain.format(who=who, n=n), f"{count} + {n} = {count + n}", count + n)


def _gain_groups(rng: Random, story: Story, who: str, count: int) -> Change | None:
    a, b = rng.randint(2, 9), rng.randint(2, 12)
    total = count + a * b
    return Change(story.gain_groups.format(who=who, a=a, b=b), f"{count} + {a} * {b} = {total}", total)


def _lose(rng: Random, story: Story, who: str, count: int) -> Change | None:
    if count < 4:
        return None
    n = rng.randint(2, count - 1)
    return Change(story.lose.format(who=who, n=n), f"{count} - {n} = {count - n}", count - n)


def _give_share(rng: Random, story: Story, who: str, count: int) -> Change | None:
    parts, word = rng.choice(((2, "half"), (3, "a third"), (4, "a quarter"), (5, "a fifth")))
    if count % parts or count // parts < 1:
        return None
    left = count - count // parts
    sentence = f"{who} gives {word} of all the {story.things} to {story.other}."
    return Change(sentence, f"{count} - {count} / {parts} = {left}", left)


def _percent(rng: Random, story: Story, who: str, count: int) -> Change | None:
    percent = rng.choice((10, 20, 25, 50, 75))
    if count * percent % 100:
        return None
    total = count + count * percent // 100
    sentence = f"Then the number of {story.things} grows by {percent} percent."
    return Change(sentence, f"{count} + {count} * {percent} / 100 = {total}", total)


def _times(rng: Random, story: Story, who: str, count: int) -> Change | None:
    factor, word = rng.choice(((2, "twice"), (3, "three times"), (4, "four times")))
    sentence = f"After a while there are {word} as many {story.things} as before."
    return Change(sentence, f"{count} * {factor} = {count * factor}", count * factor)


def _join(rng: Random, story: Story, who: str, count: int) -> Change | None:
    more = rng.randint(1, 20)
    sentence = (
        f"{story.other.capitalize()} has {more} more {story.things} than {who} has by now, and they put all together."
    )
    return Change(sentence, f"{count} + ({count} + {more}) = {2 * count + more}", 2 * count + more)


MAKERS: Sequence[Maker] = (_gain, _gain, _gain_groups, _gain_groups, _lose, _lose, _give_share, _percent, _times, _join)


def make_problem(rng: Random, level: int, largest: int = LARGEST) -> Problem:
    """A problem with `level` changes and counts of at most `largest`; consecutive changes differ in kind."""
    story, who = rng.choice(STORIES), rng.choice(PEOPLE)
    count = rng.randint(4, min(90, largest))
    sentences = [story.start.format(who=who, n=count)]
    workings: list[str] = []
    previous: Maker | None = None
    while len(workings) < level:
        maker = rng.choice(MAKERS)
        if maker is previous or (change := maker(rng, story, who, count)) is None or change.count > largest:
            continue
        previous, count = maker, change.count
        sentences.append(change.sentence)
        workings.append(change.working)
    question = " ".join([*sentences, f"How many {story.things} are there in the end?"])
    return Problem(question, count, "\n".join([*workings, f"#### {count}"]), level, story.name)


def slipped(solution: str, rng: Random) -> str:
    """The worked solution with a miscalculated last step."""
    *workings, last, answer = solution.split("\n")
    left, _, right = last.partition(" = ")
    wrong = abs(int(right) + rng.choice(SLIPS))
    return "\n".join([*workings, f"{left} = {wrong}", answer.replace(right, str(wrong))])
