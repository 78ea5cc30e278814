"""`bitgraft methods`: what `--method` can be."""

from bitgraft.cli.options import AsJson
from bitgraft.cli.output import show, table

TRY = "\n  bitgraft methods"


def methods(as_json: AsJson = False) -> None:
    """List the methods, with their equations."""
    from bitgraft.methods import registry

    known = [registry.get(name) for name in registry.method_names()]
    rows = [(method.name, method.equation, method.summary) for method in known]
    data = [
        {"name": name, "equation": equation, "summary": summary, "options": registry.plain(method.options)}
        for method, (name, equation, summary) in zip(known, rows, strict=True)
    ]
    show(as_json, data, table(["method", "equation", "what it is"], rows))
