"""Fingerprints of training steps: checksums that a replay compares, in `trained.jsonl`."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WORD = 2**32
"""Checksums by tensor are recorded modulo this."""
LONGEST_NAMES = 2**24
"""Maximum bytes of the names of a model's tensors that are read."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a training step computed: its first update, before which nothing else differs, and its weights.

    Attributes:
        loss: loss of the first update.
        grad_norm: norm of its gradient before it was clipped.
        logprobs: checksum of the trainer's log-probabilities in it, modulo 2**64.
        gradients: checksums of its gradients before they were clipped, by parameter; recorded modulo `WORD`.
        weights: checksums of the weights after the step, by tensor; recorded modulo `WORD`.
    """

    loss: float = math.nan
    grad_norm: float = math.nan
    logprobs: int = 0
    gradients: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """JSON-ready dictionary without the names of the tensors, which a session's row holds."""
        return {
            "loss": self.loss if math.isfinite(self.loss) else None,
            "grad_norm": self.grad_norm if math.isfinite(self.grad_norm) else None,
            "logprobs": f"{self.logprobs:016x}",
            "gradients": _to_text(self.gradients),
            "weights": _to_text(self.weights),
        }

    @classmethod
    def of_row(cls, row: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> Fingerprint:
        """Read a row.

        Args:
            names: names of the tensors in alphabetical order, as "gradients" and "weights".

        Raises:
            ValueError, LookupError, TypeError: it is damaged.
        """
        return cls(
            _number(row["loss"]),
            _number(row["grad_norm"]),
            int(row["logprobs"], 16),
            _from_text(row["gradients"], names["gradients"]),
            _from_text(row["weights"], names["weights"]),
        )


def names_of(fingerprint: Fingerprint) -> dict[str, str]:
    """Names of its tensors as text, which `read_names` reads."""
    return {kind: _packed(sorted(sums)) for kind, sums in _tensors(fingerprint).items()}


def read_names(data: Mapping[str, str]) -> dict[str, list[str]]:
    """Read the names of tensors, for `Fingerprint.of_row`.

    Raises:
        ValueError, LookupError, TypeError, zlib.error: they are damaged.
    """
    return {kind: _unpacked(data[kind]) for kind in ("gradients", "weights")}


def _tensors(fingerprint: Fingerprint) -> dict[str, Mapping[str, int]]:
    return {"gradients": fingerprint.gradients, "weights": fingerprint.weights}


def _packed(names: Sequence[str]) -> str:
    return base64.b64encode(zlib.compress("\n".join(names).encode(), 9)).decode()


def _unpacked(text: str) -> list[str]:
    content = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), LONGEST_NAMES)
    return content.decode().split("\n") if content else []


def _to_text(sums: Mapping[str, int]) -> str:
    content = b"".join((sums[name] % WORD).to_bytes(4, "little") for name in sorted(sums))
    return base64.b64encode(content).decode()


def _from_text(text: str, names: Sequence[str]) -> dict[str, int]:
    content = base64.b64decode(text, validate=True)
    values = [int.from_bytes(content[start : start + 4], "little") for start in range(0, len(content), 4)]
    return dict(zip(names, values, strict=True))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Replies of a step's episodes that were sampled again under the versions recorded beside their tokens.

    Attributes:
        different: names of replies with other tokens.
        logprobs: largest absolute difference of log-probs, in nats, of replies with equal tokens.
        unequal: number of replies with equal tokens and other log-probs, to the bit.
        skipped: number of replies that can't be sampled again: from before the replay's start, or aborted.
    """

    replies: int = 0
    tokens: int = 0
    different: tuple[str, ...] = ()
    logprobs: float = 0.0
    unequal: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Replayed:
    """A training step that was computed again.

    Attributes:
        tokens: groups whose recorded episodes are not what was trained on.
        sampled: replies that were sampled again; None if none were.
    """

    step: int
    recorded: Fingerprint
    computed: Fingerprint
    tokens: list[int] = field(default_factory=list)
    sampled: Sampled | None = None

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return next(self.differences(), None) is None

    def differences(self) -> Iterator[str]:
        """Yield what differs, in the order in which a step computes it: the first is the cause of the others."""
        if self.tokens:
            yield f"tokens of group {', '.join(map(str, self.tokens[:5]))}"
        if (again := self.sampled) is not None and again.different:
            shown = ", ".join(again.different[:3]) + (", ..." if len(again.different) > 3 else "")
            yield f"sampled tokens of {len(again.different)} of {again.replies} replies ({shown})"
        if again is not None and again.unequal:
            yield f"sampled log-probs of {again.unequal} of {again.replies} replies (by up to {again.logprobs:.1e})"
        old, new = self.recorded, self.computed
        if old.logprobs != new.logprobs:
            yield "log-probs"
        if not _same(old.loss, new.loss):
            yield f"loss ({old.loss!r} -> {new.loss!r})"
        for kind, before in _tensors(old).items():
            after = _tensors(new)[kind]
            if names := [name for name in before if before[name] != after.get(name, -1) % WORD]:
                shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                yield f"{kind} of {len(names)} of {len(before)} tensors ({shown})"

    @property
    def distance(self) -> float:
        """Relative difference of the loss or of the gradient's norm, whichever is larger."""
        old, new = self.recorded, self.computed
        return max(_relative(old.loss, new.loss), _relative(old.grad_norm, new.grad_norm))


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _relative(one: float, other: float) -> float:
    if _same(one, other):
        return 0.0
    size = max(abs(one), abs(other))
    return abs(one - other) / size if math.isfinite(size) else math.inf
