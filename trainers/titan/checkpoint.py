"""The trainer's part of a checkpoint, which any number of ranks writes and any other number reads.

model/          weights, as a Hugging Face folder; if adapters are trained, adapter/ (PEFT's format) instead
optimizer/      optimizer state in torch's distributed format
state.pt        schedule, counters and random states

Each rank writes and reads its own shards of weights and optimizer state (`trainers.model.writer`). Only adapters are
gathered, because they are small.

`snapshot` copies all of it into main memory. `write` needs only that copy, so training can continue during the write.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from forge_env.errors import UsageError
from forge_env.reading import open_file
from trainers.compat.torch import set_element
from trainers.model.writer import save_shards
from trainers.titan.model import TitanModel

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
"""Names, by module, that torch's pickled index of a sharded checkpoint may refer to."""


class _Unpickler(pickle.Unpickler):
    """Unpickles only names in `_METADATA`, so that a checkpoint from an untrusted source runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickles members of enumerations so
            return _memory_format
        if name not in _METADATA.get(module, ()):
            raise UsageError(f"the checkpoint's optimizer state holds a {module}.{name}", fix="don't trust this file")
        return super().find_class(module, name)


def _memory_format(kind: Any, name: str) -> _MEM_FORMAT_ENCODING:
    if kind is not _MEM_FORMAT_ENCODING:
        raise UsageError("the checkpoint's optimizer state reads an attribute", fix="don't trust this file")
    return kind[name]


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open_file(Path(self.path) / ".metadata") as file:
            metadata: Metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, weights_only=True))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's trained tensors (`TitanModel.trained_state`) and optimizer state; schedule, counters, random states."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    state: dict[str, Any]


class Stager:
    """Copies state into main memory, reusing its buffers: allocating fresh pages costs several times the copy."""

    def __init__(self, *, pinned: bool = False) -> None:
        options = StagingOptions(
            use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `state`, which the next call overwrites."""
        return cast("dict[str, Any]", self._stager.stage(state))


def snapshot(engine: TitanEngine) -> Snapshot:
    """Copy the state that `write` needs. A collective; the next snapshot overwrites the copy."""
    _ = engine.model.ranks.saving_group  # create the group now, while all ranks are at the same point of training
    weights = engine.stager.copy(engine.model.trained_state())
    optimizer = engine.stager.copy(engine.optimizer.state_dict())
    state = {
        "schedule": dict(engine.schedule.state_dict()),
        "updates": engine.updates,
        "skipped_in_a_row": engine.skipped_in_a_row,
        "rng": engine.rng.getstate(),
        "torch_rng": torch.get_rng_state(),
    }
    return Snapshot(weights, optimizer, state)


def write(taken: Snapshot, model: TitanModel, folder: Path) -> None:
    """Write a snapshot. A collective in a process group of its own, so training can continue in another thread.

    An error while shards are written, such as a full disk, is raised on all ranks; one in a file of the first rank,
    there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = model.ranks
    save_shards(taken.optimizer, FileSystemWriter(folder / "optimizer"), ranks.saving_group)
    model.write_trained(taken.weights, folder)
    if ranks.first:  # no collectives from here on
        torch.save(taken.state, folder / "state.pt")


def load(engine: TitanEngine, folder: Path) -> None:
    """Restore `engine` from what `write` wrote; a collective."""
    if not (folder / "optimizer").is_dir():
        raise UsageError(f"{folder} is not a checkpoint of this trainer", fix="start a new run")
    engine.model.load_trained(folder)
    optimizer = engine.optimizer.state_dict()
    reader, planner = _Reader(folder / "optimizer"), _Planner()
    reader.read_metadata()  # raises for a bad file here, not inside a collective
    try:
        load_shards(optimizer, storage_reader=reader, planner=planner, no_dist=engine.model.ranks.alone)
    except CheckpointException as error:  # a BaseException, which would end the process
        _, (cause, _) = next(iter(error.failures.items()))
        raise UsageError(
            f"the optimizer's state in {folder} can't be read: {type(cause).__name__}: {cause}",
            fix=f"start a new run from its model: model.path={folder / 'model'}",
        ) from error
    engine.optimizer.load_state_dict(optimizer)
    state = torch.load(folder / "state.pt", weights_only=True)
    engine.schedule.load_state_dict(state["schedule"])
    engine.updates = state["updates"]
    engine.skipped_in_a_row = state["skipped_in_a_row"]
    engine.rng.setstate(state["rng"])
    torch.set_rng_state(state["torch_rng"])
