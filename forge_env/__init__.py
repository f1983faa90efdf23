"""forge-env: environments, sandboxes, evaluation and asynchronous GRPO for LLM agents.

`import forge_env as fe` is enough for everything an environment author needs; names load when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forge_env.gym_hook import register_with_gymnasium
from forge_env.moved import keep_old_names

__version__ = "0.1.0"

_EXPORTS = {
    "Environment": "forge_env.environment.base",
    "EnvironmentConfig": "forge_env.environment.base",
    "API_VERSION": "forge_env.environment.base",
    "ToolEnvironment": "forge_env.environment.tool_environment",
    "ToolEnvironmentConfig": "forge_env.environment.tool_environment",
    "SingleTurnEnvironment": "forge_env.environment.single_turn",
    "SandboxEnvironment": "forge_env.environment.sandbox_environment",
    "SandboxEnvironmentConfig": "forge_env.environment.sandbox_environment",
    "Rubric": "forge_env.rewards.rubric",
    "RubricResult": "forge_env.rewards.rubric",
    "tool": "forge_env.tools.decorator",
    "DatasetConfig": "forge_env.tasks.datasets",
    "load_tasks": "forge_env.tasks.datasets",
    "run_episode": "forge_env.rollout.episode",
    "evaluate": "forge_env.evaluation.api",
    "evaluate_async": "forge_env.evaluation.api",
    "EvaluationResult": "forge_env.evaluation.record",
    "make": "forge_env.registry",
    "register": "forge_env.registry",
    "list_environments": "forge_env.registry",
    "Message": "forge_env.types",
    "Task": "forge_env.types",
    "ToolCall": "forge_env.types",
    "ToolSpec": "forge_env.types",
    "call_tool": "forge_env.types",
    "Trajectory": "forge_env.trajectory",
    "Limits": "forge_env.sandbox",
    "SandboxSpec": "forge_env.sandbox",
    "open_engine": "forge_env.sandbox",
    "ForgeError": "forge_env.errors",
    "InfrastructureError": "forge_env.errors",
    "SandboxError": "forge_env.errors",
    "ToolError": "forge_env.errors",
    "UsageError": "forge_env.errors",
}

__all__ = [*_EXPORTS, "__version__", "rewards"]


def __getattr__(name: str) -> Any:
    if name == "rewards":
        return import_module("forge_env.rewards")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'forge_env' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


register_with_gymnasium()
keep_old_names()

if TYPE_CHECKING:
    from forge_env import rewards as rewards
    from forge_env.environment.base import API_VERSION as API_VERSION
    from forge_env.environment.base import Environment as Environment
    from forge_env.environment.base import EnvironmentConfig as EnvironmentConfig
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
