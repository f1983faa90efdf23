"""Environments as gymnasium knows them: synchronous, one (`make`) or many in step (`make_vec`).

    import forge_env, gymnasium

    env = gymnasium.make("forge_env/coding_rlvr", max_turns=4)
    observation, info = env.reset(seed=3)        # a tuple of `Message`
    observation, reward, terminated, truncated, info = env.step("def solve(x): return x + 1")
    env.close()

Options of the environment are keyword arguments; `sandboxes` names the engine ("auto", "docker", "local").
"""

import gymnasium  # noqa: F401 - first: its import hook needs `registration`, which would be half imported otherwise

from forge_env.gym.registration import register_all
from forge_env.gym.spaces import AssistantMessage, Messages
from forge_env.gym.twin import GymEnvironment
from forge_env.gym.vector import GymVectorEnvironment

__all__ = ["AssistantMessage", "GymEnvironment", "GymVectorEnvironment", "Messages", "register_all"]

register_all()
