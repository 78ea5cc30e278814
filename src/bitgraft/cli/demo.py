"""`bitgraft demo`: the main job on real data, all of it from PyPI."""

from pathlib import Path
from typing import Annotated

import typer

TRY = """\b
Try:
  bitgraft demo
  bitgraft demo --folder my-demo"""


def demo(
    folder: Annotated[
        str, typer.Option(metavar="DIR", help="Where its store and report.html go; made anew each time.")
    ] = "demo",
) -> None:
    """Give a pretrained network two tasks, by three methods each, and compare.

    Takes a few minutes on two cores and ends with a page, report.html. Needs the packages of
    `pip install 'bitgraft[demo]'`.
    """
    from rich.console import Console

    from bitgraft.paper.demo import run

    run(Path(folder), Console(highlight=False))
