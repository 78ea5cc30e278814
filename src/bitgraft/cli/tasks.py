"""`bitgraft tasks`: what is in a store."""

from typing import Any

from bitgraft.cli.options import STORE, AsJson, StoreFolder
from bitgraft.cli.output import megabytes, percent, show, table

TRY = """
  bitgraft tasks
  bitgraft tasks --store my-store --json"""


def tasks(store: StoreFolder = STORE, as_json: AsJson = False) -> None:
    """List the tasks of a store and their sizes.

    A broken file is listed with the reason. The backbone is not built.
    """
    from bitgraft.errors import BitgraftError, WrongBackboneError
    from bitgraft.format.inspect import inspect_archive
    from bitgraft.serving.library import summary
    from bitgraft.store import Store

    opened, rows = Store(store), []
    for name, size in opened.sizes():
        try:
            archive = opened.archive(name)
            if archive.backbone != opened.fingerprint:
                raise WrongBackboneError(f"{opened.path(name)} belongs to another backbone, {archive.backbone[:12]}")
            row = summary(name, inspect_archive(archive, size), opened.size.weights)
            rows.append({**row, "leans_on": list(archive.metadata.depends_on)})
        except BitgraftError as fault:
            rows.append({"name": name, "bytes": size, "error": str(fault)})
    whole, together = 4 * opened.size.parameters, sum(row["bytes"] for row in rows)
    report = {
        "store": str(opened.folder),
        "backbone": opened.backbone.name,
        "weights": opened.backbone.weights,
        "fingerprint": opened.fingerprint,
        "backbone_bytes": whole,
        "tasks": rows,
        "tasks_bytes": together,
        "total_bytes": whole + together,
        "separate_bytes": whole * (1 + len(rows)),
    }
    show(as_json, report, *_parts(report, rows))


def _parts(report: dict[str, Any], rows: list[dict[str, Any]]) -> list[Any]:
    files = "1 task file" if len(rows) == 1 else f"{len(rows)} task files"
    parts: list[Any] = [f"{report['store']}: {files} for {report['backbone']}"]
    if not rows:
        return parts
    parts.append(table(["task", "method", "classes>", "accuracy>", "size>", "bits per weight>"], map(_cells, rows)))
    if broken := [f"{row['name']} is broken: {row['error']}" for row in rows if "error" in row]:
        parts.append("\n".join(broken))
    whole, total, separate = (megabytes(report[f"{name}_bytes"]) for name in ("backbone", "total", "separate"))
    parts.append(
        f"The backbone ({whole}) and {files} take {total}; {len(rows) + 1} separate networks, including the "
        f"backbone's own, would take {separate}."
    )
    return parts


def _cells(row: dict[str, Any]) -> list[Any]:
    if "error" in row:
        return [row["name"], "broken", "", "", megabytes(row["bytes"]), ""]
    accuracy = "" if row["accuracy"] is None else f"{row['measured_on']} {percent(row['accuracy'])}"
    bits = f"{row['bits_per_weight']:.2f}"
    return [row["name"], row["method"], row["classes"], accuracy, megabytes(row["bytes"]), bits]
