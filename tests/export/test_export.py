"""Exported files give the task's scores, also without bitgraft."""

import io
import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import onnx
import onnxruntime
import pytest
import timm
import torch
from images import bitgraft
from safetensors import safe_open
from tiny import METHODS, batch, learn, run, tiny
from torch import nn

from bitgraft import Network, __version__
from bitgraft.errors import ExportError
from bitgraft.export import onnx_file, plain
from bitgraft.export.plain import Subject
from bitgraft.store import Backbone, Store
from bitgraft.transforms.bits import pack

FAMILIES = {
    "resnet": ("test_resnet", {}),
    "densenet": ("densenet121", {"growth_rate": 4, "block_config": (2, 1)}),
    "efficientnet": ("test_efficientnet", {}),
    "convnext": ("test_convnext", {}),
    "vit": ("test_vit", {"img_size": 32}),
}
SIZE = {"size": 8, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.2]}
CLASSES = ["a rose", "ein Stiefmütterchen", "向日葵"]
OPEN = """
import importlib.util, json, sys
from pathlib import Path
assert importlib.util.find_spec("bitgraft") is None, "bitgraft is installed here"
import numpy, onnxruntime, timm, torch
from safetensors.torch import load_file
torch.set_num_threads(1)
folder = Path(sys.argv[1])
for family, (name, options) in json.loads((folder / "families.json").read_text()).items():
    images, expected = torch.load(folder / f"{family}.pt")
    model = timm.create_model(name, num_classes=3, **options).eval()
    model.load_state_dict(load_file(folder / f"{family}.safetensors"))
    program = torch.export.load(folder / f"{family}.pt2").module()
    with torch.no_grad():
        assert torch.equal(model(images), expected), f"{family}: plain weights"
        assert torch.equal(program(images), expected), f"{family}: torch.export"
    if (file := folder / f"{family}.onnx").exists():
        (given,) = onnxruntime.InferenceSession(file).run(None, {"images": images.numpy()})
        assert numpy.abs(given - expected.numpy()).max() <= 1e-4 * expected.abs().max().item(), f"{family}: ONNX"
    print(family)
assert not any(name.startswith("bitgraft") for name in sys.modules)
"""


def taught(backbone: nn.Module, *shape: int, method: str = "full", classes=CLASSES, name="t", net=None) -> Network:
    """A network with a slightly trained task whose scores depend on the image."""
    for layer in backbone.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0  # statistics of the last batch, so that no layer is dead
    net = net or Network(backbone)
    net.add_task(name, classes=classes, method=method, preprocessing={**SIZE, "size": shape[-1] if shape else 8})
    learn(net, name, batch(4, *shape), rate=1e-3)
    net.tasks[name].freeze()
    scores = run(net.eval(), batch(5, *shape, seed=9), task=name)
    assert scores.std(0).min() > 1e-3 * scores.abs().max()
    return net


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A second virtual environment: links to all installed packages except bitgraft."""
    folder = tmp_path_factory.mktemp("second")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (folder / "packages").mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "bitgraft" not in path.name and path.suffix != ".pth":
            (folder / "packages" / path.name).symlink_to(path)
    site = next((folder / "env").glob("lib/*/site-packages"))
    (site / "packages.pth").write_text(f"{folder / 'packages'}\n")
    return folder / "env/bin/python"


def test_every_form_opens_without_bitgraft_and_gives_the_tasks_scores(environment, tmp_path):
    for family, (name, options) in FAMILIES.items():
        torch.manual_seed(0)
        net = taught(timm.create_model(name, **options).eval(), 3, 32, 32)
        subject = Subject(net, "t")
        data = plain.weights_bytes(plain.weights(subject), subject.header())
        (tmp_path / f"{family}.safetensors").write_bytes(data)
        (tmp_path / f"{family}.pt2").write_bytes(plain.program_bytes(subject))
        if family in ("resnet", "vit"):  # tests/runtime/test_engines.py has the other families' ONNX graphs
            (tmp_path / f"{family}.onnx").write_bytes(onnx_file.onnx_bytes(subject))
        images = batch(5, 3, 32, 32, seed=9)
        torch.save((images, run(net, images, task="t")), tmp_path / f"{family}.pt")
    (tmp_path / "families.json").write_text(json.dumps(FAMILIES))
    done = subprocess.run([environment, "-I", "-c", OPEN, str(tmp_path)], capture_output=True, text=True)
    assert (done.stdout.split(), done.returncode) == (list(FAMILIES), 0), done.stderr


def test_metadata_of_files():
    subject = Subject(taught(tiny()), "t")
    model = onnx.load_from_string(onnx_file.onnx_bytes(subject))
    said = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(said["classes"]) == CLASSES
    assert json.loads(said["preprocessing"])["mean"] == SIZE["mean"]
    assert (said["task"], said["bitgraft"], said["backbone"]) == ("t", __version__, subject.net.fingerprint)
    assert [dim.dim_param or dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim] == [
        "batch",
        3,
        8,
        8,
    ]
    assert [dim.dim_param or dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim] == ["batch", 3]
    assert not any(node.metadata_props or node.doc_string for node in model.graph.node)  # paths on this machine
    onnx.checker.check_model(model, full_check=True)
    files = dict.fromkeys(subject.header(), "")
    torch.export.load(io.BytesIO(plain.program_bytes(subject)), extra_files=files)
    assert files == said


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("full", "adapters-joint")])
def test_programs_of_every_method_are_exact(method):
    """`program_bytes` already compares; this adds another batch size."""
    net = taught(tiny(), method=method)
    program = torch.export.load(io.BytesIO(plain.program_bytes(Subject(net, "t")))).module()
    assert torch.equal(run(program, batch(7)), run(net, batch(7), task="t"))


def test_a_program_of_other_scores_is_refused(monkeypatch):
    subject = Subject(taught(tiny()), "t")
    answer = Subject.answer
    monkeypatch.setattr(Subject, "answer", lambda self, x: torch.nextafter(answer(self, x), torch.tensor(torch.inf)))
    with pytest.raises(ExportError, match="other scores than the task 't' on a batch of 1, so no file was written"):
        plain.program_bytes(subject)


@pytest.mark.parametrize(("change", "refused"), [(0.9e-4, False), (1.1e-4, True), (float("nan"), True)])
def test_scores_that_differ_are_refused(change, refused):
    expected = batch(2, 5)
    given = expected.clone()
    given[1, 2] += change * expected.abs().max()

    class Session:
        def run(self, names, inputs):
            return (given.numpy(),)

    if refused:
        with pytest.raises(ExportError, match=r"more than 0\.0001, so no file was written"):
            onnx_file.check_scores(Session(), {}, expected, "task 't'")
    else:
        assert onnx_file.check_scores(Session(), {}, expected, "task 't'") == pytest.approx(change, rel=1e-2)


def test_a_network_that_cannot_be_traced():
    class Moody(nn.Module):
        def forward(self, x):
            return x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3))

    net = taught(nn.Sequential(nn.Conv2d(3, 4, 3), Moody(), nn.Linear(4, 2)))
    with pytest.raises(ExportError, match=r"torch\.export cannot follow Sequential"):
        plain.program_bytes(Subject(net, "t"))


def reference(net: Network, name: str, images: torch.Tensor, width: int) -> torch.Tensor:
    scores = run(net, images, task=name)
    return torch.cat([scores, torch.full((len(scores), width - scores.shape[1]), onnx_file.PADDING)], 1)


def test_one_file_holds_many_tasks(tmp_path):
    net = Network(tiny())
    plan = {"a": ("full", 3), "b": ("simple", 7), "c": ("classifier", 2), "d": ("piggyback", 5)}
    for name, (method, classes) in plan.items():
        taught(net.backbone, method=method, classes=classes, name=name, net=net)
    before = {name: (tensor.clone(), tensor.requires_grad) for name, tensor in net.backbone.named_parameters()}
    data = onnx_file.bundle_bytes(net, list(plan))
    for name, tensor in net.backbone.named_parameters():
        assert torch.equal(tensor, before[name][0])
        assert tensor.requires_grad == before[name][1]
    model = onnx.load_from_string(data)
    held = [onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer]
    for weight, transform in net.tasks["a"].transforms.items():
        (stacked,) = [a for a in held if a.dtype == "uint8" and a.shape == (4, len(pack(transform.mask())))][:1]
        assert stacked.shape[0] == len(plan), weight
    assert sum(a.size for a in held if a.dtype == "float32" and a.shape == (8, 3, 3, 3)) == 8 * 27  # W is there once
    session = onnxruntime.InferenceSession(data)
    images = batch(5)
    for number, name in enumerate(plan):
        (given,) = session.run(["logits"], {"images": images.numpy(), "task": torch.tensor([number]).numpy()})
        expected = reference(net, name, images, 7)
        assert given.argmax(1).tolist() == expected.argmax(1).tolist()
        assert torch.allclose(torch.from_numpy(given), expected, rtol=1e-4, atol=1e-5)
    said = {entry.key: entry.value for entry in model.metadata_props}
    assert [(t["task"], len(t["classes"])) for t in json.loads(said["tasks"])] == [(n, c) for n, (_, c) in plan.items()]


@pytest.mark.parametrize(
    ("method", "size", "said"),
    [
        ("lora", 8, "only tasks made of masks and classes"),
        ("finetune", 8, "tasks 'b' and 'a' cannot share a file: one replaces"),
        ("full", 10, "takes images of 8 x 8 pixels and 'b' of 10 x 10"),
    ],
)
def test_tasks_that_cannot_share_a_file(method, size, said):
    net = taught(tiny(), name="a")
    taught(net.backbone, 3, size, size, method=method, name="b", net=net)
    with pytest.raises(ExportError, match=said):
        onnx_file.bundle_bytes(net, ["a", "b"])


def test_a_bundle_with_one_k_per_channel_and_no_bias():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 8, 3, groups=1)
            self.fc = nn.Linear(8, 4, bias=False)

        def forward(self, x):
            return self.fc(self.up(x).mean((2, 3)))

    torch.manual_seed(0)
    net = Network(Bare().eval())
    for name, classes, options in (("a", 2, {"per": "channel"}), ("b", 3, {})):
        net.add_task(name, classes=classes, preprocessing=SIZE, **options)
        learn(net, name, batch())
    session = onnxruntime.InferenceSession(onnx_file.bundle_bytes(net.eval(), ["a", "b"]))
    (given,) = session.run(None, {"images": batch(2).numpy(), "task": torch.tensor([0]).numpy()})
    assert torch.allclose(torch.from_numpy(given), reference(net, "a", batch(2), 3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_half_precision(names):
    net = Network(tiny())
    for name, classes in (("a", 2), ("b", 3)):
        taught(net.backbone, classes=classes, name=name, net=net)
    net.half()
    images = batch(5).half()
    expected = run(net, images, task="a")
    several = len(names) > 1
    data = onnx_file.bundle_bytes(net, names) if several else onnx_file.onnx_bytes(Subject(net, "a"))
    feed = {"images": images.numpy()} | ({"task": torch.tensor([0]).numpy()} if several else {})
    given = torch.from_numpy(onnxruntime.InferenceSession(data).run(None, feed)[0])
    assert torch.allclose(given[:, :2].float(), expected.float(), rtol=1e-2, atol=1e-2 * float(expected.abs().max()))
    assert given[:, 2:].tolist() == [[pytest.approx(onnx_file.PADDING)] * several] * 5
    assert torch.equal(
        run(torch.export.load(io.BytesIO(plain.program_bytes(Subject(net, "a")))).module(), images), expected
    )


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_a_type_that_onnxruntime_cannot_run_is_one_sentence(names):
    net = Network(tiny())
    for name in ("a", "b"):
        taught(net.backbone, name=name, net=net)
    net.bfloat16()
    with pytest.raises(ExportError, match=r"onnxruntime cannot run .*try --format torch-export"):
        onnx_file.bundle_bytes(net, names) if len(names) > 1 else onnx_file.onnx_bytes(Subject(net, "a"))


@pytest.fixture
def store(tmp_path):
    backbone = Backbone("test_resnet", pretrained=False)
    net = Network(backbone.build())
    store = Store.create(tmp_path / "store", backbone, net)
    for name in ("a", "b"):
        taught(net.backbone, 3, 32, 32, name=name, net=net)
        net.save_task(name, store.path(name))
    return store


def test_the_command_writes_each_form(store, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    images, net = batch(2, 3, 32, 32), store.network()
    store.load(net, "a")
    expected = run(net.eval(), images, task="a")
    common = ("export", "--store", "store")
    code, out, err = bitgraft(capsys, monkeypatch, *common, "--task", "a", "--format", "torch-export", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "file": "a.pt2",
        "format": "torch-export",
        "tasks": ["a"],
        "bytes": Path("a.pt2").stat().st_size,
    }
    assert torch.equal(run(torch.export.load("a.pt2").module(), images), expected)
    code, out, _ = bitgraft(capsys, monkeypatch, *common, "--task", "a", "--output", "a.pth")
    assert code == 0
    model = timm.create_model("test_resnet", num_classes=3).eval()
    model.load_state_dict(torch.load("a.pth"))
    assert torch.equal(run(model, images), expected)
    assert bitgraft(capsys, monkeypatch, *common, "--task", "a")[0] == 0
    with safe_open("a-weights.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == CLASSES
    code, out, _ = bitgraft(capsys, monkeypatch, *common, "--all-tasks", "--format", "onnx")
    assert code == 0
    assert "Tasks by number: 0 a, 1 b." in out
    lines = [line.strip() for line in out.splitlines() if line.startswith("  ")]
    found = {"images": images.numpy()}
    exec("\n".join(lines), found)
    assert torch.allclose(torch.from_numpy(found["logits"]), expected, rtol=1e-4, atol=1e-4 * expected.abs().max())


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ((), 2, "give --task NAME or --all-tasks"),
        (("--task", "a", "--all-tasks"), 2, "give either --task or --all-tasks"),
        (("--all-tasks",), 2, "only --format onnx can hold several tasks"),
        (("--task", "a", "--format", "tflite"), 2, "tflite"),
        (("--task", "a", "--format", "onnx"), 1, "pip install '.[onnx]'"),
    ],
)
def test_a_wrong_command_is_one_sentence_and_no_file(store, args, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "onnx", None)  # as if it were not installed
    left, out, err = bitgraft(capsys, monkeypatch, "export", "--store", "store", *args)
    assert (left, out, err.count("\n")) == (code, "", 1)
    assert said in err
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
