"""The trainer's part of a checkpoint: written by any number of ranks, read by any other.

model/          weights, a Hugging Face folder
optimizer/      the optimizer's state in torch's distributed format: each rank writes and reads its own shards
state.pt        schedule, counters and random states
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from forge_env.errors import UsageError
from forge_env.files import written_whole

if TYPE_CHECKING:
    from trainers.titan.engine import TitanEngine


def save(engine: TitanEngine, folder: Path) -> None:
    """Write `engine`'s weights and training state; a collective."""
    folder.mkdir(parents=True, exist_ok=True)
    engine.model.save_hf(folder / "model")
    save_shards(engine.optimizer.state_dict(), checkpoint_id=folder / "optimizer", no_dist=engine.model.ranks.alone)
    if engine.model.ranks.first:
        state: dict[str, Any] = {
            "schedule": engine.schedule.state_dict(),
            "updates": engine.updates,
            "rng": engine.rng.getstate(),
            "torch_rng": torch.get_rng_state(),
        }
        with written_whole(folder / "state.pt") as staging:
            torch.save(state, staging)
    engine.model.ranks.gather(None)  # nobody goes on before all is written


def load(engine: TitanEngine, folder: Path) -> None:
    """Read what `save` wrote; a collective."""
    if not (folder / "optimizer").is_dir():
        raise UsageError(f"{folder} is no checkpoint of this trainer", fix="start the run anew")
    engine.model.load_hf(load_file(folder / "model" / "model.safetensors"))
    optimizer = engine.optimizer.state_dict()
    load_shards(optimizer, checkpoint_id=folder / "optimizer", no_dist=engine.model.ranks.alone)
    engine.optimizer.load_state_dict(optimizer)
    state = torch.load(folder / "state.pt", weights_only=False)
    engine.schedule.load_state_dict(state["schedule"])
    engine.updates = state["updates"]
    engine.rng.setstate(state["rng"])
    torch.set_rng_state(state["torch_rng"])
