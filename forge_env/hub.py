"""Uploads to the Hugging Face hub, or to another server with its API (HF_ENDPOINT)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from forge_env.errors import ForgeError, UsageError

HUB = "hub:"
"""Prefix of a target on the hub: `hub:OWNER/NAME`."""
Kind = Literal["model", "dataset", "space"]


def repository_of(target: str) -> str | None:
    """Return OWNER/NAME of a target on the hub, or None if the target is a path."""
    if not target.startswith(HUB):
        return None
    name = target.removeprefix(HUB)
    owner, _, repository = name.partition("/")
    if not owner or not repository or "/" in repository:
        raise UsageError(f"{target!r} names no repository of the hub", fix=f"{HUB}OWNER/NAME")
    return name


def upload(folder: Path, repository: str, kind: Kind, *, message: str, public: bool = False) -> str:
    """Upload a folder as one commit; return the address of the repository.

    Args:
        repository: OWNER/NAME; created if it doesn't exist.
        public: whether a new repository is public, and an existing one may be.

    Raises:
        UsageError: the package huggingface_hub is missing, or the repository is public.
        ForgeError: the hub refused it, or can't be reached.
    """
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError as error:
        fix = 'pip install "forge-env[data]"'
        raise UsageError("the hub needs the package huggingface_hub", fix=fix) from error
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="forge-env")
    try:
        made = api.create_repo(
            repository,
            repo_type=kind,
            private=not public,
            exist_ok=True,
            space_sdk="docker" if kind == "space" else None,
        )
        refused = not public and not api.repo_info(repository, repo_type=kind).private
        if not refused:
            api.upload_folder(repo_id=repository, repo_type=kind, folder_path=folder, commit_message=message)
    except Exception as error:  # the library raises errors of its own and of whatever transport it has
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fix = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
        raise ForgeError(f"{repository} can't be uploaded to {api.endpoint}: {why}", fix=fix) from error
    if refused:
        raise UsageError(f"{repository} is public", fix="name a private repository, or add --public")
    return str(made)
