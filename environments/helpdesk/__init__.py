"""A help desk: the agent serves a simulated customer with tools, by the shop's rules."""

from environments.helpdesk.environment import Helpdesk, HelpdeskConfig

__all__ = ["Helpdesk", "HelpdeskConfig"]
