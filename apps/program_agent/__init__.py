"""An agent that is a program of its own."""
