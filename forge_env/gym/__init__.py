"""Environments as synchronous gymnasium environments: one (`make`), or several stepped together (`make_vec`).

    import gymnasium, forge_env.gym  # the import registers every environment with gymnasium

    env = gymnasium.make("forge_env/coding_rlvr", max_turns=4)
    observation, info = env.reset(seed=3)        # a tuple of `Message`
    observation, reward, terminated, truncated, info = env.step("def solve(x): return x + 1")
    env.close()

Options of the environment are keyword arguments; `sandboxes` names the engine ("auto", "docker", "local").
"""

import gymnasium

from forge_env.gym.spaces import AssistantMessage, Messages
from forge_env.gym.twin import GymEnvironment
from forge_env.gym.vector import GymVectorEnvironment
from forge_env.registry import names, on_register

__all__ = ["AssistantMessage", "GymEnvironment", "GymVectorEnvironment", "Messages", "register_all"]


def register_all() -> None:
    """Add all registered environments to gymnasium's registry, including those registered later.

    An environment's package is imported only when the environment is made.
    """
    on_register(register_all)
    for name in names():
        if f"forge_env/{name}" not in gymnasium.registry:
            gymnasium.register(
                id=f"forge_env/{name}",
                entry_point="forge_env.gym.twin:GymEnvironment",
                vector_entry_point="forge_env.gym.vector:GymVectorEnvironment",
                kwargs={"environment": name},
            )


register_all()
