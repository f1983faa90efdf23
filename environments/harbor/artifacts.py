"""What Harbor copies from the agent's environment to tests that have an environment of their own."""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from forge_env.sandbox.spec import is_below


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file, or a folder with everything in it."""

    path: str
    exclude: tuple[str, ...] = ()
    """Patterns of names and relative paths to leave out, as tar's `--exclude` reads them."""

    def holds(self, path: str) -> bool:
        """Whether it includes this path."""
        if not is_below(path, self.path):
            return False
        parts = path[len(self.path) :].strip("/").split("/")
        inner = ["/".join(parts[start:end]) for end in range(1, len(parts) + 1) for start in range(end)]
        return not any(fnmatchcase(name, pattern) for name in inner for pattern in self.exclude)


def only(archive: bytes, artifacts: Sequence[Artifact]) -> bytes:
    """Keep the artifacts of an archive of `Archives.pack`.

    Links out of their artifact are dropped: in the tests' sandbox they would point to files that aren't the agent's.
    """
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as given,
        tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as kept,
    ):
        for entry in given:
            path = posixpath.join("/", entry.name)
            for artifact in artifacts:
                if artifact.holds(path) and _stays(entry, path, artifact):
                    kept.addfile(entry, given.extractfile(entry) if entry.isreg() else None)
                    break
    return out.getvalue()


def _stays(entry: tarfile.TarInfo, path: str, artifact: Artifact) -> bool:
    if not (entry.issym() or entry.islnk()):
        return True
    if ".." in entry.linkname.lstrip("./").split("/"):  # `..` after a name, which may be a link to another folder
        return False
    start = posixpath.dirname(path) if entry.issym() else "/"
    return artifact.holds(posixpath.normpath(posixpath.join(start, entry.linkname)))
