import json

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from bitgraft.data.preprocessing import (
    Augmentation,
    Preprocessing,
    evaluation_tensor,
    normalize,
    random_box,
    resize_to_frame,
)
from bitgraft.data.seeded import seeded_uniform
from bitgraft.errors import DataError
from bitgraft.runtime.heads import stated_preprocessing

sides = st.integers(1, 64)
levels = st.floats(0.01, 0.99)


@settings(deadline=None)
@given(sides, sides, st.integers(0, 20), st.tuples(levels, levels, levels), st.sampled_from(["center", "squash"]))
def test_preprocessing_goes_through_json_unchanged(height, width, margin, numbers, crop):
    made = Preprocessing((height, width), numbers, numbers, "bicubic", min(height, width) + margin, crop)
    assert Preprocessing.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_a_timm_backbone_states_its_preprocessing():
    backbone = timm.create_model("tf_efficientnet_lite0", num_classes=2)
    stated = Preprocessing.from_dict(stated_preprocessing(backbone))
    assert stated == Preprocessing((224, 224), (0.5,) * 3, (0.5,) * 3, "bicubic", 256)
    assert stated.at(64) == Preprocessing((64, 64), (0.5,) * 3, (0.5,) * 3, "bicubic", 73)
    assert stated.at(64, 72).resize == 72


def test_defaults_are_imagenets():
    assert Preprocessing.from_dict({}) == Preprocessing((224, 224))
    assert Preprocessing.from_dict({"size": [64, 64]}).resize == 64
    assert Preprocessing.from_dict({"size": 64, "channels": 1}).mean == (0.449,)
    assert Preprocessing.from_dict({"size": [64, 64], "crop_pct": 0.875}).resize == 73


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": [0, 5]},
        {"size": [5]},
        {"size": "large"},
        {"size": [64, 64], "resize": 32},
        {"mean": [0.5]},
        {"std": [0.5, 0.5, 0.0]},
        {"mean": [0.5, float("nan"), 0.5]},
        {"mean": 0.5},
        {"channels": 4},
        {"interpolation": "guess"},
        {"crop": "corner"},
        {"crop_pct": 0},
        {"gamma": 2},
    ],
)
def test_invalid_preprocessing_is_refused(wrong):
    with pytest.raises(DataError):
        Preprocessing.from_dict(wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"crop": "corner"}, {"scale": (0.0, 1.0)}, {"scale": (0.9, 0.1)}, {"ratio": (2.0, 1.0)}, {"scale": (0.5, 2)}],
)
def test_invalid_augmentations_are_refused(wrong):
    with pytest.raises(DataError):
        Augmentation(**wrong)


def picture(wide, high):
    coarse = np.random.default_rng(wide * high).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((wide, high), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("wide_high", [(100, 80), (80, 100), (77, 233), (30, 41), (72, 72), (64, 500)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_is_torchvisions_resize_crop_and_normalize(wide_high, interpolation):
    made = Preprocessing((64, 64), interpolation=interpolation, resize=72)
    reference = v2.Compose(
        [
            v2.Resize(72, v2.InterpolationMode(interpolation)),
            v2.CenterCrop(64),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(made.mean, made.std),
        ]
    )
    image = picture(*wide_high)
    found, expected = evaluation_tensor(image, made), reference(image)
    assert found.shape == (3, 64, 64)
    assert found.dtype == torch.float32
    difference = (found - expected).abs()
    assert difference.mean() < 0.002
    assert difference.max() < 2.5 / 255 / min(made.std)  # two of 256 levels, from PIL's rounding


def test_a_constant_image_becomes_a_constant():
    made = Preprocessing((8, 8), (0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    found = evaluation_tensor(np.full((20, 30, 3), 51, np.uint8), made)
    assert torch.allclose(found[:, 0, 0], torch.tensor([(0.2 - 0.5) / 0.2, (0.2 - 0.4) / 0.2, (0.2 - 0.3) / 0.1]))
    assert (found == found[:, :1, :1]).all()


def test_squash_keeps_what_center_cuts_off():
    image = np.zeros((20, 60, 3), np.uint8)
    image[:, :10] = image[:, -10:] = 255
    assert resize_to_frame(image, Preprocessing((20, 20))).max() == 0
    squashed = resize_to_frame(image, Preprocessing((20, 20), crop="squash"))
    assert squashed[0, 10, 0] == squashed[0, 10, -1] == 255


@settings(deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_any_image_fills_any_frame(wide, high, height, width, margin):
    made = Preprocessing((height, width), resize=min(height, width) + margin)
    assert evaluation_tensor(np.full((high, wide), 9, np.uint8), made).shape == (3, height, width)


def test_a_very_thin_image_is_not_blown_up():
    """The 60000 x 1 image is never resized to 72 x 4320000."""
    assert resize_to_frame(np.zeros((1, 60000), np.uint8), Preprocessing((64, 64), resize=72)).shape == (3, 72, 72)


def test_one_channel():
    made = Preprocessing((8, 8), (0.0,), (1.0,), channels=1)
    assert evaluation_tensor(picture(20, 20), made).shape == (1, 8, 8)


def test_normalising_a_batch_is_normalising_each():
    made = Preprocessing((9, 7))
    batch = torch.randint(0, 256, (5, 3, 9, 7), dtype=torch.uint8)
    kept = batch.clone()
    together = normalize(batch, made)
    assert all(torch.equal(together[i], normalize(batch[i], made)) for i in range(5))
    assert torch.equal(batch, kept)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**30))
def test_random_boxes_lie_inside(wide, high, seed):
    left, top, right, bottom = random_box(wide, high, Augmentation(), seeded_uniform(seed, 0, [0], 40)[0].tolist())
    assert 0 <= left < right <= wide
    assert 0 <= top < bottom <= high


def test_random_boxes_have_the_areas_asked_for():
    augmentation = Augmentation(scale=(0.25, 0.5), ratio=(0.8, 1.25))
    for rolls in seeded_uniform(0, 0, range(200), 40):
        left, top, right, bottom = random_box(400, 300, augmentation, rolls.tolist())
        assert 0.24 < (right - left) * (bottom - top) / 120000 < 0.51
        assert 0.78 < (right - left) / (bottom - top) < 1.28
