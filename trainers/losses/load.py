"""From a recipe's loss section to a loss."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from forge_env.config.recipe import LossSection
from forge_env.errors import PluginError, UsageError, did_you_mean
from forge_env.plugins import load_plugin
from trainers.losses.corrections import CORRECTIONS
from trainers.losses.padded import PaddedLoss, is_padded
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
    _refuse_unknown(section, loss_class)
    try:
        loss = loss_class(**section.options)
    except ValidationError as error:
        problems = "; ".join(_problems(error, loss_class))
        raise UsageError(f"grpo.loss {section.name!r}: {problems}", fix=_fix(loss_class)) from error
    except Exception as error:  # whatever somebody's constructor says about its options
        text = f"grpo.loss {section.name!r} does not take the options {section.options}: {error}"
        raise UsageError(text, fix=_fix(loss_class)) from error
    if not callable(loss):
        raise PluginError(
            f"grpo.loss.name: {section.name!r} makes a {type(loss).__name__}, which can't be called with a TokenBatch"
        )
    made: Loss = PaddedLoss(loss, section.name) if is_padded(loss) else loss
    return made


def loss_options(loss_class: Any) -> dict[str, Any]:
    """A loss's options and their defaults; `inspect.Parameter.empty` where there is none."""
    try:
        parameters = inspect.signature(loss_class).parameters
    except (TypeError, ValueError):  # built in, without a signature
        return {}
    return {name: parameter.default for name, parameter in parameters.items()}


def _refuse_unknown(section: LossSection, loss_class: Any) -> None:
    options = loss_options(loss_class)
    try:
        kinds = {parameter.kind for parameter in inspect.signature(loss_class).parameters.values()}
    except (TypeError, ValueError):
        return
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    if unknown := [name for name in section.options if name not in options]:
        hints = [_unknown(name, options) for name in unknown]
        raise UsageError(f"grpo.loss {section.name!r} has no option {'; '.join(hints)}", fix=_fix(loss_class))


def _unknown(name: str, options: Iterable[str]) -> str:
    guess = did_you_mean(name, options)
    return f"{name!r}, did you mean {guess!r}?" if guess else repr(name)


def _problems(error: ValidationError, loss_class: Any) -> Iterator[str]:
    """What pydantic says of each option, in the recipe's words."""
    defaults: Mapping[str, Any] = loss_options(loss_class)
    for problem in error.errors():
        where = [str(part) for part in problem["loc"]]
        path = ".".join(part for part in where if part not in CORRECTIONS)
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "unexpected_keyword_argument":
            correction = CORRECTIONS.get(where[-2]) if len(where) > 1 else None
            known = [field.name for field in dataclasses.fields(correction)] if correction else list(defaults)
            yield f"there is no {path}: {_unknown(where[-1], known)} (options: {', '.join(known)})"
        elif path:
            yield f"{path}={problem['input']!r}: {message}"
        else:
            yield message


def _fix(loss_class: Any) -> str:
    return f"its options: {', '.join(loss_options(loss_class)) or 'none'}"
