"""The operations that programs are made of, by the type of their input."""

from environments.coding_rlvr.operations.base import OPENERS, VARIABLES, Operation, Params, sample_arguments
from environments.coding_rlvr.operations.dictionaries import DICTIONARIES, MAKERS
from environments.coding_rlvr.operations.flow import (
    CONDITIONS,
    EACH_TESTS,
    FLOORS,
    GATHER,
    PAIR_TESTS,
    RANGE_TESTS,
    SHRINK,
    UPDATES,
)
from environments.coding_rlvr.operations.lists import NUMBERS
from environments.coding_rlvr.operations.numbers import NUMBER, PAIR
from environments.coding_rlvr.operations.texts import TEXTS

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for table in (
        *(NUMBER, PAIR, NUMBERS, TEXTS, DICTIONARIES, MAKERS),
        *(CONDITIONS, RANGE_TESTS, GATHER, EACH_TESTS, UPDATES, SHRINK, FLOORS, PAIR_TESTS),
    )
    for operation in table
}

__all__ = ["OPENERS", "OPERATIONS", "VARIABLES", "Operation", "Params", "sample_arguments"]
