"""Conversations of a demonstrator who knows the format and the tool but often slips.

Good for a warm-up before reinforcement learning: a model that imitates them has the right answer as its most
likely one and much to gain from being sure of it. Everything run here is made from our own operations.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from environments.coding_rlvr.checks import Check
from environments.coding_rlvr.conversation import DONE, as_answer, report
from environments.coding_rlvr.judging import arguments_of, trusted_call, trusted_function
from environments.coding_rlvr.operations import OPERATIONS
from environments.coding_rlvr.programs import Program, Step
from environments.coding_rlvr.tasks import program_of
from forge_env.types import FunctionCall, Message, Task, ToolCall

if TYPE_CHECKING:
    from environments.coding_rlvr.environment import CodingRLVRConfig


def demonstrate(task: Task, rng: Random, opening: Sequence[Message], config: CodingRLVRConfig) -> list[Message]:
    """A whole conversation about `task`, which begins with the messages `opening`.

    The environment's keys `demo_...` say how likely the demonstrator does what.
    """
    program = program_of(task)
    attempt = _attempt(program, rng, config.demo_slip)
    if rng.random() >= config.demo_tool:
        return [*opening, Message(role="assistant", content=as_answer(attempt))]
    messages = list(opening)
    total = len(task.data["public"])
    for number in range(max(1, min(config.max_tool_calls, config.max_turns - 1))):
        result = _try(attempt, task.data["public"])
        messages += _tool_call(attempt, f"call_{number}", result)
        if result.startswith(f"{total}/{total}") or rng.random() < config.demo_give_up:
            break
        attempt = program.code() if rng.random() < config.demo_repair else _attempt(program, rng, config.demo_slip)
    return [*messages, Message(role="assistant", content=DONE)]


def _attempt(program: Program, rng: Random, slip: float) -> str:
    """The program, with one step wrong where the demonstrator slips."""
    expressions = [step.expression for step in program.steps]
    if rng.random() < slip:
        slot = rng.randrange(len(expressions))
        expressions[slot] = _slip(program.steps[slot], rng)
    return program.code(expressions)


def _slip(step: Step, rng: Random) -> str:
    """A misunderstanding of the step, or another operation on the same parameters in its place."""
    mine = step.operation
    others = [
        other
        for other in OPERATIONS.values()
        if (other.takes, other.gives) == (mine.takes, mine.gives)
        and other is not mine
        and other.params.keys() <= mine.params.keys()
    ]
    if others and rng.random() < 0.5:
        return Step(rng.choice(others), step.params).expression
    return rng.choice(mine.slips).format(**step.params)


def _try(code: str, tests: Sequence[Check]) -> str:
    """What the tool would have said."""
    function = trusted_function(code)
    return report(tests, [trusted_call(function, arguments_of(test)) for test in tests])


def _tool_call(code: str, call_id: str, result: str) -> list[Message]:
    call = ToolCall(id=call_id, function=FunctionCall(name="python", arguments=json.dumps({"code": code})))
    return [
        Message(role="assistant", tool_calls=[call]),
        Message(role="tool", tool_call_id=call_id, name="python", content=result),
    ]
