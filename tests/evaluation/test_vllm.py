"""A real vLLM server of the small model's architecture, started by `vllm:PATH`, with native tool calls."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.config.models import ModelSection
from forge_env.trajectory import Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(1500)]
CODE = "x"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default recipe's model and tokenizer, with weights that make every turn one call of `python`.

    Attention and feed-forward are zero, so a token's successor depends on that token alone: a row of the output
    matrix is the embedding of the token it follows.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainers.model.tiny import build_tiny_folder

    folder = tmp_path_factory.mktemp("models") / "scripted"
    build_tiny_folder(ModelSection(path="tiny"), fe.make("coding_rlvr"), 0, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    call = f'<tool_call>\n{{"name": "python", "arguments": {{"code": "{CODE}"}}}}\n</tool_call><|im_end|>'
    opening = tokenizer.encode("<|im_start|>assistant\n<think>\n\n</think>\n\n", add_special_tokens=False).ids
    script = [opening[-1], *tokenizer.encode(call, add_special_tokens=False).ids]
    assert len(set(script)) == len(script), "a token has two successors"

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name or "lm_head" in name:
                weight.zero_()
        embedding = torch.nn.functional.normalize(torch.randn_like(model.model.embed_tokens.weight), dim=-1)
        model.model.embed_tokens.weight.copy_(embedding)
        for token, successor in pairwise(script):
            model.lm_head.weight[successor] = 50 * embedding[token]
    model.save_pretrained(folder)
    return folder


def test_two_environments_end_to_end(checkpoint: Path, tmp_path: Path) -> None:
    choices: list[Any] = [{"name": "coding_rlvr", "options": {"max_turns": 3, "max_tool_calls": 3}}, "gsm8k"]
    result = fe.evaluate(
        choices,
        f"vllm:{checkpoint}",
        n=4,
        temperature=0.0,
        max_tokens=64,
        sandbox="local",
        out=tmp_path / "out",
        vllm_args=["--max-model-len", "512", "--dtype", "float32", "--enforce-eager"],
    )
    assert (result.summary.status, result.error) == ("complete", None)
    coding, maths = result.summary.environments["coding_rlvr"], result.summary.environments["gsm8k"]
    assert (coding.samples, coding.turns, coding.metrics["tool_calls"]) == (4, 3.0, 3.0)
    assert (maths.samples, maths.turns) == (4, 1.0)
    played: list[Trajectory] = [item for item in result.trajectories() if item.environment == "coding_rlvr"]
    for trajectory in played:
        assert json.loads(trajectory.turns[0].message.tool_calls[0].function.arguments) == {"code": CODE}
        assert "passed" in trajectory.turns[1].observation[0].content
        assert len(trajectory.segments()) == 1  # every turn's prompt continues the tokens before it
        assert all(len(turn.logprobs) == len(turn.token_ids) > 0 for turn in trajectory.turns)
    assert coding.completion_tokens == sum(item.num_sampled_tokens for item in played)
