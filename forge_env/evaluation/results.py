"""Results of samples in columns of numbers: about 400 bytes per sample, so that millions fit in memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from forge_env.evaluation.plan import Outcome, SampleResult

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INTEGERS = (
    *("epoch", "difficulty", "turns", "prompt_tokens", "completion_tokens", "cached_tokens"),
    *("retries", "requests", "estimated_requests", "cut_replies"),
)
FLOATS = ("score", "reward", "max_score", "wall_s", "waited_s", "generate_s", "step_s", "reset_s", "close_s", "cost")
"""Columns of `SampleResult`; an unknown `max_score` is stored as NaN."""


@dataclass(frozen=True, slots=True)
class Kind(Outcome):
    """Values shared by many samples, stored once."""

    id_prefix: str
    """Prefix of the sample's id, before index and epoch: `label/split`."""
    environment: str
    split: str
    valid: bool
    truncation: str | None
    error: str | None
    tags: tuple[str, ...]
    metrics: tuple[str, ...]
    """Names of the metrics, in the order of their values."""


class ResultTable:
    """Append-only table of an evaluation's results, accessed by row number."""

    def __init__(self, results: Iterable[SampleResult] = ()) -> None:
        self.kinds: list[Kind] = []
        self._kind_numbers: dict[Kind, int] = {}
        self._tasks: list[str] = []
        self._task_numbers: dict[str, int] = {}
        self._columns: dict[str, array[Any]] = {name: array("d") for name in (*INTEGERS, *FLOATS)}
        self._columns |= {name: array("q") for name in ("index", "kind", "task", "first_metric")}
        self._metrics: array[float] = array("d")
        for result in results:
            self.add(result)

    def __len__(self) -> int:
        return len(self._columns["kind"])

    def add(self, result: SampleResult) -> None:
        """Append a result as the last row."""
        prefix, index, _ = result.id.rsplit("/", 2)
        names = (result.environment, result.split, result.valid, result.truncation, result.error)
        kind = Kind(prefix, *names, tuple(result.tags), tuple(result.metrics))
        number = self._kind_numbers.setdefault(kind, len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append(kind)
        task = self._task_numbers.setdefault(result.task_id, len(self._tasks))
        if task == len(self._tasks):
            self._tasks.append(result.task_id)
        row: dict[str, Any] = {"index": int(index), "kind": number, "task": task, "first_metric": len(self._metrics)}
        for name in (*INTEGERS, *FLOATS):
            value = getattr(result, name)
            row[name] = math.nan if value is None else value
        for name, value in row.items():
            self._columns[name].append(value)
        self._metrics.extend(result.metrics.values())

    def result(self, row: int) -> SampleResult:
        """Rebuild the result in a row."""
        kind = self.kinds[self._columns["kind"][row]]
        numbers: dict[str, Any] = {name: int(self._columns[name][row]) for name in INTEGERS}
        numbers |= {name: self._columns[name][row] for name in FLOATS}
        if math.isnan(numbers["max_score"]):
            numbers["max_score"] = None
        first = self._columns["first_metric"][row]
        return SampleResult(
            id=f"{kind.id_prefix}/{self._columns['index'][row]}/{numbers['epoch']}",
            environment=kind.environment,
            task_id=self._tasks[self._columns["task"][row]],
            split=kind.split,
            metrics=dict(zip(kind.metrics, self._metrics[first : first + len(kind.metrics)], strict=True)),
            valid=kind.valid,
            truncation=kind.truncation,
            error=kind.error,
            tags=list(kind.tags),
            **numbers,
        )

    def column(self, name: str) -> NDArray[Any]:
        """Copy a column of `SampleResult`, or `index`, `kind` or `task` (a number instead of the id)."""
        import numpy as np

        return np.array(self._columns[name])

    def each(self, value: Callable[[Kind], Any]) -> NDArray[Any]:
        """Compute for every row a value that depends only on its kind."""
        import numpy as np

        values = np.array([value(kind) for kind in self.kinds])
        rows: NDArray[Any] = values[self.column("kind")]
        return rows

    def metric_sums(self, rows: NDArray[np.intp]) -> dict[str, float]:
        """Sum of every metric over some rows; samples without the metric count as 0."""
        import numpy as np

        metrics, first, kinds = np.array(self._metrics), self.column("first_metric")[rows], self.column("kind")[rows]
        sums: dict[str, float] = {}
        for number in dict.fromkeys(kinds.tolist()):
            starts = first[kinds == number]
            for offset, name in enumerate(self.kinds[number].metrics):
                sums[name] = sums.get(name, 0.0) + float(metrics[starts + offset].sum())
        return sums

    def latest(self, rank: Callable[[str], int]) -> NDArray[np.intp]:
        """Rows by epoch, index and rank of the environment, if that is not negative; the last one added of each id."""
        import numpy as np

        if not len(self):
            return np.zeros(0, dtype=np.intp)
        prefixes = {
            prefix: number for number, prefix in enumerate(dict.fromkeys(kind.id_prefix for kind in self.kinds))
        }
        keys = [
            self.column("epoch"),
            self.column("index"),
            self.each(lambda kind: rank(kind.environment)),
            self.each(lambda kind: prefixes[kind.id_prefix]),
        ]
        order = np.lexsort(keys[::-1])  # stable: rows with the same id remain in the order of insertion
        last = np.ones(len(order), dtype=bool)
        last[:-1] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
        rows: NDArray[np.intp] = order[last & (keys[2][order] >= 0)]
        return rows


class Results(Sequence[SampleResult]):
    """Some rows of a table as a sequence; results are created on access."""

    def __init__(self, table: ResultTable, rows: NDArray[np.intp]) -> None:
        self._table = table
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> SampleResult: ...
    @overload
    def __getitem__(self, place: slice) -> Results: ...
    def __getitem__(self, place: int | slice) -> SampleResult | Results:
        if isinstance(place, slice):
            return Results(self._table, self._rows[place])
        return self._table.result(int(self._rows[place]))

    def __iter__(self) -> Iterator[SampleResult]:
        return (self._table.result(int(row)) for row in self._rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"<{len(self)} results>"
