"""Names and pruning of images, with a daemon that is only a list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest

from sandboxes.images import build, rootfs


class FakeImages:
    def __init__(self, tags: list[str], used: set[str]) -> None:
        self.tags, self.used = tags, used

    def list(self, name: str) -> list[Any]:
        assert name == "forge-env/*"
        return [SimpleNamespace(tags=[tag]) for tag in self.tags]

    def remove(self, tag: str) -> None:
        if tag in self.used:
            raise docker.errors.APIError("in use", SimpleNamespace(status_code=409))
        self.tags.remove(tag)


def test_only_what_nobody_needs_is_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.BASE_IMAGE_VARIABLE, "python:3.12-slim")
    current = [build.image_tag(None), build.image_tag("python:3.12-slim"), f"forge-env/base:{rootfs.fingerprint()}"]
    old = ["forge-env/python:0000", "forge-env/base:0000", "forge-env/user:0000"]
    images = FakeImages([*current, *old, "forge-env/python:1111"], used={"forge-env/python:1111"})
    assert build.prune_images(SimpleNamespace(images=images)) == sorted(old)
    assert images.tags == [*current, "forge-env/python:1111"]


def test_names_follow_content() -> None:
    assert build.image_tag(None) == build.image_tag(None) != build.image_tag("python:3.12-slim")
