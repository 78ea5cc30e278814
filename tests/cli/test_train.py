"""`bitgraft train`: its output and files, its errors, interrupts and resuming."""

import errno
import json
import os
import re
import shutil
import signal
import sys
import tomllib
from types import SimpleNamespace

import pytest
from images import NET, bitgraft, ended, fork, furnish, photos

from bitgraft import read_archive
from bitgraft.cli.training import _kept_epoch
from bitgraft.training import runs
from bitgraft.training.loop import _Run

ANY_LENGTH = ("--backbone", NET, "--size", "16", "--batch", "8")
SET = (*ANY_LENGTH, "--epochs", "2")
RUN = ("--task", "colours", *SET)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The command line in a folder with images and a network."""
    furnish(tmp_path, monkeypatch)
    return lambda *args: bitgraft(capsys, monkeypatch, *args)


def stored(folder):
    return sorted(
        str(p.relative_to(folder / "bitgraft-store")) for p in (folder / "bitgraft-store").rglob("*") if p.is_file()
    )


def test_from_a_folder_to_a_task_file(run, tmp_path):
    code, out, err = run("train", "photos", *RUN)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "photos: 3 classes, images: 24 to train, 9 to validate, 9 to test"
    assert re.fullmatch(r"epoch 1/2  loss .* train .* val .* images/s  \d+ s left", lines[2])
    assert lines[-1] == "next: bitgraft predict IMAGE --task colours"
    assert stored(tmp_path) == ["colours.safetensors", "runs/colours/metrics.jsonl", "store.json"]
    records = [
        json.loads(line) for line in (tmp_path / "bitgraft-store/runs/colours/metrics.jsonl").read_text().splitlines()
    ]
    assert [record["epoch"] for record in records] == [1, 2]
    archive = read_archive(tmp_path / "bitgraft-store/colours.safetensors")
    assert archive.metadata.classes == ("blue", "green", "red")
    assert archive.metadata.preprocessing["size"] == [16, 16]
    assert archive.metrics["test"]["accuracy"] > 0.3


def test_the_store_knows_its_backbone_and_json_is_all_that_is_printed(run, tmp_path):
    assert run("train", "photos", *RUN)[0] == 0
    code, out, err = run(
        "train", "photos", "--task", "b", "--size", "16", "--epochs", "1", "--method", "simple", "--option", "k1=0",
        "--keep", "best", "--class-weights", "balanced", "--json",
    )  # fmt: skip
    report = json.loads(out)
    assert code == 0
    assert "epoch 1/1" in err
    assert (report["task"], report["method"], len(report["history"])) == ("b", "simple", 1)
    assert read_archive(report["file"]).metadata.options["k1"] == 0


def test_the_same_command_gives_the_same_bytes(run, tmp_path):
    files = []
    for seed in ("0", "0", "1"):
        assert run("train", "photos", *RUN, "--seed", seed, "--overwrite")[0] == 0
        files.append((tmp_path / "bitgraft-store/colours.safetensors").read_bytes())
    assert files[0] == files[1]
    assert files[0] != files[2]


def test_the_budget_is_said_before_training_and_minutes_bound_it(run):
    whole = ("--patience", "1000000")  # or it stops before the last epoch
    code, out, _ = run("train", "photos", *ANY_LENGTH, "--task", "a", "--minutes", "0.02", *whole)
    assert code == 0
    said = re.search(r"(\d+) epochs, ([\d,]+) steps: about .*; twice as many \(--steps \d+\) would take", out)
    assert said is not None
    assert out.index(said[0]) < out.index("epoch ")
    assert f"epoch {int(said[1]):>{len(said[1])}}/{said[1]}" in out


def test_a_run_that_loses_to_the_linear_probe_says_so(run):
    spoilt = ("--rate", "norms=1000", "--method", "norms", "--schedule", "constant", "--warmup", "0")
    code, out, _ = run("train", "photos", *RUN, *spoilt, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["metrics"]["best"]["epoch"] == 0
    assert report["metrics"]["best"]["val_accuracy"] > report["metrics"]["last"]["val_accuracy"]
    out = run("train", "photos", *RUN, *spoilt, "--overwrite")[1]
    assert "kept the linear probe that training started from (" in out
    assert "train longer (--steps)" in out


@pytest.mark.parametrize(("accuracy", "advised"), [(1.0, False), (0.9, True)])
@pytest.mark.parametrize("epoch", [0, 18])
def test_only_a_worse_last_epoch_is_a_reason_for_advice(epoch, accuracy, advised):
    kept, last = {"epoch": epoch, "val_accuracy": 1.0}, {"epoch": 85, "val_accuracy": accuracy}
    result = SimpleNamespace(best=kept, history=[last], task=SimpleNamespace(metrics={"kept": "best"}))
    note = _kept_epoch(result)
    assert note.startswith("kept ")
    assert ("--rate" in note) == advised


def test_show_config(run, tmp_path):
    code, out, _ = run("train", "--show-config", "--preset", "decathlon", "--rate", "k=3e-3", "--weight-decay", "1e-4")
    config = tomllib.loads(out)
    assert code == 0
    assert (config["epochs"], config["drop_after"], config["resize"]) == (60, 45, 72)
    assert config["rates"].items() >= {"scores": 1e-4, "k": 3e-3, "norms": 1e-4, "head": 1e-3}.items()
    assert set(config["weight_decay"].values()) == {1e-4}
    shown = json.loads(run("train", "--show-config", "--schedule", "constant", "--no-flip", "--json")[1])
    assert (shown["preset"], shown["schedule"], shown["flip"]) == ("default", "constant", False)
    assert (config["options"], shown["options"]) == ({}, {"per": "channel"})  # the paper has one k per layer
    asked = run("train", "--show-config", "--option", "per=layer", "--option", "k1=0", "--json")[1]
    assert json.loads(asked)["options"] == {"per": "layer", "k1": 0}
    assert not (tmp_path / "bitgraft-store").exists()


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_file_of_settings_is_read_as_it_was_printed(run, tmp_path, form):
    asked = ("--preset", "decathlon", "--method", "simple", "--steps", "7", "--rate", "k=3e-3", "--option", "k1=0")
    printed = run("train", "--show-config", *asked, *form)[1]
    (tmp_path / "mine").write_text(printed)
    assert run("train", "--show-config", "--config", "mine", *form) == (0, printed, "")
    code, out, _ = run("train", "--show-config", "--config", "mine", "--epochs", "2", "--method", "simple", "--json")
    shown = json.loads(out)
    assert (code, shown["epochs"], shown["steps"]) == (0, 2, None)
    assert (shown["method"], shown["preset"]) == ("simple", "decathlon")
    assert shown["rates"]["k"] == 3e-3


@pytest.mark.parametrize("option", ["--quick", "--preset decathlon", "--method lora"])
def test_a_file_of_settings_is_for_its_own_preset_and_method(run, tmp_path, option):
    (tmp_path / "mine.toml").write_text(run("train", "--show-config")[1])
    code, out, err = run("train", "--show-config", "--config", "mine.toml", *option.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{option} does not go with mine.toml, which is for " in err
    assert f"leave out {option}, or keep in the file only the settings that you changed" in err


def test_a_file_may_set_only_some_settings(run, tmp_path):
    (tmp_path / "mine.toml").write_text("label_smoothing = 0.2\n[options]\nper = 'layer'\n")
    shown = json.loads(run("train", "--show-config", "--config", "mine.toml", "--json")[1])
    assert (shown["label_smoothing"], shown["options"], shown["steps"]) == (0.2, {"per": "layer"}, "auto")
    shown = json.loads(run("train", "--show-config", "--config", "mine.toml", "--quick", "--json")[1])
    assert (shown["label_smoothing"], shown["preset"], shown["steps"]) == (0.2, "quick", 250)
    code, _, err = run("train", "--show-config", "--config", "mine.toml", "--method", "lora")
    assert (code, "has no option 'per'; it takes" in err, "check [options] in the --config file" in err) == (2, 1, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [("epoch = 3", "there is no setting 'epoch'; did you mean 'epochs'?"), ("options = 3", "options=3: give a table")],
)
def test_a_wrong_file_of_settings_is_one_sentence(run, tmp_path, text, said):
    (tmp_path / "wrong.toml").write_text(text)
    code, _, err = run("train", "photos", *RUN, "--config", "wrong.toml")
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


def test_one_class_is_refused_and_few_images_cause_a_warning(run, tmp_path):
    photos(tmp_path / "one", classes=("red",))
    code, _, err = run("train", "one", *RUN)
    assert (code, err.count("\n")) == (1, 1)
    assert "one has only one class, 'red': training needs at least two" in err
    assert not (tmp_path / "bitgraft-store").exists()
    photos(tmp_path / "few", train=2)
    code, out, _ = run("train", "few", *RUN)
    assert code == 0
    assert "warning: 3 of 3 classes have fewer than 5 training images" in out


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ((), 2, "bitgraft train DATA --task NAME"),
        (("photos",), 2, "bitgraft train DATA --task NAME"),
        (("photos", "--task", "a"), 2, "no store at bitgraft-store yet: create it with --backbone"),
        (("photos", *RUN, "--method", "fll"), 2, "did you mean 'full'"),
        (("photos", *RUN, "--option", "k9=1"), 2, "no option 'k9'"),
        (("photos", *RUN, "--option", "k1"), 2, "give NAME=VALUE"),
        (("photos", *RUN, "--option", "per=row"), 2, "per='row'"),
        (("photos", *RUN, "--preset", "fast"), 2, "known are default, quick"),
        (("photos", *RUN, "--config", "none.toml"), 2, "--config none.toml cannot be read: No such file"),
        (("photos", *RUN, "--config", "photos/train/red/0.png"), 2, "cannot be read"),
        (("photos", *RUN, "--rate", "masks=1"), 2, "rates names the role 'masks'; roles are"),
        (("photos", *RUN, "--rate", "k=fast"), 2, "give ROLE=NUMBER"),
        (("photos", *RUN, "--weight-decay", "k=-1"), 2, "numbers must be finite, and not negative"),
        (
            ("photos", *RUN, "--schedule", "linear"),
            2,
            "--schedule must be one of 'step', 'cosine',",
        ),
        (("photos", *RUN, "--epochs", "0"), 2, "--epochs must be at least 1; see `bitgraft train --help`"),
        (("photos", *RUN, "--bits", "99"), 2, "--bits must be at most 4"),
        (("photos", *RUN, "--bits", "few"), 2, "--bits must be a number"),
        (("photos", *RUN, "--steps", "1.5"), 2, "--steps must be a whole number"),
        (("photos", "--task"), 2, "--task needs a value; see `bitgraft train --help`"),
        (("photos", *RUN, "--steps", "9"), 2, "only one of --epochs, --steps and --minutes"),
        (("photos", *RUN, "--quick", "--preset", "decathlon"), 2, "--quick is --preset quick"),
        (("photos", *ANY_LENGTH, "--task", "a", "--minutes", "1e-9"), 1, "allow more"),
        (("photos", *ANY_LENGTH, "--task", "a", "--minutes", "inf"), 2, "minutes=inf: give a number above 0, at most"),
        (("photos", *RUN, "--seed", "99999999999999999999999"), 2, "give a whole number, at least 0 and below 2**63"),
        (("nowhere", *RUN), 1, "there is no folder nowhere; give a FOLDER with one subfolder per class, or one of"),
        (("photos", *RUN, "--backbone", "own_net:nothing"), 2, "own_net:nothing"),
        (("photos", *RUN, "--resume"), 1, "no run of task 'colours' to resume"),
        (("photos", *RUN, "--resize", "8"), 1, "resize at least"),
        (("photos", *RUN, "--mixed-precision", "fp16"), 1, "--mixed-precision fp16"),
        (("photos", *RUN, "--tensorboard"), 1, "pip install '.[tensorboard]'"),
        (("photos", *SET, "--task", "../x"), 1, "../x"),
        (("photos", *RUN, "--rate", "1e38", "--method", "finetune", "--schedule", "constant"), 1, "loss is not finite"),
    ],
)
def test_a_wrong_command_is_one_sentence_and_leaves_no_task(run, tmp_path, monkeypatch, args, code, said):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as if it were not installed
    left, _, err = run("train", *args)
    assert left == code
    assert said in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert [name for name in stored(tmp_path) if name != "store.json"] == []


def test_a_task_that_is_there_and_a_store_of_another_backbone(run, tmp_path):
    assert run("train", "photos", *RUN)[0] == 0
    before = (tmp_path / "bitgraft-store/colours.safetensors").read_bytes()
    assert "already has a task 'colours'" in run("train", "photos", *RUN)[2]
    assert "no run of task 'colours' to resume" in run("train", "photos", *RUN, "--resume")[2]
    code, _, err = run("train", "photos", "--backbone", "own_net:other", "--task", "b", "--size", "16")
    assert code == 1
    assert "a store holds the tasks of one backbone" in err
    assert (tmp_path / "bitgraft-store/colours.safetensors").read_bytes() == before


def test_empty_class_and_no_data(run, tmp_path):
    assert "no data set at 'nowhere'" in run("train", "nowhere", *RUN)[2]
    (tmp_path / "photos/train/yellow").mkdir()
    code, _, err = run("train", "photos", *RUN)
    assert code == 1
    assert "hold no image: yellow" in err
    assert not (tmp_path / "bitgraft-store").exists()


def devkit(folder, val_category):
    """Write the colours as a decathlon domain, with one val image of the given category."""
    (folder / "kit/annotations").mkdir(parents=True)
    for part in ("train", "val"):
        files = sorted((folder / "photos" / part).rglob("*.png"))
        names = sorted({file.parent.name for file in files})
        images = [{"id": n, "file_name": os.path.relpath(file, folder / "kit")} for n, file in enumerate(files)]
        given = [{"image_id": n, "category_id": names.index(file.parent.name)} for n, file in enumerate(files)]
        if part == "val":
            given[0]["category_id"] = val_category
        content = {
            "categories": [{"id": n, "name": name} for n, name in enumerate(names)],
            "images": images,
            "annotations": given,
        }
        (folder / f"kit/annotations/colours_{part}.json").write_text(json.dumps(content))


def test_labels_outside_the_head_are_one_sentence(run, tmp_path):
    devkit(tmp_path, val_category=7)
    code, _, err = run("train", "kit:colours", *RUN)
    assert code == 1
    assert err.count("\n") == 1
    assert "colours_val.json: 1 category ids are not among the categories, first [7]" in err
    assert not (tmp_path / "bitgraft-store").exists()
    photos(tmp_path / "more")
    (tmp_path / "more/val/yellow").mkdir()
    (tmp_path / "more/val/red/0.png").rename(tmp_path / "more/val/yellow/0.png")
    code, _, err = run("train", "more", *RUN)
    assert code == 1
    assert err.count("\n") == 1
    assert "yellow" in err
    assert not (tmp_path / "bitgraft-store").exists()


@pytest.mark.parametrize("preset", ["quick", "decathlon"])
def test_the_loop_reports_labels_outside_the_head(run, tmp_path, monkeypatch, preset):
    """The loop checks labels of any data set, with and without head initialisation."""
    from bitgraft.data.dataset import ImageDataset

    real = ImageDataset.__getitems__
    monkeypatch.setattr(ImageDataset, "__getitems__", lambda *args: [(image, 9) for image, _ in real(*args)])
    code, _, err = run("train", "photos", *RUN, "--preset", preset, "--resize", "18")
    assert code == 1
    assert err.count("\n") == 1
    assert "the training data of task 'colours' has the label 9, but task 'colours' has 3 classes" in err
    assert stored(tmp_path) == ["store.json"]


def test_a_nan_loss_keeps_the_last_good_state(run, tmp_path, monkeypatch):
    """The loss becomes NaN in the second epoch; the checkpoint of the first resumes to the same result."""
    expected, _ = uninterrupted(run, tmp_path, *RUN)
    real, steps = _Run._step, []

    def step(self, *args):
        real(self, *args)
        steps.append(1)
        if len(steps) == 5:
            self.sums[0] = float("nan")

    with monkeypatch.context() as patch:
        patch.setattr(_Run, "_step", step)
        code, _, err = run("train", "photos", *RUN)
    assert code == 1
    assert err.count("\n") == 1
    assert "the loss is not finite in epoch 2 at or shortly before step 2" in err
    assert "the last good state is in bitgraft-store/runs/colours/state.pt" in err
    assert run("train", "photos", *RUN, "--resume")[0] == 0
    assert (tmp_path / "bitgraft-store/colours.safetensors").read_bytes() == expected


JOINT = (
    "train", "photos", "more", "--task", "a", "--task", "b", "--method", "adapters-joint", "--backbone", NET,
    "--size", "16", "--batch", "8", "--epochs", "2", "--store", "joint",
)  # fmt: skip


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.suffix == ".safetensors"}


def test_several_data_sets_jointly(run, tmp_path):
    photos(tmp_path / "more", classes=("blue", "red"))
    assert run("train", "photos", *RUN)[0] == 0  # an ordinary store of the same backbone
    before = files(tmp_path / "bitgraft-store")
    code, out, err = run(*JOINT)
    assert (code, err) == (0, "")
    assert "training a, b with method adapters-joint on own_net:build" in out
    assert "test accuracy of b" in out
    made = files(tmp_path / "joint")
    assert set(made) == {"a.safetensors", "b.safetensors", "weights/backbone.safetensors"}
    assert not (tmp_path / "joint/runs/_joint/state.pt").exists()
    assert read_archive(tmp_path / "joint/b.safetensors").metadata.classes == ("blue", "red")
    assert read_archive(tmp_path / "joint/b.safetensors").format == 2  # rounded, as any other
    code, out, _ = run("eval", "more", "--task", "b", "--store", "joint", "--json")
    assert code == 0
    accuracy = json.loads(out)["accuracy"]
    assert accuracy == pytest.approx(read_archive(tmp_path / "joint/b.safetensors").metrics["test"]["accuracy"])
    shutil.copy(tmp_path / "joint/b.safetensors", tmp_path / "bitgraft-store/b.safetensors")
    code, _, err = run("eval", "more", "--task", "b")
    assert code == 1
    assert "belongs to a backbone with fingerprint" in err
    (tmp_path / "bitgraft-store/b.safetensors").unlink()
    assert files(tmp_path / "bitgraft-store") == before
    code, _, err = run(*JOINT)
    assert code == 1
    assert "there is a store at joint already" in err
    code, _, err = run(*JOINT[:-2])
    assert code == 1
    assert "there is a store at bitgraft-store already" in err
    code, out, _ = run("train", "photos", "--task", "c", "--size", "16", "--epochs", "1", "--store", "joint")
    assert code == 0  # a further task, of another method
    assert files(tmp_path / "joint").items() >= made.items()


def test_a_joint_run_may_keep_its_norm_layers_as_they_are(run, tmp_path):
    photos(tmp_path / "more", classes=("blue", "red"))
    assert run(*JOINT, "--no-compact")[0] == 0
    assert read_archive(tmp_path / "joint/b.safetensors").format == 1


def test_an_interrupted_joint_command_resumes_to_the_same_bytes(run, tmp_path):
    photos(tmp_path / "more", classes=("blue", "red"))
    assert run(*JOINT)[0] == 0
    expected = files(tmp_path / "joint")
    (tmp_path / "joint").rename(tmp_path / "whole")
    code, err = ended(fork(*JOINT, prepare=lambda: signal_in_step_4(signal.SIGTERM)))
    assert code == 130
    command = err.strip().splitlines()[-1].split()
    assert command[-1] == "--resume"
    assert "was interrupted: pass --resume" in run(*JOINT)[2]
    for count in range(30):  # killed at each file that is still to be written
        process = fork(*command[1:], prepare=lambda n=count: after(n, die, "replace"))
        if ended(process)[0] != -signal.SIGKILL:
            break
    assert count > 3
    assert files(tmp_path / "joint") == expected
    assert run("eval", "photos", "--task", "a", "--store", "joint")[0] == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("train", "photos", "photos", "--task", "a", "--backbone", NET), "(data sets: 2, tasks: 1)"),
        (("train", "photos", "photos", "--task", "a", "--task", "b", "--backbone", NET), "only a joint method"),
        ((*JOINT[:9], "--store", "none"), "create it with --backbone"),
    ],
)
def test_a_wrong_joint_command(run, args, said):
    code, _, err = run(*args)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1


def test_a_class_missing_from_validation_is_a_warning(run, tmp_path):
    for path in (tmp_path / "photos/val/red").iterdir():
        path.unlink()
    code, out, _ = run("train", "photos", *RUN)
    assert code == 0
    assert "warning: 1 of 3 classes have no validation image, so validation says nothing about it: red" in out


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_unreadable_image_is_named_or_skipped(run, tmp_path, workers):
    bad = tmp_path / "photos/train/red/3.png"
    bad.write_bytes(b"not an image")
    code, _, err = run("train", "photos", *RUN, "--workers", workers)
    assert code == 1
    assert err.count("\n") == 1
    assert "photos/train/red/3.png" in err
    assert "--skip-bad-images" in err
    assert stored(tmp_path) == ["store.json"]
    code, out, err = run("train", "photos", *RUN, "--workers", workers, "--skip-bad-images")
    assert (code, err) == (0, "")
    assert "skipped 1 unreadable files:\n  photos/train/red/3.png: it is not an image that PIL knows" in out


def allowed(tmp_path, run, most):
    """Return how many writes succeed: one more in each run, fewer once there is a checkpoint."""
    return run % most if (tmp_path / "bitgraft-store/runs/colours/state.pt").exists() else run


def after(count, action, call, monkeypatch=None):
    """Replace a function of `os` by `action` after `count` calls."""
    real, left = getattr(os, call), [count]

    def replaced(*args, **kwargs):
        left[0] -= 1
        return action() if left[0] < 0 else real(*args, **kwargs)

    (monkeypatch.setattr if monkeypatch else setattr)(os, call, replaced)


def disk_full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_the_file_and_leaves_nothing_half_written(run, tmp_path, monkeypatch):
    """The disk is full at each of the files that a run writes, one after the other."""
    named = []
    for turn in range(30):
        with monkeypatch.context() as patch:
            after(allowed(tmp_path, turn, 5), disk_full, "fsync", patch)
            begun = (tmp_path / "bitgraft-store/runs/colours/run.json").exists()
            code, _, err = run("train", "photos", *RUN, *["--resume"] * begun)
        assert not list(tmp_path.rglob("*.part"))
        if code == 0:
            break
        assert code == 1
        assert err.count("\n") == 1
        assert "No space left on device" in err
        assert not (tmp_path / "bitgraft-store/colours.safetensors").exists()
        named.append(os.path.basename(err.partition("cannot write ")[2].partition(":")[0]))
        assert ("resume with `bitgraft train" in err) == (tmp_path / "bitgraft-store/runs/colours/state.pt").exists()
    assert {"run.json", "metrics.jsonl", "state.pt", "colours.safetensors"} <= set(named)
    assert stored(tmp_path) == ["colours.safetensors", "runs/colours/metrics.jsonl", "store.json"]


def uninterrupted(run, tmp_path, *args):
    assert run("train", "photos", *args)[0] == 0
    path = tmp_path / "bitgraft-store/colours.safetensors"
    expected, metrics = path.read_bytes(), (tmp_path / "bitgraft-store/runs/colours/metrics.jsonl").read_bytes()
    path.unlink()
    return expected, metrics


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("call", "most"), [("fsync", 5), ("replace", 3)])
def test_a_killed_command_resumes_to_the_same_bytes(run, tmp_path, call, most):
    """Killed repeatedly while it writes: before a file is on disk, and before it is renamed."""
    expected, metrics = uninterrupted(run, tmp_path, *RUN)
    codes = []
    for turn in range(30):
        count = allowed(tmp_path, turn, most)
        begun = (tmp_path / "bitgraft-store/runs/colours/run.json").exists()
        process = fork("train", "photos", *RUN, *["--resume"] * begun, prepare=lambda n=count: after(n, die, call))
        codes.append(ended(process)[0])
        if codes[-1] != -signal.SIGKILL:
            break
    assert codes[-1] == 0
    assert len(codes) > 4
    assert (tmp_path / "bitgraft-store/colours.safetensors").read_bytes() == expected
    assert (tmp_path / "bitgraft-store/runs/colours/metrics.jsonl").read_bytes() == metrics
    assert not (tmp_path / "bitgraft-store/runs/colours/state.pt").exists()


def signal_in_step_4(signum):
    real, steps = _Run._step, []

    def step(*args):
        steps.append(1)
        if len(steps) == 4:
            os.kill(os.getpid(), signum)
        return real(*args)

    _Run._step = step


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_the_state_and_prints_how_to_resume(run, tmp_path, signum):
    expected, _ = uninterrupted(run, tmp_path, *RUN)
    code, err = ended(fork("train", "photos", *RUN, prepare=lambda: signal_in_step_4(signum)))
    assert code == 130
    assert "Traceback" not in err
    command = err.strip().splitlines()[-1].strip()
    assert command == f"bitgraft train photos {' '.join(RUN)} --resume"
    assert "was interrupted: pass --resume" in run("train", "photos", *RUN)[2]
    code, _, err = run("train", "photos", *RUN, "--resume", "--batch", "4")
    assert code == 1
    assert "batch was 8, is 4" in err
    code, _, err = run("train", "photos", *RUN, "--resume", "--method", "simple")
    assert "method was" in err
    code, out, err = run(*command.split()[1:])
    assert (code, err) == (0, "")
    assert "resuming colours" in out
    assert (tmp_path / "bitgraft-store/colours.safetensors").read_bytes() == expected


def test_two_commands_on_one_store(run, tmp_path):
    names = ("a", "b")
    running = [fork("train", "photos", *SET, "--task", name) for name in names]
    assert [ended(process) for process in running] == [(0, "")] * 2
    assert sorted(p.stem for p in (tmp_path / "bitgraft-store").glob("*.safetensors")) == ["a", "b"]
    out = run("tasks", "--json")[1]
    assert [row["name"] for row in json.loads(out)["tasks"]] == ["a", "b"]
    assert all("error" not in row for row in json.loads(out)["tasks"])


def test_a_task_that_another_command_is_training(run, tmp_path):
    with runs.occupied(tmp_path / "bitgraft-store/runs/colours"):
        code, _, err = run("train", "photos", *RUN)
    assert code == 1
    assert "another command is training in bitgraft-store/runs/colours" in err


def test_tensorboard(run, tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((os.path.basename(folder), purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, step))

        def flush(self):
            pass

        def close(self):
            written.append("closed")

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    assert run("train", "photos", *RUN, "--tensorboard")[0] == 0
    assert written[0] == ("tensorboard", 1)
    assert ("accuracy/val", 2) in written
    assert written[-1] == "closed"
