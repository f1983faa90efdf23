"""Programs: operations put together, told in English and written in Python.

A `Program` is a kind of structure and its filled slots. Its identity is exactly that: neither the wording
nor the tests belong to it, so that a held-out task is held out whatever words it comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        sentence = f"{rng.choice(OPENERS[self.takes])}, {_DESCRIBE[self.kind](self.steps, rng)}"
        return sentence + "."

    def code(self, expressions: Sequence[str] | None = None) -> str:
        """The function `f`; `expressions` replaces the right ones, slot by slot, to make wrong programs."""
        chosen = list(expressions) if expressions is not None else [step.expression for step in self.steps]
        return "\n".join([f"def f({VARIABLES[self.takes]}):", *_WRITE[self.kind](self, chosen)])


def load_program(kind: str, takes: str, steps: Sequence[tuple[str, Params]]) -> Program:
    """The program that a task's data describes."""
    return Program(kind, takes, tuple(Step(OPERATIONS[name], params) for name, params in steps))


def _pipeline_text(steps: Sequence[Step], rng: Random) -> str:
    *before, last = steps
    told = [("find " if step.operation.is_noun else "") + step.phrase(rng) for step in before]
    ending = f"return {last.phrase(rng)}" if last.operation.is_noun else f"{last.phrase(rng)}, and return the result"
    return ", then ".join([*told, ending])


def _pipeline_code(program: Program, expressions: list[str]) -> list[str]:
    lines = [
        f"    {VARIABLES[step.operation.gives]} = {expression}"
        for step, expression in zip(program.steps[:-1], expressions[:-1], strict=True)
    ]
    return [*lines, f"    return {expressions[-1]}"]


def _branch_text(steps: Sequence[Step], rng: Random) -> str:
    condition, yes, no = (step.phrase(rng) for step in steps)
    if not steps[1].operation.is_noun:
        return f"{yes} if {condition}, otherwise {no}, and return the result"
    return rng.choice((f"return {yes} if {condition}, otherwise {no}", f"if {condition} return {yes}, else {no}"))


def _branch_code(program: Program, expressions: list[str]) -> list[str]:
    condition, yes, no = expressions
    return [f"    if {condition}:", f"        return {yes}", f"    return {no}"]


def _range_text(steps: Sequence[Step], rng: Random) -> str:
    gather, which = (step.phrase(rng) for step in steps)
    return f"{gather} {which} from 1 to n"


def _range_code(program: Program, expressions: list[str]) -> list[str]:
    gather, which = expressions
    return [
        "    t = 0",
        "    for i in range(1, n + 1):",
        f"        if {which}:",
        f"            {gather}",
        "    return t",
    ]


def _each_text(steps: Sequence[Step], rng: Random) -> str:
    condition, yes, no = (step.phrase(rng) for step in steps)
    return f"start a total at 0, for each number {yes} if {condition}, otherwise {no}, and return the total"


def _each_code(program: Program, expressions: list[str]) -> list[str]:
    condition, yes, no = expressions
    return [
        "    t = 0",
        "    for x in xs:",
        f"        if {condition}:",
        f"            {yes}",
        "        else:",
        f"            {no}",
        "    return t",
    ]


def _while_text(steps: Sequence[Step], rng: Random) -> str:
    shrink, floor = (step.phrase(rng) for step in steps)
    return f"{shrink} until {floor} and return the number of steps"


def _while_code(program: Program, expressions: list[str]) -> list[str]:
    shrink, floor = expressions
    return ["    t = 0", f"    while {floor}:", f"        {shrink}", "        t += 1", "    return t"]


def _pairs_text(steps: Sequence[Step], rng: Random) -> str:
    return f"count the pairs i < j of numbers from 1 to n where {steps[0].phrase(rng)}"


def _pairs_code(program: Program, expressions: list[str]) -> list[str]:
    return [
        "    t = 0",
        "    for i in range(1, n + 1):",
        "        for j in range(i + 1, n + 1):",
        f"            if {expressions[0]}:",
        "                t += 1",
        "    return t",
    ]


_DESCRIBE: dict[str, Callable[[Sequence[Step], Random], str]] = {
    "pipeline": _pipeline_text,
    "branch": _branch_text,
    "range": _range_text,
    "each": _each_text,
    "while": _while_text,
    "pairs": _pairs_text,
}
_WRITE: dict[str, Callable[[Program, list[str]], list[str]]] = {
    "pipeline": _pipeline_code,
    "branch": _branch_code,
    "range": _range_code,
    "each": _each_code,
    "while": _while_code,
    "pairs": _pairs_code,
}
