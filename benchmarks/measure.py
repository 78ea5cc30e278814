"""Two sides in turns: ratios of one round each, their median and spread."""

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
    """One line of the table: how many times what the other side takes."""

    key: str
    what: str
    against: str
    limit: float | None
    """At most this; None where a figure is only shown."""
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
        """The middle half of the rounds."""
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
"""Runs once and gives the seconds that it took."""


def timed(run: Callable[[], Any]) -> Timed:
    def once() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return once


def in_turns(sides: Sequence[Timed], rounds: int, warm: int = 2) -> list[list[float]]:
    """Seconds of each side in each round. Who begins changes from round to round."""
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
    """Answer each line on the standard input with one number: "go" runs and gives the seconds, "peak" gives bytes."""
    for line in sys.stdin:
        number = 0.0
        if line.strip() == "go":
            number = timed(run)()
        elif line.strip() == "peak":
            number = peak()
        print(json.dumps(number), flush=True)


def peak() -> int:
    """Bytes at most. (`getrusage` counts what the process that started this one held at that moment, too.)"""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def anew(sides: Callable[[], Sequence["Side"]], rounds: int, at_a_time: int) -> list[list[float]]:
    """`in_turns` with sides that begin anew every few rounds: where a process has its memory changes what it takes."""
    found: list[list[float]] = []
    for done in range(0, rounds, at_a_time):
        with ExitStack() as stack:
            held = [stack.enter_context(side) for side in sides()]
            times = in_turns(held, min(at_a_time, rounds - done))
        found = [a + b for a, b in zip(found or [[] for _ in times], times, strict=True)]
    return found


class Side:
    """One side in a process of its own, so that neither has the other's memory to deal with."""

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
        """One turn: seconds of a run, the mean of so many in a row."""
        return sum(self.ask("go") for _ in range(self.times)) / self.times

    def peak(self) -> float:
        """Bytes of memory at most, since the process began."""
        return self.ask("peak")

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
