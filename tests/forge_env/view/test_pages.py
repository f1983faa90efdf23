"""The pages as the server sends them: who gets them, what stands in them, and that nothing in a folder breaks them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import unescape
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from jinja2 import FileSystemLoader

from forge_env import redaction
from forge_env.credit.results import Call, Credits
from forge_env.errors import UsageError
from forge_env.evaluation.estimates import Estimate
from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, TrajectoryWriter, Turn
from forge_env.types import Message, call_tool
from forge_env.view import rendering
from forge_env.view.app import Pages
from forge_env.view.credit import interval
from forge_env.view.index import RunIndex
from forge_env.view.report import write_report
from forge_env.view.runs import Runs, RunView
from forge_env.view.server import Guard, check_cache, serve_pages
from forge_env.view.text import plain
from tests.forge_env.view.made import episode, evaluation, held_out, hostile_run, metrics_rows, reply, training_run

PORT = 7000
BASE = f"http://127.0.0.1:{PORT}"


@asynccontextmanager
async def opened(root: Path, cache: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """A browser that has been given the address."""
    pages = Pages(Runs(root, cache))
    guard = Guard(pages.application(), "t" * 40, lambda: PORT)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(guard), base_url=BASE) as client:
        answer = await client.get(f"/?token={'t' * 40}")
        assert answer.status_code == 303
        yield client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three training runs, of which one learned to be paid for nothing, two evaluations and a hostile run."""
    root = tmp_path_factory.mktemp("runs")
    training_run(root / "first")
    training_run(root / "second", start=0.8, end=0.1, seed=1)
    training_run(root / "hacked", steps=8, hacked=True, seed=3)
    evaluation(root / "eval-a")
    evaluation(root / "eval-b", solved=0.95, seed=2)
    hostile_run(root / "hostile")
    return root


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run of four steps, to be copied by who changes it."""
    return training_run(tmp_path_factory.mktemp("made") / "short", steps=4)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
async def test_only_who_has_the_token_is_answered(folder: Path, cache: Path) -> None:
    pages = Pages(Runs(folder, cache))
    guard = Guard(pages.application(), "s" * 40, lambda: PORT)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(guard), base_url=BASE) as client:
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


async def test_a_websocket_is_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def never(*_: Any) -> Any:
        raise AssertionError

    await Guard(never, "t" * 40, lambda: PORT)({"type": "websocket", "headers": []}, never, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_every_answer_forbids_what_a_page_may_not_do(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        for path in ("/", "/run/first", "/run/none", "/run/first/charts.json", "/static/x/main.js", "/nothing"):
            policy = (await client.get(path)).headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "require-trusted-types-for 'script'" in policy
            assert "unsafe" not in policy


async def test_a_secret_in_a_file_is_not_on_a_page(short: Path, tmp_path: Path) -> None:
    shutil.copytree(short, tmp_path / "runs" / "short")
    (tmp_path / "runs/short/run.log").write_text("the server said: wrong key abcdef-123456\n")
    redaction.add("abcdef-123456", "KEY")
    async with opened(tmp_path / "runs", tmp_path / "cache") as client:
        page = (await client.get("/run/short/log")).text
    assert "the server said: wrong key (redacted KEY)" in page
    assert "abcdef-123456" not in page


async def test_every_start_has_a_new_token(tmp_path: Path) -> None:
    addresses = []
    for _ in range(2):
        async with started(tmp_path) as address:
            addresses.append(address)
    one, two = (address.partition("?token=")[2] for address in addresses)
    assert one != two
    assert len(one) > 40


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
async def test_another_user_is_not_answered_even_with_the_token(tmp_path: Path) -> None:
    code = (
        "import os, socket, sys\n"
        "user, port, token = sys.argv[1:]\n"
        "os.setuid(int(user))\n"
        "connection = socket.socket()\n"
        "connection.connect(('127.0.0.1', int(port)))\n"
        "head = f'GET / HTTP/1.1\\r\\nHost: 127.0.0.1:{port}\\r\\nCookie: forge_env_{port}={token}\\r\\n'\n"
        "connection.sendall(f'{head}Connection: close\\r\\n\\r\\n'.encode())\n"
        "print(connection.makefile().read())\n"
    )
    async with started(tmp_path) as address:
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=(.+)", address)
        assert match is not None
        answers = []
        for user in ("0", "65534"):
            asking = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-c", code, user, *match.groups(), stdout=asyncio.subprocess.PIPE
            )
            answers.append((await asking.communicate())[0].decode())
    assert answers[0].startswith("HTTP/1.1 200")
    assert answers[1].startswith("HTTP/1.1 403")
    assert answers[1].endswith("This connection comes from another user of this machine.\n\n")


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[str]:
    """The address of a server of a folder's runs."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    pages = Pages(Runs(folder / "runs", folder / "cache"))
    running = asyncio.create_task(serve_pages(pages, 0, ready=address.set_result, cache=folder / "cache"))
    yield await address
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_run_answers_the_four_questions(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        page = (await client.get("/run/first")).text
        lazy = re.search(r'>never used a tool</a>.*?href="([^"]*)" title="an example', page)
        assert lazy
        assert "The agent never called a tool." in (await client.get(unescape(lazy[1]))).text
        assert re.search(r"Yes: held-out solved \+0\.\d\d\s\u00b1\s0\.\d\d on 60 tasks", page)
        assert 'wrong answer, after reading "k/n passed"' in unescape(page)
        assert 'read "1/2 passed f([' in unescape(page), "an example of it"
        assert "maximum reward, not solved" not in page
        assert re.search(r"It rose by 0\.\d\d", page)
        assert "60\u00a0% of its time waiting for episodes" in unescape(page), "no line ends within a figure"
        page = (await client.get("/run/second")).text
        assert "No, the score fell" in page
        assert re.search(r"It fell by 0\.\d\d", page)
        assert re.search(r"Largest other changes: never used a tool: [\d.]+\s%\s→\s\d+\s% of episodes", unescape(page))
        assert re.search(r"tool_errors per episode: 0.\d+\s→\s0.\d+\.", unescape(page))
        page = (await client.get("/run/first?around=10")).text
        assert "before" in page


async def test_a_run_says_how_its_reward_is_made_and_on_what_it_ran(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        for path in ("/run/first", "/run/first/recipe"):
            page = (await client.get(path)).text
            assert "<dt>versions</dt><dd>python 3.11.7, torch 2.9.0</dd>" in page
            assert "a processor, 2 CPUs, 24.0 GiB; no GPU; Linux" in page
            assert "<dt>model</dt><dd>made-up</dd>" in page
        assert "Multiplication." in page
        assert "<b>passed</b> \u00d7 1</div>" in page
        assert "name: made" in page
        page = (await client.get("/run/hostile/recipe")).text
        assert "&lt;script&gt;" in page


async def test_what_is_paid_and_not_solved_is_a_failure(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        page = (await client.get("/run/hacked")).text
        found = re.search(r"(\d+) training episodes got the maximum reward", page)
        assert found is not None
        assert 'ending=maximum%20reward%2C%20not%20solved">maximum reward, not solved</a>' in page
        assert "Check some for reward hacking" in page
        assert "No, the score fell: held-out solved" in page
        example = re.search(r'class="unsolved">.*?class="eg" href="([^"]+)"', page)
        assert example is not None
        assert "Maximum reward, but solved is 0" in (await client.get(unescape(example[1]))).text
        page = (await client.get("/run/hacked/trajectories?kind=train&outcome=unsolved")).text
        assert f'data-live="total">{found[1]}<' in page
        assert len(re.findall(r'class="said warn">maximum reward, not solved<', page)) == 50
        (row,) = re.findall(r'<tr data-row="/run/hacked">.*?</tr>', (await client.get("/")).text, re.DOTALL)
        assert "maximum reward, not solved" in row
        assert "solved</span></td>" in row, "the held-out score is named by what it measures"
        assert (await client.get("/")).text.count("badge warn") == 2, "of two lossy evaluations"


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
        assert "wrong answer" in page
        assert "never used a tool" not in page


async def test_held_out_scores_are_what_the_run_measured_on_whatever_host(tmp_path: Path, cache: Path) -> None:
    """By the recipe's metric, not by the reward; of files of several hosts; of a split that is called train."""
    chance = random.Random(0)
    place = tmp_path / "run" / "trajectories"
    place.mkdir(parents=True)
    (place.parent / "config.yaml").write_text("environment: {name: made}\nevaluation: {metric: found}\n")
    rows = [*metrics_rows(10, [0.5] * 10, [0.5] * 10, {0: (0.0, 8), 10: (1.0, 8)})]
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
        assert "Yes: held-out found +1.00\u00a0\u00b1\u00a00.00 on 8 tasks" in page
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
        began = await ids("kind=train&since=2023-11-14T22:13:20&until=2023-11-14T22:13:22.5")
        assert set(began) == {f"train-{g}-{m}" for g in range(3) for m in range(8)}
        assert set(await ids("kind=train&step=3-4&group=12")) == {f"train-12-{m}" for m in range(8)}
        assert await ids("kind=train&step=3&group=12") == []
        ending = "out%20of%20tool%20calls%2C%20after%20reading%20%22k%2Fn%20passed%22"
        assert await ids(f"kind=train&ending={ending}") == limits
        assert len(await ids("group=7&kind=train")) == 8
        assert set(await ids("kind=train&step=3")) == {f"train-{g}-{m}" for g in range(8, 12) for m in range(8)}
        assert set(await ids("kind=train&q=mULTIPLY%20each%20of%20xs%20by%203.&group=3")) == {
            f"train-3-{m}" for m in range(8)
        }
        assert await ids("q=nowhere%20in%20it") == []
        page = (await client.get("/run/first/trajectories?kind=train&q=xs+by+3.")).text
        number = 8 * len([group for group in range(80) if group % 7 == 3])
        assert f"{number} contain" in page
        assert f'data-live="total">{number}<' in page
        chips = re.findall(r'outcome=(\w+)&amp;q=[^"]*">[^<]+<b>(\d+)</b>', page)
        assert sum(int(n) for _, n in chips) == number, "what is found is counted by outcome"
        page = (await client.get("/run/first/trajectories?kind=train&q=xs+by+3.&outcome=wrong&sort=-tokens")).text
        assert f'data-live="total">{dict(chips)["wrong"]}<' in page
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
        (step,) = (row for row in map(json.loads, (folder / "first" / "trained.jsonl").open()) if row["step"] == 2)
        advantage = step["groups"][1]["episodes"][1][2]
        said = f"{advantage:+.3f}".replace("-", "\u2212")
        page = (await client.get("/run/first/t/train/train-5-1")).text
        assert "Multiply each of xs by 5." in page
        assert "<dt>trained at step</dt><dd>2</dd>" in page
        assert f"<dt>advantage</dt><dd>{said}</dd>" in page
        assert 'href="/run/first/g?kind=train&amp;group=5"' in page
        raw = (await client.get("/run/first/t/train/train-5-1?tab=raw")).text
        assert "&#34;task_id&#34;: &#34;train-5&#34;" in raw
        tokens = (await client.get("/run/first/t/train/train-5-1?tab=tokens")).text
        assert "&lt;|im_end|&gt;" in tokens
        assert f"Step 2 trained on its sampled tokens, with a mean advantage of {said}." in tokens
        data = (await client.get("/run/first/tokens/train/train-5-1")).json()
        assert (data["advantage"], data["learned"]) == (advantage, True)
        assert (
            "Held-out episode; not trained on" in (await client.get("/run/first/t/eval-00000/eval-3?tab=tokens")).text
        )
        assert [len(turn["ids"]) for turn in data["turns"]][-1] == 2
        sampled = re.findall(r'data-turn="\d+">(.*?)</div>', tokens, re.DOTALL)
        lengths = [sum(turn["lengths"]) for turn in data["turns"]]
        assert [len(unescape(text)) for text in sampled] == lengths, "the page colours tokens by these lengths"


async def test_credits_are_beside_their_episode(tmp_path: Path, short: Path, cache: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(short, run)
    record = json.loads((run / "trajectories" / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])
    before, after = Estimate(0.25, 0.05, 0.2, 0.5), Estimate(0.75, 0.05, 0.6, 0.9)
    calls = [Call(1, "look", "{}", before, before, None), Call(2, "run", "{}", before, after, None)]
    credits = Credits("run", record["id"], "e", record["task_id"], "m", record["reward"], 8, calls)
    at = f"/run/run/t/train/{record['id']}"
    async with opened(tmp_path, cache) as client:
        assert "credit, 95 %" not in (await client.get(at)).text
        folder = run / "credit" / record["id"]
        folder.mkdir(parents=True)
        (folder / "credit.json").write_text(json.dumps(credits.as_json()), encoding="utf-8")
        text = (await client.get(at)).text
        assert text.index("turn 2: run") < text.index("turn 1: look")
        assert interval(calls[1].credit) in text
        (folder / "credit.json").write_text("{", encoding="utf-8")
        answer = await client.get(at)
        assert (answer.status_code, "credit, 95 %" in answer.text) == (200, False)


async def test_every_episode_has_its_tokens_tab(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        for run in ("first", "hacked", "hostile", "eval-a"):
            for kind in ("train", "held-out", "eval"):
                listed = (await client.get(f"/run/{run}/trajectories?kind={kind}")).text
                for path in re.findall(r'<tr data-row="([^"]+)"', listed)[:12]:
                    answer = await client.get(f"{unescape(path)}?tab=tokens")
                    assert answer.status_code == 200, path


async def test_an_update_of_forge_env_changes_no_page_of_a_server_that_runs(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(short, tmp_path / "runs" / "first")
    pages = Pages(Runs(tmp_path / "runs", tmp_path / "cache"))
    templates = tmp_path / "templates"
    shutil.copytree(str(files("forge_env.view").joinpath("templates")), templates)
    own = rendering.templates().overlay(loader=FileSystemLoader(templates))
    monkeypatch.setattr(rendering, "templates", lambda: own)
    pages.load()
    for path in templates.iterdir():
        path.write_text("{{ something_new }}")
        os.utime(path, (1e9, 1e9))
    guard = Guard(pages.application(), "t" * 40, lambda: PORT)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(guard), base_url=BASE) as client:
        await client.get(f"/?token={'t' * 40}")
        for path in ("/run/first", "/run/first/t/train/train-1-1?tab=tokens", "/run/none"):
            assert "forge-env</a>" in (await client.get(path)).text, path


async def test_a_run_says_what_it_made_sure_of(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        page = (await client.get("/run/first")).text
        assert "Self-checks: 5/6 passed." in page
        assert "doubtful: answers to different tasks differ" in page
        assert "doubtful: rewards differ" not in page, "the later word counts"
        assert "broken: rewards differ" in (await client.get("/run/hostile")).text
        assert "Can the result be trusted?" not in (await client.get("/run/eval-a")).text


async def test_each_member_is_marked_where_it_parts_from_the_best(tmp_path: Path, cache: Path) -> None:
    """Not where the first of all parts: that says nothing of the others."""
    asked = [Message(role="user", content="How many?")]
    seen = [Message(role="tool", content="33")]
    calls = {0: ["67 - 34", "33 + 44"], 1: ["67 - 34", "33 + 48"], 2: ["1", "33 + 44"], 3: ["67 - 34", "33 + 44"]}
    calls[4] = ["67 - 34"]
    with TrajectoryWriter(tmp_path / "run" / "trajectories" / "train.jsonl") as writer:
        for member, wanted in calls.items():
            turns = [
                Turn(asked if not place else seen, Reply(call_tool("calculate", expression=one)))
                for place, one in enumerate(wanted)
            ]
            writer.write(
                Trajectory(f"train-0-{member}", "e", "t", turns=turns, reward=float(not member), group=0, member=member)
            )
    async with opened(tmp_path, cache) as client:
        page = unescape((await client.get("/run/run/g?kind=train&group=0")).text)
    assert page.count("How many?") == 1, "the common beginning stands once"
    cards = [re.sub(r"<[^>]+>", "", card) for card in page.split('<section class="card">')[1:]]
    marks = [card.partition("diverges here from the reference") for card in cards]
    assert ["67 - 34" in before for before, mark, _ in marks if mark] == [True, False]
    assert ["33 + 48" in after for _, mark, after in marks if mark] == [True, False]
    assert "identical to the reference" in cards[3]
    assert "67 - 34ends here; the reference continues" in cards[4]


async def test_the_reference_of_a_group_is_the_shortest_of_the_best(tmp_path: Path, cache: Path) -> None:
    lengths = {0: (1.0, 9), 1: (0.0, 1), 2: (1.0, 4), 3: (1.0, 6)}
    asked, chance = [Message(role="user", content="How many?")], random.Random(0)
    with TrajectoryWriter(tmp_path / "run" / "trajectories" / "train.jsonl") as writer:
        for member, (reward, tokens) in lengths.items():
            said = reply(Message(role="assistant", content=f"answer {member}"), tokens, 0, chance)
            writer.write(
                Trajectory(f"t-{member}", "e", "t", turns=[Turn(asked, said)], reward=reward, group=0, member=member)
            )
    async with opened(tmp_path, cache) as client:
        page = (await client.get("/run/run/g?kind=train&group=0")).text
    cards = page.split('<section class="card">')[1:]
    assert [re.findall(r">(t-\d)</a>", card) for card in cards] == [["t-2"], ["t-3"], ["t-0"], ["t-1"]]
    assert ["reference: the shortest of the 3 best" in card for card in cards] == [True, False, False, False]


async def test_the_list_is_searched_and_sorted_by_its_address(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder, cache) as client:

        async def names(query: str) -> list[str]:
            return re.findall(r'<tr data-row="/run/([^"]+)"', (await client.get(f"/?{query}")).text)

        everything = await names("")
        assert await names("sort=run") == sorted(everything)
        assert await names("sort=-run") == sorted(everything, reverse=True)
        assert (await names("sort=-score"))[:3] == ["first", "second", "hacked"], "runs without a score come last"
        assert (await names("sort=score"))[:3] == ["hacked", "second", "first"]
        assert await names("q=EVAL-&sort=run") == ["eval-a", "eval-b"]
        assert await names("q=lossy+eval-b") == ["eval-b"], "the state, too"
        assert await names("sort=nonsense") == everything
        assert "No run matches \u201cnothing\u201d." in (await client.get("/?q=nothing")).text
        monkeypatch.setattr("forge_env.view.listing.PAGE", 4)
        page = (await client.get("/?sort=run")).text
        (address,) = map(unescape, re.findall(r'rel="next" href="/\?([^"]+)"', page))
        assert await names("sort=run") + await names(address) == sorted(everything)
        monkeypatch.setattr("forge_env.view.listing.MOST_SORTED", 2)
        assert "Only the newest" in (await client.get("/?sort=run")).text


async def test_a_state_has_one_word_on_all_pages(folder: Path, tmp_path: Path) -> None:
    """An evaluation was "complete" where a run was "finished", and its record says "success"."""
    shutil.copytree(folder / "eval-a", tmp_path / "runs" / "eval")
    shutil.copytree(folder / "hacked", tmp_path / "runs" / "run")
    summary = {"schema": 1, "status": "complete", "score_name": "reward", "environments": {"made": {"planned": 40}}}
    (tmp_path / "runs" / "eval" / "summary.json").write_text(json.dumps(summary))
    async with opened(tmp_path / "runs", tmp_path / "cache") as client:
        for path, number in (("/", 2), ("/run/eval", 1), ("/run/run", 1)):
            assert re.findall(r'class="badge[^"]*">([^<]+)<', (await client.get(path)).text) == ["finished"] * number
    assert ">finished<" in write_report(tmp_path / "runs" / "eval").read_text()


NOTHING = {
    "": "No episode is recorded.",
    "/trajectories": "No episode is recorded.",
    "/time": "The run&#39;s metrics contain no time measurements.",
    "/evaluations": "This run has no held-out scores.",
    "/log": "This run has no run.log.",
}


async def test_negative_scores_are_drawn_where_they_are_and_tasks_in_their_order(tmp_path: Path, cache: Path) -> None:
    chance = random.Random(0)
    with TrajectoryWriter(tmp_path / "run" / "trajectories" / "eval.jsonl") as writer:
        for index in range(12):
            made = held_out("eval", index, -1, 0.0, chance)
            made.id, made.reward, made.group = f"made/eval/{index}/0", -1.0 if index % 3 else 1.0, None
            made.info = {"index": index, "epoch": 0, "max_reward": 1.0}
            writer.write(made)
    (tmp_path / "run" / "config.yaml").write_text("model: m\nnum_tasks: 12\nenvironments:\n- name: made\n")
    async with opened(tmp_path, cache) as client:
        page = (await client.get("/run/run")).text
    assert "\u22120.333" in page, "with a true minus sign"
    marks = [*map(float, re.findall(r'<rect x="([-\d.]+)" y="2"', page))]
    assert len(marks) > 2
    assert min(marks) == 0.0, "difficulties 2 and 3 scored -1, the least on their axis, which ends at 1"
    assert max(marks) == 98.0
    tasks = re.findall(r'class="mono cut" title="(eval-\d+)"', page)
    assert tasks == [f"eval-{number}" for number in (1, 2, 4, 5, 7, 8, 10, 11, 0, 3, 6, 9)]


async def test_a_call_without_a_name_is_no_choice_of_the_list(tmp_path: Path, cache: Path) -> None:
    """A chip without a word was shown as chosen."""
    with TrajectoryWriter(tmp_path / "run" / "trajectories" / "train.jsonl") as writer:
        for place, name in enumerate(["python", "search", ""]):
            turns = [Turn([Message(role="user", content="x")], Reply(call_tool(name, code="1")))]
            writer.write(Trajectory(f"t-{place}", "e", "t", turns=turns, tags=["", "lists"]))
    async with opened(tmp_path, cache) as client:
        page = (await client.get("/run/run/trajectories")).text
    chips = re.findall(r'class="chip"[^>]*>([^<]*)<b>', page)
    assert {"python ", "search ", "lists "} <= {*chips}
    assert " " not in chips
    assert 'aria-current="true"' not in page.split('class="facets"')[1]


async def test_an_empty_page_says_what_is_not_there(short: Path, tmp_path: Path) -> None:
    """Nothing is "yet" to come in a run that is over, and what a search left out is not called unrecorded."""
    (tmp_path / "runs" / "bare").mkdir(parents=True)
    (tmp_path / "runs" / "bare" / "config.yaml").write_text("environment: {name: made}\ngrpo: {steps: 25}\n")
    tuned = shutil.copytree(short, tmp_path / "runs" / "tuned")
    shutil.rmtree(tuned / "trajectories")
    rows = [{"schema": 1, "step": step, "sft_loss/total_loss": 1.0} for step in range(10)]
    (tuned / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(short, tmp_path / "runs" / "short")
    async with opened(tmp_path / "runs", tmp_path / "cache") as client:
        for path, words in NOTHING.items():
            answer = await client.get(f"/run/bare{path}")
            assert answer.status_code == 200, path
            assert answer.text.count(words) == 1, path
            assert " yet" not in answer.text, path
        assert "Why the reward moved" not in (await client.get("/run/bare")).text
        page = (await client.get("/run/tuned")).text
        assert "Neither rewards nor held-out scores are recorded." in page, "ten steps are not fewer than five"
        page = (await client.get("/run/short/trajectories?q=nothing+like+this")).text
        assert "No episode contains \u201cnothing like this\u201d." in page
        assert "is recorded" not in page
        page = (await client.get("/run/short/trajectories?task=none")).text
        assert "No episode matches the filters." in page


async def test_figures_can_be_taken_away(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        data = (await client.get("/run/first/charts.json")).json()
        assert data["charts"][0]["key"] == "reward"
        assert len(data["charts"][0]["lines"][0]["x"]) == 20
        svg = (await client.get("/run/first/chart.svg?key=reward&low=5&high=10")).text
        assert svg.startswith("<svg xmlns=")
        table = (await client.get("/run/first/chart.csv?key=reward")).text.splitlines()
        assert table[0] == 'step,training solved,held-out solved,"held-out solved, standard error"'
        assert len(table) == 22
        strips = {chart["key"]: chart for chart in data["charts"] if chart["strip"]}
        assert list(strips) == ["histogram/staleness", "histogram/lengths", "histogram/rewards"]
        for chart in strips.values():
            for at in range(20):
                assert sum(line["y"][at] for line in chart["lines"]) == pytest.approx(1, abs=1e-4), chart["key"]
        assert [line["label"] for line in strips["histogram/staleness"]["lines"]] == ["0", "1", "2"]
        rewards = strips["histogram/rewards"]["lines"]
        assert (rewards[0]["label"], rewards[-1]["label"]) == ("0 to 0.1", "0.9 to 1")
        assert rewards[-1]["y"] == pytest.approx(data["charts"][0]["lines"][0]["y"], abs=1e-4), "the share of rewards 1"
        table = (await client.get("/run/first/chart.csv?key=histogram/staleness")).text.splitlines()
        assert (table[0], len(table)) == ("step,0,1,2", 21)
        assert "<rect" in (await client.get("/run/first/chart.svg?key=histogram/staleness&low=3")).text


async def test_time_evaluations_and_comparisons(folder: Path, cache: Path) -> None:
    async with opened(folder, cache) as client:
        page = (await client.get("/run/first/time")).text
        assert "wait for episodes <b>60 %</b>" in page
        window = (await client.get("/run/first/timeline.json?from=10&to=20&width=500")).json()
        assert window["lanes"][0]["track"] == "trainer"
        assert all(end >= 10 and start <= 20 for start, end, *_ in window["lanes"][0]["spans"])
        lane = window["lanes"][1]
        assert lane["track"] == "episodes, worker 0"
        doing = {window["names"][number]["name"]: window["names"][number]["wait"] for *_, number, _ in lane["spans"]}
        assert doing == {"generate": True, "environment": False}, "an episode waits while its model generates"
        assert re.search(r'<text [^>]*class="on">train 40 %</text>', (await client.get("/run/first/time")).text)
        page = (await client.get("/run/first/evaluations")).text
        assert "p " in page
        page = (await client.get("/run/eval-a")).text
        assert "lost: ConnectionError" in page
        assert "by difficulty" in page
        assert "never used a tool" in page
        shares = re.search(r"A sample took ([\d.]+)s on average: (.*?)\.</p>", unescape(page))
        assert shares is not None
        parts = re.findall(r"([\d.]+)(ms|s) \(", shares[2])
        spent = [float(part) / (1000 if unit == "ms" else 1) for part, unit in parts]
        assert sum(spent) == pytest.approx(float(shares[1]), abs=0.05), "the parts are all of it"
        assert re.search(r"\d+ of 40 samples failed: below maximum reward", page)
        examples = re.findall(r'href="([^"]+)" title="an example', page)
        assert len(examples) > 2
        for example in examples:
            assert (await client.get(unescape(example))).status_code == 200
        page = (await client.get("/compare?runs=first,second")).text
        assert "second is worse" in page
        assert ">seed<" in page
        page = (await client.get("/compare?runs=eval-a,eval-b")).text
        assert "against eval-a" in page
        assert (await client.get("/compare?runs=first")).status_code == 404


async def test_a_run_has_one_colour_in_a_comparison_whatever_its_name(folder: Path, tmp_path: Path) -> None:
    names = ["lr=0.1,seed=1", "eval-a", "no\udcffutf\udcfe8"]
    for name, source in zip(names, ("first", "eval-a", "second"), strict=True):
        shutil.copytree(folder / source, tmp_path / "runs" / name)
    async with opened(tmp_path / "runs", tmp_path / "cache") as client:
        marks = dict(re.findall(r'data-mark="([^"]+)" data-name="([^"]+)"', (await client.get("/")).text))
        shown = [plain(name) for name in names]
        assert sorted(map(unescape, marks.values())) == sorted(shown)
        asked = {unescape(name): mark for mark, name in marks.items()}
        page = await client.get("/compare?" + "&".join(asked[name] for name in shown))
        links = re.findall(r'class="dot s\d"></i><a href="([^"]*)">', page.text)
        assert links == [f"/run/{quote(os.fsencode(name), safe='')}" for name in names]
        (address,) = re.findall(r'data-charts="([^"]*)"', page.text)
        reward = (await client.get(unescape(address))).json()["charts"][0]
        drawn = [(line["label"].partition(":")[0], line["colour"], line["dash"]) for line in reward["lines"]]
        assert drawn == [(names[0], 0, 0), (names[0], 0, 1), (names[2], 2, 0), (names[2], 2, 1)]


@pytest.mark.parametrize(
    "recipe",
    [
        "x: " + "[" * 200_000,
        "x: " + "{a: " * 100_000,
        "a0: &a0 [1, 2, 3]\n"
        + "".join(f"a{place}: &a{place} [{f'*a{place - 1}, ' * 20}]\n" for place in range(1, 20))
        + "environment: {name: *a19}\n",
        "x: " + "1" * 2_000_000,
    ],
)
async def test_a_recipe_that_no_run_writes_costs_the_recipe_only(short: Path, recipe: str, tmp_path: Path) -> None:
    (shutil.copytree(short, tmp_path / "runs" / "odd") / "config.yaml").write_text(recipe)
    async with opened(tmp_path / "runs", tmp_path / "cache") as client:
        for path in ("/", "/run/odd", "/run/odd/recipe", "/run/odd/trajectories"):
            assert (await client.get(path)).status_code == 200, path


async def crawl(client: httpx2.AsyncClient, start: str, most: int) -> dict[str, httpx2.Response]:
    """Every page that a link leads to."""
    found: dict[str, httpx2.Response] = {}
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


@pytest.mark.slow
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
        assert any("Unreadable record" in found[path].text for path in episodes)


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


async def test_figures_that_no_table_holds_are_named(short: Path, tmp_path: Path) -> None:
    where = tmp_path / "runs" / "odd" / "trajectories"
    one = json.loads((short / "trajectories" / "train.jsonl").open().readline())
    odd: list[dict[str, object]] = [
        {"difficulty": 10**30}, {"group": 10**25}, {"member": 2**63}, {"started": 1e99}, {"wall_s": 10**400},
        {"metrics": {"solved": 10**30}}, {"retries": -(2**70)}, {"info": {"usage": {"completion": 10**40}}},
        {"reward": 1e308}, {"tokens": {"versions": [[10**30, 1]], "ids": ""}},
        {"turns": [{**one["turns"][0], "calls_s": ["long"]}]}, {"started": 1e308},
    ]  # fmt: skip
    where.mkdir(parents=True)
    lines = [json.dumps({**one, "id": f"odd-{place}", **change}) for place, change in enumerate(odd)]
    (where / "train.jsonl").write_text("\n".join(lines) + "\n")
    rows = [[1, 0, 100, *[10**30] * 26], [1, 0, 50, [], {}, 3, *[[]] * 24], [1] * 29]
    (where / "train.index.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.close(os.open(os.fsencode(where) + b"/\xff.jsonl", os.O_CREAT | os.O_WRONLY))
    group = {"group": 0, "task": "t", "version": 0, "staleness": [], "episodes": [["0", "much", {}, 10**400, "", 0]]}
    rows = [{"schema": 1, "step": step, "reward/mean": step} for step in (1, 10**400, -(2**70), 2)]
    (where.parent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (where.parent / "trained.jsonl").write_text(json.dumps({"schema": 1, "step": 1, "groups": [group]}) + "\n")
    async with opened(tmp_path / "runs", tmp_path / "cache") as client:
        listed = (await client.get("/run/odd/trajectories")).text
        found = re.findall(r'<tr data-row="([^"]+)"', listed)
        assert len(found) == len(odd)
        assert "can't be read" in listed
        assert "odd-3" in listed
        for path in ["/run/odd", "/run/odd/charts.json", *map(unescape, found)]:
            assert (await client.get(path)).status_code == 200, path


async def test_a_folder_that_vanishes_is_named(short: Path, tmp_path: Path) -> None:
    run = shutil.copytree(short, tmp_path / "runs" / "gone")
    async with opened(tmp_path / "runs", tmp_path / "cache") as client:
        assert (await client.get("/run/gone")).status_code == 200
        run.rename(tmp_path / "elsewhere")
        assert (await client.get("/run/gone")).status_code == 404
        (tmp_path / "runs").rmdir()
        assert "This folder has no runs yet" in (await client.get("/")).text


async def test_a_cache_folder_without_room_is_named(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(short, tmp_path / "runs" / "first")
    (tmp_path / "cache").write_text("a file stands where the folder would be")
    with pytest.raises(UsageError, match=r"cache folder .* can't be used"):
        check_cache(tmp_path / "cache")
    pages = Pages(Runs(tmp_path / "runs", tmp_path / "cache"))
    guard = Guard(pages.application(), "t" * 40, lambda: PORT)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(guard), base_url=BASE) as client:
        await client.get(f"/?token={'t' * 40}")
        for path in ("/", "/run/first", "/run/first/trajectories"):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert "FORGE_ENV_CACHE" in answer.text
    (tmp_path / "cache").unlink()
    connect = RunIndex._connect

    def full(index: RunIndex) -> sqlite3.Connection:
        opened = connect(index)
        opened.execute("pragma max_page_count = 12")
        return opened

    monkeypatch.setattr(RunIndex, "_connect", full)
    async with opened(tmp_path / "runs", tmp_path / "cache") as client:
        answer = await client.get("/run/first")
        assert answer.status_code == 503
        assert "database or disk is full" in answer.text


async def test_nothing_is_written_into_a_run(short: Path, tmp_path: Path) -> None:
    run = shutil.copytree(short, tmp_path / "runs" / "first")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    async with opened(tmp_path / "runs", tmp_path / "cache") as client:
        await crawl(client, "/run/first", 60)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


async def test_a_run_that_grows_is_read_on(short: Path, tmp_path: Path) -> None:
    root, cache = tmp_path / "runs", tmp_path / "cache"
    run = shutil.copytree(short, root / "first")
    async with opened(root, cache) as client:
        before = (await client.get("/run/first/charts.json")).json()
        row = {"schema": 1, "step": 5, "reward/mean": 0.25, "reward/solved": 0.25}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        after = (await client.get("/run/first/charts.json")).json()
        assert len(after["charts"][0]["lines"][0]["x"]) == len(before["charts"][0]["lines"][0]["x"]) + 1


async def test_folders_without_number_and_with_any_name_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge_env.view.runs.MOST_LISTED", 60)
    names = ["<script>window.ran = 1<", "a\nb", "\u202egnp", "x" * 255, "%00", "a..%2f", "#?&=\"'", "\udcff\udcfe"]
    root = tmp_path / "runs"
    for name in [*names, *map(str, range(40))]:
        (root / name).mkdir(parents=True)
        (root / name / "metrics.jsonl").write_text('{"schema": 1, "step": 1, "reward/mean": 0.5}\n')
    (root / "file").write_text("no run")
    (root / "loop").symlink_to(root / "loop")
    async with opened(root, tmp_path / "cache") as client:
        listed = (await client.get("/")).text
        assert "48 runs, newest first" in listed
        assert "<script>window" not in listed
        found = set(re.findall(r'<tr data-row="([^"]+)"', listed))
        assert len(found) == 48
        for path in found:
            page = await client.get(unescape(path))
            assert page.status_code == 200, path
            assert "1 steps" in page.text
        for name in range(100, 130):
            (root / str(name)).mkdir()
        listed = await client.get("/")
        assert listed.status_code == 200
        assert "has more than 60 entries" in listed.text
        assert (await client.get("/run/7")).status_code == 200, "those that are not listed have their address"


def test_spans_too_narrow_to_be_seen_are_drawn_as_what_took_the_most_time(tmp_path: Path) -> None:
    events: list[dict[str, object]] = [{"ph": "M", "tid": 1, "name": "thread_name", "args": {"name": "reference"}}]
    for number in range(3_000):
        at = number * 1e4
        events.append({"ph": "X", "tid": 1, "name": "wait for calls", "ts": at, "dur": 2e3})
        events.append({"ph": "X", "tid": 1, "name": "score", "ts": at + 2e3, "dur": 8e3})
    (tmp_path / "timeline.json").write_text("[" + "\n,".join(map(json.dumps, events)) + "\n]\n")
    window = RunView(tmp_path).timeline.window(None, None, 500)
    names = [item["name"] for item in window["names"]]
    (lane,) = window["lanes"]
    assert len(lane["spans"]) <= 500
    scored = sum(end - start for start, end, name, _ in lane["spans"] if names[name] == "score")
    assert scored > 0.7 * window["end"]


def test_the_timeline_begins_with_the_first_span_and_knows_sandboxes(tmp_path: Path) -> None:
    """A run that starts its processes for five minutes is not five minutes of nothing."""
    events: list[dict[str, object]] = [{"ph": "M", "tid": 1, "name": "thread_name", "args": {"name": "trainer"}}]
    events.append({"ph": "X", "tid": 1, "name": "train", "ts": 300e6, "dur": 10e6})
    for phase, at, took in (("wait for one", 301e6, 1e6), ("tests", 302e6, 2e6), ("tests", 305e6, 4e6)):
        common = {"cat": "rollouts0: sandboxes", "id": "train-0-0", "name": phase}
        events += [{"ph": "b", "ts": at, **common}, {"ph": "e", "ts": at + took, **common}]
    (tmp_path / "timeline.json").write_text("[" + "\n,".join(map(json.dumps, events)) + "\n]\n")
    found = RunView(tmp_path).timeline
    whole = found.window(None, None, 500)
    assert (whole["low"], whole["begin"], whole["high"], whole["end"]) == (300, 300, 310, 310)
    assert found.window(0, 305, 500)["low"] == 300
    assert [lane["track"] for lane in whole["lanes"]] == ["trainer", "sandboxes, worker 0"]
    assert [(one.name, one.number, one.p50, one.p99) for one in found.phases()[1:]] == [
        ("tests", 2, 4.0, 4.0),
        ("wait for one", 1, 1.0, 1.0),
    ]
    assert RunView(tmp_path / "nowhere").timeline.window(None, None, 500)["begin"] == 0


@pytest.mark.slow
async def test_a_broken_run_is_listed_with_its_reason_and_hides_no_other(short: Path, tmp_path: Path) -> None:
    """One named pipe made the list of all runs wait for ever; a link showed any file of the machine as the log."""
    shutil.copytree(short, tmp_path / "runs" / "good")
    (tmp_path / "secret").write_text("SECRET of this machine")

    def broken(name: str, file: str) -> Path:
        root = tmp_path / "runs" / name
        shutil.copytree(short, root)
        (root / file).unlink(missing_ok=True)
        return root / file

    for file in ("config.yaml", "metrics.jsonl", "run.log"):
        os.mkfifo(broken(f"pipe-{file}", file))
    for file in ("summary.json", "run.log", "trajectories/train.jsonl"):
        broken(f"link-{Path(file).stem}", file).symlink_to(tmp_path / "secret")
    broken("zeros", "metrics.jsonl").symlink_to("/dev/zero")
    async with opened(tmp_path / "runs", tmp_path / "cache") as client:
        page = (await client.get("/")).text
        rows = {
            unescape(re.findall(r"<a [^>]*>([^<]*)", row)[0]): row
            for row in re.findall("<tr data-.*?</tr>", page, re.DOTALL)
        }
        assert len(rows) == 8
        assert [name for name, row in rows.items() if ">broken</span>" not in row] == ["good"]
        assert all("is a named pipe, not a file" in row for name, row in rows.items() if name.startswith("pipe"))
        assert all("/secret, outside of" in row for name, row in rows.items() if name.startswith("link"))
        assert "is a link to /dev/zero, outside of" in rows["zeros"]
        for name in rows:
            for part in ("", "/trajectories", "/time", "/recipe", "/log", "/charts.json"):
                answer = await client.get(f"/run/{name}{part}")
                assert answer.status_code in (200, 404), (name, part)
                assert "SECRET" not in answer.text
        assert "is a named pipe, not a file" in (await client.get("/run/pipe-run.log/log")).text
        assert "Some files can't be read" in (await client.get("/run/zeros")).text
        assert "Some files can't be read" not in (await client.get("/run/good")).text
