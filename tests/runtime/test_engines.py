"""onnxruntime sessions agree with PyTorch, or report why there is none."""

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import timm
import torch
from tiny import batch, learn, run, settled, tiny
from torch import nn

from bitgraft import Network
from bitgraft.errors import ExportError
from bitgraft.runtime import engines, onnx_graph, onnx_layout
from bitgraft.runtime.engines import Graph, Session, check_agreement, make_session
from bitgraft.runtime.onnx_graph import Fold, GraphCache, folded

EXPORTER = "torch.export cannot follow"


class Moody(nn.Module):
    """Data-dependent control flow, which cannot be exported."""

    def forward(self, x):
        return x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3))


def taught(net: Network, name: str, *shape: int, classes: int = 3, method: str = "full") -> Network:
    net.add_task(name, classes=classes, method=method, preprocessing={"size": shape[-1] if shape else 8})
    learn(net, name, batch(4, *shape), rate=1e-2)
    net.tasks[name].freeze()
    return net.eval()


def session(net: Network, name: str, folder, *shape: int) -> Session:
    images = batch(3, *shape)
    head = net.anatomy.head_names()
    return make_session(
        net.export(name), images, run(net, images, task=name), GraphCache(net.fingerprint, folder), head
    )


def test_a_folded_norm_is_what_the_convolution_and_the_norm_give():
    torch.manual_seed(0)
    for bias in (True, False):
        pair = settled(nn.Sequential(nn.Conv2d(4, 6, 3, groups=2, bias=bias), nn.BatchNorm2d(6))).eval()
        names = tuple(f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var"))
        fold = Fold("0.weight", "0.bias" if bias else None, names, pair[1].eps)
        made = dict(folded(pair.state_dict(), [fold]))
        images = batch(2, 4, 8, 8)
        given = nn.functional.conv2d(images, *(made[name] for name in fold.names), groups=2)
        torch.testing.assert_close(given, run(pair, images), rtol=1e-5, atol=1e-6)


def test_tasks_of_all_kinds_and_sizes_run_in_sessions_of_few_graphs(tmp_path):
    net = Network(tiny())
    plan = {"a": ("full", 3), "b": ("simple", 7), "c": ("finetune", 2), "d": ("lora", 4)}
    for name, (method, classes) in plan.items():
        taught(net, name, classes=classes, method=method)
    for name in plan:
        made = session(net, name, tmp_path)
        for count in (1, 5):
            images = batch(count, seed=count)
            torch.testing.assert_close(made(images), run(net, images, task=name), rtol=1e-4, atol=1e-5)
        assert made.nbytes > 4 * sum(p.numel() for p in net.export(name).parameters())
    assert len(list(tmp_path.glob("*.onnx"))) == 1
    names = {entry.name for entry in onnx_graph.need("onnx").load(next(tmp_path.iterdir())).graph.input}
    assert {"images", "stem.weight:folded", "stem.weight:folded_bias", "fc.weight"} <= names
    assert not any("norm" in name for name in names)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("test_resnet", {}),
        ("test_vit", {"img_size": 32}),
        ("densenet121", {"growth_rate": 4, "block_config": (2, 1)}),
        ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 20)}),
    ],
)
def test_families_of_networks(family, options, tmp_path):
    torch.manual_seed(0)
    net = taught(Network(timm.create_model(family, **options).eval(), example=(1, 3, 32, 32)), "t", 3, 32, 32)
    images = batch(4, 3, 32, 32, seed=5)
    expected = run(net, images, task="t")
    made = session(net, "t", tmp_path, 3, 32, 32)
    assert (made(images) - expected).abs().max() <= 1e-4 * expected.abs().max()
    moved = [place for places in made.graph._places.values() for place in places if place.layout is not torch.clone]
    assert moved, "the graph is not in onnxruntime's layout"


class Twice(nn.Module):
    """Its norm layer runs twice, so it is folded into no convolution; onnxruntime computes a scale from its weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.fc = nn.BatchNorm2d(8), nn.Linear(8, 6)

    def forward(self, x):
        return self.fc(self.norm(self.second(self.norm(self.first(x)).relu())).relu().mean((2, 3)))


def test_a_norm_layer_that_runs_twice(tmp_path):
    torch.manual_seed(0)
    net = taught(taught(Network(settled(Twice()).eval()), "t"), "u", classes=5)
    for name in ("t", "u"):
        torch.testing.assert_close(
            session(net, name, tmp_path)(batch(2)), run(net, batch(2), task=name), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("problem", [None, OSError("no folder to write to")])
def test_a_graph_without_a_common_layout_runs_as_exported(problem, tmp_path, monkeypatch):
    def arrange(model, shapes):
        if problem:
            raise problem

    monkeypatch.setattr(engines, "arrange", arrange)
    engines.shared_graph.cache_clear()
    net = taught(taught(Network(tiny()), "t"), "u", classes=5)
    for name in ("t", "u"):
        made = session(net, name, tmp_path)
        torch.testing.assert_close(made(batch(2)), run(net, batch(2), task=name), rtol=1e-4, atol=1e-5)
    assert {place.layout for places in made.graph._places.values() for place in places} == {torch.clone}
    engines.shared_graph.cache_clear()


@pytest.mark.parametrize("block", [4, 8, 16])
@pytest.mark.parametrize("shape", [(16, 16, 1, 1), (24, 5, 3, 2), (7, 1, 3, 3)])
def test_blocks_of_channels_are_what_their_description_says(block, shape):
    """Against a slow reference, element by element."""
    weight = torch.randn(shape)
    o, i, h, w = shape
    outputs, inputs = -(-o // block), -(-i // block)
    both, outer = torch.zeros(outputs, inputs, h, w, block, block), torch.zeros(outputs, i, h, w, block)
    for a, b in product(range(o), range(i)):
        both[a // block, b // block, :, :, b % block, a % block] = weight[a, b]
        outer[a // block, b, :, :, a % block] = weight[a, b]
    assert torch.equal(onnx_layout._blocks(weight, block, block).flatten(), both.flatten())
    assert torch.equal(onnx_layout._blocks(weight, block, 1).flatten(), outer.flatten())


def test_threads_share_a_graph_with_weights_of_their_own(tmp_path):
    net = taught(taught(Network(tiny()), "t"), "u", classes=5)
    made = {name: session(net, name, tmp_path) for name in ("t", "u")}
    assert made["t"].graph is made["u"].graph
    expected = {name: one(batch(20)) for name, one in made.items()}
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda name: (name, made[name](batch(20))), ["t", "u"] * 20))
    assert all(torch.equal(scores, expected[name]) for name, scores in found)


def test_a_graph_says_which_tensor_is_missing(tmp_path):
    net = taught(Network(tiny()), "t")
    graph, state = session(net, "t", tmp_path).graph, net.export("t").state_dict()
    del state["fc.weight"]
    with pytest.raises(ExportError, match=r"no tensor 'fc\.weight'"):
        graph.weights(state)


def test_a_failed_export_is_reported_and_cached(tmp_path, monkeypatch):
    torch.manual_seed(0)
    net = taught(Network(nn.Sequential(nn.Conv2d(3, 4, 3), Moody(), nn.Linear(4, 2)).eval()), "t")
    with pytest.raises(ExportError, match=EXPORTER):
        session(net, "t", tmp_path)
    monkeypatch.setattr(onnx_graph, "make_graph", None)
    with pytest.raises(ExportError, match=EXPORTER):
        session(net, "t", tmp_path)
    assert not list(tmp_path.glob("*.onnx"))


def test_a_damaged_graph_in_the_cache_is_not_used(tmp_path):
    net = taught(Network(tiny()), "t")
    expected = session(net, "t", tmp_path)(batch(2))
    (path,) = tmp_path.glob("*.onnx")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert torch.equal(session(net, "t", tmp_path)(batch(2)), expected)
    with pytest.raises(ExportError, match="cannot make a session"):
        Graph(path.read_bytes(), 1)


def test_a_session_has_weights_of_its_own(tmp_path):
    net = taught(Network(tiny()), "t")
    expected = session(net, "t", tmp_path)(batch(2))
    (path,) = tmp_path.glob("*.onnx")
    state = net.export("t").state_dict()
    made = Session(Graph(path.read_bytes(), 1), state)
    for tensor in state.values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    assert torch.equal(made(batch(2)), expected)


def test_an_unwritable_cache_is_ignored(tmp_path):
    (tmp_path / "file").write_text("in the way")
    net = taught(Network(tiny()), "t")
    made = session(net, "t", tmp_path / "file" / "cache")
    torch.testing.assert_close(made(batch(2)), run(net, batch(2), task="t"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_and_not_cached(missing, tmp_path, monkeypatch):
    net = taught(Network(tiny()), "t")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, missing, None)
        with pytest.raises(ExportError, match=rf"{missing}, which cannot be imported.*pip install '.\[onnx\]'"):
            session(net, "t", tmp_path)
    assert not list(tmp_path.glob("*.txt"))


@pytest.mark.parametrize(
    ("change", "said"),
    [(0.9e-3, None), (1.1e-3, "differ from PyTorch's by 1.1e-03"), (float("nan"), "differ"), (None, "shape")],
)
def test_scores_that_differ_are_refused(change, said):
    expected = torch.tensor([[1.0, 0.0, 0.5], [0.0, 2.0, 1.0]])
    given = expected[:, :2].clone() if change is None else expected + change * torch.tensor([[0.0, 0, 0], [0, 0, 2.0]])
    if said is None:
        check_agreement(given, expected)
    else:
        with pytest.raises(ExportError, match=said):
            check_agreement(given, expected)


def test_another_best_class_is_refused_unless_it_is_a_tie():
    expected = torch.tensor([[100.0, 99.99, 0.0]])
    with pytest.raises(ExportError, match="best class"):
        check_agreement(expected + torch.tensor([[-0.02, 0.0, 0.0]]), expected)
    check_agreement(torch.tensor([[1.0, 1.000001]]), torch.tensor([[1.0, 1.0]]))
