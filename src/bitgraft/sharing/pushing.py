"""A task file and the page that introduces it, to the Hub."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bitgraft import __version__
from bitgraft.backbone.files import read_whole
from bitgraft.errors import WrongBackboneError
from bitgraft.format.archive import Archive, from_bytes
from bitgraft.format.inspect import accuracy, inspect_archive
from bitgraft.sharing import hub
from bitgraft.store import SUFFIX, Store

LISTED = 200  # classes that are named on the page


def push(
    store: Store, task: str, repo: str, *, licence: str | None = None, private: bool = False, card: bool = True
) -> str:
    """Upload a task, checked first, and a model card; where to see the commit."""
    hub.check_repo(repo)
    store.archive(task)  # or say which tasks there are
    data = bytes(read_whole(store.path(task)))
    archive = from_bytes(data, str(store.path(task)))
    if archive.backbone != store.fingerprint:
        raise WrongBackboneError(f"{store.path(task)} belongs to another backbone than its store: it is not sent")
    files = {store.path(task).name: data}
    if card:
        files["README.md"] = model_card(store, task, repo, archive, len(data), licence).encode()
    return hub.upload(repo, files, f"bitgraft task {task}", private=private)


def model_card(store: Store, task: str, repo: str, archive: Archive, size: int, licence: str | None = None) -> str:
    """README.md for a task's repository, from what its file says."""
    backbone, metadata = store.backbone.name, archive.metadata
    bits = 8 * (size - inspect_archive(archive, size).bytes["head"]) / store.size.weights
    rows = {
        "method": metadata.method,
        "classes": None if metadata.classes is None else len(metadata.classes),
        "accuracy": _accuracy(archive.metrics),
        "backbone": f"{backbone}, fingerprint `{archive.backbone}`",
        "size": f"{size / 1e6:.2f} MB, {bits:.2f} bits per weight of the backbone, head apart",
        "input": json.dumps(dict(metadata.preprocessing)),
        "builds on": ", ".join(metadata.depends_on),
        "written by": f"bitgraft {__version__}",
    }
    return "\n".join(
        [
            *_front(licence),
            f"# {task}",
            "",
            f"A task for the frozen network `{backbone}`, as one [safetensors](https://github.com/huggingface/"
            f"safetensors) file, `{task}{SUFFIX}`: what it changes in the network, not the network itself.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {_cell(value)} |" for name, value in rows.items() if value not in (None, "")),
            "",
            "## Use it",
            "",
            "```sh",
            "pip install 'bitgraft[hub]'",
            f"bitgraft pull {hub.PREFIX}{repo} --task {task} --backbone {backbone}",
            f"bitgraft predict photo.jpg --task {task}",
            "```",
            "",
            *_classes(metadata.classes),
        ]
    )


def _accuracy(metrics: Mapping[str, Any]) -> str | None:
    split, share = accuracy(metrics)
    return None if share is None else f"{100 * share:.1f} % of {split} images"


def _front(licence: str | None) -> Iterator[str]:
    """The fields that the Hub reads, above the text. JSON's strings are YAML's, too."""
    yield "---"
    if licence:
        yield f"license: {json.dumps(licence)}"
    yield from ("library_name: bitgraft", "pipeline_tag: image-classification", "tags:", "- bitgraft", "---", "")


def _classes(names: tuple[str, ...] | None) -> Iterator[str]:
    if names and names != tuple(map(str, range(len(names)))):
        yield from ("## Classes", "")
        yield from (f"{number}. {_cell(name)}" for number, name in enumerate(names[:LISTED]))
        if len(names) > LISTED:
            yield f"\n... and {len(names) - LISTED} more, in the file."
        yield ""


def _cell(value: Any) -> str:
    """Text that no character of which ends a cell, begins a tag or breaks the line."""
    return " ".join(str(value).replace("|", "\\|").replace("<", "&lt;").split())
