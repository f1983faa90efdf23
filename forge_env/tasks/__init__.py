"""Tasks: where they come from, and which comes when."""
