"""Servers that offer environments to clients of other frameworks."""
