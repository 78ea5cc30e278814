"""Settings and presets: what is not given is the preset's, for the method at hand."""

import pickle

import pytest
from stripes import backbone, stripes

from bitgraft import Config, Network, TaskError, TrainingError, fit, preset
from bitgraft.methods.preset_options import OPTIONS
from bitgraft.training.callbacks import Callback
from bitgraft.training.config import fields
from bitgraft.training.presets import PRESETS


def test_a_config_says_only_what_it_changes():
    assert Config().given() == {}
    assert repr(Config(epochs=3, rates={"k": 1e-3})) == "Config(epochs=3, rates={'k': 0.001})"
    assert pickle.loads(pickle.dumps(Config(epochs=3))) == Config(epochs=3)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_states_every_setting(name):
    assert len(preset(name).given()) == len(fields(Config))


def test_every_preset_has_settings_and_options():
    assert list(PRESETS) == list(OPTIONS)


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
        ({"epochs": 0}, "epochs=0: give a whole number"),
        ({"steps": "some"}, "steps='some': give a whole number from 1 on, or 'auto'"),
        ({"warmup": 1.0}, "warmup=1.0: give a share of the run"),
        ({"rates": {"masks": 1.0}}, "names the role 'masks'"),
        ({"rates": 3}, "rates=3: give a value for each role"),
        ({"rates": {"head": "high"}}, "give a value for each role"),
        ({"warmup": "long"}, "warmup='long': give a number"),
        ({"schedule": "linear"}, "schedule='linear': give 'step' or 'cosine' or 'constant'"),
        ({"flip": "no"}, "flip='no': give true or false"),
        ({"class_weights": "some"}, "give 'balanced' or a list of numbers"),
    ],
)
def test_what_is_given_is_checked_at_once(given, message):
    with pytest.raises(TrainingError, match=message):
        Config(**given)


class Seen(Callback):
    def begin(self, plan):
        self.plan = plan


@pytest.mark.parametrize(("name", "drop"), [("default", None), ("decathlon", 45)])
def test_fit_takes_the_settings_of_the_preset_that_the_task_was_added_with(tmp_path, monkeypatch, name, drop):
    from bitgraft.training import loop

    used, seen = [], Seen()
    monkeypatch.setattr(loop.checkpoint, "save", lambda path, config, *rest: used.append(config))
    net = Network(backbone())
    task = net.add_task("stripes", classes=3, preset=name)
    fit(net, "stripes", stripes(32, 1), config=Config(epochs=1), folder=tmp_path, callbacks=[seen])
    assert seen.plan.epochs == 1
    assert used[0] == preset(name, "full").changed(epochs=1)
    assert used[0].drop_after == drop
    assert task.metadata.options["per"] == ("layer" if name == "decathlon" else "channel")


def test_options_come_before_the_presets_and_none_leaves_the_methods_own():
    net = Network(backbone())
    assert net.add_task("a", classes=3).metadata.options["per"] == "channel"
    assert net.add_task("b", classes=3, per="layer").metadata.options["per"] == "layer"
    assert net.add_task("c", classes=3, preset=None).metadata.options["per"] == "layer"
    with pytest.raises(TaskError, match="there is no preset 'fast'; known are default, quick"):
        net.add_task("d", classes=3, preset="fast")
