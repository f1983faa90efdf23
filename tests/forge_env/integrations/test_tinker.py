"""Groups of episodes in the rollouts of the real Tinker cookbook, without its service."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

pytest.importorskip("tinker_cookbook")

from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.rollouts import do_group_rollout

from forge_env.integrations.tinker import ForgeDatasetBuilder
from tests.forge_env.integrations.gold import MODEL, GoldModel

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Gold(TokenCompleter):
    """The gold model behind the cookbook's interface; every other answer is wrong or cut, if it is asked to."""

    def __init__(self, tokenizer: Any, *, cut: bool = False) -> None:
        self._gold, self._cut, self._count = GoldModel(tokenizer), cut, 0

    async def __call__(self, model_input: Any, stop: Any) -> TokensWithLogprobs:
        tokens = self._gold(model_input.to_ints())
        if self._cut:
            return TokensWithLogprobs(
                tokens=tokens[:-1], maybe_logprobs=[-0.5] * (len(tokens) - 1), stop_reason="length"
            )
        return TokensWithLogprobs(tokens=tokens, maybe_logprobs=[-0.5] * len(tokens), stop_reason="stop")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    return get_tokenizer(str(MODEL))


def builder(**options: Any) -> ForgeDatasetBuilder:
    common = {"environment": "calculator", "model_name": str(MODEL), "renderer_name": "qwen3_instruct"}
    return ForgeDatasetBuilder(**common, group_size=2, batch_size=2, **options)


async def test_a_group_is_played_and_becomes_training_data(tokenizer: Any) -> None:
    dataset, _ = await builder(num_batches=3)()
    assert len(dataset) == 3
    [even, odd] = pickle.loads(pickle.dumps(dataset.get_batch(1)))  # tasks 2 and 3; builders are sent to workers
    groups = [await do_group_rollout(each, Gold(tokenizer)) for each in (even, odd)]
    assert [group.get_total_rewards() for group in groups] == [[1.0, 1.0], [0.0, 0.0]]
    assert even.logging_tags() == ["calculator"]
    data, _ = assemble_training_data(groups, compute_advantages(groups))
    learned = sum(int(datum.loss_fn_inputs["mask"].to_torch().sum()) for datum in data)
    turns = [turn for group in groups for each in group.trajectories_G for turn in each.transitions]
    assert learned == sum(len(turn.ac.tokens) for turn in turns)
    *_, said = groups[0].trajectories_G[0].transitions
    prompt = tokenizer.decode(said.ob.to_ints())
    assert '"calculate"' in prompt
    assert "<tool_response>" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")


async def test_the_environment_judges_an_answer_that_was_cut(tokenizer: Any) -> None:
    dataset, _ = await builder()()
    group = await do_group_rollout(dataset.get_batch(0)[1], Gold(tokenizer, cut=True))
    assert group.get_total_rewards() == [0.0, 0.0]
