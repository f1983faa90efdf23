"""forge-env: environments, sandboxes, evaluation and asynchronous GRPO for LLM agents.

`import forge_env as fe` gives an environment author everything they need. Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "environment.base": ("Environment", "EnvironmentConfig", "API_VERSION", "resolve_task"),
    "environment.tool_environment": ("ToolEnvironment", "ToolEnvironmentConfig"),
    "environment.single_turn": ("SingleTurnEnvironment",),
    "environment.sandbox_environment": ("SandboxEnvironment", "SandboxEnvironmentConfig"),
    "environment.program_environment": ("ProgramEnvironment", "ProgramEnvironmentConfig"),
    "rewards.reasons": ("Score",),
    "rewards.rubric": ("Rubric", "RubricResult"),
    "tools.decorator": ("tool",),
    "tasks.datasets": ("DatasetConfig", "load_tasks"),
    "rollout.episode": ("run_episode",),
    "evaluation.api": ("evaluate", "evaluate_async"),
    "evaluation.record": ("EvaluationResult",),
    "view.recorded": ("open_run", "RecordedRun"),
    "registry": ("make", "register", "list_environments"),
    "types": ("Message", "Task", "ToolCall", "ToolSpec", "call_tool", "image"),
    "trajectory": ("Trajectory",),
    "sandbox": ("Limits", "SandboxSpec", "open_engine"),
    "errors": ("ForgeError", "InfrastructureError", "SandboxError", "ToolError", "UsageError"),
}
_MODULE_OF = {name: f"forge_env.{module}" for module, names in _EXPORTS.items() for name in names}

_PACKAGES = ("rewards", "tools")

__all__ = [*_MODULE_OF, *_PACKAGES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"forge_env.{name}")
    if name not in _MODULE_OF:
        from forge_env.errors import did_you_mean

        guess = None if name.startswith("_") else did_you_mean(name, __all__)  # tools probe for private names
        hint = f"; did you mean {guess}?" if guess else ""
        raise AttributeError(f"module 'forge_env' has no attribute {name!r}{hint}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All public names, including those not loaded yet, for tab completion."""
    return sorted(__all__)


if TYPE_CHECKING:
    from forge_env import rewards as rewards
    from forge_env import tools as tools
    from forge_env.environment.base import API_VERSION as API_VERSION
    from forge_env.environment.base import Environment as Environment
    from forge_env.environment.base import EnvironmentConfig as EnvironmentConfig
    from forge_env.environment.base import resolve_task as resolve_task
    from forge_env.environment.program_environment import ProgramEnvironment as ProgramEnvironment
    from forge_env.environment.program_environment import ProgramEnvironmentConfig as ProgramEnvironmentConfig
    from forge_env.environment.sandbox_environment import SandboxEnvironment as SandboxEnvironment
    from forge_env.environment.sandbox_environment import SandboxEnvironmentConfig as SandboxEnvironmentConfig
    from forge_env.environment.single_turn import SingleTurnEnvironment as SingleTurnEnvironment
    from forge_env.environment.tool_environment import ToolEnvironment as ToolEnvironment
    from forge_env.environment.tool_environment import ToolEnvironmentConfig as ToolEnvironmentConfig
    from forge_env.errors import ForgeError as ForgeError
    from forge_env.errors import InfrastructureError as InfrastructureError
    from forge_env.errors import SandboxError as SandboxError
    from forge_env.errors import ToolError as ToolError
    from forge_env.errors import UsageError as UsageError
    from forge_env.evaluation.api import evaluate as evaluate
    from forge_env.evaluation.api import evaluate_async as evaluate_async
    from forge_env.evaluation.record import EvaluationResult as EvaluationResult
    from forge_env.registry import list_environments as list_environments
    from forge_env.registry import make as make
    from forge_env.registry import register as register
    from forge_env.rewards.reasons import Score as Score
    from forge_env.rewards.rubric import Rubric as Rubric
    from forge_env.rewards.rubric import RubricResult as RubricResult
    from forge_env.rollout.episode import run_episode as run_episode
    from forge_env.sandbox import Limits as Limits
    from forge_env.sandbox import SandboxSpec as SandboxSpec
    from forge_env.sandbox import open_engine as open_engine
    from forge_env.tasks.datasets import DatasetConfig as DatasetConfig
    from forge_env.tasks.datasets import load_tasks as load_tasks
    from forge_env.tools.decorator import tool as tool
    from forge_env.trajectory import Trajectory as Trajectory
    from forge_env.types import Message as Message
    from forge_env.types import Task as Task
    from forge_env.types import ToolCall as ToolCall
    from forge_env.types import ToolSpec as ToolSpec
    from forge_env.types import call_tool as call_tool
    from forge_env.types import image as image
    from forge_env.view.recorded import RecordedRun as RecordedRun
    from forge_env.view.recorded import open_run as open_run
