"""A trainer's first rank at its real size and layout: tensors without memory, a process group that only pretends."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge_env.config.recipe import RunConfig
from forge_env.trajectory import Segment
from tests.trainers.plan.live import LiveBytes
from trainers.plan.shape import model_config
from trainers.titan import head, score
from trainers.titan.context import Context
from trainers.titan.device import use_device
from trainers.titan.engine import TitanEngine
from trainers.titan.model import TitanModel
from trainers.titan.parallel import Sharding

F = TypeVar("F", bound=Callable[..., Any])


def outside(function: F) -> F:
    """With real tensors: what looks at their values."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


class Strided:
    """What torch does about `_StridedShard`, but looked for once in all the tensors of an operation.

    torch looks again for each of them, and the optimizer's operations have hundreds.
    """

    def __init__(self) -> None:
        self._propagate = _sharding_prop._propagate_use_strided_shard_flag
        self._seen: tuple[OpSchema | None, bool] = None, False

    def __call__(self, strategy: OpStrategy, schema: OpSchema) -> None:
        if self._seen[0] is not schema:
            placements = (placement for spec in schema.args_spec for placement in spec.placements)
            self._seen = schema, any(isinstance(placement, _StridedShard) for placement in placements)
        if self._seen[1]:
            self._propagate(strategy, schema)


@contextmanager
def first_rank(config: RunConfig, folder: Path) -> Iterator[tuple[TitanEngine, FakeTensorMode]]:
    """The engine of a recipe's first rank."""
    section = config.trainer
    (folder / "config.json").write_text(json.dumps(model_config(config.model)))
    device = use_device(with_gpus=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    to_empty = torch.nn.Module.to_empty
    build = TitanModel._build

    def to_nothing(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
        with mode:
            return to_empty(module, **options)

    def build_nothing(model: TitanModel) -> Any:
        if not model.ranks.alone:  # made on the meta device, and sharded by real meshes
            return build(model)
        with mode:
            return build(model)

    if section.procs > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=section.procs)
    try:
        with (
            patch.object(torch.nn.Module, "to_empty", to_nothing),
            patch.object(TitanModel, "_build", build_nothing),
            patch.object(TitanModel, "load_hf"),
            patch.object(TitanModel, "_random_weights"),
            patch.object(Context, "part", outside(Context.part)),
            patch.object(Context, "own", outside(Context.own)),
            patch.object(score, "collate", outside(score.collate)),
            patch.object(_sharding_prop, "_propagate_use_strided_shard_flag", Strided()),
            patch.dict(head.TILE, cpu=head.TILE["cuda"]),
            patch.dict(head.ROWS, cpu=head.ROWS["cuda"]),
        ):
            model = TitanModel(
                folder,
                max_length=config.model.max_length,
                device=device.torch,
                dtype=config.model.dtype,
                sharding=Sharding(section.parallelism, section.activation_checkpoint),
            )
            with mode:
                engine = TitanEngine(
                    model,
                    section.optimizer,
                    device=device,
                    steps=10,
                    microbatch_tokens=section.microbatch_tokens,
                    share_prefixes=False,  # the sequences are equal
                )
            yield engine, mode
    finally:
        if section.procs > 1:
            dist.destroy_process_group()


def sequences(config: RunConfig, share: float = 2 / 3) -> list[Segment]:
    """As many of the greatest length as a microbatch has room for, of which `share` is learned."""
    length = config.model.max_length
    tokens = np.arange(length) % 1000
    learned = np.arange(length) >= length * (1 - share)
    return [Segment(tokens, learned) for _ in range(max(1, config.trainer.microbatch_tokens // length))]


def version(tensor: torch.Tensor) -> int:
    """How many operations have changed it in place."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor)._version


def peak_bytes(engine: TitanEngine, data: list[Segment], mode: Any) -> int:
    """Most bytes of tensors alive during a step but the first: weights, gradients, optimizer, passes, update."""
    live = LiveBytes()
    batch = engine.collate(list(range(len(data))), data)
    parameters = dict(engine.model.module.named_parameters())
    learned = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    with mode, live:
        for parameter in parameters.values():
            live.add(parameter)
            if not parameter.requires_grad:  # below adapters
                continue
            parameter.grad = torch.zeros_like(parameter)  # those of the step before stay, and so does what follows
        engine.optimizer.step()
        before = {name: version(parameter.grad) for name, parameter in learned.items()}
        live.peak = live.now
        logprobs, entropy = engine.forward(batch)
        (logprobs.sum() / 1000).backward()
        del logprobs, entropy
        engine.optimizer.step()
    missing = [name for name, parameter in learned.items() if version(parameter.grad) == before[name]]
    assert not missing, f"no gradient: {missing}"
    return live.peak
