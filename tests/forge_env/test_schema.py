"""Versions of files: written first, read back, refused when newer."""

from __future__ import annotations

from typing import Any

import pytest

from forge_env.errors import UsageError
from forge_env.schema import with_schema, without_schema


def test_a_version_is_written_first_and_taken_off_again() -> None:
    stamped = with_schema({"steps": 3})
    assert list(stamped.items()) == [("schema", 1), ("steps", 3)]
    assert without_schema(stamped, "summary.json") == {"steps": 3}


def test_a_file_of_before_there_were_versions_is_read() -> None:
    assert without_schema({"steps": 3}, "summary.json") == {"steps": 3}


def test_a_newer_file_is_refused() -> None:
    with pytest.raises(UsageError, match=r"summary.json has version 2, this forge-env reads up to version 1 \(update"):
        without_schema({"schema": 2}, "summary.json")


@pytest.mark.parametrize("version", ["1", 0, True, None, 1.0])
def test_what_is_not_a_version_is_refused(version: Any) -> None:
    with pytest.raises(UsageError, match="is not a version"):
        without_schema({"schema": version}, "summary.json")
