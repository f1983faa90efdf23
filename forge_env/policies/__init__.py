"""Policies: what plays an episode. Scripted ones here; models behind endpoints and generators elsewhere."""
