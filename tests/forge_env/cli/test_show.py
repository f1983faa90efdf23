"""`show` and `trajectory`: answers in words, and nothing that an agent wrote does anything."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shlex
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from forge_env.cli import show
from forge_env.cli.follow import News, _follow
from forge_env.cli.main import main
from forge_env.files import LineWriter
from forge_env.run import RunFolder
from forge_env.view.digest import digest
from forge_env.view.report import html as report_html
from tests.forge_env.cli.made_run import HOSTILE, STEPS, make_run, played
from tests.forge_env.test_visible import harmless
from tests.forge_env.view.made import evaluation, hostile_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, to be copied by each test."""
    root = tmp_path_factory.mktemp("made")
    make_run(root / "first")
    make_run(root / "hostile", HOSTILE)
    return root


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("FORGE_ENV_CACHE", str(tmp_path / "cache"))
    return RunFolder(shutil.copytree(made / "first", tmp_path / "first"))


@pytest.fixture
def hostile(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("FORGE_ENV_CACHE", str(tmp_path / "cache"))
    return RunFolder(shutil.copytree(made / "hostile", tmp_path / "hostile"))


def test_four_answers_then_the_result(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(folder.root)]) == 0
    shown = capsys.readouterr().out
    questions = [
        "What limited the speed?",
        "Why did the reward move?",
        "What does a typical failure look like?",
        "Did it learn?",
    ]
    places = [shown.index(question) for question in questions]
    assert places == sorted(places)
    assert "75 % of its time" in shown
    assert re.search(r"\d+  out of tool calls, after reading .+ +█", shown)
    assert f"example: forge-env trajectory {shlex.quote(str(folder.root))} train-" in shown
    assert shown.endswith("held-out solved: 0.400 → 0.800\n")


def test_what_is_paid_and_not_solved_is_said_first(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    from forge_env.trajectory import TrajectoryWriter

    with TrajectoryWriter(folder.trajectories / "train.jsonl") as writer:
        for member in range(3):
            writer.write(played(500, member, STEPS, 1.0, "Fooled.", metrics={"solved": 0.0}))
    assert main(["show", str(folder.root)]) == 0
    shown = capsys.readouterr().out
    assert "3 got the maximum reward without solving the task: check for reward hacking." in shown
    classes = re.findall(r"\d+  (maximum reward, not solved|out of tool calls)", shown)
    assert classes[:2] == ["maximum reward, not solved", "out of tool calls"]
    assert f"example: forge-env trajectory {shlex.quote(str(folder.root))} train-500-" in shown
    assert main(["show", str(folder.root), "--format", "html", "--out", str(folder.root / "r.html")]) == 0
    text = (folder.root / "r.html").read_text()
    assert "Check some for reward hacking" in text
    assert re.search(r"<summary>maximum reward, not solved: train-500-\d", text)
    assert not re.search(r"<summary>reward 1 of 1: train-500-", text), "it is no success"


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int, folder: RunFolder) -> None:
    lines = [line for line in show.lines(digest(folder.root), width) if "example: " not in line]
    assert max(map(cell_len, lines)) <= max(width, 60)


def test_the_answers_are_had_as_json(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(folder.root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["learned"]["start"], found["learned"]["end"], found["learned"]["verdict"]) == (0.4, 0.8, "better")
    assert found["episodes"] == 160
    assert sum(item["count"] for item in found["failures"]) < found["episodes"]


def test_what_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--follow"], ["--format", "html"]):
        assert main(["show", str(tmp_path / "none"), *options]) == 2
        assert "is neither a run nor an evaluation" in capsys.readouterr().err


def test_an_episode_is_a_conversation(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectory", str(folder.root), "train-2-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in ("user", "assistant", "tool python")] == [
        "user", "assistant", "tool python", "assistant",
    ]  # fmt: skip
    place = lines.index("  → python  (210ms)")
    assert lines[place : place + 4] == ["  → python  (210ms)", "    code:", "      x = 1", "      x + 1"]
    assert any(line.startswith("trained on in step 1: advantage -0.250, staleness 0") for line in lines)
    assert lines[-1] == "truncated (tool_calls): reward 0"
    assert main(["trajectory", str(folder.root), "train-999-0"]) == 2
    assert "has no episode 'train-999-0'" in capsys.readouterr().err


def test_the_later_of_two_records_is_read(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    from forge_env.trajectory import TrajectoryWriter

    with TrajectoryWriter(folder.trajectories / "train.jsonl") as writer:
        writer.write(played(2, 1, 7, 0.5, "Played again."))
    with TrajectoryWriter(folder.trajectories / "other.jsonl") as writer:
        writer.write(played(2, 1, 7, 0.25))
    assert main(["trajectory", str(folder.root), "train-2-1", "--kind", "train"]) == 0
    assert capsys.readouterr().out.endswith("ended: reward 0.5\n")
    assert main(["trajectory", str(folder.root), "train-2-1"]) == 0
    shown = capsys.readouterr().out
    assert "also in train; --kind chooses one" in shown
    assert shown.endswith("ended: reward 0.25\n")


def test_a_finished_run_is_told_line_by_line(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(folder.root), "--lines", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "[  1m00s] step 10  reward 1.000  tokens/s 900",
        "[  1m00s] held-out (eval) after step 10: 0.800 ± 0.030 (n=64, 25% of tokens by other versions)",
        "first: finished  held-out 0.400 → 0.800",
    ]


async def test_a_run_is_followed_to_its_end(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes while it goes on is shown as it comes, warnings too; then it ends by itself."""
    folder.create()  # a process holds it
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    news = News(folder.root)
    assert len([*news.lines()]) == STEPS + 2
    following = asyncio.create_task(_follow(folder.root, news))
    await asyncio.sleep(0)
    with LineWriter(folder.metrics) as metrics, LineWriter(folder.log) as log:
        log.append(b"2026-01-01 00:00:00,000 WARNING forge_env.run: look \x1b[2J out")
        log.append(b"2026-01-01 00:00:00,000 INFO    forge_env.run: nothing")
        metrics.append(b'{"schema": 1, "step": 11, "time": 61.0, "reward/mean": 0.5}')
        metrics.append(b"[1]")
    folder.release()
    await asyncio.wait_for(following, 60)
    assert stream.getvalue().splitlines() == [
        "! 2026-01-01 00:00:00,000 WARNING forge_env.run: look \\x1b[2J out",
        "[  1m01s] step 11  reward 0.500",
    ]


class Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.text = ""
        self._depth = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_report_answers_and_shows_episodes(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(folder.root), "--format", "html"]) == 0
    assert capsys.readouterr().out == f"{folder.report}\n"
    page = Page(folder.report.read_text())
    for part in (
        "Did it learn?", "What does a typical failure look like?", "Why did the reward move?",
        "What limited the speed?",
        "out of tool calls", "reward 1 of 1", "x + 1", "python 3.11", "generated",
        "tokens/s while training", "largest",
        "wait for episodes 75 %", "sampled by versions 10 to 11, 75 % by this step's",
    ):  # fmt: skip
        assert part in page.text
    linked = [value for _, given in page.tags for name, value in given.items() if name in ("src", "href")]
    assert all(value.startswith(("#", "data:image/svg+xml;base64,")) for value in linked), "one self-contained file"
    assert len([tag for tag, _ in page.tags if tag == "details"]) >= 6


def test_hostile_episodes_do_nothing_in_a_report(hostile: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(hostile.root), "--format", "html"]) == 0
    text = hostile.report.read_text(encoding="utf-8")
    page = Page(text)
    assert [given.get("type") for tag, given in page.tags if tag == "script"] == ["application/json", None, "module"]
    assert not [tag for tag, _ in page.tags if tag in ("iframe", "link", "object", "form")]
    assert not [name for _, given in page.tags for name in given if name.startswith("on")]
    assert "default-src 'none'" in unescape(text)
    assert harmless(text)
    assert "alert(1)" in page.text
    assert "liveRLOlive" in page.text


@pytest.mark.parametrize(
    "words", ["show", "show --follow", "show --format md", "trajectory", "trajectory train-0-3"], ids=str
)
def test_hostile_episodes_on_a_terminal(words: str, hostile: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    command, *options = words.split()
    assert main([command, str(hostile.root), *options]) == 0
    shown = capsys.readouterr().out
    assert harmless(shown)
    shown.encode()


def test_markdown_keeps_an_agents_text_in_its_block(hostile: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(hostile.root), "--format", "md"]) == 0
    text = capsys.readouterr().out
    fence = re.search(r"^(`{4,})text$", text, re.MULTILINE)
    before, _, rest = text.partition(f"{fence[1]}text\n")
    inside, _, after = rest.partition(f"\n{fence[1]}\n")
    assert "<script>" in inside
    assert "<script>" not in before + after
    assert "http://" not in before + after


def test_a_picture_is_drawn(hostile: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "report.png"
    assert main(["show", str(hostile.root), "--format", "png", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_ENV_CACHE", str(tmp_path / "cache"))
    folder = RunFolder(tmp_path / "new")
    folder.create()
    folder.release()
    folder.metrics.touch()
    for form in ("html", "md", "png"):
        assert main(["show", str(folder.root), "--format", form, "--out", str(tmp_path / f"r.{form}")]) == 0
    assert main(["show", str(folder.root)]) == 0
    assert main(["show", str(folder.root), "--lines", "5"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--json", "--format md", "--format html", "--follow"])
def test_a_folder_of_damaged_files_is_told_of(options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = hostile_run(tmp_path / "run")
    assert main(["show", str(root), *options.split()]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_damaged_lines_of_metrics(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    odd = {"step": 3, "eval/eval/score": 10**400, "eval/eval/stderr": "much", "time": [1]}
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 11, "\xc8": 1}\n\xff\n' + b"[" * 100_000 + b"\n")
        file.write("".join(json.dumps({**odd, "step": step}) + "\n" for step in (3, "x", 10**400, None)).encode())
    for options in ("", "--format html", "--format png", "--follow"):
        assert main(["show", str(folder.root), *options.split()]) == 0, options
    assert "first: finished" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["long", [], {"a": 1}, True, -1, float("nan"), 10**30, None])
def test_damaged_summary(value: object, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["wall_s", "environments", "environment", "model", "steps", "heldout", "warnings", "stages", "exit", "seed"]
    folder.summary.write_text(json.dumps(dict.fromkeys(names, value)))
    for options in ("", "--format html", "--format md", "--follow"):
        assert main(["show", str(folder.root), *options.split()]) == 0, options


def test_running_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORGE_ENV_CACHE", str(tmp_path / "cache"))
    root = evaluation(tmp_path / "an evaluation")
    figure = r"made: 0\.\d{3} ± 0\.\d{3} \(standard error; 19 tasks, 38 samples so far\)"
    for summary in ({}, {"environments": {"made": {"score": {"value": "much"}}}}):
        (root / "summary.json").write_text(json.dumps({"schema": 1, **summary}))
        assert main(["show", str(root)]) == 0
        shown = capsys.readouterr().out
        assert re.search(figure + r"\n$", shown), "the result stands last"
        assert "A sample took" in shown
        (command,) = re.findall(r"example: forge-env (.*)", shown)
        assert main(shlex.split(command)) == 0, "the line can be copied, whatever the folder is called"
        capsys.readouterr()
        assert main(["show", str(root), "--format", "md"]) == 0
        assert "What limited the speed?" in capsys.readouterr().out


def test_a_run_that_finished_is_not_called_a_success(folder: RunFolder) -> None:
    """Whether it learned is what the first answer says."""
    found = digest(folder.root)
    assert found.run.state == "finished"
    assert found.headline.endswith("finished")
    assert "success</span>" not in report_html(folder.root)
