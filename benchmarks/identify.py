"""Measure how well an image's task is found: `python -m benchmarks.identify --root DATA --store STORE --cache DIR`.

Prints the tables of docs/results/identify.md. STORE holds the tasks of `bitgraft bench domains`, row full; missing
tasks are trained first, or left out with --present. Features and logits are cached in DIR, so a second run takes
minutes. Three seeds draw the images that descriptions are fitted and calibrated on; tasks are trained once.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median, stdev

import torch
from torch import Tensor

from benchmarks.identify_baselines import Mahalanobis, NearestMean, RelativeMahalanobis
from benchmarks.identify_cost import ROUNDS, cost
from benchmarks.identify_data import MOST, Collection, Domain, picked
from benchmarks.identify_split import split_tables
from benchmarks.measure import in_turns, timed
from bitgraft.format.description import Description
from bitgraft.runtime.identify.decision import RUNS, TEMPERATURE, WEIGHT
from bitgraft.runtime.identify.fitting import calibrated, fit_description, rank_for
from bitgraft.runtime.identify.scorers import Likelihood, certainty, energy

SEEDS = (0, 1, 2)
DRAWN = 0.8  # share of the training and validation images drawn by each seed
FILE = 500_000  # bytes of a task file, which limits the size of its description
Scores = dict[str, Tensor]
"""Scores of each domain's images, (N, tasks)."""
Rule = Callable[[Tensor, Tensor], Tensor]


def auroc(known: Tensor, unknown: Tensor) -> float:
    """Return the share of pairs in which the known image scores higher."""
    order = torch.cat([known, unknown]).double().argsort()
    ranks = torch.empty(len(order), dtype=torch.double)
    ranks[order] = torch.arange(1, len(order) + 1, dtype=torch.double)
    above = ranks[: len(known)].sum() - len(known) * (len(known) + 1) / 2
    return float(above / (len(known) * len(unknown)))


def fpr(known: Tensor, unknown: Tensor) -> float:
    """Return the share of unknown images above the score that 95 % of the known ones exceed."""
    return float((unknown >= known.quantile(0.05)).float().mean())


class Trial:
    """The descriptions of one seed, and the scores of every scorer, (N, tasks) per domain."""

    def __init__(self, domains: Sequence[Domain], collection: Collection, tasks: Sequence[str], seed: int) -> None:
        self.domains, self.names = list(domains), [domain.name for domain in domains]
        self.tasks = [name for name in self.names if name in tasks]
        self._collection, self._rng = collection, torch.Generator().manual_seed(seed)
        self.descriptions = {domain.name: self._describe(domain) for domain in domains}

    def _drawn(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._rng)[: int(DRAWN * count)]

    def _describe(self, domain: Domain) -> Description:
        features, labels = domain.features, domain.labels
        rows, classes = self._drawn(len(labels["train"])), len(domain.classes)
        rank = rank_for(features["train"].shape[1], classes, FILE)
        found = fit_description(features["train"][rows], labels["train"][rows], classes, rank)
        if domain.name not in self.tasks:
            drawn = self._drawn(len(labels["val"]))
            return calibrated(found, features["val"][drawn], torch.zeros(len(drawn), 2))
        kept = torch.tensor(picked(len(labels["val"]), MOST["val"]))
        drawn, own = self._drawn(len(kept)), self._collection.logits(domain.name, domain.name)["val"]
        return calibrated(found, features["val"][kept[drawn]], own[drawn])

    def route(self, scorer: type[Likelihood], part: str = "test", *, standard: bool = False) -> Scores:
        """Score plain features; with `standard`, standardise by each task's own validation images."""
        made = scorer([self.descriptions[name] for name in self.names])
        found = {domain.name: made(domain.features[part]) for domain in self.domains}
        if standard:
            own = [made(domain.features["val"])[:, i] for i, domain in enumerate(self.domains)]
            centre, scale = (torch.stack([getattr(one, how)() for one in own]) for how in ("mean", "std"))
            found = {name: (scores - centre) / scale for name, scores in found.items()}
        return found

    def milliseconds(self, scorer: type[Likelihood]) -> float:
        """Time the scoring of one image's features for all tasks, without the backbone's forward pass."""
        made = scorer([self.descriptions[name] for name in self.names])
        (times,) = in_turns([timed(lambda: made(self.domains[0].features["test"][:1]))], ROUNDS)
        return 1000 * median(times)

    def own(self, what: str, part: str = "test") -> Scores:
        """Score by the tasks' own logits, for the images that they ran on."""
        found = {}
        for domain in self.names:
            columns = []
            for name in self.tasks:
                logits = self._collection.logits(name, domain)[part].float()
                known = self.descriptions[name].calibrated
                certain = certainty(energy(logits), known)
                ways = {"softmax": logits.softmax(1).amax(1), "energy": energy(logits), "certainty": certain}
                columns.append(ways[what])
            found[domain] = torch.stack(columns, 1)
        return found

    def ran(self, scores: Scores, part: str = "test") -> Scores:
        """Select the scores of the tasks that ran, for the images that they ran on."""
        rows = {d.name: torch.tensor(picked(len(d.labels[part]), MOST[part])) for d in self.domains}
        columns = [self.names.index(name) for name in self.tasks]
        return {name: values[rows[name]][:, columns] for name, values in scores.items()}

    def decided(self, part: str = "test", weight: float = WEIGHT) -> tuple[Scores, Scores]:
        """Return the scores and the typicality that `bitgraft.runtime.identify.decision` decides by."""
        route, own = self.ran(self.route(Likelihood, part), part), self.own("certainty", part)
        known = [self.descriptions[name].calibrated for name in self.tasks]
        centre, scale = (torch.tensor([getattr(c, f"route_{how}") for c in known]) for how in ("mean", "std"))
        threshold = torch.tensor([c.threshold for c in known])
        scores, typical = {}, {}
        for name, values in route.items():
            runs = values >= values.topk(min(RUNS, values.shape[1])).values[:, -1:]
            scores[name] = (values + weight * own[name]).masked_fill(~runs, -torch.inf)
            typical[name] = (values - centre) / scale + own[name] - threshold
        return scores, typical

    def union(self, scores: Scores) -> tuple[float, float]:
        """Return the class accuracy among all tasks' classes, and with the task given, averaged over domains."""
        found, told = [], []
        for name in self.tasks:
            (domain,) = [d for d in self.domains if d.name == name]
            labels = domain.labels["test"][picked(len(domain.labels["test"]), MOST["test"])]
            within = [self._collection.logits(task, name)["test"].float().log_softmax(1) for task in self.tasks]
            which = (scores[name] / TEMPERATURE).log_softmax(1)
            every = torch.cat([w + which[:, i, None] for i, w in enumerate(within)], 1)
            own = self.tasks.index(name)
            first = sum(w.shape[1] for w in within[:own])
            found.append(float((every.argmax(1) == first + labels).float().mean()))
            told.append(float((within[own].argmax(1) == labels).float().mean()))
        return mean(found), mean(told)


def accuracy(scores: Scores, names: Sequence[str]) -> tuple[float, float]:
    """Return the task accuracy as a mean over domains, and over all images."""
    right = [(scores[name].argmax(1) == i).float() for i, name in enumerate(names)]
    return mean(float(one.mean()) for one in right), float(torch.cat(right).mean())


def pairs(scores: Scores, names: Sequence[str]) -> tuple[float, float]:
    """Return mean AUROC and FPR@95 of each task's images against every other's, by the task's own score."""
    both = [(scores[a][:, i], scores[b][:, i]) for i, a in enumerate(names) for b in names if a != b]
    return mean(auroc(*pair) for pair in both), mean(fpr(*pair) for pair in both)


def best(scores: Tensor, _: Tensor) -> Tensor:
    return scores.amax(1)


def of_best(scores: Tensor, typical: Tensor) -> Tensor:
    """Return the typicality of the task with the best score."""
    return typical.gather(1, scores.argmax(1, keepdim=True))[:, 0]


def left_out(scores: Scores, typical: Scores, tasks: Sequence[str], rule: Rule) -> list[tuple[float, float, float]]:
    """Leave out each domain's task in turn; return AUROC, FPR@95 and the share of its images that are accepted."""
    found = []
    for name in scores:
        kept = [i for i, task in enumerate(tasks) if task != name]
        ruled = {other: rule(scores[other][:, kept], typical[other][:, kept]) for other in scores}
        known = torch.cat([ruled[tasks[i]] for i in kept])
        found.append((auroc(known, ruled[name]), fpr(known, ruled[name]), float((ruled[name] >= 0).float().mean())))
    return found


def spread(values: Sequence[float], digits: int = 1, scale: float = 100) -> str:
    if len(values) == 1:
        return f"{scale * values[0]:.{digits}f}"
    return f"{scale * mean(values):.{digits}f} ± {scale * stdev(values):.{digits}f}"


def stage_one(trials: Sequence[Trial]) -> Iterator[str]:
    """Use only plain features, on all test images of all domains."""
    yield "| scorer | task right, mean of domains % | all images % | AUROC, pairs | FPR@95, pairs % | ms per image |"
    yield "|---|---|---|---|---|---|"
    every = [(NearestMean, False), (Mahalanobis, False), (Mahalanobis, True), (RelativeMahalanobis, False)]
    for scorer, standard in [*every, (Likelihood, False)]:
        found = [trial.route(scorer, standard=standard) for trial in trials]
        right, apart = [accuracy(f, trials[0].names) for f in found], [pairs(f, trials[0].names) for f in found]
        cells = [spread([r[0] for r in right]), spread([r[1] for r in right])]
        cells += [spread([p[0] for p in apart], 3, 1), spread([p[1] for p in apart])]
        cells.append(f"{trials[0].milliseconds(scorer):.2f}")
        yield f"| {scorer.__name__}{', standardised' if standard else ''} | {' | '.join(cells)} |"


def stage_two(trials: Sequence[Trial]) -> Iterator[str]:
    """Use the tasks' own logits as well."""
    yield f"{len(trials[0].tasks)} tasks: {', '.join(trials[0].tasks)}; at most {MOST['test']} test images of each.\n"
    yield "| scorer | task right % | AUROC, pairs | FPR@95, pairs % | union of classes right % | task told % |"
    yield "|---|---|---|---|---|---|"
    ways: dict[str, Callable[[Trial], Scores]] = {
        "maximum softmax": lambda trial: trial.own("softmax"),
        "energy": lambda trial: trial.own("energy"),
        "energy, standardised": lambda trial: trial.own("certainty"),
        "nearest mean": lambda trial: trial.ran(trial.route(NearestMean)),
        "Mahalanobis++": lambda trial: trial.ran(trial.route(Mahalanobis)),
        "route (likelihood)": lambda trial: trial.ran(trial.route(Likelihood)),
        "route and decide": lambda trial: trial.decided()[0],
    }
    for title, way in ways.items():
        found = [way(trial) for trial in trials]
        right = spread([accuracy(f, t.tasks)[0] for f, t in zip(found, trials, strict=True)])
        apart = [pairs(t.decided()[1] if "decide" in title else f, t.tasks) for f, t in zip(found, trials, strict=True)]
        union = [t.union(f) for f, t in zip(found, trials, strict=True)] if "route" in title else []
        cells = [right, spread([p[0] for p in apart], 3, 1), spread([p[1] for p in apart])]
        cells += [spread([u[i] for u in union]) if union else "" for i in (0, 1)]
        yield f"| {title} | {' | '.join(cells)} |"


def unknown(trials: Sequence[Trial]) -> Iterator[str]:
    """Leave out each domain in turn, with the tasks' own logits."""
    yield f"Tasks: {', '.join(trials[0].tasks)}. Left out in turn: every domain, also those whose task is not there.\n"
    yield "| scorer | AUROC, mean | worst | FPR@95, mean % | worst % |\n|---|---|---|---|---|"
    every = {
        "maximum softmax": lambda t: (t.own("softmax"), t.own("softmax"), best),
        "energy": lambda t: (t.own("energy"), t.own("energy"), best),
        "nearest mean": lambda t: (*[t.ran(t.route(NearestMean))] * 2, best),
        "Mahalanobis++": lambda t: (*[t.ran(t.route(Mahalanobis))] * 2, best),
        "likelihood": lambda t: (*[t.ran(t.route(Likelihood))] * 2, best),
        "typicality (route and decide)": lambda t: (*t.decided(), of_best),
    }
    claims: list[list[float]] = []
    for title, make in every.items():
        found = [left_out(*make(t)[:2], t.tasks, make(t)[2]) for t in trials]
        claims = [[r[2] for r in f] for f in found]
        yield f"| {title} | {' | '.join(_unknown_cells(found))} |"
    yield "\nClaimed at the default threshold, by domain left out:\n"
    yield f"| {' | '.join(trials[0].names)} |\n{'|---' * len(trials[0].names)}|"
    yield f"| {' | '.join(spread(values) for values in zip(*claims, strict=True))} |"
    own = [float((of_best(t.decided()[0][n], t.decided()[1][n]) >= 0).float().mean()) for t in trials for n in t.tasks]
    yield f"\nTest images of the tasks themselves that are accepted: {100 * mean(own):.1f} %."


def unknown_by_features(trials: Sequence[Trial]) -> Iterator[str]:
    """Leave out each domain in turn, with plain features only, on all test images."""
    yield "| scorer | AUROC, mean | worst | FPR@95, mean % | worst % |\n|---|---|---|---|---|"
    for scorer in (NearestMean, Mahalanobis, Likelihood):
        found = [left_out(*[t.route(scorer)] * 2, t.names, best) for t in trials]
        yield f"| {scorer.__name__} | {' | '.join(_unknown_cells(found))} |"
    usual = [(t.route(Likelihood), t.route(Likelihood, standard=True), t.names) for t in trials]
    found = [left_out(*one, of_best) for one in usual]
    yield f"| Likelihood, standardised, of the best task | {' | '.join(_unknown_cells(found))} |"


def _unknown_cells(found: Sequence[Sequence[tuple[float, float, float]]]) -> list[str]:
    """Format mean and worst AUROC, then mean and worst FPR, over seeds."""
    areas = [spread([mean(r[0] for r in f) for f in found], 3, 1), spread([min(r[0] for r in f) for f in found], 3, 1)]
    rates = [spread([mean(r[1] for r in f) for f in found]), spread([max(r[1] for r in f) for f in found])]
    return areas + rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("root", "store", "cache"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000, help="training steps of tasks missing from the store")
    parser.add_argument("--split-steps", type=int, default=250, help="training steps of each part of a split domain")
    parser.add_argument("--present", action="store_true", help="leave out tasks missing from the store")
    given, tables = parser.parse_args(), {"route": stage_one, "unknown, by features": unknown_by_features}
    tables |= {"decide": stage_two, "unknown": unknown}
    torch.set_num_threads(1)
    collection = Collection(given.root, given.store, given.cache, given.steps)
    tasks = [n for n in collection.names() if not given.present or n in collection.store.names()]
    domains = [collection.domain(name) for name in collection.names()]
    trials = [Trial(domains, collection, tasks, seed) for seed in SEEDS]
    for title, lines in tables.items():
        print(f"\n## {title}\n", *lines(trials), sep="\n", flush=True)
    print("\n## split\n", *split_tables(collection, given.split_steps), sep="\n", flush=True)
    print("\n## cost\n", *cost(), sep="\n", flush=True)


if __name__ == "__main__":
    main()
