"""`bitgraft score`: a submission to the Visual Decathlon, scored."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from bitgraft.cli.options import AsJson
from bitgraft.cli.output import show, show_json, table

TRY = """\b
Try:
  bitgraft score results.json --annotations decathlon/annotations
  bitgraft score results.json --annotations decathlon/annotations --json
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
    from bitgraft.paper.scores import (
        challenge_baselines,
        read_baselines,
        read_labels,
        read_submission,
        score_submission,
    )

    baselines = challenge_baselines() if baseline is None else read_baselines(baseline)
    scored = score_submission(read_submission(file), read_labels(annotations), baselines)
    if as_json:
        fields = {"domain": "domain", "images": "images", "correct": "correct", "accuracy": "accuracy"}
        fields |= {"baseline_error": "baseline", "score": "score"}
        show_json(
            {
                "domains": [{key: getattr(one, field) for key, field in fields.items()} for one in scored.domains],
                "mean_accuracy": scored.accuracy,
                "score": scored.total,
                "absent": list(scored.absent),
                "baselines": baselines.source,
            }
        )
        return
    rows = [
        (d.domain, d.images, d.correct, f"{100 * d.accuracy:.2f}", f"{100 - d.baseline:.2f}", f"{d.score:.1f}")
        for d in scored.domains
    ]
    images, correct = (sum(getattr(one, part) for one in scored.domains) for part in ("images", "correct"))
    rows.append(("all", images, correct, f"{100 * scored.accuracy:.2f}", "", f"{scored.total:.1f}"))
    told = f"Accuracies in per cent, the last one their mean over the domains; baselines: {baselines.source}."
    if scored.absent:
        told += f"\nS is over {len(scored.domains)} domains; missing: {', '.join(scored.absent)}."
    show(table(["domain", "images>", "right>", "accuracy>", "baseline>", "S>"], rows), told)
