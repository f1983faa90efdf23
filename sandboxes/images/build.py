"""Container images with tags derived from their content, so that an existing image is never rebuilt."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from docker.errors import APIError, BuildError, ContainerError, ImageNotFound

from forge_env.errors import ImageError, SandboxUnavailableError, UsageError
from forge_env.sandbox.dockerfile import with_base
from sandboxes.images import BUNDLED, cache, packages, rootfs

REPOSITORY = "forge-env"
PUBLIC_BASE = "python:3.12-slim"
"""Base of the bundled image on machines that aren't Linux, and whose own Python can't run in it."""
BASE_IMAGE_VARIABLE = "FORGE_ENV_BASE_IMAGE"
_CONFLICT = 409
_HERE = Path(__file__).parent
_FOLDERS = {"work": 0o700, "work-judge": 0o700, "run/forge_env": 0o755, "tmp": 0o1777}


def chosen_base(base_image: str | None) -> str | None:
    """The base of the bundled image: `base_image`, else $FORGE_ENV_BASE_IMAGE; None for this machine's Python."""
    return base_image or os.environ.get(BASE_IMAGE_VARIABLE) or (None if sys.platform == "linux" else PUBLIC_BASE)


def image_tag(base_image: str | None) -> str:
    """The tag of the bundled image on top of `base_image`, or of this machine's own Python."""
    digest = hashlib.sha256((base_image or rootfs.fingerprint()).encode())
    digest.update((_HERE / "Dockerfile").read_bytes())
    for path in cache.runner_files():
        digest.update(path.name.encode() + path.read_bytes())
    return f"{REPOSITORY}/{BUNDLED}:{digest.hexdigest()[:16]}"


def ensure_image(client: Any, image: str = BUNDLED, base_image: str | None = None, instead: str = "") -> str:
    """Build `image` with the runner inside, if missing, and return its tag. `client` is a `docker.DockerClient`.

    Args:
        client: the daemon to build on.
        image: `python` for the bundled image, a folder with a Dockerfile, or a reference that the daemon has or can
            pull. Python 3.9 or newer must be inside; a Dockerfile may say `ARG BASE_IMAGE`, `FROM ${BASE_IMAGE}`.
        base_image: public base of the bundled image; by default $FORGE_ENV_BASE_IMAGE, else this machine's Python.
        instead: image that replaces those named by `FROM` in a folder's Dockerfile, see `SandboxSpec.base`.
    """
    if instead and not os.path.isdir(image):
        raise UsageError(f"image {image!r} has no Dockerfile, so base={instead!r} has no effect", fix="leave base out")
    if image == BUNDLED:
        base = chosen_base(base_image)
    elif os.path.isdir(image):
        base = _ensure_folder_image(client, Path(image), base_image, instead)
    elif image.startswith(("/", "./", "../", "~")):
        raise UsageError(f"there is no folder {image}", fix="name a folder with a Dockerfile, or an image")
    else:
        base = image
    tag = image_tag(base)
    if not _exists(client, tag):
        with _building(client, base or _import_base(client), tag) as archive:
            archive.add(_HERE / "Dockerfile", arcname="Dockerfile", filter=_owned_by_root)
            for path in cache.runner_files():
                archive.add(path, arcname=f"forge_env/{cache.RUNNER_PACKAGE}/{path.name}", filter=_owned_by_root)
            for folder, mode in _FOLDERS.items():
                entry = tarfile.TarInfo(f"folders/{folder}")
                entry.type, entry.mode = tarfile.DIRTYPE, mode
                archive.addfile(entry)
    return tag


def ensure_packages(client: Any, image: str, wanted: Sequence[str]) -> str:
    """Add packages to `image`, if missing, and return the tag. Raises `UsageError` and `SandboxUnavailableError`."""
    digest = hashlib.sha256(f"{image}\n{packages.asked(wanted)}".encode()).hexdigest()[:16]
    tag = f"{REPOSITORY}/packages:{digest}"
    if not _exists(client, tag):
        python = _python_in(client, image)
        layer = packages.ensure_layer(wanted, python)
        lines = f"FROM {image}\nCOPY site/ {python.site}/\nCOPY bin/ {python.scripts}/\n".encode()
        with _building(client, image, tag) as archive:
            _add_dockerfile(archive, lines)
            for name in ("site", "bin"):
                archive.add(layer / name, arcname=name, filter=_owned_by_root)
    return tag


_ASK = (
    "import json, platform, sys, sysconfig; print(json.dumps(['%d.%d' % sys.version_info[:2], platform.machine(),"
    " ' '.join(platform.libc_ver()), sysconfig.get_path('purelib'), sysconfig.get_path('scripts'), sys.executable]))"
)


def _python_in(client: Any, image: str) -> packages.Python:
    try:
        answer = client.containers.run(image, ["python3", "-c", _ASK], remove=True, network_mode="none", user="65534")
    except (APIError, ContainerError) as error:
        raise SandboxUnavailableError(f"the Python of image {image} does not answer: {error}") from error
    return packages.Python(*json.loads(answer))


def _exists(client: Any, tag: str) -> bool:
    try:
        client.images.get(tag)
    except ImageNotFound:
        return False
    return True


def ensure_seeds(client: Any, image: str, writable: Sequence[str]) -> str:
    """Add archives of the writable folders' contents to `image` (from `ensure_image`), if missing. Returns the tag."""
    program = f"from {cache.RUNNER_PACKAGE} import archives; archives.seed({list(writable)!r})"
    lines = f"FROM {image}\nUSER 0\nRUN {json.dumps(['python3', '-s', '-c', program])}\n".encode()
    tag = f"{REPOSITORY}/writable:{hashlib.sha256(lines).hexdigest()[:16]}"
    if not _exists(client, tag):
        with _building(client, image, tag) as archive:
            _add_dockerfile(archive, lines)
    return tag


def _ensure_folder_image(client: Any, folder: Path, base_image: str | None, instead: str) -> str:
    """Build an image from a user's Dockerfile, tagged by a hash of everything in its folder."""
    if not (folder / "Dockerfile").is_file():
        raise UsageError(f"no Dockerfile in {folder}", fix="name a folder that has one, or an image")
    base = chosen_base(base_image) or _import_base(client)
    dockerfile = (folder / "Dockerfile").read_bytes()
    if instead:
        text = dockerfile.decode(errors="surrogateescape")
        dockerfile = with_base(text, base if instead == BUNDLED else instead).encode(errors="surrogateescape")
    digest = hashlib.sha256(base.encode() + (dockerfile if instead else b""))
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = f"{path.relative_to(folder)} {path.stat().st_mode}\n"
            digest.update(name.encode(errors="surrogateescape") + path.read_bytes())
    tag = f"{REPOSITORY}/user:{digest.hexdigest()[:16]}"
    if not _exists(client, tag):
        with _building(client, base, tag) as archive:
            archive.add(folder, arcname=".", filter=_owned_by_root)
            _add_dockerfile(archive, dockerfile)  # the last entry of a name wins
    return tag


def _add_dockerfile(archive: tarfile.TarFile, data: bytes) -> None:
    entry = tarfile.TarInfo("Dockerfile")
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def images_kept(client: Any) -> str:
    """Summary of this project's images on a daemon, for display."""
    images = client.images.list(name=f"{REPOSITORY}/*")
    largest = max((image.attrs["Size"] for image in images), default=0) >> 20
    return f"{len(images)} images {REPOSITORY}/*, the largest of {largest:,} MiB; they share layers"


def prune_images(client: Any) -> list[str]:
    """Remove images built for other versions of this project or of the machine's Python, or for users' Dockerfiles.

    Images used by a container stay. Returns the removed tags; a removed image is rebuilt when needed again.
    """
    current = {image_tag(None), f"{REPOSITORY}/base:{rootfs.fingerprint()}"}
    if base := chosen_base(None):
        current.add(image_tag(base))
    removed = []
    for image in client.images.list(name=f"{REPOSITORY}/*"):
        for tag in set(image.tags) - current:
            try:
                client.images.remove(tag)
            except ImageNotFound:
                continue
            except APIError as error:
                if error.status_code != _CONFLICT:  # a container uses it
                    raise
            else:
                removed.append(tag)
    return sorted(removed)


def _import_base(client: Any) -> str:
    tag = f"{REPOSITORY}/base:{rootfs.fingerprint()}"
    if not _exists(client, tag):
        root = cache.ensure_rootfs()
        repository, _, version = tag.partition(":")
        with tempfile.NamedTemporaryFile(prefix="forge-env-", suffix=".tar") as file:
            with tarfile.open(file.name, "w") as archive:
                archive.add(root, arcname=".", filter=_owned_by_root)
            answer = str(client.api.import_image_from_file(file.name, repository=repository, tag=version))
        if imported := re.search("sha256:[0-9a-f]{64}|[0-9a-f]{64}", answer):
            client.api.tag(imported.group(), repository, version)  # Podman's import loses the tag
    return tag


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


@contextlib.contextmanager
def _building(client: Any, base: str, tag: str) -> Iterator[tarfile.TarFile]:
    """Build an image from the files that the caller adds to the archive, the build context."""
    with tempfile.TemporaryFile() as context:  # folders may be larger than memory
        with tarfile.open(fileobj=context, mode="w") as archive:
            yield archive
        context.seek(0)
        options = {"custom_context": True, "buildargs": {"BASE_IMAGE": base}, "rm": True, "forcerm": True}
        try:
            client.images.build(fileobj=context, tag=tag, **options)
        except BuildError as error:
            log = "".join(entry.get("stream", "") for entry in error.build_log)
            step, output = _last_step(log)
            fix = "name a local image in SandboxSpec(base=...)" if step.startswith("FROM ") else None
            raise ImageError(f"an image could not be built: `{step}`: {error}{output}", fix=fix) from error
        except APIError as error:
            raise SandboxUnavailableError(f"the Docker daemon could not build {tag}: {error.explanation}") from error


def _last_step(log: str) -> tuple[str, str]:
    """The last Dockerfile line that a build reached, and the last output of its program."""
    *_, last = re.split(r"^Step \d+/\d+ : ", log, flags=re.MULTILINE)
    step, *lines = re.sub(r"\x1b\[[\d;]*m", "", last).splitlines() or ["its first line"]
    output = [line for line in lines if line.strip() and not line.startswith((" --->", "Removing intermediate"))]
    return step, f": {' '.join(output)[-500:]}" if output and not step.startswith("FROM ") else ""
