"""Read-only SQLite database in this process, with limits on the time and memory of each query of an agent."""

from __future__ import annotations

import sqlite3

from forge_env.errors import ToolError

MOST_ROWS = 40
MOST_STEPS = 2_000_000
"""Maximum steps of SQLite's virtual machine per query: some tens of milliseconds."""
LONGEST_VALUE = 2_000
"""Maximum bytes of one value and of one intermediate row; together with `MOST_STEPS` this bounds a query's memory."""
FUNCTIONS = frozenset(
    {
        *("abs", "avg", "cast", "coalesce", "count", "date", "dense_rank", "group_concat", "ifnull", "iif", "instr"),
        *("julianday", "lag", "lead", "length", "like", "lower", "ltrim", "max", "min", "nullif", "printf", "rank"),
        *("replace", "round", "row_number", "rtrim", "strftime", "substr", "substring", "sum", "total", "trim"),
        *("typeof", "upper"),
    }
)
"""Functions a query may call: none that load extensions, amplify data or are random. Patterns of `like` are short."""
PRAGMAS = frozenset({"table_info", "table_list"})


def guarded(script: str) -> sqlite3.Connection:
    """Create an in-memory database with `script`, then make it read-only."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(script)
    connection.execute("PRAGMA temp_store = MEMORY")  # large sorts must not create temporary files
    for limit, value in [
        (sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE),
        (sqlite3.SQLITE_LIMIT_SQL_LENGTH, LONGEST_VALUE),
        (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 50),
        (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
        (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 10),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
    ]:
        connection.setlimit(limit, value)
    connection.text_factory = lambda data: data.decode(errors="replace")
    connection.set_authorizer(_may)
    return connection


def _may(action: int, first: str | None, second: str | None, database: str | None, inside: str | None) -> int:
    allowed = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
    allowed |= action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FUNCTIONS
    allowed |= action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in PRAGMAS
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def rows_as_text(connection: sqlite3.Connection, sql: str) -> str:
    """Run a query and format its columns and first rows, one per line.

    Raises:
        ToolError: the query is not a single reading statement or takes too long; the message names the reason.
    """
    connection.set_progress_handler(lambda: 1, MOST_STEPS)
    try:
        cursor = connection.execute(sql)
        rows = cursor.fetchmany(MOST_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        reason = f"took more than {MOST_STEPS:,} steps" if str(error) == "interrupted" else str(error)
        raise ToolError(reason) from error
    finally:
        connection.set_progress_handler(None, 0)
    if cursor.description is None:
        raise ToolError("the statement returned no rows")
    cursor.close()
    lines = [" | ".join(column[0] for column in cursor.description)]
    lines += [" | ".join("NULL" if value is None else str(value) for value in row) for row in rows[:MOST_ROWS]]
    if len(rows) > MOST_ROWS:
        lines.append(f"[only the first {MOST_ROWS} rows are shown]")
    return "\n".join(lines)
