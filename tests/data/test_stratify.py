from collections import Counter
from math import ceil, floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitgraft.data.stratify import split
from bitgraft.errors import DataError

labels_lists = st.lists(st.integers(0, 6), min_size=1, max_size=120)
shares = st.floats(0, 0.45)
seeds = st.integers(0, 2**40)


@settings(deadline=None)
@given(labels_lists, shares, shares, seeds)
def test_parts_are_disjoint_complete_ordered_and_repeatable(labels, val, test, seed):
    parts = split(labels, val, test, seed)
    assert sorted(parts.train + parts.val + parts.test) == list(range(len(labels)))
    assert all(list(part) == sorted(part) for part in parts)
    assert split(labels, val, test, seed) == parts


@settings(deadline=None)
@given(labels_lists, shares, shares, seeds)
def test_no_class_is_lost_from_training(labels, val, test, seed):
    parts = split(labels, val, test, seed)
    assert {labels[i] for i in parts.train} == set(labels)


@settings(deadline=None)
@given(labels_lists, shares, seeds)
def test_each_class_gives_its_share_rounded_down_or_up(labels, share, seed):
    taken = Counter(labels[i] for i in split(labels, share, 0, seed).val)
    for label, size in Counter(labels).items():
        assert floor(size * share) <= taken[label] <= min(ceil(size * share), max(size - 1, floor(size * share)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=30, max_size=120), seeds)
def test_the_whole_gives_its_share(labels, seed):
    """Small classes too: ten classes of four images give four images to a tenth, not none."""
    singles = sum(1 for size in Counter(labels).values() if size == 1)
    assert abs(len(split(labels, 0.1, 0, seed).val) - len(labels) * 0.1) <= 0.5 + singles


def test_small_classes_give_to_validation_too():
    labels = [label for label in range(10) for _ in range(4)]
    assert len(split(labels, 0.1, 0, 0).val) == 4


def test_a_share_takes_at_least_one_image_where_one_can_be_spared():
    assert len(split([0, 0, 1], 0.1, 0, 0).val) == 1
    assert split([0, 1], 0.4, 0, 0).val == ()


def test_seeds_differ_and_nothing_is_held_back_when_not_asked():
    labels = [0] * 50
    assert split(labels, 0.5, 0, 0).val != split(labels, 0.5, 0, 1).val
    assert split(labels, 0, 0, 0) == (tuple(range(50)), (), ())


@pytest.mark.parametrize(("val", "test"), [(1, 0), (-0.1, 0), (0, 1.5), (0.5, 0.5), (float("nan"), 0)])
def test_shares_that_leave_nothing_are_refused(val, test):
    with pytest.raises(DataError, match="share"):
        split([0, 1], val, test, 0)
