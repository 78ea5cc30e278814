"""A saved and loaded task is the same to the last bit, in any process."""

import dataclasses
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.numpy
import torch
from torch import Tensor, nn

import bitgraft
from bitgraft.errors import BackboneError, MissingTaskError, TaskError
from bitgraft.format import archive, restore

torch.set_num_threads(1)
CLASSES = ["señal \u2603", 'a "quoted" \\ name', "line\nbreak", "雪", ""]
METHODS = bitgraft.method_names()


def backbone(seed: int = 0) -> nn.Module:
    """Masks that end inside a byte, batch and group norms, grouped and transposed convolutions."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(3, 5, 3, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Conv2d(5, 5, 3, padding=1, groups=5),
            nn.GroupNorm(1, 5),
            nn.ConvTranspose2d(5, 3, 2, stride=2),
            nn.BatchNorm2d(3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(3, 4),
        )
        for norm in (model[1], model[6]):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
    return model.eval()


def network(seed: int = 0, **reading: object) -> bitgraft.Network:
    return bitgraft.Network(backbone(seed), example=(2, 3, 8, 8), **reading)


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def tinker(net: bitgraft.Network, task: bitgraft.Task, seed: int = 1) -> None:
    """Change every learned value and running statistic, as training would."""
    rng = torch.Generator().manual_seed(seed)
    for role, parameter in task.roles():
        size = 2e-2 if role == "scores" else 0.3
        parameter.add_(torch.randn(parameter.shape, generator=rng) * size)
    task.train()
    net(images() + 1, task=task.name)
    task.eval()


def trained(net: bitgraft.Network, name: str, method: str, **options: object) -> bitgraft.Task:
    task = net.add_task(name, classes=CLASSES, method=method, **options)
    tinker(net, task)
    if method == "packnet":
        task.prune(0.5)
    return task


@torch.no_grad()
def same_outputs(one: bitgraft.Network, other: bitgraft.Network, task: str = "t", there: str = "t") -> bool:
    return torch.equal(one(images(), task=task), other(images(), task=there))


def assert_same_task(saved: bitgraft.Task, loaded: bitgraft.Task) -> None:
    assert dataclasses.asdict(loaded.metadata) == dataclasses.asdict(saved.metadata)
    assert loaded.metrics == saved.metrics
    before, after = archive.pack_task(saved, ""), archive.pack_task(loaded, "")
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(t, after.tensors[key]) for key, t in before.tensors.items())
    assert list(loaded.transforms) == list(saved.transforms)
    assert loaded.owned.keys() == saved.owned.keys()
    kept = {k: (t.dtype, t.stride(), isinstance(t, nn.Parameter)) for k, t in saved.owned.items()}
    assert kept == {k: (t.dtype, t.stride(), isinstance(t, nn.Parameter)) for k, t in loaded.owned.items()}
    assert not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_a_loaded_task_is_the_saved_one(method: str, tmp_path: Path) -> None:
    net, rebuilt = network(), network()
    task = trained(net, "t", method)
    task.metrics.update(top1=81.25, history=[0.1, {"loss": 1e-300}], note="größer")
    net.save_task("t", tmp_path / "t.safetensors")
    loaded = rebuilt.load_task(tmp_path / "t.safetensors")
    assert_same_task(task, loaded)
    assert same_outputs(net, rebuilt)
    with torch.no_grad():
        assert not torch.equal(net(images(), task="t")[:, :4], net(images()))
    rebuilt.save_task("t", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "t.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("full", {"per": "channel"}),
        ("full", {"per": "channel", "k0": "learn", "surrogate": "sigmoid"}),
        ("simple", {"k1": -0.25, "threshold": 1e-3, "init": (-0.5, 0.5)}),
        ("piggyback", {"own": ["*.bias"]}),
        ("finetune", {"norms": False}),
        ("lora", {"rank": 2, "alpha": 3, "norms": True}),
        ("packnet", {"base": True}),
        ("packnet", {"keep": 0.25}),
    ],
)
def test_options_survive(method: str, options: dict[str, object], tmp_path: Path) -> None:
    net, rebuilt = network(), network()
    task = trained(net, "t", method, **options)
    net.save_task("t", tmp_path / "t.safetensors")
    loaded = rebuilt.load_task(tmp_path / "t.safetensors")
    assert_same_task(task, loaded)
    assert same_outputs(net, rebuilt)
    for each in (net, rebuilt):
        each.train()
    assert same_outputs(net, rebuilt), "in training mode the same norm layers use the batch's statistics"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("norms", [True, False])
def test_norm_layers_that_are_left_out(method: str, norms: bool, tmp_path: Path) -> None:
    """A file loads whatever patterns the network is read with."""
    net = network(norms="4")
    trained(net, "t", method, norms=norms)
    net.save_task("t", tmp_path / "t.safetensors")
    for rebuilt in (network(norms="4"), network(), network(norms="1", skip="0.*")):
        rebuilt.load_task(tmp_path / "t.safetensors")
        assert same_outputs(net, rebuilt)


@pytest.mark.parametrize("method", METHODS)
def test_channels_last_backbones_give_the_same_bits(method: str, tmp_path: Path) -> None:
    net = bitgraft.Network(backbone().to(memory_format=torch.channels_last), example=(2, 3, 8, 8))
    other = bitgraft.Network(backbone().to(memory_format=torch.channels_last), example=(2, 3, 8, 8))
    trained(net, "t", method)
    net.save_task("t", tmp_path / "t.safetensors")
    other.load_task(tmp_path / "t.safetensors")
    saved, loaded = net.tasks["t"].tensors(), other.tasks["t"].tensors()
    assert {n: t.stride() for n, t in saved.items()} == {n: t.stride() for n, t in loaded.items()}
    assert same_outputs(net, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", ["full", "finetune", "adapters-series", "packnet"])
def test_backbones_in_other_precisions(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    net, other = (bitgraft.Network(backbone().to(dtype), example=torch.zeros(2, 3, 8, 8, dtype=dtype)) for _ in "ab")
    task = net.add_task("t", classes=CLASSES, method=method)
    with torch.no_grad():
        for _, parameter in task.roles():
            parameter.add_(0.01)
        task.train()
        net(images().to(dtype) + 1, task="t")
        task.eval()
    net.save_task("t", tmp_path / "t.safetensors")
    assert_same_task(task, other.load_task(tmp_path / "t.safetensors"))
    with torch.no_grad():
        assert torch.equal(net(images().to(dtype), task="t"), other(images().to(dtype), task="t"))


def test_preprocessing_classes_and_another_name_survive(tmp_path: Path) -> None:
    net = network()
    about = {"size": [8, 8], "mean": [0.1, 0.2, 0.3], "std": [1, 1, 1], "interpolation": "bicubic", "crop_pct": 0.875}
    net.add_task("t", classes=CLASSES, preprocessing=about)
    net.add_task("numbered", classes=3)
    net.save_task("t", tmp_path / "t.safetensors")
    net.save_task("numbered", tmp_path / "numbered.safetensors")
    loaded = net.load_task(tmp_path / "t.safetensors", name="copy")
    assert loaded.name == "copy"
    assert set(net.tasks) == {"t", "numbered", "copy"}
    assert loaded.classes == tuple(CLASSES)
    assert dict(loaded.metadata.preprocessing) == about
    assert same_outputs(net, net, "t", "copy")
    assert bitgraft.read_archive(tmp_path / "numbered.safetensors").metadata.classes == ("0", "1", "2")
    assert b'\\"classes\\":3' in (tmp_path / "numbered.safetensors").read_bytes()


def test_heads_of_every_kind(tmp_path: Path) -> None:
    def head() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    net, other = network(), network()
    net.add_task("keep", head="keep")
    net.add_task("features", head=None)
    net.add_task("module", head=head(), classes=["no", "yes"])
    tinker(net, net.tasks["module"])
    for name, given in [("keep", None), ("features", None), ("module", head())]:
        net.save_task(name, tmp_path / name)
        assert_same_task(net.tasks[name], other.load_task(tmp_path / name, head=given))
        assert same_outputs(net, other, name, name)


def test_a_linear_head_after_a_backbone_that_returns_features(tmp_path: Path) -> None:
    nets = [bitgraft.Network(backbone()[:-1].eval(), example=(2, 3, 8, 8), head=None) for _ in range(2)]
    task = nets[0].add_task("t", classes=CLASSES)
    tinker(nets[0], task)
    nets[0].save_task("t", tmp_path / "t")
    assert_same_task(task, nets[1].load_task(tmp_path / "t"))
    assert same_outputs(*nets)


def test_a_head_module_must_be_like_the_one_saved_and_is_left_alone_otherwise(tmp_path: Path) -> None:
    net = network()
    net.add_task("t", head=nn.Linear(3, 2))
    net.save_task("t", tmp_path / "t")
    for wrong in (nn.Linear(3, 5), nn.Sequential(nn.Linear(3, 2)), nn.Linear(3, 2, bias=False)):
        before = {name: tensor.clone() for name, tensor in wrong.state_dict().items()}
        with pytest.raises(TaskError, match="head module does not match"):
            net.load_task(tmp_path / "t", name="other", head=wrong)
        assert all(torch.equal(tensor, before[name]) for name, tensor in wrong.state_dict().items())
    with pytest.raises(TaskError, match="pass one like it"):
        net.load_task(tmp_path / "t", name="other")
    assert set(net.tasks) == {"t"}


@pytest.mark.parametrize(("head", "classes"), [("auto", 4), ("keep", None), (None, None)])
def test_a_head_module_that_the_task_does_not_need_is_refused(
    head: str | None, classes: int | None, tmp_path: Path
) -> None:
    net = network()
    net.add_task("t", head=head, classes=classes)
    net.save_task("t", tmp_path / "t")
    with pytest.raises(TaskError, match=r"has no head module .*load it without head="):
        net.load_task(tmp_path / "t", name="other", head=nn.Linear(3, 4))
    assert set(net.tasks) == {"t"}


def test_a_head_module_with_tied_weights_survives(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        return model

    net, other = network(), network()
    tinker(net, net.add_task("t", head=tied()))
    net.save_task("t", tmp_path / "t")
    other.load_task(tmp_path / "t", head=tied())
    assert same_outputs(net, other)


def test_packnet_tasks_load_in_their_order_and_only_on_the_right_ones(tmp_path: Path) -> None:
    net, other, third = network(), network(), network()
    for name in ("a", "b", "c"):
        trained(net, name, "packnet")
    for name in ("a", "b", "c"):
        net.save_task(name, tmp_path / name)
    with pytest.raises(MissingTaskError, match="builds on 'a', not here"):
        other.load_task(tmp_path / "b")
    for name in ("a", "b", "c"):
        other.load_task(tmp_path / name)
        assert same_outputs(net, other, name, name)
    tinker(third, third.add_task("a", classes=2, method="packnet"), seed=5)
    with pytest.raises(MissingTaskError, match="another task 'a'"):
        third.load_task(tmp_path / "b")
    assert list(third.tasks) == ["a"]


def test_the_content_hash_covers_weights_and_dependencies_but_no_head_and_no_names() -> None:
    first = archive.pack_task(trained(network(), "a", "packnet"), "")

    def content_hash(**changes: object) -> str:
        return archive.content_hash(dataclasses.replace(first, **changes))

    assert content_hash(tensors={key: t for key, t in first.tensors.items() if ":" in key}) == content_hash()
    values = first.tensors["0.weight:values"] + 1
    assert content_hash(tensors={**first.tensors, "0.weight:values": values}) != content_hash()
    dependent = dataclasses.replace(first.metadata, depends_on={"z": "0" * 64})
    renamed = dataclasses.replace(dependent, name="y", depends_on={"x": "0" * 64})
    assert content_hash(metadata=dependent) == content_hash(metadata=renamed) != content_hash()


def test_a_backbone_without_values_is_refused_and_parts_go_where_the_backbone_is(tmp_path: Path) -> None:
    net = network()
    for method in ("full", "finetune", "adapters-series", "adapters-parallel", "dan", "lora"):
        net.add_task(method, classes=4, method=method)
        net.save_task(method, tmp_path / method)
        empty = network()
        empty.to("meta")
        with pytest.raises(BackboneError, match="no values"):
            empty.load_task(tmp_path / method)
        assert not empty.tasks
        revived = restore.restore_task(bitgraft.read_archive(tmp_path / method), empty.anatomy, (), None)
        held = [*revived.parameters(), *revived.buffers()]
        assert held
        assert all(tensor.is_meta for tensor in held)


def test_the_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    net = network()
    task = trained(net, "t", "full")
    net.save_task("t", tmp_path / "t.safetensors")
    found = safetensors.numpy.load_file(tmp_path / "t.safetensors")
    ours = archive.pack_task(task, "").tensors
    assert found.keys() == ours.keys()
    assert all((found[key] == ours[key].numpy()).all() for key in ours)


class WithExtras(nn.Linear):
    def get_extra_state(self) -> dict[str, str]:
        return {"not": "a tensor"}


def test_tasks_that_cannot_be_saved(tmp_path: Path) -> None:
    net = network()
    task = net.add_task("t", classes=2)
    loop: list[object] = []
    loop.append(loop)
    deep: list[object] = []
    for _ in range(40):
        deep = [deep]
    for bad in (torch.tensor(1.0), float("nan"), {1, 2}, loop, deep, {1: 1, "a": 2}):
        task.metrics["top1"] = bad
        with pytest.raises(TaskError, match="task 't': preprocessing and metrics must be plain JSON"):
            net.save_task("t", tmp_path / "t")
    net.add_task("extra", head=WithExtras(3, 2))
    with pytest.raises(TaskError, match="cannot save"):
        net.save_task("extra", tmp_path / "t")
    model = nn.Sequential()
    model.add_module("a:b", nn.Conv2d(3, 2, 8))
    model.extend([nn.Flatten(), nn.Linear(2, 2)])
    odd = bitgraft.Network(model, example=(2, 3, 8, 8))
    odd.add_task("t", classes=2)
    with pytest.raises(TaskError, match=r"'a:b.weight' has a colon"):
        odd.save_task("t", tmp_path / "t")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["0.weight:k", "1.bias", "1.running_var", "9.weight"])
def test_a_task_with_values_that_are_not_finite_is_not_saved(where: str, bad: float, tmp_path: Path) -> None:
    net = network()
    task = trained(net, "t", "full").freeze()
    net.save_task("t", tmp_path / "t")
    before, (name, _, part) = (tmp_path / "t").read_bytes(), where.partition(":")
    with torch.no_grad():
        (task.transforms[name].parts()[part] if part else task.owned[name]).view(-1)[0] = bad
    with pytest.raises(TaskError, match=f"task 't' is not saved: '{where}' has a NaN or an infinite value"):
        net.save_task("t", tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == before


def test_a_score_that_is_not_finite_is_not_saved_as_a_bit(tmp_path: Path) -> None:
    net = network()
    task = trained(net, "t", "full")
    with torch.no_grad():
        task.transforms["0.weight"].scores[0] = float("nan")
    with pytest.raises(TaskError, match=r"task 't' is not saved: '0.weight:scores' has a NaN or an infinite value"):
        net.save_task("t", tmp_path / "t")
    assert not list(tmp_path.iterdir())


def test_the_order_of_metrics_does_not_show_in_the_bytes() -> None:
    task = network().add_task("t", classes=2)
    one = dataclasses.replace(archive.pack_task(task, "0" * 64), metrics={"a": 1, "b": 2})
    assert archive.to_bytes(one) == archive.to_bytes(dataclasses.replace(one, metrics={"b": 2, "a": 1}))


def report(folder: str) -> None:
    """Run in a fresh process: print digests of the files it writes and the outputs it computes."""
    for method in METHODS:
        net = network()
        trained(net, "t", method)
        made = hashlib.sha256(archive.to_bytes(archive.pack_task(net.tasks["t"], net.fingerprint))).hexdigest()
        net.load_task(f"{folder}/{method}", name="read")
        with torch.no_grad():
            outputs = hashlib.sha256(net(images(), task="read").numpy().tobytes()).hexdigest()
        print(method, made, outputs)


def test_other_processes_write_the_same_bytes_and_read_the_same_outputs(tmp_path: Path) -> None:
    expected = []
    for method in METHODS:
        net = network()
        trained(net, "t", method)
        net.save_task("t", tmp_path / method)
        with torch.no_grad():
            outputs = hashlib.sha256(net(images(), task="t").numpy().tobytes()).hexdigest()
        expected.append(f"{method} {hashlib.sha256((tmp_path / method).read_bytes()).hexdigest()} {outputs}")
    command = [sys.executable, __file__, str(tmp_path)]
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "4242")]
    runs = [subprocess.Popen(command, env=each, stdout=subprocess.PIPE, text=True) for each in environments]
    for run in runs:
        assert run.communicate(timeout=120)[0].splitlines() == expected


def test_a_resnet50_task_takes_about_one_bit_per_weight(tmp_path: Path) -> None:
    import timm  # slow to import, and the fresh processes above do not need it

    net = bitgraft.Network(timm.create_model("resnet50"))
    task = net.add_task("t", classes=102, method="full", preset=None)
    net.save_task("t", tmp_path / "t.safetensors")
    size = (tmp_path / "t.safetensors").stat().st_size
    head = sum(t.nbytes for name, t in task.owned.items() if name in net.anatomy.head_names())
    masked = sum(t.weight.shape.numel() for t in task.transforms.values())
    norms = sum(t.numel() for n, t in task.owned.items() if n not in net.anatomy.head_names() and t.is_floating_point())
    ks = 4 * len(task.transforms)
    allowed = (1.01 * masked + 32 * (norms + ks)) / 8 + 16_000
    figures = f"{size} bytes, {head} of them head; {masked} masked weights, {norms} norm values, {ks} k: {allowed:.0f}"
    assert (masked, norms) == (23_454_912, 4 * 26_560), figures
    assert size - head <= allowed, figures
    assert size - head >= masked // 8 + 4 * (norms + ks), figures


if __name__ == "__main__":
    report(sys.argv[1])
