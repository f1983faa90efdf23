"""Entering environments into gymnasium's registry; their packages are imported when one is made."""

from __future__ import annotations

import gymnasium

from forge_env.registry import names, on_register

NAMESPACE = "forge_env"


def register_all() -> None:
    """Register what isn't registered yet, and from now on what will be."""
    on_register(register_all)
    for name in names():
        if f"{NAMESPACE}/{name}" not in gymnasium.registry:
            gymnasium.register(
                id=f"{NAMESPACE}/{name}",
                entry_point="forge_env.gym.twin:GymEnvironment",
                vector_entry_point="forge_env.gym.vector:GymVectorEnvironment",
                kwargs={"environment": name},
            )


def deregister(name: str) -> None:
    """Undo the registration of one name."""
    gymnasium.registry.pop(f"{NAMESPACE}/{name}", None)
