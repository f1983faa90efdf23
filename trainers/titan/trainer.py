"""The trainer actor: TorchTitan's model, optimizer and schedule behind endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from forge_env.config.recipe import LoRASection, OptimizerSection, ParallelismSection
from forge_env.errors import ContractError, UsageError
from forge_env.run.fingerprint import Fingerprint
from trainers.actors.actor import concurrent_endpoint, endpoint
from trainers.actors.processes import leave_as_it_stands, settle_heap, settle_imports
from trainers.actors.ranks import RankedActor, leave

if TYPE_CHECKING:
    from trainers.weights.transport import Published


class TitanTrainer(RankedActor):
    """One model in training, in one process or several.

    Several processes are the ranks of one trainer: call every endpoint on all of them; each returns the same.

        trainer = await TitanTrainer.options(procs=2).as_actor(folder, max_length=512)
        await trainer.configure.call(OptimizerSection(), loss=SFTLoss(), steps=10, microbatch_tokens=8192)
        metrics = first(await trainer.train.call(sequences))

    Args:
        folder: Hugging Face checkpoint folder (config and tokenizer; weights are optional).
        max_length: maximum sequence length.
        threads: CPU threads of each process.
        seed: seed of initial weights and minibatch order.
        dtype: precision of the arithmetic; weights are float32.
        parallelism: how several processes share the work.
        activation_checkpoint: `none`, `selective` or `full`.
        compile: compile the transformer blocks.
        lora: train adapters on top of the folder's weights; None: train the weights.
        base_name: name of the base model in adapter files; by default the folder.
        transport: transfer of weights to the generators: `shared` or `torchstore` (`trainers.weights.transport`).
    """

    def __init__(
        self,
        folder: str,
        *,
        max_length: int,
        threads: int = 1,
        with_gpus: bool = False,
        seed: int = 0,
        dtype: str = "float32",
        parallelism: ParallelismSection | None = None,
        activation_checkpoint: str = "none",
        compile: bool = False,
        lora: LoRASection | None = None,
        base_name: str | None = None,
        transport: str = "shared",
    ) -> None:
        self._folder = folder
        self._options: dict[str, Any] = {
            "max_length": max_length,
            "seed": seed,
            "dtype": dtype,
            "lora": lora,
            "base_name": base_name,
        }
        self._threads = threads
        self._with_gpus = with_gpus
        self._seed = seed
        self._parallelism = parallelism or ParallelismSection()
        self._blocks: dict[str, Any] = {"activation_checkpoint": activation_checkpoint, "compile": compile}
        self._transport = transport
        self._model: Any = None
        self._engine_or_none: Any = None
        self._device: Any = None
        self._sender: Any = None
        self._loss: Any = None
        self._minibatches = 1
        self._uploading: asyncio.Task[float] | None = None
        self._saving: asyncio.Task[dict[str, float]] | None = None

    @endpoint
    async def setup(self) -> None:
        """Build the model and load its weights."""
        leave_as_it_stands()
        from trainers.titan.device import use_device

        self._device = use_device(self._with_gpus)
        from trainers.titan.model import TitanModel
        from trainers.titan.parallel import Sharding
        from trainers.weights.transport import Sender

        kind = Sender
        if self._transport == "torchstore":
            from trainers.weights.store import StoreSender as kind
        settle_imports()
        sharding = Sharding(self._parallelism, **self._blocks)
        self._model = TitanModel(self._folder, device=self._device.torch, sharding=sharding, **self._options)
        self._sender = kind(self._model.dtype)  # generators compute in this precision
        settle_heap()

    @endpoint
    async def configure(
        self,
        optimizer: OptimizerSection,
        *,
        loss: Any,
        steps: int,
        microbatch_tokens: int,
        share_prefixes: bool = True,
        minibatches: int = 1,
        temperature: float = 1.0,
        threads: int | None = None,
    ) -> None:
        """Begin a phase of training with this loss, a fresh optimizer, and a schedule over `steps`."""
        from trainers.titan.engine import TitanEngine

        self._loss = loss
        self._minibatches = minibatches
        self._engine_or_none = TitanEngine(
            self._model,
            optimizer,
            device=self._device,
            steps=steps,
            microbatch_tokens=microbatch_tokens,
            share_prefixes=share_prefixes,
            temperature=temperature,
            threads=threads or self._threads,
            seed=self._seed,
        )

    @property
    def _engine(self) -> Any:
        if self._engine_or_none is None:
            raise UsageError("the trainer has no optimizer and no loss yet", fix="call `configure` first")
        return self._engine_or_none

    @endpoint
    async def train(self, sequences: list[Any]) -> dict[str, float]:
        """Update the weights from one batch of segments; returns its metrics."""
        # In a thread, so that a transfer of weights to the store can continue.
        metrics: dict[str, float] = await asyncio.to_thread(
            self._engine.train, sequences, self._loss, minibatches=self._minibatches
        )
        return metrics

    @endpoint
    async def train_on(self, buffer: Any, step: int) -> dict[str, float]:
        """Update the weights from the buffer's batch of `step`; every rank fetches the sequences it computes."""
        from trainers.losses.types import needs
        from trainers.titan.score import fetch

        sizes = await buffer.batch_sizes(step, needs(self._loss).computed)
        share = self._engine.share(sizes, self._minibatches)
        segments = await fetch(buffer, step, sizes, share.runs)
        audit = self._check_tokens(segments.values())
        metrics: dict[str, float] = await asyncio.to_thread(self._engine.train_share, share, segments, self._loss)
        return metrics | audit

    def _check_tokens(self, segments: Iterable[Any]) -> dict[str, float]:
        """Verify that the tokens to be trained on equal the sampled tokens; all ranks see the same metrics.

        Raises:
            ContractError: some sequences differ.
        """
        from trainers.generator.receipt import audit

        counts = asdict(audit(segments))
        named = {f"contract/{name}": float(value) for name, value in counts.items()}
        totals: dict[str, float] = self._model.ranks.together(named)
        if altered := int(totals["contract/altered"]):
            raise ContractError(
                f"{altered} of {int(totals['contract/sequences'])} token sequences of this step are not what the "
                "generators sampled: their tokens, or log-probabilities, differ by count or hash",
                fix="check the code that handles episodes between sampling and training: grpo.mask, the algorithm's "
                "Preparation, score_group; tokens must stay as they are (docs/trust.md)",
            )
        return totals

    @endpoint
    async def release_memory(self) -> None:
        """Free GPU memory that no tensor uses, which is most of it between two steps."""
        self._device.release_memory()

    @endpoint
    async def score_base(self, buffer: Any, step: int) -> None:
        """Set `ref_logprobs` of the computed segments of `step`, from the model without adapters."""
        from trainers.losses.types import needs
        from trainers.titan.score import score

        with self._model.base():
            await score(self._engine, buffer, step, needs(self._loss).computed)

    @endpoint
    async def train_step(self, inputs: list[dict[str, Any]], targets: list[dict[str, Any]]) -> float:
        """Update the weights once from padded rows (`trainers.titan.rows`); returns the loss.

        Rows without the log-probabilities they were sampled with are assumed to be on-policy.
        """
        from trainers.buffer.sequences import targets as positions
        from trainers.titan.rows import from_rows

        sequences = from_rows(inputs, targets)
        if not all("logprobs" in item for item in targets):
            for sequence, values in zip(sequences, self._engine.logprobs(sequences), strict=True):
                sequence.logprobs[positions(sequence)] = values
        return float(self._engine.train(sequences, self._loss)["loss"])

    @endpoint
    async def forward_backward(self, batch: list[Any]) -> dict[str, float]:
        """Add the gradients of a batch of segments to the accumulated ones; returns the batch's metrics."""
        metrics: dict[str, float] = self._engine.forward_backward(batch, self._loss)
        return metrics

    @endpoint
    async def optim_step(self) -> dict[str, float]:
        """Update the weights with the accumulated gradients; returns their norm and the next learning rate."""
        norm = self._engine.optim_step()
        self._engine.schedule.step()
        return {"grad_norm": norm, **self._engine.learning_rate()}

    @endpoint
    async def clear_gradients(self) -> None:
        """Discard the accumulated gradients."""
        self._engine.clear_gradients()

    @endpoint
    async def begin_push(self, version: int) -> tuple[Published | None, dict[str, float]]:
        """Copy the weights and publish the copy as policy `version`; training can continue at once.

        Returns:
            Location of the copy (None on all ranks but the first), and seconds and bytes. Through shared memory the
            copy can be read at once; through TorchStore, once `uploaded` has returned on all ranks.
        """
        return await self._begin_push(version)

    async def _begin_push(self, version: int) -> tuple[Published | None, dict[str, float]]:
        if self._uploading is not None:  # its copy would be overwritten
            await asyncio.wait([self._uploading])
        started = time.perf_counter()
        ranks = self._model.ranks
        published: Published = self._sender.publish(ranks.gather(self._sender.snapshot(self._model.published())))
        self._uploading = asyncio.create_task(self._upload(version, started))
        seconds = time.perf_counter() - started
        metrics = {"snapshot_s": seconds, "push_s": seconds, "bytes": float(published.nbytes)}
        return published if ranks.first else None, metrics

    async def _upload(self, version: int, started: float) -> float:
        await self._sender.upload(version)
        return time.perf_counter() - started

    @concurrent_endpoint
    async def uploaded(self) -> dict[str, float]:
        """Wait until this rank's part of the version that `begin_push` published can be read; returns seconds."""
        return {} if self._uploading is None else {"push_s": await asyncio.shield(self._uploading)}

    @endpoint
    async def checksums(self) -> dict[str, int]:
        """Checksums of this rank's parts of the current weights by tensor, in the precision they are published in."""
        from trainers.weights.checksum import checksums

        parts = ((part.name, part.values) for part in self._model.published())
        result: dict[str, int] = checksums(parts, self._model.dtype)
        return result

    @endpoint
    async def fingerprint(self) -> Fingerprint:
        """Fingerprint of the last step on this rank; see `TitanEngine.fingerprint`."""
        part: Fingerprint = await asyncio.to_thread(self._engine.fingerprint)
        return part

    @endpoint
    async def push_weights(self, version: int) -> Published | None:
        """Publish the weights as policy `version`, and wait until this rank's part can be read.

        Returns:
            Location of the weights, for `Generator.update_weights`; None on all ranks but the first.
        """
        published, _ = await self._begin_push(version)
        assert self._uploading is not None
        await self._uploading
        return published

    @endpoint
    async def logprobs(self, sequences: list[Any]) -> list[Any]:
        """Log-probabilities of each segment's target tokens under the current weights, float32 arrays."""
        return cast("list[Any]", self._engine.logprobs(sequences))

    @endpoint
    async def begin_save(self, folder: str) -> dict[str, float]:
        """Copy weights and training state, and start writing the copy; training can continue at once.

        See `saved`.
        """
        if self._saving is not None:  # its copy would be overwritten
            await asyncio.wait([self._saving])
        started = time.perf_counter()
        snapshot = self._engine.snapshot()
        self._saving = asyncio.create_task(self._write(snapshot, Path(folder)))
        return {"snapshot_s": time.perf_counter() - started}

    async def _write(self, snapshot: Any, folder: Path) -> dict[str, float]:
        from trainers.titan.checkpoint import write

        started = time.perf_counter()
        await asyncio.to_thread(write, snapshot, self._model, folder)
        return {"write_s": time.perf_counter() - started}

    @concurrent_endpoint
    async def saved(self) -> dict[str, float]:
        """Wait until the copy that `begin_save` made is written; raises the error if that failed."""
        if self._saving is None:
            return {}
        return await asyncio.shield(self._saving)

    @endpoint
    async def save(self, folder: str) -> None:
        """Write weights and training state."""
        self._engine.save(Path(folder))

    @endpoint
    async def load(self, folder: str) -> None:
        """Restore what `save` wrote, with any number of processes."""
        self._engine.load(Path(folder))

    @endpoint
    async def save_model(self, folder: str, dtype: str = "float32") -> None:
        """Write a Hugging Face folder with weights of this data type."""
        self._model.save_hf(Path(folder), dtype)

    @endpoint
    async def get_config(self) -> dict[str, Any]:
        """Configuration of the training: `model_name`, `model_config` (the checkpoint's), `parallelism`."""
        from trainers.model.folder import read_hf_config

        degrees = self._parallelism.model_dump()
        degrees["data_parallel_shard_degree"] = self._model.ranks.data_degree
        return {"model_name": self._folder, "model_config": read_hf_config(self._folder), "parallelism": degrees}

    @endpoint
    async def get_status(self) -> dict[str, int]:
        """Counters of the training.

        `step` is the number of optimizer updates so far, `accumulated_microbatches` the number of microbatches whose
        gradients await the next update.
        """
        return {"step": self._engine.updates, "accumulated_microbatches": self._engine.accumulated}

    @endpoint
    async def cleanup(self) -> None:
        """Release model and optimizer, and leave the process group.

        Only an actor with a single process can be set up again.
        """
        self._engine_or_none = self._model = self._loss = None
        leave()
