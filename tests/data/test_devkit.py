import json

import numpy as np
import pytest
from PIL import Image

from bitgraft.data.devkit import domains, submission
from bitgraft.data.splits import open_data
from bitgraft.errors import DataError

CATEGORIES = [{"id": 50000003, "name": "yield"}, {"id": 50000001, "name": "stop"}, {"id": 50000002, "name": "stop"}]


def devkit(root, domain="gtsrb", parts=("train", "val", "test"), counts=(6, 3, 2)):
    number = 0
    for part, count in zip(parts, counts, strict=True):
        folder = root / "data" / domain / part
        folder.mkdir(parents=True)
        images, annotations = [], []
        for i in range(1, count + 1):
            number += 1
            path = folder / f"{i:06d}.jpg"
            Image.fromarray(np.zeros((8, 8), np.uint8)).save(path)
            images.append({"id": 50200000 + number, "file_name": path.relative_to(root).as_posix()})
            annotations.append({"image_id": 50200000 + number, "category_id": 50000001 + i % 3})
        content = {"images": images, "annotations": annotations[::-1], "categories": CATEGORIES}
        write(root, domain, part, content)
    return root


def write(root, domain, part, content):
    (root / "annotations").mkdir(exist_ok=True)
    (root / "annotations" / f"{domain}_{part}.json").write_text(json.dumps(content))


def read(root, part, domain="gtsrb"):
    return json.loads((root / "annotations" / f"{domain}_{part}.json").read_text())


def strip(root):
    content = read(root, "test")
    del content["annotations"]
    (root / "annotations" / "gtsrb_test.json").unlink()
    write(root, "gtsrb", "test_stripped", content)


def test_a_domain(tmp_path):
    splits = open_data(f"{devkit(tmp_path)}:gtsrb")
    assert splits.name == "gtsrb"
    assert splits.classes == ("stop (0)", "stop (1)", "yield")
    assert splits.category_ids == (50000001, 50000002, 50000003)
    assert splits.train.labels == (1, 2, 0, 1, 2, 0)
    assert splits.train.ids == tuple(range(50200001, 50200007))
    assert splits.train.files[0] == tmp_path / "data" / "gtsrb" / "train" / "000001.jpg"
    assert (len(splits.val), splits.test.labels) == (3, (1, 2))
    assert not splits.flip


def test_train_and_val_join_for_the_submission(tmp_path):
    splits = open_data("kit:gtsrb:train+val", root=devkit(tmp_path / "kit").parent)
    assert (len(splits.train), splits.val, len(splits.test)) == (9, None, 2)
    assert splits.train.ids == tuple(range(50200001, 50200010))


def test_stripped_test_images_have_no_labels_but_ids(tmp_path):
    strip(devkit(tmp_path))
    splits = open_data(f"{tmp_path}:gtsrb")
    assert splits.test.labels == (-1, -1)
    assert splits.test.ids == (50200010, 50200011)
    assert submission([(splits, [2, 0])]) == [
        {"image_id": 50200010, "category_id": 50000003},
        {"image_id": 50200011, "category_id": 50000001},
    ]
    with pytest.raises(DataError, match="gtsrb: a submission needs"):
        submission([(splits, [2])])


def test_a_domain_without_test(tmp_path):
    devkit(tmp_path, parts=("train", "val"), counts=(3, 3))
    assert open_data(f"{tmp_path}:gtsrb").test is None


@pytest.mark.parametrize(("domain", "flip"), [("dtd", False), ("SVHN", False), ("vgg-flowers", True), ("my-own", True)])
def test_flips_are_the_papers(tmp_path, domain, flip):
    devkit(tmp_path, domain, parts=("train", "val"), counts=(3, 3))
    assert open_data(f"{tmp_path}:{domain}").flip == flip


def test_a_devkit_without_a_domain_is_refused(tmp_path):
    devkit(tmp_path)
    assert domains(tmp_path) == ("gtsrb",)
    with pytest.raises(DataError, match=r"devkit: add a domain, as in .*:gtsrb"):
        open_data(tmp_path)


def test_a_missing_annotation_file_is_named(tmp_path):
    devkit(tmp_path)
    with pytest.raises(DataError, match=r"svhn_train\.json is missing; .*gtsrb"):
        open_data(f"{tmp_path}:svhn")
    (tmp_path / "annotations" / "gtsrb_val.json").unlink()
    with pytest.raises(DataError, match=r"gtsrb_val\.json is missing"):
        open_data(f"{tmp_path}:gtsrb")


def test_missing_images_are_counted_and_named(tmp_path):
    devkit(tmp_path)
    for i in (2, 5):
        (tmp_path / "data" / "gtsrb" / "train" / f"{i:06d}.jpg").unlink()
    with pytest.raises(DataError, match=r"2 of the 6 images .* missing: .*000002\.jpg, .*000005\.jpg$"):
        open_data(f"{tmp_path}:gtsrb")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"images": [], "categories": 3}', '{"images": [{}], "categories": []}']
)
def test_annotations_that_cannot_be_read(tmp_path, content):
    devkit(tmp_path)
    (tmp_path / "annotations" / "gtsrb_val.json").write_text(content)
    with pytest.raises(DataError, match=r"gtsrb_val\.json"):
        open_data(f"{tmp_path}:gtsrb")


def test_annotations_that_do_not_fit_together(tmp_path):
    devkit(tmp_path)
    whole = read(tmp_path, "train")
    write(tmp_path, "gtsrb", "train", whole | {"annotations": whole["annotations"][:-2]})
    with pytest.raises(DataError, match="2 of 6 images have no annotation"):
        open_data(f"{tmp_path}:gtsrb")
    strange = [annotation | {"category_id": 7} for annotation in whole["annotations"]]
    write(tmp_path, "gtsrb", "train", whole | {"annotations": strange})
    with pytest.raises(DataError, match=r"1 category ids .* first \[7\]"):
        open_data(f"{tmp_path}:gtsrb")
    write(tmp_path, "gtsrb", "train", whole | {"categories": [*CATEGORIES, {"id": 1, "name": "more"}]})
    with pytest.raises(DataError, match="val and train annotations of gtsrb list different categories"):
        open_data(f"{tmp_path}:gtsrb")
