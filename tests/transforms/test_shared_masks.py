"""Masks of earlier tasks in a new one: borrowed, or as its start."""

import copy
import dataclasses
import hashlib
import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from images import NET, bitgraft, furnish
from tiny import batch, learn, run, tiny
from torch import nn

from bitgraft import Network, Task, read_archive
from bitgraft.errors import (
    CorruptError,
    ExportError,
    MissingTaskError,
    StoppedError,
    StoreError,
    TaskError,
    TrainingError,
    UnknownTaskError,
    WrongBackboneError,
)
from bitgraft.export.onnx_file import bundle_bytes
from bitgraft.format import archive
from bitgraft.format.inspect import inspect_file
from bitgraft.sharing.pulling import fetch, install
from bitgraft.store import Backbone, Store
from bitgraft.training.presets import QUICK
from bitgraft.transforms.bits import pack, packed_size
from bitgraft.transforms.masked import Masked
from bitgraft.transforms.shared_masks import Borrowing, borrowed_terms
from bitgraft.workflows.train_task import Request, open_store, train

IMAGES = batch(6)


def reference(weight: torch.Tensor, masks: list[torch.Tensor], k: torch.Tensor) -> list[float]:
    """The sum over earlier tasks, element by element, in float64."""
    values = weight.double().flatten().tolist()
    found = []
    for index, w in enumerate(values):
        total = 0.0
        for mask, (k2, k3) in zip(masks, k.double().tolist(), strict=True):
            bit = float(mask.flatten()[index])
            total += k2 * bit + k3 * w * bit
        found.append(total)
    return found


def drawn(shape: tuple[int, ...], tasks: int, seed: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    masks = [torch.rand(shape, generator=rng) < 0.4 for _ in range(tasks)]
    return torch.randn(shape, generator=rng), masks, torch.randn(tasks, 2, generator=rng)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(1, 3), st.integers(0, 2**20))
def test_borrowed_terms_against_the_equation(shape, tasks, seed):
    weight, masks, k = drawn(tuple(shape), tasks, seed)
    found = borrowed_terms(weight, list(map(pack, masks)), k)
    assert found.flatten().tolist() == pytest.approx(reference(weight, masks, k), rel=1e-5, abs=1e-6)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.booleans(), st.integers(1, 3), st.integers(0, 2**20))
def test_gradients_of_borrowed_terms_match_autograd(large, tasks, seed):
    weight, masks, k = drawn((128, 130) if large else (3, 4, 2, 2), tasks, seed)  # one size for the compiled loops
    if weight.dim() == 4:
        weight = weight.to(memory_format=torch.channels_last)
    mine, plain = k.clone().requires_grad_(), k.double().requires_grad_()
    cost = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed + 1))
    (borrowed_terms(weight, list(map(pack, masks)), mine) * cost).sum().backward()
    wide = weight.double()
    whole = sum(k2 * mask + k3 * wide * mask for mask, (k2, k3) in zip(masks, plain, strict=True))
    (whole * cost).sum().backward()
    torch.testing.assert_close(mine.grad.double(), plain.grad, rtol=1e-4, atol=1e-4)


def nudge(task: Task, seed: int = 0) -> Task:
    """Change every learned parameter, like training."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in task.roles():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
    return task


def network(*earlier: str, **options) -> Network:
    net = Network(tiny(), **options)
    for seed, name in enumerate(earlier):
        nudge(net.add_task(name, classes=3, preset=None, seed=seed), seed)
    return net.eval()


def with_borrower(*earlier: str, **options) -> Network:
    net = network(*earlier)
    nudge(net.add_task("new", classes=4, preset=None, borrow=earlier, seed=7, **options), 7)
    return net.eval()


@pytest.mark.parametrize("per", ["layer", "channel"])
def test_a_task_runs_with_the_whole_equation(per):
    net = with_borrower("a", "b", per=per)
    task = net.tasks["new"]
    for name, weight in task.tensors().items():
        if name in task.transforms:
            transform, base = task.transforms[name], net.anatomy.tensor(name).detach()
            masks = [net.tasks[other].transforms[name].mask() for other in ("a", "b")]
            extra = torch.tensor(reference(base, masks, transform.borrowed.detach())).view(base.shape)
            mask = transform.mask()
            k = transform.values().detach().view(4, *(transform.weight.channel_shape if per == "channel" else ()))
            whole = k[0] * base + k[1] + k[2] * mask + k[3] * base * mask + extra
            torch.testing.assert_close(weight, whole.float(), rtol=1e-5, atol=1e-6)
            assert not torch.equal(weight, base)


def test_a_borrowing_task_starts_exactly_as_one_without():
    net = network("a", "b")
    plain = net.add_task("plain", classes=4, preset=None, seed=7)
    mixing = net.add_task("mixing", classes=4, preset=None, seed=7, borrow=["a", "b"])
    for name, weight in plain.tensors().items():
        assert torch.equal(mixing.tensors()[name], weight)
    for task in (plain, mixing):
        task.scale_k2_by_r(1e-3, seed=3)
    for name in plain.transforms:
        assert torch.equal(plain.transforms[name].scores, mixing.transforms[name].scores)
    assert [(role, p.shape) for role, p in plain.roles()] == [
        (role, p.shape) for role, p in mixing.roles() if p.shape != (2, 2)
    ]
    assert [role for role, p in mixing.roles() if p.shape == (2, 2)] == ["k"] * len(plain.transforms)


def test_borrowed_k_are_trained_and_earlier_tasks_do_not_change():
    net = network("a", "b")
    before = {name: run(net, IMAGES, task=name) for name in ("a", "b")}
    task = net.add_task("new", classes=4, preset=None, borrow=["a", "b"])
    learn(net, "new", IMAGES, steps=3)
    for transform in task.transforms.values():
        assert transform.borrowed.detach().ne(0).all()
    for name, output in before.items():
        assert torch.equal(run(net, IMAGES, task=name), output)
        assert not net.tasks[name].learns(), "dependencies are frozen"


def test_only_scalars_are_added_and_masks_are_shared():
    net = network("a", "b")
    plain, mixing = (
        net.add_task("plain", classes=4, preset=None),
        net.add_task("mixing", classes=4, preset=None, borrow=["a", "b"]),
    )
    assert mixing.bits() - plain.bits() == 32 * 2 * 2 * len(plain.transforms)
    held = {tensor.data_ptr() for task in ("a", "b") for tensor in net.tasks[task].buffers()}
    own = [t for t in [*mixing.parameters(), *mixing.buffers()] if t.dtype == torch.uint8 or t.data_ptr() in held]
    assert not own
    mixing.freeze()
    bits = [t for t in mixing.buffers() if t.dtype == torch.uint8]
    assert sum(map(len, bits)) == sum(packed_size(w.shape.numel()) for w in net.anatomy.weights.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"per": "channel"}, {"surrogate": "sigmoid", "threshold": 5e-3}])
def test_freezing_saving_and_loading_change_nothing(dtype, options, tmp_path):
    net, again = with_borrower("a", "b", **options), Network(tiny())
    for network_ in (net, again):
        network_.to(dtype).eval()
    images = IMAGES.to(dtype)
    learning = run(net, images, task="new")
    net.tasks["new"].freeze()
    assert torch.equal(run(net, images, task="new"), learning)
    for name in ("a", "b", "new"):
        net.save_task(name, tmp_path / name)
        again.load_task(tmp_path / name)
    assert torch.equal(run(again, images, task="new"), learning)
    assert again.tasks["new"].bits() == net.tasks["new"].bits()
    saved = read_archive(tmp_path / "new")
    assert archive.content_hash(archive.pack_task(again.tasks["new"], "")) == archive.content_hash(saved)
    assert again.tasks["new"].metadata == saved.metadata == net.tasks["new"].metadata
    assert torch.equal(again.export("new")(images), learning)
    assert torch.equal(run(copy.deepcopy(again), images, task="new"), learning)


def test_every_kind_of_layer(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1, groups=2),
        nn.ConvTranspose2d(6, 4, 2, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 160),
        nn.ReLU(),
        nn.Linear(160, 130),  # large enough for the compiled loops
        nn.Linear(130, 3),
    ).to(memory_format=torch.channels_last)
    net, again = (Network(copy.deepcopy(model), example=(2, 4, 4, 4)).eval() for _ in range(2))
    nudge(net.add_task("a", classes=3, preset=None))
    nudge(net.add_task("new", classes=3, preset=None, borrow="a", per="channel"))
    images = batch(2, 4, 4, 4)
    learning = run(net.eval(), images, task="new")
    for name in ("a", "new"):
        net.save_task(name, tmp_path / name)
        again.load_task(tmp_path / name)
    assert torch.equal(run(again.eval(), images, task="new"), learning)


def test_the_file_names_its_dependencies_and_is_refused_without_them(tmp_path):
    net, again = with_borrower("zebra", "ant"), network()
    for name in net.tasks:
        net.save_task(name, tmp_path / name)
    metadata = read_archive(tmp_path / "new").metadata
    assert list(metadata.depends_on) == ["zebra", "ant"], "in the order of the k, not sorted"
    for name, digest in metadata.depends_on.items():
        assert digest == archive.content_hash(read_archive(tmp_path / name))
    with pytest.raises(MissingTaskError, match="'new' builds on 'zebra', 'ant', not here"):
        again.load_task(tmp_path / "new")
    again.load_task(tmp_path / "ant")
    with pytest.raises(MissingTaskError, match="builds on 'zebra', not here under any name: load that"):
        again.load_task(tmp_path / "new")
    nudge(again.add_task("zebra", classes=3, preset=None), 5)
    with pytest.raises(MissingTaskError, match="builds on another task 'zebra'"):
        again.load_task(tmp_path / "new")
    assert list(again.tasks) == ["ant", "zebra"]
    again.load_task(tmp_path / "zebra", name="quagga")
    assert list(again.load_task(tmp_path / "new").metadata.depends_on) == ["quagga", "ant"]
    assert torch.equal(run(again.eval(), IMAGES, task="new"), run(net, IMAGES, task="new"))


def by_the_specification(path) -> tuple[dict, dict[str, np.ndarray]]:
    """Read metadata and tensors from a file as documented in docs/format.md."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    about = json.loads(header.pop("__metadata__")["bitgraft"])
    found = {}
    for key, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        kind = {"U8": "u1", "F32": "<f4", "I64": "<i8"}[entry["dtype"]]
        found[key] = np.frombuffer(data[begin:end], kind).reshape(entry["shape"])
    return about, found


def test_the_files_alone_are_enough_by_the_specification(tmp_path):
    net = with_borrower("zebra", "ant")
    for name in net.tasks:
        net.save_task(name, tmp_path / name)
    about, own = by_the_specification(tmp_path / "new")
    earlier = {}
    for name in ("ant", "zebra"):
        other, tensors = by_the_specification(tmp_path / name)
        digest = hashlib.sha256(json.dumps([other["method"], []], separators=(",", ":")).encode() + b"\n")
        for key in sorted(key for key in tensors if ":" in key):
            digest.update(key.encode() + b"\n" + tensors[key].tobytes())
        earlier[digest.hexdigest()] = tensors
    for name, shape in about["shapes"].items():
        weight = net.anatomy.tensor(name).detach().numpy()

        def mask(tensors, name=name, shape=shape):
            packed = tensors[f"{name}:mask"]
            return np.unpackbits(packed, bitorder="little")[: np.prod(shape)].reshape(shape).astype("f4")

        k0, k1, k2, k3 = own[f"{name}:k"]
        found = k0 * weight + k1 + k2 * mask(own) + k3 * weight * mask(own)
        for digest, (k2, k3) in zip(about["leans_on"].values(), own[f"{name}:borrowed"], strict=True):
            found = found + k2 * mask(earlier[digest]) + k3 * weight * mask(earlier[digest])
        np.testing.assert_allclose(net.tasks["new"].tensors()[name].detach().numpy(), found, rtol=1e-5, atol=1e-6)


def test_loading_freezes_the_files_dependencies(tmp_path):
    net = with_borrower("a")
    net.save_task("new", tmp_path / "new")
    twin = network("a")
    assert twin.tasks["a"].learns()
    twin.load_task(tmp_path / "new")
    assert not twin.tasks["a"].learns()
    assert torch.equal(run(twin.eval(), IMAGES, task="new"), run(net, IMAGES, task="new"))


def test_a_task_that_borrows_can_be_borrowed_from_and_none_of_them_removed(tmp_path):
    net, again = with_borrower("a"), network()
    third = nudge(net.add_task("third", classes=2, preset=None, borrow=["new"]), 9)
    assert list(third.metadata.depends_on) == ["new"]
    assert torch.equal(
        third.transforms["stem.weight"]._earlier[0].packed, net.tasks["new"].transforms["stem.weight"].packed
    )
    for earlier, later in (("a", "new"), ("new", "third")):
        with pytest.raises(TaskError, match=f"'{earlier}' cannot be removed: '{later}' would not run without it"):
            net.remove_task(earlier)
    for name in ("a", "new", "third"):
        net.save_task(name, tmp_path / name)
        again.load_task(tmp_path / name)
    assert torch.equal(run(again.eval(), IMAGES, task="third"), run(net.eval(), IMAGES, task="third"))
    for name in ("third", "new", "a"):
        net.remove_task(name)


def test_weights_that_an_earlier_task_owns_are_not_borrowed(tmp_path):
    net = network()
    nudge(net.add_task("a", classes=3, preset=None, own="stem.weight"))
    task = nudge(net.add_task("new", classes=3, preset=None, borrow=["a"]))
    assert type(task.transforms["stem.weight"]) is Masked
    assert isinstance(task.transforms["pointwise.weight"], Borrowing)
    again = network()
    for name in ("a", "new"):
        net.save_task(name, tmp_path / name)
        again.load_task(tmp_path / name)
    assert torch.equal(run(again.eval(), IMAGES, task="new"), run(net.eval(), IMAGES, task="new"))


@pytest.mark.parametrize(
    ("borrow", "method", "error", "said"),
    [
        (["b"], "full", UnknownTaskError, "no task 'b' to take masks from .known: 'a', 'lora', 'pack'"),
        (["original"], "full", UnknownTaskError, "no task 'original'"),
        (["new"], "full", UnknownTaskError, "no task 'new'"),
        (["lora"], "full", TaskError, "'lora' has method 'lora', which has no masks to borrow"),
        (["pack"], "full", TaskError, "'pack' has method 'packnet', which has no masks to borrow"),
        (["a", "a"], "full", TaskError, "the same masks more than once"),
        (["a"], "simple", TaskError, "method 'simple' cannot use masks of earlier tasks: use full"),
        (["a"], "packnet", TaskError, "method 'packnet' cannot use masks of earlier tasks"),
    ],
)
def test_what_cannot_be_borrowed(borrow, method, error, said):
    net = network("a")
    net.add_task("lora", classes=2, preset=None, method="lora")
    net.add_task("pack", classes=2, preset=None, method="packnet").prune(0.5)
    with pytest.raises(error, match=said):
        net.add_task("new", classes=2, preset=None, method=method, borrow=borrow)
    assert list(net.tasks) == ["a", "lora", "pack"]
    assert net.tasks["a"].learns(), "a refusal freezes nothing"


def test_an_earlier_task_of_another_backbone_is_refused(tmp_path):
    net, other = with_borrower("a"), Network(tiny(seed=1))
    for name in ("a", "new"):
        net.save_task(name, tmp_path / name)
        with pytest.raises(WrongBackboneError):
            other.load_task(tmp_path / name)


def test_invalid_files_are_refused(tmp_path):
    net = with_borrower("a", "b")
    filed = archive.pack_task(net.tasks["new"], net.fingerprint)
    key = "stem.weight:borrowed"
    other = {name: tensor for name, tensor in filed.tensors.items() if name != key}
    (first, digest), *_ = filed.metadata.depends_on.items()
    net.remove_task("new")

    def refuse(**changes):
        archive.save(dataclasses.replace(filed, **changes), tmp_path / "bad")
        with pytest.raises(CorruptError) as fault:
            net.load_task(tmp_path / "bad")
        assert list(net.tasks) == ["a", "b"]
        return str(fault.value)

    assert "parts should be" in refuse(tensors=other)
    assert "parts should be" in refuse(tensors={**other, key: torch.zeros(1, 2)})
    assert "parts should be" in refuse(tensors={**other, key: torch.zeros(2, 3)})
    assert "parts should be" in refuse(metadata=dataclasses.replace(filed.metadata, depends_on={first: digest}))
    assert "parts should be" in refuse(metadata=dataclasses.replace(filed.metadata, depends_on={}))
    assert "cannot depend on" in refuse(
        metadata=dataclasses.replace(filed.metadata, depends_on={"a": digest, "b": digest})
    )
    assert "cannot depend on" in refuse(metadata=dataclasses.replace(filed.metadata, method="simple"))


def test_inspecting_the_file(tmp_path):
    net = with_borrower("a", "b")
    net.save_task("new", tmp_path / "new.safetensors")
    found = inspect_file(tmp_path / "new.safetensors")
    layers = len(net.anatomy.weights)
    assert found.bytes["k"] == 4 * layers * (4 + 4)
    assert found.plain()["leans_on"] == ["a", "b"]


def test_a_mixed_batch_with_one_cached_module():
    net = Network(tiny(), active=1).eval()
    for name, borrow in (("a", ()), ("b", ()), ("new", ("a", "b"))):
        nudge(net.add_task(name, classes=3, preset=None, borrow=borrow), len(net.tasks)).freeze()
    names = ["new", "a", "new", "b", "a", "new"]
    with torch.no_grad():
        together = net(IMAGES, task=names)
        for image, name, scores in zip(IMAGES, names, together, strict=True):
            torch.testing.assert_close(scores, net(image[None], task=name)[0], rtol=1e-4, atol=1e-5)


def test_a_borrowing_task_cannot_be_bundled():
    net = with_borrower("a")
    with pytest.raises(ExportError, match=r"'new' .* only tasks made of masks and classes"):
        bundle_bytes(net, ["a", "new"])


@pytest.mark.parametrize("per", ["layer", "channel"])
def test_a_task_starts_as_an_earlier_one(per):
    net = network()
    first = nudge(net.add_task("first", classes=3, preset=None, per=per))
    first.owned["norm1.running_mean"].add_(1)
    task = net.add_task("new", classes=3, preset=None, start="first", per=per)
    assert not task.metadata.depends_on
    for name, tensor in task.tensors().items():
        assert name in net.anatomy.head_names() or torch.equal(tensor, first.tensors()[name]), name
    assert not torch.equal(task.owned["fc.weight"], first.owned["fc.weight"])
    for name, transform in task.transforms.items():
        view = net.anatomy.tensor(name).detach()
        _, _, k2, k3 = first.transforms[name].values().detach().view(4, *([-1, 1, 1, 1] if per == "channel" else []))
        size = ((k2 + k3 * view).abs().mean() / 2).item()
        torch.testing.assert_close(transform.scores.detach().abs(), torch.full(view.shape, size))
    before = {name: tensor.detach().clone() for name, tensor in task.tensors().items()}
    task.scale_k2_by_r(1e-3, seed=0)  # no effect on masks that do not start at W~ = W
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.tensors().items())
    learn(net, "new", IMAGES)
    net.remove_task("first")
    run(net, IMAGES, task="new")


def test_starting_and_borrowing_together():
    net = network("a", "b")
    task = net.add_task("new", classes=3, preset=None, start="a", borrow=["a", "b"])
    for name in task.transforms:
        assert torch.equal(task.tensors()[name], net.tasks["a"].tensors()[name])
    assert list(task.metadata.depends_on) == ["a", "b"]


@pytest.mark.parametrize(
    ("start", "options", "error", "said"),
    [
        ("b", {}, UnknownTaskError, "no task 'b'"),
        ("a", {"per": "channel"}, TaskError, "one k per layer in one task and one per channel in the other"),
        ("a", {"k1": 0.0}, TaskError, "k1 = .* in the earlier task, but here it is fixed to 0"),
        ("a", {"method": "simple"}, TaskError, "'simple' cannot use masks"),
        ("lora", {}, TaskError, "cannot start from 'lora', whose 'stem.weight' has no mask"),
        ("mixing", {}, TaskError, "cannot start from 'mixing', whose 'stem.weight' has no mask of its own"),
        ("outright", {}, TaskError, "cannot start from 'outright', whose 'stem.weight' has no mask"),
    ],
)
def test_what_a_task_cannot_start_from(start, options, error, said):
    net = network("a")
    net.add_task("lora", classes=2, preset=None, method="lora")
    net.add_task("mixing", classes=2, preset=None, borrow="a")
    net.add_task("outright", classes=2, preset=None, own="stem.weight")
    with pytest.raises(error, match=said):
        net.add_task("new", classes=2, preset=None, start=start, **options)
    assert "new" not in net.tasks


CONFIG = QUICK.changed(epochs=1, batch=8, size=16)


@pytest.fixture
def place(tmp_path, monkeypatch):
    furnish(tmp_path, monkeypatch)
    store, net = open_store("store", Backbone(NET))
    for seed, name in enumerate(("a", "b")):
        train(store, net, Request("photos", name, "full", CONFIG.changed(seed=seed)))
    return tmp_path


def test_in_a_store(place, capsys, monkeypatch):
    def command(*given):
        return bitgraft(capsys, monkeypatch, *given)

    new = ("train", "photos", "--store", "store", "--size", "16", "--batch", "8", "--epochs", "1", "--task", "new")
    code, _, err = command(*new, "--borrow", "b", "--borrow", "a")
    assert (code, err) == (0, "")
    store = Store("store")
    assert list(store.archive("new").metadata.depends_on) == ["b", "a"]
    code, out, err = command("eval", "photos", "--task", "new", "--store", "store", "--json")
    assert (code, err) == (0, ""), "it is loaded with its dependencies"
    assert json.loads(out)["accuracy"] == store.archive("new").metrics["test"]["accuracy"]
    code, _, err = command(*new[:-1], "a", "--overwrite")
    assert code == 1
    assert "task 'a' cannot be replaced: 'new' builds on it" in err
    for more, code, said in [
        (("--borrow", "c"), 1, "has no task 'c'; it has a, b, new"),
        (("--borrow", "new", "--overwrite"), 1, "'new' cannot build on itself"),
        (("--borrow", "a", "--method", "simple", "--overwrite"), 2, "need method full, not simple"),
        (("--start", "a", "--method", "lora", "--overwrite"), 2, "need method full, not lora"),
        (("--borrow", "a", "--store", "elsewhere", "--backbone", NET), 2, "there is none at elsewhere"),
    ]:
        found, _, err = command(*new, *more)
        assert (found, said in err, err.count("\n")) == (code, True, 1 if code == 1 else err.count("\n")), err
    assert not (place / "elsewhere").exists()
    store.path("a").rename(place / "away")
    with pytest.raises(MissingTaskError, match="'new' builds on 'a', not here"):
        store.load(store.network(), "new")
    (place / "away").rename(store.path("a"))


def test_between_stores(place):
    store, net = open_store("store", None)
    train(store, net, Request("photos", "new", "full", CONFIG, borrow=("a",)))
    other = Store.create("other", Backbone(NET), net)
    with pytest.raises(MissingTaskError, match="builds on task 'a', which the store at other does not have: pull"):
        install(fetch("store/new.safetensors"), other)
    install(fetch("store/a.safetensors"), other)
    with pytest.raises(StoreError, match="builds on the task 'a' that it would replace: pass --as another name"):
        install(fetch("store/new.safetensors"), other, "a", overwrite=True)
    install(fetch("store/new.safetensors"), other)
    with pytest.raises(StoreError, match="'a' cannot be replaced: 'new' builds on it"):
        install(fetch("store/b.safetensors"), other, "a", overwrite=True)
    fresh = other.network()
    assert set(other.load(fresh, "new").metadata.depends_on) == {"a"}


def test_a_file_that_depends_on_itself_is_refused(place):
    store, net = open_store("store", None)
    filed = store.archive("a")
    archive.save(
        dataclasses.replace(filed, metadata=dataclasses.replace(filed.metadata, depends_on={"a": "0" * 64})),
        store.path("a"),
    )
    with pytest.raises(MissingTaskError, match="'a' builds on 'a', not here"):
        store.load(net, "a")


def test_an_interrupted_run_resumes_only_with_the_same_masks(place):
    def request(name, **changes):
        return Request("photos", name, "full", CONFIG, borrow=("b", "a"), start="b", **changes)

    store, net = open_store("store", None)
    whole = train(store, net, request("whole")).path.read_bytes()
    with pytest.raises(StoppedError):
        train(*open_store("store", None), request("half"), stop=lambda: True)
    with pytest.raises(TrainingError, match=r"started with other settings .borrow was"):
        train(*open_store("store", None), dataclasses.replace(request("half", resume=True), borrow=("a",)))
    with pytest.raises(TrainingError, match=r"started with other settings .borrow was"):
        train(*open_store("store", None), dataclasses.replace(request("half", resume=True), borrow=()))
    resumed = train(*open_store("store", None), request("half", resume=True)).path.read_bytes()
    tensors = [archive.from_bytes(data).tensors for data in (whole, resumed)]
    assert all(torch.equal(tensor, tensors[1][key]) for key, tensor in tensors[0].items())
