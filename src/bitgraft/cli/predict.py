"""`bitgraft predict`: what tasks in a store say to images."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitgraft.cli.names import STORE, AsJson, StoreFolder, complete_tasks
from bitgraft.cli.output import FAILURE, show, show_json, table

if TYPE_CHECKING:
    from torch import Tensor

    from bitgraft.data.preprocessing import Preprocessing
    from bitgraft.network import Network
    from bitgraft.store import Store

BATCH = 32
TRY = """\b
Try:
  bitgraft predict rose.jpg --task flowers
  bitgraft predict photos/ --all-tasks --top 1 --json
  bitgraft predict rose.jpg --task original"""


def predict(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE...", help="Files, or folders of them.")],
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Which task; repeatable. The backbone's own is `original`.",
            autocompletion=complete_tasks,
        ),
    ] = None,
    all_tasks: Annotated[bool, typer.Option("--all-tasks", help="Every task in the store.")] = False,
    store: StoreFolder = STORE,
    top: Annotated[int, typer.Option(min=1, help="How many answers for each.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Classify images with one task, several or all.

    A file that cannot be read is named; the others are answered, and the exit code is 1.
    """
    from bitgraft.store import Store

    opened = Store(store)
    names = _chosen(opened, task or [], all_tasks)
    files, faults = _files(images)
    net = opened.network()
    for name in names:
        if name != net.original:
            opened.load(net, name)
    answers: dict[str, dict[str, Any]] = {path: {} for path in files}
    for name in names:
        for path, scores in _run(net.eval(), name, [path for path in files if path not in faults], faults):
            answers[path][name] = _best(scores, _classes(net, name), top)
    answers = {path: said for path, said in answers.items() if path not in faults}
    if as_json:
        good = [{"image": path, "tasks": said} for path, said in answers.items()]
        show_json(good + [{"image": path, "error": reason} for path, reason in faults.items()])
    elif answers:
        show(table(["image", "task", "class", "probability>"], _rows(answers)))
    for reason in faults.values():
        print(f"error: {reason}", file=sys.stderr)
    if faults:
        raise typer.Exit(FAILURE)


def _chosen(store: "Store", asked: Sequence[str], every: bool) -> list[str]:
    there = store.names()
    if every and asked:
        raise typer.BadParameter("--task and --all-tasks exclude one another")
    if asked:
        return list(dict.fromkeys(asked))
    if not there:
        raise typer.BadParameter(f"the store at {store.folder} has no tasks yet")
    if every or len(there) == 1:
        return there
    raise typer.BadParameter(f"say --task NAME or --all-tasks; the store has {', '.join(there)}")


def _files(given: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Every image, folders searched; and what is wrong with those that are none."""
    from bitgraft.data.folders import SUFFIXES

    files, faults = [], {}
    for text in given:
        path = Path(text)
        found = [str(p) for p in sorted(path.rglob("*")) if p.suffix.lower() in SUFFIXES] if path.is_dir() else [text]
        if not found:
            faults[text] = f"there is no image in {text}"
        files += found
    return list(dict.fromkeys(files)), faults


def _run(net: "Network", name: str, files: Sequence[str], faults: dict[str, str]) -> Any:
    """Each readable file with its probabilities; the others become faults."""
    import torch

    from bitgraft.backbone.tracing import logits
    from bitgraft.data.preprocessing import evaluation_tensor
    from bitgraft.errors import DataError

    preprocessing = _preprocessing(net, name)
    for start in range(0, len(files), BATCH):
        read: dict[str, Tensor] = {}
        for path in files[start : start + BATCH]:
            try:
                read[path] = evaluation_tensor(Path(path), preprocessing)
            except DataError as fault:
                faults[path] = str(fault)
        if read:
            with torch.no_grad():
                scores = logits(net(torch.stack(list(read.values())), task=name)).float().softmax(1)
            yield from zip(read, scores, strict=True)


def _preprocessing(net: "Network", name: str) -> "Preprocessing":
    from bitgraft.data.preprocessing import Preprocessing
    from bitgraft.runtime.heads import stated_preprocessing

    own = name == net.original
    return Preprocessing.from_dict(
        stated_preprocessing(net.backbone) if own else net.tasks[name].metadata.preprocessing
    )


def _classes(net: "Network", name: str) -> Sequence[str] | None:
    return None if name == net.original else net.tasks[name].classes


def _best(scores: "Tensor", classes: Sequence[str] | None, top: int) -> list[dict[str, Any]]:
    values, places = scores.topk(min(top, len(scores)))
    return [
        {"class": classes[place] if classes else str(place), "probability": value}
        for value, place in zip(values.tolist(), places.tolist(), strict=True)
    ]


def _rows(answers: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """An image and a task are named on their first line alone."""
    rows = []
    for path, said in answers.items():
        for t, (task, best) in enumerate(said.items()):
            for b, answer in enumerate(best):
                head = (path if t == b == 0 else "", task if b == 0 else "")
                rows.append((*head, answer["class"], f"{100 * answer['probability']:.1f} %"))
    return rows
