"""Tables of metrics as text."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence


def table_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as text. Floats get three decimals, and other values are converted by str.

    NaN, and -1, by which COCO says that there was nothing to measure, become a dash.
    """
    from rich.console import Console  # rich is slow to import, and it is not needed before the first table.
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*map(_cell, row))
    text = io.StringIO()
    Console(file=text, width=120).print(table)
    return text.getvalue()


def table_of(rows: Mapping[str, Mapping[str, object]], summary: Mapping[str, float]) -> str:
    """Return a table with a line of values for each class, under the names that the first line gives them.

    Below it stands a line with the names and the values of the summary, with four decimals.
    """
    names = next(iter(rows.values()), {})
    table = table_text(("class", *names), [(name, *row.values()) for name, row in rows.items()])
    return table + "  ".join(f"{name} {value:.4f}" for name, value in summary.items())


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return "–" if math.isnan(value) or value == -1 else f"{value:.3f}"
