from collections import Counter
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitgraft.data.seeded import seeded_uniform, stratified_split
from bitgraft.errors import DataError


def splitmix_reference(seed, epoch, index, place):
    step, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    state = mix((seed + step) & mask)
    state = mix((state + (epoch + 1) * step) & mask)
    state = mix(state ^ mix((index + step) & mask))
    return (mix((state + (place + 1) * step) & mask) >> 11) * 2.0**-53


def test_random_numbers_equal_the_slow_reference():
    found = seeded_uniform(-3, 7, [0, 5, 10**9], 4)
    for row, index in enumerate([0, 5, 10**9]):
        assert found[row].tolist() == [splitmix_reference(-3, 7, index, place) for place in range(4)]


def test_random_numbers_are_pinned():
    """Splits and crops of finished runs depend on these numbers."""
    assert seeded_uniform(1, 2, [3], 1)[0, 0] == float.fromhex("0x1.887e461015a2ap-2")


def test_an_item_is_drawn_alike_alone_and_in_a_batch():
    batch = seeded_uniform(1, 2, range(50), 5)
    assert all((seeded_uniform(1, 2, [i], 5)[0] == batch[i]).all() for i in range(50))


def test_random_numbers_are_even_and_unrelated():
    numbers = seeded_uniform(0, 0, range(20000), 3)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.abs(np.histogram(numbers[:, 0], bins=10, range=(0, 1))[0] - 2000).max() < 250
    others = [seeded_uniform(1, 0, range(20000), 1)[:, 0], seeded_uniform(0, 1, range(20000), 1)[:, 0], numbers[:, 1]]
    assert all(abs(np.corrcoef(numbers[:, 0], other)[0, 1]) < 0.03 for other in others)


labels_lists = st.lists(st.integers(0, 6), min_size=1, max_size=120)
shares = st.floats(0, 0.45)
seeds = st.integers(0, 2**40)


@settings(deadline=None)
@given(labels_lists, shares, shares, seeds)
def test_parts_are_disjoint_complete_ordered_and_repeatable(labels, val, test, seed):
    parts = stratified_split(labels, val, test, seed)
    assert sorted([*parts[0], *parts[1], *parts[2]]) == list(range(len(labels)))
    assert all(list(part) == sorted(part) for part in parts)
    assert stratified_split(labels, val, test, seed) == parts


@settings(deadline=None)
@given(labels_lists, shares, shares, seeds)
def test_no_class_is_lost_from_training(labels, val, test, seed):
    parts = stratified_split(labels, val, test, seed)
    assert {labels[i] for i in parts[0]} == set(labels)


@settings(deadline=None)
@given(labels_lists, shares, seeds)
def test_each_class_is_split_by_its_share_rounded_down_or_up(labels, share, seed):
    taken = Counter(labels[i] for i in stratified_split(labels, share, 0, seed)[1])
    for label, size in Counter(labels).items():
        assert floor(size * share) <= taken[label] <= min(ceil(size * share), max(size - 1, floor(size * share)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=30, max_size=120), seeds)
def test_the_total_matches_the_share(labels, seed):
    """Also for small classes: a tenth of ten classes with four images is four images, not none."""
    singles = sum(1 for size in Counter(labels).values() if size == 1)
    assert abs(len(stratified_split(labels, 0.1, 0, seed)[1]) - len(labels) * 0.1) <= 0.5 + singles


def test_small_classes_are_held_out_too():
    labels = [label for label in range(10) for _ in range(4)]
    assert len(stratified_split(labels, 0.1, 0, 0)[1]) == 4


def test_a_share_takes_at_least_one_image_where_one_can_be_spared():
    assert len(stratified_split([0, 0, 1], 0.1, 0, 0)[1]) == 1
    assert stratified_split([0, 1], 0.4, 0, 0)[1] == []


def test_seeds_differ_and_a_share_of_zero_holds_out_nothing():
    labels = [0] * 50
    assert stratified_split(labels, 0.5, 0, 0)[1] != stratified_split(labels, 0.5, 0, 1)[1]
    assert stratified_split(labels, 0, 0, 0) == (list(range(50)), [], [])


@pytest.mark.parametrize(("val", "test"), [(1, 0), (-0.1, 0), (0, 1.5), (0.5, 0.5), (float("nan"), 0)])
def test_shares_that_leave_nothing_are_refused(val, test):
    with pytest.raises(DataError, match="share"):
        stratified_split([0, 1], val, test, 0)


def test_splits_are_pinned():
    """Resumed runs need the same split."""
    labels = [0, 1, 0, 2, 0, 1, 1, 0, 2, 0, 1, 0, 2, 0, 1, 1]
    assert stratified_split(labels, 0.2, 0.2, 3) == ([0, 1, 4, 5, 8, 9, 10, 11, 12, 14], [2, 6, 7], [3, 13, 15])
