"""Writing of Hugging Face folders by all processes that have parts of the weights; none needs a whole tensor.

torch's distributed checkpoints (DCP) plan which process writes what, and report a failure of one process to all. Here
a process doesn't write its boxes of tensors to a file of its own, but to their positions in files of whole tensors,
which the first process lays out. So nothing is gathered, and nothing is written twice.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from forge_env.errors import UsageError
from forge_env.reading import ANYWHERE, LARGEST_TABLE, read_bytes
from forge_env.tools.chat_template import ChatTemplate
from trainers.model.folder import INDEX
from trainers.model.parts import Part, Shape

LARGEST = 5_000_000_000
"""Maximum bytes of weights in one file, unless a single tensor is larger."""
COMPANIONS = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
)
"""Files of a model folder besides the weights."""
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of data types in safetensors files."""


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
        parts: this process's parts of the weights, under Hugging Face names.
        companions: config and tokenizer files to write (`read_companions`).
        folder: created if missing; all processes must have access to it.
        dtype: data type in the files.
        group: all processes that have parts; None: this process has all of them.
    """
    tensors: dict[str, list[Part]] = {}
    for part in parts:
        tensors.setdefault(part.name, []).append(part)
    save_shards(tensors, _FolderWriter(folder, companions), group, _PartsPlanner(dtype))


def read_companions(folder: Path) -> dict[str, bytes]:
    """Read the files besides the weights of a model's folder, by name; in memory they outlive the folder."""
    files = {str(file.relative_to(folder)): file for name in COMPANIONS for file in folder.glob(name) if file.is_file()}
    companions = {name: read_bytes(file, largest=LARGEST_TABLE, root=ANYWHERE) for name, file in files.items()}
    with suppress(UsageError):  # there is no usable template
        template = ChatTemplate.of(folder)
        if template is not None and Path(template.source).name == "chat_template.json":  # of a processor
            companions["chat_template.jinja"] = template.text.encode()
    return companions


def write_companions(companions: Mapping[str, bytes], folder: Path) -> None:
    """Write the files besides the weights into a model's folder."""
    for name, content in companions.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def save_shards(
    state: Mapping[str, Any], writer: StorageWriter, group: ProcessGroup | None, planner: SavePlanner | None = None
) -> None:
    """Write the state of each process of `group`; None: this process has all of it.

    Raises:
        RuntimeError: on all processes; names the first process that failed, and its error.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended without a group
            save(dict(state), storage_writer=writer, planner=planner, no_dist=group is None, process_group=group)
    except CheckpointException as error:  # a BaseException, which would end the process
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"rank {rank} could not write its shards: {type(cause).__name__}: {cause}") from error


class _PartsPlanner(DefaultSavePlanner):
    """Save planner of a state that lists the parts of each tensor by its name, to be written in this data type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._properties = TensorProperties(dtype)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(part) for parts in self.state_dict.values() for part in parts])
        return self.plan

    def _item(self, part: Part) -> WriteItem:
        start = torch.Size(part.start)
        data = TensorWriteData(
            ChunkStorageMetadata(start, torch.Size(part.shape)), self._properties, torch.Size(part.whole)
        )
        return WriteItem(MetadataIndex(part.name, start), WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        [part] = [part for part in self.state_dict[index.fqn] if part.start == index.offset]
        values: torch.Tensor = part.values.to("cpu", self._properties.dtype)
        return values


class _FolderWriter(StorageWriter):
    """Writes boxes of tensors to their positions in the files of a Hugging Face folder, and the files beside them."""

    def __init__(self, folder: Path, companions: Mapping[str, bytes]) -> None:
        self._folder = folder
        self._companions = companions

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create all files in the first process; the plans give the others each tensor's position."""
        planned = {item.index.fqn: item.tensor_data for plan in plans for item in plan.items}
        tensors = {name: data for name, data in sorted(planned.items()) if data is not None}
        self._folder.mkdir(parents=True, exist_ok=True)
        places = self._begin(tensors)
        kinds = {str(data.properties.dtype).removeprefix("torch.") for data in tensors.values()}
        self._describe(kinds.pop())
        return [replace(plan, storage_data=places) for plan in plans]

    def _begin(self, tensors: Mapping[str, TensorWriteData]) -> dict[str, tuple[str, int]]:
        """Assign tensors to files and write the files' headers; returns each tensor's file and offset."""
        files: list[list[str]] = [[]]
        used = 0
        for name, data in tensors.items():
            size = _bytes(data)
            if files[-1] and used + size > LARGEST:
                files.append([])
                used = 0
            files[-1].append(name)
            used += size
        several, places = len(files) > 1, dict[str, tuple[str, int]]()
        for number, names in enumerate(files, 1):
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if several else "model.safetensors"
            places |= self._begin_file(file, {name: tensors[name] for name in names})
        if several:
            total, files_of = sum(map(_bytes, tensors.values())), {name: file for name, (file, _) in places.items()}
            index = {"metadata": {"total_size": total}, "weight_map": files_of}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return places

    def _begin_file(self, file: str, tensors: Mapping[str, TensorWriteData]) -> dict[str, tuple[str, int]]:
        """Write a safetensors header, its length and then names, types, shapes and offsets, and reserve the data."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, data in tensors.items():
            start, end = end, end + _bytes(data)
            kind = _NAMES[data.properties.dtype]
            header[name] = {"dtype": kind, "shape": [*data.size], "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (self._folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
        return {name: (file, 8 + len(text) + header[name]["data_offsets"][0]) for name in tensors}

    def _describe(self, dtype: str) -> None:
        """Write the files besides the weights, with the data type in `config.json`."""
        write_companions(self._companions, self._folder)
        config = json.loads(self._companions["config.json"])
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
        (self._folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's boxes to their positions, one at a time."""
        places: dict[str, tuple[str, int]] = plan.storage_data
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
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _bytes(data: TensorWriteData) -> int:
    """Size of a whole tensor in bytes."""
    return prod(data.size) * data.properties.dtype.itemsize


def _put(file: int, offset: int, box: torch.Tensor, start: Sequence[int], whole: Shape) -> None:
    """Write a box of a tensor into a file that others write too, one write for each contiguous run of bytes.

    `offset` is the position of the `whole` tensor in the file in bytes; `start` the box's first index in each
    dimension.
    """
    inner = box.dim()  # the box spans the dimensions from here on
    while inner and box.shape[inner - 1] == whole[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # it has a range of this dimension, which is still contiguous
    strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
    data = box.contiguous().flatten().view(torch.uint8).numpy().data
    run = prod(box.shape[outer:]) * box.element_size()
    ranges = (range(first, first + size) for first, size in zip(start[:outer], box.shape[:outer], strict=True))
    for number, position in enumerate(product(*ranges)):
        index = (*position, *start[outer:])
        at = offset + box.element_size() * sum(i * stride for i, stride in zip(index, strides, strict=True))
        left = data[number * run : (number + 1) * run]
        while left:
            count = os.pwrite(file, left, at)
            left, at = left[count:], at + count
