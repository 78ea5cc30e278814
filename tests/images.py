"""Small image folders and runs of the command line that several test files share."""

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bitgraft.cli import main as cli

SOURCE = """
import torch
from torch import nn

torch.set_num_threads(1)

def build(num_classes=5, width=8):
    layers = [nn.Conv2d(3, width, 3, stride=2, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))

def other():
    return build(width=12)


def wide(num_classes=5):
    layers = [nn.Conv2d(3, 64, 3, stride=2, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers += [nn.Conv2d(64, 192, 3, bias=False), nn.BatchNorm2d(192), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, num_classes))
"""
NET = "own_net:build"
COLOURS = {"blue": (40, 40, 200), "green": (40, 200, 40), "red": (200, 40, 40)}


def photos(folder: Path, *, train: int = 8, val: int = 3, test: int = 3, classes: Any = tuple(COLOURS)) -> Path:
    """Noisy squares of one colour each, 16 pixels wide."""
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val), ("test", test)):
        for name in classes:
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                noise = rng.integers(-40, 40, (16, 16, 3))
                pixels = np.clip(np.asarray(COLOURS[name]) + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    return folder


def furnish(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images and a network of one's own in a folder, which becomes the current one."""
    photos(folder / "photos")
    (folder / "own_net.py").write_text(SOURCE)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    return folder


def fork(*args: str, prepare: Callable[[], None] = lambda: None) -> int:
    """The command line in a process of its own, as if it had just been started, without the seconds that imports take.
    What it says goes to the files PID.out and PID.err in the current folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking is safe here: nobody holds a lock
        process = os.fork()
    if process:
        return process
    code: Any = 99
    try:
        sys.argv = ["bitgraft", *args]
        sys.stdout, sys.stderr = (open(f"{os.getpid()}.{end}", "w") for end in ("out", "err"))  # noqa: SIM115
        prepare()
        cli.main()
    except SystemExit as left:
        code = left.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def ended(process: int) -> tuple[int, str]:
    """The exit code (or minus the signal) of a forked command, and what it complained of."""
    _, status = os.waitpid(process, 0)
    err = Path(f"{process}.err")
    return os.waitstatus_to_exitcode(status), err.read_text() if err.exists() else ""


def exit_code(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """The command line in this process."""
    monkeypatch.setattr(sys, "argv", ["bitgraft", *args])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


def bitgraft(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[int, str, str]:
    """The command line in this process: exit code, standard output, standard error."""
    code = exit_code(monkeypatch, *args)
    captured = capsys.readouterr()
    return code, captured.out, captured.err
