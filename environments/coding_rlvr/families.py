"""Families: program structures with chosen operations and open parameters.

A family is named by its operations, such as `lists/keep_above>total`, and has a level of difficulty (1 to 4) and a
topic. In families of conditions and loops, some slots allow several operations; that choice counts as a parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from math import log2, prod
from random import Random

from environments.coding_rlvr import operations as pieces
from environments.coding_rlvr.operations import OPERATIONS, Operation
from environments.coding_rlvr.programs import Program, Step

LEVELS = (1, 2, 3, 4)
TOPICS = ("arithmetic", "strings", "lists", "dictionaries", "conditions", "loops")
_TOPIC_OF = {
    "number": "arithmetic",
    "pair": "arithmetic",
    "text": "strings",
    "numbers": "lists",
    "dictionary": "dictionaries",
}
_ONLY_FIRST = {"upto"}  # counting up to a computed number could be endless
_DICTIONARY_MAKERS = {"letter_counts", "square_table", "count_table"}


@dataclass(frozen=True)
class Family:
    """Programs that differ only in their parameters. `slots` holds the possible operations of each step."""

    name: str
    topic: str
    level: int
    kind: str
    takes: str
    slots: tuple[tuple[Operation, ...], ...]

    @property
    def size(self) -> int:
        """Approximate number of programs in the family (an upper bound if slots share operations)."""
        return prod(sum(operation.size for operation in slot) for slot in self.slots)

    @cached_property
    def weight(self) -> float:
        """Relative probability of drawing this family; it grows with the logarithm of the size."""
        return 1 + log2(self.size)

    @cached_property
    def unseen(self) -> bool:
        """Whether the whole family is excluded from training, held-out evaluation and demonstrations: one in ten."""
        combines = len(self.slots) > 1 and self.kind in ("pipeline", "range", "each")
        return combines and digest(self.name) % 10 == 0

    def draw(self, rng: Random) -> Program:
        """Draw a program of the family."""
        steps: list[Step] = []
        for slot in self.slots:
            used = {step.operation.name for step in steps}
            operation = rng.choice([operation for operation in slot if operation.name not in used])
            steps.append(Step(operation, operation.draw(rng)))
        return Program(self.kind, self.takes, tuple(steps))


def digest(text: str) -> int:
    """A 64-bit hash of `text`, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _chains(takes: str, length: int) -> Iterator[tuple[Operation, ...]]:
    """Iterate over sequences of distinct operations whose input and result types match."""
    for operation in OPERATIONS.values():
        if operation.takes != takes or operation.gives == "truth":
            continue
        if length == 1:
            yield (operation,)
            continue
        for rest in _shorter_chains(operation.gives, length - 1):
            if all(later is not operation for later in rest):
                yield (operation, *rest)


@cache
def _shorter_chains(takes: str, length: int) -> list[tuple[Operation, ...]]:
    """Chains that may follow another operation."""
    return [chain for chain in _chains(takes, length) if chain[0].name not in _ONLY_FIRST]


def _level(steps: int, operations: Sequence[Operation]) -> int:
    """Difficulty: the number of steps, plus two if any operation is rare; at most 4."""
    return min(LEVELS[-1], steps + 2 * any(operation.rare for operation in operations))


def _pipelines(longest: int) -> Iterator[Family]:
    for takes, topic in _TOPIC_OF.items():
        for length in range(1, longest + 1):
            chains = list(_chains(takes, length))
            if length > 2:  # a fixed sample of the thousands of long chains limits the number of families
                chains = Random(f"{takes}/{length}").sample(chains, min(len(chains), 400))
            for chain in chains:
                names = [operation.name for operation in chain]
                chain_topic = "dictionaries" if _DICTIONARY_MAKERS & set(names) else topic
                slots = tuple((operation,) for operation in chain)
                level = _level(length, chain)
                yield Family(f"{chain_topic}/{'>'.join(names)}", chain_topic, level, "pipeline", takes, slots)


def _branches() -> Iterator[Family]:
    choices = {
        "pair": tuple(op for op in pieces.PAIR if not op.rare),
        "number": tuple(op for op in pieces.NUMBER if op.gives == "number"),
        "numbers": pieces.LIST_TO_NUMBER,
        "text": tuple(op for op in pieces.TEXT_RESULTS if op.gives == "number"),
    }
    for condition in pieces.CONDITIONS:
        slots = ((condition,), choices[condition.takes], choices[condition.takes])
        level = _level(2, (condition,))
        yield Family(f"conditions/{condition.name}", "conditions", level, "branch", condition.takes, slots)
    for test, update in product(pieces.EACH_TESTS, pieces.UPDATES):
        name = f"loops/{test.name}>{update.name}"
        yield Family(name, "loops", 3, "each", "numbers", ((test,), (update,), pieces.UPDATES))


def _loops() -> Iterator[Family]:
    for gather, test in product(pieces.GATHER, pieces.RANGE_TESTS):
        level = _level(2, (gather, test))
        yield Family(f"loops/{gather.name}>{test.name}", "loops", level, "range", "number", ((gather,), (test,)))
    for shrink in pieces.SHRINK:
        yield Family(f"loops/{shrink.name}", "loops", 3, "while", "number", ((shrink,), pieces.FLOORS))
    for test in pieces.PAIR_TESTS:
        yield Family(f"loops/{test.name}", "loops", 4, "pairs", "number", ((test,),))


@cache
def all_families(longest: int = LEVELS[-1]) -> dict[str, Family]:
    """All families by name, in a fixed order, without pipelines of more than `longest` steps (of higher levels)."""
    return {family.name: family for family in (*_pipelines(longest), *_branches(), *_loops())}
