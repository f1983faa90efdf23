"""Instances in SWE-bench's file format, and the files of their repositories at a commit.

A row of the file is one instance, with SWE-bench's field names: `instance_id`, `repo`, `base_commit`,
`problem_statement`, `patch`, `test_patch`, `FAIL_TO_PASS`, `PASS_TO_PASS` (https://www.swebench.com).
"""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from forge_env.errors import UsageError
from forge_env.machine import user_path
from forge_env.tasks.datasets import READERS, check_unique, from_text, jsonl_rows

_SOURCE = re.compile(r"^--- (?:a/)?([^\t\r\n]+)", re.MULTILINE)
_TARGET = re.compile(r"^\+\+\+ (?:b/)?([^\t\r\n]+)", re.MULTILINE)


def _names(value: Any) -> Any:
    """Parse a list of tests, which is text in JSON in SWE-bench's files, and in Python in others; null is empty."""
    return from_text(value) or []


def parts_of(test_id: str) -> list[str]:
    """Path, classes and function of a test's id, without the parameters in brackets, which may contain `::`."""
    return test_id.partition("[")[0].split("::")


Names = Annotated[list[str], BeforeValidator(_names)]


class Instance(BaseModel):
    """One instance; unused fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    instance_id: str
    repo: str
    """`owner/name`."""
    base_commit: str = Field(pattern="^[^-]")
    """Commit of the repository; Git would take a leading `-` for an option."""
    problem_statement: str = Field(min_length=1)
    patch: str
    """Patch that solves the issue."""
    test_patch: str
    """Patch that adds the tests."""
    fail_to_pass: Names = Field(validation_alias=AliasChoices("FAIL_TO_PASS", "fail_to_pass"), min_length=1)
    """Tests that fail before the patch and pass after it, as `path::name` or `path::Class::name`."""
    pass_to_pass: Names = Field(validation_alias=AliasChoices("PASS_TO_PASS", "pass_to_pass"), default_factory=list)
    """Tests that pass before and after the patch."""

    @property
    def cut_ids(self) -> list[str]:
        """Ambiguous test ids: truncated at a space in the parameters (`test_a[two` of `test_a[two b]`)."""
        return [name for name in self.tests if "[" in name and not name.endswith("]")]

    @property
    def tests(self) -> list[str]:
        """All tests that must pass after the patch."""
        return [*self.fail_to_pass, *self.pass_to_pass]

    @property
    def test_paths(self) -> list[str]:
        """Files with these tests, and files that the test patch writes."""
        return sorted({parts_of(name)[0] for name in self.tests} | set(_TARGET.findall(self.test_patch)))

    @property
    def patched_paths(self) -> set[str]:
        """The files that the solution changes, adds or removes."""
        return {*_SOURCE.findall(self.patch), *_TARGET.findall(self.patch)}


@lru_cache(maxsize=16)
def read_instances(path: str) -> tuple[Instance, ...]:
    """Read the instances of a JSONL, JSON, CSV or Parquet file.

    Raises:
        UsageError: the file can't be read, or a line is invalid; the message names the line.
    """
    instances = []
    for number, row in _rows(path):
        try:
            instances.append(Instance.model_validate(row))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise UsageError(f"{path}, line {number}: {field}: {first['msg']}", fix="use SWE-bench's fields") from error
    ids = ((each.instance_id, number) for number, each in enumerate(instances, 1))
    check_unique(ids, path, "instance", "remove all but one of them")
    if not instances:
        raise UsageError(f"no instance in {path}", fix="write a row for each instance, with SWE-bench's fields")
    return tuple(instances)


def _rows(path: str) -> list[tuple[int, Mapping[str, Any]]]:
    file = user_path(path)
    try:
        if file.suffix in (".csv", ".json", ".parquet"):
            return list(enumerate(READERS[file.suffix](file), start=1))
        return list(jsonl_rows(file))
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error}", fix="name a JSONL, JSON, CSV or Parquet file") from error


@lru_cache(maxsize=64)
def files_at(repository: str, commit: str, *patches: str) -> dict[str, bytes]:
    """The regular files of a Git repository at a commit, by path, after patches.

    Raises:
        UsageError: there is no such repository or commit, or a patch does not apply.
    """
    archived = subprocess.run(["git", "-C", repository, "archive", commit], capture_output=True, check=False)
    if archived.returncode:
        message = archived.stderr.decode(errors="replace").strip()
        raise UsageError(f"{repository} has no commit {commit}: {message}", fix="clone it there, with its history")
    with tempfile.TemporaryDirectory(prefix="forge-env-") as folder:
        with tarfile.open(fileobj=BytesIO(archived.stdout)) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # missing before Python 3.11.4
            archive.extractall(folder)
        for patch in filter(None, patches):
            command = ["git", "apply", "--whitespace=nowarn", "-"]
            alone = {**os.environ, "GIT_CEILING_DIRECTORIES": os.path.dirname(folder)}  # ignore outer repositories
            done = subprocess.run(
                command, cwd=folder, env=alone, input=patch.encode(), capture_output=True, check=False
            )
            if done.returncode:
                message = done.stderr.decode(errors="replace").strip()
                raise UsageError(f"a patch does not apply to {repository} at {commit}: {message}")
        paths = [path for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(paths)}
