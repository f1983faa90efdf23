"""Training runs started like a user's, and checks of the runs and the machine after their end."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from forge_env.figures import duration
from sandboxes import owner
from sandboxes.local import cgroups
from trainers.rehearsal.acceptance import Training

ROOT = Path(__file__).parents[2]
ASIDE = ("aside", "slow_disk.so")
"""Files that faults make beside the runs."""
END_S = 60.0
"""Limit for the end of a run that does not heal."""
WATCHDOG_S = 120.0
"""Additional limit if only the watchdog ends the run; a start on a busy machine takes more than a minute."""
GONE_S = 20.0
"""Limit for leftovers of a run to disappear after its end; Monarch's processes take a while to exit."""
START_S = 240.0
"""Limit for a start on a busy machine."""
STEP_S = 180.0
"""Limit without a trained step after a death, before the run counts as hung."""
SHORT: dict[str, object] = {
    "grpo.groups_per_step": 3,
    "grpo.group_size": 3,
    "evaluation.num_tasks": 4,
    "evaluation.extra_splits": "[]",
    "evaluation.every": 2,
    "checkpoint.every": 2,
    "logging.tensorboard": "false",
    "watchdog.warn_s": 60,
    "watchdog.end_s": WATCHDOG_S,
}
SYNCHRONOUS: dict[str, object] = {
    "generator.num_replicas": 1,
    "grpo.max_off_policy_steps": 0,
    "grpo.reference.source": "initial",
    "evaluation.every": 0,  # concurrent sampling may change the last bit of a group's log-probabilities
}
"""Settings that make a run reproducible bit for bit."""


@dataclass
class Death:
    """A disturbance of a run, and its result."""

    seed: str
    """Seed of its chain."""
    role: str
    kind: str
    when: str
    """Phase of the run."""
    outcome: str = ""
    """In a chain: "healed", "survived" (nothing ended), "resumed" (with the next run), "done" or "hung"."""
    noticed_s: float | None = None
    """Seconds until the run ended, or the role had a new process."""
    back_s: float | None = None
    """Seconds until the next step was trained, in this run or the one that resumed it."""
    cause: str = ""
    """Error shown by the run."""
    at: float = 0.0
    """Time of the disturbance, in seconds of the monotonic clock."""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        noticed, back = duration(self.noticed_s), duration(self.back_s)
        what = f"{self.seed} {self.role} {self.kind}{self.when and ' in '}{self.when}".strip()
        text = f"{what}: {self.outcome}, noticed {noticed}, back {back}"
        return "\n   ! ".join([f"{text}  {self.cause[:150]}", *self.problems])


class Run(Training):
    """One process of `forge-env train`.

    Args:
        place: working directory and TMPDIR; the run folder is `runs/chaos` below it.
        cache: cache folder for models.
        settings: keys of the recipe.
        resume: whether to resume the existing run.
        output: file below `place` to which the terminal's output is appended.
        prefix: words before the command.
        variables: environment variables added to those of this process.
    """

    def __init__(
        self,
        place: Path,
        cache: Path,
        settings: Mapping[str, object],
        *,
        resume: bool,
        output: str,
        prefix: Sequence[str],
        variables: Mapping[str, str],
    ) -> None:
        folder, self.output = place / "runs" / "chaos", place / output
        log = folder / "run.log"
        self._log_from = log.stat().st_size if log.exists() else 0
        self._said_from = self.output.stat().st_size if self.output.exists() else 0
        keys = [f"{key}={value}" for key, value in settings.items()]
        super().__init__(
            folder,
            ["coding_rlvr.yaml", "--name", "chaos", *keys, *["--resume"] * resume],
            self.output,
            prefix=prefix,
            variables={"FORGE_ENV_CACHE": str(cache), "TMPDIR": str(place), **variables},
            cwd=place,
            start_new_session=True,
        )
        self._started = time.monotonic()
        self.family: dict[int, psutil.Process] = {}
        self.owners: set[str] = set()
        """Owners of containers and control groups of this run."""

    # --- output

    @property
    def log(self) -> str:
        """Log of this run, without earlier runs in the same folder."""
        with suppress(FileNotFoundError), (self.folder / "run.log").open("rb") as file:
            file.seek(self._log_from)
            return file.read().decode(errors="replace")
        return ""

    @property
    def said(self) -> str:
        """Terminal output of this run."""
        return self.output.read_bytes()[self._said_from :].decode(errors="replace")

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    # --- processes

    def look(self) -> dict[str, list[psutil.Process]]:
        """Return the run's processes by role."""
        roles: dict[str, list[psutil.Process]] = {}
        with suppress(psutil.NoSuchProcess):
            controller = psutil.Process(self.process.pid)
            roles["controller"] = [controller]
            for process in [controller, *controller.children(recursive=True)]:
                self.family[process.pid] = process
                self.owners.add(owner.of_process(process.pid))
                with suppress(psutil.Error):
                    if process.ppid() == controller.pid and (name := process.environ().get("HYPERACTOR_PROCESS_NAME")):
                        is_spare = "-spare" in name and f": process {process.pid}" not in self.log
                        role = "spare" if is_spare else re.split(r"[-\d]", name)[0]
                        roles.setdefault(role, []).append(process)
                    elif "runner" in " ".join(process.cmdline()[1:]):
                        roles.setdefault("sandbox", []).append(process)
        return roles

    def poll(self, true: Callable[[], object], seconds: float, *, watch_end: bool = True, every: float = 0.1) -> bool:
        """Poll a condition of the run, which offers no event; return whether it became true in time."""
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline or (watch_end and self.ended):
                return bool(true())
            time.sleep(every)
        return True

    @property
    def last_line(self) -> str:
        """Last line of the terminal output that is not blank."""
        return next((line for line in reversed(self.said.splitlines()) if line.strip()), "")

    @property
    def cause(self) -> str:
        """Error shown by the run, or else its last line."""
        errors = [line for line in self.said.splitlines() if line.startswith("forge-env: ")]
        return errors[-1] if errors else self.last_line

    def hung(self) -> str:
        """Kill a run that takes too long; return its last output."""
        self.process.kill()
        self.process.wait()
        return f"it hangs: {self.said[-300:]}\n{self.log[-4000:]}"

    def leave_nothing(self) -> list[str]:
        """Kill processes that are left after the run's end; return a problem for each."""
        _, left = psutil.wait_procs(list(self.family.values()), timeout=GONE_S)
        problems = []
        for process in left:
            with suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    problems.append(f"process {process.pid} left: {' '.join(process.cmdline())[:80]}")
                    process.kill()
        return problems


def shared_memory() -> set[str]:
    """Return the names of files in shared memory, of any program; forge-env makes no folders there."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.is_file()}


def left_in_shared_memory(before: set[str]) -> set[str]:
    """Return the names that are not in `before` and that no living process has mapped."""
    used: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            used.update(int(inode) for inode in re.findall(r" (\d+) +/dev/shm/", maps.read_text()))
    names = set()
    for name in shared_memory() - before:
        with suppress(FileNotFoundError):
            if Path("/dev/shm", name).stat().st_ino not in used:
                names.add(name)
    return names


def left_over(place: Path, memory_before: set[str], *, expected: Sequence[str], owners: Collection[str]) -> list[str]:
    """Return leftovers of ended runs on the machine, after the next command has cleaned up.

    The command is repeated for GONE_S seconds while something is left: a control group can't be removed until the
    kernel has ended the last process in it.
    """
    environment = {**os.environ, "TMPDIR": str(place)}
    command = [sys.executable, "-m", "forge_env", "info"]
    deadline = time.monotonic() + GONE_S
    while True:
        subprocess.run(command, check=True, capture_output=True, cwd=place, env=environment)
        groups = {path.name for path in Path("/sys/fs/cgroup").glob(f"**/{cgroups.PREFIX}*")}
        mounts = Path("/proc/mounts").read_text().splitlines()
        left = {
            "temporary files": {path.name for path in place.iterdir()} - set(expected),
            "shared memory": left_in_shared_memory(memory_before),
            "control groups": {name for name in groups if any(one in name for one in owners)},
            "containers": containers() & set(owners),
            "mounts": {line.split()[1] for line in mounts if str(place) in line},
        }
        if not any(left.values()) or time.monotonic() > deadline:
            return [f"{what} left: {sorted(names)}" for what, names in left.items() if names]


def containers() -> set[str]:
    """Return the owners of this project's containers; empty without Docker."""
    if shutil.which("docker") is None:
        return set()
    words = ["docker", "ps", "-a", "--filter", f"label={owner.LABEL}", "--format", f'{{{{.Label "{owner.LABEL}"}}}}']
    return set(subprocess.run(words, check=False, capture_output=True, text=True).stdout.split())


def trained_groups(folder: Path) -> dict[int, list[int]]:
    """Return the groups trained in every step; for repeated steps, those of the last time."""
    result: dict[int, list[int]] = {}
    for line in (folder / "run.log").read_text(errors="replace").splitlines():
        if match := re.search(r"step (\d+) trains groups \[([\d, ]*)\]", line):
            result[int(match[1])] = [int(number) for number in match[2].split(",")]
    return result


def check_record(folder: Path, settings: Mapping[str, object]) -> list[str]:
    """Check that no group is trained twice or lost, and that every episode is counted once."""
    steps, problems = trained_groups(folder), []
    if missing := set(range(1, max(steps, default=0) + 1)) - set(steps):
        problems.append(f"steps that were not trained: {sorted(missing)}")
    counts = Counter(number for groups in steps.values() for number in groups)
    if twice := [number for number, count in counts.items() if count > 1]:
        problems.append(f"groups trained twice: {sorted(twice)[:10]}")
    log = (folder / "run.log").read_text(errors="replace")
    replaced = {int(number) for number in re.findall(r"group (\d+) was replaced", log)} - set(counts)
    in_flight = max((len(groups) for groups in steps.values()), default=0) * 4
    if lost := set(range(max(counts, default=0) + 1 - in_flight)) - set(counts) - replaced:
        problems.append(f"groups lost: {sorted(lost)[:10]}")
    summary = json.loads((folder / "summary.json").read_text())
    counted, played = (
        summary["episodes"] + summary["episodes_late"],
        len(counts) * int(str(settings["grpo.group_size"])),
    )
    if counted != played and not replaced:
        problems.append(f"{counted} episodes are counted, {played} were played for the groups that were trained")
    return problems


class Scene:
    """Runs of one folder, one after the other, and the requirements that they violated.

    Args:
        place: empty folder with a short name, the working directory and TMPDIR of the runs.
        cache: folder for models and the undisturbed run.
        settings: keys of the recipe.
        problems: receives the violated requirements.
    """

    def __init__(self, place: Path, cache: Path, settings: dict[str, object], problems: list[str]) -> None:
        self.place, self.cache, self.settings, self.problems = place, cache, settings, problems
        self.folder = place / "runs" / "chaos"
        self.variables = {"PYTHONPATH": str(ROOT)}
        self.prefix: tuple[str, ...] = ()
        self.runs: list[Run] = []
        self._memory = shared_memory()

    def start(self, *, resume: bool = False, output: str = "chaos.out", more: int = 0) -> Run:
        """Start or resume the run, with `more` steps than usual."""
        settings = {**self.settings, "grpo.steps": int(str(self.settings["grpo.steps"])) + more}
        run = Run(
            self.place,
            self.cache,
            settings,
            resume=resume,
            output=output,
            prefix=self.prefix,
            variables=self.variables,
        )
        self.runs.append(run)
        return run

    def expect(self, true: object, problem: str) -> None:
        """Record a problem unless `true`."""
        if not true:
            self.problems.append(problem)

    def undisturbed(self) -> Path:
        """Return the folder of a completed, undisturbed run with the same settings."""
        root = self.cache / f"undisturbed-{hashlib.sha256(repr(self.settings).encode()).hexdigest()[:16]}"
        if not (root / "runs" / "chaos" / "report.html").exists():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            twin = Scene(root, self.cache, self.settings, []).start()
            if twin.process.wait(START_S + STEP_S) or twin.leave_nothing():
                raise RuntimeError(f"the undisturbed run ended with code {twin.process.returncode}: {twin.said[-400:]}")
        return root / "runs" / "chaos"

    def check(self, run: Run) -> None:
        """Check that a completed run is like an undisturbed one."""
        self.problems += check_record(run.folder, self.settings)
        self.expect((run.folder / "report.html").exists(), "there is no report")
        if self.settings["grpo.max_off_policy_steps"] == 0:
            same = final_weights(run.folder) == final_weights(self.undisturbed())
            self.expect(same, "the final weights are not those of an undisturbed run")

    def close(self) -> None:
        """End runs that hang, and check what all of them have left behind."""
        for run in self.runs:
            if not run.ended:
                self.problems.append(run.hung())
                self.problems += run.leave_nothing()
        expected = ["runs", *ASIDE, *(run.output.name for run in self.runs)]
        owners = {name for run in self.runs for name in run.owners}
        self.problems += left_over(self.place, self._memory, expected=expected, owners=owners)


def final_weights(folder: Path) -> str:
    """Return a digest of the newest checkpoint's weights."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return hashlib.sha256((newest / "model" / "model.safetensors").read_bytes()).hexdigest()
