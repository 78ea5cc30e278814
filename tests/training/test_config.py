"""Settings, and presets for those that are not given."""

import pickle
from dataclasses import asdict

import pytest
import torch
from stripes import backbone, stripes

from bitgraft import Config, Network, TaskError, TrainingError, fit, preset
from bitgraft.methods import registry
from bitgraft.training.callbacks import Callback
from bitgraft.training.config import fields
from bitgraft.training.presets import DECATHLON, IMAGENET_TO_SKETCH, PAPER, PRESETS, QUICK


def test_a_config_says_only_what_it_changes():
    assert Config().given() == {}
    assert repr(Config(epochs=3, rates={"k": 1e-3})) == "Config(epochs=3, rates={'k': 0.001})"
    assert pickle.loads(pickle.dumps(Config(epochs=3))) == Config(epochs=3)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_states_every_setting(name):
    assert len(preset(name).given()) == len(fields(Config))


def test_every_preset_has_settings_and_options():
    assert tuple(PRESETS) == registry.PRESETS


@pytest.mark.parametrize("method", ["full", "piggyback", "finetune", "packnet"])
@pytest.mark.parametrize("name", PRESETS)
def test_what_is_not_given_is_the_presets(name, method):
    base = preset(name, method)
    assert Config().over(base) == base
    changed = Config(epochs=3).over(base)
    assert (changed.epochs, changed.steps, changed.minutes) == (3, None, None)
    assert changed == base.changed(epochs=3)
    assert Config(rates={"head": 0.5}).over(base).rates == {**base.rates, "head": 0.5}


def test_a_whole_config_is_taken_as_it_is():
    mine = preset("decathlon").changed(weight_decay={"head": 0.1})
    assert mine.over(preset("quick", "full").changed(weight_decay={"k": 1.0})) is mine


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 0}, "epochs=0: give a whole number, at least 1"),
        ({"steps": 0}, "steps=0: give a whole number, at least 1"),
        ({"steps": "some"}, "steps='some': give a whole number or 'auto'"),
        ({"minutes": 0}, "minutes=0: give a number above 0"),
        ({"minutes": float("inf")}, r"minutes=inf: give a number above 0, at most 525,600 \(a year\)"),
        ({"minutes": 1e308}, "at most 525,600"),
        ({"epochs": 10**400}, r"give a whole number, at least 1 and below 2\*\*63"),
        ({"seed": 2**63}, r"give a whole number, at least 0 and below 2\*\*63"),
        ({"seed": -1}, "seed=-1: give a whole number, at least 0"),
        ({"warmup": 1.0}, "warmup=1.0: give a share, at least 0 and below 1"),
        ({"warmup": "long"}, "warmup='long': give a number"),
        ({"rates": {"masks": 1.0}}, "names the role 'masks'"),
        ({"rates": 3}, "rates=3: give a value for each role"),
        ({"rates": {"head": "high"}}, "give a value for each role"),
        ({"rates": {"k": -1.0}}, "must be finite, and not negative"),
        ({"rates": {"k": float("nan")}}, "must be finite, and not negative"),
        ({"eps": -1.0}, "eps=-1.0: numbers must be finite, and not negative"),
        ({"weight_decay": {"head": -0.1}}, "must be finite, and not negative"),
        ({"class_weights": (1.0, -1.0)}, "must be finite, and not negative"),
        ({"scale_k2_by_r": float("inf")}, "must be finite, and not negative"),
        ({"patience": -1}, "must be finite, and not negative"),
        ({"label_smoothing": -0.1}, "label_smoothing=-0.1: give a share, at least 0 and below 1"),
        ({"size": 0}, "size=0: give a whole number, at least 1"),
        ({"resize": -3}, "resize=-3: give a whole number, at least 1"),
        ({"optimizers": {"k": "lion"}}, "choose 'adam' or 'sgd'"),
        ({"schedule": "linear"}, "schedule='linear': give 'step' or 'cosine' or 'constant'"),
        ({"flip": "no"}, "flip='no': give true or false"),
        ({"class_weights": "some"}, "give 'balanced' or a list of numbers"),
    ],
)
def test_bad_settings_are_refused(given, message):
    for make in (Config, PAPER.changed):
        with pytest.raises(TrainingError, match=message):
            make(**given)


def test_an_unknown_setting_is_refused():
    with pytest.raises(TrainingError, match="no setting 'epoch'; did you mean 'epochs'"):
        QUICK.changed(epoch=3)


class Seen(Callback):
    def begin(self, plan):
        self.plan = plan


@pytest.mark.parametrize(("name", "drop"), [("default", None), ("decathlon", 45)])
def test_fit_takes_the_settings_of_the_preset_that_the_task_was_added_with(tmp_path, name, drop):
    seen = Seen()
    net = Network(backbone())
    task = net.add_task("stripes", classes=3, preset=name)
    fit(net, "stripes", stripes(32, 1), config=Config(epochs=1), folder=tmp_path, callbacks=[seen])
    assert seen.plan.epochs == 1
    used = torch.load(tmp_path / "state.pt", weights_only=True)["settings"]
    assert used == {**asdict(preset(name, "full").changed(epochs=1)), "number of images": {"stripes": 32}}
    assert used["drop_after"] == drop
    assert task.metadata.options["per"] == ("layer" if name == "decathlon" else "channel")


def test_options_come_before_the_presets_and_none_leaves_the_methods_own():
    net = Network(backbone())
    assert net.add_task("a", classes=3).metadata.options["per"] == "channel"
    assert net.add_task("b", classes=3, per="layer").metadata.options["per"] == "layer"
    assert net.add_task("c", classes=3, preset=None).metadata.options["per"] == "layer"
    with pytest.raises(TaskError, match="there is no preset 'fast'; known are default, quick"):
        net.add_task("d", classes=3, preset="fast")


def test_the_papers_protocols_are_as_published():
    for config, epochs, drop, size in ((IMAGENET_TO_SKETCH, 30, 15, 224), (DECATHLON, 60, 45, 64)):
        assert (config.epochs, config.drop_after, config.size, config.batch) == (epochs, drop, size, 32)
        assert config.rates["head"] == 1e-3
        assert config.optimizers["head"] == "sgd"
        assert config.momentum == 0.9
        assert {config.rates[role] for role in ("scores", "k", "k1", "norms", "weights")} == {1e-4}
        assert {config.optimizers[role] for role in ("scores", "k", "k1", "norms", "weights")} == {"adam"}
        assert not config.weight_decay
        assert not config.head_init
    assert DECATHLON.resize == 72


def test_methods_that_were_measured_without_mean_shift_correction_train_without_it():
    as_before = ["classifier", "dan", "adapters-series", "adapters-parallel", "adapters-joint", "packnet"]
    for name in [*as_before, "piggyback"]:
        assert preset("quick", name) == preset("quick-uncorrected", name).changed(keep="best", retreat=True)
    for name in ("full", "simple", "piggyback-bn", "lora", "finetune"):
        assert preset("quick", name).mean_shift_correction
        assert not preset("quick-uncorrected", name).mean_shift_correction


def test_unknown_preset():
    with pytest.raises(
        TrainingError, match="known are default, quick, quick-uncorrected, imagenet-to-sketch, decathlon"
    ):
        preset("fast")
    with pytest.raises(TaskError, match="there is no method 'ful'; did you mean 'full'"):
        preset("default", "ful")
