"""contract.jsonl: what a run has seen to before anybody believes its curve, and what came of it.

`Run.contract` writes it, whoever trains; this says what a line is and reads it. docs/trust.md has the clauses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from forge_env.reading import read_text
from forge_env.schema import without_schema

Verdict = Literal["holds", "doubtful", "broken", "open"]
CLAUSES: Mapping[str, str] = {
    "prompt": "the prompt contains the task",
    "log-probs": "trainer and generator find the same tokens equally likely",
    "weights": "generators serve the weights that were trained",
    "tokens": "what is trained on is what was sampled",
    "rewards": "rewards differ",
    "answers": "the model answers different tasks differently",
    "scores": "scores are cheat-proof",
}
"""Names, and what each says, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Clause:
    """What came of one clause.

    Attributes:
        clause: its name, of `CLAUSES`.
        verdict: it holds; it is doubtful, which is a warning; it is broken, which ends the run; or it is open: the run
            ended before that could be told.
        text: what was measured.
        step: training steps done by then.
    """

    clause: str
    verdict: Verdict
    text: str
    step: int

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @property
    def words(self) -> str:
        """In one line."""
        return f"{self.clause}: {self.verdict}: {self.text}"


def read_contract(path: Path) -> list[Clause]:
    """The newest word on each clause, in the order of `CLAUSES`; nothing for a run without.

    Raises:
        UsageError: a line is of a newer version than this forge-env reads, or the file is not read (`open_file`).
        OSError: the file can't be read.
    """
    found: dict[str, Clause] = {}
    for line in read_text(path).split("\n") if path.exists() else ():
        try:
            row = without_schema(json.loads(line), path.name)
            clause = Clause(str(row["clause"]), row["verdict"], str(row["text"]), int(row["step"]))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            continue  # damaged, or cut short by a full disk
        if clause.clause in CLAUSES and clause.verdict in get_args(Verdict):
            found[clause.clause] = clause
    return [found[name] for name in CLAUSES if name in found]


def in_a_sentence(clauses: list[Clause]) -> str:
    """How the contract of a run stands; empty where there is none."""
    if not clauses:
        return ""
    held = sum(own.verdict == "holds" for own in clauses)
    return f"{held} of the {len(clauses)} things that a run checks of itself hold."
