"""Time two sides in turns; report the median and spread of the ratios per round."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

THREADS = len(os.sched_getaffinity(0))


@dataclass
class Row:
    """One line of the table: the ratio, ours / baseline."""

    key: str
    what: str
    against: str
    limit: float | None
    """Upper limit of the median; None if the ratio is only reported."""
    ratios: list[float]
    detail: str = ""
    mine: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def reached(self) -> bool | None:
        return None if self.limit is None else self.median <= self.limit

    @property
    def spread(self) -> tuple[float, float]:
        """Range of the middle half of the rounds."""
        ordered = sorted(self.ratios)
        return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]

    def plain(self) -> dict[str, Any]:
        low, high = self.spread
        return {
            "key": self.key,
            "what": self.what,
            "against": self.against,
            "limit": self.limit,
            "median": round(self.median, 4),
            "spread": [round(low, 4), round(high, 4)],
            "rounds": len(self.ratios),
            "reached": self.reached,
            "detail": self.detail,
            "mine_seconds": statistics.median(self.mine) if self.mine else None,
            "other_seconds": statistics.median(self.other) if self.other else None,
        }


Timed = Callable[[], float]
"""Runs once and returns the seconds it took."""


def timed(run: Callable[[], Any]) -> Timed:
    def once() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return once


def in_turns(sides: Sequence[Timed], rounds: int, warm: int = 2) -> list[list[float]]:
    """Return the seconds of each side in each round, after warm-up. The order alternates between rounds."""
    for _ in range(warm):
        for side in sides:
            side()
    found: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds):
        order = list(range(len(sides)))
        for index in order if turn % 2 == 0 else reversed(order):
            found[index].append(sides[index]())
    return found


def compare(
    key: str, what: str, against: str, limit: float | None, mine: Timed, other: Timed, rounds: int, detail: str = ""
) -> Row:
    a, b = in_turns([mine, other], rounds)
    return Row(key, what, against, limit, [x / y for x, y in zip(a, b, strict=True)], detail, a, b)


def answer(run: Callable[[], Any]) -> None:
    """Answer each line on stdin with a number: "go" runs and returns seconds, "peak" returns bytes."""
    for line in sys.stdin:
        number = 0.0
        if line.strip() == "go":
            number = timed(run)()
        elif line.strip() == "peak":
            number = peak()
        print(json.dumps(number), flush=True)


def peak() -> int:
    """Return peak resident memory in bytes. (`getrusage` would include memory of the parent at the fork.)"""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def anew(sides: Callable[[], Sequence["Side"]], rounds: int, at_a_time: int) -> list[list[float]]:
    """Call `in_turns` with fresh processes every few rounds, because memory layout affects speed."""
    found: list[list[float]] = []
    for done in range(0, rounds, at_a_time):
        with ExitStack() as stack:
            held = [stack.enter_context(side) for side in sides()]
            times = in_turns(held, min(at_a_time, rounds - done))
        found = [a + b for a, b in zip(found or [[] for _ in times], times, strict=True)]
    return found


class Side:
    """One side in its own process, so that sides cannot affect each other's memory."""

    def __init__(self, *words: str, times: int = 1) -> None:
        self.times = times
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.side", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ask("ready")

    def ask(self, question: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{' '.join(map(str, self.process.args))} ended: {self.process.wait()}")
        return float(json.loads(answer))

    def __call__(self) -> float:
        """Return the mean seconds of `times` runs in a row."""
        return sum(self.ask("go") for _ in range(self.times)) / self.times

    def peak(self) -> float:
        """Return the process's peak memory in bytes."""
        return self.ask("peak")

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
