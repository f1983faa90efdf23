"""Shell tasks in a sandbox, judged by the files that are there in the end."""

from environments.terminal.environment import Terminal, TerminalConfig

__all__ = ["Terminal", "TerminalConfig"]
