"""`bitgraft train` under torchrun and accelerate, as from a terminal."""

import signal
import sys

import pytest
import torch
from images import NET, SOURCE, photos
from launching import ACCELERATE, TORCHRUN, launched

from bitgraft import read_archive

EPOCHS = 60
COMMAND = """
import atexit, os
from bitgraft.cli.main import main
if "RANK" in os.environ:  # gloo's threads can abort the interpreter as it ends; here it always aborts
    atexit.register(os.abort)
main()
"""
RUN = (
    "train", "photos", "--backbone", NET, "--task", "colours", "--size", "16", "--resize", "18", "--batch", "8",
    "--preset", "decathlon", "--epochs", str(EPOCHS), "--method", "classifier",
)  # fmt: skip


@pytest.fixture
def place(tmp_path):
    photos(tmp_path / "photos")
    source = SOURCE.replace("nn.Dropout(0.3)", "nn.Identity()")  # processes have different seeds
    (tmp_path / "own_net.py").write_text(source)
    (tmp_path / "command.py").write_text(COMMAND)
    return tmp_path


def run(launcher, place, *args):
    return launched(*launcher, str(place / "command.py"), *RUN, *args, folder=place)


def test_two_processes_interrupted_twice_end_as_one_does(place):
    """Ctrl-C, which reaches all processes twice; then SIGTERM; then the run finishes."""
    with run((sys.executable,), place, "--store", "one") as one, run(TORCHRUN, place, "--store", "two") as first:
        first.wait_for(f" 3/{EPOCHS}  loss")
        first.signal(signal.SIGINT)
        assert first.ended() != 0
        assert one.ended() == 0, one.err
    assert "SIGABRT" not in first.err
    command = f"bitgraft {' '.join(RUN)} --store two --resume  (under the same launcher)"
    assert "interrupted; the state is saved. To resume:\n  " + command in first.err
    with run(TORCHRUN, place, "--store", "two", "--resume") as second:
        second.wait_for("  loss")
        second.process.send_signal(signal.SIGTERM)  # to the launcher alone, as a scheduler might
        assert second.ended() != 0
    assert command in second.err
    assert "epoch  1/" not in second.out
    with run(ACCELERATE, place, "--store", "two", "--resume") as third:
        assert third.ended() == 0, third.err
    assert third.out.count("resuming colours") == 1  # only the main process prints
    assert third.out.splitlines()[-1] == "next: bitgraft predict IMAGE --task colours --store two"
    left = {str(p.relative_to(place / "two")) for p in (place / "two").rglob("*") if p.is_file()}
    assert left == {"colours.safetensors", "runs/colours/metrics.jsonl", "store.json"}
    mine, theirs = (read_archive(place / name / "colours.safetensors") for name in ("one", "two"))
    assert set(mine.tensors) == set(theirs.tensors)
    for name, tensor in mine.tensors.items():
        assert torch.allclose(torch.as_tensor(tensor), torch.as_tensor(theirs.tensors[name]), atol=1e-5), name
    assert len((place / "two/runs/colours/metrics.jsonl").read_text().splitlines()) == EPOCHS


def test_an_error_in_one_process_ends_all(place):
    """The unreadable image is in the shard of one process."""
    (place / "photos/train/red/3.png").write_bytes(b"not an image")
    with run(TORCHRUN, place) as group:
        assert group.ended() != 0
    assert "cannot read photos/train/red/3.png: it is not an image that PIL knows" in group.err
    assert "gloo" not in group.err
    assert "SIGABRT" not in group.err
    assert not (place / "bitgraft-store/runs").exists()
