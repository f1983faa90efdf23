"""SkyRL: environments as text environments of `skyrl_gym`.

    from forge_env.integrations.skyrl import register, rows

    register("calculator")  # in the process that generates
    Dataset.from_list(rows("calculator", 1000)).to_parquet("train.parquet")

Tools are described in the prompt, and calls are read from the answer's text, as SkyRL passes text only. SkyRL ends an
episode that is too long without telling the environment: its reward is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_env.endpoint.history import tools_as_text
from forge_env.environment.host import get_host
from forge_env.integrations import needs
from forge_env.integrations.episode import Episode
from forge_env.tools.turns import read_turn
from forge_env.types import Observation

with needs("SkyRL", "skyrl-gym==0.4.0"):
    import skyrl_gym
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


def register(environment: str, *, sandboxes: str = "auto", **options: Any) -> None:
    """Register an environment with `skyrl_gym` under its name."""
    Episode(environment, sandboxes=sandboxes, **options)  # mistakes are reported here
    kwargs = {"environment": environment, "sandboxes": sandboxes, "options": options}
    skyrl_gym.register(id=environment, entry_point="forge_env.integrations.skyrl:ForgeTextEnv", kwargs=kwargs)


def rows(environment: str, count: int, split: str | None = None) -> list[dict[str, Any]]:
    """Rows of SkyRL's dataset. The environment writes the prompt itself.

    Args:
        count: number of tasks, from the first on; a split with fewer repeats them.
        split: split of the tasks; None: the environment's first.
    """
    prompt = [{"role": "user", "content": ""}]
    return [{"prompt": prompt, "env_class": environment, "split": split, "index": index} for index in range(count)]


class ForgeTextEnv(BaseTextEnv):  # type: ignore[misc]
    """An episode of an environment."""

    def __init__(
        self,
        environment: str,
        env_config: Any = None,
        extras: Mapping[str, Any] = {},
        sandboxes: str = "auto",
        options: Mapping[str, Any] = {},
    ) -> None:
        super().__init__()
        self.max_turns = extras.get("max_turns") or 0
        at = {"split": extras.get("split"), "index": extras["index"]}
        self._episode = Episode(environment, sandboxes=sandboxes, **at, **options)

    def init(self, prompt: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Start the episode; its messages replace the row's prompt."""
        observation = get_host().run(self._episode.start())
        return _chat(observation, self._episode.tools), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Apply an answer. The reward of the whole episode comes with its last step."""
        message = read_turn(action, tools=bool(self._episode.tools), turn=self.turns)
        self.turns += 1
        observation = get_host().run(self._episode.answer(message))
        if observation is not None and self.turns == self.max_turns:
            get_host().run(self._episode.truncate("turns"))
        over = self._episode.over
        return BaseTextEnvStepOutput(
            observations=[] if over else _chat(observation or [], ()),
            reward=self._episode.trajectory.reward if over else 0.0,
            done=over,
            metadata={},
        )

    def get_metrics(self) -> dict[str, Any]:
        """The episode's metrics."""
        return dict(self._episode.trajectory.metrics) if self._episode.over else {}

    def close(self) -> None:
        """Release what the episode holds."""
        get_host().run(self._episode.close())


def _chat(observation: Observation, tools: Any) -> list[dict[str, Any]]:
    return [message.to_openai() for message in tools_as_text(observation, tools)]
