"""Which requests a replica takes: not while its weights are held for others, nor where they are older than asked for.

The replica itself decides: whoever sends requests, from whichever process, may not know yet how its weights are.
"""

from __future__ import annotations

from trainers.generator.types import WeightsHeldError, WeightsOldError


class Hold:
    """Whether the weights of a replica are held."""

    def __init__(self) -> None:
        self._held = False

    def begin(self) -> None:
        """Refuse ordinary requests from here on."""
        self._held = True

    def end(self) -> None:
        """Take all requests again."""
        self._held = False

    def check(self, version: int, *, held: bool, at_least: int) -> None:
        """A request arrives.

        Args:
            version: of the weights.
            held: it is for held weights.
            at_least: the oldest version that will do.

        Raises:
            WeightsHeldError: it is an ordinary one, and the weights are held.
            WeightsOldError: they are older.
        """
        if self._held and not held:
            raise WeightsHeldError("the weights of this replica are held")
        if version < at_least:
            raise WeightsOldError(f"this replica has version {version}; version {at_least} is asked for")
