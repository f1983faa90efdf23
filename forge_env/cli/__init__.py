"""The `forge-env` command."""
