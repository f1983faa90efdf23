"""Environment with tools to search and read pages, and questions whose answer requires one to three pages."""

from __future__ import annotations

from random import Random
from typing import Literal

from pydantic import Field

import forge_env as fe
from environments.answers import answered, final_answer
from environments.search.corpus import BLURB, RELATIONS, draw_corpus
from environments.seeds import draw_seed
from forge_env.environment.tool_environment import ToolEnvironmentConfig
from forge_env.types import Action, Task

Level = Literal[1, 2, 3]
MOST_FOUND = 5


class SearchConfig(ToolEnvironmentConfig):
    """Question selection and turn limit."""

    max_turns: int = Field(12, ge=1)
    """Maximum number of assistant messages before the episode is truncated."""
    levels: list[Level] = Field([1, 2, 3], min_length=1)
    """Number of facts to join, each on a separate page."""


def correct(task: Task, completion: str) -> float:
    """1 if the answer is the right name or year; otherwise 0."""
    given = final_answer(completion)
    return float(given is not None and given.casefold() == task.data["answer"].casefold())


def pages_read(env: Search) -> float:
    """Number of different pages read."""
    return float(len(env.read_titles))


class Search(fe.ToolEnvironment):
    """Questions over a corpus of made-up facts that require finding and joining up to three of them."""

    api_version = 1
    config_class = SearchConfig
    system_prompt = (
        "Answer the question from the pages of a small encyclopedia, with the tools search and read. All names are "
        "made up. End with <answer>...</answer>, a name or a year alone."
    )
    config: SearchConfig
    read_titles: set[str]
    rubric = fe.Rubric([correct], metrics=[answered, pages_read])

    def task(self, split: str, index: int) -> Task:
        """The `index`-th question of `split`, with a separately drawn corpus; one corpus in five belongs to `eval`."""
        rng = Random(f"search/{self.config.seed}/{split}/{index}")
        level = rng.choice(self.config.levels)
        seed = draw_seed(rng, split)
        phrase, pages, answer = draw_chain(rng, seed, level)
        return Task(
            id=f"{split}-{self.config.seed}-{index}",
            prompt=f"Find {phrase}.",
            data={"public_corpus": seed, "pages": pages, "answer": answer},
            gold=f"<answer>{answer}</answer>",
            difficulty=level,
            tags=[f"{level}_hop"],
            split=split,
        )

    def gold_actions(self, task: Task) -> list[Action] | None:
        """A search and a read for each page of the chain, then the answer."""
        calls: list[Action] = []
        for title in task.data["pages"]:
            calls += [fe.call_tool("search", query=title), fe.call_tool("read", title=title)]
        return None if task.gold is None else [*calls, task.gold]

    async def setup(self, task: Task) -> None:
        """Clear the set of read pages."""
        self.read_titles = set()

    @fe.tool(thread=False)
    def search(self, query: str) -> str:
        """Find pages by words; shows titles and how each page begins.

        Args:
            query: a few words.
        """
        corpus = draw_corpus(self.current_task.data["public_corpus"])
        titles = corpus.search(query, MOST_FOUND)
        return "\n".join(f"{title}: {corpus.pages[title][:BLURB]}..." for title in titles) or "[nothing found]"

    @fe.tool(thread=False)
    def read(self, title: str) -> str:
        """Read a page.

        Args:
            title: its title, as search shows it.
        """
        page = draw_corpus(self.current_task.data["public_corpus"]).pages.get(title.strip())
        if page is None:
            raise fe.ToolError("there is no page with this title; use search to find titles")
        self.read_titles.add(title.strip())
        return page


def draw_chain(rng: Random, seed: str, hops: int) -> tuple[str, list[str], str]:
    """Draw a question's phrase, the pages that lead to its answer, in order, and the answer; no entity repeats."""
    facts = draw_corpus(seed).facts
    while True:
        here = rng.choice(sorted(facts))
        phrase, seen = here, {here}
        pages: list[str] = []
        while len(pages) < hops and here in facts:
            pages.append(here)
            key = rng.choice(sorted(facts[here]))
            phrase, here = RELATIONS[key].phrase.format(phrase), facts[here][key]
            seen.add(here)
        if len(pages) == hops and len(seen) == hops + 1:
            return phrase, pages, here
