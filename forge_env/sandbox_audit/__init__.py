"""Held to account: hostile programs, and the conformance suite that every sandbox engine passes."""
