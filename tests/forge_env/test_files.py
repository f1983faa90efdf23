"""Files written whole, lines on a disk that runs full and read on, folders held by one process."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest

from forge_env.errors import UsageError
from forge_env.files import DiskFullError, HeldFolder, LineWriter, NewLines, claim, unused, write_whole, written_whole


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "warm"
    (tmp_path / "models" / "warm.999999999.partial").mkdir(parents=True)

    def fail() -> None:
        with written_whole(folder) as staging:
            staging.mkdir()
            (staging / "a").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list((tmp_path / "models").iterdir()) == []
    for text in ("first", "second"):
        with written_whole(folder) as staging:
            staging.mkdir()
            (staging / "a").write_text(text)
    assert (folder / "a").read_text() == "second"
    assert list((tmp_path / "models").iterdir()) == [folder]


def test_of_two_that_make_a_folder_at_once_the_second_leaves_it_to_those_who_read_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    with written_whole(folder, lambda other: (other / "a").is_file()) as second:
        second.mkdir()
        folder.mkdir()
        (folder / "a").write_text("first")
    assert (folder / "a").read_text() == "first"
    assert list(tmp_path.iterdir()) == [folder]


def test_of_two_that_claim_a_folder_at_once_each_gets_its_own(tmp_path: Path) -> None:
    wanted = [unused(tmp_path / "runs" / "recipe")] * 3
    assert len({claim(path) for path in wanted}) == 3
    assert {path.is_dir() for path in (tmp_path / "runs").iterdir()} == {True}


def test_a_file_has_its_old_content_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, "old")
    with suppress(OSError), written_whole(path) as staging:
        staging.write_text("ne")
        raise OSError(errno.ENOSPC, "no room")
    assert path.read_text() == "old"
    write_whole(path, b"new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("summary.json", "new")]


class Disk:
    """Writes until `room` bytes are used up."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, descriptor: int, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = os.write(descriptor, data[: self.room])
        self.room -= written
        return written


def test_lines_beyond_what_may_be_held_are_dropped_and_counted(tmp_path: Path) -> None:
    disk, told = Disk(3), []
    writer = LineWriter(tmp_path / "lines", most_held=8, on_full=lambda: told.append(1), write=disk)
    for line in (b"one", b"two", b"three", b"4"):
        writer.append(line)
    assert (writer.held, writer.dropped, bool(told)) == (2, 2, True)
    disk.room = 100
    writer.append(b"five")
    assert (tmp_path / "lines").read_text() == "one\ntwo\nfive\n"
    with pytest.raises(DiskFullError, match="2 records could not be written"):
        writer.close()


def test_several_writers_append_whole_lines_to_one_file_and_cut_off_what_a_killed_one_left(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with LineWriter(path) as one, LineWriter(path) as other:
        for number in range(50):
            one.append(b"a" * (10 + number))
            other.append(b"b" * (60 - number))
        with path.open("ab") as killed:
            killed.write(b"half a li")
        one.append(b"whole")
        other.append(b"again")
    lines = path.read_bytes().splitlines()
    assert len(lines) == 102
    assert lines[-2:] == [b"whole", b"again"]
    assert all(len(set(line)) == 1 for line in lines[:-2])


def test_a_file_that_grows_is_read_on_and_another_in_its_place_anew(tmp_path: Path) -> None:
    path, began = tmp_path / "lines", []
    lines = NewLines(path)

    def new() -> list[bytes]:
        return [*lines.read(lambda: began.append(True))]

    assert (new(), began) == ([], [])
    path.write_bytes(b"1\n2\nhal")
    assert (new(), len(began)) == ([b"1\n", b"2\n"], 1)
    assert new() == []
    with path.open("ab") as file:
        file.write(b"f\n")
    assert (new(), len(began)) == ([b"half\n"], 1)
    path.write_bytes(b"3\n")  # cut short
    assert (new(), len(began)) == ([b"3\n"], 2)
    path.rename(tmp_path / "other")
    path.write_bytes(b"4\n5\n")  # replaced by one that is longer
    assert (new(), len(began)) == ([b"4\n", b"5\n"], 3)
    path.unlink()
    assert ([new(), new()], len(began)) == ([[], []], 4)
    path.write_bytes(b"6\n")
    assert (new(), len(began)) == ([b"6\n"], 5)


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    taken = r"another process is writing to .*/a \(wait for it, or choose another"
    with HeldFolder(tmp_path / "a"), pytest.raises(UsageError, match=taken):
        HeldFolder(tmp_path / "a").hold()
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700, "other users could read it, and lock its files"
    with HeldFolder(tmp_path / "a"):
        pass


def test_an_unused_name_is_found(tmp_path: Path) -> None:
    first = unused(tmp_path / "run")
    first.mkdir()
    assert unused(tmp_path / "run") != first


def test_lines_are_held_while_a_disk_has_no_inode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "inner" / "lines.jsonl"
    full: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        writer = LineWriter(path, on_full=lambda: full.append(True))
        writer.append(b"1")
        assert (writer.held, writer.full, full) == (1, True, [True])
        never = LineWriter(tmp_path / "other.jsonl")
        never.append(b"1")
        with pytest.raises(DiskFullError, match="1 records could not be written"):
            never.close()
    writer.append(b"2")
    writer.close()
    assert path.read_bytes() == b"1\n2\n"
