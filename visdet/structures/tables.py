"""Tables of metrics as text."""

import io
import math
from collections.abc import Iterable, Sequence


def table_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as text. Floats get three decimals, NaN becomes a dash, and other values are converted by str."""
    from rich.console import Console  # rich is slow to import, and it is not needed before the first table.
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*map(_cell, row))
    text = io.StringIO()
    Console(file=text, width=120).print(table)
    return text.getvalue()


def summary_line(metrics: dict[str, float]) -> str:
    """Return names and values with four decimals in one line."""
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return "–" if math.isnan(value) else f"{value:.3f}"
