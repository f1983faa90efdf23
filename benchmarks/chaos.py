"""What becomes of training when something dies: real runs, a random role killed, stopped or starved at a random moment.

    python -m benchmarks.chaos [--runs 50] [--seed 0] [--engine local] [--only ROLE:KIND] [--keep FOLDER] [--record]

Every run is `forge-env train` on a tiny recipe with all its real processes. It is let go on until something dies; then
it must heal, or end within a minute with the cause, and the next run must go on from there with `--resume`. A few runs
make a chain that is trained to its end, whose files must show that no group was trained twice or lost, and no episode
counted twice; no process, shared memory, temporary file or container may be left. `--seed` repeats a chain.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks.report import record, table

END_S = 60.0
"""A run that does not heal ends within this."""
WATCHDOG_S = 120.0
"""One that only the watchdog ends, within this more; a start on a busy machine takes more than a minute."""
GONE_S = 20.0
"""What is left of a run is gone within this after its end; Monarch's own processes take a while to notice."""
START_S = 240.0
"""The longest that a start may take on a busy machine."""
STEP_S = 180.0
"""The longest that a run may go without a step after a death, before it counts as hung."""
STARVE_S = 12.0
DEATHS_OF_A_CHAIN = 10
STEPS_A_DEATH = 3

SHORT = {
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
SHAPES: list[dict[str, object]] = [
    {"generator.num_replicas": 2, "grpo.max_off_policy_steps": 1},
    {
        "generator.num_replicas": 1,
        "grpo.max_off_policy_steps": 0,
        "grpo.reference.source": "initial",
        "evaluation.every": 0,  # whatever is sampled beside a group may change its last bit
    },
    {"trainer.procs": 2, "trainer.threads": 1, "grpo.max_off_policy_steps": 2},
]
"""Of the chains, in turns: together they have every role."""
KINDS = ("killed", "stopped", "starved")
ASKED = {"interrupted": signal.SIGINT, "terminated": signal.SIGTERM, "hung up": signal.SIGHUP}
"""Ends that somebody wants."""
NAMED = {"weights": "weight|store"}
"""What the cause of an end says of a role, where that is not its name."""
HOW = (
    "A process that is killed or stopped never comes back; one that is starved has a twentieth of the time for 12 s; "
    "the controller is stopped as long. Healed: the run went on; survived: nothing had to end; resumed: the run ended "
    "with the cause, and the next one went on. Seconds are the median: until the role had a new process or the run had "
    "ended, and until another step was trained. In the files of every chain of runs no group was trained twice or "
    "lost and no episode counted twice, and nothing was left behind. In synchronous chains nothing is done to "
    "sandboxes, and the final weights are those of an undisturbed run, to the bit."
)


@dataclass
class Death:
    """What was done to a run, and what came of it.

    Attributes:
        seed: of its chain.
        role: whose process.
        kind: of death.
        when: in which part of the run.
        outcome: "healed", "survived" (nothing ended), "resumed" (with the next run), "done" or "hung".
        noticed_s: seconds until the run ended, or the role had a new process.
        back_s: seconds until the next step was trained, in this run or the one that resumed it.
        cause: what the run said.
        at: when it was, in seconds of the monotonic clock.
        problems: what should not be.
    """

    seed: str
    role: str
    kind: str
    when: str
    outcome: str = ""
    noticed_s: float | None = None
    back_s: float | None = None
    cause: str = ""
    at: float = 0.0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        noticed, back = ("-" if value is None else f"{value:.1f} s" for value in (self.noticed_s, self.back_s))
        text = f"{self.seed} {self.role} {self.kind} in {self.when}: {self.outcome}, noticed {noticed}, back {back}"
        return "\n   ! ".join([f"{text}  {self.cause[:150]}", *self.problems])


class Run:
    """One `forge-env train`."""

    def __init__(self, place: Path, cache: Path, settings: dict[str, object], *, resume: bool) -> None:
        self.folder = place / "runs" / "chaos"
        self.output = place / "chaos.out"
        keys = [f"{key}={value}" for key, value in settings.items()]
        command = [sys.executable, "-m", "forge_env", "train", "coding_rlvr.yaml", "--name", "chaos", *keys]
        environment = {**os.environ, "FORGE_ENV_CACHE": str(cache), "TMPDIR": str(place)}
        self._log_from = self._log_size()
        self._rows_from = len(self._lines())
        with self.output.open("a") as output:
            self._said_from = output.tell()
            self.process = subprocess.Popen(
                [*command, "--resume"] if resume else command,
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self._started = time.monotonic()
        self.family: dict[int, psutil.Process] = {}

    # --- what it says

    def _log_size(self) -> int:
        log = self.folder / "run.log"
        return log.stat().st_size if log.exists() else 0

    @property
    def log(self) -> str:
        """What this run has logged."""
        with suppress(FileNotFoundError), (self.folder / "run.log").open("rb") as file:
            file.seek(self._log_from)
            return file.read().decode(errors="replace")
        return ""

    @property
    def said(self) -> str:
        """What it has shown."""
        return self.output.read_bytes()[self._said_from :].decode(errors="replace")

    def _lines(self) -> list[str]:
        with suppress(FileNotFoundError):
            return (self.folder / "metrics.jsonl").read_text().splitlines()
        return []

    @property
    def steps(self) -> list[int]:
        """The steps that this run has trained."""
        rows = [json.loads(line) for line in self._lines()[self._rows_from :] if line.endswith("}")]
        return [row["step"] for row in rows if "staleness/max" in row]

    @property
    def age(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._started

    @property
    def ended(self) -> bool:
        """Whether it has."""
        return self.process.poll() is not None

    # --- whom it consists of

    def look(self) -> dict[str, list[psutil.Process]]:
        """Its processes by role."""
        roles: dict[str, list[psutil.Process]] = {}
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            roles["controller"] = [own]
            for process in [own, *own.children(recursive=True)]:
                self.family[process.pid] = process
                with suppress(psutil.Error):
                    if process.ppid() == own.pid and (name := process.environ().get("HYPERACTOR_PROCESS_NAME")):
                        waits = "-spare" in name and f": process {process.pid}" not in self.log
                        role = "spare" if waits else re.split(r"[-\d]", name)[0]
                        roles.setdefault(role, []).append(process)
                    elif "runner" in " ".join(process.cmdline()[1:]):
                        roles.setdefault("sandbox", []).append(process)
        return roles

    def until(self, true: Callable[[], object], seconds: float, *, watch_end: bool = True) -> bool:
        """Wait for something of another program, which has no event to wait for; whether it came in time."""
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline or (watch_end and self.ended):
                return bool(true())
            time.sleep(0.1)
        return True

    def leave_nothing(self) -> list[str]:
        """What is left of it after its end."""
        _, left = psutil.wait_procs(list(self.family.values()), timeout=GONE_S)
        found = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        named = []
        for process in found:
            with suppress(psutil.Error):
                named.append(f"process {process.pid} left: {' '.join(process.cmdline())[:80]}")
                process.kill()
        return named


def shared_memory() -> set[str]:
    """What lies in shared memory, of whatever program."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def left_in_shared_memory(before: set[str]) -> set[str]:
    """What was not there `before`, and no living process has mapped."""
    used: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            used.update(int(found) for found in re.findall(r" (\d+) +/dev/shm/", maps.read_text()))
    names = set()
    for name in shared_memory() - before:
        with suppress(FileNotFoundError):
            if Path("/dev/shm", name).stat().st_ino not in used:
                names.add(name)
    return names


class Chain:
    """A training run that dies, heals or is resumed, and dies again, and is then trained to its end.

    Args:
        seed: of all that is random here.
        place: an empty folder with a short name, the TMPDIR of the runs.
        cache: of models.
        count: deaths.
        engine: of the sandboxes.
        only: "ROLE:KIND,...": what is done, in turns; what is left empty is drawn.
        until: in seconds of the monotonic clock; from then on nothing dies any more.
    """

    def __init__(
        self,
        seed: str,
        place: Path,
        cache: Path,
        count: int,
        engine: str = "local",
        only: str = "",
        until: float = math.inf,
    ) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.place = place
        self.cache = cache
        self.count = count
        self.until = until
        self.only = [each.partition(":")[::2] for each in only.split(",")]
        self.settings: dict[str, object] = {
            **SHORT,
            **SHAPES[self.random.randrange(len(SHAPES))],
            "sandbox.engine": engine,
            "grpo.steps": STEPS_A_DEATH * (count + 1),
            "seed": self.random.randrange(100),
        }
        self.deaths: list[Death] = []
        self.problems: list[str] = []
        """Of the chain as a whole."""
        self._shm = shared_memory()
        self._run: Run | None = None

    def play(self) -> None:
        """All of it; what is under way ends with it."""
        try:
            self._play()
        finally:
            if self._run is not None and not self._run.ended:
                self._run.process.kill()
                self._run.process.wait()

    def _play(self) -> None:
        run = self._start()
        while len(self.deaths) < self.count and time.monotonic() < self.until and not self.problems:
            if (when := self._moment(run)) is None:
                break
            death = self._kill_something(run, when)
            self.deaths.append(death)
            print(death, flush=True)
            if death.outcome == "done":
                break
            if run.ended:
                run = self._start()
        self._finish(run)

    @property
    def synchronous(self) -> bool:
        """Whether its weights can be foretold."""
        return self.settings["grpo.max_off_policy_steps"] == 0

    def _start(self) -> Run:
        begun = (self.place / "runs" / "chaos" / "config.yaml").exists()
        self._run = Run(self.place, self.cache, self.settings, resume=begun)
        return self._run

    # --- one death

    def _moment(self, run: Run) -> str | None:
        """Wait for a moment of the run; in words, or None: there is none, as it came to its end or never trains."""
        seconds = self.random.uniform(1.0, 15.0)
        if self.random.random() < 0.2 and not run.steps:
            run.until(lambda: run.age >= seconds, seconds + 1)
            return None if run.ended else "start-up"
        wanted = len(run.steps) + self.random.randint(1, 2)
        if run.until(lambda: run.steps, START_S) and run.steps:
            for death in self.deaths:
                if death.back_s is None:
                    death.back_s = time.monotonic() - death.at
            run.until(lambda: len(run.steps) >= wanted, STEP_S)
        if len(run.steps) >= wanted:
            until = time.monotonic() + self.random.uniform(0.0, 2.0)
            run.until(lambda: time.monotonic() >= until, 3.0)
            if not run.ended:
                return "training"
        if not run.ended or run.process.returncode:
            self.problems.append(f"a run trains no further, and nothing was done to it: {run.said[-400:]}")
        return None

    def _kill_something(self, run: Run, when: str) -> Death:
        roles = run.look()
        if self.synchronous:  # a sandbox that ends in the middle of a test makes it another episode
            roles.pop("sandbox", None)
        role = self.random.choice(sorted(roles))
        kind = self.random.choice([*KINDS, *ASKED] if role == "controller" else KINDS)
        wanted, how = self.only[len(self.deaths) % len(self.only)]
        role, kind = wanted if wanted in roles else role, how or kind
        victim = self.random.choice(roles[role])
        death = Death(self.seed, role, kind, when)
        trained, others = len(run.steps), {process.pid for process in roles[role]}
        death.at = time.monotonic()
        hurt(victim, death.kind, for_good=role != "controller")

        def goes_on() -> bool:
            watched = death.noticed_s is None and role not in ("controller", "sandbox")
            if watched and any(process.pid not in others for process in run.look().get(role, [])):
                death.noticed_s = time.monotonic() - death.at
            return len(run.steps) >= trained + 2

        if run.until(goes_on, STEP_S if when == "training" else START_S) and not run.ended:
            death.outcome = "survived" if death.noticed_s is None else "healed"
            death.back_s = time.monotonic() - death.at
        elif run.ended:
            death.noticed_s = time.monotonic() - death.at
            death.outcome = "done" if run.process.returncode == 0 else "resumed"
            self._look_at_the_end(run, death)
        else:
            death.outcome = "hung"
            death.problems.append(f"it hangs: {run.said[-300:]}\n{run.log[-4000:]}")
            run.process.kill()
            run.process.wait()
            death.problems += run.leave_nothing()
        return death

    def _look_at_the_end(self, run: Run, death: Death) -> None:
        code, said = run.process.returncode, [line for line in run.said.splitlines() if line.strip()] or [""]
        death.cause = next((line for line in reversed(said) if line.startswith("forge-env: ")), said[-1])
        death.problems += run.leave_nothing()
        if code == 0 or (death.role == "controller" and death.kind == "killed"):
            return
        assert death.noticed_s is not None
        watched = WATCHDOG_S if "no progress" in death.cause else 0.0
        if death.noticed_s > END_S + watched + (STARVE_S if death.kind == "starved" else 0.0):
            death.problems.append(f"its end took {death.noticed_s:.0f} s")
        if code != (130 if death.kind in ASKED else 1):
            death.problems.append(f"it ended with code {code}: {run.said[-400:]}")
        early = said[-1] == "interrupted" and not run.log  # nothing had begun
        if "--resume" not in said[-1] and not early:
            death.problems.append(f"its last line does not say how to go on: {said[-1]}")
        if death.role != "controller" and not re.search(NAMED.get(death.role, death.role), death.cause):
            death.problems.append(f"whose end it was is not said: {death.cause}")

    # --- the end of the chain

    def _finish(self, run: Run) -> None:
        """Let the last run come to its end, and look at what all have left."""
        if not run.until(lambda: not run.look() or run.ended, START_S + STEP_S, watch_end=False):
            self.problems.append(f"the last run hangs: {run.said[-300:]}\n{run.log[-4000:]}")
            run.process.kill()
        if run.process.wait() != 0:
            self.problems.append(f"the last run ended with code {run.process.returncode}: {run.said[-600:]}")
        else:
            now = time.monotonic()
            for death in self.deaths:
                if death.back_s is None and death.outcome != "done":
                    death.back_s = now - death.at  # at the latest
            self.problems += [*check_groups(run.folder), *check_counts(run.folder, self.settings)]
            self._compare(run)
        self.problems += run.leave_nothing()
        command = [sys.executable, "-m", "forge_env", "list"]
        environment = {**os.environ, "TMPDIR": str(self.place)}
        subprocess.run(command, check=True, capture_output=True, cwd=self.place, env=environment)
        if left := {path.name for path in self.place.iterdir()} - {"runs", run.output.name}:
            self.problems.append(f"temporary files left: {sorted(left)}")
        run.until(lambda: not left_in_shared_memory(self._shm), GONE_S, watch_end=False)
        if memory := left_in_shared_memory(self._shm):
            self.problems.append(f"shared memory left: {sorted(memory)}")
        ended = f"chain {self.seed}: {len(self.deaths)} deaths, {max(run.steps, default=0)} steps"
        print("\n   ! ".join([ended, *self.problems]), flush=True)

    def _compare(self, run: Run) -> None:
        """Of a synchronous chain, the final weights are those of a run in which nothing dies."""
        if not self.synchronous:
            return
        digest = final_weights(run)
        shutil.rmtree(run.folder)
        twin = Run(self.place, self.cache, self.settings, resume=False)
        if twin.process.wait() != 0:
            self.problems.append(f"the undisturbed run ended with code {twin.process.returncode}: {twin.said[-400:]}")
        elif final_weights(twin) != digest:
            self.problems.append("the final weights are not those of an undisturbed run")
        else:
            print(f"chain {self.seed}: the final weights are those of an undisturbed run, to the bit", flush=True)
        self.problems += twin.leave_nothing()


def final_weights(run: Run) -> str:
    """A digest of the newest checkpoint's weights."""
    newest = max((run.folder / "checkpoints").glob("step-*"))
    return hashlib.sha256((newest / "model" / "model.safetensors").read_bytes()).hexdigest()


def hurt(victim: psutil.Process, kind: str, *, for_good: bool) -> None:
    """Do to a process what `kind` says; one that is not stopped for good goes on after a while."""
    with suppress(psutil.NoSuchProcess):
        if kind == "killed":
            victim.kill()
        elif kind == "stopped":
            victim.suspend()
            if not for_good:
                time.sleep(STARVE_S)
                victim.resume()
        elif kind == "starved":  # a twentieth of the time is its own
            end = time.monotonic() + STARVE_S
            while time.monotonic() < end:
                victim.suspend()
                time.sleep(0.95)
                victim.resume()
                time.sleep(0.05)
        else:
            victim.send_signal(ASKED[kind])


# --- what the files of a run must show


def trained_groups(folder: Path) -> dict[int, list[int]]:
    """The groups of every step as they were trained in the end: of each step, the last time."""
    found: dict[int, list[int]] = {}
    for line in (folder / "run.log").read_text(errors="replace").splitlines():
        if match := re.search(r"step (\d+) trains groups \[([\d, ]*)\]", line):
            found[int(match[1])] = [int(number) for number in match[2].split(",")]
    return found


def check_groups(folder: Path) -> list[str]:
    """No group is trained twice or lost."""
    problems = []
    steps = trained_groups(folder)
    last = max(steps, default=0)
    if missing := set(range(1, last + 1)) - set(steps):
        problems.append(f"steps that were not trained: {sorted(missing)}")
    counts = Counter(number for groups in steps.values() for number in groups)
    if twice := [number for number, count in counts.items() if count > 1]:
        problems.append(f"groups trained twice: {sorted(twice)[:10]}")
    log = (folder / "run.log").read_text(errors="replace")
    given_up = {int(number) for number in re.findall(r"group (\d+) is (?:replaced|dropped)", log)}
    in_flight = max((len(groups) for groups in steps.values()), default=0) * 4
    expected = set(range(max(counts, default=0) + 1 - in_flight))
    if lost := expected - set(counts) - given_up:
        problems.append(f"groups lost: {sorted(lost)[:10]}")
    return problems


def check_counts(folder: Path, settings: dict[str, object]) -> list[str]:
    """Every episode that was rolled out in the end is counted once: those of trained groups, and of replaced ones."""
    summary = json.loads((folder / "summary.json").read_text())
    log = (folder / "run.log").read_text(errors="replace")
    trained = {number for groups in trained_groups(folder).values() for number in groups}
    replaced = {int(number) for number in re.findall(r"group (\d+) is replaced", log)} - trained
    expected = len(trained) * int(str(settings["grpo.group_size"]))
    counted = summary["episodes"] + summary["episodes_late"]
    if replaced or counted == expected:
        return []
    return [f"{counted} episodes are counted, {expected} were played for the groups that were trained"]


# --- all of it


def lines(deaths: list[Death]) -> list[str]:
    """The table of a record."""
    rows: dict[tuple[str, str], list[Death]] = {}
    for death in deaths:
        rows.setdefault((death.role, death.kind), []).append(death)

    def seconds(values: Iterable[float | None]) -> str:
        known = [value for value in values if value is not None]
        return f"{statistics.median(known):.1f} (at most {max(known):.1f})" if known else ""

    cells = []
    for (role, kind), each in sorted(rows.items()):
        outcomes = ", ".join(f"{name} {count}" for name, count in sorted(Counter(d.outcome for d in each).items()))
        noticed, back = (seconds(getattr(d, name) for d in each) for name in ("noticed_s", "back_s"))
        cells.append([role, kind, len(each), outcomes, noticed, back])
    return table(["role", "death", "runs", "outcome", "noticed after s", "next step after s"], cells)


def main() -> int:
    """Run as many as asked; 0 where all went as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="deaths")
    parser.add_argument("--seed", help="repeat the chain of this seed")
    parser.add_argument("--engine", default="local", help="of the sandboxes")
    parser.add_argument("--only", default="", metavar="ROLE:KIND,...", help="in turns; what is left empty is drawn")
    parser.add_argument("--cache", type=Path, help="of models; unset: they are made first")
    parser.add_argument("--keep", type=Path, help="folder of those chains that went wrong")
    parser.add_argument("--results", type=Path, help="file to which results are added; those in it count")
    parser.add_argument("--seconds", type=float, help="after this long nothing dies any more")
    parser.add_argument("--record", action="store_true", help="write the table to docs/benchmarks.md")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = Path(options.results).read_text().splitlines() if options.results and options.results.exists() else []
    deaths = [Death(**json.loads(line)) for line in results]
    until = time.monotonic() + (options.seconds or math.inf)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="fc-", dir="/tmp") as own_cache:
        while len(deaths) < options.runs and time.monotonic() < until:
            seed = options.seed or str(random.randrange(10**6))
            with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp", ignore_cleanup_errors=True) as place:
                count = min(DEATHS_OF_A_CHAIN, options.runs - len(deaths))
                cache = options.cache or Path(own_cache)
                chain = Chain(seed, Path(place), cache, count, options.engine, options.only, until)
                try:
                    chain.play()
                finally:
                    deaths += chain.deaths
                    if options.results:
                        with options.results.open("a") as file:
                            file.writelines(json.dumps(asdict(death)) + "\n" for death in chain.deaths)
                    if options.keep and (chain.problems or any(death.problems for death in chain.deaths)):
                        shutil.copytree(place, options.keep / f"chain-{seed}", dirs_exist_ok=True)
            wrong += bool(chain.problems)
            if options.seed:
                break
    print("\n".join(lines(deaths)))
    wrong += sum(bool(death.problems) for death in deaths)
    if options.record:
        how = [f"{len(deaths)} deaths at random moments; {wrong} went wrong. {HOW}"]
        record("chaos", "Deaths", "make chaos", [*lines(deaths), "", *how])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
