"""`bitgraft score`: a submission to the Visual Decathlon, scored."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitgraft.cli.output import show, show_json, table

if TYPE_CHECKING:
    from bitgraft.paper.scores import Score

TRY = """\b
Try:
  bitgraft score results.json --annotations decathlon/annotations
  bitgraft score results.json --annotations decathlon/annotations --json
  bitgraft score results.json --annotations decathlon/annotations --baseline mine.toml"""


def score(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The submission, a JSON file.")],
    annotations: Annotated[Path, typer.Option(metavar="DIR", help="Where <domain>_test.json are, with labels.")],
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Baseline errors in TOML, in place of the challenge's own."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
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
        show_json(_plain(scored, baselines.source))
    else:
        _show(scored, baselines.source)


def _plain(scored: "Score", source: str) -> dict[str, Any]:
    return {
        "domains": [
            {
                "domain": one.domain,
                "images": one.images,
                "correct": one.correct,
                "accuracy": one.accuracy,
                "baseline_error": one.baseline,
                "score": one.score,
            }
            for one in scored.domains
        ],
        "mean_accuracy": scored.accuracy,
        "score": scored.total,
        "absent": list(scored.absent),
        "baselines": source,
    }


def _show(scored: "Score", source: str) -> None:
    rows = [
        (
            one.domain,
            f"{one.images:,}",
            f"{one.correct:,}",
            f"{100 * one.accuracy:.2f}",
            f"{100 - one.baseline:.2f}",
            f"{one.score:.1f}",
        )
        for one in scored.domains
    ]
    images, correct = (sum(getattr(one, part) for one in scored.domains) for part in ("images", "correct"))
    rows.append(("all", f"{images:,}", f"{correct:,}", f"{100 * scored.accuracy:.2f}", "", f"{scored.total:.1f}"))
    told = f"Accuracies in per cent, the last one their mean over the domains; baselines: {source}."
    if scored.absent:
        told += f"\nS is over {len(scored.domains)} domains; not here: {', '.join(scored.absent)}."
    show(table(["domain", "images>", "right>", "accuracy>", "baseline>", "S>"], rows), told)
