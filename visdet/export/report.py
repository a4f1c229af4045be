"""The report of an export, as JSON and for reading."""

import json
from pathlib import Path
from typing import Any

from visdet.files.writing import write_atomically


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write ``report.json`` and ``report.md`` into a folder."""
    given = report.get
    write_atomically(folder / "report.json", json.dumps(report, indent=1))
    data = given("data", {})
    plain = given("without_options")
    lines = [
        f"# Export: {report['format']}, {report['precision']}\n",
        *(f"**{report[name]}**" for name in ("error", "remark") if name in report),
        *(f"* {name}: {size / 2**20:.1f} MiB" for name, size in report["bytes"].items()),
        *_differences(given("differences"), "random inputs"),
        *_differences(data.get("differences"), "data"),
    ]
    if plain is not None:
        options = ", ".join(f"{name}={value}" for name, value in plain["options"].items())
        lines += [f"\nThese numbers are those of a program that opens the model with {options}. Without:"]
        lines += _differences(plain["differences"], "random inputs")
    if metrics := data.get("metrics"):
        columns = list(metrics)
        lines += ["", f"| metric | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
        for name in metrics[columns[0]]:
            lines.append(f"| {name} | {' | '.join(f'{metrics[column][name]:.4f}' for column in columns)} |")
    if times := given("latency"):
        lines += [
            f"\nOn {times['device']} with {times['threads']} threads:\n",
            "| | p50 ms | p99 ms | images per second |",
            "|---|---|---|---|",
            *(
                f"| {name} | {one['p50_ms']:.1f} | {one['p99_ms']:.1f} | {one['images_per_second']:.1f} |"
                for name, one in times.items()
                if isinstance(one, dict)
            ),
        ]
    write_atomically(folder / "report.md", "\n".join(lines) + "\n")


def _differences(found: dict[str, Any] | None, title: str) -> list[str]:
    """Return the lines of a table of differences, or nothing without one."""
    if found is None:
        return []
    without = (
        f", without {found['left_out']} where rounding decides the model's result"
        if found["left_out"]
        else ""
    )
    return [
        f"\nRelative differences from the model on {found['inputs']} {title}{without}:\n",
        "| output | largest | mean |",
        "|---|---|---|",
        *(f"| {name} | {one['largest']:.2g} | {one['mean']:.2g} |" for name, one in found["outputs"].items()),
    ]
