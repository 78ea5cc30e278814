"""`bitgraft methods`: what `--method` can be."""

from typing import Annotated

import typer

from bitgraft.cli.output import show, show_json, table

TRY = """\b
Try:
  bitgraft methods
  bitgraft methods --json"""


def methods(as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """List the methods, with their equations."""
    from bitgraft.methods import registry

    known = [registry.get(name) for name in registry.method_names()]
    if as_json:
        show_json(
            [
                {"name": m.name, "equation": m.equation, "summary": m.summary, "options": registry.plain(m.options)}
                for m in known
            ]
        )
    else:
        show(table(["method", "equation", "what it is"], [(m.name, m.equation, m.summary) for m in known]))
