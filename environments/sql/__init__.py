"""Questions over a small database, answered through a read-only query tool."""

from environments.sql.environment import SQL, SQLConfig

__all__ = ["SQL", "SQLConfig"]
