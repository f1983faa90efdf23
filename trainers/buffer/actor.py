"""The replay buffer as an actor in a separate process, and its client for rollout workers and trainers."""

from __future__ import annotations

from trainers.actors.actor import Served, concurrent_endpoint
from trainers.actors.remote import Client
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import BufferSettings


class ReplayBuffer(Served, interface=LocalReplayBuffer):
    """A `LocalReplayBuffer` behind endpoints, which run concurrently; `RemoteReplayBuffer` is its client."""

    def __init__(self, settings: BufferSettings) -> None:
        super().__init__()
        self._settings = settings

    @concurrent_endpoint
    async def setup(self) -> None:
        """Create the buffer. Not done in the constructor because a custom rule may raise an error."""
        self.served = LocalReplayBuffer(self._settings)


class RemoteReplayBuffer(Client, interface=LocalReplayBuffer, granting=("admit", "sample", "reserve")):
    """Client of a `ReplayBuffer` actor, with the methods of `LocalReplayBuffer`."""
