"""A run as its user starts it, for tests of what becomes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from forge_env.run.metrics import read_metrics

PATIENCE_S = 240.0


class Training:
    """`forge-env train` in a process of its own.

    Args:
        root: its run folder and its cache are below it.
        recipe: what to train.
        name: of the run.
        more: of the command line.
        variables: of its environment, besides this process's.
    """

    def __init__(
        self,
        root: Path,
        recipe: dict[str, Any],
        name: str = "run",
        *more: str,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = root / "runs" / name
        file = root / f"{name}.yaml"
        file.write_text(json.dumps(recipe))
        paths = [f"model.cache_dir={root / 'cache'}", f"output_dir={root / 'runs'}"]
        command = [sys.executable, "-m", "forge_env", "train", str(file), "--name", name, *more, *paths]
        self.output = (root / f"{name}.out").open("a+")
        self.process = subprocess.Popen(
            command, stdout=self.output, stderr=self.output, env={**os.environ, **(variables or {})}
        )

    def until(self, true: Callable[[], object]) -> None:
        """Wait for the run, which is another program: there is no event to wait for."""
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.1)

    @property
    def said(self) -> str:
        """Output and log, for whoever reads why a test failed."""
        self.output.seek(0)
        return f"{self.output.read()}\n{self.log}"

    @property
    def log(self) -> str:
        file = self.folder / "run.log"
        return file.read_text() if file.exists() else ""

    @property
    def steps(self) -> list[int]:
        """Training steps, in the order in which they were done."""
        file = self.folder / "metrics.jsonl"
        rows = read_metrics(file) if file.exists() else []
        return [int(row["step"]) for row in rows if "staleness/max" in row]

    def lives(self, role: str) -> list[int]:
        """A process of each life of an actor."""
        return [int(found) for found in re.findall(rf"\b{role}: process (\d+)", self.log)]

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
