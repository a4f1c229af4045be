"""Write the tables of the pages in docs/kernels: python -m benchmarks.write_docs [REPORT.json ...].

A report is the bench.json of ``benchmarks.run`` or the paths.json of ``benchmarks.paths``. Its medians replace those of
the same operators in docs/kernels/DEVICE.json, which is committed. Operators that no page names are left out. Then
every part of a page between ``<!-- figures: DEVICE KIND OPERATOR ... -->`` and ``<!-- end -->`` is generated from these
files. A KIND is one of KINDS below. Without a report, only the pages are written.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

from .report import table

PAGES = Path(__file__).resolve().parents[1] / "docs" / "kernels"
FACTS = ("device", "driver", "torch", "instruction set", "threads", "commit", "date")
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) ([\w-]+) ([\w ]+?) -->\n).*?(<!-- end -->)", re.DOTALL)

HEADINGS = {"deterministic": "deterministic backward", "both": "forward and backward"}

Figures = dict[str, dict[str, Any]]  # operator: {"times": section, "paths": section}
Row = dict[str, Any]


def write_docs(reports: Sequence[Path] = (), pages: Path = PAGES) -> None:
    """Add the figures of ``reports`` to the committed files, and rewrite the generated parts of all pages."""
    texts = [page.read_text() for page in pages.glob("*.md")]
    ops = {op for text in texts for _, _, _, names, _ in BLOCK.findall(text) for op in names.split()}
    for path in reports:
        report = json.loads(path.read_text())
        file = pages / f"{device_name(report['environment'])}.json"
        figures = json.loads(file.read_text()) if file.exists() else {}
        add_report(figures, report, ops)
        file.write_text(_as_json(figures))
    for page in sorted(pages.glob("*.md")):
        page.write_text(rendered(page.read_text(), pages))


def device_name(environment: dict[str, str]) -> str:
    """Return the name of the file with the figures of a device, such as "h200" for "NVIDIA H200", or "cpu"."""
    if "driver" not in environment:
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", environment["device"].removeprefix("NVIDIA ").lower()).strip("-")


def add_report(figures: Figures, report: dict[str, Any], ops: Container[str]) -> None:
    """Replace the times, or the paths, of every operator of ``ops`` that ``report`` holds."""
    kind = "paths" if "rows" in report else "times"
    rows = _path_rows(report["rows"]) if kind == "paths" else [time_row(r) for r in report["results"]]
    facts = {key: report["environment"][key] for key in FACTS if key in report["environment"]}
    command = report.get("command", "python -m benchmarks.paths")
    facts["command"] = re.sub(r" --(out \S+|write-docs)", "", command)
    for op in dict.fromkeys(row["op"] for row in rows if row["op"] in ops):
        chosen = [row for row in rows if row["op"] == op and row["case"] != "tiny"]
        cases = {row["case"]: row["sizes"] for row in chosen}
        kept = [{key: value for key, value in row.items() if key not in ("op", "sizes")} for row in chosen]
        figures.setdefault(op, {})[kind] = {**facts, "cases": cases, "rows": kept}


def rendered(text: str, pages: Path = PAGES) -> str:
    """Return the page ``text`` with its generated parts made from the committed figures."""

    def block(match: re.Match[str]) -> str:
        start, device, kind, ops, end = match.groups()
        file = pages / f"{device}.json"
        if not file.exists():
            return f"{start}\nNo figures of this device are committed yet.\n\n{end}"
        figures = json.loads(file.read_text())
        lines: list[str] = []
        sources: dict[str, None] = {}
        for op in ops.split():
            section = figures.get(op, {}).get("times" if kind == "times" else "paths")
            lines += [f"**{op}**", ""] if " " in ops else []
            lines += (
                [*KINDS[kind](section), ""] if section else [f"No figures of `{op}` are committed yet.", ""]
            )
            if section:
                sources[_source(section)] = None
        return "\n".join([start, *lines, *(line for source in sources for line in (source, "")), end])

    return BLOCK.sub(block, text)


def time_row(result: dict[str, Any]) -> Row:
    """Return the figures that the tables show. A floor under a tenth of the time says nothing and is left out."""
    # On a GPU, the backward has a column of its own. On a CPU, it is shown together with the forward. The time in which
    # torch fills new memory is left out.
    shown = {"forward": "forward", "backward": "backward", "backward_deterministic_unfilled": "deterministic"}
    if "backward_deterministic_unfilled" not in result["passes"]:
        shown = {"forward": "forward", "both": "both"}
    passes = {}
    for name in (name for name in shown if name in result["passes"]):
        figures = result["passes"][name]
        median, floor = figures["time"]["median_us"], figures["floor_us"]
        kept = {"us": median}
        if floor > median / 10:
            kept["floor"] = floor
        passes[shown[name]] = {key: _rounded(value) for key, value in kept.items()}
    slower = {
        peer: {
            kind: _rounded(ratio, 3) for kind, ratio in entry["times_slower"].items() if kind != "backward"
        }
        for peer, entry in result["peers"].items()
        if entry.get("times_slower")
    }
    row = {key: result[key] for key in ("op", "case", "sizes", "dtype")}
    return {**row, "passes": passes, "slower": slower}


def _path_rows(rows: Iterable[Row]) -> list[Row]:
    """Return one row for every case, dtype and pass, with the times of its paths. The chosen path comes first."""
    merged: dict[tuple[str, ...], Row] = {}
    for row in sorted(rows, key=lambda row: not row["chosen"]):
        key = tuple(row[name] for name in ("op", "case", "dtype", "pass"))
        if not row["chosen"] and key not in merged:
            continue  # None of the paths of this call is the chosen one.
        entry = merged.setdefault(key, {name: row[name] for name in ("op", "case", "sizes", "dtype", "pass")})
        entry.setdefault("us", {})[row["path"]] = _rounded(row["us"])
    return list(merged.values())


def _rounded(value: float, digits: int = 4) -> float:
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _as_json(figures: Figures) -> str:
    """Return JSON with one line per row, so that a commit shows which figures have changed."""
    ops = []
    for op in sorted(figures):
        kinds = []
        for kind, section in sorted(figures[op].items()):
            facts = json.dumps(
                {key: value for key, value in section.items() if key != "rows"}, ensure_ascii=False
            )
            rows = ",\n".join(
                json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in section["rows"]
            )
            kinds.append(f'"{kind}": {facts[:-1]}, "rows": [\n{rows}\n]}}')
        ops.append(f'"{op}": {{\n' + ",\n".join(kinds) + "\n}")
    return "{\n" + ",\n".join(ops) + "\n}\n"


def _source(section: dict[str, Any]) -> str:
    facts = ", ".join(f"{key} {section[key]}" for key in FACTS[1:-1] if key in section)
    return f"Medians in µs: {section['device']}, {facts}, {section['date']}; `{section['command']}`."


def _sizes(section: dict[str, Any]) -> str:
    return "Cases: " + "; ".join(f"`{name}` {sizes}" for name, sizes in section["cases"].items()) + "."


def _times(section: dict[str, Any]) -> list[str]:
    return [*times_table(section["rows"]), "", _sizes(section)]


def times_table(rows: Sequence[Row]) -> list[str]:
    """Return a table with the times of cases, beside their floors, and how many times slower the peers are."""
    columns = list(dict.fromkeys(name for row in rows for name in row["passes"]))
    peers = list(dict.fromkeys(peer for row in rows for peer in row["slower"]))
    body = []
    for row in rows:
        cells = [_time_cell(row["passes"].get(name)) for name in columns]
        for peer in peers:
            slower = row["slower"].get(peer, {})
            cells.append("/".join(f"{slower[kind]:.3g}x" for kind in ("forward", "both") if kind in slower))
        body.append([row["case"], row["dtype"], *cells])
    header = ["case", "type", *(HEADINGS.get(name, name) for name in columns), *peers]
    return table(header, body)


def _time_cell(figures: dict[str, float] | None) -> str:
    if figures is None:
        return ""
    floor = f"/{_number(figures['floor'])}" if "floor" in figures else ""
    return f"{_number(figures['us'])}{floor}"


def _number(us: float) -> str:
    return f"{us:.3g}" if us < 1000 else f"{us:.0f}"


def _path_gains(section: dict[str, Any]) -> list[str]:
    """Return a table with the number of shapes for which each path is chosen, and its gains over the next best path."""
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    count: Counter[tuple[str, str]] = Counter()
    for row in section["rows"]:
        chosen, *others = row["us"]
        key = (row["pass"], chosen)
        count[key] += 1
        if others:
            gain = min(row["us"][other] for other in others) / row["us"][chosen] - 1
            found.setdefault(key, []).append((gain, f"{row['case']}, {row['dtype']}"))
    body = []
    for key in sorted(count, key=lambda key: (key[0] != "forward", key)):
        gains = sorted(found.get(key, []))
        texts = [f"{round(100 * gain)} % ({where})" for gain, where in (*gains[-1:], *gains[:1])] or ["", ""]
        over = str(sum(gain >= 0.05 for gain, _ in gains)) if gains else "no other path"
        body.append([key[0], f"`{key[1]}`", str(count[key]), over, *texts])
    header = ["pass", "path", "chosen on", "5 % and more on", "greatest gain", "least gain"]
    return table(header, body)


KINDS = {"times": _times, "path-gains": _path_gains}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.write_docs", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "reports", nargs="*", type=Path, metavar="REPORT.json", help="bench.json or paths.json"
    )
    write_docs(parser.parse_args(arguments).reports)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
