"""Training an agent that runs as a separate program."""
