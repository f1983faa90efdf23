"""Test training under process deaths, exhausted resources and other faults, in real runs with all their processes.

python -m benchmarks chaos [--runs 60] [--faults all|none|NAME,...] [--seed 0] [--only ROLE:KIND] [--record]

Every run is `forge-env train` on a tiny recipe. First each fault is played once (`faults.py`: an action at a chosen
moment), then chains of deaths at random moments (`deaths.py`) until there are `--runs` results. A run must heal, or end
within a minute with the cause, a fix and the correct exit code; `--resume` must then continue it, for a synchronous run
to the same weights as without the disturbance; and nothing may be left behind. `--seed` repeats a chain.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.chaos.deaths import Chain
from benchmarks.chaos.faults import FAULTS, NotPossibleError, play
from benchmarks.chaos.runs import Death
from benchmarks.frame import record, table

DEATHS_OF_A_CHAIN = 10
DEATHS = (
    "Killed or stopped processes never come back, except a stopped controller, which resumes after 12 s. Starved "
    "processes get a twentieth of the CPU for 12 s. Healed: the run continued. Survived: no process had to be "
    "replaced. Resumed: the run ended and named the cause, and the next run continued it. Seconds are medians: until "
    "the role had a new process or the run ended, and until the next step was trained. No group was trained twice or "
    "lost, no episode was counted twice, and nothing was left behind. Synchronous runs end with exactly the weights of "
    "an undisturbed run."
)
MINIATURE = (
    "A miniature run has the command, run folder, checkpoints, records, summary and report of any run. Its trainer "
    "(`tests/miniature.py`) has a chain of checksums as weights, and neither actors nor sandboxes. An outcome is the "
    "exit code of the run, then that of the resumed run, whose result equals an undisturbed run's. The full disk is a "
    "tmpfs; read-only folders are bind mounts, immutable ones use `chattr +i`; the slow disk is a preloaded library. "
    "Moments: start-up, first evaluation, training, checkpoint write, final evaluation and report."
)


def lines(deaths: list[Death]) -> list[str]:
    """Format the table of results: a row for each role and disturbance, at whatever moment it was."""
    rows: dict[tuple[str, str], list[Death]] = {}
    for death in deaths:
        rows.setdefault((death.role, death.kind.partition(" at ")[0]), []).append(death)

    def seconds(values: Iterable[float | None]) -> str:
        known = [value for value in values if value is not None]
        if len(known) < 2:
            return "".join(f"{value:.1f}" for value in known)
        return f"{statistics.median(known):.1f} (at most {max(known):.1f})"

    cells = []
    for (role, kind), each in sorted(rows.items()):
        outcomes = "; ".join(f"{name}: {count}" for name, count in sorted(Counter(d.outcome for d in each).items()))
        noticed, back = (seconds(getattr(d, name) for d in each) for name in ("noticed_s", "back_s"))
        cells.append([role, kind, len(each), outcomes, noticed, back])
    return table(["what", "disturbance", "runs", "outcome", "noticed after s", "next step after s"], cells)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60, help="results to have in the end")
    parser.add_argument("--faults", help=f"all, none or some of: {', '.join(FAULTS)}; with --seed or --only: none")
    parser.add_argument("--method", help="of training in the faults; tests.miniature:train has no actors and no model")
    parser.add_argument("--seed", help="repeat the chain of this seed")
    parser.add_argument("--engine", default="local", help="of the sandboxes")
    parser.add_argument("--only", default="", metavar="ROLE:KIND,...", help="in turns; what is left empty is drawn")
    parser.add_argument("--record", action="store_true", help="write the table to docs/benchmarks.md")
    options = parser.parse_args()
    options.faults = options.faults or ("none" if options.seed or options.only else "all")
    if unknown := set(options.faults.split(",")) - {"all", "none", *FAULTS}:
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    return options


@contextmanager
def short_folder(prefix: str) -> Iterator[Path]:
    """Make a temporary folder with a name that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def play_faults(cache: Path, options: argparse.Namespace) -> list[Death]:
    """Play each fault once."""
    settings = {"sandbox.engine": options.engine, **({"method": options.method} if options.method else {})}
    deaths = []
    for name in {"all": list(FAULTS), "none": []}.get(options.faults) or options.faults.split(","):
        if name in FAULTS:
            with short_folder("fe-") as place:
                try:
                    deaths.append(play(name, place, cache, settings))
                except NotPossibleError as error:
                    print(f"{name}: not run: {error}", flush=True)
    return deaths


def play_chains(deaths: list[Death], cache: Path, options: argparse.Namespace) -> int:
    """Play chains of deaths until there are `--runs` results; return the number of chains that went wrong."""
    wrong = 0
    while len(deaths) < options.runs:
        seed = options.seed or str(random.randrange(10**6))
        with short_folder("fe-") as place:
            count = min(DEATHS_OF_A_CHAIN, options.runs - len(deaths))
            chain = Chain(seed, place, cache, count, options.engine, options.only)
            chain.play()
            deaths += chain.deaths
            wrong += bool(chain.problems)
        if options.seed:
            break
    return wrong


def main() -> int:
    """Play faults and chains as requested; return 0 if all went well."""
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with short_folder("fc-") as cache:
        deaths = play_faults(cache, options)
        chains = options.faults in ("all", "none") and not options.method
        wrong = play_chains(deaths, cache, options) if chains else 0
    wrong += sum(bool(death.problems) for death in deaths)
    print("\n".join(lines(deaths)))
    if options.record:
        name, command, title, how = "chaos", "make chaos", "Deaths", DEATHS
        if options.method:
            name, command = "faults", f"make chaos ARGS='--method {options.method}'"
            title, how = "Faults of a miniature run", MINIATURE
        counts = f"{len(deaths)} disturbances; {wrong} went wrong. {how}"
        record(name, title, command, [*lines(deaths), "", counts])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
