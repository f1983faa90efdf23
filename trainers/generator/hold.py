"""Admission of requests by a replica: refuses them while its weights are held for others or older than requested.

The replica itself decides, because clients in other processes may not know the state of its weights yet.
"""

from __future__ import annotations

from trainers.generator.types import WeightsHeldError, WeightsOldError


class Hold:
    """Whether the weights of a replica are held, and the check of requests against that."""

    def __init__(self) -> None:
        self._held = False

    def begin(self) -> None:
        """Refuse ordinary requests from now on."""
        self._held = True

    def end(self) -> None:
        """Accept all requests again."""
        self._held = False

    def check(self, version: int, *, held: bool, at_least: int) -> None:
        """Accept an arriving request, or raise.

        Args:
            version: policy version of the replica's weights.
            held: whether the request is for held weights.
            at_least: oldest version that may serve it.

        Raises:
            WeightsHeldError: the weights are held, and the request is an ordinary one.
            WeightsOldError: the weights are older than `at_least`.
        """
        if self._held and not held:
            raise WeightsHeldError("the weights of this replica are held")
        if version < at_least:
            raise WeightsOldError(f"this replica has version {version}; version {at_least} is asked for")
