"""Train tasks of a store from Python, with callbacks, run folders and progress output."""

import io
import json

import pytest
import torch
from images import NET, furnish
from rich.console import Console

from bitgraft.errors import DataError, TrainingError
from bitgraft.store import Backbone, Store
from bitgraft.training import runs
from bitgraft.training.callbacks import Plan
from bitgraft.training.presets import QUICK
from bitgraft.training.progress import Progress, format_duration
from bitgraft.workflows.train_jointly import train_jointly
from bitgraft.workflows.train_task import Request, one_sentence, open_request, open_store, train

CONFIG = QUICK.changed(epochs=2, batch=8, size=16)


@pytest.fixture
def place(tmp_path, monkeypatch):
    return furnish(tmp_path, monkeypatch)


def test_packnet_tasks_depend_on_earlier_ones(place):
    store, net = open_store("store", Backbone(NET))
    first = train(store, net, Request("photos", "a", "packnet", CONFIG.changed(epochs=1)))
    assert first.path == store.path("a")
    store, net = open_store("store", None)  # another process
    second = train(store, net, Request("photos", "b", "packnet", CONFIG.changed(epochs=1)))
    assert list(second.task.metadata.depends_on) == ["a"]
    assert second.test is not None
    assert store.archive("b").metrics["test"] == second.test


def test_the_global_seed_does_not_change_the_task(place):
    files = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        store, net = open_store(f"store{seed}", Backbone(NET))
        files.append(train(store, net, Request("photos", "a", "full", CONFIG)).path.read_bytes())
    assert files[0] == files[1]


def test_the_image_size_is_the_backbones_by_default(place):
    from bitgraft.workflows.train_task import preprocessing_for

    _, net = open_store("store", Backbone("test_resnet", pretrained=False))
    assert preprocessing_for(net, QUICK).size == (160, 160)
    assert preprocessing_for(net, QUICK.changed(resize=200)).resize == 200
    assert preprocessing_for(net, QUICK.changed(size=32, resize=40)).size == (32, 32)


def test_one_image_per_class_is_trained_and_saved_without_a_description(place):
    for image in (place / "photos/train").glob("*/*"):
        if image.stem != "0":
            image.unlink()
    store, net = open_store("store", Backbone(NET))
    train(store, net, Request("photos", "a", "full", CONFIG))
    assert store.archive("a").description is None


def test_skipped_files_are_listed(place):
    (place / "photos/val/red/0.png").write_bytes(b"")
    opened = open_request(Request("photos", "a", "full", CONFIG, skip_bad=True))
    assert [path.name for path, _ in opened.skipped] == ["0.png"]
    assert opened.val is not None
    assert len(opened.val) == 8


def test_an_error_from_a_worker_is_one_sentence():
    wrapped = "Caught DataError in DataLoader worker process 0.\nOriginal Traceback:\n  File x\n"
    wrapped += "bitgraft.errors.DataError: cannot read a.png: it is no image that PIL knows\n"
    with pytest.raises(DataError) as error, one_sentence("; skip it"):
        raise DataError(wrapped)
    assert str(error.value) == "cannot read a.png: it is no image that PIL knows; skip it"
    with pytest.raises(TrainingError, match="try --workers 0"), one_sentence():
        raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    with pytest.raises(RuntimeError, match="else"), one_sentence():
        raise RuntimeError("something else")


class Recorder:
    """A callback that records its calls."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def begin(self, plan):
        self.calls.append("begin")

    def step(self, epoch, step, images):
        self.calls.append("step")

    def look(self, loss, accuracy):
        self.calls.append((loss, accuracy))

    def epoch(self, record):
        self.calls.append("epoch")
        if self.error is not None:
            raise self.error

    def end(self):
        self.calls.append("end")


@pytest.mark.parametrize("error", [None, TrainingError("x"), KeyboardInterrupt()])
def test_callbacks_end_once_after_success_or_error(place, error):
    store, net = open_store("store", Backbone(NET))
    recorder, request = Recorder(error), Request("photos", "a", "full", CONFIG)
    if error is None:
        outcome = train(store, net, request, callbacks=[recorder])
        epoch = ["step", "step", "step", "epoch"]
        assert [t for t in recorder.calls if isinstance(t, str)] == ["begin", *epoch, *epoch, "end"]
        looks = [t for t in recorder.calls if not isinstance(t, str)]
        assert len(looks) == 6  # on a CPU the loss is read after each step
        assert looks[2] == (outcome.history[0]["train_loss"], outcome.history[0]["train_accuracy"])
    else:
        with pytest.raises(type(error)):
            train(store, net, request, callbacks=[recorder])
        assert recorder.calls.count("end") == 1
    assert recorder.calls[-1] == "end"


def test_a_failed_run_without_a_checkpoint_leaves_no_folder(tmp_path):
    folder = tmp_path / "runs" / "a"

    def fail_after(name):
        with runs.occupied(folder):
            (folder / name).write_text("")
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail_after(runs.SETTINGS)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ValueError, match="x"):
        fail_after(runs.STATE)
    assert runs.interrupted(folder)
    with runs.occupied(folder), pytest.raises(TrainingError, match="another command"), runs.occupied(folder):
        pass


def test_resuming_with_other_settings_is_refused(tmp_path):
    settings = {"data": "d", "epochs": 3, "rates": {"k": 1e-3}}
    runs.settle(tmp_path, settings, resume=False)
    assert json.loads((tmp_path / runs.SETTINGS).read_text()) == settings
    runs.settle(tmp_path, settings, resume=True)
    with pytest.raises(TrainingError, match=r"data was \"d\", is \"e\"; epochs was 3, is 4\)"):
        runs.settle(tmp_path, {"data": "e", "epochs": 4, "rates": {"k": 1e-3}}, resume=True)
    (tmp_path / runs.SETTINGS).write_text("{")
    with pytest.raises(TrainingError, match="cannot be read"):
        runs.settle(tmp_path, settings, resume=True)


def test_progress_in_a_terminal_and_elsewhere(monkeypatch):
    record = {"epoch": 2, "train_loss": 0.5, "train_accuracy": 0.75, "val_accuracy": 0.5}
    for terminal in (True, False):
        stream = io.StringIO()
        progress = Progress(Console(file=stream, force_terminal=terminal, width=100))
        progress.begin(Plan(["flowers"], 3, 4, 1, None))
        progress.step(1, 2, 32)
        progress.look(0.625, 0.7)
        assert terminal or not stream.getvalue()  # no line so soon after the start
        monkeypatch.setattr("bitgraft.training.progress.QUIET", -1.0)
        progress.look(0.625, 0.7)
        monkeypatch.undo()
        progress.step(1, 4, 32)
        progress.epoch(record)
        progress.end()
        said = stream.getvalue()
        assert "loss 0.625  train  70.0 %" in said
        assert ("epoch 2/3  step 2/4  loss 0.625" in said) != terminal
        assert "epoch 2/3  loss 0.500  train  75.0 %  val  50.0 %" in said
        assert ("\x1b" in said) == terminal


def test_the_bar_fits_a_terminal_of_80_columns():
    stream = io.StringIO()
    progress = Progress(Console(file=stream, force_terminal=True, width=80))
    progress.begin(Plan(["sketches"], 250, 40, 1, None))
    progress.step(1, 2, 32)
    progress.look(0.625, 0.7)
    progress.end()
    assert "…" not in stream.getvalue()
    assert " left" in stream.getvalue()


def test_durations_are_spelled_out():
    assert [format_duration(s) for s in (4.4, 200, 7500)] == ["4 s", "3 min 20 s", "2 h 5 min"]


def test_a_store_of_joint_training_can_be_moved(place):
    requests = [Request("photos", name, "adapters-joint", CONFIG) for name in ("a", "b")]
    train_jointly("joint", Backbone(NET), requests)
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))

    def scores(folder):
        store = Store(folder)
        net = store.network()
        store.load(net, "b")
        with torch.no_grad():
            return net.eval()(images, task="b")

    expected = scores("joint")
    (place / "else").mkdir()
    (place / "joint").rename(place / "else/where")
    assert torch.equal(scores("else/where"), expected)
    about = json.loads((place / "else/where/store.json").read_text())
    assert about["backbone"]["weights"] == "weights/backbone.safetensors"
    about["backbone"]["weights"] = str(place / "else/where/weights/backbone.safetensors")  # as in older stores
    (place / "else/where/store.json").write_text(json.dumps(about))
    assert torch.equal(scores("else/where"), expected)


def test_a_store_is_opened_by_its_record(place):
    store, _ = open_store("store", Backbone(NET))
    again, net = open_store("store", None)
    assert again.backbone == store.backbone
    assert net.fingerprint == Store("store").fingerprint
