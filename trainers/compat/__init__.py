"""Patches and private names of the training stack's packages, one module per package (see `forge_env.compat`)."""
