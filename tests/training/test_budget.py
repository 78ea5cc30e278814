import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitgraft.errors import TrainingError
from bitgraft.training.budget import (
    MAX_EPOCHS,
    MAX_STEPS,
    MIN_EPOCHS,
    MIN_STEPS,
    STEPS_PER_CLASS,
    auto_epochs,
    planned_epochs,
)
from bitgraft.training.presets import preset


@given(st.integers(1, 20_000), st.integers(1, 2_000))
def test_auto_epochs_are_within_bounds(steps_per_epoch, classes):
    epochs = auto_epochs(steps_per_epoch, classes)
    steps = epochs * steps_per_epoch
    assert MIN_EPOCHS <= epochs <= MAX_EPOCHS
    assert steps <= max(MAX_STEPS, MIN_EPOCHS * steps_per_epoch) + steps_per_epoch / 2
    assert epochs == MAX_EPOCHS or steps >= min(MAX_STEPS, MIN_STEPS + STEPS_PER_CLASS * classes) - steps_per_epoch / 2
    assert auto_epochs(steps_per_epoch, classes + 100) >= epochs


def test_small_data_sets_get_more_epochs_and_large_ones_fewer():
    assert [auto_epochs(images / 32, 10) for images in (64, 640, 6_400, 64_000, 640_000)] == [100, 55, 20, 5, 5]


def test_minutes_become_epochs_that_fit():
    config = preset("default").changed(minutes=11)
    assert config.steps is None
    assert planned_epochs(config, 100, 10, seconds_per_step=0.6) == 10
    with pytest.raises(TrainingError, match="an epoch takes about 110"):
        planned_epochs(config, 100, 10, seconds_per_step=60.0)


@pytest.mark.parametrize("changes", [{"epochs": 3}, {"steps": 30}, {"minutes": 3.0}])
def test_the_length_set_last_wins(changes):
    config = preset("default").changed(minutes=5.0).changed(**changes)
    assert planned_epochs(config, 10, 10, seconds_per_step=60 / 11) == 3


def test_a_first_try_with_few_images_is_no_longer_than_the_default_may_be():
    quick = preset("quick")
    assert [planned_epochs(quick, steps, 3, None) for steps in (1, 2, 3, 25)] == [MAX_EPOCHS, MAX_EPOCHS, 83, 10]
    assert planned_epochs(quick.changed(steps=400), 1, 3, None) == 400  # as asked for
