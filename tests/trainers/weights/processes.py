"""What other processes do with memory that is shared; a module of few imports, since each of them makes them anew."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch

from trainers.weights import shared
from trainers.weights.flat import Flat


def negate(handles: list[shared.Handle]) -> None:
    """Write into memory of another process."""
    for handle in handles:
        shared.attach(handle).neg_()


def offer(connection: Connection) -> None:
    """Have weights, and wait."""
    weights = Flat.of({"layer": torch.arange(1000.0)})
    connection.send(weights.handles[0][torch.float32])
    connection.recv()


def read(connection: Connection, handle: shared.Handle) -> None:
    """Begin to read, and wait."""
    reading = shared.attach(handle)
    connection.send(len(reading))
    connection.recv()
