"""Which images make up a batch, on each process."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stripes import stripes
from torch import nn
from torch.utils.data import TensorDataset

from bitgraft.errors import TrainingError
from bitgraft.network import Network
from bitgraft.training.callbacks import Callback
from bitgraft.training.config import Config
from bitgraft.training.loader import ShardedBatchSampler
from bitgraft.training.loop import fit
from bitgraft.training.presets import DECATHLON, IMAGENET_TO_SKETCH, QUICK


def flat_backbone() -> nn.Module:
    """Its norm gets one value per channel and image, so one image has no variance."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 3)]
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize("protocol", [IMAGENET_TO_SKETCH, DECATHLON, QUICK])
def test_a_last_batch_of_one_image_joins_the_one_before(protocol):
    net, seen = Network(flat_backbone()), []

    class Counting(Callback):
        def step(self, epoch, step, images):
            seen.append(images)

    net.add_task("stripes", classes=3)
    config = protocol.changed(epochs=1)
    fit(net, "stripes", stripes(33, 1), stripes(5, 2), config, callbacks=[Counting()])
    assert seen == ([33] if config.statistics == "batch" else [32, 1])


def test_batches_of_one_image_are_refused_with_batch_statistics():
    net = Network(flat_backbone())
    net.add_task("stripes", classes=3)
    with pytest.raises(TrainingError, match="at least 2 images, or with statistics='kept'"):
        fit(net, "stripes", stripes(6, 1), None, DECATHLON.changed(batch=1))
    fit(net, "stripes", stripes(7, 1), None, DECATHLON.changed(epochs=1, batch=3, accumulate=3))  # parts of 2 at least


def test_batches_cover_every_image_once_and_shards_make_up_the_batch():
    whole = list(ShardedBatchSampler(23, 5, 3).seek(1))
    assert sorted(index for batch in whole for index in batch) == list(range(23))
    assert list(map(len, whole)) == ShardedBatchSampler(23, 5, 3).global_sizes
    assert list(ShardedBatchSampler(23, 5, 3).seek(1, 2)) == whole[2:]
    shards = [list(ShardedBatchSampler(23, 5, 3, rank, 2).seek(1)) for rank in range(2)]
    for step, batch in enumerate(whole):
        assert sorted(shards[0][step] + shards[1][step]) == sorted(batch)
    assert list(ShardedBatchSampler(23, 5, 3).seek(2)) != whole
    assert list(ShardedBatchSampler(23, 5, 2**63 - 1).seek(1)) != whole  # the largest seed


@given(st.integers(1, 70), st.integers(1, 32), st.integers(1, 5), st.integers(1, 4), st.integers(1, 2))
def test_processes_run_the_same_micro_batches_and_each_image_counts_once(count, size, world, accumulate, min_size):
    options = {"accumulate": accumulate, "min_size": min_size}
    ranks = [ShardedBatchSampler(count, size, 3, rank, world, **options) for rank in range(world)]
    shards, seen = [list(batches.seek(1)) for batches in ranks], []
    for step, whole in enumerate(ranks[0].global_sizes):
        each = [batches.micro_batches(step) for batches in ranks]
        sizes = [micro.global_size for micro in each[0]]
        assert all([micro.global_size for micro in micro_batches] == sizes for micro_batches in each)
        assert sum(sizes) == whole
        assert min(sizes) >= min(min_size, whole)
        for micro_batches in zip(*each, strict=True):
            own = [micro.local_size for micro in micro_batches]
            assert sum(own) == micro_batches[0].global_size
            assert max(own) - min(own) <= 1
        for micro_batches, shard in zip(each, (shards_of_rank[step] for shards_of_rank in shards), strict=True):
            rows = torch.tensor(shard).split([micro.rows for micro in micro_batches])
            counted = [images.tolist() for micro, images in zip(micro_batches, rows, strict=True) if micro.local_size]
            seen += [index for images in counted for index in images]
    assert sorted(seen) == list(range(count))
    skipping = [ShardedBatchSampler(count, size, None, rank, world, pad=False) for rank in range(world)]
    assert sorted(index for batches in skipping for shard in batches for index in shard) == list(range(count))


def test_a_last_batch_of_one_image_joins_the_one_before_it_for_series_adapters():
    """Their own norm layers always use the batch's statistics."""
    torch.manual_seed(0)
    net = Network(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 5)), example=(2, 3, 3, 3)
    )
    net.add_task("t", classes=2, method="adapters-series")
    data = TensorDataset(torch.rand(5, 3, 3, 3), torch.arange(5) % 2)
    assert fit(net, "t", data, config=Config(epochs=1, batch=4, statistics="kept")).history
