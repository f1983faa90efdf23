"""Translation of torchforge's configuration keys to the recipe's keys.

    model: Qwen/Qwen3-1.7B
    dataset: {path: openai/gsm8k, split: train, streaming: true}
    training: {batch_size: 8, learning_rate: 1e-6, seq_len: 2048, dtype: bfloat16, gradient_accumulation_steps: 4}
    grpo: {n_samples: 8, clip_low: 0.2, clip_high: 0.28, beta: 0.1, temperature: 1.0}
    parallelism: {data_parallel_shard_degree: 2}
    services: {generator: {procs: 1, with_gpus: true}, trainer: {procs: 2, with_gpus: true}}

They may be mixed with the recipe's own keys, in the file and on the command line, which takes precedence. `translated`
moves each value to the recipe's key. Errors in a value still name the key as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from forge_env.config.reader import KeyPath, Problem, Source, replaced, unknown

PLAIN = {
    "training.learning_rate": "trainer.optimizer.lr",
    "training.seq_len": "model.max_length",
    "training.dtype": "model.dtype",
    "training.sync_interval": "grpo.sync_interval",
    "training.entropy_coef": "grpo.loss.options.entropy_coef",
    "grpo.n_samples": "grpo.group_size",
    "grpo.clip_low": "grpo.loss.options.clip_low",
    "grpo.clip_high": "grpo.loss.options.clip_high",
    "parallelism": "trainer.parallelism",
    "services.generator": "generator",
    "services.trainer": "trainer",
    "services.ref_model": "grpo.reference",
    "dataset": "environment.options.dataset",
}
"""torchforge key -> recipe key with the same meaning. An entry for a section covers all of its keys."""
SECTIONS = {
    "training": (
        *("batch_size", "learning_rate", "seq_len", "dtype", "gradient_accumulation_steps", "sync_interval"),
        "entropy_coef",
    ),
    "services": ("generator", "trainer", "ref_model"),
}
"""torchforge section -> keys that it may hold."""
SINGLE = ("services.trainer.num_replicas", "services.ref_model.num_replicas")
"""Replica counts that must be 1."""
ONE_BY_ONE = ("parallelism", "services.generator", "services.trainer", "services.ref_model", "dataset")
"""Sections whose keys are moved one by one, so that the recipe's section may also hold keys of its own."""
_NOTHING = object()


def translated(source: Source, defaults: Mapping[str, int]) -> Source:
    """Translate torchforge's keys in a source to the recipe's keys."""
    translation = _Translation(source)
    translation.run(defaults)
    if translation.problems:
        raise source.refuse(translation.problems)
    return translation.source


class _Translation:
    """A source while its keys are translated, and the problems found in it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.problems: list[Problem] = []

    def run(self, defaults: Mapping[str, int]) -> None:
        """Move the value of every torchforge key to its recipe key; collect problems instead of raising."""
        for section, names in SECTIONS.items():
            inner = self.source.data.get(section, {})
            if not isinstance(inner, dict):
                self.problems.append(Problem((section,), f"should contain {', '.join(names)}"))
                return
            self.problems += unknown(inner, names, (section,))
        if self.problems:
            return
        for word in SINGLE:
            if (count := self._take(word)) not in (1, _NOTHING):
                self.problems.append(Problem(_path(word), f"should be 1, not {count!r}: there is only one"))
        self._batch(defaults)
        self._reference()
        self._interval(defaults["grpo.max_off_policy_steps"])
        self._environment()
        degrees = self._get("parallelism")
        for word, key in PLAIN.items():
            self._move(word, key)
        if degrees is not _NOTHING:
            self._processes()
        for section in SECTIONS:
            if not self.source.data.get(section, True):
                self._take(section)

    def _batch(self, defaults: Mapping[str, int]) -> None:
        """Set a step's batch: `batch_size` prompts (or conversations) times `gradient_accumulation_steps`."""
        key = "sft.batch_size" if self.source.data.get("method") == "sft" else "grpo.groups_per_step"
        passes = self._get("training.gradient_accumulation_steps")
        if passes is _NOTHING:
            self._move("training.batch_size", key)
            return
        size = self._get("training.batch_size")
        if size is _NOTHING:
            size = self._get(key)
        size = defaults[key] if size is _NOTHING else size
        for word, value in (("training.gradient_accumulation_steps", passes), ("training.batch_size", size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                self.problems.append(Problem(_path(word), f"should be a number above 0, not {value!r}"))
                return
        word = "training.gradient_accumulation_steps"
        if self._get("training.batch_size") is not _NOTHING:
            self._take(word)
            self._move("training.batch_size", key, size * passes)
        elif self._get(key) is _NOTHING:
            self._move(word, key, size * passes)
        else:
            if self._forced(word) or not self._forced(key):
                self._put(key, size * passes)
            self._take(word)

    def _reference(self) -> None:
        """Use the initial policy as reference model if `beta` or `ref_model` is given, and none for `beta: 0`."""
        beta, model = self._get("grpo.beta"), self._get("services.ref_model")
        forced = self._forced("grpo.beta")
        self._move("grpo.beta", "grpo.loss.options.beta")
        written = self._get("grpo.reference")
        if beta is not _NOTHING and not beta and (written is _NOTHING or forced):
            self._take("services.ref_model")
            if written is not _NOTHING:
                self._put("grpo.reference", {})
            return
        if (beta is not _NOTHING or model is not _NOTHING) and self._get("grpo.reference.source") is _NOTHING:
            self._put("grpo.reference.source", "initial")

    def _interval(self, usual: int) -> None:
        """Raise the default `max_off_policy_steps` to fit `sync_interval`: rarer updates mean older weights."""
        interval, key = self._get("training.sync_interval"), "grpo.max_off_policy_steps"
        if isinstance(interval, int) and interval - 1 > usual and self._get(key) is _NOTHING:
            self._put(key, interval - 1)

    def _environment(self) -> None:
        """Choose the environment for a dataset without one: `gsm8k`, or `conversations` for `method: sft`.

        torchforge's documents name a single split. A tenth of it is held out for evaluations, unless `splits` or
        `eval_fraction` is given.
        """
        dataset = self._get("dataset")
        if dataset is _NOTHING or self._get("environment.name") is not _NOTHING:
            return
        if isinstance(dataset, dict) and dataset.keys().isdisjoint({"splits", "eval_fraction"}):
            self._put("dataset.eval_fraction", 0.1)
        self._put("environment.name", "conversations" if self.source.data.get("method") == "sft" else "gsm8k")

    def _processes(self) -> None:
        """Set `trainer.procs` to the product of the parallelism degrees, unless it is given."""
        degrees = self._get("trainer.parallelism")
        if not isinstance(degrees, dict) or self._get("trainer.procs") is not _NOTHING:
            return
        counts = [degree for degree in degrees.values() if isinstance(degree, int) and degree > 0]
        self._put("trainer.procs", prod(counts))

    # --- access to keys

    def _get(self, word: str) -> Any:
        result: Any = self.source.data
        for part in word.split("."):
            if not isinstance(result, dict) or part not in result:
                return _NOTHING
            result = result[part]
        return result

    def _forced(self, word: str) -> bool:
        """Whether a key, or a section that holds it, was given on the command line."""
        path = _path(word)
        return any(path[: len(key)] == key for key in self.source.written)

    def _put(self, key: str, value: Any) -> None:
        self.source = replace(self.source, data=replaced(self.source.data, _path(key), value, key))

    def _take(self, word: str) -> Any:
        """Remove a key and return its value, or `_NOTHING` if it is not given."""
        value = self._get(word)
        if value is not _NOTHING:
            self.source = replace(self.source, data=_without(self.source.data, _path(word)))
        return value

    def _move(self, word: str, key: str, value: Any = _NOTHING) -> None:
        """Move a torchforge key's value, or `value` if given, to a recipe key; keep its line and its spelling."""
        held = self._get(word)
        if held is _NOTHING:
            return
        value = held if value is _NOTHING else value
        if isinstance(value, dict) and word in ONE_BY_ONE:
            for name in value:
                self._move(f"{word}.{name}", f"{key}.{name}")
            self._take(word)
            return
        forced = self._forced(word)
        if self._get(key) is not _NOTHING:
            if forced == self._forced(key):
                self.problems.append(Problem(_path(word), f"means the same as {key}: give only one of them"))
                return
            if not forced:  # the command line takes precedence
                self._take(word)
                return
        self._take(word)
        path, old = _path(key), _path(word)
        source = self.source
        lines, written, spelled = dict(source.lines), dict(source.written), dict(source.spelled)
        if old in lines:
            lines[path] = lines[old]
        if forced:
            written[path] = word
        else:
            spelled[path] = word
        self.source = replace(source, lines=lines, written=written, spelled=spelled)
        self._put(key, value)


def _path(word: str) -> KeyPath:
    return tuple(word.split("."))


def _without(data: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    head, rest = path[0], path[1:]
    if not rest:
        return {name: value for name, value in data.items() if name != head}
    return {**data, head: _without(data[head], rest)}
