"""A task file from elsewhere into a store: fetched, checked, and only then put in place."""

import hashlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bitgraft.backbone.files import check_name, read_whole, write_atomically
from bitgraft.errors import MissingTaskError, SharingError, StoreError, UnsafeNameError, WrongBackboneError
from bitgraft.format.archive import Archive, content, from_bytes
from bitgraft.sharing import hub, web
from bitgraft.store import SUFFIX, Store

LIMIT = 2_000_000_000  # bytes


@dataclass(frozen=True)
class Fetched:
    """A task file's bytes and what is in them, checked as far as that is possible without a backbone."""

    data: memoryview
    archive: Archive
    source: str
    sha256: str


def fetch(source: str, task: str | None = None, *, sha256: str | None = None, limit: int = LIMIT) -> Fetched:
    """Fetch a task file and check it; no store is touched.

    Args:
        source: a file or a folder; https://...; hf:OWNER/NAME, or OWNER/NAME where there is no such folder, with
            @REVISION behind it if not the newest. "#sha256=..." behind any of them is the expected checksum.
        task: which one, where there are several.
        sha256: the expected checksum.
        limit: the largest size to accept, in bytes.
    """
    place, _, fragment = source.partition("#")
    expected = (sha256 or fragment.removeprefix("sha256=")).lower()
    if (sha256 or fragment) and not re.fullmatch("[0-9a-f]{64}", expected):
        raise SharingError(f"{web.without_secrets(source)}: a SHA-256 is 64 hexadecimal digits, not {expected[:80]!r}")
    with tempfile.TemporaryDirectory(prefix="bitgraft-") as folder:
        path, shown, stated = _bring(place, task, Path(folder), limit)
        _check_size(path.stat().st_size, shown, limit)
        data = read_whole(path)
    found = hashlib.sha256(data).hexdigest()
    if stated not in (None, found):
        raise SharingError(f"{shown} was changed on the way: its SHA-256 is {found}, the Hub says {stated}")
    if expected not in ("", found):
        raise SharingError(f"{shown} is not the expected file: its SHA-256 is {found}, not {expected}")
    return Fetched(data, from_bytes(data, shown), shown, found)


def enter(fetched: Fetched, store: Store, name: str | None = None, *, overwrite: bool = False) -> str:
    """Put a fetched task into a store, if it fits there; returns the name that it has there."""
    archive, called = fetched.archive, check_name(name or fetched.archive.metadata.name)
    if archive.backbone != store.fingerprint:
        raise WrongBackboneError(
            f"{fetched.source} belongs to a backbone with fingerprint {archive.backbone[:12]}, the store at "
            f"{store.folder} has {store.backbone.name}, {store.fingerprint[:12]}: pull it into a store of its backbone"
        )
    for earlier, digest in archive.metadata.depends_on.items():
        if earlier not in store.names() or content(store.archive(earlier)) != digest:
            raise MissingTaskError(
                f"{fetched.source} builds on task {earlier!r}, which the store at {store.folder} does not have: "
                "pull that one first"
            )
    if store.path(called).exists() and not overwrite:
        raise StoreError(f"the store has a task {called!r} already: pass --overwrite, or --as another name")
    if called in archive.metadata.depends_on:
        raise StoreError(f"{fetched.source} builds on the task {called!r} that is there: pass --as another name")
    store.check_replaceable(called)
    write_atomically(store.path(called), fetched.data)
    return called


def _bring(place: str, task: str | None, folder: Path, limit: int) -> tuple[Path, str, str | None]:
    """The file, what messages call it, and the SHA-256 that the Hub states."""
    if re.match("[a-z]+://", place, re.IGNORECASE):
        web.download(place, folder / "fetched", limit)
        return folder / "fetched", web.without_secrets(place), None
    if place.startswith(hub.PREFIX) or (hub.REPO.fullmatch(place.partition("@")[0]) and not Path(place).exists()):
        return _from_hub(place.removeprefix(hub.PREFIX), task, folder, limit)
    path = Path(place)
    if path.is_dir():
        path = path / _only([file.name for file in path.iterdir()], task, place)
    if not path.is_file():
        raise SharingError(f"there is no file or folder {path}; a repository of the Hub is hf:OWNER/NAME")
    return path, str(path), None


def _from_hub(place: str, task: str | None, folder: Path, limit: int) -> tuple[Path, str, str | None]:
    repo, _, revision = place.partition("@")
    info = hub.model_info(hub.check_repo(repo), revision or None)
    files = {file.rfilename: file for file in info.siblings or []}
    file = files[_only(list(files), task, repo)]
    shown = f"{hub.PREFIX}{repo}/{file.rfilename}"
    _check_size(file.size or 0, shown, limit)
    path = hub.download(repo, file.rfilename, info.sha, folder)  # of this commit, whatever is pushed meanwhile
    return path, shown, file.lfs.sha256 if file.lfs else None


def _only(files: list[str], task: str | None, where: str) -> str:
    """The one task file among these; files that cannot be a task's are ignored."""
    if task is not None:
        check_name(task)
    names = sorted(file.removesuffix(SUFFIX) for file in files if _is_task_file(file))
    chosen = [name for name in names if task in (None, name)]
    if len(chosen) != 1:
        held = f"the tasks {', '.join(names)}" if names else "no task file"
        remedy = ": say --task NAME" if chosen else "" if task is None else f", but not {task}"
        raise SharingError(f"{where} has {held}{remedy}")
    return f"{chosen[0]}{SUFFIX}"


def _is_task_file(file: str) -> bool:
    try:
        return file.endswith(SUFFIX) and bool(check_name(file.removesuffix(SUFFIX)))
    except UnsafeNameError:
        return False


def _check_size(size: int, shown: str, limit: int) -> None:
    if size > limit:
        raise SharingError(
            f"{shown} has {size / 1e6:,.0f} MB, more than {limit / 1e6:,.0f}: raise --max-size if you trust it"
        )
