"""Generated gsm8k word problems with a calculator tool; the model learns which expressions to calculate."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from random import Random

from pydantic import Field

import forge_env as fe
from environments.gsm8k.environment import answered, generated_task
from environments.gsm8k.problems import LARGEST, Levels
from forge_env.concurrency import parse_python
from forge_env.environment.tool_environment import ToolEnvironmentConfig
from forge_env.types import Action, FunctionCall, Message, Task, ToolCall

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LONGEST = 100
"""Maximum characters of an expression; without powers its value can't be much longer."""


class CalculatorConfig(ToolEnvironmentConfig):
    """Problem selection and behavior of the demonstrator."""

    max_turns: int = Field(8, ge=1)
    """Maximum number of assistant messages before the episode is truncated."""
    levels: Levels = Field(default_factory=lambda: [1, 2, 3], min_length=1)
    """Numbers of steps per problem, 1 to 6, drawn uniformly."""
    largest: int = Field(LARGEST, ge=20)
    """Upper bound of all intermediate counts."""
    demo_slip: float = Field(0.0, ge=0.0, le=1.0)
    """Probability that a demonstration of a training task calculates a wrong expression in its last step."""


class Calculator(fe.ToolEnvironment):
    """Grade school word problems, solved by calls of a calculator and answered with one number after `####`."""

    api_version = 1
    config_class = CalculatorConfig
    system_prompt = "Solve the problem step by step with the tool. End with the answer, a number alone: #### 42"
    rubric = fe.Rubric([fe.rewards.MathReward(partial_credit=0.0)], metrics=[answered])
    config: CalculatorConfig

    def task(self, split: str, index: int) -> Task:
        """Return the problem generated for `(seed, split, index)`."""
        return generated_task(self.config.seed, split, index, self.config.levels, self.config.largest)

    def gold_actions(self, task: Task) -> list[Action]:
        """One tool call per step, then the answer."""
        return [message for message in self._solution(task, None) if message.role == "assistant"]

    def demonstrate(self, task: Task, rng: Random) -> list[Message]:
        """The gold solution as a conversation, with a wrong last step with probability `demo_slip`."""
        slips = task.split == self.splits[0] and rng.random() < self.config.demo_slip
        return [*self.prompt(task), *self._solution(task, rng if slips else None)]

    def _solution(self, task: Task, slip: Random | None) -> list[Message]:
        """Tool calls, tool results and the answer. If `slip` is given, the last expression is wrong."""
        messages: list[Message] = []
        *workings, _ = (task.gold or "").split("\n")
        for number, working in enumerate(workings):
            expression = working.partition(" = ")[0]
            if slip is not None and number == len(workings) - 1:
                expression = _another(expression, slip)
            function = fe.call_tool("calculate", expression=expression).tool_calls[0].function
            call = ToolCall(
                id=f"call_{number}", function=FunctionCall(name=function.name, arguments=function.arguments)
            )
            messages += [
                Message(role="assistant", tool_calls=[call]),
                Message(role="tool", tool_call_id=call.id, name=function.name, content=calculated(expression)),
            ]
        return [*messages, Message(role="assistant", content=f"#### {messages[-1].content}")]

    @fe.tool
    def calculate(self, expression: str) -> str:
        """Calculate.

        Args:
            expression: numbers with + - * / and parentheses.
        """
        try:
            return calculated(expression)
        except (ValueError, SyntaxError, ArithmeticError, RecursionError) as error:
            raise fe.ToolError(f"can't be calculated: {error}") from error


def calculated(expression: str) -> str:
    """Calculate an expression: exact if the result is a whole number, otherwise rounded to 4 significant digits.

    Raises:
        ValueError: the expression is too long or uses more than numbers, the four operations and parentheses.
        SyntaxError, ZeroDivisionError: as in Python.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"more than {LONGEST} characters")
    value = _value(parse_python(expression.strip(), "eval").body)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.4g}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("write numbers with + - * / and parentheses")


def _another(expression: str, rng: Random) -> str:
    """Replace the first operator of an expression by a different one."""
    before, sign, after = next(parts for sign in "+-*" if (parts := expression.partition(f" {sign} "))[1])
    return f"{before} {rng.choice([other for other in '+-*' if other != sign.strip()])} {after}"
