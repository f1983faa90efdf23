"""The sampler's part of a replay: recorded replies, sampled again under the versions recorded beside their tokens.

A reply is a function of its prompt, its seed (`trainers.generator.policy.turn_seed`) and the weights at each token. A
reply of one version is sampled together with others of that version. One that was in progress during an update is
continued with the next weights after the recorded number of tokens, with the keys and values that it has, as in the
run. On a CPU, a row of vLLM's results doesn't depend on the other rows, so replies are equal to the bit in any batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_env.config.recipe import RunConfig
from forge_env.errors import ForgeError, UsageError
from forge_env.policy import NO_TOKENS, Reply
from forge_env.rollout.episode import episode_seed, seat_seed
from forge_env.run.fingerprint import Sampled
from forge_env.trajectory import Trajectory, runs
from trainers.compat.vllm import num_tokens, request_states
from trainers.generator.arguments import engine_arguments, prepare_process, show_model
from trainers.generator.engine import ALWAYS, load_into, register_adapters, reorders, take
from trainers.generator.lockstep import Admission, carry_out
from trainers.generator.policy import turn_seed
from trainers.generator.types import Completion, SamplingOptions
from trainers.model.chat import Chat

Starts = tuple[tuple[int, int], ...]
"""`(version, number of tokens sampled before it)` for each version that sampled a reply."""


@dataclass(frozen=True, slots=True)
class Request:
    """A recorded reply, and how it was asked for."""

    name: str
    prompt: NDArray[np.int32]
    options: SamplingOptions
    reply: Reply
    starts: Starts


def prepare(config: RunConfig) -> None:
    """Prepare this process for vLLM; call it before torch is imported."""
    section = config.generator
    if section.procs > 1:
        raise UsageError("--tokens: a replay has one process", fix="leave --tokens out: generator.procs is above 1")
    prepare_process(with_gpus=section.with_gpus, threads=section.threads, kv_cache_gb=section.kv_cache_gb)


class SamplingReplay:
    """A vLLM engine that samples recorded replies again."""

    def __init__(self, config: RunConfig, model: Path) -> None:
        from vllm import EngineArgs, LLMEngine

        self._config = config
        arguments = {
            **engine_arguments(config, model),
            "distributed_executor_backend": "uni",
            "async_scheduling": False,
        }
        if not config.generator.with_gpus:
            show_model(str(model))
        self._has_adapters = register_adapters(arguments)
        self._engine = LLMEngine.from_engine_args(EngineArgs(**{**ALWAYS, **arguments}))
        self._reorders = reorders(self._engine)
        self._stops = [*Chat.of(model, config.model).stop_token_ids, *config.generator.sampling.stop_token_ids]
        self._weights: dict[int, Mapping[str, Any]] = {}
        self._loads, self._loaded = 0, -1

    def add(self, version: int, weights: Mapping[str, Any]) -> None:
        """Keep the published weights of a version, and drop those that no later reply can have."""
        self._weights[version] = weights
        oldest = version - self._config.grpo.max_off_policy_steps - self._config.grpo.sync_interval
        self._weights = {each: kept for each, kept in self._weights.items() if each >= oldest}

    def sample(self, episodes: Iterable[Trajectory]) -> Sampled:
        """Sample the replies of these episodes again and compare them."""
        requests = [request for episode in episodes for request in self._requests(episode)]
        usable = [
            request
            for request in requests
            if request.reply.stop_reason != "abort" and all(version in self._weights for version, _ in request.starts)
        ]
        different, unequal, largest, tokens = [], 0, 0.0, 0
        for request, completion in self._sample(usable):
            tokens += len(request.reply.token_ids)
            if not np.array_equal(completion.token_ids, request.reply.token_ids):
                different.append(request.name)
                continue
            distances = np.abs(completion.logprobs - request.reply.logprobs)
            unequal += bool(distances.any())
            largest = max(largest, float(distances.max(initial=0.0)))
        return Sampled(len(usable), tokens, tuple(different), largest, unequal, len(requests) - len(usable))

    def _requests(self, episode: Trajectory) -> Iterator[Request]:
        config = self._config
        name = episode.id.partition("/")[0]
        seeds: dict[str, int | None] = {}
        turns: dict[str, int] = {}
        before: dict[str, NDArray[np.int32]] = {}
        for turn in episode.turns:
            reply, seat = turn.reply, turn.seat
            seed = seeds.setdefault(seat, seat_seed(episode_seed(config.seed, name), seat))
            number = turns[seat] = turns.get(seat, -1) + 1
            if not reply.has_tokens:
                continue
            joined = before.get(seat, np.empty(0, np.int32)) if reply.continues else np.empty(0, np.int32)
            prompt = np.concatenate([joined, reply.prompt_ids], dtype=np.int32)
            before[seat] = np.concatenate([prompt, reply.token_ids], dtype=np.int32)
            if not len(reply.token_ids):
                continue
            options = SamplingOptions(
                max_tokens=min(config.grpo.max_tokens_per_turn, config.model.max_length - len(prompt)),
                temperature=config.grpo.temperature,
                stop_token_ids=self._stops,
                seed=None if seed is None else turn_seed(seed, number),
            )
            versions, lengths = runs(np.asarray(reply.versions, np.int32))
            ends = np.cumsum([0, *lengths[:-1].tolist()]).tolist()
            starts = tuple(zip(versions.tolist(), ends, strict=True))
            yield Request(f"{episode.id}, reply {number + 1}", prompt, options, reply, starts)

    def _sample(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Completion]]:
        alike: dict[Starts, list[Request]] = {}
        for request in requests:
            alike.setdefault(request.starts, []).append(request)
        for starts in sorted(alike):
            for part in self._parts(alike[starts]):
                yield from zip(part, self._together(part, starts), strict=True)

    def _parts(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Split requests so that one step of the engine takes all prompts of a part, which keeps them in step."""
        scheduler = self._engine.vllm_config.scheduler_config
        part: list[Request] = []
        size = 0
        for request in requests:
            if part and (
                size + len(request.prompt) > scheduler.max_num_batched_tokens or len(part) >= scheduler.max_num_seqs
            ):
                yield part
                part, size = [], 0
            part.append(request)
            size += len(request.prompt)
        if part:
            yield part

    def _together(self, requests: Sequence[Request], starts: Starts) -> list[Completion]:
        """Sample requests that were sampled by the same versions, with the same numbers of tokens by each."""
        self._load(starts[0][0])
        orders = [
            Admission(str(number), request.prompt, request.options, float(number))
            for number, request in enumerate(requests)
        ]
        if refused := carry_out(self._engine, orders, f"v{self._loads}"):
            raise ForgeError(f"vLLM refused a recorded request: {next(iter(refused.values()))}")
        done: dict[int, Completion] = {}
        for version, count in starts[1:]:
            while (states := request_states(self._engine)) and min(map(num_tokens, states.values())) < count:
                self._step(done, requests)
            self._load(version)
        while self._engine.has_unfinished_requests():
            self._step(done, requests)
        return [done[number] for number in range(len(requests))]

    def _step(self, done: dict[int, Completion], requests: Sequence[Request]) -> None:
        for output in self._engine.step():
            number, sampled = int(output.request_id), output.outputs[0]
            completion = Completion(requests[number].prompt, NO_TOKENS, NO_TOKENS, NO_TOKENS, "stop", 0)
            take(completion, sampled.token_ids, sampled.logprobs, [(0, 0)])
            done[number] = completion

    def _load(self, version: int) -> None:
        if version == self._loaded:
            return
        weights = self._weights[version].items()
        load_into(self._engine, weights, has_adapters=self._has_adapters, reorders=self._reorders)
        if self._config.generator.recompute_on_update:
            self._engine.reset_prefix_cache(True)
        self._loaded = version
        self._loads += 1
