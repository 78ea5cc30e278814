"""The hard case: one domain split by class into five tasks, on frozen features.

Each task is a linear probe on the plain features, because training fifteen tasks takes hours.
"""

from collections.abc import Iterator, Sequence
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.identify_data import Domain
from bitgraft.runtime.identify import scorers
from bitgraft.runtime.identify.decision import TEMPERATURE, WEIGHT
from bitgraft.runtime.identify.fitting import calibrated, fit_description, rank_for

SPLIT = {"cub": "birds", "cars": "cars", "omniglot": "Omniglot"}
PARTS, STEPS, SCALE = 5, 150, 30.0


def probe(features: Tensor, labels: Tensor, classes: int) -> nn.Module:
    """Train a linear classifier on frozen features, scaled so that few steps suffice."""
    torch.manual_seed(0)
    layer = nn.Linear(features.shape[1], classes)
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2, weight_decay=1e-5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(layer(SCALE * features), labels).backward()
        optimizer.step()
    return layer


@torch.no_grad()
def _logits(layer: nn.Module, features: Tensor) -> Tensor:
    found: Tensor = layer(SCALE * features)
    return found


def split_tables(domains: Sequence[Domain]) -> Iterator[str]:
    yield (
        "| domain | task right % | classes right, last % | average over 1 to 5 tasks % | nearest class mean, last % | "
        "average % | linear probe on all classes % | task told % |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for domain in domains:
        if domain.name in SPLIT:
            cells = " | ".join(f"{100 * value:.1f}" for value in _measured(domain))
            yield f"| {SPLIT[domain.name]}, {PARTS} x {len(domain.classes) // PARTS} | {cells} |"


def _measured(domain: Domain) -> list[float]:
    per = len(domain.classes) // PARTS
    count = per * PARTS

    def part(split: str, low: int, high: int) -> tuple[Tensor, Tensor]:
        rows = (domain.labels[split] >= low) & (domain.labels[split] < high)
        return domain.features[split][rows], domain.labels[split][rows]

    tasks = []
    for start in range(0, count, per):
        features, labels = part("train", start, start + per)
        layer = probe(features, labels - start, per)
        found = fit_description(features, labels - start, per, rank_for(features.shape[1], per, 0))
        seen = part("val", start, start + per)[0]
        tasks.append((layer, calibrated(found, seen, _logits(layer, seen))))
    joint = probe(*part("train", 0, count), count)
    features, labels = part("train", 0, count)
    means = F.normalize(torch.stack([features[labels == c].mean(0) for c in range(count)]), dim=1)
    ours, nearest, right, told = [], [], 0.0, 0.0
    for known in range(1, PARTS + 1):
        seen, truth = part("test", 0, known * per)
        union, right, told = _union(tasks[:known], seen, truth, per)
        ours.append(union)
        nearest.append(float(((seen @ means[: known * per].T).argmax(1) == truth).float().mean()))
    ceiling = float((_logits(joint, part("test", 0, count)[0]).argmax(1) == part("test", 0, count)[1]).float().mean())
    return [right, ours[-1], mean(ours), nearest[-1], mean(nearest), ceiling, told]


def _union(
    tasks: Sequence[tuple[nn.Module, object]], seen: Tensor, truth: Tensor, per: int
) -> tuple[float, float, float]:
    descriptions: list = [description for _, description in tasks]
    route, outputs = scorers.Likelihood(descriptions)(seen), [_logits(layer, seen) for layer, _ in tasks]
    for i, (output, description) in enumerate(zip(outputs, descriptions, strict=True)):
        known = description.calibrated
        route[:, i] += WEIGHT * scorers.certainty(scorers.energy(output), known)
    which = (route / TEMPERATURE).log_softmax(1)
    every = torch.cat([output.log_softmax(1) + which[:, i, None] for i, output in enumerate(outputs)], 1)
    within = torch.stack([output.argmax(1) for output in outputs], 1).gather(1, (truth // per)[:, None])[:, 0]
    return tuple(
        float(ok.float().mean())
        for ok in (every.argmax(1) == truth, route.argmax(1) == truth // per, within == truth % per)
    )  # type: ignore[return-value]
