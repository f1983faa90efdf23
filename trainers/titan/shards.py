"""What one rank has of each weight, under Hugging Face's names.

TorchTitan's adapters convert whole tensors. What they do is renaming for most, a new order of rows for some (queries
and keys of Llama), and for experts one tensor for each. All of this can be done with a shard alone, so no rank ever has
to gather anything; which of it an adapter does is found by letting it convert numbered rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from forge_env.errors import ForgeError
from trainers.weights.flat import Part, Shape


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of TorchTitan's is in Hugging Face's files.

    Attributes:
        names: of the tensor there; of several, each is one slice of it; without any, it isn't there.
        sliced: it is several, along its first dimension.
        rows: which of its rows each row there is, int64 [rows]; None: the same.
    """

    names: tuple[str, ...]
    sliced: bool = False
    rows: torch.Tensor | None = None


def place_of(adapter: StateDictAdapter, name: str, shape: Shape) -> Place:
    """Where a tensor goes, found by converting one whose rows are numbered.

    Raises:
        ForgeError: the adapter does something else with it.
    """
    count = shape[0]
    numbers = torch.arange(count, dtype=torch.int32).view(-1, *[1] * (len(shape) - 1)).expand(shape)
    convert: Callable[..., dict[str, torch.Tensor]] = adapter.to_hf
    found = convert({name: numbers})
    if not found:
        return Place(())
    [theirs, *_] = shapes = [tuple(tensor.shape) for tensor in found.values()]
    if len(found) == 1 and theirs == shape:
        rows = next(iter(found.values())).reshape(count, -1)[:, 0].long()
        return Place((*found,), rows=None if torch.equal(rows, torch.arange(count)) else rows)
    if len(found) == count and all(each == shape[1:] for each in shapes):
        numbered = {int(tensor.flatten()[0]): theirs for theirs, tensor in found.items()}
        return Place(tuple(numbered[number] for number in range(count)), sliced=True)
    raise ForgeError(f"{type(adapter).__name__} makes {shapes} of {name} with the shape {shape}: it can't be published")


class Shards:
    """This rank's parts of a model's weights.

    Args:
        adapter: TorchTitan's, between both worlds' names.
        first: whether this rank is the first, which has what all have.
    """

    def __init__(self, adapter: StateDictAdapter, *, first: bool) -> None:
        self._adapter = adapter
        self._first = first
        self._places: dict[str, Place] = {}
        self._kinds: dict[str, tuple[str, Place]] = {}
        """Of the tensors of all layers, the number of the first that was seen, and its place."""

    def parts(self, name: str, item: torch.Tensor, *, copies: bool = False) -> Iterator[Part]:
        """What this rank has of a tensor of TorchTitan's, views of it.

        Args:
            name: of the tensor.
            item: all of it, or this rank's shard.
            copies: also what another rank has just so; otherwise one of them has it.
        """
        whole = tuple(item.shape)
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = self._place(name, whole)
        if not place.names or not (copies or self._own(item)):
            return
        start = start_of(item)
        local = (item.to_local() if isinstance(item, DTensor) else item).detach()
        if place.sliced:
            for number, tensor in enumerate(local, start[0]):
                if tensor.numel():
                    yield Part(place.names[number], start[1:], whole[1:], tensor)
        elif local.numel():
            part = Part(place.names[0], start, whole, local)
            yield from [part] if place.rows is None else _reordered(part, place.rows)

    def _place(self, name: str, shape: Shape) -> Place:
        """See `place_of`, which is asked once for the tensors of all layers."""
        number = re.search(r"\d+", name)
        if number is None:
            return place_of(self._adapter, name, shape)
        kind = f"{name[: number.start()]}{{}}{name[number.end() :]} {shape}"
        if kind not in self._kinds:
            self._kinds[kind] = number[0], place_of(self._adapter, name, shape)
        first, place = self._kinds[kind]
        names = (theirs.replace(f".{first}.", f".{number[0]}.", 1) for theirs in place.names)
        return replace(place, names=tuple(names))

    def _own(self, item: torch.Tensor) -> bool:
        """Whether this rank is the one that stands for all that have the same of a tensor."""
        if not isinstance(item, DTensor):
            return self._first
        places: Any = item.device_mesh.get_coordinate()
        return not any(
            place and isinstance(each, Replicate) for place, each in zip(places, item.placements, strict=True)
        )


def start_of(item: torch.Tensor) -> Shape:
    """First index of this rank's shard of a tensor, in each dimension."""
    if not isinstance(item, DTensor):
        return (0,) * item.dim()
    _, start = compute_local_shape_and_global_offset(item.shape, item.device_mesh, item.placements)
    return start


def _reordered(part: Part, rows: torch.Tensor) -> Iterator[Part]:
    """A part in another order of rows: one part for each run of rows that lie together then.

    Args:
        part: of TorchTitan's tensor.
        rows: which of its rows each row of the other is.
    """
    first, count = part.start[0], len(part.tensor)
    there = torch.argsort(rows)[first : first + count]  # where each row goes
    places, order = torch.sort(there)
    ends = torch.nonzero(torch.diff(places) != 1).flatten() + 1
    for own, run in zip(order.tensor_split(ends.tolist()), places.tensor_split(ends.tolist()), strict=True):
        yield Part(part.name, (int(run[0]), *part.start[1:]), part.whole, part.tensor, own)
