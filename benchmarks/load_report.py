"""Report of `benchmarks.load`: ratios with their limits, and the tables of docs/serving.md."""

import statistics
from collections.abc import Sequence
from typing import Any

BARE, LIT, ONE, TEN, PLAIN, ZIPF, EXACT = (
    "FastAPI + onnxruntime, one model",
    "LitServe + onnxruntime, one model",
    "`bitgraft serve`, one task",
    "`bitgraft serve`, ten tasks",
    "ten FastAPI + onnxruntime servers",
    "`bitgraft serve`, 100 tasks, ten fit",
    "`bitgraft serve --exact`, one task",
)


def compare(rows: dict[str, dict[str, Any]], over: dict[str, list[float]], cold: float, clients: int) -> dict[str, Any]:
    """Return every ratio with its limit; rates are compared round by round."""
    better = max((BARE, LIT), key=lambda title: rows[title]["requests_per_second"])

    def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
        return round(statistics.median(o / t for o, t in zip(ours, theirs, strict=True)), 3)

    def rate(ours: str, theirs: str) -> float:
        return ratio(rows[ours]["rates"], rows[theirs]["rates"])

    ratios = {
        "one task, requests/s over the better of the others": (rate(ONE, better), 0.95),
        "one task, the better's CPU time per request over ours": (
            round(rows[better]["cpu_ms_per_request"] / rows[ONE]["cpu_ms_per_request"], 3),
            0.95,
        ),
        "one task, 99th percentile over the better's": (round(rows[ONE]["p99_ms"] / rows[better]["p99_ms"], 3), -1.1),
        "ten tasks, requests/s over one task": (rate(TEN, ONE), 0.9),
        "100 tasks, ten fit, requests/s over one task": (rate(ZIPF, ONE), 0.6),
        "the same in CPU time per request": (
            round(rows[ONE]["cpu_ms_per_request"] / rows[ZIPF]["cpu_ms_per_request"], 3),
            0.6,
        ),
        "slowest answer with 100 tasks, over a cold answer and its wait in the queue": (
            round(rows[ZIPF]["slowest_ms"] / (1000 * cold * clients), 3),
            -1.0,
        ),
        "`predict FOLDER`, images/s over a plain loop": (ratio(over["predict"], over["loop"]), 0.9),
        "`eval`, images/s over a plain loop": (ratio(over["eval"], over["loop"]), 0.9),
        "wrong answers": (sum(row["answers_wrong"] for row in rows.values()), -0.0),
    }
    speeds = {name: round(statistics.median(values), 1) for name, values in over.items()}
    return {
        "better": better,
        "cold_ms": round(1000 * cold),
        "files": speeds,
        "ratios": ratios,
        "servers": [*rows.values()],
    }


def short(found: dict[str, Any]) -> list[str]:
    """Return the ratios that miss their limit; a negative limit is an upper one."""
    ratios = [
        (name, value, bound) for one in found["backbones"].values() for name, (value, bound) in one["ratios"].items()
    ]
    return [f"{name}: {value}" for name, value, bound in ratios if (value > -bound if bound <= 0 else value < bound)]


def page(found: dict[str, Any]) -> str:
    """Return the tables of docs/serving.md."""
    lines: list[str] = []
    columns = ("requests_per_second", "cpu_ms_per_request", "p50_ms", "p99_ms", "megabytes")
    for name, one in found["backbones"].items():
        about = f"{one['date']}, {one['machine']}, {one['clients']} clients, load of the machine {one['load'][0]}."
        headings = "| server | requests/s | CPU ms/request | p50 ms | p99 ms | memory MB | wrong answers |"
        lines += ["", f"{name}: {about}", "", headings, "|---|---|---|---|---|---|---|"]
        for row in one["servers"]:
            wrong = f"{row['answers_wrong']} of {row['answers_checked']:,}"
            lines += ["| " + " | ".join([row["server"], *(str(row[key]) for key in columns), wrong]) + " |"]
    names = list(found["backbones"])
    lines += ["", f"| ratio | to hold | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for name in next(iter(found["backbones"].values()))["ratios"]:
        pairs = [one["ratios"][name] for one in found["backbones"].values()]
        bound = pairs[0][1]
        said = f"at least {bound}" if bound > 0 else f"at most {-bound:g}"
        lines += [f"| {name} | {said} | {' | '.join(str(value) for value, _ in pairs)} |"]
    return "\n".join(lines)
