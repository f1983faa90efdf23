"""Opponents, which play seats in place of the policy: their configuration and their policies.

random, empty, module:function       a scripted policy (`forge_env.rollout.scripted`)
{model: NAME, base_url: URL, ...}    a model of an endpoint: another model, or an earlier checkpoint served there
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from forge_env.config.evaluation import EndpointOptions
from forge_env.config.reader import Source, validate
from forge_env.errors import ConfigError
from forge_env.policy import Policy
from forge_env.rollout.episode import check_opponents
from forge_env.rollout.scripted import GoldPolicy, scripted_policy

Named = Mapping[str, str | dict[str, Any]]


def check_named(name: str, seats: tuple[str, ...], named: Named, at: str) -> None:
    """Check configured opponents.

    Args:
        at: dotted configuration key of the opponents.
    """
    if not named:
        return
    check_opponents(name, seats, named)
    for seat, player in named.items():
        _made(player, f"{at}.{seat}")


async def open_opponents(stack: AsyncExitStack, named: Named, at: str) -> dict[str, Policy]:
    """Open the opponents' policies, by seat; `stack` closes them."""
    opened: dict[str, Policy] = {}
    for seat, player in named.items():
        made = _made(player, f"{at}.{seat}")
        if isinstance(made, EndpointOptions):
            from forge_env.endpoint.policy import EndpointPolicy

            endpoint = await stack.enter_async_context(EndpointPolicy(made))
            await endpoint.check()
            endpoint.name, made = made.model, endpoint
        opened[seat] = made
    return opened


def _made(player: str | dict[str, Any], at: str) -> Policy | EndpointOptions:
    if isinstance(player, dict):
        return validate(EndpointOptions, player, Source("", {}), tuple(at.split(".")))
    policy = scripted_policy(player)
    if policy is None or isinstance(policy, GoldPolicy):
        why = "plays all seats together" if policy else "is no scripted policy"
        fix = "use random, module:function, or {model: NAME, base_url: URL}"
        raise ConfigError(f"{at}: {player!r} {why}", fix=fix)
    policy.name = policy.name or player
    return policy
