"""Questions are answered by joining pages, and only by that."""

from __future__ import annotations

from random import Random

import pytest

import forge_env as fe
from environments.search import Search, SearchConfig
from environments.search.corpus import COUNTS, draw_corpus
from environments.search.environment import correct, draw_chain
from forge_env.errors import ToolError


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_each_page_leads_to_the_next_and_only_the_last_holds_the_answer(hops: int) -> None:
    for seed in range(20):
        phrase, pages, answer = draw_chain(Random(seed), str(seed), hops)
        texts = draw_corpus(str(seed)).pages
        assert len(pages) == hops
        assert pages[0] in phrase
        for page, following in zip(pages, [*pages[1:], answer], strict=True):
            assert following in texts[page]
            assert following not in phrase


def test_a_page_is_found_by_its_name_and_by_its_facts() -> None:
    corpus = draw_corpus("7")
    assert len(corpus.pages) == sum(COUNTS.values()) - COUNTS["river"]
    for title in corpus.pages:
        assert corpus.search(f"where is {title.upper()}?", 1) == [title]
    town = next(facts["seat"] for facts in corpus.facts.values() if "seat" in facts)
    found = corpus.search(f"head office in {town}", 5)
    assert any(corpus.facts[title].get("seat") == town for title in found)
    assert corpus.search("zzz", 5) == corpus.search("", 5) == []


async def test_an_episode() -> None:
    env = fe.make("search", levels=[2])
    assert isinstance(env, Search)
    await env.reset(options={"split": "train", "index": 0})
    first, second = env.current_task.data["pages"]
    observation, *_ = await env.step(fe.call_tool("search", query="zebra"))
    assert observation[0].content == "[nothing found]"
    observation, *_ = await env.step(fe.call_tool("read", title=f" {first} "))
    assert second in observation[0].content
    with pytest.raises(ToolError, match="no page with this title"):
        env.read("Nowhere")
    _, reward, terminated, _, info = await env.step(f"<answer>{env.current_task.data['answer'].lower()}</answer>")
    assert (reward, terminated, info["metrics"]["pages_read"]) == (1.0, True, 1.0)
    await env.close()


def test_levels_and_answers_without_a_tag() -> None:
    env = Search(SearchConfig(levels=[3]))
    assert {env.task("train", index).difficulty for index in range(10)} == {3}
    assert correct(env.task("train", 0), "no tag") == 0.0
