import contextlib
import hashlib
import math

import numpy as np
import pytest
import torch
from drafts import Draft
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bitgraft
from bitgraft.errors import CorruptError
from bitgraft.format import archive, entropy_coding


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 3000), st.floats(0, 1), st.integers(0, 2**32))
def test_bytes_come_back(count, share, seed):
    rng = np.random.default_rng(seed)
    data = np.packbits(rng.random(8 * count) < share)
    assert entropy_coding.decode(entropy_coding.encode(data), count).tobytes() == data.tobytes()


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=2000))
def test_any_bytes_come_back(content):
    data = np.frombuffer(content, np.uint8)
    assert entropy_coding.decode(entropy_coding.encode(data), len(data)).tobytes() == content


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 1.0])
def test_the_size_is_near_the_entropy(share):
    data = np.packbits(np.random.default_rng(0).random(8 * 200_000) < share)
    entropy = -sum(p * math.log2(p) for p in (share, 1 - share) if p)
    lanes, table = 4 * 512, 513
    assert len(entropy_coding.encode(data)) <= 1.01 * entropy * 200_000 + lanes + table + 100


def test_a_reader_of_one_lane_written_from_the_specification():
    """docs/format.md, section Coded masks, for few bytes: one lane, so no order of lanes to mind."""
    data = np.array([3, 3, 255, 3, 0, 3, 3, 7] * 20, np.uint8)
    coded = bytes(entropy_coding.encode(data))
    assert coded[0] == 0
    frequencies = [int.from_bytes(coded[1 + 2 * i : 3 + 2 * i], "little") for i in range(256)]
    assert sum(frequencies) == 16384
    state, at, out = int.from_bytes(coded[513:517], "little"), 517, []
    for _ in range(len(data)):
        slot, symbol = state % 16384, 0
        before = 0
        while slot >= before + frequencies[symbol]:
            before += frequencies[symbol]
            symbol += 1
        out.append(symbol)
        state = frequencies[symbol] * (state // 16384) + slot - before
        if state < 65536:
            state, at = state * 65536 + int.from_bytes(coded[at : at + 2], "little"), at + 2
    assert out == data.tolist()
    assert (state, at) == (65536, len(coded))


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32), st.integers(0, 10**6), st.integers(1, 255))
def test_damage_is_refused_or_gives_other_bytes_and_never_anything_else(seed, place, change):
    rng = np.random.default_rng(seed)
    data = np.packbits(rng.random(8 * 700) < 0.9)
    coded = entropy_coding.encode(data).copy()
    coded[place % len(coded)] ^= change
    with contextlib.suppress(ValueError):
        assert len(entropy_coding.decode(coded, len(data))) == len(data)


@pytest.mark.parametrize("cut", [0, 1, 512, 513, 520, -1, -2])
def test_what_is_cut_short_is_refused(cut):
    data = np.packbits(np.random.default_rng(1).random(8 * 5000) < 0.8)
    with pytest.raises(ValueError, match=r"short|end|odd number"):
        entropy_coding.decode(entropy_coding.encode(data)[:cut], len(data))


@pytest.mark.parametrize("count", [1, 699, 701, 10**4])
def test_another_count_is_refused(count):
    data = np.packbits(np.random.default_rng(2).random(8 * 700) < 0.8)
    with pytest.raises(ValueError, match="end"):
        entropy_coding.decode(entropy_coding.encode(data), count)


def test_a_count_that_no_file_has_is_refused_before_memory_is_asked_for():
    with pytest.raises(ValueError, match="cannot be coded"):
        entropy_coding.decode(entropy_coding.encode(np.zeros(9, np.uint8)), 1 << 60)


def test_the_layout_is_pinned_by_these_bytes():
    data = np.packbits(np.arange(80_000) % 17 != 3)
    assert hashlib.sha256(entropy_coding.encode(data).tobytes()).hexdigest() == (
        "5d55037105b59b7a030cb28531b44397e85868a6a96bf32f86bd9fd43b8c7e48"
    )


def network() -> bitgraft.Network:
    torch.manual_seed(0)
    convs = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64, 5))
    return bitgraft.Network(convs.eval(), example=(2, 3, 5, 5))


def dense(net: bitgraft.Network) -> archive.Archive:
    task, rng = net.add_task("t", classes=3), torch.Generator().manual_seed(1)
    for transform in task.transforms.values():
        transform.scores.data = torch.rand(transform.scores.shape, generator=rng) - 0.02
    return archive.pack_task(task, net.fingerprint)


def test_a_coded_file_is_the_same_task_in_fewer_bytes(tmp_path):
    net = network()
    packed = dense(net)
    net.save_task("t", tmp_path / "plain")
    net.save_task("t", tmp_path / "coded", coded=True)
    plain, coded = (tmp_path / "plain").read_bytes(), (tmp_path / "coded").read_bytes()
    assert len(coded) < len(plain) - 3000
    assert b"1.weight:mask.rans" in coded
    assert b"0.weight:mask.rans" not in coded, "it would be longer than the bits"
    read = archive.read_archive(tmp_path / "coded")
    assert read.tensors.keys() == packed.tensors.keys()
    assert all(torch.equal(read.tensors[key], tensor) for key, tensor in packed.tensors.items())
    assert archive.to_bytes(read) == plain
    other = network()
    other.load_task(tmp_path / "coded")
    image = torch.randn(2, 3, 5, 5)
    net.eval(), other.eval()
    with torch.inference_mode():
        assert torch.equal(other(image, task="t"), net(image, task="t"))


CODED = "1.weight:mask.rans"


@pytest.mark.parametrize(
    "change",
    [
        lambda data: {"1.weight:mask": ("U8", [4608], bytes(4608)), CODED: ("U8", [len(data)], data)},
        lambda data: {CODED: ("U8", [len(data) - 1], data[:-1])},
        lambda data: {CODED: ("F32", [600], bytes(2400))},
        lambda data: {CODED: ("U8", [1, len(data)], data)},
        lambda data: {"2.weight:mask.rans": ("U8", [len(data)], data)},
    ],
    ids=["both forms", "cut", "dtype", "shape", "no shape in the metadata"],
)
def test_coded_masks_that_are_wrong_are_refused(change):
    draft = Draft(archive.to_bytes(dense(network()), coded=True))
    draft.tensors.update(change(draft.tensors.pop(CODED)[2]))
    with pytest.raises(CorruptError, match=r"cannot decode '\d.weight:mask.rans'"):
        archive.from_bytes(draft.build())


@pytest.mark.parametrize("compiled", [True, False])
def test_steps_come_back_and_take_about_their_entropy(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(entropy_coding.kernels, "loops", lambda: None)
    rng = np.random.default_rng(0)
    sizes = ((40_000, 0.4), (9, 2.0), (0, 1.0), (3000, 0.0), (500, 60.0))
    groups = [np.clip(np.round(rng.normal(size=n) * s), -127, 127).astype(np.int8) for n, s in sizes]
    coded = entropy_coding.encode_levels(groups)
    assert np.array_equal(entropy_coding.decode_levels(coded, [len(g) for g in groups]), np.concatenate(groups))
    _, counts = np.unique(groups[0], return_counts=True)
    entropy = -(counts * np.log2(counts / counts.sum())).sum() / 8
    assert entropy < len(coded) < 1.03 * entropy + 1500
    for broken in (coded[:40], coded[:-2], np.concatenate([coded, coded[:2]])):
        with pytest.raises(ValueError, match=r"too short|too early|where it should"):
            entropy_coding.decode_levels(broken, [len(g) for g in groups])
