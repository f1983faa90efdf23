"""Agents that learn to use tools."""
