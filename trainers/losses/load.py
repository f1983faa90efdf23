"""From a recipe's loss section to a loss."""

from __future__ import annotations

import inspect

from forge_env.config.models import LossSection
from forge_env.errors import PluginError, UsageError
from forge_env.plugins import load_plugin
from trainers.losses.types import Loss

GROUP = "forge_env.losses"


def make_loss(section: LossSection) -> Loss:
    """The loss that a recipe names, by entry point or `module:Class`, with its options.

    Raises:
        NotRegisteredError: there is none of that name.
        PluginError: it can't be imported, or is no loss.
        UsageError: it doesn't take these options.
    """
    loss_class = load_plugin(GROUP, section.name)
    if not callable(loss_class):
        raise PluginError(f"grpo.loss.name: {section.name!r} is not a class")
    try:
        loss = loss_class(**section.options)
    except Exception as error:  # whatever somebody's constructor says about its options
        raise UsageError(
            f"grpo.loss {section.name!r} does not take the options {section.options}: {error}",
            fix=f"its options: {_options(loss_class) or 'none'}",
        ) from error
    if not callable(loss):
        raise PluginError(
            f"grpo.loss.name: {section.name!r} makes a {type(loss).__name__}, which can't be called with a TokenBatch"
        )
    made: Loss = loss
    return made


def _options(loss_class: object) -> str:
    try:
        return ", ".join(inspect.signature(loss_class).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # built in, without a signature
        return ""
