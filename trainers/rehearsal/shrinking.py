"""Small models of the same family, for rehearsals: everything that a layout divides stays as it is.

Numbers of heads, key-value heads and experts are kept, also the kinds of layers. Widths, layers and, without the
model's own tokenizer, the vocabulary shrink, with the same remainders for every degree of the layout. So a layout that
can't be sharded fails for the small model as it does for the large one.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forge_env.config.recipe import ModelSection, RunConfig
from forge_env.environment.base import Environment
from trainers.model.folder import (
    ARCHITECTURES,
    GEMMA4,
    check_hf_config,
    is_linear,
    is_mixture,
    kv_source,
    rope_parameters,
    rotates,
    window,
)
from trainers.model.tiny import END_OF_TURN, write_tokenizer
from trainers.model.writer import write_companions
from trainers.titan.device import use_device
from trainers.titan.model import TitanModel

HEAD_DIM = 32
"""Size of an attention head; vLLM requires a multiple of 32 on a CPU."""
DELTA_DIM = 64
"""Size of a head of a gated delta layer."""
WIDTHS = {"hidden_size": 64, "intermediate_size": 96}
WIDTHS |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "hidden_size_per_layer_input"), 32)
"""Smallest widths."""
TILE = 32
"""Widths keep their remainder for this number too: kernels compute tiles."""
FEWEST_LAYERS = 2
SAMPLES = 200
"""Number of demonstrations that a replacement of a missing tokenizer is learned from."""


def degrees(config: RunConfig) -> int:
    """Least common multiple of the numbers of processes that a recipe divides its model over."""
    dims, generator, trainer = config.trainer.parallelism, config.generator, config.trainer
    parts = (trainer.procs, dims.tensor_parallel_degree, dims.context_parallel_degree, generator.procs)
    return math.lcm(*parts, config.grpo.reference.procs)


def alike(number: int, least: int, divided_by: int) -> int:
    """Smallest number from `least` on with the remainder of `number`, or `number` if that is smaller."""
    return min(number, least + (number - least) % divided_by)


def shrunk(hf: Mapping[str, Any], divided_by: int = 1) -> dict[str, Any]:
    """Shrink a `config.json` to a model of the same family that a CPU computes.

    Args:
        hf: the large model's config, checked by `check_hf_config`.
        divided_by: number whose divisors are degrees of the layout.

    Raises:
        UsageError: the trainer doesn't support the family.
    """
    small = check_hf_config(dict(hf), str(hf.get("model_type")))
    kept = _layers(small)
    layers = len(kept)
    if small.get("num_kv_shared_layers"):
        small["num_kv_shared_layers"] = sum(kv_source(small, layer) is not None for layer in kept)
    for name, values in small.items():
        if isinstance(values, list) and len(values) == small["num_hidden_layers"]:
            small[name] = [values[layer] for layer in kept]
    if small.get("mlp_only_layers"):
        small["mlp_only_layers"] = [layer for layer in hf["mlp_only_layers"] if layer < layers]
    for name, least in WIDTHS.items():
        if name in small:
            small[name] = alike(small[name], least, math.lcm(divided_by, TILE, _heads(small, name)))
    small |= {"num_hidden_layers": layers, "max_window_layers": layers, "head_dim": HEAD_DIM, "dtype": "float32"}
    if "long_factor" in (rope := rope_parameters(small)):
        count = int(HEAD_DIM * rope["partial_rotary_factor"]) // 2
        small["rope_parameters"] = rope | {name: rope[name][:count] for name in ("short_factor", "long_factor")}
    if small["model_type"] == "qwen2" or "long_factor" in rope:  # vLLM and transformers accept only this
        small["hidden_size"] = small["num_attention_heads"] * HEAD_DIM
    if "global_head_dim" in small:
        small["global_head_dim"] = 2 * HEAD_DIM
    if "query_pre_attn_scalar" in small:
        small["query_pre_attn_scalar"] = HEAD_DIM
    small |= {name: DELTA_DIM for name in ("linear_key_head_dim", "linear_value_head_dim") if name in small}
    small.pop("torch_dtype", None)
    return small | {"architectures": [ARCHITECTURES[small["model_type"]]]}


def _heads(hf: Mapping[str, Any], width: str) -> int:
    """Number of heads if it divides the width of the residual stream, which transformers demands of some families."""
    heads: int = hf["num_attention_heads"]
    return heads if width == "hidden_size" and hf[width] % heads == 0 else 1


def _layers(hf: Mapping[str, Any]) -> list[int]:
    """First layers that include every kind; for Gemma 4, whose configs list the kinds, one layer of each kind."""
    kinds = [_kind(hf, layer) for layer in range(hf["num_hidden_layers"])]
    first = sorted({kinds.index(kind) for kind in kinds})
    if hf["model_type"] == GEMMA4 and len(first) >= FEWEST_LAYERS:
        return first
    return [*range(min(len(kinds), max(FEWEST_LAYERS, first[-1] + 1)))]


def _kind(hf: Mapping[str, Any], layer: int) -> tuple[object, ...]:
    shares_kv = kv_source(hf, layer) is not None
    return is_mixture(hf, layer), is_linear(hf, layer), window(hf, layer), rotates(hf, layer), shares_kv


def write_shrunk(
    hf: Mapping[str, Any],
    companions: Mapping[str, bytes],
    folder: Path,
    *,
    model: ModelSection,
    environment: Environment,
    divided_by: int = 1,
    seed: int = 0,
) -> None:
    """Write a folder with a shrunk model, random weights and a tokenizer.

    Args:
        hf: the large model's config.
        companions: its tokenizer's files (`read_companions`); without tokenizer.json, a tokenizer is learned from the
            environment, and the vocabulary shrinks to it.
        folder: where to.
        model: the recipe's section.
        environment: the recipe's environment.
        divided_by: as in `shrunk`.
        seed: of the weights.
    """
    config = shrunk(hf, divided_by)
    with TemporaryDirectory(prefix="forge-env-") as scratch:
        shape = Path(scratch)
        if "tokenizer.json" in companions:
            write_companions(companions, shape)
        else:
            tokenizer = write_tokenizer(model, environment, seed, shape, SAMPLES)
            size = tokenizer.get_vocab_size(with_added_tokens=True)
            config["vocab_size"] = alike(config["vocab_size"], size, math.lcm(divided_by, 2 * TILE))
            if "vocab_size_per_layer_input" in config:
                config["vocab_size_per_layer_input"] = config["vocab_size"]
            config |= {"eos_token_id": tokenizer.token_to_id(END_OF_TURN), "bos_token_id": None}
        config["pad_token_id"] = 0  # some families' default is beyond a small vocabulary
        (shape / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        device = use_device(with_gpus=False).torch
        titan = TitanModel(shape, max_length=model.max_length, device=device, seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch: a single process saves
            titan.save_hf(folder)
