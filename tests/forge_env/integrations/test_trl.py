"""Episodes in TRL's own trainer, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl")
pytest.importorskip("accelerate")

from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import get_json_schema  # noqa: E402

import forge_env as fe  # noqa: E402
from forge_env.errors import UsageError  # noqa: E402
from forge_env.integrations.trl import Rollouts, environment_factory, reward  # noqa: E402
from tests.forge_env.integrations.gold import MODEL, TASKS, GoldModel  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(MODEL)
    made.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text()
    return made


class Recorded(trl.GRPOTrainer):
    """Keeps the batch that it trains on; a gold model may sample."""

    gold: GoldModel | None = None

    def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **options: Any) -> Any:
        if self.gold is None:
            return super()._generate_single_turn(prompt_ids, *rest, **options)
        return [self.gold(ids) for ids in prompt_ids], None

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.batch = inputs
        return super()._compute_loss(model, inputs)


def trained(tmp_path: Path, tokenizer: Any, rows: list[dict[str, Any]], *, gold: bool, **options: Any) -> Recorded:
    """A trainer after a step of two groups of two, and its batch."""
    args = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2 * TASKS,
        num_generations=2,
        max_completion_length=400,
        max_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    model.config.max_position_embeddings = 2048
    trainer = Recorded(
        model, reward, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **options
    )
    trainer.gold = GoldModel(tokenizer) if gold else None
    trainer.train()
    assert trainer.state.global_step == 1
    return trainer


def mean_reward(trainer: Recorded) -> float:
    [logged] = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return float(logged)


def check_batch(trainer: Recorded, tokenizer: Any) -> None:
    """The sampled tokens, and these alone, are learned."""
    batch = trainer.batch
    said = set()
    for ids, mask, observed in zip(batch["completion_ids"], batch["completion_mask"], batch["tool_mask"], strict=True):
        whole = tokenizer.decode(ids[mask.bool()])
        sampled = tokenizer.decode(ids[(mask * observed).bool()])
        said.add(sampled)
        assert ("<tool_response>" in whole) == ("<tool_call>" in sampled)
        assert "<tool_response>" not in sampled
        assert sampled.endswith("<|im_end|>")
    gold = GoldModel(tokenizer)
    texts = {"<|im_end|>".join(answers) + "<|im_end|>" for answers in gold.actions.values()}
    assert said <= texts


def test_a_step_on_whole_episodes(tmp_path: Path, tokenizer: Any) -> None:
    rollouts = Rollouts("calculator")
    trainer = trained(tmp_path, tokenizer, rollouts.rows(TASKS), gold=True, rollout_func=rollouts)
    assert mean_reward(trainer) == 0.5
    check_batch(trainer, tokenizer)


def test_the_model_itself_plays_over_several_turns(tmp_path: Path, tokenizer: Any) -> None:
    rollouts = Rollouts("wordle", max_turns=2)
    trainer = trained(tmp_path, tokenizer, rollouts.rows(TASKS), gold=False, rollout_func=rollouts)
    assert 0 < trainer.batch["tool_mask"].float().mean() < 1


def test_an_environment_factory_for_its_own_loop(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": ""}], "index": index} for index in range(TASKS)]
    factory = environment_factory("calculator")
    trainer = trained(tmp_path, tokenizer, rows, gold=True, environment_factory=factory)
    assert mean_reward(trainer) == 0.5
    check_batch(trainer, tokenizer)


def test_a_tool_keeps_its_schema() -> None:
    [tool] = fe.make("calculator").tools
    schema = get_json_schema(environment_factory("calculator")().calculate)["function"]
    schema.pop("return", None)
    assert schema == tool.model_dump() | {"parameters": schema["parameters"]}
    given, own = schema["parameters"], tool.parameters
    assert given["required"] == own["required"]
    assert {n: p["type"] for n, p in given["properties"].items()} == {
        n: p["type"] for n, p in own["properties"].items()
    }


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="has no tools"):
        environment_factory("wordle")
    with pytest.raises(UsageError, match="is no task"):
        Rollouts("wordle")([[{"role": "user", "content": "What is 1 + 1?"}]], None)
