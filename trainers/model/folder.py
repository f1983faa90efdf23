"""Checkpoint folders that `model.path` names, and checks made before anything starts. Doesn't import torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge_env import redaction
from forge_env.config.finding import checkpoint_folder, fix_of_folder
from forge_env.errors import ForgeError, UsageError
from forge_env.machine import user_path
from forge_env.models import MODELS
from forge_env.reading import ANYWHERE, LARGEST_TABLE, open_file, read_json, read_text

FIX = (
    "model.path is 'tiny', a Hugging Face checkpoint folder, a checkpoint that comes with forge-env "
    "(coding_rlvr_base), or a hub name such as Qwen/Qwen3-0.6B"
)
TINY = "tiny"
"""Value of `model.path` for a small model that is built locally."""
INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"
"""Beginning of a file that Git LFS puts in place of a large one."""
_SHAPE = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    *("rms_norm_eps", "vocab_size"),
)
_EXPERTS = ("moe_intermediate_size", "num_experts", "num_experts_per_tok")
_GEMMA4_EXPERTS = ("moe_intermediate_size", "num_experts", "top_k_experts")
_DELTA = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    "linear_value_head_dim",
)
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "llama": _SHAPE,
    "mistral": _SHAPE,
    "qwen2": _SHAPE,
    "qwen3": (*_SHAPE, "head_dim"),
    "qwen3_moe": (*_SHAPE, "head_dim", *_EXPERTS),
    "smollm3": _SHAPE,
    "phi3": _SHAPE,
    "gemma3_text": (*_SHAPE, "head_dim", "query_pre_attn_scalar", "sliding_window"),
    "gemma4_text": (*_SHAPE, "head_dim", "sliding_window"),
    "qwen3_5_text": (*_SHAPE, "head_dim", *_DELTA),
    "qwen3_5_moe_text": (
        *(name for name in _SHAPE if name != "intermediate_size"),
        *("head_dim", *_DELTA, *_EXPERTS, "shared_expert_intermediate_size"),
    ),
    "gpt_oss": (*_SHAPE, "head_dim", "num_experts", "num_experts_per_tok", "sliding_window"),
}
"""Keys that `config.json` must have, by the `model_type` of each supported model family."""
GEMMA4 = "gemma4_text"
QWEN3_5 = ("qwen3_5_text", "qwen3_5_moe_text")
"""Families with gated delta layers."""
ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
"""Value of `architectures` in `config.json`, by family."""
_ROPE = {
    "default": set[str](),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "linear": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"},
    "proportional": set(),
    "longrope": {"short_factor", "long_factor", "original_max_position_embeddings"},
}
"""Parameters of each supported scaling of rotary positions."""
_ROPE_OF = {
    "llama": {"default", "llama3"},
    "mistral": {"default"},
    "phi3": {"default", "longrope"},
    "gemma3_text": {"default", "linear"},
    "gemma4_text": {"default", "proportional"},
    "qwen3_5_text": {"default"},
    "qwen3_5_moe_text": {"default"},
    "gpt_oss": {"yarn"},
}
"""Supported scalings of some families; all others support every scaling but Llama's."""
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
"""Default `rope_parameters` of Gemma 4."""
_UNSUPPORTED = ("attn_logit_softcapping", "use_bidirectional_attention", "per_layer_config")
"""Keys of features that no family supports."""
_ACTIVATION = dict.fromkeys(("gemma3_text", GEMMA4), ("hidden_activation", "gelu_pytorch_tanh"))
"""Key and value of the activation in families that have another than `hidden_act: silu`."""
WIDEST = 256
"""Maximum elements of an attention head in FlashAttention-2."""
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Constants of gpt-oss's experts, which are fixed in vLLM."""
_GPT_OSS: dict[str, Any] = {
    "attention_bias": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "swiglu_alpha": SWIGLU_ALPHA,
    "swiglu_limit": SWIGLU_LIMIT,
    "tie_word_embeddings": False,
}
"""Settings of gpt-oss that are fixed in vLLM."""


def local_folder(path: str) -> Path | None:
    """Resolve `model.path` to a folder; None for a hub name."""
    if (folder := checkpoint_folder(path)) is not None:
        return folder
    if path in MODELS:
        raise UsageError(f"the model {path} is not on this machine", fix=f"forge-env model get {path}")
    given = user_path(path)
    named = given.suffix != ".gguf" and path.count("/") <= 1 and not path.startswith(("/", ".", "~"))
    if given.exists() or not named or not path.strip():
        raise UsageError(f"model.path: there is no folder {path!r}", fix=fix_of_folder(given) or FIX)
    return None


def hub_name(path: str) -> str | None:
    """Return `model.path` if it is a hub name, and None otherwise."""
    return None if path == TINY or checkpoint_folder(path) is not None else path


def from_hub(name: str) -> Path:
    """Download a model from the hub, and return its folder.

    Raises:
        ForgeError: there is no model of this name, or it can't be downloaded.
    """
    from huggingface_hub import get_token, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    redaction.add(get_token() or "", "HF_TOKEN")
    try:
        # some repositories contain the same weights again in their authors' format
        skipped = ["consolidated*", "original/*"]
        return Path(
            snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"], ignore_patterns=skipped)
        )
    except GatedRepoError as error:
        reason = "the account of HF_TOKEN has no access to it" if get_token() else "HF_TOKEN is not set"
        raise ForgeError(
            f"{name} is a gated model, and {reason}",
            fix=f"accept its licence at https://huggingface.co/{name}, and set HF_TOKEN to a token of that account",
        ) from error
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ForgeError(
            f"no model {name!r}: {str(error).splitlines()[0]}",
            fix="model.path is 'tiny', a checkpoint folder, or a hub name within reach (HF_TOKEN for private ones)",
        ) from error


def text_family(config: Any) -> str | None:
    """Family of the text part of a model with a vision part (`trainers.model.text_part`); None for other models."""
    if not isinstance(config, dict) or "text_config" not in config:
        return None
    family = f"{config.get('model_type')}_text".replace("_unified", "")  # Gemma 4 12B, whose text part is like 31B's
    return family if family in FAMILIES else None


def is_packed(config: Any) -> bool:
    """Whether `config.json` describes weights in MXFP4 that `trainers.model.text_part` can unpack (gpt-oss)."""
    quantized = config.get("quantization_config") if isinstance(config, dict) else None
    return isinstance(quantized, dict) and (config.get("model_type"), quantized.get("quant_method")) == (
        "gpt_oss",
        "mxfp4",
    )


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """Read the `config.json` of a checkpoint folder, and add `head_dim` if it is missing.

    The trainer must support its model family.
    """
    return check_hf_config(read_config(folder), str(folder))


def read_config(folder: str | Path) -> Any:
    """Read the `config.json` of a checkpoint folder, unchecked.

    Raises:
        UsageError: there is none, or it can't be read.
    """
    path = Path(folder) / "config.json"
    try:
        return read_json(path, root=ANYWHERE)  # the hub's cache is a folder of links
    except FileNotFoundError as error:
        raise UsageError(f"no config.json in {folder}", fix=fix_of_folder(Path(folder)) or FIX) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {error}", fix="fetch the checkpoint again") from error


def check_hf_config(config: Any, name: str) -> dict[str, Any]:
    """Check that the trainer supports the `config.json` of checkpoint `name`; returns it, with `head_dim` added."""
    family = config.get("model_type") if isinstance(config, dict) else None
    if text_family(config) is not None:
        raise UsageError(
            f"{name} has a vision part, and only its text part can be trained",
            fix=f"write that to a folder and use it: forge-env model convert {name} TO",
        )
    if is_packed(config):
        raise UsageError(
            f"{name} has weights in MXFP4, which can't be trained",
            fix=f"write them in bfloat16 to a folder and use it: forge-env model convert {name} TO",
        )
    if not isinstance(family, str) or family not in FAMILIES:
        raise UsageError(f"{name} is a {family!r} model", fix=f"use a checkpoint of {', '.join(FAMILIES)}")
    if "num_local_experts" in config:  # as newer versions of transformers write it
        config.setdefault("num_experts", config["num_local_experts"])
    if family == "gpt_oss":
        config["moe_intermediate_size"] = config.get("intermediate_size")
    mixture = family == GEMMA4 and config.get("enable_moe_block")
    needed = (*FAMILIES[family], *(_GEMMA4_EXPERTS if mixture else ()))
    if absent := [key for key in needed if config.get(key) is None]:
        raise UsageError(f"config.json of {name} lacks {', '.join(absent)}", fix="fetch the checkpoint again")
    if mistake := _mistake(config, needed):
        raise UsageError(f"config.json of {name}: {mistake}", fix="correct the file, or fetch the checkpoint again")
    if family == GEMMA4:
        _complete_gemma4(config)
    if feature := _unsupported(config):
        raise UsageError(
            f"config.json of {name} has {feature}, which the trainer does not support",
            fix="use a checkpoint without it",
        )
    config.setdefault("tie_word_embeddings", family in ("smollm3", "gemma3_text", GEMMA4))  # as transformers does
    if config.get("head_dim") is None:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    checked: dict[str, Any] = config
    return checked


def _mistake(config: Mapping[str, Any], needed: Sequence[str]) -> str | None:
    """Describe a value of a `config.json` that no model can have; None if there is none."""
    given = [key for key in ("head_dim", "max_position_embeddings") if config.get(key) is not None]
    for key in (*needed, *given):
        kind: Any = float if key in ("rms_norm_eps", "query_pre_attn_scalar") else int
        if not isinstance(value := config[key], kind | int) or isinstance(value, bool) or value <= 0:
            return f"{key} is {value!r}, not a positive number"
    for key in ("rope_scaling", "rope_parameters", "quantization_config"):
        if not isinstance(config.get(key) or {}, dict):
            return f"{key} is {config[key]!r}, not an object"
    layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        return f"layer_types doesn't list the kinds of {layers} layers"
    return None


def rope_parameters(config: Mapping[str, Any], layer: int | None = None) -> dict[str, Any]:
    """Rotary positions: `rope_theta`, `rope_type` (a key of `_ROPE`) and the parameters of that type."""
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    family, sliding = config.get("model_type"), layer is not None and window(config, layer) is not None
    if "full_attention" in parameters:
        parameters = {**parameters["sliding_attention" if sliding else "full_attention"]}
    elif sliding and family == "gemma3_text":
        parameters = {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    usual_base = 1e6 if family == "gemma3_text" else 10_000.0
    parameters.setdefault("rope_theta", config.get("rope_theta") or usual_base)
    usual = 0.25 if family in QWEN3_5 else 1.0
    parameters.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or usual)
    if parameters["rope_type"] == "yarn":
        parameters = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, **parameters}
        parameters.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    elif parameters["rope_type"] == "longrope":  # as in Phi3Config: its own key comes first, 4096 by default
        parameters["original_max_position_embeddings"] = config.get("original_max_position_embeddings", 4096)
    return parameters


def heads(config: Mapping[str, Any], layer: int) -> tuple[int, int]:
    """Size of a layer's attention heads, and its number of key-value heads."""
    if config["model_type"] != GEMMA4 or window(config, layer) is not None:
        return config["head_dim"], config["num_key_value_heads"]
    shared = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return config["global_head_dim"], shared or config["num_key_value_heads"]


def keys_are_values(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer's keys are also its values: in some models of Gemma 4, in layers without a window."""
    return config["model_type"] == GEMMA4 and bool(config.get("attention_k_eq_v")) and window(config, layer) is None


def kv_source(config: Mapping[str, Any], layer: int) -> int | None:
    """Earlier layer whose keys and values a layer of Gemma 4 shares; None if it computes them."""
    first = config["num_hidden_layers"] - (config.get("num_kv_shared_layers") or 0)
    if config["model_type"] != GEMMA4 or layer < first:
        return None
    kinds = config["layer_types"]
    return max(other for other in range(first) if kinds[other] == kinds[layer])


def unused_tensors(config: Mapping[str, Any]) -> set[str]:
    """Names of tensors that a model ignores: keys and values in layers of Gemma 4 that share those of another layer."""
    sharing = [layer for layer in range(config["num_hidden_layers"]) if kv_source(config, layer) is not None]
    names = ("k_proj", "k_norm", "v_proj")
    return {f"model.layers.{layer}.self_attn.{name}.weight" for layer in sharing for name in names}


def feed_forward_width(config: Mapping[str, Any], layer: int) -> int:
    """Width of the dense feed-forward network in a layer."""
    width: int = config["intermediate_size"]
    return 2 * width if config.get("use_double_wide_mlp") and kv_source(config, layer) is not None else width


def is_mixture(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a mixture of experts, in Gemma 4 beside its feed-forward layer."""
    if not config.get("num_experts"):
        return False
    return (
        layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    )


def is_linear(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a state of fixed size instead of attention: in Qwen 3.5, three of four."""
    if config.get("model_type") not in QWEN3_5:
        return False
    kinds: Sequence[str] | None = config.get("layer_types")
    return kinds[layer] == "linear_attention" if kinds else (layer + 1) % config.get("full_attention_interval", 4) != 0


def window(config: Mapping[str, Any], layer: int) -> int | None:
    """Number of tokens that a token attends to in a layer, itself included; None: all before it."""
    if config.get("model_type") in ("mistral", "phi3"):
        return config.get("sliding_window")
    if config.get("model_type") not in ("gemma3_text", GEMMA4, "gpt_oss"):
        return None
    kinds: Sequence[str] | None = config.get("layer_types")
    usual = 2 if config["model_type"] == "gpt_oss" else 6
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or usual
    sliding = kinds[layer] == "sliding_attention" if kinds else (layer + 1) % every != 0
    return int(config["sliding_window"]) if sliding else None


def check_windows(folder: Path, config: Mapping[str, Any], max_length: int, *, in_float32: bool) -> None:
    """Refuse sliding windows shorter than `max_length` that no kernel on a GPU supports."""
    layers = range(config["num_hidden_layers"])
    windowed = [layer for layer in layers if (window(config, layer) or max_length) < max_length]
    if windowed and in_float32:
        raise UsageError(
            f"{folder} uses sliding-window attention, which the trainer supports on GPUs in bfloat16 only",
            fix="use model.dtype=bfloat16",
        )
    if any(heads(config, layer)[0] > WIDEST for layer in windowed):
        raise UsageError(
            f"{folder} has sliding windows with attention heads of more than {WIDEST} elements, "
            "which the trainer does not support on GPUs",
            fix=f"use a model.max_length of at most {window(config, windowed[0])}, or train on a CPU",
        )


def check_compilable(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse models with layers that torch can't compile once for all lengths."""
    layers = range(config["num_hidden_layers"])
    reasons = {
        "gated delta layers": any(is_linear(config, layer) for layer in layers),
        "attention sinks": config["model_type"] == "gpt_oss",
        f"attention heads of more than {WIDEST} elements": any(heads(config, layer)[0] > WIDEST for layer in layers),
    }
    for reason in (name for name, holds in reasons.items() if holds):
        raise UsageError(f"{folder} has {reason}, which can't be compiled", fix="use trainer.compile=false")


def rotates(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has rotary positions: in SmolLM3, all but every fourth."""
    if config["model_type"] != "smollm3":
        return True
    rotated: Sequence[int] | None = config.get("no_rope_layers")  # 1 where there are rotary positions
    return bool(rotated[layer]) if rotated else (layer + 1) % config.get("no_rope_layer_interval", 4) != 0


def _unsupported(config: Mapping[str, Any]) -> str | None:
    """Name a feature that the generator would compute and the trainer wouldn't; None if there is none.

    Log-probabilities of generator and trainer would differ without an error.
    """
    family = config["model_type"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for layer in (None, *range(config["num_hidden_layers"])):
        if feature := _unsupported_rope(family, rope_parameters(config, layer), head_dim):
            return feature
    if family == "gpt_oss":
        experts = {"num_experts": config.get("num_local_experts", config["num_experts"])}
        for key, only in (_GPT_OSS | experts).items():
            if (value := config.get(key, only)) != only:
                return f"{key}={value!r}"
        kinds = config.get("layer_types") or ()
        if any((kind == "sliding_attention") == layer % 2 for layer, kind in enumerate(kinds)):
            return "sliding windows in other layers than every second"
    if (config.get("attention_bias") and family not in ("qwen2", "gpt_oss")) or config.get("mlp_bias"):
        return "biases in its attention or feed-forward layers"
    if config.get("use_sliding_window"):
        return "sliding-window attention"
    name, computed = _ACTIVATION.get(family, ("hidden_act", "silu"))
    if (activation := config.get(name, computed)) != computed:
        return f"the activation {activation!r}"
    if config.get("output_gate_type", "silu") not in ("silu", "swish") or not config.get("attn_output_gate", True):
        return "another gate of its layers"
    if family == GEMMA4 and (feature := _unsupported_gemma4(config)):
        return feature
    for feature in _UNSUPPORTED if family == GEMMA4 else (*_UNSUPPORTED, "final_logit_softcapping"):
        if config.get(feature):
            return feature
    return "quantized weights" if config.get("quantization_config") else None


def _complete_gemma4(config: dict[str, Any]) -> None:
    """Add the defaults of Gemma 4 to its `config.json`, and the heads of full attention under the hub's keys.

    `transformers` saves these heads in `per_layer_config`. With other settings, that key is kept and refused.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [
            ("sliding" if (layer + 1) % 6 else "full") + "_attention" for layer in range(config["num_hidden_layers"])
        ]
    config["layer_types"] = kinds = [*kinds[:-1], "full_attention"]
    config["rope_parameters"] = config.get("rope_parameters") or _GEMMA4_ROPE
    config.setdefault("hidden_size_per_layer_input", 256)
    config.setdefault("vocab_size_per_layer_input", 262_144)
    config["global_head_dim"] = config.get("global_head_dim") or 512
    if config.get("enable_moe_block"):
        config["num_experts_per_tok"] = config.get("top_k_experts")
    if config.get("use_bidirectional_attention") == "vision":  # concerns image tokens only
        del config["use_bidirectional_attention"]
    # `transformers` pads the numbers of layers with zeros
    layers = {str(key).lstrip("0") or "0": changes for key, changes in (config.get("per_layer_config") or {}).items()}
    full = [layers.get(str(number)) for number, kind in enumerate(kinds) if kind == "full_attention"]
    known = {"head_dim", "num_key_value_heads"} if config.get("attention_k_eq_v") else {"head_dim"}
    if len(layers) == len(full) and full[0] and full[0].keys() <= known and all(each == full[0] for each in full):
        del config["per_layer_config"]
        config["global_head_dim"] = full[0].get("head_dim", config["head_dim"])
        config["num_global_key_value_heads"] = full[0].get("num_key_value_heads")


def _unsupported_gemma4(config: Mapping[str, Any]) -> str | None:
    if bool(config.get("enable_moe_block")) != (config.get("num_experts") is not None):
        return "only one of enable_moe_block and num_experts"  # vLLM reads one, and transformers the other
    tokens = config["vocab_size_per_layer_input"]
    if config["hidden_size_per_layer_input"] and tokens != config["vocab_size"]:
        return f"vocab_size_per_layer_input={tokens} but vocab_size={config['vocab_size']}"
    kinds, shared = config["layer_types"], config.get("num_kv_shared_layers") or 0
    first = max(len(kinds) - shared, 0)
    if not set(kinds[first:]) <= set(kinds[:first]):
        return f"num_kv_shared_layers={shared}, so that a layer has no keys and values to use"
    return None


def _unsupported_rope(family: str, rope: Mapping[str, Any], head_dim: int) -> str | None:
    kind, given = rope["rope_type"], set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    scaled, part = f"rotary positions scaled by {kind!r}", rope["partial_rotary_factor"]
    if kind not in _ROPE_OF.get(family, {"default", "yarn"}):
        return scaled
    if kind != "default" and given != _ROPE[kind]:
        return f"{scaled} with {', '.join(sorted(given ^ _ROPE[kind]))}"
    if part != 1.0 and kind != "proportional" and family not in ("phi3", *QWEN3_5):
        return "rotary positions in a part of each head"
    frequencies = int(head_dim * part) // 2
    for name in ("short_factor", "long_factor"):
        if kind == "longrope" and len(rope[name]) != frequencies:
            return f"{scaled} with {len(rope[name])} numbers as {name} instead of {frequencies}"
    return None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder: those that its index names, or all; none before training."""
    index = folder / INDEX
    if not index.is_file():
        return sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    try:
        names = set(json.loads(read_text(index, largest=LARGEST_TABLE, root=ANYWHERE))["weight_map"].values())
        outside = sorted(name for name in names if os.path.isabs(name) or ".." in Path(name).parts)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"{index} can't be read: {error!r}", fix="fetch the checkpoint again") from error
    if outside:
        raise UsageError(f"{index} names {outside[0]}, outside of its folder", fix="fetch the checkpoint again")
    if absent := sorted(name for name in names if not (folder / name).is_file()):
        raise UsageError(f"{folder} lacks {', '.join(absent)}, which its index names", fix="fetch the checkpoint again")
    return sorted(folder / name for name in names)


def vocabulary(folder: Path) -> Any:
    """The tokens of a checkpoint's tokenizer with their ids, in the form of its `tokenizer.json`."""
    path = folder / "tokenizer.json"
    try:
        return json.loads(read_text(path, largest=LARGEST_TABLE, root=ANYWHERE))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} can't be read: {error!r}", fix="fetch the checkpoint again") from error


def file_digests(folder: Path) -> list[str]:
    """SHA-256 of each of `weight_files`, read in pieces; together they identify a set of weights."""
    digests = []
    for path in weight_files(folder):
        with open_file(path, root=ANYWHERE) as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests


def tensors_in(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Data type and shape of each tensor in a checkpoint folder, by name; only the headers of its files are read.

    Raises:
        UsageError: there are no weights, or a file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not (files := weight_files(folder)):
        fix = _convert("AutoModelForCausalLM", folder) if any(folder.glob("pytorch_model*.bin")) else FIX
        raise UsageError(f"no weights (*.safetensors) in {folder}", fix=fix)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:  # compares the header with the file's size
                parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
                tensors |= {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file} is damaged: {error}", fix=fix_of_file(file)) from error
    return tensors


def _convert(loader: str, folder: Path) -> str:
    """Fix for a file that transformers reads, and saves in the format that is needed here."""
    return f"write it with transformers: {loader}.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"


def fix_of_file(file: Path) -> str:
    """Fix for a file of a checkpoint that can't be read."""
    with suppress(OSError, UsageError), open_file(file, root=ANYWHERE) as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            return "it is a Git LFS pointer; fetch the file: git lfs pull"
    return "fetch the checkpoint again"


def check_folder(folder: Path, max_length: int) -> None:
    """Refuse a checkpoint folder that trainer and generator can't load."""
    config = read_hf_config(folder)
    longest, rope = config.get("max_position_embeddings"), rope_parameters(config)
    if longest is not None and rope["rope_type"] == "yarn":
        longest = max(longest, int(rope["original_max_position_embeddings"] * rope["factor"]))
    if longest is not None and max_length > longest:
        raise UsageError(
            f"model.max_length={max_length} exceeds the model's limit ({longest})",
            fix=f"use model.max_length={longest} or less",
        )
    if not (folder / "tokenizer.json").is_file():
        others = any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json"))
        raise UsageError(f"no tokenizer.json in {folder}", fix=_convert("AutoTokenizer", folder) if others else FIX)
    tensors_in(folder)


def check_heads(hf: Mapping[str, Any], degree: int, context: int = 1) -> None:
    """Refuse tensor parallelism that splits experts, or gives trainer processes different numbers of heads.

    Neither it nor context parallelism of degree `context` can split layers that keep a state.
    """
    if degree > 1 and hf.get("num_experts"):
        raise UsageError(
            f"trainer.parallelism.tensor_parallel_degree={degree}: TorchTitan's gradients differ when "
            "experts are split over processes",
            fix="use data_parallel_shard_degree for a mixture of experts",
        )
    if degree > 1 and hf.get("model_type") == GEMMA4:
        raise UsageError(
            f"trainer.parallelism.tensor_parallel_degree={degree}: layers of Gemma 4 are not split over processes",
            fix="use data_parallel_shard_degree for Gemma 4",
        )
    if max(degree, context) > 1 and hf.get("model_type") in QWEN3_5:
        name = "tensor_parallel_degree" if degree > 1 else "context_parallel_degree"
        raise UsageError(
            f"trainer.parallelism.{name}={max(degree, context)}: gated delta layers are not split over processes",
            fix="use data_parallel_shard_degree for Qwen 3.5",
        )
    fix = "use a divisor, and data_parallel_shard_degree for the other processes"
    for key in ("num_attention_heads", "num_key_value_heads"):
        _check_divides("trainer.parallelism.tensor_parallel_degree", degree, hf, key, fix)


def check_generator_heads(hf: Mapping[str, Any], procs: int) -> None:
    """Refuse a number of generator processes that doesn't divide the attention heads; vLLM copies key-value heads."""
    _check_divides("generator.procs", procs, hf, "num_attention_heads", "use a divisor, and generator.num_replicas")


def _check_divides(name: str, degree: int, hf: Mapping[str, Any], key: str, fix: str) -> None:
    if hf[key] % degree:
        raise UsageError(f"{name}={degree} does not divide the model's {key} ({hf[key]})", fix=fix)
