"""Tasks: their sources and their order."""
