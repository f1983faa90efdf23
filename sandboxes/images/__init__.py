"""What sandboxes are built from."""

BUNDLED = "python"
"""The image that comes with the engines."""
