"""Files of strangers: named pipes, devices, links that leave, sizes and lines of any length."""

from __future__ import annotations

import io
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env import reading
from forge_env.cli.main import main
from forge_env.files import NewLines
from forge_env.reading import (
    ANYWHERE,
    UnsafeFileError,
    check_files,
    open_file,
    read_text,
    regular_files,
    unreadable,
    unsafe,
    whole_lines,
)
from forge_env.trajectory import read_trajectories
from forge_env.view.listing import Order, page_of
from forge_env.view.runs import Runs, RunView
from tests.forge_env.view.made import evaluation, training_run


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))  # the name of a socket is short


def link_through_a_folder(path: Path) -> None:
    outside = path.parent.parent / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (path.parent / "inner").symlink_to(outside)
    path.symlink_to("inner/secret")


def link_out(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def make_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # a hole: it takes no room


UNSAFE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is a named pipe"),
    "socket": (make_socket, "is a socket"),
    "folder": (Path.mkdir, "is a folder"),
    "link to zeros": (lambda path: path.symlink_to("/dev/zero"), "is a link to /dev/zero, outside of "),
    "link to a terminal": (lambda path: path.symlink_to("/dev/ptmx"), "is a link to /dev/"),
    "link to a file": (link_out, "is a link to /etc/hostname, outside of "),
    "link upwards": (lambda path: path.symlink_to("../../secret"), "secret, outside of "),
    "link through a folder": (link_through_a_folder, "outside/secret, outside of "),
    "link to a pipe": (link_to_a_pipe, "is a named pipe"),
    "too large": (make_large, "at most"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    root = tmp_path / "runs" / "stranger"
    root.mkdir(parents=True)
    return root


@pytest.mark.parametrize("kind", UNSAFE)
def test_only_regular_files_below_the_folder_are_opened(folder: Path, kind: str) -> None:
    make, why = UNSAFE[kind]
    make(folder / "config.yaml")
    with pytest.raises(UnsafeFileError, match=why) as raised:
        read_text(folder / "config.yaml")
    assert str(folder / "config.yaml") in raised.value.message
    assert unsafe(folder / "config.yaml", largest=1 << 20) == raised.value.message or kind == "too large"
    assert [why] == [why for text in unreadable(folder) if why in text]


def test_links_inside_the_folder_and_named_files_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "a").write_text("one\n")
    (folder / "b").symlink_to("a")
    assert read_text(folder / "b") == "one\n"
    (tmp_path / "run").symlink_to(folder)
    assert read_text(tmp_path / "run" / "b") == "one\n"
    (folder / "c").symlink_to(tmp_path / "secret")
    assert read_text(folder / "c", root=ANYWHERE) == "secret"
    assert {Path(entry.path).name for entry in regular_files(folder, folder)} == {"a", "b"}
    with pytest.raises(UnsafeFileError, match="outside of"):
        check_files(folder, folder)
    with pytest.raises(FileNotFoundError):
        read_text(folder / "d")
    assert unsafe(folder / "d") == unsafe(folder / "a" / "d") == ""


def test_a_file_that_is_exchanged_while_it_is_opened_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """What was looked at is what is read, whatever its path leads to by then."""
    (folder / "a").write_text("inside")
    real = os.fstat

    def exchange(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        (folder / "a").unlink(missing_ok=True)
        (folder / "a").symlink_to(tmp_path / "secret")
        return found

    with mock.patch.object(os, "fstat", exchange):
        file = open_file(folder / "a")
    with file:
        assert file.read() == b"inside"


@given(st.lists(st.integers(0, 12)), st.booleans(), st.integers(1, 8))
def test_lines_are_those_of_the_file_without_long_ones(lengths: list[int], ended: bool, longest: int) -> None:
    lines = [b"x" * length + b"\n" for length in lengths]
    content = b"".join(lines) + (b"" if ended else b"half")
    with mock.patch.object(reading, "_PIECE", 3):
        found = [*whole_lines(io.BytesIO(content), longest)]
    assert [line.text or content[line.offset : line.offset + line.length] for line in found] == lines
    assert [not line.text for line in found] == [len(line) > longest for line in lines]


def test_a_line_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_SKIPPED", 4 << 20)
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.write(b'{"step": 1}\n')
        file.truncate(1 << 40)  # no more than a hole on the disk
    with open_file(tmp_path / "metrics.jsonl") as opened:
        lines = whole_lines(opened, 100)
        assert next(lines).text == b'{"step": 1}\n'
        with pytest.raises(UnsafeFileError, match="the line at byte 12 is too long"):
            next(lines)


def test_a_pipe_in_place_of_a_file_that_was_read_ends_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("one\n")
    lines = NewLines(path)
    begun: list[int] = []
    assert [*lines.read()] == [b"one\n"]
    path.unlink()
    os.mkfifo(path)
    assert [*lines.read(lambda: begun.append(1))] == []
    assert begun == [1]


FILES = [
    *("config.yaml", "summary.json", "metrics.jsonl", "trained.jsonl", "contract.jsonl", "timeline.json", "run.log"),
    *("trajectories/train.jsonl", "trajectories/train.index.jsonl"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = training_run(tmp_path_factory.mktemp("made") / "run", steps=2)
    (root / "run.log").write_text("a line\n")
    return root


@pytest.mark.parametrize("name", FILES)
def test_a_run_with_one_special_file_is_read_but_for_that(made: Path, tmp_path: Path, name: str) -> None:
    root = tmp_path / "run"
    shutil.copytree(made, root)
    assert [*unreadable(root)] == []
    for make in (os.mkfifo, link_out):
        (root / name).unlink()
        make(root / name)
        run = RunView(root, tmp_path / "cache")
        run.index.update()
        assert [problem.split(" is ")[0] for problem in run.problems] == [str(root / name)]
        assert (run.figures().steps == 2) is (name != "metrics.jsonl")
        assert (run.queries.count("train") > 0) is (name != "trajectories/train.jsonl")
        assert "hostname" not in f"{run.config} {run.summary} {run.contract} {run.metrics}"


def test_trajectories_that_are_a_folder_elsewhere_are_not_listed(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(made, root)
    (root / "trajectories").rename(tmp_path / "elsewhere")
    (root / "trajectories").symlink_to(tmp_path / "elsewhere")
    run = RunView(root, tmp_path / "cache")
    run.index.update()
    assert run.queries.count() == 0
    assert run.problems == [f"{root}/trajectories is a link to {tmp_path}/elsewhere, outside of {root}"]


def test_unreadable_folder_hides_no_other(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("good", "locked"):
        shutil.copytree(made, tmp_path / "runs" / name)
    stat = Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if "locked" in path.parent.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    runs = Runs(tmp_path / "runs", tmp_path / "cache")
    assert sorted(row.name for row in page_of(runs, Order()).rows) == ["good", "locked"]


@pytest.mark.parametrize("command", ["show", "show --format html", "show --follow", "trajectory"])
def test_commands_name_the_file(made: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "run"
    shutil.copytree(made, root)
    (root / "run.log").unlink()
    os.mkfifo(root / "run.log")
    assert main([*command.split(), str(root)]) == 2
    assert f"{root}/run.log is a named pipe, not a file" in capsys.readouterr().err


@pytest.mark.parametrize("make", [os.mkfifo, link_out])
def test_episodes_elsewhere(tmp_path: Path, make: Callable[[Path], object], capsys: pytest.CaptureFixture[str]) -> None:
    root, good = evaluation(tmp_path / "bad", tasks=2), evaluation(tmp_path / "good", tasks=2)
    (root / "trajectories" / "eval.jsonl").unlink()
    make(root / "trajectories" / "eval.jsonl")
    for command in (
        ["trajectory", str(root)],
        ["compare", str(good), str(root)],
        ["eval", "--rescore", str(root)],
        ["hacks", str(root)],
        ["export", "--format", "atif", str(root), str(tmp_path / "out")],
        ["eval", "--resume", "--out", str(root)],
    ):
        assert main(command) == 2, command
        assert "eval.jsonl is a" in capsys.readouterr().err
    assert not [*tmp_path.glob("out/*")]


def test_a_file_that_a_person_names_may_be_a_link(tmp_path: Path) -> None:
    root = evaluation(tmp_path / "run", tasks=2, epochs=1)
    (tmp_path / "link.jsonl").symlink_to(root / "trajectories" / "eval.jsonl")
    assert len([*read_trajectories(tmp_path / "link.jsonl")]) == 2
    assert main(["trajectory", str(tmp_path / "link.jsonl")]) == 0
