"""Ending containers, and removing those that dead owners left behind.

Containers are created to remove themselves. Asking the daemon to remove one that is being removed can leave a ghost in
its listing until the daemon restarts (seen with Docker 20.10), so running containers are only killed and waited for.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from docker.errors import APIError, NotFound
from requests import RequestException

from forge_env.errors import SandboxError
from forge_env.sandbox import RunningSandbox
from sandboxes import owner
from sandboxes.docker.daemon import DAEMON_ERRORS, FOLDER_PREFIX

GRACE_S = 3
REMOVAL_TIMEOUT_S = 20


def is_running(client: Any, container: str) -> bool:
    """Whether a container is running. Raises `SandboxError` if the daemon can't be reached."""
    try:
        return bool(client.api.inspect_container(container)["State"]["Running"])
    except NotFound:
        return False
    except DAEMON_ERRORS as error:
        raise SandboxError(f"the connection to the Docker daemon was lost: {error}") from error


def end_container(client: Any, container: str) -> bool:
    """Wait for the removal of a container whose runner is exiting; kill it if it does not exit in time.

    False: the daemon can't confirm the removal, so call `bury` later.
    """
    api = client.api
    try:
        try:
            api.wait(container, timeout=GRACE_S, condition="removed")
        except RequestException:  # it did not exit by itself, or the daemon does not answer
            api.kill(container)
            api.wait(container, timeout=REMOVAL_TIMEOUT_S, condition="removed")
    except NotFound:
        return True
    except DAEMON_ERRORS:
        return False
    return True


def bury(client: Any, container: str) -> bool:
    """Remove a container in any state, if it exists. Returns whether it is certainly gone."""
    try:
        if is_running(client, container):
            client.api.kill(container)
        else:
            client.api.remove_container(container, force=True)
    except NotFound:
        return True
    except (SandboxError, *DAEMON_ERRORS):
        pass  # being removed already, or the daemon is away: the check below decides
    try:
        client.api.inspect_container(container)
    except NotFound:
        return True
    except DAEMON_ERRORS:
        pass
    return False


def reap(client: Any) -> list[str]:
    """Remove every labelled container whose owner is certainly dead. Returns their ids."""
    removed = []
    for container in client.api.containers(all=True, filters={"label": owner.LABEL}):
        state = container["State"]
        if state == "removing" or not owner.is_dead(container["Labels"].get(owner.LABEL, "")):
            continue
        try:
            if state in ("running", "paused"):
                client.api.kill(container["Id"])
                client.api.wait(container["Id"], timeout=REMOVAL_TIMEOUT_S, condition="removed")
            else:
                client.api.remove_container(container["Id"], force=True)
        except APIError as error:
            if error.status_code not in (404, 409):  # removed already, or being removed
                raise
        removed.append(container["Id"])
    return removed


def remove_stale_folders() -> int:
    """Remove the socket folders of owners that died while starting a container. Returns their number."""
    removed = 0
    for base in {tempfile.gettempdir(), "/tmp"}:
        for folder in Path(base).glob(f"{FOLDER_PREFIX}*.*.*.*.*-*"):
            if owner.is_dead(folder.name.removeprefix(FOLDER_PREFIX).rpartition("-")[0]):
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
    return removed


def running(client: Any) -> list[RunningSandbox]:
    """All labelled containers of the daemon that are not being removed."""
    sandboxes = []
    for container in client.api.containers(all=True, filters={"label": owner.LABEL}):
        name = container["Labels"].get(owner.LABEL, "")
        if container["State"] == "removing":
            continue
        sandboxes.append(
            RunningSandbox(
                container["Id"][:12], container["Image"], owner.pid_of(name), owner.is_dead(name), container["Created"]
            )
        )
    return sandboxes
