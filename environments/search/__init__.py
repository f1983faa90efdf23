"""Questions over a corpus of made-up facts that require joining several facts."""

from environments.search.environment import Search, SearchConfig

__all__ = ["Search", "SearchConfig"]
