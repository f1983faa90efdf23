"""Questions over a corpus of made-up facts, several of which have to be joined."""

from environments.search.environment import Search, SearchConfig

__all__ = ["Search", "SearchConfig"]
