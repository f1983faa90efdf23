"""Images and root filesystems that sandboxes run in."""

BUNDLED = "python"
"""Name of the image that comes with the engines."""
