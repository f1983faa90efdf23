"""A corpus drawn by seed, with one page per made-up person, firm or town, and the ranking of its keyword search."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from random import Random

_FIRST = ("Bel", "Cor", "Dra", "Fen", "Gal", "Hol", "Jas", "Kel", "Lor", "Mar", "Nim", "Or", "Pel", "Quo", "Ras", "Sel")
_MIDDLE = ("a", "e", "i", "o", "an", "el", "im", "or")
_LAST = {
    "person": ("ra", "vin", "dis", "neth", "lou"),
    "firm": ("tec", "corp", "lux", "gen"),
    "town": ("ford", "burg", "wick", "mere"),
    "river": ("se", "ro", "zil"),
}
TRADES = ("weaver", "surveyor", "botanist", "printer", "glazier", "chemist")
GOODS = ("clocks", "kayaks", "lenses", "pianos", "ropes", "tents")
FEATURES = ("an old lighthouse", "a covered market", "a glass bridge", "a windmill", "three theatres")
BLURB = 60
"""Number of characters of each page shown in search results."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation from an entity to another entity or a year, with its page sentence and its question phrase."""

    of: str
    to: str
    sentence: str
    phrase: str


RELATIONS = {
    "born_in": Relation("person", "town", "{0} was born in {1}.", "the town where {0} was born"),
    "works_for": Relation("person", "firm", "{0} works for {1}.", "the firm that {0} works for"),
    "seat": Relation("firm", "town", "Its head office is in {1}.", "the town where {0} has its head office"),
    "founder": Relation("firm", "person", "It was founded by {1}.", "the person who founded {0}"),
    "founded": Relation("firm", "year", "Its first year was {1}.", "the year in which {0} was founded"),
    "mayor": Relation("town", "person", "Its mayor is {1}.", "the mayor of {0}"),
    "river": Relation("town", "river", "{0} lies on the river {1}.", "the river on which {0} lies"),
}
COUNTS = {"person": 24, "firm": 12, "town": 12, "river": 8}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Facts and pages. `facts`: entity -> relation -> entity or year; `pages`: title -> text."""

    facts: Mapping[str, Mapping[str, str]]
    pages: Mapping[str, str]

    def search(self, query: str, most: int) -> list[str]:
        """Titles of at most `most` matching pages, best first.

        A page scores the sum of its query words' inverse document frequencies; words that occur at least twice on the
        page, title included, count twice.
        """
        words = set(_words(query))
        held = {title: Counter([*_words(title), *_words(text)]) for title, text in self.pages.items()}
        spread = Counter(word for counts in held.values() for word in counts)
        scores = {
            title: sum(math.log(len(held) / spread[word]) * min(counts[word], 2) for word in words & counts.keys())
            for title, counts in held.items()
        }
        ranked = sorted((title for title in scores if scores[title] > 0), key=lambda title: (-scores[title], title))
        return ranked[:most]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


@lru_cache(maxsize=64)
def draw_corpus(seed: str) -> Corpus:
    """Draw the corpus of a seed."""
    rng = Random(f"search/{seed}")
    stems = iter(rng.sample([first + middle for first in _FIRST for middle in _MIDDLE], sum(COUNTS.values())))
    names = {kind: [next(stems) + rng.choice(_LAST[kind]) for _ in range(count)] for kind, count in COUNTS.items()}
    facts: dict[str, dict[str, str]] = {}
    pages: dict[str, str] = {}
    for kind in ("person", "firm", "town"):
        for name in names[kind]:
            facts[name] = {
                key: str(rng.randint(1801, 1999)) if relation.to == "year" else rng.choice(names[relation.to])
                for key, relation in RELATIONS.items()
                if relation.of == kind
            }
            sentences = [RELATIONS[key].sentence.format(name, value) for key, value in facts[name].items()]
            sentences.append(f"{name} has {rng.choice(FEATURES)}." if kind == "town" else "")
            rng.shuffle(sentences)
            pages[name] = " ".join([_opening(rng, kind, name), *filter(None, sentences)])
    return Corpus(facts, pages)


def _opening(rng: Random, kind: str, name: str) -> str:
    if kind == "person":
        return f"{name} is a {rng.choice(TRADES)} who has travelled widely and likes to write letters."
    if kind == "firm":
        return f"{name} is a firm that makes {rng.choice(GOODS)}, and is known far beyond its region."
    return f"{name} is a town of {rng.randint(3, 90)} thousand people with a long and varied history."
