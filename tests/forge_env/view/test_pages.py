"""The pages as the server sends them: who gets them, what stands in them, and that nothing in a folder breaks them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import unescape
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from forge_env.trajectory import TrajectoryWriter, Turn
from forge_env.types import Message
from forge_env.view.app import Pages
from forge_env.view.runs import Runs
from forge_env.view.server import Guard, token
from tests.forge_env.view.made import episode, evaluation, held_out, hostile_run, metrics_rows, reply, training_run

PORT = 7000
BASE = f"http://127.0.0.1:{PORT}"


@asynccontextmanager
async def opened(root: Path, cache: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that has been given the address."""
    pages = Pages(Runs(root, cache))
    guard = Guard(pages.application(), "t" * 40, lambda: PORT)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url=BASE) as client:
        answer = await client.get(f"/?token={'t' * 40}")
        assert answer.status_code == 303
        yield client
    pages.indexer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two training runs, two evaluations and a hostile run."""
    root = tmp_path_factory.mktemp("runs")
    training_run(root / "first")
    training_run(root / "second", start=0.8, end=0.1, seed=1)
    evaluation(root / "eval-a")
    evaluation(root / "eval-b", solved=0.95, seed=2)
    hostile_run(root / "hostile")
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


async def test_only_who_has_the_token_is_answered(folder: Path, cache: Path) -> None:
    pages = Pages(Runs(folder, cache))
    guard = Guard(pages.application(), "s" * 40, lambda: PORT)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url=BASE) as client:
        assert (await client.get("/")).status_code == 403
        assert (await client.get("/?token=wrong")).status_code == 403
        assert (await client.get("/", headers={"cookie": f"forge_env_7001={'s' * 40}"})).status_code == 403
        given = await client.get(f"/run/first?token={'s' * 40}&around=3")
        assert given.headers["location"] == "/run/first?around=3"
        cookie = given.headers["set-cookie"]
        assert cookie.startswith(f"forge_env_{PORT}=")
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert (await client.get("/")).status_code == 200
        assert (await client.head("/run/first")).status_code == 200
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert (await client.request(method, "/")).status_code == 405
        for host in ("evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:7001", ""):
            assert (await client.get("/", headers={"host": host})).status_code == 421
        away = await client.get(f"//evil.example/?token={'s' * 40}")
        assert not away.headers["location"].startswith(("//", "http"))
    pages.indexer.close()


async def test_every_answer_forbids_what_a_page_may_not_do(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        for path in ("/", "/run/first", "/run/none", "/run/first/charts.json", "/static/x/main.js", "/nothing"):
            policy = (await client.get(path)).headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "require-trusted-types-for 'script'" in policy
            assert "unsafe" not in policy


def test_the_token_is_kept_where_nobody_else_reads_it(tmp_path: Path) -> None:
    first = token(tmp_path)
    path = tmp_path / "view" / "token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert token(tmp_path) == first
    path.chmod(0o644)
    assert token(tmp_path) != first, "others may have read it"


async def test_the_list_shows_every_run(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        page = (await client.get("/")).text
        for name in ("first", "second", "eval-a", "eval-b", "hostile"):
            assert f'href="/run/{name}"' in page
        assert "success" in page
        assert "\u00b1" in page


async def test_a_run_answers_the_four_questions(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        page = (await client.get("/run/first")).text
        assert re.search(r"Yes: held-out \+0\.\d\d \u00b1 0\.\d\d on 60 tasks", page)
        assert "finished, wrong answer" in page
        assert re.search(r"It rose by 0\.\d\d", page)
        assert "60 % of its time waiting for episodes" in unescape(page)
        page = (await client.get("/run/second")).text
        assert "No, it got worse" in page
        assert re.search(r"It fell by 0\.\d\d", page)
        page = (await client.get("/run/first?around=10")).text
        assert "before" in page


async def test_a_call_that_nobody_answers_does_not_make_tools(tmp_path: Path, cache: Path) -> None:
    chance = random.Random(0)
    place = tmp_path / "run" / "trajectories"
    place.mkdir(parents=True)
    (place.parent / "config.yaml").write_text("environment: {name: made}\n")
    with TrajectoryWriter(place / "train.jsonl") as writer:
        for member in range(8):
            single = episode(0, member, 0, 0.0, chance)
            del single.turns[1:]
            single.truncated, single.truncation, single.terminated = False, None, True
            if member:
                single.turns[0] = Turn([], reply(Message(role="assistant", content="f"), 2, 0, chance))
            writer.write(single)
    async with opened(tmp_path, cache) as client:
        page = (await client.get("/run/run")).text
        assert "finished, wrong answer" in page
        assert "never used a tool" not in page


async def test_held_out_scores_are_what_the_run_measured_on_whatever_host(tmp_path: Path, cache: Path) -> None:
    """By the recipe's metric, not by the reward; of files of several hosts; of a split that is called train."""
    chance = random.Random(0)
    place = tmp_path / "run" / "trajectories"
    place.mkdir(parents=True)
    (place.parent / "config.yaml").write_text("environment: {name: made}\nevaluation: {metric: found}\n")
    rows = [*metrics_rows(10, [0.5] * 10, {0: (0.0, 8), 10: (1.0, 8)})]
    (place.parent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, score in ((0, 0.0), (10, 1.0)):
        for host in ("0-a", "1-b"):
            with TrajectoryWriter(place / f"eval-{step:05d}-{host}.jsonl") as writer:
                for index in range(4):
                    made = held_out("eval", 4 * (host == "1-b") + index, step, 0.5, chance)
                    made.metrics = {"found": score}
                    writer.write(made)
    with TrajectoryWriter(place / "train-00010.jsonl") as writer:
        writer.write(held_out("train", 0, 10, 0.0, chance))
    with TrajectoryWriter(place / "train-0-a.jsonl") as writer:
        writer.write(episode(0, 0, 0, 1.0, chance))
    async with opened(tmp_path, cache) as client:
        page = (await client.get("/run/run")).text
        assert "Yes: held-out +1.00 \u00b1 0.00 on 8 tasks" in page
        page = (await client.get("/run/run/trajectories?kind=eval-00010")).text
        assert len(re.findall(r"<tr data-row=", page)) == 8
        page = (await client.get("/run/run/trajectories?kind=train")).text
        assert re.findall(r"<tr data-row=\"/run/run/t/([^/]+)/", page) == ["train-0-a"]
        assert (await client.get("/run/run/evaluations")).status_code == 200
        for odd in ("/run/run/t/train/@train.jsonl:\u00b2", "/run/run/t/%FF/x"):
            assert (await client.get(odd)).status_code == 404


async def test_lists_are_filtered_sorted_and_searched_by_address(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:

        async def ids(query: str) -> list[str]:
            page = (await client.get(f"/run/first/trajectories?{query}")).text
            return re.findall(r'<tr data-row="/run/first/t/[^/"]+/([^"]+)"', page)

        assert len(await ids("")) == 50
        assert all(name.startswith("train-1") for name in await ids("kind=train&id=train-1"))
        assert all(name.startswith("eval-") for name in await ids("kind=held-out"))
        limits = await ids("kind=train&outcome=limit")
        assert limits
        assert await ids("kind=train&ending=limit:%20tool_calls") == limits
        assert len(await ids("group=7&kind=train")) == 8
        assert set(await ids("kind=train&step=3")) == {f"train-{g}-{m}" for g in range(8, 12) for m in range(8)}
        assert set(await ids("kind=train&q=Multiply%20each%20of%20xs%20by%203.&group=3")) == {
            f"train-3-{m}" for m in range(8)
        }
        assert await ids("q=nowhere%20in%20it") == []
        assert await ids("q=%5C%22&kind=train&low=nan&versions=" + "9" * 400) is not None
        page, seen = "kind=train&sort=reward", list[str]()
        while page:
            text = (await client.get(f"/run/first/trajectories?{page}")).text
            seen += re.findall(r'<tr data-row="/run/first/t/train/([^"]+)"', text)
            following = re.search(r'rel="next" href="\?([^"]+)"', text)
            page = unescape(following[1]) if following else ""
        assert len(seen) == len(set(seen)) == 640


async def test_an_episode_shows_its_conversation_tokens_and_record(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        page = (await client.get("/run/first/t/train/train-5-1")).text
        assert "Multiply each of xs by 5." in page
        assert "<dt>trained at step</dt><dd>2</dd>" in page
        assert "<dt>advantage</dt><dd>+0.250</dd>" in page
        assert 'href="/run/first/g?kind=train&amp;group=5"' in page
        raw = (await client.get("/run/first/t/train/train-5-1?tab=raw")).text
        assert "&#34;task_id&#34;: &#34;train-5&#34;" in raw
        tokens = (await client.get("/run/first/t/train/train-5-1?tab=tokens")).text
        assert "&lt;|im_end|&gt;" in tokens
        data = (await client.get("/run/first/tokens/train/train-5-1")).json()
        assert [len(turn["ids"]) for turn in data["turns"]][-1] == 2
        sampled = re.findall(r'data-turn="\d+">(.*?)</div>', tokens, re.DOTALL)
        lengths = [sum(turn["lengths"]) for turn in data["turns"]]
        assert [len(unescape(text)) for text in sampled] == lengths, "the page colours tokens by these lengths"


async def test_a_group_shows_where_its_members_part(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        page = (await client.get("/run/first/g?kind=train&group=2")).text
        assert "8 episodes of one task" in page
        assert page.count("Multiply each of xs") == 1, "the common beginning stands once"
        assert "here they part" in page


async def test_figures_can_be_taken_away(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        data = (await client.get("/run/first/charts.json")).json()
        assert data["charts"][0]["key"] == "reward"
        assert len(data["charts"][0]["lines"][0]["x"]) == 20
        svg = (await client.get("/run/first/chart.svg?key=reward&low=5&high=10")).text
        assert svg.startswith("<svg xmlns=")
        table = (await client.get("/run/first/chart.csv?key=reward")).text.splitlines()
        assert table[0] == 'step,training batch,held-out,"held-out, standard error"'
        assert len(table) == 22


async def test_time_evaluations_and_comparisons(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        page = (await client.get("/run/first/time")).text
        assert "wait for episodes <b>60 %</b>" in page
        window = (await client.get("/run/first/timeline.json?from=10&to=20&width=500")).json()
        assert window["lanes"][0]["track"] == "trainer"
        assert all(end >= 10 and start <= 20 for start, end, *_ in window["lanes"][0]["spans"])
        page = (await client.get("/run/first/evaluations")).text
        assert "p " in page
        page = (await client.get("/run/eval-a")).text
        assert "lost: ConnectionError" in page
        assert "by difficulty" in page
        page = (await client.get("/compare?runs=first,second")).text
        assert "second is worse" in page
        assert ">seed<" in page
        page = (await client.get("/compare?runs=eval-a,eval-b")).text
        assert "against eval-a" in page
        assert (await client.get("/compare?runs=first")).status_code == 404


async def crawl(client: httpx.AsyncClient, start: str, most: int) -> dict[str, httpx.Response]:
    """Every page that a link leads to."""
    found: dict[str, httpx.Response] = {}
    left = [start]
    while left and len(found) < most:
        path = left.pop(0)
        if path in found:
            continue
        answer = found[path] = await client.get(path)
        if answer.headers.get("content-type", "").startswith("text/html"):
            links = [
                unescape(link)
                for link in re.findall(r'(?:href|data-charts|data-tokens|data-timeline)="([^"]+)"', answer.text)
            ]
            base = path.partition("?")[0]
            left += [base + link if link.startswith("?") else link for link in links if link.startswith(("/", "?"))]
    return found


async def test_nothing_in_a_hostile_run_is_more_than_text(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        found = await crawl(client, "/run/hostile", 160)
        assert len(found) > 60
        wrong = {path: answer.status_code for path, answer in found.items() if answer.status_code >= 500}
        assert not wrong
        for path, answer in found.items():
            text = answer.text
            if answer.headers["content-type"].startswith("text/html"):
                assert "<script>window" not in text, path
                assert "<img src=x" not in text, path
                assert "\u202e" not in text, path
                assert "\x1b" not in text, path
                assert not re.search(r'(?:href|src)="(?:https?:|javascript:|//)', text), path
                assert " style=" not in re.sub(r">[^<]*<", "><", text), path
                assert len(answer.content) < 3_000_000, path
        episodes = [path for path in found if "/t/" in path]
        assert len(episodes) > 25
        assert any("This record can't be read" in found[path].text for path in episodes)


async def test_addresses_that_nobody_wrote_are_answered(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        for path in (
            "/run/..",
            "/run/%2e%2e/",
            "/run/first/t/train/%00",
            "/run/first/t/train/" + "x" * 5000,
            "/run/%FF",
            "/run/a%00b",
            "/run/first/t/train/@train.jsonl:99999999999999999999",
            "/run/first/t/train/@../../x:0",
            "/run/first/g?group=%ED%A0%80",
            "/run/first/chart.svg?key=none",
            "/run/first/chart.svg?key=reward&low=x&high=1e999",
            "/static/x/../app.py",
            "/run/first/piece/train/train-5-1?message=99999",
            "/run/first/piece/train/train-5-1?start=-1&message=0",
            "/run/first/timeline.json?from=nan&to=inf&width=99999999",
            "/compare?runs=first,%00",
            "/?after=%FF",
            "/run/first/trajectories?after=x,y&sort=zzz&difficulty=%00&tag=%22&low=1e999",
            "/run/first?around=99999999999999999",
            "/run/first/trajectories?after=99999999999999999999999",
            "/run/" + quote("\U0001f600"),
        ):
            answer = await client.get(path)
            assert answer.status_code < 500, path


async def test_a_folder_that_vanishes_is_named(tmp_path: Path) -> None:
    run = training_run(tmp_path / "runs" / "gone", steps=4)
    async with opened(tmp_path / "runs", tmp_path / "cache") as client:
        assert (await client.get("/run/gone")).status_code == 200
        run.rename(tmp_path / "elsewhere")
        assert (await client.get("/run/gone")).status_code == 404
        (tmp_path / "runs").rmdir()
        assert "No run here yet" in (await client.get("/")).text


async def test_nothing_is_written_into_a_run(tmp_path: Path) -> None:
    run = training_run(tmp_path / "runs" / "first", steps=4)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    async with opened(tmp_path / "runs", tmp_path / "cache") as client:
        await crawl(client, "/run/first", 60)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


async def test_a_run_that_grows_is_read_on(tmp_path: Path) -> None:
    root, cache = tmp_path / "runs", tmp_path / "cache"
    run = training_run(root / "first", steps=4)
    async with opened(root, cache) as client:
        before = (await client.get("/run/first/charts.json")).json()
        row = {"schema": 1, "step": 5, "reward/mean": 0.25}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        after = (await client.get("/run/first/charts.json")).json()
        assert len(after["charts"][0]["lines"][0]["x"]) == len(before["charts"][0]["lines"][0]["x"]) + 1
