"""Write the table of docs/export.md from the reports of ``visdet export --check DATA --bench``.

python -m benchmarks.exports "Deformable DETR=exported/onnx" "Deformable DETR=exported/pt2"

The rows are kept in docs/export.json, where those of the same name, format and precision are replaced.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .report import table

PAGE = Path(__file__).parents[1] / "docs" / "export.md"
HEADER = ["model", "format", "precision", "largest difference", "metric", "exported", "ms", "eager ms", "MiB"]


def cells_of(report: dict[str, Any]) -> list[str]:
    """Return the cells of a report, from the largest difference on."""
    largest = max(one["largest"] for one in report["differences"]["outputs"].values())
    metrics = report.get("data", {}).get("metrics", {"model": {}})
    kinds = [name for name in metrics["model"] if name.endswith(("bbox_mAP", "NuScenes/mAP"))][:1]
    compared = [f"{metrics[side][kind]:.4f}" for side in ("model", "exported") for kind in kinds] or ["", ""]
    latency = report.get("latency", {})
    times = [f"{latency[side]['p50_ms']:.1f}" if side in latency else "" for side in ("exported", "model")]
    return [
        *(f"{largest:.0e}", " ".join([*kinds, compared[0]]), compared[1], *times),
        f"{sum(report['bytes'].values()) / 2**20:.1f}",
    ]


def replace_table(name: str, header: list[str], rows: list[list[str]]) -> None:
    """Write a table between the marks of its name in docs/export.md."""
    start, end = f"<!-- {name} -->\n", "<!-- end -->"
    before, rest = PAGE.read_text().split(start)
    lines = "\n".join([*table(header, rows), end])
    PAGE.write_text(before + start + lines + rest.partition(end)[2])


def main(arguments: list[str]) -> None:
    """Add the reports of folders, each as NAME=FOLDER, and rewrite the table."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.exports",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "reports", nargs="*", metavar="NAME=FOLDER", help="a model and the folder of its export"
    )
    file = PAGE.with_suffix(".json")
    rows = json.loads(file.read_text()) if file.is_file() else {}
    for name, _, folder in (one.partition("=") for one in parser.parse_args(arguments).reports):
        report = json.loads(Path(folder, "report.json").read_text())
        rows[f"{name}={report['format']} {report['precision']}"] = cells_of(report)
    file.write_text(json.dumps(rows, indent=0, sort_keys=True) + "\n")
    body = [[*key.replace("=", " ").rsplit(" ", 2), *rows[key]] for key in sorted(rows)]
    replace_table("exports", HEADER, body)


if __name__ == "__main__":
    main(sys.argv[1:])
