"""Environments served to the clients of other frameworks."""
