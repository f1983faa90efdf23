"""verl: an agent loop that plays episodes of an environment.

    # agent_loops.yaml: actor_rollout_ref.rollout.agent.agent_loop_config_path
    - name: forge_env
      _target_: forge_env.integrations.verl.ForgeAgentLoop
      environment: calculator

    Dataset.from_list(rows("calculator", 1000)).to_parquet("train.parquet")

verl's Continuous Token builder joins the turns, so what was sampled is trained on. An episode that the infrastructure
fails is played again; verl can't leave one out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from forge_env.environment.host import get_host
from forge_env.errors import InfrastructureError
from forge_env.integrations import needs
from forge_env.integrations.episode import Episode, as_chat
from forge_env.tools.turns import read_turn

with needs("verl", "verl==0.9.1"):
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

log = logging.getLogger(__name__)
ATTEMPTS = 3


def rows(environment: str, count: int, split: str | None = None) -> list[dict[str, Any]]:
    """Rows of verl's dataset. The environment writes the prompt itself.

    Args:
        count: number of tasks, from the first on; a split with fewer repeats them.
        split: split of the tasks; None: the environment's first.
    """
    common = {"prompt": [{"role": "user", "content": ""}], "data_source": environment, "agent_name": "forge_env"}
    return [{**common, "extra_info": {"split": split, "index": index}} for index in range(count)]


class ForgeAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Plays an episode with verl's server, as the tokens of one conversation."""

    def __init__(
        self, *given: Any, environment: str, options: Mapping[str, Any] = {}, sandboxes: str = "auto", **more: Any
    ) -> None:
        super().__init__(*given, **more)
        self._environment = environment
        plain = OmegaConf.to_container(options) if OmegaConf.is_config(options) else options
        self._options = {"sandboxes": sandboxes, **plain}

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play the episode of a row. `InfrastructureError`: it was lost `ATTEMPTS` times."""
        at = {"split": row["extra_info"].get("split"), "index": int(row["extra_info"]["index"])}
        for attempt in range(1, ATTEMPTS + 1):
            episode = Episode(self._environment, **at, **self._options)
            try:
                return await self._play(episode, sampling_params)
            except InfrastructureError as error:
                log.warning("%s (attempt %d of %d)", error, attempt, ATTEMPTS)
                if attempt == ATTEMPTS:
                    raise
            finally:
                await get_host().call(episode.close())
        raise AssertionError("unreachable")

    async def _play(self, episode: Episode, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        call, longest = get_host().call, self.rollout_config.response_length
        request = uuid4().hex
        chat = as_chat(await call(episode.start()))
        tools = [tool.to_openai() for tool in episode.tools] or None
        ids = await self.ct_build_initial_tokens(chat, tools=tools)
        prompt, turns = list(ids), 0
        mask: list[int] = []
        logprobs: list[float] | None = None
        while not episode.over:
            answer = await self.server_manager.generate(
                request_id=request, prompt_ids=ids, sampling_params=sampling_params
            )
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                ids, answer.token_ids, mask, logprobs or ([] if answer.log_probs else None), answer.log_probs or None
            )
            ids = merged.token_ids
            ended = answer.token_ids[-1:] == [self.tokenizer.eos_token_id]
            text = self.tokenizer.decode(answer.token_ids[:-1] if ended else answer.token_ids)
            message = read_turn(text, tools=bool(tools), turn=turns)
            turns += 1
            observation = await call(episode.answer(message, cut=not ended))
            if observation is None:
                break
            before, chat = [*chat, *as_chat([message])], [*chat, *as_chat([message, *observation])]
            merged, mask, logprobs = await self.ct_merge_context_msg(before, chat, ids, mask, logprobs, tools)
            ids = merged.token_ids
            if len(mask) >= longest:
                await call(episode.truncate("tokens"))
        record = episode.trajectory
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids[len(prompt) :][:longest],
            response_mask=mask[:longest],
            response_logprobs=None if logprobs is None else logprobs[:longest],
            reward_score=record.reward,
            num_turns=1 + 2 * turns,
            metrics=AgentLoopMetrics(),
            extra_fields={"turn_scores": [turn.reward for turn in record.turns], "tool_rewards": []},
        )
