"""Module that vLLM imports in the worker processes of an `AsyncLLM`, before it loads the model there."""

from __future__ import annotations

import json
import os
import pickle
import select
import threading
from pathlib import Path
from typing import Any

from trainers.generator.arguments import ADAPTERS, PREPARED, adapt
from trainers.weights import shared


def _prepare(owner: int, **settings: Any) -> None:
    adapt(**settings)
    descriptor = os.pidfd_open(owner)
    threading.Thread(target=_end_with, args=(descriptor,), name="forge-env-owner", daemon=True).start()


def _end_with(owner: int) -> None:
    """Exit this process as soon as its owner has ended, for any reason."""
    ended = select.poll()
    ended.register(owner, select.POLLIN)
    ended.poll()
    os._exit(1)


_prepare(**json.loads(os.environ[PREPARED]))


class WeightLoader:
    """Methods that vLLM adds to its worker class."""

    model_runner: Any

    def own_pid(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def checksum(self) -> int:
        """Compute the checksum of this process's weights (`trainers.weights.checksum`)."""
        from trainers.weights.checksum import held_by

        return held_by(self.model_runner.model)

    def load_flat(self, message: bytes) -> None:
        """Load weights or adapters from the memory of another process.

        `message` has the layouts, the handles of their buffers, and whether vLLM has to reorder the weights.
        """
        from trainers.model.merging import reloadable, whole_weights
        from trainers.weights.flat import Flat

        layouts, handles, reorders = pickle.loads(message)
        base, device = Path(self.model_runner.model_config.model), self.model_runner.device
        buffers = [{dtype: shared.attach(each) for dtype, each in one.items()} for one in handles]
        published = Flat(layouts, buffers, device)
        if device.type == "cuda":
            for buffer in (each for one in buffers for each in one.values()):
                shared.pin(buffer)
        if self.model_runner.model_config.quantization == ADAPTERS:
            from trainers.generator.adapters import load_adapters

            load_adapters(self.model_runner.model, dict(published))
            return
        weights = whole_weights(published, base, everything=reorders, device=device)
        if reorders:
            skipped: dict[str, Any] = {}
            self.model_runner.reload_weights(weights_iterator=reloadable(weights, skipped))
            if skipped:
                self.model_runner.model.load_weights(skipped.items())
        else:
            self.model_runner.model.load_weights(weights)
