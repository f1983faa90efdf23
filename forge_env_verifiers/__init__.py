"""Environments as the taskset `forge-env-verifiers`: the package verifiers finds tasksets as top-level modules."""

from forge_env.integrations.verifiers import ForgeHarness, ForgeTaskset

__all__ = ["ForgeHarness", "ForgeTaskset"]
