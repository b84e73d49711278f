"""``metrics.csv``: a table for spreadsheets and pandas."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from mpitrain.record.loggers.appending import Appending
from mpitrain.record.loggers.protocol import Logger, RunFacts, Status
from mpitrain.record.run_dir import write_atomic

FILE = "metrics.csv"


class CsvFile(Logger):
    """Writes a line per call, and a column per name; what was not told is empty.

    Args:
        facts: Of the run; rows of steps that are not gone on from are dropped.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._path = facts.run_dir / FILE
        self._first = facts.step
        self._columns = ["step"]
        rows = [row for row in self._rows() if int(row["step"]) <= facts.step]
        # An evaluation that was cut short is done, and told, again.
        at_last = [row for row in rows if int(row["step"]) == facts.step]
        self._told = {name for row in at_last for name, value in row.items() if value}
        self._rewrite(rows)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line; a name that is new gets a column."""
        if step == self._first:
            values = {k: v for k, v in values.items() if k not in self._told}
        new = [name for name in values if name not in self._columns]
        if new:
            rows = self._rows()
            self._columns += new
            self._file.close()
            self._rewrite(rows)
        row = {"step": step, **values}
        if values:
            line = _line([row.get(name, "") for name in self._columns])
            self._file.write(line.encode())

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        """Close the file."""
        del status, summary
        self._file.close()

    def _rows(self) -> list[dict[str, str]]:
        """Read what is there; the end of a line that was cut is not."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return []
        rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
        self._columns = list(rows.fieldnames or ["step"])
        return [row for row in rows if (row.get("step") or "").isdecimal()]

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Write all anew, whole."""
        lines = [_line([row.get(name) or "" for name in self._columns]) for row in rows]
        write_atomic(self._path, _line(self._columns) + "".join(lines))
        self._file = Appending(self._path)


def _line(cells: Sequence[object]) -> str:
    r"""Write a row; floats are written whole, so that they read back as they were.

    >>> _line([1, 0.1, "", "a,b"])
    '1,0.1,,"a,b"\n'
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
