"""Programs: combined operations with an English description and Python code.

A `Program` is a kind of structure with filled slots. Its identity is exactly that and excludes wording and tests, so a
held-out program is held out in every wording.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from environments.coding_rlvr.operations import OPENERS, VARIABLES, Operation, Params

_WORDS = {
    "range": "{} {} from 1 to n",
    "each": "start a total at 0, for each number {1} if {0}, otherwise {2}, and return the total",
    "while": "{} until {} and return the number of steps",
    "pairs": "count the pairs i < j of numbers from 1 to n where {}",
}
_SHIFTED = (
    *((" > ", " >= "), (" >= ", " > "), (" < ", " <= "), (" <= ", " < "), ("sorted(", "list("), ("[::-1]", "")),
    *(("max(", "min("), ("min(", "max("), ("sum(", "len("), ("upper", "title"), ("lower", "title")),
)
"""Parts of expressions, and what they may be mistaken for."""
_CODE = {
    "branch": """\
    if {}:
        return {}
    return {}""",
    "range": """\
    t = 0
    for i in range(1, n + 1):
        if {1}:
            {0}
    return t""",
    "each": """\
    t = 0
    for x in xs:
        if {}:
            {}
        else:
            {}
    return t""",
    "while": """\
    t = 0
    while {1}:
        {0}
        t += 1
    return t""",
    "pairs": """\
    t = 0
    for i in range(1, n + 1):
        for j in range(i + 1, n + 1):
            if {}:
                t += 1
    return t""",
}


@dataclass(frozen=True)
class Step:
    """One operation with its parameters."""

    operation: Operation
    params: Params

    @property
    def expression(self) -> str:
        """The correct Python expression."""
        return self.operation.expression.format(**self.params)

    def phrase(self, rng: Random) -> str:
        """Draw one of the operation's wordings."""
        return rng.choice(self.operation.phrases).format(**self.params)

    def slips(self) -> list[str]:
        """Wrong expressions: the listed slips, and the right expression with parameters off by one."""
        wrong = [slip.format(**self.params) for slip in self.operation.slips]
        for name, value in self.params.items():
            if isinstance(value, int):
                near = [other for other in (value - 1, value + 1) if other in self.operation.params[name]]
                wrong += [self.operation.expression.format(**{**self.params, name: other}) for other in near]
        return wrong

    def near_misses(self) -> list[str]:
        """Wrong expressions that differ on few inputs: other parameters, shifted boundaries, a missing step.

        They are for finding hidden tests; some may be equivalent to the right expression.
        """
        right = self.expression
        wrong = [right.replace(one, other) for one, other in _SHIFTED if one in right]
        for name, value in self.params.items():
            others = (value - 1, value + 1) if isinstance(value, int) else ("", f"{value}x")
            wrong += [self.operation.expression.format(**{**self.params, name: other}) for other in others]
        wrong += [re.sub(r" if [^]}]+", "", right), re.sub(r"\w+ [-+*] (?=\d)", "", right)]
        if self.operation.gives == "truth":
            wrong += ["True", "False"]
        if self.operation.gives == self.operation.takes in VARIABLES:
            wrong.append(VARIABLES[self.operation.takes])
        return [expression for expression in wrong if expression != right]


@dataclass(frozen=True)
class Program:
    """A structure ("pipeline", "branch", ...) with the steps that fill its slots, in order."""

    kind: str
    takes: str
    steps: tuple[Step, ...]

    @property
    def identity(self) -> str:
        """Structure and parameters as text, excluding wording and tests."""
        parts = [f"{step.operation.name}({','.join(map(repr, step.params.values()))})" for step in self.steps]
        return f"{self.kind}:{self.takes}:" + ">".join(parts)

    def describe(self, rng: Random) -> str:
        """Describe the task in one English sentence; `rng` selects the wording."""
        opener = rng.choice(OPENERS[self.takes])
        phrases = [step.phrase(rng) for step in self.steps]
        nouns = [step.operation.is_noun for step in self.steps]
        if self.kind == "pipeline":
            *before, last = phrases
            clauses = [f"find {phrase}" if noun else phrase for phrase, noun in zip(before, nouns[:-1], strict=True)]
            clauses.append(f"return {last}" if nouns[-1] else f"{last}, and return the result")
            return f"{opener}, {', then '.join(clauses)}."
        if self.kind == "branch":
            condition, yes, no = phrases
            if not nouns[1]:
                return f"{opener}, {yes} if {condition}, otherwise {no}, and return the result."
            wordings = (f"return {yes} if {condition}, otherwise {no}", f"if {condition} return {yes}, else {no}")
            return f"{opener}, {rng.choice(wordings)}."
        return f"{opener}, {_WORDS[self.kind].format(*phrases)}."

    def code(self, expressions: Sequence[str] | None = None) -> str:
        """Source of the function `f`; `expressions` replaces the right ones slot by slot, to build wrong programs."""
        chosen = list(expressions) if expressions is not None else [step.expression for step in self.steps]
        head = f"def f({VARIABLES[self.takes]}):"
        if self.kind != "pipeline":
            return f"{head}\n{_CODE[self.kind].format(*chosen)}"
        *before, last = chosen
        lines = [
            f"    {VARIABLES[step.operation.gives]} = {expression}"
            for step, expression in zip(self.steps[:-1], before, strict=True)
        ]
        return "\n".join([head, *lines, f"    return {last}"])
