"""Writes the README's figures from the CSV files under benchmark/results/h200, so that they cannot drift apart.

python scripts/readme_table.py            rewrites the part of README.md between the two "figures" comments
python scripts/readme_table.py --check    exits 1 if that would change anything
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark/results/h200"
BEGIN = "<!-- figures:begin (written by scripts/readme_table.py) -->\n"
END = "<!-- figures:end -->"
SHOWN_N = ("1", "64", "1024", "8192", "16384", "65536")


def store_table(rows: list[dict[str, str]], layout: str) -> list[str]:
    """Markdown lines: a line for each N, a cell "ours / SGLang / copy" for each kind of call."""
    cases = list(dict.fromkeys((row["entry"], row["mode"], row["input"]) for row in rows if row["layout"] == layout))
    by_key = {(row["entry"], row["mode"], row["input"], row["layout"], row["n"]): row for row in rows}

    def cell(case: tuple[str, str, str], n: str) -> str:
        row = by_key.get((*case, layout, n))
        if row is None:
            return ""
        return " / ".join(f"{float(row[c]):.1f}" if row[c] else "-" for c in ("auto_us", "stock_us", "copy_us"))

    names = [" ".join(filter(None, (entry, mode.strip("-")))) + f", {kind} in" for entry, mode, kind in cases]
    lines = ["| rows | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(cases)]
    for n in SHOWN_N:
        cells = [cell(case, n) for case in cases]
        if any(cells):
            lines.append(f"| {n} | " + " | ".join(cells) + " |")
    return lines


def figures() -> str:
    """What belongs between the two comments."""
    path = RESULTS / "norm_rope_store.csv"
    if not path.is_file():
        return "Not measured yet.\n"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    first = rows[0]
    lines = [
        f"{first['gpu']}, torch {first['torch']}, driver {first['driver']}, commit {first['commit']}, {first['date']}. "
        "Median",
        "us, L2 flushed before each run: **ours / SGLang's kernel / a device copy of the same bytes**, into a `v4`",
        "cache. Each figure includes 2 to 3 us of launch and events.",
        "",
        *store_table(rows, "v4"),
        "",
        "![time against rows](benchmark/results/h200/norm_rope_store.png)",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    new = before + BEGIN + figures() + END + after
    if "--check" in sys.argv[1:]:
        if new != text:
            print("README.md: its figures are not those of benchmark/results/h200: run scripts/readme_table.py")
        return int(new != text)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
