"""Run folders: names, resuming, one writer at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_env.errors import ForgeError, UsageError
from forge_env.run.folder import RunFolder, choose_folder


def made(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.create()
    folder.config.write_text("seed: 1\n")
    folder.release()
    return folder


def test_a_run_without_a_name_gets_a_new_one_each_time(tmp_path: Path) -> None:
    first = choose_folder(str(tmp_path), None, "recipe", resume=False)
    made(first.root)
    second = choose_folder(str(tmp_path), None, "recipe", resume=False)
    assert first.name.startswith("recipe-")
    assert first.root != second.root


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    made(tmp_path / "a")
    with pytest.raises(UsageError, match=r"exists already.*--resume"):
        choose_folder(str(tmp_path), "a", "recipe", resume=False)
    assert choose_folder(str(tmp_path), "a", "recipe", resume=True).root == tmp_path / "a"


def test_resuming_needs_a_run_that_is_there(tmp_path: Path) -> None:
    made(tmp_path / "a")
    with pytest.raises(UsageError, match=r"there is no run .*/b to resume \(newest in .*: a\)"):
        choose_folder(str(tmp_path), "b", "recipe", resume=True)
    with pytest.raises(UsageError, match="--name"):
        choose_folder(str(tmp_path), None, "recipe", resume=True)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_a_name_is_one_plain_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        choose_folder(str(tmp_path), name, "recipe", resume=False)


def test_only_one_process_writes_to_a_run(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "a")
    first.create()
    with pytest.raises(UsageError, match="another process"):
        second.create()
    first.release()
    second.create()
    second.release()


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ForgeError, match=r"can't create the folder.*output_dir"):
        RunFolder(tmp_path / "file" / "run").create()
