"""The Hugging Face Hub, through huggingface_hub, which handles authentication (`hf auth login`, HF_TOKEN)."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, errors

from bitgraft.errors import SharingError

PREFIX = "hf:"
REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
TIMEOUT = 30.0  # seconds per request for metadata
SECRET = re.compile(r"hf_\w+|(?<=://)[^/@\s]+@")


def model_info(repo: str, revision: str | None) -> Any:
    """Return a repository's files and their commit (`sha`)."""
    with _explained(repo):
        return _api().model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT)


def download(repo: str, file: str, revision: str, folder: Path) -> Path:
    with _explained(repo):
        return Path(_api().hf_hub_download(repo, file, revision=revision, local_dir=folder, etag_timeout=TIMEOUT))


def upload(repo: str, files: dict[str, bytes], message: str, *, private: bool) -> str:
    """Commit files to a repository, which is created if needed; return the commit's URL."""
    with _explained(repo):
        _api().create_repo(repo, private=private, exist_ok=True)
        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in files.items()]
        return str(_api().create_commit(repo, added, commit_message=message).commit_url)


def check_repo(repo: str) -> str:
    if not REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        raise SharingError(f"{repo!r} is not the name of a Hub repository: give OWNER/NAME")
    return repo


def _api() -> HfApi:
    return HfApi(library_name="bitgraft")


@contextlib.contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn any error of the Hub into a `SharingError` without tokens."""
    try:
        yield
    except errors.GatedRepoError:
        raise SharingError(f"{repo} is gated: request access on its page, then log in with `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise SharingError(
            f"the Hub has no repository {repo}, or it is private: check the name, or log in with `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise SharingError(f"{repo} has no such revision on the Hub: check @REVISION") from None
    except Exception as cause:  # includes those of the HTTP library, which depends on the version
        code = getattr(getattr(cause, "response", None), "status_code", None)
        if code is not None:
            remedy = "log in with `hf auth login`, with a token that has access" if code in (401, 403) else "try again"
            raise SharingError(f"the Hub refused the request for {repo} ({code}): {remedy}") from None
        message = SECRET.sub("…", str(cause).strip().partition("\n")[0])
        raise SharingError(f"request for {repo} to the Hub failed ({type(cause).__name__}: {message})") from None
