"""Container images, named by their content: an image that exists is never built again."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from forge_env.errors import SandboxUnavailableError
from sandboxes.images import rootfs

REPOSITORY = "forge-env"
BASE_IMAGE_VARIABLE = "FORGE_ENV_BASE_IMAGE"
BUNDLED = "python"
_HERE = Path(__file__).parent
_FOLDERS = {"work": 0o700, "work-judge": 0o700, "run/forge_env": 0o755, "tmp": 0o1777}


def image_tag(base_image: str | None) -> str:
    """The name of the bundled image over `base_image`, or over this machine's own Python."""
    digest = hashlib.sha256((base_image or rootfs.fingerprint()).encode())
    digest.update((_HERE / "Dockerfile").read_bytes())
    for path in rootfs.runner_files():
        digest.update(path.name.encode() + path.read_bytes())
    return f"{REPOSITORY}/{BUNDLED}:{digest.hexdigest()[:16]}"


def ensure_image(client: Any, image: str = BUNDLED, base_image: str | None = None) -> str:
    """The tag of `image` with the runner inside, built when missing. `client`: a `docker.DockerClient`.

    Args:
        client: the daemon to build on.
        image: `python` for the bundled image, or a reference that the daemon has or can pull.
        base_image: public base of the bundled image; by default $FORGE_ENV_BASE_IMAGE, else this machine's Python.
    """
    import docker.errors

    base = base_image or os.environ.get(BASE_IMAGE_VARIABLE) or None if image == BUNDLED else image
    tag = image_tag(base)
    try:
        client.images.get(tag)
        return tag
    except docker.errors.ImageNotFound:
        pass
    try:
        _build(client, base or _import_base(client), tag)
    except docker.errors.BuildError as error:
        raise SandboxUnavailableError(f"building {tag} over {base} failed: {error}") from error
    except docker.errors.APIError as error:
        raise SandboxUnavailableError(f"the Docker daemon could not build {tag}: {error.explanation}") from error
    return tag


def _import_base(client: Any) -> str:
    import docker.errors

    tag = f"{REPOSITORY}/base:{rootfs.fingerprint()}"
    try:
        client.images.get(tag)
    except docker.errors.ImageNotFound:
        root = rootfs.ensure_rootfs()
        repository, _, version = tag.partition(":")
        with tempfile.NamedTemporaryFile(prefix="forge-env-", suffix=".tar") as file:
            with tarfile.open(file.name, "w") as archive:
                archive.add(root, arcname=".", filter=_owned_by_root)
            client.api.import_image_from_file(file.name, repository=repository, tag=version)
    return tag


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _build(client: Any, base: str, tag: str) -> None:
    client.images.build(
        fileobj=io.BytesIO(_context()),
        custom_context=True,
        buildargs={"BASE_IMAGE": base},
        tag=tag,
        rm=True,
        forcerm=True,
    )


def _context() -> bytes:
    """The build context: Dockerfile, the runner, and the empty folders of the sandbox."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(_HERE / "Dockerfile", arcname="Dockerfile", filter=_owned_by_root)
        for path in rootfs.runner_files():
            archive.add(path, arcname=f"forge_env/runner/{path.name}", filter=_owned_by_root)
        for folder, mode in _FOLDERS.items():
            entry = tarfile.TarInfo(f"folders/{folder}")
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
    return buffer.getvalue()
