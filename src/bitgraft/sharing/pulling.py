"""Fetch a task file, check it, and install it in a store."""

import hashlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bitgraft.backbone.files import check_name, read_whole, write_atomically
from bitgraft.errors import MissingTaskError, SharingError, StoreError, UnsafeNameError, WrongBackboneError
from bitgraft.format.archive import Archive, content_hash, from_bytes
from bitgraft.sharing import hub, web
from bitgraft.store import SUFFIX, Store

LIMIT = 2_000_000_000  # bytes


@dataclass(frozen=True)
class Fetched:
    """A fetched task file, with all checks that do not need a backbone."""

    data: memoryview
    archive: Archive
    source: str
    sha256: str


def fetch(source: str, task: str | None = None, *, sha256: str | None = None, limit: int = LIMIT) -> Fetched:
    """Fetch and check a task file, without changing any store.

    Args:
        source: a file or a folder; https://...; hf:OWNER/NAME[@REVISION], or without "hf:" if there is no such folder.
            Any of them can end with the expected checksum, "#sha256=...".
        task: which one, if there are several.
        sha256: the expected checksum.
        limit: the maximum size in bytes.
    """
    place, _, fragment = source.partition("#")
    expected = (sha256 or fragment.removeprefix("sha256=")).lower()
    if (sha256 or fragment) and not re.fullmatch("[0-9a-f]{64}", expected):
        raise SharingError(f"{web.without_secrets(source)}: a SHA-256 is 64 hexadecimal digits, not {expected[:80]!r}")
    with tempfile.TemporaryDirectory(prefix="bitgraft-") as folder:
        path, shown, stated = _download(place, task, Path(folder), limit)
        _check_size(path.stat().st_size, shown, limit)
        data = read_whole(path)
    found = hashlib.sha256(data).hexdigest()
    if stated not in (None, found):
        raise SharingError(f"{shown} was changed in transit: its SHA-256 is {found}, the Hub states {stated}")
    if expected not in ("", found):
        raise SharingError(f"{shown} is not the expected file: its SHA-256 is {found}, not {expected}")
    return Fetched(data, from_bytes(data, shown), shown, found)


def install(fetched: Fetched, store: Store, name: str | None = None, *, overwrite: bool = False) -> str:
    """Add a fetched task to a store of its backbone; return its name there."""
    archive, name = fetched.archive, check_name(name or fetched.archive.metadata.name)
    if archive.backbone != store.fingerprint:
        raise WrongBackboneError(
            f"{fetched.source} belongs to a backbone with fingerprint {archive.backbone[:12]}, but the store at "
            f"{store.folder} has {store.backbone.name}, {store.fingerprint[:12]}: pull it into a store of its backbone"
        )
    for earlier, digest in archive.metadata.depends_on.items():
        if earlier not in store.names() or content_hash(store.archive(earlier)) != digest:
            raise MissingTaskError(
                f"{fetched.source} builds on task {earlier!r}, which the store at {store.folder} does not have: "
                "pull that one first"
            )
    if store.path(name).exists() and not overwrite:
        raise StoreError(f"the store has a task {name!r} already: pass --overwrite, or --as another name")
    if name in archive.metadata.depends_on:
        raise StoreError(f"{fetched.source} builds on the task {name!r} that it would replace: pass --as another name")
    store.check_replaceable(name)
    write_atomically(store.path(name), fetched.data)
    return name


def _download(place: str, task: str | None, folder: Path, limit: int) -> tuple[Path, str, str | None]:
    """Return the file's path, its name for messages and, from the Hub, its stated SHA-256."""
    if re.match("[a-z]+://", place, re.IGNORECASE):
        web.download(place, folder / "fetched", limit)
        return folder / "fetched", web.without_secrets(place), None
    if place.startswith(hub.PREFIX) or (hub.REPO.fullmatch(place.partition("@")[0]) and not Path(place).exists()):
        return _from_hub(place.removeprefix(hub.PREFIX), task, folder, limit)
    path = Path(place)
    if path.is_dir():
        path = path / _choose_file([file.name for file in path.iterdir()], task, place)
    if not path.is_file():
        raise SharingError(f"there is no file or folder {path}; for a repository of the Hub, give hf:OWNER/NAME")
    return path, str(path), None


def _from_hub(place: str, task: str | None, folder: Path, limit: int) -> tuple[Path, str, str | None]:
    repo, _, revision = place.partition("@")
    info = hub.model_info(hub.check_repo(repo), revision or None)
    files = {file.rfilename: file for file in info.siblings or []}
    file = files[_choose_file(list(files), task, repo)]
    shown = f"{hub.PREFIX}{repo}/{file.rfilename}"
    _check_size(file.size or 0, shown, limit)
    path = hub.download(repo, file.rfilename, info.sha, folder)  # pinned, in case of a push meanwhile
    return path, shown, file.lfs.sha256 if file.lfs else None


def _choose_file(files: list[str], task: str | None, where: str) -> str:
    """Return the one task file among these, or that of `task`; other files are ignored."""
    if task is not None:
        check_name(task)
    names = sorted(file.removesuffix(SUFFIX) for file in files if _is_task_file(file))
    chosen = [name for name in names if task in (None, name)]
    if len(chosen) != 1:
        held = f"the tasks {', '.join(names)}" if names else "no task file"
        remedy = ": choose one with --task NAME" if chosen else "" if task is None else f", but not {task}"
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
