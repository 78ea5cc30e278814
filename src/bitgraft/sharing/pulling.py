"""A task file from elsewhere into a store: fetched to a temporary file, checked, and only then put in its place."""

import hashlib
import hmac
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bitgraft.backbone.files import read_whole, write_atomically
from bitgraft.errors import MissingTaskError, SharingError, StoreError, UnsafeNameError, WrongBackboneError
from bitgraft.format.archive import Archive, content, from_bytes
from bitgraft.sharing import hub, web
from bitgraft.store import SUFFIX, Store
from bitgraft.task import check_name

LIMIT = 2_000_000_000  # bytes
SUM = "sha256="


@dataclass(frozen=True)
class Fetched:
    """A task file's bytes and what is in them, checked in all that does not need a backbone."""

    data: memoryview
    archive: Archive
    source: str
    sha256: str


def fetch(source: str, task: str | None = None, *, sha256: str | None = None, limit: int = LIMIT) -> Fetched:
    """Bring a task file here and check it; no store is touched.

    Args:
        source: a file or a folder; https://...; hf:OWNER/NAME, or OWNER/NAME where there is no such folder, with
            @REVISION behind it if not the newest. "#sha256=..." behind any of them is what the file must have.
        task: which one, where there are several.
        sha256: what the file must have.
    """
    place, _, fragment = source.partition("#")
    wanted = _digest(sha256 or fragment.removeprefix(SUM), source) if sha256 or fragment else None
    with tempfile.TemporaryDirectory(prefix="bitgraft-") as folder:
        path, shown = _bring(place, task, Path(folder), limit)
        data = read_whole(path)
    found = hashlib.sha256(data).hexdigest()
    if wanted is not None and not hmac.compare_digest(found, wanted):
        raise SharingError(f"{shown} is not the file that was meant: its SHA-256 is {found}, not {wanted}")
    archive = from_bytes(data, shown)
    return Fetched(data, archive, shown, found)


def enter(fetched: Fetched, store: Store, name: str | None = None, *, overwrite: bool = False) -> str:
    """Put a fetched task into a store, whole or not at all, if it fits there; the name that it has there."""
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
    target = store.path(called)
    if target.exists() and not overwrite:
        raise StoreError(f"the store has a task {called!r} already: pass --overwrite, or --as another name")
    if called in archive.metadata.depends_on:
        raise StoreError(f"{fetched.source} builds on the task {called!r} that is there: pass --as another name")
    store.check_replaceable(called)
    write_atomically(target, memoryview(fetched.data))
    return called


def _digest(text: str, source: str) -> str:
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise SharingError(f"{web.without_secrets(source)}: a SHA-256 is 64 hexadecimal digits, not {text[:80]!r}")
    return text.lower()


def _bring(place: str, task: str | None, folder: Path, limit: int) -> tuple[Path, str]:
    """The file as it is here now, and what to call it in messages."""
    if re.match("[a-z]+://", place, re.IGNORECASE):
        web.download(place, target := folder / "fetched", limit)
        return target, web.without_secrets(place)
    if not place.startswith(hub.PREFIX) and (Path(place).exists() or not hub.REPO.fullmatch(place.partition("@")[0])):
        return _local(Path(place), task, folder, limit)
    return _from_hub(place.removeprefix(hub.PREFIX), task, folder, limit)


def _local(path: Path, task: str | None, folder: Path, limit: int) -> tuple[Path, str]:
    if path.is_dir():
        path = path / _only([p.name for p in path.glob(f"*{SUFFIX}")], task, str(path))
    if not path.is_file():
        raise SharingError(f"there is no file or folder {path}; a repository of the Hub is hf:OWNER/NAME")
    _check_size(path.stat().st_size, str(path), limit)
    copied = folder / "copied"
    try:
        shutil.copyfile(path, copied)
    except OSError as cause:
        raise SharingError(f"cannot read {path}: {cause.strerror or cause}") from cause
    return copied, str(path)


def _from_hub(place: str, task: str | None, folder: Path, limit: int) -> tuple[Path, str]:
    repo, _, revision = place.partition("@")
    entries = {entry.file: entry for entry in hub.listing(hub.check_repo(repo), revision or None)}
    entry = entries[_only(list(entries), task, repo)]
    shown = f"{hub.PREFIX}{repo}/{entry.file}"
    _check_size(entry.size or 0, shown, limit)
    path = hub.download(repo, entry, folder)
    _check_size(path.stat().st_size, shown, limit)
    if entry.sha256 is not None and hashlib.sha256(read_whole(path)).hexdigest() != entry.sha256:
        raise SharingError(f"{shown} came other than the Hub says that it is: its SHA-256 is not {entry.sha256}")
    return path, shown


def _only(files: list[str], task: str | None, where: str) -> str:
    """The one task file among these names; those that no task can have are passed over."""
    if task is not None:
        check_name(task)
    names = sorted(file.removesuffix(SUFFIX) for file in files if file.endswith(SUFFIX) and _is_plain(file))
    chosen = [name for name in names if task in (None, name)]
    if len(chosen) != 1:
        held = f"the tasks {', '.join(names)}" if names else "no task file"
        remedy = ": say --task NAME" if chosen else "" if task is None else f", none that is called {task}"
        raise SharingError(f"{where} has {held}{remedy}")
    return f"{chosen[0]}{SUFFIX}"


def _is_plain(file: str) -> bool:
    try:
        return bool(check_name(file.removesuffix(SUFFIX)))
    except UnsafeNameError:
        return False


def _check_size(size: int, shown: str, limit: int) -> None:
    if size > limit:
        raise SharingError(
            f"{shown} has {size / 1e6:,.0f} MB, more than {limit / 1e6:,.0f}: raise --max-size if you trust it"
        )
