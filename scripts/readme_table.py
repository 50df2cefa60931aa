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


def decode_table(rows: list[dict[str, str]]) -> list[str]:
    """Markdown lines: a line for each number of rows, a cell "ours / FlashMLA" for each head count."""
    heads = list(dict.fromkeys(row["heads"] for row in rows))
    by_key = {(row["heads"], row["b"]): row for row in rows}

    def cell(h: str, b: str) -> str:
        row = by_key[h, b]
        return f"{float(row['auto_warm_us']):.1f} / {float(row['FlashMLA_warm_us']):.1f}"

    lines = ["| rows | " + " | ".join(f"{h} heads" for h in heads) + " |", "| --- |" + " --- |" * len(heads)]
    for b in dict.fromkeys(row["b"] for row in rows):
        lines.append(f"| {b} | " + " | ".join(cell(h, b) for h in heads) + " |")
    return lines


def machine(row: dict[str, str]) -> str:
    """Where and when a CSV was measured."""
    return f"{row['gpu']}, torch {row['torch']}, driver {row['driver']}, commit {row['commit']}, {row['date']}."


def read(name: str) -> list[dict[str, str]]:
    """Rows of a CSV, none if it is not there."""
    path = RESULTS / name
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def figures() -> str:
    """What belongs between the two comments."""
    store, decode = read("norm_rope_store.csv"), read("sparse_decode.csv")
    lines = []
    if store:
        lines += [
            f"**Store.** {machine(store[0])}",
            "Median us, L2 flushed before each run: **ours / SGLang's kernel / a device copy of the same bytes**, into",
            "a `v4` cache. Each figure includes 2 to 3 us of launch and events.",
            "",
            *store_table(store, "v4"),
            "",
            "![time against rows](benchmark/results/h200/norm_rope_store.png)",
            "",
        ]
    if decode:
        keys = f"{decode[0]['topk']} + {decode[0]['extra']}"
        lines += [
            f"**Decode** (Triton backend). {machine(decode[0])}",
            f"Median us a call in a graph of 20, {keys} keys: **ours / FlashMLA's Hopper kernel** (8 and 16 heads",
            "padded to 64, as SGLang does).",
            "",
            *decode_table(decode),
            "",
        ]
    lines = lines[:-1] or ["Not measured yet."]
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
