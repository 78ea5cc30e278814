"""`bitgraft tasks`: what is in a store."""

from typing import TYPE_CHECKING, Any

from bitgraft.cli.names import STORE, AsJson, StoreFolder
from bitgraft.cli.output import megabytes, show, show_json, table

if TYPE_CHECKING:
    from bitgraft.store import Store

TRY = """\b
Try:
  bitgraft tasks
  bitgraft tasks --store my-store --json"""


def tasks(store: StoreFolder = STORE, as_json: AsJson = False) -> None:
    """List the tasks of a store, and what they take.

    A file that is broken is listed with the reason. The backbone is not built.
    """
    from bitgraft.store import Store

    report = _report(Store(store))
    show_json(report) if as_json else _show(report)


def _report(store: "Store") -> dict[str, Any]:
    rows = [_row(store, name, size) for name, size in store.sizes()]
    together = sum(row["bytes"] for row in rows)
    whole = 4 * store.size.parameters
    return {
        "store": str(store.folder),
        "backbone": store.backbone.name,
        "weights": store.backbone.weights,
        "fingerprint": store.fingerprint,
        "backbone_bytes": whole,
        "tasks": rows,
        "tasks_bytes": together,
        "total_bytes": whole + together,
        "separate_bytes": whole * (1 + len(rows)),
    }


def _row(store: "Store", name: str, size: int) -> dict[str, Any]:
    from bitgraft.errors import BitgraftError, WrongBackboneError
    from bitgraft.format.inspect import accuracy, inspect_archive

    try:
        archive = store.archive(name)
        if archive.backbone != store.fingerprint:
            raise WrongBackboneError(f"{store.path(name)} belongs to another backbone, {archive.backbone[:12]}")
    except BitgraftError as fault:
        return {"name": name, "bytes": size, "error": str(fault)}
    found = inspect_archive(archive, size)
    split, share = accuracy(archive.metrics)
    return {
        "name": name,
        "method": archive.metadata.method,
        "classes": None if archive.metadata.classes is None else len(archive.metadata.classes),
        "accuracy": share,
        "measured_on": split,
        "bytes": size,
        "bits_per_weight": 8 * (size - found.bytes["head"]) / store.size.weights,
        "leans_on": list(archive.metadata.depends_on),
    }


def _show(report: dict[str, Any]) -> None:
    rows, count = report["tasks"], len(report["tasks"])
    parts: list[Any] = [f"{report['store']}: {count} task{'s' * (count != 1)} of {report['backbone']}"]
    if rows:
        columns = ["task", "method", "classes>", "accuracy>", "size>", "bits per weight>"]
        parts.append(table(columns, [_cells(row) for row in rows]))
    broken = [f"{row['name']} is broken: {row['error']}" for row in rows if "error" in row]
    if broken:
        parts.append("\n".join(broken))
    if rows:
        parts.append(_total(report, count))
    show(*parts)


def _cells(row: dict[str, Any]) -> list[Any]:
    if "error" in row:
        return [row["name"], "broken", "", "", megabytes(row["bytes"]), ""]
    accuracy = "" if row["accuracy"] is None else f"{row['measured_on']} {100 * row['accuracy']:.1f} %"
    bits = f"{row['bits_per_weight']:.2f}"
    return [row["name"], row["method"], row["classes"], accuracy, megabytes(row["bytes"]), bits]


def _total(report: dict[str, Any], count: int) -> str:
    whole, total, separate = (report[f"{name}_bytes"] for name in ("backbone", "total", "separate"))
    return (
        f"The backbone ({megabytes(whole)}) and {count} task file{'s' * (count != 1)} take {megabytes(total)}; "
        f"{count + 1} separate networks, the backbone's own among them, {megabytes(separate)}."
    )
