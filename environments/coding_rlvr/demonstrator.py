"""Demonstrations that use the format and the tool correctly but often contain mistakes.

They are meant for a warm-up before reinforcement learning: for a model that imitates them, the right answer is the most
likely one but far from certain, so its reward can still improve. All code run here is generated from `operations`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from environments.coding_rlvr.checks import Check
from environments.coding_rlvr.conversation import DONE, as_answer, failures, report
from environments.coding_rlvr.judging import arguments_of, trusted_call, trusted_function
from environments.coding_rlvr.operations import OPERATIONS
from environments.coding_rlvr.programs import Program, Step
from environments.coding_rlvr.tasks import program_of
from forge_env.types import FunctionCall, Message, Task, ToolCall

if TYPE_CHECKING:
    from environments.coding_rlvr.environment import CodingRLVRConfig


def demonstrate(task: Task, rng: Random, opening: Sequence[Message], config: CodingRLVRConfig) -> list[Message]:
    """Generate a whole conversation about `task` that begins with the messages `opening`.

    The options `demo_...` of the environment set the probabilities of the demonstrator's choices.
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
    """Code of the program, with one wrong step with probability `slip`."""
    expressions = [step.expression for step in program.steps]
    if rng.random() < slip:
        slot = rng.randrange(len(expressions))
        expressions[slot] = _slip(program.steps[slot], rng)
    return program.code(expressions)


def _slip(step: Step, rng: Random) -> str:
    """A wrong expression for a step: one of its slips, or another operation with the same parameters."""
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
    """The tool's report on `code`, without a sandbox."""
    function = trusted_function(code)
    return report(len(tests), failures(tests, [trusted_call(function, arguments_of(test)) for test in tests]))


def _tool_call(code: str, call_id: str, result: str) -> list[Message]:
    call = ToolCall(id=call_id, function=FunctionCall(name="python", arguments=json.dumps({"code": code})))
    return [
        Message(role="assistant", tool_calls=[call]),
        Message(role="tool", tool_call_id=call_id, name="python", content=result),
    ]
