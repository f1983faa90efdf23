"""This rank's parts of each weight, under Hugging Face names.

TorchTitan's adapters convert whole tensors. They rename most of them, reorder the rows of some (queries and keys of
Llama), and turn a tensor of experts into one tensor for each. All of this can be done with a shard alone, so no rank
has to gather anything. Which conversion an adapter applies is detected by letting it convert numbered rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from forge_env.errors import ForgeError
from trainers.compat.torch import offset_of_shard
from trainers.model.parts import Part, Shape
from trainers.titan.parallel import local


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a TorchTitan tensor in Hugging Face's files, by its names there; none if it is not in the files.

    If `sliced`, each names a slice along its first dimension. `rows` is the TorchTitan row that each row there equals,
    int64 [rows]; None: the same order.
    """

    names: tuple[str, ...]
    sliced: bool = False
    rows: torch.Tensor | None = None


def place_of(adapter: StateDictAdapter, name: str, shape: Shape) -> Place:
    """Determine the location of a tensor, by converting one whose rows are numbered."""
    count = shape[0]
    numbers = torch.arange(count, dtype=torch.int32).view(-1, *[1] * (len(shape) - 1)).expand(shape)
    convert: Callable[..., dict[str, torch.Tensor]] = adapter.to_hf
    converted = convert({name: numbers})
    if not converted:
        return Place(())
    [theirs, *_] = shapes = [tuple(tensor.shape) for tensor in converted.values()]
    if len(converted) == 1 and theirs == shape:
        rows = next(iter(converted.values())).reshape(count, -1)[:, 0].long()
        return Place((*converted,), rows=None if torch.equal(rows, torch.arange(count)) else rows)
    if len(converted) == count and all(each == shape[1:] for each in shapes):
        numbered = {int(tensor.flatten()[0]): theirs for theirs, tensor in converted.items()}
        return Place(tuple(numbered[number] for number in range(count)), sliced=True)
    raise ForgeError(f"{type(adapter).__name__} makes {shapes} of {name} with the shape {shape}: it can't be published")


class Shards:
    """This rank's parts of a model's weights; the `first` rank represents all for tensors that aren't sharded."""

    def __init__(self, adapter: StateDictAdapter, *, first: bool) -> None:
        self._adapter = adapter
        self._first = first
        self._places: dict[str, Place] = {}
        self._kinds: dict[str, tuple[str, Place]] = {}
        """First layer seen of each name (without its number) and shape: the layer's number and the tensor's place."""

    def parts(self, name: str, item: torch.Tensor, *, copies: bool = False) -> Iterator[Part]:
        """This rank's parts of a TorchTitan tensor, as views of it.

        Parts that several ranks have are yielded by one of them, or with `copies` by each.
        """
        whole = tuple(item.shape)
        location = self._places.get(name)
        if location is None:
            location = self._places[name] = self._place(name, whole)
        if not location.names or not (copies or self._own(item)):
            return
        start = start_of(item)
        shard = local(item).detach()
        if location.sliced:
            for number, tensor in enumerate(shard, start[0]):
                if tensor.numel():
                    yield Part(location.names[number], start[1:], whole[1:], tensor)
        elif shard.numel():
            part = Part(location.names[0], start, whole, shard)
            yield from [part] if location.rows is None else _reordered(part, location.rows)

    def _place(self, name: str, shape: Shape) -> Place:
        """Location of a tensor; `place_of` is called once for the tensors of all layers."""
        number = re.search(r"\d+", name)
        if number is None:
            return place_of(self._adapter, name, shape)
        kind = f"{name[: number.start()]}{{}}{name[number.end() :]} {shape}"
        if kind not in self._kinds:
            self._kinds[kind] = number[0], place_of(self._adapter, name, shape)
        first, location = self._kinds[kind]
        names = (theirs.replace(f".{first}.", f".{number[0]}.", 1) for theirs in location.names)
        return replace(location, names=tuple(names))

    def _own(self, item: torch.Tensor) -> bool:
        """Whether this rank represents all ranks that have the same values of a tensor."""
        if not isinstance(item, DTensor):
            return self._first
        places: Any = item.device_mesh.get_coordinate()
        return not any(
            coordinate and isinstance(each, Replicate) for coordinate, each in zip(places, item.placements, strict=True)
        )


def start_of(item: torch.Tensor) -> Shape:
    """First index of this rank's shard of a tensor, in each dimension."""
    return offset_of_shard(item) if isinstance(item, DTensor) else (0,) * item.dim()


def _reordered(part: Part, rows: torch.Tensor) -> Iterator[Part]:
    """Convert a part to another row order: yields one part for each run of rows that are adjacent in that order.

    `rows` are the indices of the TorchTitan row that each row of the other order equals.
    """
    first, count = part.start[0], len(part.tensor)
    targets = torch.argsort(rows)[first : first + count]  # new index of each row
    sorted_targets, order = torch.sort(targets)
    ends = torch.nonzero(torch.diff(sorted_targets) != 1).flatten() + 1
    for indices, run in zip(order.tensor_split(ends.tolist()), sorted_targets.tensor_split(ends.tolist()), strict=True):
        yield Part(part.name, (int(run[0]), *part.start[1:]), part.whole, part.tensor, indices)
