"""The trainer's part of a checkpoint: written by any number of ranks, read by any other.

model/          weights, a Hugging Face folder
optimizer/      the optimizer's state in torch's distributed format: each rank writes and reads its own shards
state.pt        schedule, counters and random states
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from forge_env.errors import UsageError
from forge_env.files import written_whole

if TYPE_CHECKING:
    from trainers.titan.engine import TitanEngine

_METADATA = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
    "torch": {"Size", "bfloat16", "float32", "float64", "int64", "strided"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
"""What torch's index of a sharded checkpoint is made of."""


class _Unpickler(pickle.Unpickler):
    """Makes nothing but such an index: a checkpoint that somebody else wrote runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _METADATA.get(module, ()):
            raise UsageError(f"the checkpoint's optimizer state holds a {module}.{name}", fix="don't trust this file")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))


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
        raise UsageError(f"{folder} is not a checkpoint of this trainer", fix="start a new run")
    engine.model.load_hf(load_file(folder / "model" / "model.safetensors"))
    optimizer = engine.optimizer.state_dict()
    reader, planner = _Reader(folder / "optimizer"), _Planner()
    reader.read_metadata()  # refused here, and not inside a collective
    load_shards(optimizer, storage_reader=reader, planner=planner, no_dist=engine.model.ranks.alone)
    engine.optimizer.load_state_dict(optimizer)
    state = torch.load(folder / "state.pt", weights_only=True)
    engine.schedule.load_state_dict(state["schedule"])
    engine.updates = state["updates"]
    engine.rng.setstate(state["rng"])
    torch.set_rng_state(state["torch_rng"])
