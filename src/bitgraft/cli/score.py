"""`bitgraft score`: a submission to the Visual Decathlon, scored."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from bitgraft.cli.options import AsJson
from bitgraft.cli.output import show, table

TRY = """
  bitgraft score results.json --annotations decathlon/annotations
  bitgraft score results.json --annotations decathlon/annotations --baseline mine.toml"""


def score(
    file: Annotated[Path, Argument(metavar="FILE", help="The submission, a JSON file.")],
    annotations: Annotated[Path, Option(metavar="DIR", help="The folder of <domain>_test.json, with labels.")],
    baseline: Annotated[Path | None, Option(metavar="FILE", help="Baseline errors in TOML [the challenge's].")] = None,
    as_json: AsJson = False,
) -> None:
    """Score a submission to the Visual Decathlon.

    Accuracy and S of each domain, and the total. S is 250 for the baseline and 1000 for no errors.
    """
    from bitgraft.paper import scores

    baselines = scores.challenge_baselines() if baseline is None else scores.read_baselines(baseline)
    scored = scores.score_submission(scores.read_submission(file), scores.read_labels(annotations), baselines)
    fields = ("domain", "images", "correct", "accuracy", "score")
    data = {
        "domains": [
            {field: getattr(one, field) for field in fields} | {"baseline_error": one.baseline}
            for one in scored.domains
        ],
        "mean_accuracy": scored.accuracy,
        "score": scored.total,
        "absent": list(scored.absent),
        "baselines": baselines.source,
    }
    rows = [
        (d.domain, d.images, d.correct, f"{100 * d.accuracy:.2f}", f"{100 - d.baseline:.2f}", f"{d.score:.1f}")
        for d in scored.domains
    ]
    images, correct = (sum(getattr(one, part) for one in scored.domains) for part in ("images", "correct"))
    rows.append(("all", images, correct, f"{100 * scored.accuracy:.2f}", "", f"{scored.total:.1f}"))
    told = f"Accuracies in per cent, the last one their mean over the domains; baselines: {baselines.source}."
    if scored.absent:
        told += f"\nS is over {len(scored.domains)} domains; missing: {', '.join(scored.absent)}."
    show(as_json, data, table(["domain", "images>", "right>", "accuracy>", "baseline>", "S>"], rows), told)
