"""Programs: operations put together, told in English and written in Python.

A `Program` is a kind of structure and its filled slots. Its identity is exactly that: neither the wording
nor the tests belong to it, so that a held-out task is held out whatever words it comes in.
"""

from __future__ import annotations

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
        """The Python that is right."""
        return self.operation.expression.format(**self.params)

    def phrase(self, rng: Random) -> str:
        """One of its wordings."""
        return rng.choice(self.operation.phrases).format(**self.params)

    def slips(self) -> list[str]:
        """Expressions that a misunderstanding would lead to: listed ones, and neighbouring parameters."""
        wrong = [slip.format(**self.params) for slip in self.operation.slips]
        for name, value in self.params.items():
            if isinstance(value, int):
                near = [other for other in (value - 1, value + 1) if other in self.operation.params[name]]
                wrong += [self.operation.expression.format(**{**self.params, name: other}) for other in near]
        return wrong


@dataclass(frozen=True)
class Program:
    """A structure ("pipeline", "branch", ...) and what fills its slots, in order."""

    kind: str
    takes: str
    steps: tuple[Step, ...]

    @property
    def identity(self) -> str:
        """Structure and parameters, and nothing else, as text."""
        parts = [f"{step.operation.name}({','.join(map(repr, step.params.values()))})" for step in self.steps]
        return f"{self.kind}:{self.takes}:" + ">".join(parts)

    def describe(self, rng: Random) -> str:
        """The task in one English sentence; the wording depends on `rng`."""
        opener = rng.choice(OPENERS[self.takes])
        phrases = [step.phrase(rng) for step in self.steps]
        nouns = [step.operation.is_noun for step in self.steps]
        if self.kind == "pipeline":
            *before, last = phrases
            told = [f"find {phrase}" if noun else phrase for phrase, noun in zip(before, nouns[:-1], strict=True)]
            told.append(f"return {last}" if nouns[-1] else f"{last}, and return the result")
            return f"{opener}, {', then '.join(told)}."
        if self.kind == "branch":
            condition, yes, no = phrases
            if not nouns[1]:
                return f"{opener}, {yes} if {condition}, otherwise {no}, and return the result."
            wordings = (f"return {yes} if {condition}, otherwise {no}", f"if {condition} return {yes}, else {no}")
            return f"{opener}, {rng.choice(wordings)}."
        return f"{opener}, {_WORDS[self.kind].format(*phrases)}."

    def code(self, expressions: Sequence[str] | None = None) -> str:
        """The function `f`; `expressions` replaces the right ones, slot by slot, to make wrong programs."""
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
