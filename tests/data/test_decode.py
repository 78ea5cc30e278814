import io

import ml_dtypes
import numpy as np
import pytest
import torch
from PIL import Image

from bitgraft.data.decode import load
from bitgraft.data.images import Images, Splits
from bitgraft.data.splits import drop_bad, find_bad
from bitgraft.errors import DataError

RGB = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
GREY = RGB[..., 0]


def pixels(picture, **options):
    return np.asarray(load(picture, **options))


def saved(path, image, **options):
    image.save(path, **options)
    return path


def test_one_picture_in_every_shape(tmp_path):
    path = saved(tmp_path / "a.png", Image.fromarray(RGB))
    chw = torch.from_numpy(RGB).permute(2, 0, 1)
    for same in (path, str(path), path.read_bytes(), Image.fromarray(RGB), RGB, chw, chw / 255):
        assert (pixels(same) == RGB).all()


def test_bfloat16_arrays_are_taken_as_other_floats_are():
    rounded = (torch.from_numpy(RGB).permute(2, 0, 1) / 255).bfloat16()
    expected = pixels(rounded.float())
    assert (pixels(rounded) == expected).all()
    assert (pixels(rounded.float().numpy().astype(ml_dtypes.bfloat16)) == expected).all()


def test_grey_becomes_colour_and_colour_grey(tmp_path):
    path = saved(tmp_path / "a.png", Image.fromarray(GREY))
    assert (pixels(path) == GREY[..., None]).all()
    assert (pixels(path, channels=1) == GREY).all()
    assert pixels(RGB, channels=1).shape == (9, 7)


def test_black_and_white(tmp_path):
    path = saved(tmp_path / "a.png", Image.fromarray(GREY > 100))
    assert (pixels(path) == np.where(GREY > 100, 255, 0)[..., None]).all()


def test_palettes(tmp_path):
    image = Image.fromarray(RGB).quantize(8)
    path = saved(tmp_path / "a.gif", image)
    assert (pixels(path) == np.asarray(image.convert("RGB"))).all()


def test_transparency_shows_white_paper(tmp_path):
    alpha = np.zeros((9, 7), np.uint8)
    alpha[:4] = 255
    image = Image.fromarray(np.dstack([RGB, alpha]))
    expected = np.where(alpha[..., None] == 255, RGB, 255)
    assert (pixels(saved(tmp_path / "a.png", image)) == expected).all()
    grey = pixels(saved(tmp_path / "b.png", image.convert("LA")))
    assert (grey[4:] == 255).all()
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), mode=None).convert("P")
    palette.putpalette([10, 20, 30, 0, 0, 0])
    path = saved(tmp_path / "c.png", palette, transparency=1)
    assert pixels(path).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    path = saved(tmp_path / "d.png", palette, transparency=bytes([255, 0]))
    assert pixels(path).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_cmyk(tmp_path):
    flat = Image.new("RGB", (16, 16), (200, 100, 50))
    path = saved(tmp_path / "a.jpg", flat.convert("CMYK"), quality=95)
    assert np.abs(pixels(path).astype(int) - (200, 100, 50)).max() < 12


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_sixteen_bits_keep_their_high_byte(tmp_path, ending):
    deep = GREY.astype(np.uint16) * 256 + 17
    path = saved(tmp_path / f"a.{ending}", Image.fromarray(deep))
    assert (pixels(path) == GREY[..., None]).all()


def test_floating_point_files(tmp_path):
    path = saved(tmp_path / "a.tif", Image.fromarray((GREY / 255).astype(np.float32)))
    assert (pixels(path, channels=1) == GREY).all()
    path = saved(tmp_path / "b.tif", Image.fromarray(GREY.astype(np.float32) * 10))
    with pytest.raises(DataError, match=r"b\.tif: .*between 0 and 1"):
        load(path)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_image_upright(tmp_path, orientation):
    undo = {
        1: lambda x: x,
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.transpose(1, 0, 2),
        6: lambda x: np.rot90(x, 1),
        7: lambda x: np.rot90(x, 2).transpose(1, 0, 2),
        8: lambda x: np.rot90(x, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path / "a.png", Image.fromarray(np.ascontiguousarray(undo[orientation](RGB))), exif=exif)
    assert (pixels(path) == RGB).all()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_unreadable_exif_is_ignored(tmp_path):
    path = saved(tmp_path / "a.jpg", Image.fromarray(RGB), exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert pixels(path).shape == RGB.shape


def test_a_large_jpeg_is_decoded_at_a_fraction(tmp_path):
    smooth = Image.fromarray(RGB).resize((800, 600), Image.Resampling.BICUBIC)
    path = saved(tmp_path / "a.jpg", smooth, quality=95)
    small = load(path, at_least=144)
    assert small.size == (200, 150)
    assert np.abs(np.asarray(small, int) - np.asarray(smooth.resize((200, 150)), int)).mean() < 3
    assert load(path, at_least=400).size == (800, 600)


def bad_files(folder):
    Image.fromarray(RGB).resize((64, 64)).save(folder / "good.jpg")
    whole = (folder / "good.jpg").read_bytes()
    (folder / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.jpg").write_text("no image")
    buffer = io.BytesIO()
    Image.fromarray(RGB).save(buffer, "png")
    broken = bytearray(buffer.getvalue())
    broken[20] ^= 255  # the header no longer matches its checksum
    (folder / "broken.png").write_bytes(broken)
    return [folder / name for name in ("truncated.jpg", "empty.png", "text.jpg", "broken.png", "missing.jpg")]


def test_errors_name_the_file(tmp_path):
    for path in bad_files(tmp_path):
        with pytest.raises(DataError, match=path.name.replace(".", r"\.")):
            load(path)
    with pytest.raises(DataError, match="the image"):
        load(b"no image")
    with pytest.raises(DataError, match="photo 7"):
        load(b"no image", name="photo 7")


def test_bombs_are_refused_by_name(tmp_path, monkeypatch):
    path = saved(tmp_path / "bomb.png", Image.fromarray(RGB))
    for limit in (62, 10):  # PIL warns of the first and refuses the second
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(DataError, match=r"bomb\.png.*(limit|bomb)"):
            load(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 63)
    load(path)


def test_bad_files_are_found_and_dropped(tmp_path):
    bad = bad_files(tmp_path)
    images = Images((tmp_path / "good.jpg", *bad), (0,) * 6)
    found = find_bad(images)
    assert [path for path, _ in found] == bad
    assert all(reason and str(tmp_path) not in reason for _, reason in found)
    assert dict(found)[tmp_path / "missing.jpg"] == "there is no such file"
    assert images.without(found).files == (tmp_path / "good.jpg",)
    assert find_bad(Images(RGB[None], (0,))) == []


def test_splits_lose_bad_files_but_no_class(tmp_path):
    bad, good = bad_files(tmp_path), tmp_path / "good.jpg"
    train, val, test = Images((good, bad[0]), (0, 0)), Images((bad[1],), (0,)), Images((good,), (0,))
    splits = Splits(name="s", classes=("a",), train=train, val=val, test=test)
    kept, found = drop_bad(splits)
    assert [path for path, _ in found] == bad[:2]
    assert (len(kept.train), kept.val, len(kept.test)) == (1, None, 1)
    with pytest.raises(DataError, match="1 classes have no training image left, first b"):
        drop_bad(Splits(name="s", classes=("a", "b"), train=Images((good, bad[0]), (0, 1))))
