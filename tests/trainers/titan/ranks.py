"""What each rank of a trainer does in the tests of several ranks; a process of its own runs it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from forge_env.config.recipe import LoRASection, OptimizerSection, ParallelismSection
from forge_env.trajectory import Segment
from trainers.actors.processes import ADDRESS
from trainers.actors.ranks import join, leave
from trainers.losses.grpo import GRPOLoss, GSPOLoss
from trainers.losses.sft import SFTLoss
from trainers.losses.types import Loss, LossOutput, TokenBatch
from trainers.model.export import read_weights
from trainers.titan.checkpoint import write
from trainers.titan.device import use_device
from trainers.titan.engine import TitanEngine
from trainers.titan.head import logprobs_and_entropy
from trainers.titan.model import TitanModel
from trainers.titan.parallel import Sharding, whole
from trainers.weights.flat import Flat, Layout
from trainers.weights.transport import Sender

See = Callable[[dict[str, Path], Path], dict[str, Any]]
"""What a rank does with folders of models and a folder to write to."""
VOCABULARY = 320
STEPS = 3
FORKING = multiprocessing.get_context("forkserver")
"""Starts processes that have imported this already: torch and TorchTitan take a new interpreter ten seconds."""
FORKING.set_forkserver_preload([__name__])
FSDP = {"data_parallel_shard_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}
CONTEXT = {"context_parallel_degree": 2}


def sequences(count: int = 13, seed: int = 0) -> list[Segment]:
    """Random tokens; the first four of a sequence are not to be learned."""
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        length = rng.randrange(8, 60)
        ids = np.array([rng.randrange(VOCABULARY) for _ in range(length)])
        advantage = rng.uniform(-1, 1)
        mask = np.arange(length) >= 4
        result.append(Segment(ids, mask, mask * np.float32(-5.8), advantages=mask * np.float32(advantage)))
    return result


def forked() -> list[Segment]:
    """`sequences`, of which every second belongs to the episode of the fourth before it."""
    found = sequences()
    for number, segment in enumerate(found):
        segment.episode = number - 4 if number % 2 and number >= 4 else number
    return found


def tree(count: int = 14, seed: int = 0) -> list[Segment]:
    """Sequences that continue, cut short, repeat or leave others at random positions, in random order.

    Any token but the first may be learned, those that are shared included, with other values in every sequence.
    """
    rng = np.random.default_rng(seed)
    result: list[Segment] = []
    for number in range(count):
        before = result[rng.integers(number)].token_ids if number else np.zeros(0, np.int32)
        kept = before[: (0, len(before), rng.integers(len(before) + 1))[rng.integers(3)]]
        ids = np.concatenate([kept, rng.integers(0, VOCABULARY, rng.integers(0 if len(kept) > 1 else 2, 40))])[:110]
        mask = rng.random(len(ids)) < 0.6
        sampled = [np.where(mask, rng.normal(mean, 1, len(ids)), 0).astype(np.float32) for mean in (-5.8, 0)]
        result.append(Segment(ids, mask, sampled[0], advantages=sampled[1], episode=number // 2))
    return [result[place] for place in rng.permutation(count)]


def engine(
    folder: Path, dims: dict[str, int] | None = None, *, lora: LoRASection | None = None, **sharding: Any
) -> TitanEngine:
    """An engine on `folder`, one rank of those that have joined."""
    device = use_device(with_gpus=False)
    spread = Sharding(ParallelismSection(**(dims or {})), **sharding)
    model = TitanModel(folder, max_length=128, device=device.torch, sharding=spread, lora=lora)
    section = OptimizerSection(lr=1e-3, warmup_steps=0, decay_start=1.0)
    return TitanEngine(model, section, device=device, steps=20, microbatch_tokens=256)


def observe(trained: TitanEngine, *, data: list[Segment] | None = None, loss: Loss | None = None) -> dict[str, Any]:
    """Gradients of one batch, then metrics and weights of `STEPS` steps, then log-probabilities."""
    data, loss = data or sequences(), loss or SFTLoss()
    trained.forward_backward(data, loss)
    parameters = trained.model.module.named_parameters()
    gradients = {name: whole(p.grad).clone() for name, p in parameters if p.requires_grad}
    trained.clear_gradients()
    for optimizer in trained.optimizer.optimizers:
        for group in optimizer.param_groups:
            group["eps"] = 1e-6  # with 1e-8, the rounding of a gradient near 0 moves its weight by a tenth of the rate
    return {
        "gradients": {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in gradients.items()},
        "metrics": [trained.train(data, loss, minibatches=2) for _ in range(STEPS)],
        "weights": weights(trained),
        "logprobs": trained.logprobs(data[:3]),
    }


def weights(trained: TitanEngine) -> dict[str, torch.Tensor]:
    """Copies, whole, under Hugging Face names."""
    return {name: tensor.clone() for name, tensor in trained.model.state_dict_hf().items()}


def check_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """The same weights after a few steps at a rate of 1e-3, but for rounding.

    AdamW divides a gradient by its size, so the rounding of the very smallest gradients shows in single weights.
    """
    assert one.keys() == other.keys()
    error = torch.cat([(one[name] - other[name]).flatten() for name in one])
    assert float(error.square().mean().sqrt()) < 1e-6
    assert float(error.abs().max()) < 1e-4


def rank_main(rank: int, size: int, folders: dict[str, Path], out: Path, see: See) -> None:
    """What is asked of one of two or four ranks; the first writes what it saw."""
    logging.disable(logging.INFO)
    torch.seed()  # type: ignore[no-untyped-call]  # not the one of all that are forked
    store = dist.FileStore(str(out / "store"), size)
    use_device(with_gpus=False)
    join(store, rank, size, with_gpus=False)
    seen = see(folders, out)
    if rank == 0:
        torch.save(seen, out / "seen.pt")
    leave()


def offer(rank: int, size: int, folder: Path, dims: dict[str, int], meet: Path, connection: Connection) -> None:
    """A rank on a host of its own: twice the weights of before, and where its shards of them lie, as often as asked."""
    logging.disable(logging.INFO)
    torch.seed()
    os.environ[ADDRESS] = f"tcp://127.0.0.{2 + rank}:26700"
    join(dist.FileStore(str(meet), size), rank, size, with_gpus=False)
    sharding = Sharding(ParallelismSection(**dims))
    model = TitanModel(folder, max_length=128, device=use_device(with_gpus=False).torch, sharding=sharding)
    sender = Sender()
    while connection.recv():
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.mul_(2.0)
        connection.send(sender.snapshot(model.published()))
    leave()


def two(folders: dict[str, Path], out: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    tied = folders["tied"]
    for kind, folder in folders.items():
        seen[f"fsdp {kind}"] = observe(engine(folder, {} if kind == "tied" else FSDP))
        if "mixture" not in kind and kind not in ("delta", "capped", "shared keys"):  # refused
            seen[f"tensor {kind}"] = observe(engine(folder, TENSOR))
        if "delta" not in kind:
            seen[f"context {kind}"] = observe(engine(folder, CONTEXT))
    seen["vocabulary"] = _score_a_part()
    for kind in ("tied", "llama", "fused"):
        for name, dims in {"fsdp": FSDP, "tensor": TENSOR, "context": CONTEXT}.items():
            seen[f"adapters {name} {kind}"] = observe(engine(out / kind, dims, lora=LoRASection()))
    seen["adapters saved"] = _save_adapters(out / "llama", out)
    seen["by sequence"] = observe(engine(tied, CONTEXT), loss=GSPOLoss())
    seen["forked fsdp"] = observe(engine(tied), data=forked(), loss=GSPOLoss())
    seen["forked context"] = observe(engine(tied, CONTEXT), data=forked(), loss=GSPOLoss())
    for name, dims in {"fsdp": FSDP, "tensor": TENSOR, "context": CONTEXT}.items():
        seen[f"tree {name}"] = observe(engine(tied, dims), data=tree(), loss=GRPOLoss())
    seen["fewer sequences than ranks"] = observe(engine(tied), data=sequences(1))
    seen["recomputed"] = observe(engine(tied, activation_checkpoint="full"))
    seen["recomputed shared keys"] = observe(engine(folders["shared keys"], FSDP, activation_checkpoint="full"))
    seen["skipped"] = _skip(tied)
    _resume_and_save(tied, out)
    seen["saved beside training"] = _save_beside(tied, out)
    seen["disk full"] = _fill_the_disk(tied, out)
    return seen


def four(folders: dict[str, Path], out: Path) -> dict[str, Any]:
    folder = folders["tied"]
    return {
        "fsdp and tensor": observe(engine(folder, TENSOR)),
        "fsdp and context": observe(engine(folder, CONTEXT)),
        "tensor and context": observe(engine(folder, TENSOR | CONTEXT)),
        "tree": observe(engine(folder, TENSOR | CONTEXT), data=tree(), loss=GRPOLoss()),
    }


def head_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [7, 8], a head of 21 tokens, targets [7]."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(count, 8, generator=generator, dtype=torch.float64) for count in (7, 21))
    return hidden, weight, torch.tensor([0, 10, 11, 20, 5, 15, 1])


def head_outputs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **options: Any) -> list[Any]:
    """Log-probabilities, entropies and the gradients of a function of both."""
    hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, 0.7, **options)
    factors = torch.arange(1.0, 8.0, dtype=torch.float64)
    gradients = torch.autograd.grad((logprobs * factors + entropy / factors).sum(), (hidden, weight))
    return [logprobs.detach(), entropy.detach(), *gradients]


def _score_a_part() -> list[Any]:
    """The head of 21 tokens, of which the first rank has 11, with the gradients of all parts together."""
    hidden, weight, targets = head_inputs()
    rank = dist.get_rank()
    own = weight[11 * rank : 11 * rank + 11].clone()
    seen: list[list[Any]] = []
    for tile in ((7, 21), (3, 4)):
        *values, part = head_outputs(
            hidden.clone(), own.clone(), targets, group=dist.group.WORLD, first=11 * rank, tile=tile
        )
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, part)
        seen.append([*values, torch.cat(parts)])
    return seen


class SpoiledOnOneRank(SFTLoss):
    """Not finite in the second rank's part of the batch."""

    def __call__(self, batch: TokenBatch) -> LossOutput:
        output = super().__call__(batch)
        output.loss = output.loss * (float("nan") if dist.get_rank() else 1.0)
        return output


def _skip(folder: Path) -> dict[str, Any]:
    """What all ranks make of an update that only one of them sees spoiled."""
    trained = engine(folder)
    metrics = trained.train(sequences(), SpoiledOnOneRank())
    after = trained.train(sequences(), SFTLoss())
    seen: list[Any] = trained.model.ranks.gather(
        (metrics["skipped_updates"], after["skipped_updates"], trained.updates)
    )
    return {"by rank": seen, "weights": weights(trained)}


def _save_adapters(folder: Path, out: Path) -> list[NDArray[np.float32]]:
    """Saves adapters with two ranks; what those compute that go on with them."""
    trained, resumed = (engine(folder, lora=LoRASection()) for _ in range(2))
    trained.train(sequences(), SFTLoss(), minibatches=2)
    trained.save(out / "adapters-by-two")
    trained.model.save_hf(out / "merged-by-two")
    resumed.load(out / "adapters-by-two")
    with resumed.model.base():
        return [*resumed.logprobs(sequences(3)), *engine(folder).logprobs(sequences(3))]


def _resume_and_save(folder: Path, out: Path) -> None:
    """Goes on from what a single rank saved after one step, and saves after another."""
    resumed = engine(folder)
    resumed.load(out / "by-one")
    resumed.train(sequences(), SFTLoss(), minibatches=2)
    resumed.save(out / "by-one-then-two")


def _save_beside(folder: Path, out: Path) -> list[float]:
    """Writes a checkpoint in a thread while the ranks train on; losses of the next step, and after a resume."""
    trained, losses = engine(folder), []
    for round in range(3):
        taken = trained.snapshot()
        with ThreadPoolExecutor(1) as thread:
            written = thread.submit(write, taken, trained.model, out / f"beside-{round}")
            losses.append(trained.train(sequences(), SFTLoss(), minibatches=2)["loss"])
            written.result()
    resumed = engine(folder)
    resumed.load(out / "beside-1")
    return [*losses[1:], *(resumed.train(sequences(), SFTLoss(), minibatches=2)["loss"] for _ in range(2))]


def _fill_the_disk(folder: Path, out: Path) -> list[list[bool]]:
    """Whether each rank's write fails, where the disk is full for one of them; and whether they train on."""
    trained, seen = engine(folder), []
    for full in (0, 1):
        if dist.get_rank() == full:
            (out / f"full-{full}" / "optimizer" / f"__{full}_0.distcp").mkdir(parents=True)  # no file can be there
        trained.model.ranks.gather(None)
        taken = trained.snapshot()
        try:
            write(taken, trained.model, out / f"full-{full}")
            failed = False
        except RuntimeError as error:
            failed = f"rank {full} could not write its shards: IsADirectoryError" in str(error)
        metrics = trained.train(sequences(), SFTLoss())
        seen.append([*trained.model.ranks.gather(failed), metrics["loss"] > 0])
    return seen


def published(folders: dict[str, Path], out: Path) -> dict[str, Any]:
    """What the ranks publish and write of every model, and what each of them has of it, against what they have read.

    The dims of a layout are part of a folder's name, so that each model is sharded in one way.
    """
    seen: dict[str, Any] = {}
    for name, folder in folders.items():
        kind = name.split(":")[0]
        degrees = {"fsdp": {}, "tensor": TENSOR, "context": CONTEXT}[kind]
        model = TitanModel(
            folder,
            max_length=128,
            device=use_device(with_gpus=False).torch,
            sharding=Sharding(ParallelismSection(**degrees)),
        )
        gather, DTensor.full_tensor = DTensor.full_tensor, _never
        try:
            parts = model.published()
            model.save_hf(out / name)
        finally:
            DTensor.full_tensor = gather
        layout = Layout.of(parts)
        packed = {dtype: tensor.clone() for dtype, tensor in layout.pack(parts).items()}
        layouts, buffers = zip(*model.ranks.gather((layout, packed)), strict=True)
        whole = model.state_dict_hf()
        if model.ranks.first:
            put_together = dict(Flat(layouts, buffers))
            assert put_together.keys() == whole.keys(), name
            others = put_together, read_weights(out / name), read_weights(folder)
            different = [
                key for key, tensor in whole.items() if not all(torch.equal(tensor, each[key]) for each in others)
            ]
            sizes = [sum(tensor.nbytes for tensor in each.values()) for each in buffers]
            seen[name] = different, sizes, sum(tensor.nbytes for tensor in whole.values())
    return seen


def _never(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("a tensor was gathered")


def run_ranks(size: int, folders: dict[str, Path], out: Path, see: See) -> dict[str, Any]:
    """Run `see` in `size` processes, the ranks of one trainer; what the first saw."""
    processes = [FORKING.Process(target=rank_main, args=(rank, size, folders, out, see)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * size
    seen: dict[str, Any] = torch.load(out / "seen.pt", weights_only=False)
    return seen
