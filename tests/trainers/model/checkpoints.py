"""Small checkpoints of every model family with random weights, as `transformers` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 320
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
# scaling begins within the few tokens of a test
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_GEMMA = {
    "model_type": "gemma3_text",
    "tie_word_embeddings": True,
    "num_hidden_layers": 3,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
}
_GEMMA4 = {
    "model_type": "gemma4_text",
    "tie_word_embeddings": True,
    "num_hidden_layers": 3,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "rope_theta": None,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "use_bidirectional_attention": "vision",
}
_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_PHI = {"model_type": "phi3", "pad_token_id": 0, "eos_token_id": 1}
_LONGROPE = {
    "rope_scaling": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + number / 40 for number in range(12)],
        "long_factor": [1.0 + number for number in range(12)],
    },
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "sliding_window": 2048,
}

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "Llama 3.1": {"model_type": "llama", "rope_scaling": _LLAMA3},
    "Llama 3.2": {"model_type": "llama", "rope_scaling": _LLAMA3, "tie_word_embeddings": True},
    "Mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 64},
    "Qwen 2.5": {"model_type": "qwen2", "tie_word_embeddings": True, "hidden_size": 128},
    "Qwen 3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "Qwen 3, YaRN": {"model_type": "qwen3", "rope_scaling": _YARN},
    "Qwen 3 MoE": {"model_type": "qwen3_moe", **_EXPERTS, "mlp_only_layers": [0], "num_hidden_layers": 3},
    "SmolLM 3": {"model_type": "smollm3", "tie_word_embeddings": True, "no_rope_layer_interval": 2, "pad_token_id": 0},
    "Gemma 3": _GEMMA,
    "Gemma 3, scaled": {
        **_GEMMA,
        "rope_scaling": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "Gemma 4": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "Gemma 4, values": _GEMMA4,
    "Gemma 4 E2B": {
        **_GEMMA4,
        "num_hidden_layers": 5,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "Gemma 4 MoE": {
        **_GEMMA4,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "Qwen 3.5": {"model_type": "qwen3_5_text", "tie_word_embeddings": True, **_DELTA},
    "Qwen 3.5 MoE": {
        "model_type": "qwen3_5_moe_text",
        **_DELTA,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        **_EXPERTS,
        "shared_expert_intermediate_size": 48,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 7.0,
        "rope_scaling": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "Phi 4": _PHI,
    "Phi 3": {**_PHI, "sliding_window": 24},
    # rotary positions in 24 of 32 elements of a head; sequences of tests have 120 tokens or more
    "Phi 4 mini": {**_PHI, **_LONGROPE, "original_max_position_embeddings": 64, "tie_word_embeddings": True},
    "Phi 4 mini, short": {**_PHI, **_LONGROPE, "original_max_position_embeddings": 256},
}
"""Settings of each checkpoint, by its name."""


def write_checkpoint(name: str, folder: Path, *, shards: bool = False, **changes: Any) -> Path:
    """A Hugging Face folder without a tokenizer; every weight is random, norms, biases and scales too.

    Args:
        name: of `CHECKPOINTS`.
        folder: where to.
        shards: in several files, with an index.
        changes: of its config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**SHAPE, **CHECKPOINTS[name], **changes}
    if "rope_scaling" in values:
        values["rope_parameters"] = values.pop("rope_scaling")
    config = AutoConfig.for_model(**values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        scales = [buffer for key, buffer in model.named_buffers() if key.endswith("layer_scalar")]
        for parameter in [*model.parameters(), *scales]:
            parameter.add_(0.1 * torch.randn_like(parameter))
        if values["model_type"] == "gemma4_text":  # its norms of keys also scale the scores
            for key, parameter in model.named_parameters():
                if key.endswith("k_norm.weight"):
                    parameter.mul_(parameter.numel() ** -0.5)
    model.save_pretrained(folder, max_shard_size="100KB" if shards else "5GB")
    return folder


def their_logprobs(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """What `transformers` computes in float32 for tokens [B, T]: log-probabilities of all but the first, [B, T - 1]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        table = torch.log_softmax(model(ids).logits[:, :-1], -1)
    return table.gather(-1, ids[:, 1:, None])[..., 0]
