"""Whether two evaluations played the same tasks. Their ids don't tell: options change what is behind them."""

from __future__ import annotations

from forge_env.errors import ForgeError, environment_code
from forge_env.evaluation.config import ENDLESS_N, EnvironmentChoice, EvaluationConfig
from forge_env.registry import environment_class, make, make_config

Played = tuple[EvaluationConfig, str]
"""An evaluation, and the split of the environment that it played."""


def other_tasks(label: str, a: Played, b: Played) -> str | None:
    """In what the environment `label` differed so that its tasks were others; None where they were the same.

    Options that change no task (a limit of turns, say) may differ: where options do, both environments are made and
    their tasks compared.
    """
    (config_a, split_a), (config_b, split_b) = a, b
    if split_a != split_b:
        return f"split {split_a} against {split_b}"
    if config_a.seed != config_b.seed:
        return f"seed {config_a.seed} against {config_b.seed}"
    one, other = _choice(config_a, label), _choice(config_b, label)
    if (one.name, one.options) == (other.name, other.options):
        return None
    if not _same_class(one.name, other.name):
        return f"{one.name} against {other.name}"
    found = _options(one), _options(other)
    named = sorted(key for key in found[0].keys() | found[1].keys() if found[0].get(key) != found[1].get(key))
    tasks = min(choice.n or config.n or ENDLESS_N for choice, config in ((one, config_a), (other, config_b)))
    if not named or _tasks_agree(one, other, split_a, tasks):
        return None
    return ", ".join(f"{key} {found[0].get(key)!r} against {found[1].get(key)!r}" for key in named)


def _choice(config: EvaluationConfig, label: str) -> EnvironmentChoice:
    return next(choice for choice in config.environments if choice.label == label)


def _same_class(a: str, b: str) -> bool:
    try:
        return a == b or environment_class(a) is environment_class(b)
    except ForgeError:
        return False


def _options(choice: EnvironmentChoice) -> dict[str, object]:
    """All options, those at their defaults included; as given where the environment can't be found here."""
    try:
        return make_config(choice.name, environment_class(choice.name), choice.options).model_dump()
    except ForgeError:
        return dict(choice.options)


def _tasks_agree(a: EnvironmentChoice, b: EnvironmentChoice, split: str, number: int) -> bool:
    """Whether both environments make the same first tasks; no where one can't be made here."""
    try:
        one, other = make(a.name, **a.options), make(b.name, **b.options)
        with environment_code(f"the tasks of {a.name}", split):
            most = min(total for total in (one.num_tasks(split), other.num_tasks(split), number) if total is not None)
            return all(one.task(split, index) == other.task(split, index) for index in range(most))
    except ForgeError:  # what can't be compared is not the same
        return False
