"""A database of this process that an agent may query: it can only be read, and no query takes long or much memory."""

from __future__ import annotations

import sqlite3

from forge_env.errors import ToolError

MOST_ROWS = 40
MOST_STEPS = 2_000_000
"""Steps of SQLite's virtual machine in one query: some tens of milliseconds."""
LONGEST_VALUE = 2_000
"""Bytes of one value and of one row on the way: with `MOST_STEPS` a bound on a query's memory."""
FUNCTIONS = frozenset(
    {
        *("abs", "avg", "cast", "coalesce", "count", "date", "dense_rank", "group_concat", "ifnull", "iif", "instr"),
        *("julianday", "lag", "lead", "length", "like", "lower", "ltrim", "max", "min", "nullif", "printf", "rank"),
        *("replace", "round", "row_number", "rtrim", "strftime", "substr", "substring", "sum", "total", "trim"),
        *("typeof", "upper"),
    }
)
"""What a query may call. Nothing that loads, blows up or is random; like's patterns are short."""
PRAGMAS = frozenset({"table_info", "table_list"})


def guarded(script: str) -> sqlite3.Connection:
    """A database in memory, filled by `script`, that from then on can only be read."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(script)
    connection.execute("PRAGMA temp_store = MEMORY")  # no files, however much a query sorts
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
    """Columns and first rows of a query, a line each.

    Raises:
        ToolError: it is not one statement that reads, or takes too long; says which.
    """
    connection.set_progress_handler(lambda: 1, MOST_STEPS)
    try:
        cursor = connection.execute(sql)
        rows = cursor.fetchmany(MOST_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        said = f"took more than {MOST_STEPS:,} steps" if str(error) == "interrupted" else str(error)
        raise ToolError(said) from error
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
