"""A killed or failed save leaves the old file or none, and the error names the file."""

import contextlib
import dataclasses
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import bitgraft
from bitgraft.backbone import files
from bitgraft.errors import ArchiveError, CorruptError
from bitgraft.format import archive

torch.set_num_threads(1)
GOLDEN = bitgraft.read_archive(Path(__file__).parents[1] / "golden" / "format-1.safetensors")
OLD, NEW = (archive.to_bytes(dataclasses.replace(GOLDEN, metrics={"version": version})) for version in ("old", "new"))
KILLS = 24

# Saves to the same path in a loop, slowed down so that kills hit every stage of a save.
SAVING = """
import os, sys, time
from bitgraft.backbone import files

def slow(function):
    def call(*args, **kwargs):
        time.sleep(0.004)
        result = function(*args, **kwargs)
        time.sleep(0.004)
        return result
    return call

class Slow:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *error): self.file.close()
    def __getattr__(self, name): return getattr(self.file, name)
    def write(self, data):
        for start in range(0, len(data), 100):
            self.file.write(data[start : start + 100])
            self.file.flush()
            time.sleep(0.001)

fdopen = os.fdopen
os.fdopen = lambda *args: Slow(fdopen(*args))
os.open, os.fsync, os.replace = map(slow, (os.open, os.fsync, os.replace))
path, *versions = sys.argv[1:]
versions = [open(version, "rb").read() for version in versions]
print("ready", flush=True)
while True:
    for version in versions:
        files.write_atomically(path, version)
"""


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob(".bitgraft-*.part"))


def wait_for(moment: str, target: Path, known: set[Path], rng: random.Random) -> None:
    """Wait for a random time, until a part file grows, or until the new file is in place."""
    if moment == "random":
        return time.sleep(rng.uniform(0, 0.1))
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if moment == "placed" and target.exists() and target.read_bytes() == NEW:
            return None
        if moment == "growing":
            grown = [part for part in parts(target.parent) if part not in known]
            with contextlib.suppress(FileNotFoundError):
                if any(0 < part.stat().st_size < len(NEW) // 2 for part in grown):
                    return None
    pytest.fail(f"the child was not {moment} within 20 s")


def test_a_killed_save_leaves_the_old_file_or_the_new_one_or_none(tmp_path: Path) -> None:
    folder, rng = tmp_path / "store", random.Random(0)
    folder.mkdir()
    target = folder / "t.safetensors"
    (tmp_path / "old").write_bytes(OLD)
    (tmp_path / "new").write_bytes(NEW)
    command = [sys.executable, "-c", SAVING, str(target), str(tmp_path / "new"), str(tmp_path / "old")]
    found, cut = set(), 0
    for kill in range(KILLS):
        target.unlink(missing_ok=True)
        if kill % 2:
            target.write_bytes(OLD)
        known = set(parts(folder))
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            wait_for(("random", "random", "growing", "growing", "placed")[kill % 5], target, known, rng)
            child.kill()
            assert child.wait() == -signal.SIGKILL
        found.add(bitgraft.read_archive(target).metrics["version"] if target.exists() else "none")
        cut += any(part.stat().st_size < len(NEW) for part in set(parts(folder)) - known)
        assert [path for path in folder.iterdir() if path not in parts(folder)] in ([], [target])
    assert found == {"none", "old", "new"}, "kills should come before, during and after a save"
    assert cut >= 4, "kills should interrupt saves"
    for part in parts(folder):
        if part.stat().st_size < len(OLD):
            with pytest.raises(CorruptError):
                bitgraft.read_archive(part)


def test_old_part_files_are_removed(tmp_path: Path) -> None:
    stale, fresh, other = (tmp_path / name for name in (".bitgraft-1.part", ".bitgraft-2.part", ".other.part"))
    for path in (stale, fresh, other):
        path.write_bytes(b"half a task")
    for path in (stale, other):
        os.utime(path, (time.time() - 7200,) * 2)
    files.write_atomically(tmp_path / "t", NEW)
    assert sorted(tmp_path.iterdir()) == sorted([fresh, other, tmp_path / "t"])


@pytest.mark.parametrize(
    ("function", "code", "match"),
    [
        ("fsync", errno.ENOSPC, "No space left on device"),
        ("replace", errno.EIO, "Input/output error"),
        ("open", errno.EACCES, "Permission denied"),
    ],
)
def test_a_failing_save_leaves_the_old_file_and_names_the_path(
    function: str, code: int, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    target = tmp_path / "t.safetensors"
    target.write_bytes(OLD)
    with monkeypatch.context() as patched:
        patched.setattr(os, function, fail)
        with pytest.raises(ArchiveError, match=f"cannot write .*t.safetensors: {match}; nothing was changed") as caught:
            archive.save(GOLDEN, target)
    assert isinstance(caught.value.__cause__, OSError)
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == OLD


def test_a_disk_that_fills_up_in_the_middle(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 192), torch.nn.ReLU(), torch.nn.Linear(192, 4))
    net = bitgraft.Network(model, example=(2, 3, 8, 8))
    net.add_task("t", classes=3, method="finetune")
    target = tmp_path / "t.safetensors"
    target.write_bytes(OLD)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(ArchiveError, match=r"cannot write .*t.safetensors: File too large; nothing was changed"):
            net.save_task("t", target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == OLD
    net.save_task("t", target)
    assert target.stat().st_size > 50_000


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError, SystemExit])
def test_an_interrupted_save_cleans_up_and_passes_the_interruption_on(
    interruption: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(handle: int) -> None:
        assert len(parts(tmp_path)) == 1
        raise interruption

    (tmp_path / "t").write_bytes(OLD)
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(interruption):
        files.write_atomically(tmp_path / "t", NEW)
    assert list(tmp_path.iterdir()) == [tmp_path / "t"]
    assert (tmp_path / "t").read_bytes() == OLD


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    for path, match in [
        (tmp_path / "no" / "where" / "t", "there is no folder .*where"),
        (tmp_path / "folder", "it is a folder; give the name of a file"),
        (tmp_path / "pipe", "it is a device or a pipe"),
        ("/dev/null", "it is a device or a pipe"),
        (tmp_path / "file" / "t", "Not a directory"),
        (tmp_path / ("x" * 256), "File name too long"),
        (f"{tmp_path}/nul\0byte", "cannot write"),
    ]:
        with pytest.raises(ArchiveError, match=match):
            files.write_atomically(path, NEW)
    assert sorted(tmp_path.iterdir()) == before
    assert not list((tmp_path / "folder").iterdir())
    with pytest.raises(ArchiveError, match="it is a device or a pipe"):
        files.read_whole(tmp_path / "pipe")


def test_the_longest_name_that_the_system_takes(tmp_path: Path) -> None:
    files.write_atomically(tmp_path / ("x" * 255), NEW)
    assert files.read_whole(tmp_path / ("x" * 255)) == NEW


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "t")
    files.write_atomically(tmp_path / "link", memoryview(b"abc"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "t").read_bytes() == b"abc"


def test_permissions_follow_the_umask_without_touching_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    umask = os.umask
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask is the whole process's"))
    for mask, mode in [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0o000, 0o666)]:
        before = umask(mask)
        try:
            files.write_atomically(tmp_path / "t", NEW)
        finally:
            umask(before)
        assert (tmp_path / "t").stat().st_mode & 0o777 == mode


def test_the_file_is_on_disk_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    fsync, replace = os.fsync, os.replace

    def watch_fsync(handle: int) -> None:
        at = Path(os.readlink(f"/proc/self/fd/{handle}"))
        steps.append(("fsync", at if at.is_dir() else at.stat().st_size))
        fsync(handle)

    def watch_replace(source: Path, target: Path) -> None:
        steps.append(("replace", target.name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    files.write_atomically(tmp_path / "t", NEW)
    assert steps == [("fsync", len(NEW)), ("replace", "t"), ("fsync", tmp_path)]


def test_a_folder_that_cannot_be_flushed_does_not_fail_a_finished_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def no_folders(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "not on this file system")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", no_folders)
    files.write_atomically(tmp_path / "t", NEW)
    assert (tmp_path / "t").read_bytes() == NEW


def test_many_threads_saving_and_reading_one_path_never_see_half_a_file(tmp_path: Path) -> None:
    files.write_atomically(tmp_path / "t", OLD)
    seen: list[bytes] = []
    failures: list[BaseException] = []

    def work(version: bytes) -> None:
        try:
            for _ in range(15):
                files.write_atomically(tmp_path / "t", version)
                seen.append(bytes(files.read_whole(tmp_path / "t")))
        except BaseException as failure:  # for the main thread, where it fails the test
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(version,)) for version in (OLD, NEW, OLD, NEW)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(seen) == 60
    assert set(seen) <= {OLD, NEW}
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_saving_does_not_need_torch() -> None:
    code = "import sys; from bitgraft.backbone import files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
