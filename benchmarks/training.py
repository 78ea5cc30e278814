"""Training rows: time and memory of a step against fine-tuning, plain Piggyback and LoRA."""

from collections.abc import Iterator

from benchmarks.measure import Row, Side, anew, in_turns

IN_A_ROW = 3  # steps per turn: the first after another process's turn has a cold cache
PROCESSES = 3  # per side of a memory row: fragmentation moves the peak by a few per cent
NAMES = {"wrn4": "WRN-28-4", "resnet50": "ResNet-50"}
AGAINST = {"piggyback": "Piggyback written the obvious way", "lora": "PEFT's LoRA on the same convolutions"}


def steps(network: str, limit: float, rounds: int) -> Iterator[Row]:
    others = ["finetune", *AGAINST] if network == "resnet50" else ["finetune"]
    names = ["finetune", "full", *reversed(others[1:])]  # the closest competitors run next to each other

    def sides() -> list[Side]:
        return [Side(name, network, "32", "64", times=IN_A_ROW) for name in names]

    times = dict(zip(names, anew(sides, rounds, 6), strict=True))
    mine = times["full"]
    what = f"training step, full, {NAMES[network]}, batch 32 at 64 px"
    for name in others:
        ratios = [a / b for a, b in zip(mine, times[name], strict=True)]
        bound, against = (limit, "fine-tuning step") if name == "finetune" else (1.0, AGAINST[name])
        yield Row(f"step-{network}-{name}", what, against, bound, ratios, "", mine, times[name])


def memory() -> Iterator[Row]:
    """Measure at the network's own image size and, without a limit, at a small one, where weights dominate."""
    for pixels, limit in ((224, 1.10), (64, None)):
        pairs = [[_peak(method, "resnet50", pixels) for method in ("full", "finetune")] for _ in range(PROCESSES)]
        what = f"peak memory of training, ResNet-50, batch 32 at {pixels} px"
        detail = "; ".join(f"{a:.0f} MB against {b:.0f} MB" for a, b in pairs) + ", whole process"
        yield Row(f"memory-{pixels}", what, "fine-tuning", limit, [a / b for a, b in pairs], detail)


def convolutions(rounds: int) -> Iterator[Row]:
    """Compare with PyTorch's own convolutions."""
    networks = {"tf_efficientnet_lite0": "EfficientNet-Lite0", "resnet50": "ResNet-50", "wrn4": "WRN-28-4"}
    for network, title in networks.items():
        with Side("full", network, "32", "64") as mine, Side("full-plainly", network, "32", "64") as other:
            a, b = in_turns([mine, other], rounds)
        what = f"training step, full, {title}, batch 32 at 64 px"
        against = "with PyTorch's own convolutions"
        yield Row(f"convolutions-{network}", what, against, None, [x / y for x, y in zip(a, b, strict=True)], "", a, b)


def _peak(method: str, network: str, pixels: int) -> float:
    """Return peak memory in megabytes after two steps; the second includes the optimizer state."""
    with Side(method, network, "32", str(pixels)) as side:
        side()
        side()
        return side.peak() / 1e6


def growth(rounds: int) -> list[dict[str, float | str]]:
    """Measure time and memory of a step by network width and batch size."""
    points = [(f"wrn{width}", 32) for width in (1, 2, 4)] + [("wrn4", batch) for batch in (8, 16, 64, 128)]
    table: list[dict[str, float | str]] = []
    for network, batch in sorted(points):
        with Side("full", network, str(batch), "64") as mine, Side("finetune", network, str(batch), "64") as other:
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
