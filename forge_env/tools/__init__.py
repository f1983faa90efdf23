"""Tools: methods that an agent may call."""
