"""Episodes in an agent loop of the real verl, with the gold model in its server's place."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl.experimental.agent_loop")

import hydra
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from forge_env.integrations.verl import rows
from tests.forge_env.integrations.gold import MODEL, GoldModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
LOOP = {"name": "forge_env", "_target_": "forge_env.integrations.verl.ForgeAgentLoop", "environment": "calculator"}


class Server:
    """verl's client of its servers, as far as agent loops use it."""

    def __init__(self, gold: GoldModel) -> None:
        self.gold = gold

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        tokens = self.gold(prompt_ids)
        return TokenOutput(token_ids=tokens, log_probs=[-0.25] * len(tokens))


async def played(index: int, *, response_length: int = 1000, **options: Any) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rollout = {"prompt_length": 2000, "response_length": response_length}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    loop = hydra.utils.instantiate(
        OmegaConf.create({**LOOP, **options}),
        trainer_config=DictConfigWrap(config),
        server_manager=Server(GoldModel(tokenizer)),
        tokenizer=tokenizer,
        processor=None,
        hf_model_type="qwen3",
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
    )
    [row] = rows("calculator", index + 1)[index:]
    return await loop.run({}, **row, raw_prompt=row["prompt"]), tokenizer


async def test_an_episode_is_the_tokens_of_one_conversation() -> None:
    output, tokenizer = await played(2)
    assert output.reward_score == 1.0
    sampled = [token for token, own in zip(output.response_ids, output.response_mask, strict=True) if own]
    gold = GoldModel(tokenizer)
    assert tokenizer.decode(sampled) in {"<|im_end|>".join([*each, ""]) for each in gold.actions.values()}
    assert "<tool_response>" in tokenizer.decode(output.response_ids)
    assert [value != 0 for value in output.response_logprobs] == list(map(bool, output.response_mask))
    assert '"calculate"' in tokenizer.decode(output.prompt_ids)
    assert output.as_dict()["rm_scores"].sum() == 1.0


async def test_a_wrong_answer_scores_0_and_options_are_read() -> None:
    output, _ = await played(1, options={"levels": [1, 2, 3]})
    assert (output.reward_score, output.num_turns) == (0.0, 3)


async def test_a_conversation_that_is_too_long_is_cut() -> None:
    output, _ = await played(2, response_length=30)
    assert (output.reward_score, len(output.response_ids), len(output.response_mask)) == (0.0, 30, 30)
