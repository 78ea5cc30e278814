"""Rows on training: a step and its memory against fine-tuning, Piggyback as one would write it, and LoRA."""

from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.measure import Row, Side, in_turns

NAMES = {"wrn4": "WRN-28-4", "resnet50": "ResNet-50"}
AGAINST = {"piggyback": "Piggyback written the obvious way", "lora": "PEFT's LoRA on the same convolutions"}


def steps(network: str, limit: float, rounds: int) -> Iterator[Row]:
    others = ["finetune", *AGAINST] if network == "resnet50" else ["finetune"]
    with ExitStack() as stack:
        sides = {name: stack.enter_context(Side(name, network, "32")) for name in ["full", *others]}
        times = dict(zip(sides, in_turns(list(sides.values()), rounds), strict=True))
        mine = times["full"]
        what = f"training step, full, {NAMES[network]}, batch 32 at 64 px"
        for name in others:
            ratios = [a / b for a, b in zip(mine, times[name], strict=True)]
            bound, against = (limit, "fine-tuning step") if name == "finetune" else (1.0, AGAINST[name])
            yield Row(f"step-{network}-{name}", what, against, bound, ratios, "", mine, times[name])
        if network == "resnet50":
            a, b = sides["full"].peak(), sides["finetune"].peak()
            detail = f"{a / 1e6:.0f} MB against {b / 1e6:.0f} MB, whole process"
            yield Row("memory", "peak memory of training, ResNet-50", "fine-tuning", 1.10, [a / b], detail)


def growth(rounds: int) -> list[dict[str, float | str]]:
    """How a step's time and memory grow with the width of the network and with the batch."""
    points = [(f"wrn{width}", 32) for width in (1, 2, 4)] + [("wrn4", batch) for batch in (8, 16, 64, 128)]
    table: list[dict[str, float | str]] = []
    for network, batch in sorted(points):
        with Side("full", network, str(batch)) as mine, Side("finetune", network, str(batch)) as other:
            a, b = in_turns([mine, other], rounds, warm=1)
            ratios = sorted(x / y for x, y in zip(a, b, strict=True))
            table.append(
                {
                    "network": f"WRN-28-{network[-1]}",
                    "batch": batch,
                    "step_seconds": sorted(a)[len(a) // 2],
                    "ratio": ratios[len(ratios) // 2],
                    "peak_mb": mine.peak() / 1e6,
                    "finetune_peak_mb": other.peak() / 1e6,
                }
            )
    return table
