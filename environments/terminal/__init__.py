"""Shell tasks in a sandbox, scored by the final state of the files."""

from environments.terminal.environment import Terminal, TerminalConfig

__all__ = ["Terminal", "TerminalConfig"]
