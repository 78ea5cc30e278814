"""Compression of fine-tuned copies: the closed form against slow references, and copies from wherever they come."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from images import NET, bitgraft, exit_code, furnish, photos
from safetensors.torch import load_file, save_file
from tiny import batch, learn, run, snapshot, tiny
from torch import nn
from torch.utils.data import TensorDataset

from bitgraft import BackboneError, Network, TaskError, compress
from bitgraft.compression import nearest as closed
from bitgraft.compression.compress import scores_of
from bitgraft.compression.distil import CALIBRATION, Unlabelled, softened
from bitgraft.errors import ClassesError, WrongBackboneError
from bitgraft.store import Store
from bitgraft.transforms.masked import START, Masked

FREE = (None, None, None, None)
RULES = [FREE, (1.0, None, None, None), (None, None, None, 0.0), (0.0, 0.0, 0.0, 1.0), (1.0, None, None, 0.0)]


# The closed form


def columns(weight: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.stack([weight, np.ones_like(weight), mask, weight * mask], 1)


def slow_k(weight, target, mask, fixed) -> np.ndarray:
    """k by least squares on the whole design matrix."""
    basis, k = columns(weight, mask), np.array([0.0 if value is None else value for value in fixed])
    free = [i for i, value in enumerate(fixed) if value is None]
    if free:
        k[free] = np.linalg.lstsq(basis[:, free], target - basis @ k, rcond=1e-5)[0]
    return k


def slow_error(weight, target, mask, fixed) -> float:
    return float(np.square(target - columns(weight, mask) @ slow_k(weight, target, mask, fixed)).sum())


def slow_mask(weight, target, k) -> list[bool]:
    """For each weight by itself, whether a bit of 1 brings it nearer."""
    both = [(k[0] * w + k[1], (k[0] + k[3]) * w + k[1] + k[2]) for w in weight]
    return [abs(t - one) < abs(t - zero) for t, (zero, one) in zip(target, both, strict=True)]


def error_of(weight: torch.Tensor, target: torch.Tensor, found: closed.Nearest) -> torch.Tensor:
    w, m, k = weight.double(), found.mask.double(), found.k.double()[:, :, None]
    return (target.double() - (k[0] * w + k[1] + k[2] * m + k[3] * w * m)).square().sum(1)


values = st.floats(-2, 2, width=32).map(lambda v: round(v, 3))
weights = st.lists(st.tuples(values, values), min_size=1, max_size=40).map(np.array)
rules = st.sampled_from(RULES)
some = settings(max_examples=40, deadline=None)


def rows(pairs: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """W and T as matrices of one row."""
    weight = torch.tensor(pairs[:, 0], dtype=torch.float32)[None]
    return weight, weight + torch.tensor(pairs[:, 1], dtype=torch.float32)[None]


@given(weights, rules, st.randoms(use_true_random=False))
@some
def test_k_for_a_mask_is_the_least_squares_solution(pairs, fixed, rng):
    weight, target = rows(pairs)
    mask = torch.tensor([[rng.random() < 0.5 for _ in pairs]])
    w, d = weight.double(), (target.double() - weight.double())
    under = torch.stack([(mask * part).sum(1) for part in (torch.ones_like(w), w, w * w, d, w * d)])
    k = closed.solve(closed.sweep(weight, target)[0], under, fixed)[0].numpy() + np.array(START)
    flat, wanted, bits = w[0].numpy(), target.double()[0].numpy(), mask[0].double().numpy()
    reached = np.square(wanted - columns(flat, bits) @ k).sum()
    assert reached <= slow_error(flat, wanted, bits, fixed) + 1e-9 * (1 + np.square(wanted).sum())
    assert all(value is None or value == got for value, got in zip(fixed, k, strict=True))


@given(weights, rules, st.sampled_from([0, 1, 2]))
@some
def test_turns_never_go_up(pairs, fixed, start):
    weight, target = rows(pairs)
    totals, _ = closed.sweep(weight, target)
    sums, _ = closed.sweep(weight, target, closed.starts(totals)[start])
    errors = []
    for _ in range(6):
        c = closed.solve(totals, sums, fixed)
        sums, error = closed.sweep(weight, target, c)
        errors.append(float(error))
    assert all(later <= earlier + 1e-9 * (1 + earlier) for earlier, later in itertools.pairwise(errors))


@given(weights, rules)
@some
def test_the_mask_is_the_best_for_its_k_and_margins_say_by_how_much(pairs, fixed):
    weight, target = rows(pairs)
    found = closed.nearest(weight, target, fixed)
    k = found.k[:, 0].double().numpy()
    w, t = weight[0].double().numpy(), target[0].double().numpy()
    near = [abs(t - (k[0] + bit * k[3]) * w - k[1] - bit * k[2]) for bit in (0, 1)]
    undecided = np.abs(near[0] - near[1]) < 1e-9
    assert (np.array(slow_mask(w, t, k)) == found.mask[0].numpy())[~undecided].all()
    middle = t - (k[0] + k[3] / 2) * w - k[1] - k[2] / 2
    np.testing.assert_allclose(found.margin[0].numpy(), np.abs(middle), rtol=1e-5, atol=1e-6)


@given(st.lists(st.tuples(values, values), min_size=1, max_size=7).map(np.array), rules)
@some
def test_no_mask_is_better_than_the_best_and_ours_is_no_worse_than_signs(pairs, fixed):
    weight, target = rows(pairs)
    w, t = weight[0].double().numpy(), target[0].double().numpy()
    reached = float(error_of(weight, target, closed.nearest(weight, target, fixed)))
    every = itertools.product([0.0, 1.0], repeat=len(w))
    slack = 1e-5 * (1 + np.square(t).sum())
    assert reached >= min(slow_error(w, t, np.array(bits), fixed) for bits in every) - slack
    assert reached <= slow_error(w, t, (t - w > 0).astype(float), fixed) + slack


def test_what_masks_can_say_exactly_is_found_exactly():
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(1, 5000, generator=rng)
    mask = torch.rand(1, 5000, generator=rng) < 0.6
    for k in ([1.0, -0.1, 0.2, 0.0], [0.9, 0.03, -0.1, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, -0.5]):
        target = k[0] * weight + k[1] + k[2] * mask + k[3] * weight * mask
        found = closed.nearest(weight, target, FREE)
        assert float(error_of(weight, target, found)) < 1e-9 * float(target.square().sum())
        assert torch.equal(found.mask, mask) or torch.equal(found.mask, ~mask)


def test_it_beats_one_scale_on_a_change_that_depends_on_the_weight():
    """BitDelta has one scale: W ± mean|D|."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(1, 20_000, generator=rng)
    change = torch.randn(1, 20_000, generator=rng) * (0.02 + 0.05 * weight.clamp(min=0)) - 0.05 * weight
    reached = float(error_of(weight, weight + change, closed.nearest(weight, weight + change, FREE)))
    assert reached < 0.7 * float((change - change.sign() * change.abs().mean()).square().sum())


@pytest.mark.parametrize("fixed", RULES)
@pytest.mark.parametrize(
    "pairs", [[[0.0, 0.0]], [[0.5, 0.1]] * 9, [[0.0, 0.3], [0.0, -0.2], [0.0, 0.4]], [[1e-30, 1.0]] * 2]
)
def test_degenerate_weights(pairs, fixed):
    weight, target = rows(np.array(pairs))
    found = closed.nearest(weight, target, fixed)
    assert found.k.isfinite().all()
    bits = (target[0] > weight[0]).double().numpy()
    limit = slow_error(weight[0].double().numpy(), target[0].double().numpy(), bits, fixed)
    assert float(error_of(weight, target, found)) <= limit + 1e-6


def test_rows_are_fitted_each_by_itself_in_blocks_of_any_size(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 33, generator=rng)
    target = weight + 0.1 * torch.randn(5, 33, generator=rng)
    together = closed.nearest(weight, target, FREE)
    monkeypatch.setattr(closed, "BLOCK", 7)
    for row in range(5):
        alone = closed.nearest(weight[row : row + 1], target[row : row + 1], FREE)
        assert float(error_of(weight, target, together)[row]) <= 1.001 * float(
            error_of(weight[[row]], target[[row]], alone)
        )
        assert (together.mask[row] == alone.mask[0]).float().mean() > 0.9


@pytest.mark.parametrize("threshold", [0.0, 5e-3, -1.0])
def test_scores_have_the_mask_also_on_the_boundary(threshold):
    mask, margin = torch.tensor([[True, False, True, False]]), torch.tensor([[0.0, 0.0, 1e-12, 2.0]])
    assert torch.equal(scores_of(mask, margin, threshold) >= threshold, mask)


def slow_turns(rest: list[float], step: list[float]) -> set[int]:
    """Turn the cheapest bit that helps, again and again; stop where the cost was least."""
    total, turned, paid = sum(rest), [], 0.0
    best, least = set(), total**2
    useful = [i for i in range(len(rest)) if step[i] * total > 0]
    left = total
    for i in sorted(useful, key=lambda i: step[i] * (step[i] - 2 * rest[i]) / abs(step[i])):
        turned.append(i)
        paid += step[i] * (step[i] - 2 * rest[i])
        left -= step[i]
        if paid + left**2 < least:
            best, least = set(turned), paid + left**2
    return best


@given(weights, rules)
@some
def test_turned_bits_cancel_errors_as_the_slow_way_does(pairs, fixed):
    weight, target = rows(pairs)
    found = closed.nearest(weight, target, fixed)
    turned = closed.balancing_flips(weight, target, found.k, found.mask)
    k, w = found.k.double(), weight.double()
    gap = k[3] * w + k[2]
    rest = target.double() - (k[0] * w + k[1] + gap * found.mask)
    expected = slow_turns(rest[0].tolist(), torch.where(found.mask, -gap, gap)[0].tolist())
    slow = torch.tensor([[i in expected for i in range(len(pairs))]])
    costs, sums = [], []
    for bits in (found.mask, found.mask ^ turned, found.mask ^ slow):
        left = target.double() - (k[0] * w + k[1] + gap * bits)
        costs.append(float(left.square().sum() + left.sum() ** 2))
        sums.append(abs(float(left.sum())))
    assert costs[1] <= costs[0] + 1e-9
    assert sums[1] <= sums[0] + 1e-9
    assert costs[1] == pytest.approx(costs[2], abs=1e-9)


def test_few_turns_cancel_the_errors_of_wide_filters(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 600, generator=rng)
    target = weight + 0.1 * torch.randn(20, 600, generator=rng) + 0.01 * torch.randn(20, 1, generator=rng)
    found = closed.nearest(weight.view(1, -1), target.view(1, -1), FREE)
    mask = found.mask.view(20, 600)
    turned = closed.balancing_flips(weight, target, found.k, mask)
    k = found.k.double()
    before, after = (
        target.double() - (k[0] * weight + k[1] + (k[2] + k[3] * weight) * bits) for bits in (mask, mask ^ turned)
    )
    assert after.sum(1).abs().max() < 0.1 < before.sum(1).abs().mean()
    assert turned.float().mean() < 0.06
    assert after.square().sum() < 1.05 * before.square().sum()
    monkeypatch.setattr(closed, "ROWS_BLOCK", 700)
    assert torch.equal(closed.balancing_flips(weight, target, found.k, mask), turned)


# Copies


def finetuned(net: Network, outputs: int = 4) -> dict[str, torch.Tensor]:
    """The weights of a plain module that was fine-tuned, with a head of its own; then changed a good deal more."""
    net.add_task("made", classes=outputs, method="finetune")
    learn(net, "made", batch(8), steps=2)
    state = net.export("made").state_dict()
    net.remove_task("made")
    rng = torch.Generator().manual_seed(7)
    moved = {n: t + 0.3 * t.std() * torch.randn(t.shape, generator=rng) for n, t in state.items() if t.dim() > 1}
    return {name: tensor.clone() for name, tensor in {**state, **moved}.items()}


@pytest.fixture
def net() -> Network:
    return Network(tiny())


def test_norms_head_and_biases_are_the_copys_and_the_weights_are_near(net):
    before, state = snapshot(net.backbone), finetuned(net)
    made = compress(net, "small", state)
    tensors = {name: tensor.detach() for name, tensor in made.task.tensors().items()}
    for name in [n for n in state if "norm" in n or n.startswith("fc.") or n.endswith("bias")]:
        assert name in tensors or name.endswith("num_batches_tracked")
        assert name not in tensors or torch.equal(tensors[name], state[name]), name
    assert made.task.metadata.method == "full"
    assert made.task.metadata.options["own"] == ("pointwise.bias",)
    left = sum(float((state[n] - tensors[n]).square().sum()) for n in made.task.transforms)
    change = sum(float((state[n] - net.anatomy.tensor(n).detach()).square().sum()) for n in made.task.transforms)
    assert made.kept == pytest.approx(1 - left / change, abs=1e-4)
    assert made.kept > 0.5
    assert made.cosine > 0.9
    assert made.warnings == []
    assert list(net.tasks) == ["small"]
    assert snapshot(net.backbone) == before


@pytest.mark.parametrize("options", [{}, {"per": "channel"}, {"k0": "auto"}, {"k3": 0.0}, {"threshold": 5e-3}])
def test_the_file_is_an_ordinary_one_and_says_the_same(net, options, tmp_path):
    made = compress(net, "small", finetuned(net), ["a", "b", "c", "d"], **options)
    learning = run(net.eval(), batch(), task="small")
    made.task.freeze()
    net.save_task("small", tmp_path / "small.safetensors")
    fresh = Network(tiny())
    task = fresh.load_task(tmp_path / "small.safetensors")
    assert task.classes == ("a", "b", "c", "d")
    assert torch.equal(run(fresh.eval(), batch(), task="small"), learning)
    for name, transform in task.transforms.items():
        assert isinstance(transform, Masked)
        fixed = made.task.transforms[name].rule.fixed
        assert all(v is None or bool((transform.values()[i] == v).all()) for i, v in enumerate(fixed))


def test_channels_come_nearer_than_layers_also_in_transposed_convolutions(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    copy = {
        name: tensor
        + 0.1 * torch.randn_like(tensor) * (1 + torch.arange(len(tensor)).view(-1, *[1] * (tensor.dim() - 1)))
        for name, tensor in model.state_dict().items()
    }
    net = Network(model.eval(), example=(1, 4, 8, 8))
    layers, channels = (compress(net, per, copy, per=per) for per in ("layer", "channel"))
    assert channels.kept > layers.kept + 0.05
    with torch.no_grad():
        for name, transform in channels.task.transforms.items():
            left = (copy[name] - transform(net.anatomy.tensor(name))).square().sum()
            assert left < (copy[name] - layers.task.transforms[name](net.anatomy.tensor(name))).square().sum()


def test_a_copy_that_changed_nothing_is_the_backbone(net):
    made = compress(net, "same", net.backbone)
    assert made.kept == 1.0
    assert torch.equal(run(net.eval(), batch(), task="same"), run(net.backbone, batch()))


@pytest.mark.parametrize(
    "source", ["module", "state", "safetensors", "prefixed torch file", "half", "task file", "task"]
)
def test_copies_from_everywhere_give_the_same_task(net, source, tmp_path):
    state = finetuned(net, 6)
    net.add_task("copy", classes=6, method="finetune")
    with torch.no_grad():
        for name, tensor in net.tasks["copy"].owned.items():
            tensor.copy_(state[name])
    copy = tiny()
    copy.load_state_dict(state)
    given = {"module": copy, "state": state, "task": net.tasks["copy"]}.get(source, tmp_path / "copy")
    if source == "safetensors":
        save_file(state, given)
    elif source == "prefixed torch file":
        torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}, "epoch": 3}, given)
    elif source == "half":
        save_file({n: t.half() if t.is_floating_point() else t for n, t in state.items()}, given)
    elif source == "task file":
        net.save_task("copy", given)
    task = compress(net, "small", given).task.freeze()
    expected = compress(net, "expected", state).task.freeze()
    assert task.metadata.classes == expected.metadata.classes
    answers = [run(net.eval(), batch(), task=name) for name in ("small", "expected")]
    torch.testing.assert_close(*answers, rtol=0, atol=2e-2 if source == "half" else 0)


def test_a_task_behind_a_network_of_features_keeps_its_head(tmp_path):
    class Features(nn.Sequential):
        num_classes = 0

    torch.manual_seed(0)
    model = Features(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = Network(model.eval(), example=(1, 3, 8, 8))
    net.add_task("copy", classes=3, method="finetune")
    learn(net, "copy", batch(8), steps=2)
    head = net.tasks["copy"].head.state_dict()
    small = compress(net, "small", net.tasks["copy"]).task
    assert small.metadata.head == "linear"
    assert all(torch.equal(tensor, head[name]) for name, tensor in small.head.state_dict().items())


def broken(state: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    state = dict(state)
    if how == "missing":
        del state["stem.weight"]
    elif how == "stray":
        state["other.weight"] = torch.zeros(3)
    elif how == "shape":
        state["stem.weight"] = torch.zeros(8, 3, 5, 5)
    elif how == "head":
        state["fc.weight"] = torch.zeros(4, 9)
    elif how == "nan":
        state["norm1.running_var"] = state["norm1.running_var"].clone()
        state["norm1.running_var"][2] = float("nan")
    return state


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", r"1 tensors of the network are not in it \('stem.weight'\)"),
        ("stray", r"1 of its tensors are not the network's \('other.weight'\)"),
        ("shape", r"'stem.weight' is \(8, 3, 5, 5\) where the network has \(8, 3, 3, 3\)"),
        ("head", r"'fc.weight' is \(4, 9\) where the network has \(4, 8\)"),
        ("nan", "not finite in 1 tensors, first 'norm1.running_var'"),
    ],
)
def test_copies_that_do_not_fit_are_refused_by_name(net, how, said):
    with pytest.raises(BackboneError, match=said):
        compress(net, "small", broken(finetuned(net), how))
    assert not net.tasks


def test_other_refusals(net, tmp_path):
    state = finetuned(net)
    with pytest.raises(ClassesError, match=r"'fc', has 4 outputs, but 3 classes were named"):
        compress(net, "small", state, ["a", "b", "c"])
    compress(net, "small", state)
    with pytest.raises(TaskError, match="there is a task 'small' already"):
        compress(net, "small", state)
    with pytest.raises(TaskError, match="no option 'perr'; did you mean 'per'"):
        compress(net, "other", state, perr="channel")
    net.add_task("series", classes=4, method="adapters-series")
    with pytest.raises(TaskError, match="'adapters-series', which adds layers"):
        compress(net, "other", net.tasks["series"])
    elsewhere = Network(tiny(seed=3))
    with pytest.raises(TaskError, match="not one of this network's"):
        compress(elsewhere, "other", net.tasks["small"])
    net.save_task("small", tmp_path / "small.safetensors")
    with pytest.raises(WrongBackboneError, match="fingerprint"):
        compress(elsewhere, "other", tmp_path / "small.safetensors")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(BackboneError, match="no file of weights"):
        compress(net, "other", tmp_path / "text")
    assert set(net.tasks) == {"small", "series"}


def test_tied_weights_must_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.fc = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.fc(self.two(self.one(x)))

    torch.manual_seed(0)
    net = Network(Tied().eval(), example=(1, 4))
    state = {name: tensor + 0.1 for name, tensor in net.backbone.state_dict().items()}
    del state["two.weight"]  # as safetensors' save_model has it
    assert compress(net, "small", state).kept > 0.99
    with pytest.raises(BackboneError, match=r"has 'two.weight' unlike 'one.weight'"):
        compress(net, "other", {**state, "two.weight": state["one.weight"] + 1})


def test_a_copy_of_another_pretraining_is_compressed_with_a_warning(net):
    (warning,) = compress(net, "small", tiny(seed=5)).warnings
    assert "was it fine-tuned from these?" in warning


# Calibration


def images(count: int = 24) -> TensorDataset:
    return TensorDataset(batch(count), torch.arange(count) % 4)


@pytest.mark.parametrize("masks", [False, True])
def test_calibration_brings_answers_nearer_and_leaves_the_rest(net, masks):
    state = finetuned(net)
    state["fc.weight"] *= 50  # so that features matter to the scores
    rng = torch.Generator().manual_seed(3)
    state |= {n: t + t.std() * torch.randn(t.shape, generator=rng) for n, t in state.items() if t.dim() == 4}
    first, rates = compress(net, "first", state).task, {"scores": 3e-3, "k": 2e-3, "k1": 1e-3, "norms": 2e-3}
    config = CALIBRATION.changed(steps=30, batch=8, rates=rates)
    made = compress(net, "small", state, calibrate_on=images(), config=config, masks=masks, test=images())
    task = made.task
    with torch.no_grad():
        copy = tiny()
        copy.fc = nn.Linear(8, 4)
        copy.load_state_dict(state)
        wanted = copy.eval()(batch(24))
        far = [softened(run(net.eval(), batch(24), task=name), wanted, 2.0) for name in ("first", "small")]
    assert far[1] < 0.8 * far[0]
    assert made.history[-1]["train_loss"] < made.history[0]["train_loss"]
    same = [torch.equal(task.transforms[n].mask(), first.transforms[n].mask()) for n in task.transforms]
    assert all(same) != masks
    for name in ("fc.weight", "fc.bias", "norm1.running_mean", "norm2.running_var"):
        assert torch.equal(task.owned[name], state[name])
    assert not torch.equal(task.owned["norm1.weight"], state["norm1.weight"])
    assert all(parameter.requires_grad for _, parameter in task.roles())
    assert set(made.accuracy) == {"finetuned", "compressed", "calibrated"}
    assert task.metrics["test"] == {"accuracy": made.accuracy["calibrated"]}
    right = (wanted.argmax(1) == torch.arange(24) % 4).float().mean()
    assert made.accuracy["finetuned"] == pytest.approx(float(right))
    assert list(net.tasks) == ["first", "small"]


def test_a_fault_in_calibration_leaves_no_half_made_task(net):
    class Broken(TensorDataset):
        def __getitem__(self, index):
            raise TaskError("cannot be had")

    with pytest.raises(TaskError, match="cannot be had"):
        compress(net, "small", finetuned(net), calibrate_on=Broken(batch(8)))
    assert not net.tasks


def test_images_are_their_own_targets_also_with_augmentation_by_epoch():
    class Shifting(TensorDataset):
        def set_epoch(self, epoch):
            self.tensors = (self.tensors[0] + epoch,)

    data = Unlabelled(Shifting(torch.zeros(3, 1, 2, 2)))
    data.set_epoch(2)
    image, target = data[1]
    assert len(data) == 3
    assert torch.equal(image, target)
    assert float(image.sum()) == 8.0


def test_soft_targets_against_the_definition():
    given, wanted = batch(5, 7), batch(5, 7, seed=2)
    p, q = ((scores / 3.0).double().softmax(1) for scores in (wanted, given))
    slow = 9.0 * (p * (p / q).log()).sum(1).mean()
    assert float(softened(given, wanted, 3.0)) == pytest.approx(float(slow), rel=1e-5)


# The command


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with images, a network and a store with a fine-tuned task."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        furnish(folder, patch)
        train = "train photos --size 16 --batch 8 --epochs 3 --method finetune --task colours --store source --backbone"
        for command in (
            [*train.split(), NET],
            ["export", "--task", "colours", "--store", "source", "--output", "plain.safetensors"],
        ):
            assert exit_code(patch, *command) == 0
    (folder / "names.txt").write_text("blue\ngreen\n\nred\n")
    save_file(load_file(folder / "plain.safetensors"), folder / "bare.safetensors")  # without what it says of itself
    return folder


@pytest.fixture
def command(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    return lambda *args: bitgraft(capsys, monkeypatch, "compress", *args)


def test_a_task_of_another_store_into_a_new_one(command, place, tmp_path):
    store = str(tmp_path / "new")
    code, out, err = command(
        "source/colours", "--backbone", NET, "--task", "small", "--store", store, "--eval", "photos"
    )
    assert (code, err) == (0, "")
    assert "test accuracy: finetuned " in out
    assert f"wrote {store}/small.safetensors" in out
    opened = Store(store)
    archive = opened.archive("small")
    assert archive.metadata.method == "full"
    assert archive.metadata.classes == ("blue", "green", "red")
    assert archive.metadata.preprocessing == Store("source").archive("colours").metadata.preprocessing
    assert archive.metrics["test"]["accuracy"] == archive.metrics["compressed"]["accuracy_compressed"]
    code, _, err = command("source/colours", "--task", "small", "--store", store)
    assert code == 1
    assert "has a task 'small' already" in err


def test_plain_weights_with_calibration_as_json(command):
    more = [
        "--calibrate",
        "photos",
        "--size",
        "16",
        "--steps",
        "6",
        "--batch",
        "8",
        "--masks",
        "--rate",
        "k=1e-3",
        "--json",
    ]
    code, out, err = command("bare.safetensors", "--task", "plain", "--store", "source", *more)
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["classes"] == ["blue", "green", "red"]  # the data's, since the file states none
    assert set(report["accuracy"]) == {"finetuned", "compressed", "calibrated"}
    assert report["measured_on"] == "test"
    assert len(report["history"]) == 2
    assert report["bytes"] == Store("source").path("plain").stat().st_size
    assert report["bytes_by_kind"]["masks"] == 27
    accuracy = Store("source").archive("colours").metrics["test"]["accuracy"]
    assert report["accuracy"]["finetuned"] == pytest.approx(accuracy)


def test_exported_weights_say_their_classes_and_size(command):
    assert command("plain.safetensors", "--task", "exported", "--store", "source", "--eval", "photos")[0] == 0
    metadata = Store("source").archive("exported").metadata
    assert metadata.classes == ("blue", "green", "red")
    assert metadata.preprocessing["size"] == [16, 16]


def test_data_of_other_classes_calibrates_but_does_not_measure(command, tmp_path):
    folder = photos(tmp_path / "some")
    for part in ("train", "val", "test"):
        (folder / part / "red").rename(folder / part / "pink")
    store = ["--store", "source", "--task", "unlabelled"]
    code, out, _ = command("plain.safetensors", *store, "--calibrate", str(folder), "--steps", "1", "--batch", "8")
    assert code == 0
    assert "accuracy was not measured: the copy does not know 1 of the 3 classes in the data: pink; it" in out
    assert "distance" in out


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ("bare.safetensors --task t --store nowhere", 2, "name what was fine-tuned with --backbone"),
        ("bare.safetensors --task t --masks", 2, "add --calibrate DATA"),
        ("bare.safetensors --task t --calibrate photos --eval photos", 2, "leave out --eval"),
        ("bare.safetensors --task t --option perr=channel", 2, "did you mean 'per'"),
        ("bare.safetensors --task ../t --store source", 1, "cannot be a task's name"),
        ("source/colors --task t --store source", 1, "has no task 'colors'; it has "),
        ("missing.pth --task t --store source", 1, "cannot read the weights missing.pth"),
        ("bare.safetensors --task t --store source --classes a,b", 1, "has 3 outputs, but 2 classes were named"),
        ("bare.safetensors --task t --store new --backbone own_net:other", 1, "have another shape"),
        ("bare.safetensors --task t --store source --backbone own_net:other", 1, "holds the tasks of one backbone"),
        ("source/colours --task t --store source --size 16", 1, "leave out --size"),
        ("source/colours --task t --store source --eval nothing-here", 1, "no data set at 'nothing-here'"),
    ],
)
def test_what_is_refused_leaves_no_trace(command, place, args, code, said):
    before = sorted(str(path) for path in place.rglob("*"))
    result = command(*args.split())
    assert result[0] == code
    assert said in result[2]
    assert result[2].count("\n") <= 8
    assert sorted(str(path) for path in place.rglob("*")) == before


def test_classes_from_a_file_and_from_the_command_line(command):
    for name, names in (("a", "names.txt"), ("b", "blue, green,red")):
        assert command("bare.safetensors", "--task", name, "--store", "source", "--classes", names)[0] == 0
        assert Store("source").archive(name).metadata.classes == ("blue", "green", "red")
