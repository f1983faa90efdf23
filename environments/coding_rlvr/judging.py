"""Checks of a generated program: calls of `f`, with the values that the program itself returns.

Only programs made from our own operations are run here, in this process. What a model writes runs in a
sandbox (see `checks`), and only its values come back.
"""

from __future__ import annotations

import copy
from ast import literal_eval
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from environments.coding_rlvr.checks import Check, same
from environments.coding_rlvr.operations import sample_arguments
from environments.coding_rlvr.programs import Program
from forge_env.sandbox import CallOutcome

PUBLIC = 2
HIDDEN = 6
CANDIDATES = 24
LONGEST = 44
"""Characters of a test's call and value: it must be read at a glance."""
Case = tuple[tuple[Any, ...], Any]
"""Arguments, and the value that they lead to."""


def trusted_function(code: str) -> Callable[..., Any]:
    """`f` of a program written by this package. Never for text that a model wrote."""
    namespace: dict[str, Any] = {}
    exec(compile(code, "<operations>", "exec"), namespace)
    function: Callable[..., Any] = namespace["f"]
    return function


def trusted_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> CallOutcome:
    """What a trusted function does with a copy of `arguments`, told as a sandbox would."""
    try:
        value = function(*copy.deepcopy(arguments))
    except Exception as error:  # noqa: BLE001  slips are wrong on purpose and may raise anything
        return CallOutcome(error=type(error).__name__, message=str(error))
    plain = value is None or isinstance(value, bool | int | float | str | list | tuple | dict | set)
    return CallOutcome(value=value) if plain else CallOutcome(error="TypeError", message="no plain value")


def arguments_of(test: Check) -> tuple[Any, ...]:
    """The arguments of a test's call."""
    arguments: tuple[Any, ...] = literal_eval("(" + test["call"].removeprefix("f(").removesuffix(")") + ",)")
    return arguments


def _as_test(arguments: tuple[Any, ...], value: Any) -> Check:
    return Check(call=f"f({', '.join(map(repr, arguments))})", expected=repr(value))


def _candidates(program: Program, function: Callable[..., Any], rng: Random) -> list[Case]:
    found: dict[str, Case] = {}
    for _ in range(CANDIDATES):
        arguments = sample_arguments(program.takes, rng)
        outcome = trusted_call(function, arguments)
        test = _as_test(arguments, outcome.value)
        if outcome.error is None and len(test["call"]) + len(test["expected"]) <= LONGEST:
            found[test["call"]] = (arguments, outcome.value)
    return list(found.values())


def _fails(function: Callable[..., Any], cases: Sequence[Case]) -> bool:
    told = ((value, trusted_call(function, arguments)) for arguments, value in cases)
    return any(outcome.error is not None or not same(value, outcome.value) for value, outcome in told)


def wrong_codes(program: Program) -> list[str]:
    """The programs that one misunderstanding leads to."""
    right = [step.expression for step in program.steps]
    return [
        program.code([*right[:slot], slip, *right[slot + 1 :]])
        for slot, step in enumerate(program.steps)
        for slip in step.slips()
    ]


def make_tests(program: Program, rng: Random) -> tuple[list[Check], list[Check]] | None:
    """Public and hidden tests, or None when the program is too dull or too long to be a task.

    The hidden tests tell the program from every program that is one slip away, where any input tried does.
    """
    candidates = _candidates(program, trusted_function(program.code()), rng)
    if len(candidates) < PUBLIC + HIDDEN + 2 or len({repr(value) for _, value in candidates}) < 4:
        return None
    # The two public tests differ in value, so that they say something about the program.
    other = next(place for place, (_, value) in enumerate(candidates) if not same(value, candidates[0][1]))
    candidates.insert(1, candidates.pop(other))
    public, hidden, spare = candidates[:PUBLIC], candidates[PUBLIC : PUBLIC + HIDDEN], candidates[PUBLIC + HIDDEN :]
    for code in wrong_codes(program):
        function = trusted_function(code)
        if not _fails(function, hidden):
            telling = next((test for test in spare if _fails(function, [test])), None)
            if telling is not None:
                hidden.append(telling)
    return [_as_test(*test) for test in public], [_as_test(*test) for test in hidden]
