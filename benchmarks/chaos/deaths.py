"""Chains of deaths at random moments: a process of a real run is killed, stopped or starved; the run heals or resumes.

A chain continues until training is complete. The run's files must then show that no group was trained twice or lost and
no episode counted twice; no process, shared memory, temporary file or container may remain.
"""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.chaos.runs import END_S, SHORT, START_S, STEP_S, SYNCHRONOUS, WATCHDOG_S, Death, Run, Scene
from forge_env.figures import duration

STARVE_S = 12.0
STEPS_A_DEATH = 3
SHAPES: list[dict[str, object]] = [
    {"generator.num_replicas": 2, "grpo.max_off_policy_steps": 1},
    SYNCHRONOUS,
    {"trainer.procs": 2, "trainer.threads": 1, "grpo.max_off_policy_steps": 2},
]
"""Settings of the chains, chosen at random; together they have every role."""
KINDS = ("killed", "stopped", "starved")
ASKED = {"interrupted": signal.SIGINT, "terminated": signal.SIGTERM, "hung up": signal.SIGHUP}
"""Signals by kind for ends requested by a user."""


class Chain(Scene):
    """A training run with random deaths, healed or resumed after each, and finally trained to completion.

    Args:
        seed: seed of all random choices.
        place: empty folder with a short name, the TMPDIR of the runs.
        cache: cache folder for models.
        count: number of deaths.
        engine: sandbox engine.
        only: "ROLE:KIND,...": deaths to cause, in turns; an empty part is chosen at random.
    """

    def __init__(self, seed: str, place: Path, cache: Path, count: int, engine: str, only: str) -> None:
        self.random = random.Random(seed)
        self.seed, self.count = seed, count
        self.only = [each.partition(":")[::2] for each in only.split(",")]
        settings: dict[str, object] = {
            **SHORT,
            **SHAPES[self.random.randrange(len(SHAPES))],
            "sandbox.engine": engine,
            "grpo.steps": STEPS_A_DEATH * (count + 1),
            "seed": self.random.randrange(100),
        }
        self.synchronous = settings["grpo.max_off_policy_steps"] == 0
        self.deaths: list[Death] = []
        super().__init__(place, cache, settings, [])

    def play(self) -> None:
        """Play the whole chain, and check everything that its runs left behind."""
        run = self.start()
        try:
            while len(self.deaths) < self.count and not self.problems and (when := self._moment(run)):
                self.deaths.append(self._kill_something(run, when))
                print(self.deaths[-1], flush=True)
                if self.deaths[-1].outcome == "done":
                    break
                if run.ended:
                    run = self.start(resume=(self.folder / "config.yaml").exists())
            self._finish(run)
        finally:
            self.close()
        ended = f"chain {self.seed}: {len(self.deaths)} deaths, {max(run.steps, default=0)} steps"
        print("\n   ! ".join([ended, *self.problems]), flush=True)

    # --- one death

    def _moment(self, run: Run) -> str | None:
        """Wait for a random moment of the run; return its phase, or None if the run has ended or makes no progress."""
        seconds = self.random.uniform(1.0, 15.0)
        if self.random.random() < 0.2 and not run.steps:
            run.poll(lambda: run.age >= seconds, seconds + 1)
            return None if run.ended else "start-up"
        wanted = len(run.steps) + self.random.randint(1, 2)
        if run.poll(lambda: run.steps, START_S) and run.steps:
            for death in self.deaths:
                if death.back_s is None:
                    death.back_s = time.monotonic() - death.at
            run.poll(lambda: len(run.steps) >= wanted, STEP_S)
        if len(run.steps) >= wanted:
            until = time.monotonic() + self.random.uniform(0.0, 2.0)
            run.poll(lambda: time.monotonic() >= until, 3.0)
            if not run.ended:
                return "training"
        if not run.ended or run.process.returncode:
            self.problems.append(f"a run trains no further, and nothing was done to it: {run.cause}\n{run.said[-400:]}")
        return None

    def _kill_something(self, run: Run, when: str) -> Death:
        roles = run.look()
        if self.synchronous:  # the death of a sandbox during a test would change the episode
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

        if run.poll(goes_on, STEP_S if when == "training" else START_S) and not run.ended:
            death.outcome = "survived" if death.noticed_s is None else "healed"
            death.back_s = time.monotonic() - death.at
        elif run.ended:
            death.noticed_s = time.monotonic() - death.at
            death.outcome = "done" if run.process.returncode == 0 else "resumed"
            self._look_at_the_end(run, death)
        else:
            death.outcome = "hung"
            death.problems += [run.hung(), *run.leave_nothing()]
        return death

    def _look_at_the_end(self, run: Run, death: Death) -> None:
        code, death.cause = run.process.returncode, run.cause
        death.problems += run.leave_nothing()
        if code == 0 or (death.role == "controller" and death.kind == "killed"):
            return
        assert death.noticed_s is not None
        watched = WATCHDOG_S if "no progress" in death.cause else 0.0
        if death.noticed_s > END_S + watched + (STARVE_S if death.kind == "starved" else 0.0):
            death.problems.append(f"its end took {duration(death.noticed_s)}")
        if code != (130 if death.kind in ASKED else 1):
            death.problems.append(f"it ended with code {code}: {run.said[-400:]}")
        early = run.last_line == "interrupted" and not run.log  # interrupted before the run began
        if "--resume" not in run.last_line and not early:
            death.problems.append(f"its last line does not say how to go on: {run.last_line}")
        if death.role != "controller" and death.role not in death.cause:
            death.problems.append(f"whose end it was is not said: {death.cause}")

    def _finish(self, run: Run) -> None:
        """Wait until the last run completes, and check it."""
        if not run.poll(lambda: not run.look() or run.ended, START_S + STEP_S, watch_end=False):
            self.problems.append(run.hung())
        if run.process.wait() != 0:
            self.problems.append(
                f"the last run ended with code {run.process.returncode}: {run.cause}\n{run.said[-600:]}"
            )
        else:
            now = time.monotonic()
            for death in self.deaths:
                if death.back_s is None and death.outcome != "done":
                    death.back_s = now - death.at  # upper bound
            self.check(run)
        self.problems += run.leave_nothing()


def hurt(victim: psutil.Process, kind: str, *, for_good: bool) -> None:
    """Disturb a process as named by `kind`; unless `for_good`, a stopped process resumes after `STARVE_S`."""
    with suppress(psutil.NoSuchProcess):
        if kind == "killed":
            victim.kill()
        elif kind == "stopped":
            victim.suspend()
            if not for_good:
                time.sleep(STARVE_S)
                victim.resume()
        elif kind == "starved":  # leaves a twentieth of the time to the process
            end = time.monotonic() + STARVE_S
            while time.monotonic() < end:
                victim.suspend()
                time.sleep(0.95)
                victim.resume()
                time.sleep(0.05)
        else:
            victim.send_signal(ASKED[kind])
