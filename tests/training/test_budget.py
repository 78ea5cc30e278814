import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitgraft.errors import TrainingError
from bitgraft.training.budget import LEAST, MANY, MOST, PER_CLASS, SEVERAL, auto_epochs, planned_epochs
from bitgraft.training.presets import PAPER, preset


@given(st.integers(1, 20_000), st.integers(1, 2_000))
def test_a_budget_follows_the_data(steps_per_epoch, classes):
    """Between several epochs and a hundred, and between the least and the most steps, to the nearest epoch."""
    epochs = auto_epochs(steps_per_epoch, classes)
    steps = epochs * steps_per_epoch
    assert SEVERAL <= epochs <= MANY
    assert steps <= max(MOST, SEVERAL * steps_per_epoch) + steps_per_epoch / 2
    assert epochs == MANY or steps >= min(MOST, LEAST + PER_CLASS * classes) - steps_per_epoch / 2
    assert auto_epochs(steps_per_epoch, classes + 100) >= epochs


def test_small_data_sets_get_more_epochs_and_large_ones_fewer():
    assert [auto_epochs(images / 32, 10) for images in (64, 640, 6_400, 64_000, 640_000)] == [100, 55, 20, 5, 5]


def test_minutes_are_as_many_epochs_as_fit():
    config = preset("default").changed(minutes=11)
    assert config.steps is None
    assert planned_epochs(config, 100, 10, seconds_per_step=0.6) == 10
    with pytest.raises(TrainingError, match="an epoch takes about 110"):
        planned_epochs(config, 100, 10, seconds_per_step=60.0)


@pytest.mark.parametrize("changes", [{"epochs": 3}, {"steps": 30}, {"minutes": 3.0}])
def test_the_length_that_was_set_last_counts(changes):
    config = preset("default").changed(minutes=5.0).changed(**changes)
    assert planned_epochs(config, 10, 10, seconds_per_step=60 / 11) == 3


@pytest.mark.parametrize("changes", [{"steps": 0}, {"steps": "many"}, {"minutes": 0}, {"warmup": 1.0}])
def test_lengths_out_of_range_are_one_sentence(changes):
    (name,) = changes
    with pytest.raises(TrainingError, match=f"{name}=.*: give "):
        PAPER.changed(**changes)
