"""Push a task file and its model card to the Hub."""

import json
from typing import Any

from bitgraft import __version__
from bitgraft.backbone.files import read_whole
from bitgraft.errors import WrongBackboneError
from bitgraft.format.archive import from_bytes
from bitgraft.format.summary import accuracy
from bitgraft.sharing import hub
from bitgraft.store import Store

LISTED = 200  # maximum number of class names on the model card
CARD = """\
---
{front}---

# {task}

A task for the frozen network `{backbone}`, as one [safetensors](https://github.com/huggingface/safetensors) file.
`{task}.safetensors` holds only the task's changes, not the network itself.

| | |
|---|---|
{rows}

## Use it

```sh
pip install .    # in a clone of bitgraft
bitgraft pull hf:{repo} --task {task} --backbone {backbone}
bitgraft predict photo.jpg --task {task}
```
{classes}"""


def push(
    store: Store, task: str, repo: str, *, licence: str | None = None, private: bool = False, card: bool = True
) -> str:
    """Check a task and upload it with a model card; return the commit's URL."""
    hub.check_repo(repo)
    path = store.file(task)
    data = bytes(read_whole(path))
    if from_bytes(data, str(path)).backbone != store.fingerprint:
        raise WrongBackboneError(f"{path} was not pushed: it belongs to another backbone than its store")
    files = {path.name: data}
    if card:
        files["README.md"] = model_card(store, task, repo, licence).encode()
    return hub.upload(repo, files, f"bitgraft task {task}", private=private)


def model_card(store: Store, task: str, repo: str, licence: str | None = None) -> str:
    """Return README.md for a task's repository."""
    summary, backbone = store.summary(task), store.backbone.name
    metadata, bits = summary.metadata, summary.bits_per(store.size.weights)
    split, share = accuracy(summary.metrics)
    rows = {
        "method": metadata.method,
        "classes": None if metadata.classes is None else len(metadata.classes),
        "accuracy": None if share is None else f"{100 * share:.1f} % of {split} images",
        "backbone": f"{backbone}, fingerprint `{summary.backbone}`",
        "size": f"{summary.size / 1e6:.2f} MB; without head and description {bits:.2f} bits per weight of the backbone",
        "input": json.dumps(dict(metadata.preprocessing)),
        "builds on": ", ".join(metadata.depends_on),
        "written by": f"bitgraft {__version__}",
    }
    front = {"library_name": "bitgraft", "pipeline_tag": "image-classification", "tags": ["bitgraft"]}
    front |= {"license": licence} if licence else {}
    return CARD.format(
        front="".join(f"{key}: {json.dumps(value)}\n" for key, value in front.items()),  # JSON is valid YAML
        rows="\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items() if value not in (None, "")),
        classes=_classes(metadata.classes or ()),
        task=task,
        repo=repo,
        backbone=backbone,
    )


def _classes(names: tuple[str, ...]) -> str:
    if names == tuple(map(str, range(len(names)))):
        return ""
    more = f"\n... and {len(names) - LISTED} more, in the file.\n" if len(names) > LISTED else ""
    return "\n## Classes\n\n" + "".join(f"{n}. {_cell(name)}\n" for n, name in enumerate(names[:LISTED])) + more


def _cell(value: Any) -> str:
    """Escape text for a cell of a Markdown table."""
    return " ".join(str(value).replace("|", "\\|").replace("<", "&lt;").split())
