"""`python -m benchmarks.tables`: write the results of `make bench` into docs/performance.md.

Tables are between `<!-- bench:rows -->` or `<!-- bench:NAME -->` (NAME is a growth table) and `<!-- /bench -->`.
"""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bitgraft.paper.report.records import Record, read_records

EARLIER = "earlier.jsonl"
"""In a folder of records: those made with settings that its suite no longer has. `bitgraft bench` would repeat them."""
PAGE = Path("docs/performance.md")
RESULTS = Path("benchmarks/results.json")


def rows(results: dict[str, Any]) -> str:
    lines = ["| what | against | to reach | measured (middle half) | |", "|---|---|---|---|---|"]
    for row in results["rows"]:
        low, high = row["spread"]
        verdict = {True: "reached", False: "**falls short**", None: ""}[row["reached"]]
        limit = f"{row['limit']:g}" if row["limit"] is not None else ""
        middle = f" ({low:.2f} to {high:.2f})" if row["rounds"] > 1 else ""
        lines.append(f"| {row['what']} | {row['against']} | {limit} | {row['median']:.3f}{middle} | {verdict} |")
    stated = f"`make bench` on {results['machine']}, torch {results['torch']}, {results['date']}; ours / baseline."
    return "\n".join([*lines, "", stated])


def growth(table: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(name.replace("_", " ") for name in table[0]) + " |", "|---" * len(table[0]) + "|"]
    for entry in table:
        lines.append("| " + " | ".join(map(_shown, entry.values())) + " |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def between_marks(page: str, mark: str, text: str) -> str:
    """Replace the text between `<!-- mark -->` and `<!-- /mark -->`; the end of a mark a:b is `<!-- /a -->`."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- /{mark.partition(':')[0]} -->"
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    return re.sub(pattern, lambda _: f"{begin}{text}\n{end}", page, flags=re.DOTALL)


def read_with_earlier(sources: Iterable[Path]) -> list[Record]:
    """Read the records of run folders and files, after those of earlier settings beside them."""
    files = [file for source in sources for file in (source / EARLIER, source) if file.exists()]
    return [record for file in files for record in read_records(file)]


def fill(page: str, results: dict[str, Any]) -> str:
    page = between_marks(page, "bench:rows", rows(results))
    for name, table in results["tables"].items():
        page = between_marks(page, f"bench:{name}", growth(table))
    return page


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(), json.loads(RESULTS.read_text())))
