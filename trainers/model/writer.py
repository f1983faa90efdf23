"""Hugging Face folders, written by all processes that have parts of the weights; none of them has a tensor whole.

torch's distributed checkpoints (DCP) plan who writes what and tell every process where one of them fails. What is ours
is the place of a box: not in a file of its process, but inside a file of whole tensors, whose layout the first process
makes. So nothing is gathered, and nothing is written twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from forge_env.reading import ANYWHERE, LARGEST_TABLE, read_bytes
from trainers.model.folder import INDEX
from trainers.weights.flat import Part, Shape

LARGEST = 5_000_000_000
"""Bytes of weights in one file, unless a single tensor has more."""
COMPANIONS = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""Files beside the weights."""
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Of data types in safetensors files."""


def write_model(
    parts: Iterable[Part],
    companions: Mapping[str, bytes],
    folder: Path,
    *,
    dtype: torch.dtype,
    group: ProcessGroup | None = None,
) -> None:
    """Write weights as a complete Hugging Face folder, in files of at most 5 GB; a collective of `group`.

    Args:
        parts: what this process has of them, under Hugging Face's names.
        companions: config and tokenizer that it gets (`read_companions`).
        folder: made where it isn't there; all processes see it.
        dtype: of the files.
        group: of all processes that have parts; None: this one has all.

    Raises:
        RuntimeError: a process could not write its parts, or they overlap or leave something out; on all of them.
    """
    tensors: dict[str, list[Part]] = {}
    for part in parts:
        tensors.setdefault(part.name, []).append(part)
    save_shards(tensors, FolderWriter(folder, companions), group, PartsPlanner(dtype))


def read_companions(folder: Path) -> dict[str, bytes]:
    """The files beside the weights of a model's folder, by name; in memory they outlive the folder."""
    files = {name: folder / name for name in COMPANIONS}
    return {
        name: read_bytes(file, largest=LARGEST_TABLE, root=ANYWHERE) for name, file in files.items() if file.is_file()
    }


def save_shards(
    state: Mapping[str, Any], writer: StorageWriter, group: ProcessGroup | None, planner: SavePlanner | None = None
) -> None:
    """Write what each process of `group` has; None: this one has all. What fails on one of them is raised on all.

    Raises:
        RuntimeError: with the first process that failed, and why.
    """
    try:
        save(dict(state), storage_writer=writer, planner=planner, no_dist=group is None, process_group=group)
    except CheckpointException as error:  # no `Exception`, so that it would end the process
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"rank {rank} could not write its shards: {type(cause).__name__}: {cause}") from error


class PartsPlanner(DefaultSavePlanner):
    """Of a state that has the parts of each tensor by its name.

    Args:
        dtype: in which they are written.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._properties = TensorProperties(dtype)

    def create_local_plan(self) -> SavePlan:
        """Every part is written by the process that has it."""
        self.plan = SavePlan([self._item(part) for parts in self.state_dict.values() for part in parts])
        return self.plan

    def _item(self, part: Part) -> WriteItem:
        start = torch.Size(part.start)
        data = TensorWriteData(
            ChunkStorageMetadata(start, torch.Size(part.shape)), self._properties, torch.Size(part.whole)
        )
        return WriteItem(MetadataIndex(part.name, start), WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The part that begins there, in main memory."""
        [part] = [part for part in self.state_dict[index.fqn] if part.start == index.offset]
        values: torch.Tensor = part.values.to("cpu", self._properties.dtype)
        return values


class Place(NamedTuple):
    """Where a tensor lies: in which file, from which byte on."""

    file: str
    offset: int


class FolderWriter(StorageWriter):
    """Puts boxes of tensors where they belong in the files of a Hugging Face folder.

    Args:
        folder: to write to.
        companions: config and tokenizer that it gets.
    """

    def __init__(self, folder: Path, companions: Mapping[str, bytes]) -> None:
        self._folder = folder
        self._companions = companions

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is remembered."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The first process begins all files; the others learn where each tensor lies."""
        found = {item.index.fqn: item.tensor_data for plan in plans for item in plan.items}
        tensors = {name: data for name, data in sorted(found.items()) if data is not None}
        self._folder.mkdir(parents=True, exist_ok=True)
        places = self._begin(tensors)
        kinds = {str(data.properties.dtype).removeprefix("torch.") for data in tensors.values()}
        self._describe(kinds.pop())
        return [replace(plan, storage_data=places) for plan in plans]

    def _begin(self, tensors: Mapping[str, TensorWriteData]) -> dict[str, Place]:
        """Write what comes before the tensors in each file, and which file each is in."""
        files: list[list[str]] = [[]]
        used = 0
        for name, data in tensors.items():
            size = _bytes(data)
            if files[-1] and used + size > LARGEST:
                files.append([])
                used = 0
            files[-1].append(name)
            used += size
        several, places = len(files) > 1, dict[str, Place]()
        for number, names in enumerate(files, 1):
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if several else "model.safetensors"
            places |= self._begin_file(file, {name: tensors[name] for name in names})
        if several:
            total = sum(map(_bytes, tensors.values()))
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: place.file for name, place in places.items()},
            }
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return places

    def _begin_file(self, file: str, tensors: Mapping[str, TensorWriteData]) -> dict[str, Place]:
        """The header of one file of the safetensors format: its length, then names, types, shapes and offsets."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, data in tensors.items():
            start, end = end, end + _bytes(data)
            header[name] = {
                "dtype": _NAMES[data.properties.dtype],
                "shape": [*data.size],
                "data_offsets": [start, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (self._folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
        return {name: Place(file, 8 + len(text) + header[name]["data_offsets"][0]) for name in tensors}

    def _describe(self, dtype: str) -> None:
        """The files beside the weights."""
        for name, content in self._companions.items():
            (self._folder / name).write_bytes(content)
        config = json.loads(self._companions["config.json"])
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
        (self._folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Every process puts its boxes in their places, one at a time."""
        places: dict[str, Place] = plan.storage_data
        with ExitStack() as stack:
            files: dict[str, int] = {}
            for item in plan.items:
                file, offset = places[item.index.fqn]
                if file not in files:
                    files[file] = os.open(self._folder / file, os.O_WRONLY | os.O_CLOEXEC)
                    stack.callback(os.close, files[file])
                box = planner.resolve_data(item)
                assert isinstance(box, torch.Tensor)
                assert item.index.offset is not None
                assert item.tensor_data is not None
                _put(files[file], offset, box, item.index.offset, item.tensor_data.size)
        written: Future[list[WriteResult]] = Future()
        written.set_result([])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing is left to do."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No identifier is asked for."""
        return False


def _bytes(data: TensorWriteData) -> int:
    """Of a whole tensor."""
    return prod(data.size) * data.properties.dtype.itemsize


def _put(file: int, offset: int, box: torch.Tensor, start: Sequence[int], whole: Shape) -> None:
    """Write a box of a tensor that lies at a byte of a file, each run of bytes that lie together at once.

    Args:
        file: a descriptor; other processes write to the same file.
        offset: of the tensor, in bytes.
        box: contiguous or not.
        start: its first index in each dimension.
        whole: shape of the tensor.
    """
    inner = box.dim()  # dimensions from here on are whole
    while inner and box.shape[inner - 1] == whole[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # and of this one the box has a range, which is still in one piece
    strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
    data = box.contiguous().flatten().view(torch.uint8).numpy().data
    run = prod(box.shape[outer:]) * box.element_size()
    ranges = (range(first, first + size) for first, size in zip(start[:outer], box.shape[:outer], strict=True))
    for number, place in enumerate(product(*ranges)):
        index = (*place, *start[outer:])
        at = offset + box.element_size() * sum(i * stride for i, stride in zip(index, strides, strict=True))
        left = data[number * run : (number + 1) * run]
        while left:
            count = os.pwrite(file, left, at)
            left, at = left[count:], at + count
