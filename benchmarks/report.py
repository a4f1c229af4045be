"""The report, which is a table in Markdown and JSON, and a short table on the terminal."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Report = dict[str, Any]  # "environment", "floors", "command", "results"; all of it plain JSON


def write_tables(report: Report, folder: Path) -> None:
    """Write bench.json and bench.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "bench.md").write_text("\n".join(_markdown(report)) + "\n")


def short_table(report: Report) -> str:
    """Return a table with case, dtype, pass, time, percent of the floor, ratios of peers."""
    peers = _peers(report)
    rows = [["case", "dtype", "pass", "median", "floor", *peers]]
    for result in report["results"]:
        name = [f"{result['op']}/{result['case']}", result["dtype"]]
        if not result["gate"]["passed"]:
            rows.append([*name, "not timed: red gate", *[""] * (len(peers) + 2)])
        for kind, figures in result["passes"].items():
            ratios = [_ratio(result, peer, kind) for peer in peers]
            median, percent = _time(figures["time"]["median_us"]), f"{figures['percent_of_floor']:.0f} %"
            rows.append([*name, _label(kind), median, percent, *ratios])
    return "\n".join(table(rows[0], rows[1:]))


def _markdown(report: Report) -> list[str]:
    facts = {**report["environment"], "floors": report["floors"], "command": f"`{report['command']}`"}
    lines = ["# Benchmarks", "", *(f"- {label}: {value}" for label, value in facts.items())]
    lines += ["", "## Cases", ""]
    lines += dict.fromkeys(
        f"- {result['op']}/{result['case']}: {result['sizes']}" for result in report["results"]
    )
    lines += ["", "## Times", "", *_times(report), "", *_NOTES, "", "## Gate", "", *_gates(report)]
    if any("peak_bytes" in result for result in report["results"]):
        lines += ["", "## Peak memory of forward and backward", "", *_peaks(report)]
    problems = [
        f"- {result['case']} {result['dtype']}, {_label(kind)}: {problem}"
        for result in report["results"]
        for kind, problem in result["failures"].items()
    ]
    problems += [
        f"- {result['case']} {result['dtype']}, {peer}: {entry['problem']}"
        for result in report["results"]
        for peer, entry in result["peers"].items()
        if "problem" in entry
    ]
    return [*lines, "", "## What could not be timed", "", *problems] if problems else lines


_NOTES = [
    "Moved: every input once and every output once. Gathered: what all samples read or add, wherever from. The",
    "floor is the largest time of any resource for the counted bytes (benchmarks/floors.py). A ratio is the peer's",
    "time over ours. The deterministic backward includes torch's filling of fresh memory, `unfilled` leaves it out.",
]


def _times(report: Report) -> list[str]:
    peers = _peers(report)
    # The units are TB/s and TFLOP/s for a GPU, and GB/s and GFLOP/s for a CPU.
    prefix, scale = ("T", 1.0) if "multiprocessors" in report["environment"] else ("G", 1e3)
    header = [
        *(
            "case",
            "dtype",
            "pass",
            "median",
            "20–80 %",
            f"moved {prefix}B/s",
            f"gathered {prefix}B/s",
            f"{prefix}FLOP/s",
        ),
        *("floor", "% of floor", *peers),
    ]
    rows = []
    for result in report["results"]:
        for kind, figures in result["passes"].items():
            time = figures["time"]
            rows.append(
                [result["case"], result["dtype"], _label(kind), _time(time["median_us"])]
                + [f"{_time(time['low_us'])} – {_time(time['high_us'])}"]
                + [f"{figures[name] * scale:.3g}" for name in ("moved_tb_s", "gathered_tb_s", "tflop_s")]
                + [
                    f"{_time(figures['floor_us'])} ({figures['floor_of']})",
                    f"{figures['percent_of_floor']:.0f}",
                ]
                + [_peer(result, peer, kind) for peer in peers]
            )
    return table(header, rows)


def _peaks(report: Report) -> list[str]:
    """Return a table of the peak memory of the operator and its peers in forward and backward, without arguments."""
    peers = _peers(report)
    rows = []
    for result in report["results"]:
        peaks = [
            result.get("peak_bytes"),
            *(result["peers"].get(peer, {}).get("peak_bytes") for peer in peers),
        ]
        mebibytes = ["" if peak is None else f"{peak / 2**20:.1f} MiB" for peak in peaks]
        rows.append([result["case"], result["dtype"], *mebibytes])
    return table(["case", "dtype", "visdet", *peers], rows)


def _gates(report: Report) -> list[str]:
    """Return a table of the errors relative to float64, for the operator and for the outputs of its peers."""
    peers = _peers(report)
    tensors = list(dict.fromkeys(name for result in report["results"] for name in result["gate"]["errors"]))
    rows = []
    for result in report["results"]:
        gate = result["gate"]
        errors = [f"{gate['errors'][name]:.1e}" if name in gate["errors"] else "" for name in tensors]
        outputs = [result["peers"].get(peer, {}).get("output_error") for peer in peers]
        rows.append(
            [result["case"], result["dtype"], "green" if gate["passed"] else "**red**", *errors]
            + ["" if error is None else f"{error:.1e}" for error in outputs]
            + ["; ".join(gate["problems"])]
        )
    header = [
        "case",
        "dtype",
        "gate",
        *(name if name == "output" else f"gradient of {name}" for name in tensors),
    ]
    return table([*header, *(f"output of {peer}" for peer in peers), "problem"], rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def _peers(report: Report) -> list[str]:
    return list(dict.fromkeys(peer for result in report["results"] for peer in result["peers"]))


def _label(kind: str) -> str:
    return kind.replace("_", " ")


def _ratio(result: dict[str, Any], peer: str, kind: str) -> str:
    ratio = result["peers"].get(peer, {}).get("times_slower", {}).get(kind)
    return "" if ratio is None else f"{peer} {ratio:.3g}x"


def _peer(result: dict[str, Any], peer: str, kind: str) -> str:
    entry = result["peers"].get(peer, {"passes": {}})
    if kind not in entry["passes"]:
        return ""
    return f"{_time(entry['passes'][kind]['median_us'])} ({entry['times_slower'][kind]:.3g}×)"


def _time(us: float) -> str:
    """Return ``us`` as text with at least three significant digits, in ms from 10 ms on."""
    if us >= 1e4:
        return f"{us / 1e3:.0f} ms" if us >= 1e5 else f"{us / 1e3:.1f} ms"
    return f"{us:.0f} µs" if us >= 100 else f"{us:.3g} µs"
