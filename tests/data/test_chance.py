import numpy as np

from bitgraft.data.chance import draws


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


def test_draws_equal_the_slow_reference():
    found = draws(-3, 7, [0, 5, 10**9], 4)
    for row, index in enumerate([0, 5, 10**9]):
        assert found[row].tolist() == [splitmix_reference(-3, 7, index, place) for place in range(4)]


def test_draws_are_pinned_for_ever():
    """Splits and crops of finished runs depend on these numbers."""
    assert draws(0, 0, [0], 2).tolist() == [[splitmix_reference(0, 0, 0, 0), splitmix_reference(0, 0, 0, 1)]]
    assert draws(1, 2, [3], 1)[0, 0] == PINNED


PINNED = float.fromhex("0x1.887e461015a2ap-2")


def test_an_item_is_drawn_alike_alone_and_in_a_batch():
    batch = draws(1, 2, range(50), 5)
    assert all((draws(1, 2, [i], 5)[0] == batch[i]).all() for i in range(50))


def test_draws_are_even_and_unrelated():
    numbers = draws(0, 0, range(20000), 3)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.abs(np.histogram(numbers[:, 0], bins=10, range=(0, 1))[0] - 2000).max() < 250
    others = [draws(1, 0, range(20000), 1)[:, 0], draws(0, 1, range(20000), 1)[:, 0], numbers[:, 1]]
    assert all(abs(np.corrcoef(numbers[:, 0], other)[0, 1]) < 0.03 for other in others)
