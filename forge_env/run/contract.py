"""contract.jsonl: the checks that a run makes of itself before its curve can be trusted, and their results.

`Run.contract` writes the file for every trainer; this module defines its lines and reads it. docs/trust.md describes
the clauses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from forge_env.reading import LARGEST_COUNT, is_bounded, read_text
from forge_env.schema import without_schema

Verdict = Literal["holds", "doubtful", "broken", "open"]
CLAUSES: Mapping[str, str] = {
    "prompt": "the prompt contains the task",
    "log-probs": "trainer and generator agree on log-probabilities",
    "weights": "generators serve the trained weights",
    "rounding": "rounding leaves what was trained",
    "tokens": "trained tokens are the sampled ones",
    "rewards": "rewards differ",
    "answers": "answers to different tasks differ",
    "scores": "scores are cheat-proof",
}
"""Clauses and the statement that each one checks, in display order."""


@dataclass(frozen=True, slots=True)
class Clause:
    """The result of one clause.

    Attributes:
        verdict: "holds"; "doubtful", which is a warning; "broken", which ends the run; or "open": the run ended before
            the clause could be decided.
        step: training steps done by then.
    """

    clause: str
    verdict: Verdict
    text: str
    step: int

    def row(self) -> dict[str, Any]:
        """Return the result as a JSON-ready dictionary."""
        return asdict(self)

    @property
    def words(self) -> str:
        """The result in one line."""
        return f"{self.clause}: {self.verdict}: {self.text}"


def read_contract(path: Path) -> list[Clause]:
    """Read the latest result of each clause, in the order of `CLAUSES`; empty if the run has none.

    Raises:
        UsageError: a line is of a newer version than this forge-env reads, or the file is not read (`open_file`).
        OSError: the file can't be read.
    """
    latest: dict[str, Clause] = {}
    for line in read_text(path).split("\n") if path.exists() else ():
        try:
            row = without_schema(json.loads(line), path.name)
            clause = Clause(str(row["clause"]), row["verdict"], str(row["text"]), int(row["step"]))
            if not is_bounded(clause.step, LARGEST_COUNT):
                continue
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            continue  # damaged, or truncated by a full disk
        if clause.clause in CLAUSES and clause.verdict in get_args(Verdict):
            latest[clause.clause] = clause
    return [latest[name] for name in CLAUSES if name in latest]


def in_a_sentence(clauses: list[Clause]) -> str:
    """Summarize the results of a run in one sentence; empty if there are none."""
    if not clauses:
        return ""
    held = sum(clause.verdict == "holds" for clause in clauses)
    return f"Self-checks: {held}/{len(clauses)} passed."
