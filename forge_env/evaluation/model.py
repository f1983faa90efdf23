"""What the key `model` stands for: a scripted policy, a checkpoint for vLLM, or else an endpoint's model."""

from __future__ import annotations

import importlib.util
import os

from forge_env.errors import UsageError
from forge_env.evaluation.config import EvaluationConfig
from forge_env.policies.scripted import scripted_policy
from forge_env.policy import Policy

VLLM = "vllm:"


def scripted(config: EvaluationConfig) -> Policy | None:
    """The scripted policy that the model names; `name:tag` of an endpoint's model is none."""
    model = config.model
    if model.startswith(VLLM):
        return None
    module, colon, attribute = model.partition(":")
    if not colon or (attribute.isidentifier() and "/" not in module and _importable(module)):
        return scripted_policy(model)
    path = "." in module and all(part.isidentifier() for part in [*module.split("."), attribute])
    if path and "base_url" not in config.model_fields_set and "OPENAI_BASE_URL" not in os.environ:
        raise UsageError(
            f"there is no module {module!r} for the policy {model!r}",
            fix="give package.module:function; where it is an endpoint's model, add --base-url",
        )
    return None


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
