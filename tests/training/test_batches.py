"""Batches other than images with labels: named inputs, labels per pixel, the model's own loss."""

import pytest
import torch
from tiny import tiny
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from bitgraft import Config, Network, TrainingError, evaluate, fit
from bitgraft.training.batches import inputs_and_targets, split_rows
from bitgraft.training.learner import Objective

ONCE = Config(epochs=1, batch=4)


class Named(nn.Module):
    """Takes named inputs, and labels for its own loss, like a model of transformers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x, scale=None, labels=None):
        scores = self.head(self.norm(self.first(x if scale is None else x * scale)))
        return {"logits": scores} if labels is None else {"loss": F.cross_entropy(scores, labels), "logits": scores}


def items(count=8):
    rng = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=rng), "scale": torch.ones(1), "labels": i % 2} for i in range(count)]


def named():
    torch.manual_seed(0)
    net = Network(Named(), head="head", example={"x": torch.zeros(1, 4)})
    net.add_task("t", classes=2)
    return net


def test_named_inputs_train_as_a_tensor_does():
    net = named()
    fit(net, "t", items(), items(), ONCE)
    other = named()
    pairs = TensorDataset(torch.stack([item["x"] for item in items()]), torch.arange(8) % 2)
    fit(other, "t", pairs, pairs, ONCE)
    assert evaluate(net, "t", items()) == evaluate(other, "t", pairs)


def test_the_models_own_loss_is_the_same_loss():
    losses = []
    for loss in (None, "model"):
        net = named()
        config = ONCE.changed(label_smoothing=0.0, head_init=False, accumulate=2, keep="last")
        losses.append(fit(net, "t", items(), items(), config, loss=loss).history[0])
    assert losses[0]["train_loss"] == pytest.approx(losses[1]["train_loss"])
    assert losses[0]["val_loss"] == pytest.approx(losses[1]["val_loss"])


def test_a_model_without_a_loss_is_refused():
    net = Network(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5)))
    net.add_task("t", classes=2)
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
    with pytest.raises(TrainingError, match="Sequential takes only input: pass a function"):
        fit(net, "t", data, None, ONCE, loss="model")


def pixels():
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 6, 1))
    net = Network(layers)
    net.add_task("t", classes=2)
    return net


def test_labels_per_pixel_with_ignored_pixels():
    torch.manual_seed(0)
    images = torch.rand(8, 3, 8, 8)
    labels = (images[:, 0] > 0.5).long()
    labels[:, 0] = -100
    net = pixels()
    history = fit(net, "t", TensorDataset(images, labels), config=Config(epochs=20, batch=4)).history
    assert history[-1]["train_loss"] < history[0]["train_loss"] < 2
    found = evaluate(net, "t", TensorDataset(images, labels))
    with torch.no_grad():
        scores = net(images, "t")
    assert found["accuracy"] == pytest.approx(float((scores.argmax(1) == labels)[:, 1:].float().mean()))
    assert found["loss"] == pytest.approx(float(F.cross_entropy(scores, labels)))


@pytest.mark.parametrize(
    "settings", [{}, {"label_smoothing": 0.1}, {"class_weights": (0.0, 2.0)}, {"batch": 2, "accumulate": 2}]
)
def test_an_image_without_a_label_that_counts(settings):
    """A mean over no pixels would be NaN, and training would end with the advice to lower the rates."""
    torch.manual_seed(0)
    images, labels = torch.rand(6, 3, 8, 8), torch.randint(0, 2, (6, 8, 8))
    labels[2], labels[4] = -100, 0
    data = TensorDataset(images, labels)
    config = Config(**{"epochs": 1, "batch": 1, "statistics": "kept", **settings})
    history = fit(pixels(), "t", data, data, config).history
    assert 0 < history[0]["train_loss"] < 2
    assert 0 < history[0]["val_loss"] < 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, (0.5, 3.0)])
def test_the_loss_of_pixels_is_their_mean(smoothing, weights):
    torch.manual_seed(0)
    net, scores, labels = pixels(), torch.randn(4, 2, 8, 8), torch.randint(0, 2, (4, 8, 8))
    labels[:, 0] = -100
    objective = Objective(net.tasks.values(), label_smoothing=smoothing)
    if weights is not None:
        objective.set_class_weights("t", weights, None, torch.device("cpu"))
    expected = F.cross_entropy(scores, labels, weights and torch.tensor(weights), label_smoothing=smoothing)
    assert float(objective("t", scores, labels, 4)) == pytest.approx(4 * float(expected), rel=1e-6)


def test_a_pixels_label_without_an_output_is_refused():
    labels = torch.full((8, 8, 8), 255)
    with pytest.raises(TrainingError, match="has the label 255, but task 't' has 2 classes"):
        fit(pixels(), "t", TensorDataset(torch.rand(8, 3, 8, 8), labels), config=ONCE)


@pytest.mark.parametrize(
    ("batch", "said"), [({"x": 1}, "a mapping of x"), (torch.zeros(2), "a Tensor"), ((1, 2, 3), "a tuple")]
)
def test_other_batches_are_refused(batch, said):
    with pytest.raises(TrainingError, match=f"{said}: use pairs"):
        inputs_and_targets(batch)


def test_lists_and_named_tensors_are_split_in_rows():
    assert split_rows([1, 2, 3], [2, 1]) == [[1, 2], [3]]
    first, second = split_rows({"x": torch.arange(3)}, [1, 2])
    assert (first["x"].tolist(), second["x"].tolist()) == ([0], [1, 2])


def test_inplace_layers_train_after_any_convolution():
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(inplace=True)]
    net = Network(nn.Sequential(*body, nn.Flatten(), nn.Linear(32, 6)), example=(1, 3, 8, 8))
    net.add_task("t", classes=2)
    data = TensorDataset(torch.rand(8, 3, 8, 8), torch.arange(8) % 2)
    assert fit(net, "t", data, config=ONCE).history


class Answers(TensorDataset):
    """Items whose targets have another form."""

    def __init__(self, target):
        torch.manual_seed(0)
        super().__init__(torch.rand(8, 3, 8, 8), torch.arange(8) % 2)
        self.target = target

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, self.target(label)


@pytest.mark.parametrize(
    "target", [lambda label: {"a": label, "b": label, "c": label}, lambda label: (label, label, label)]
)
def test_a_loss_of_several_targets_counts_images_not_targets(target):
    def with_loss(data, loss):
        net = Network(tiny())
        net.add_task("t", classes=2)
        return fit(net, "t", data, data, ONCE.changed(head_init=False, batch=8), loss=loss).history[0]

    plain = with_loss(Answers(lambda label: label), F.cross_entropy)
    several = with_loss(
        Answers(target), lambda output, y: F.cross_entropy(output, y["a"] if isinstance(y, dict) else y[0])
    )
    assert several == plain


def test_a_head_start_needs_class_numbers():
    net = Network(tiny())
    net.add_task("year", classes=1)
    data = Answers(lambda label: label.float() + 1900)
    assert fit(net, "year", data, config=ONCE, loss=lambda y, t: F.mse_loss(y[:, 0] + 1900, t)).history
    net.add_task("several", classes=2)
    assert fit(net, "several", Answers(lambda label: {"a": label}), config=ONCE, loss=lambda y, t: y.sum() * 0).history


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_labels_of_any_integer_type(dtype):
    found = []
    for labels in (torch.arange(8) % 2, (torch.arange(8) % 2).to(dtype)):
        net = Network(tiny())
        net.add_task("t", classes=2)
        data = TensorDataset(torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0)), labels)
        found.append((fit(net, "t", data, data, ONCE).history, evaluate(net, "t", data)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (float, "has labels of type torch.float64, not a tensor of class numbers"),
        (lambda label: F.one_hot(label, 2).float(), "has labels of type torch.float32"),
        (lambda label: str(int(label)), "has labels in a (list|tuple), not"),
        (lambda label: label[None], r"scores of shape \(8, 2\), so labels must have the shape \(8,\), not \(8, 1\)"),
    ],
)
def test_other_labels_are_refused(target, said):
    net = Network(tiny())
    net.add_task("t", classes=2)
    with pytest.raises(TrainingError, match=said):
        fit(net, "t", Answers(target), config=ONCE.changed(batch=8))
    with pytest.raises(TrainingError, match=said):
        evaluate(net, "t", Answers(target))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_images_of_any_floating_point_type(dtype):
    net = Network(tiny())
    net.add_task("t", classes=2)
    data = TensorDataset(torch.rand(8, 3, 8, 8).to(dtype), torch.arange(8) % 2)
    fit(net, "t", data, data, ONCE.changed(statistics="batch"))
    assert evaluate(net, "t", data)["loss"] < 2
