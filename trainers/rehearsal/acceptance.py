"""Stages of a check of the real stack, and the training processes that they watch.

`forge-env rehearse --stack` and `make accept-gpu` use both.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from forge_env.errors import ForgeError

START_S = 600.0
"""Seconds until the first step of a run on a busy machine."""
STEP_S = 300.0
"""Seconds until a run's next step, also after a death."""
END_S = 90.0
"""Seconds that a run has to save and end."""
POLL_S = 0.1
_FAILURE = re.compile(r"^forge-env: (?P<message>.*)(?:\n  -> (?P<fix>.*))?$", re.MULTILINE)
"""The error that ended a command."""


@dataclass
class Stage:
    """Figures of a stage without a bound, and checks of figures with one."""

    figures: dict[str, float | str] = field(default_factory=dict)
    checks: list[tuple[str, float, str, float]] = field(default_factory=list)
    """Name, value, `<=` or `>=`, and bound of each check."""

    def at_most(self, name: str, value: float, bound: float) -> None:
        """Record a figure that must be at most `bound`; NaN fails."""
        self.checks.append((name, float(value), "<=", bound))

    def at_least(self, name: str, value: float, bound: float) -> None:
        """Record a figure that must be at least `bound`."""
        self.checks.append((name, float(value), ">=", bound))


def passed(check: Sequence[Any]) -> bool:
    """Whether a check's value is within its bound."""
    _, value, sign, bound = check
    return bool(value <= bound if sign == "<=" else value >= bound)


def failures(stage: Mapping[str, Any]) -> list[str]:
    """Reasons why a stage failed, as recorded in the results."""
    checks = [
        f"{name} is {value:.3g}, not {sign} {bound:g}"
        for name, value, sign, bound in stage["checks"]
        if not passed((name, value, sign, bound))
    ]
    code = [f"exit code {stage['code']}"] if stage["code"] != 0 else []
    return code + list(stage.get("errors", ())) + checks


def outcome(stage: Mapping[str, Any]) -> str:
    """PASS, FAIL with the reasons, or SKIPPED with the reason."""
    if failures(stage):
        return "FAIL: " + "; ".join(failures(stage))
    return f"SKIPPED: {stage['figures']['skipped']}" if "skipped" in stage["figures"] else "PASS"


class RunFailedError(ForgeError):
    """A watched run ended, or made no progress."""


class Training:
    """A `forge-env train` process.

    Args:
        folder: its run folder.
        arguments: of the command.
        output: file for its output; None: that of this process.
        prefix: words before the command.
        variables: environment variables added to those of this process.
        options: of `subprocess.Popen`.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        output: Path | None = None,
        *,
        prefix: Sequence[str] = (),
        variables: Mapping[str, str] = {},
        **options: Any,
    ) -> None:
        self.folder = folder
        self._output = output
        self._rows = len(self._metrics())
        command = [*prefix, sys.executable, "-m", "forge_env", "train", *arguments]
        unwanted = ("MODEL", "MIN_GPUS", "CONFIG_FILE")  # they would change the recipe
        environment = {name: value for name, value in os.environ.items() if name not in unwanted}
        with open(output or os.devnull, "ab") as file:
            stream = None if output is None else file
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**environment, **variables},
                **options,
            )

    # --- what the run has written

    def _metrics(self) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    @property
    def steps(self) -> list[int]:
        """Steps that this process has trained."""
        return [row["step"] for row in self._metrics()[self._rows :] if "staleness/max" in row]

    @property
    def log(self) -> str:
        """The log of the run."""
        with suppress(FileNotFoundError):
            return (self.folder / "run.log").read_text(encoding="utf-8", errors="replace")
        return ""

    @property
    def printed(self) -> str:
        """Output of the run if it goes to a file, otherwise empty."""
        return "" if self._output is None else self._output.read_text(encoding="utf-8", errors="replace")

    def lives(self, actor: str) -> list[int]:
        """Process ids of an actor, the newest last."""
        return [int(found) for found in re.findall(rf"\b{actor}: process (\d+)", self.log)]

    def process_of_generator(self) -> int:
        """Process id of the first generator: vLLM's engine process if there is one, else the actor."""
        actor = psutil.Process(self.lives("generator0")[-1])
        apart = [child for child in actor.children(recursive=True) if "EngineCore" in child.name()]
        return int((apart or [actor])[0].pid)

    def processes(self) -> list[psutil.Process]:
        """The controller and all processes below it."""
        with suppress(psutil.NoSuchProcess):
            controller = psutil.Process(self.process.pid)
            return [controller, *controller.children(recursive=True)]
        return []

    # --- waiting

    def until(self, true: Callable[[], object], seconds: float, what: str) -> None:
        """Wait for a change in the run's files, which announce none.

        Raises:
            RunFailedError: the run ended before, or it took too long.
        """
        deadline = time.monotonic() + seconds
        while not true():
            if self.process.poll() is not None and not true():
                raise self.failure(f"the run ended with exit code {self.process.returncode} before {what}")
            if time.monotonic() > deadline:
                raise self.failure(f"{what} did not come within {seconds:.0f} s")
            time.sleep(POLL_S)

    def until_step(self, step: int, seconds: float = STEP_S) -> None:
        """Wait until this process has trained a step."""
        self.until(lambda: max(self.steps, default=0) >= step, seconds, f"step {step}")

    def wait(self, seconds: float) -> int:
        """Wait for the end of the run; returns its exit code.

        Raises:
            RunFailedError: it takes too long.
        """
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise self.failure(f"the run did not end within {seconds:.0f} s") from None

    def interrupt(self) -> int:
        """End the run as Ctrl-C does, with a checkpoint; returns its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.wait(END_S)

    def failure(self, happened: str) -> RunFailedError:
        """An error with what happened and with the run's own message, if it has one."""
        errors = list(_FAILURE.finditer(self.printed))
        if not errors:
            warnings = [line.partition("warning: ")[2] for line in self.printed.splitlines() if "warning: " in line]
            cause = f"; the run's last warning: {warnings[-1]}" if warnings else ""
            return RunFailedError(happened + cause, fix=f"see {self.folder / 'run.log'}; a busy machine is slow")
        return RunFailedError(f"{happened}: {errors[-1]['message']}", fix=errors[-1]["fix"])

    @contextmanager
    def watched(self) -> Iterator[Training]:
        """Kill what is left of the run at the end of the block."""
        try:
            yield self
        finally:
            self.kill()

    def kill(self) -> None:
        """End the run and its processes: politely first, since that removes its sandboxes."""
        family = self.processes()
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=END_S / 3)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
