"""Removing the containers that dead owners left."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from forge_env.sandbox import RunningSandbox
from sandboxes import owner

FOLDER_PREFIX = "forge-env-"


def reap(client: Any) -> list[str]:
    """Remove every labelled container whose owner is certainly dead. Returns their ids."""
    import docker.errors

    removed = []
    for container in client.api.containers(all=True, filters={"label": owner.LABEL}):
        if owner.is_dead(container["Labels"].get(owner.LABEL, "")):
            try:
                client.api.remove_container(container["Id"], force=True)
            except docker.errors.APIError as error:
                if error.status_code not in (404, 409):  # gone already, or on its way
                    raise
            removed.append(container["Id"])
    return removed


def remove_stale_folders() -> int:
    """Remove the socket folders of owners that died while a container was starting. Returns how many."""
    removed = 0
    for base in {tempfile.gettempdir(), "/tmp"}:
        for folder in Path(base).glob(f"{FOLDER_PREFIX}*.*.*.*.*-*"):
            if owner.is_dead(folder.name.removeprefix(FOLDER_PREFIX).rpartition("-")[0]):
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
    return removed


def running(client: Any) -> list[RunningSandbox]:
    """Every labelled container of the daemon."""
    found = []
    for container in client.api.containers(all=True, filters={"label": owner.LABEL}):
        name = container["Labels"].get(owner.LABEL, "")
        found.append(
            RunningSandbox(
                container["Id"][:12], container["Image"], owner.pid_of(name), owner.is_dead(name), container["Created"]
            )
        )
    return found
