"""Customers with a wish, and an agent who has tools and rules."""

from environments.helpdesk.environment import Helpdesk, HelpdeskConfig

__all__ = ["Helpdesk", "HelpdeskConfig"]
