"""Playing episodes."""
