"""The Hugging Face Hub, through huggingface_hub. Who you are is that package's affair (`hf auth login`, HF_TOKEN)."""

import contextlib
import importlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitgraft.errors import SharingError

PREFIX = "hf:"
REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
WAIT = 30.0  # seconds for an answer about a file
SECRET = re.compile(r"hf_\w+|(?<=://)[^/@\s]+@")


@dataclass(frozen=True)
class Entry:
    """A file in a repository, as the hub describes it."""

    file: str
    size: int | None
    sha256: str | None
    revision: str


def listing(repo: str, revision: str | None) -> list[Entry]:
    """The files of a repository at one commit, which later calls then name, whatever is pushed meanwhile."""
    with _talking(repo):
        info = _api().model_info(repo, revision=revision, files_metadata=True, timeout=WAIT)
        return [
            Entry(file.rfilename, file.size, file.lfs.sha256 if file.lfs else None, info.sha)
            for file in info.siblings or []
        ]


def download(repo: str, entry: Entry, folder: Path) -> Path:
    with _talking(repo), _quiet():
        return Path(
            _api().hf_hub_download(repo, entry.file, revision=entry.revision, local_dir=folder, etag_timeout=WAIT)
        )


def upload(repo: str, files: dict[str, bytes], message: str, *, private: bool) -> str:
    """Put files into a repository in one commit, making it if there is none; where to see them."""
    check_repo(repo)
    hub = _hub()
    with _talking(repo), _quiet():
        api = _api()
        api.create_repo(repo, private=private, exist_ok=True)
        added = [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in files.items()]
        return str(api.create_commit(repo, added, commit_message=message).commit_url)


def check_repo(repo: str) -> str:
    if not REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        raise SharingError(f"{repo!r} is no repository of the Hub: say OWNER/NAME")
    return repo


def _hub() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as cause:
        raise SharingError(
            f"the Hub needs huggingface_hub, which cannot be imported ({cause}): pip install 'bitgraft[hub]'"
        ) from cause


def _api() -> Any:
    return _hub().HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="bitgraft")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, which would get between lines that are read by machines."""
    bars = importlib.import_module("huggingface_hub.utils")
    before = bars.are_progress_bars_disabled()
    bars.disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            bars.enable_progress_bars()


@contextlib.contextmanager
def _talking(repo: str) -> Iterator[None]:
    """Turn whatever the Hub or the way to it does into one sentence, without anybody's token in it."""
    errors = importlib.import_module("huggingface_hub.errors") if _hub() else None
    try:
        yield
    except errors.GatedRepoError:  # type: ignore[union-attr]
        raise SharingError(f"{repo} is gated: ask for access on its page, then `hf auth login`") from None
    except errors.RepositoryNotFoundError:  # type: ignore[union-attr]
        raise SharingError(
            f"the Hub has no repository {repo}, or keeps it from you: check the name, or log in with `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:  # type: ignore[union-attr]
        raise SharingError(f"{repo} has no such revision on the Hub") from None
    except SharingError:
        raise
    except Exception as cause:  # among them those of the HTTP library beneath, which differs from version to version
        code = getattr(getattr(cause, "response", None), "status_code", None)
        if code is not None:
            remedy = "log in with `hf auth login`, with a token that may do this" if code in (401, 403) else "try again"
            raise SharingError(f"the Hub refused ({code}) for {repo}: {remedy}") from None
        said = SECRET.sub("…", str(cause).strip().partition("\n")[0])
        raise SharingError(f"the Hub could not be asked about {repo} ({type(cause).__name__}: {said})") from None
