"""`bitgraft methods`: what `--method` can be."""

from bitgraft.cli.options import AsJson
from bitgraft.cli.output import show, show_json, table

TRY = """\b
Try:
  bitgraft methods
  bitgraft methods --json"""


def methods(as_json: AsJson = False) -> None:
    """List the methods, with their equations."""
    from bitgraft.methods import registry

    known = [registry.get(name) for name in registry.method_names()]
    if as_json:
        fields = ("name", "equation", "summary")
        show_json([{f: getattr(m, f) for f in fields} | {"options": registry.plain(m.options)} for m in known])
    else:
        show(table(["method", "equation", "what it is"], [(m.name, m.equation, m.summary) for m in known]))
