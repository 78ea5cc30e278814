"""Every page of docs/guides runs as it stands: with small networks of random weights, and with a few made-up images."""

import re
import shutil
import warnings
from pathlib import Path

import pytest
import timm
import torch
import torchvision
import transformers
from images import NET, furnish
from PIL import Image
from safetensors import safe_open

from bitgraft import load_backbone
from bitgraft.training import budget

FOLDER = Path(__file__).parents[1] / "docs" / "guides"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def run(page, names=None):
    names = {"__name__": "page", **(names or {})}
    for block in re.findall(r"^```python\n(.*?)^```", (FOLDER / page).read_text(), re.MULTILINE | re.DOTALL):
        small = block.replace("224", "32").replace("classes=102", "classes=3").replace("1024", "64")
        exec(small.replace("num_train_epochs=3", "num_train_epochs=1, report_to=[], use_cpu=True"), names)
    return names


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    furnish(tmp_path, monkeypatch)
    shutil.copy("photos/test/red/0.png", "rose.jpg")
    monkeypatch.setattr(budget, "planned_epochs", lambda *given: 1)
    torch.manual_seed(0)


def test_every_guide_has_a_test():
    assert {f"test_{page.stem}" for page in FOLDER.glob("*.md")} <= set(globals())


def tensors(file):
    with safe_open(file, "pt") as opened:
        return set(opened.keys())


def picture(mode="RGB", value=128):
    return Image.new(mode, (32, 32), value if mode == "L" else (value, 40, 90))


def test_segmentation(monkeypatch):
    make = torchvision.models.segmentation.lraspp_mobilenet_v3_large
    monkeypatch.setattr(
        torchvision.models.segmentation,
        "lraspp_mobilenet_v3_large",
        lambda weights: make(weights=None, weights_backbone=None),
    )
    pets = [(picture(value=100 * kind), picture("L", kind)) for kind in (1, 2, 1)]
    monkeypatch.setattr(torchvision.datasets, "OxfordIIITPet", lambda *where, download: pets)
    names = run("segmentation.md")
    assert {"classifier.low_classifier.weight", "classifier.high_classifier.weight"} <= tensors("pets.safetensors")
    assert names["labels"].shape == (1, 32, 32)
    assert 0 <= names["bitgraft"].evaluate(names["net"], "pets", names["Pets"]("test"))["accuracy"] <= 1


def small_detector(weights):
    """torchvision's Faster R-CNN on three convolutions."""
    layers = [torch.nn.Conv2d(a, b, 3, 2, 1) for a, b in ((3, 8), (8, 8), (8, 16))]
    body = torch.nn.Sequential(*(layer for conv in layers for layer in (conv, torch.nn.ReLU(inplace=True))))
    body.out_channels = 16
    detection = torchvision.models.detection
    return detection.FasterRCNN(
        body,
        min_size=32,
        max_size=32,
        rpn_anchor_generator=detection.rpn.AnchorGenerator(((16,),), ((1.0,),)),
        box_roi_pool=torchvision.ops.MultiScaleRoIAlign(["0"], 3, 2),
        box_head=detection.faster_rcnn.TwoMLPHead(16 * 9, 64),
        box_predictor=detection.faster_rcnn.FastRCNNPredictor(64, 91),
    )


def test_detection(monkeypatch):
    monkeypatch.setattr(
        torchvision.models.detection, "fasterrcnn_mobilenet_v3_large_320_fpn", lambda weights: small_detector(weights)
    )
    box = {"xmin": "4", "ymin": "4", "xmax": "20", "ymax": "24"}
    about = {"annotation": {"object": [{"name": "car", "bndbox": box}, {"name": "cat", "bndbox": box}]}}
    monkeypatch.setattr(
        torchvision.datasets, "VOCDetection", lambda folder, image_set, download: [(picture(), about)] * 3
    )
    names = run("detection.md")
    (found,) = names["found"]
    assert set(found) == {"boxes", "labels", "scores"}
    assert names["result"].history[0]["train_loss"] > 0
    assert "head:cls_score.weight" in tensors("vehicles.safetensors")
    head = names["FastRCNNPredictor"](64, 4)
    names["net"].load_task("vehicles.safetensors", name="again", head=head).eval()
    with torch.no_grad():
        (again,) = names["net"]([names["Vehicles"]("val")[0][0]], task="again")
    assert torch.equal(again["boxes"], found["boxes"])


def test_vit(monkeypatch):
    config = transformers.ViTConfig(image_size=32, patch_size=16, **SIZES)
    make = transformers.ViTForImageClassification
    monkeypatch.setattr(make, "from_pretrained", lambda name: make(config))
    names = run("vit.md")
    assert names["scores"].shape == (1, 2)
    assert "classifier.weight" in tensors("photos.safetensors")


class Words:
    """A tokenizer of a few words."""

    def __call__(self, text, return_tensors=None):
        ids = [len(word) for word in text.split()]
        plain = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        return {n: torch.tensor([v]) for n, v in plain.items()} if return_tensors else plain

    def pad(self, texts, return_tensors):
        longest = max(len(text["input_ids"]) for text in texts)
        return {n: torch.tensor([t[n] + [0] * (longest - len(t[n])) for t in texts]) for n in texts[0]}


@pytest.fixture
def small_bert(monkeypatch):
    config = transformers.BertConfig(vocab_size=100, **SIZES)
    monkeypatch.setattr(
        transformers.AutoModelForSequenceClassification,
        "from_pretrained",
        lambda name: transformers.BertForSequenceClassification(config),
    )
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: Words())


@pytest.mark.usefixtures("small_bert")
def test_text():
    names = run("text.md")
    assert names["scores"].shape == (1, 2)
    assert "classifier.weight" in tensors("reviews.safetensors")


@pytest.mark.usefixtures("small_bert")
def test_trainers(monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: load_backbone(NET))
    images, labels = torch.rand(4, 3, 16, 16), torch.arange(4) % 3
    items = [{**Words()("what a film"), "labels": index % 2} for index in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own: no GPU, few workers
        run("trainers.md", {"loader": torch.utils.data.DataLoader([*zip(images, labels, strict=True)]), "items": items})
    assert "6.weight" in tensors("flowers.safetensors")
    assert "classifier.weight" in tensors("reviews.safetensors")
