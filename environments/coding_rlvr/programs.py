"""Programs: operations put together, told in English and written in Python.

A `Program` is a kind of structure and its filled slots. Its identity is exactly that: neither the wording
nor the tests belong to it, so that a held-out task is held out whatever words it comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from environments.coding_rlvr.operations import OPENERS, OPERATIONS, VARIABLES, Operation, Params


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
        opener, said = rng.choice(OPENERS[self.takes]), [step.phrase(rng) for step in self.steps]
        if self.kind == "pipeline":
            text = _pipeline_text(self.steps, said)
        elif self.kind == "branch":
            text = _branch_text(self.steps, said, rng)
        else:
            text = STRUCTURES[self.kind][0].format(*said)
        return f"{opener}, {text}."

    def code(self, expressions: Sequence[str] | None = None) -> str:
        """The function `f`; `expressions` replaces the right ones, slot by slot, to make wrong programs."""
        chosen = list(expressions) if expressions is not None else [step.expression for step in self.steps]
        if self.kind == "pipeline":
            made = zip(self.steps, chosen[:-1], strict=False)
            lines = [f"\n    {VARIABLES[step.operation.gives]} = {code}" for step, code in made]
            body = "".join([*lines, f"\n    return {chosen[-1]}"])
        elif self.kind == "branch":
            body = "\n    if {}:\n        return {}\n    return {}".format(*chosen)
        else:
            body = STRUCTURES[self.kind][1].format(*chosen)
        return f"def f({VARIABLES[self.takes]}):{body}"


def load_program(kind: str, takes: str, steps: Sequence[tuple[str, Params]]) -> Program:
    """The program that a task's data describes."""
    return Program(kind, takes, tuple(Step(OPERATIONS[name], params) for name, params in steps))


STRUCTURES = {
    "range": (
        "{0} {1} from 1 to n",
        """
    t = 0
    for i in range(1, n + 1):
        if {1}:
            {0}
    return t""",
    ),
    "each": (
        "start a total at 0, for each number {1} if {0}, otherwise {2}, and return the total",
        """
    t = 0
    for x in xs:
        if {0}:
            {1}
        else:
            {2}
    return t""",
    ),
    "while": (
        "{0} until {1} and return the number of steps",
        """
    t = 0
    while {1}:
        {0}
        t += 1
    return t""",
    ),
    "pairs": (
        "count the pairs i < j of numbers from 1 to n where {0}",
        """
    t = 0
    for i in range(1, n + 1):
        for j in range(i + 1, n + 1):
            if {0}:
                t += 1
    return t""",
    ),
}
"""Kind of a loop -> its sentence and its code, around what fills its slots."""


def _pipeline_text(steps: Sequence[Step], said: list[str]) -> str:
    told = [("find " if step.operation.is_noun else "") + text for step, text in zip(steps[:-1], said, strict=False)]
    ending = f"return {said[-1]}" if steps[-1].operation.is_noun else f"{said[-1]}, and return the result"
    return ", then ".join([*told, ending])


def _branch_text(steps: Sequence[Step], said: list[str], rng: Random) -> str:
    condition, yes, no = said
    if not steps[1].operation.is_noun:
        return f"{yes} if {condition}, otherwise {no}, and return the result"
    return rng.choice((f"return {yes} if {condition}, otherwise {no}", f"if {condition} return {yes}, else {no}"))
