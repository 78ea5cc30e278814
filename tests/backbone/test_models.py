"""Many backbones work unchanged: each is read, trains a task, runs it, saves it and exports it."""

import copy

import pytest
import timm
import torch
from tiny import batch, learn, run, scores, settled
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ConvNextV2Config,
    ConvNextV2ForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from bitgraft import Network, resnet26, wide_resnet
from bitgraft.transforms.masked import Masked


def vit():
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=32,
            patch_size=8,
        )
    )


def swin():
    return SwinForImageClassification(
        SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4)
    )


def one_dimension():
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, bias=False),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.ConvTranspose1d(4, 6, 3, groups=2),
        nn.GroupNorm(3, 6),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def two_dimensions():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3),
        nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(6, 4, 2, stride=2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(4, 5, 1),
        nn.Flatten(),
    )


def three_dimensions():
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, groups=2, bias=False),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.ConvTranspose3d(4, 6, 3),
        nn.InstanceNorm3d(6, affine=True),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.LayerNorm(6),
        nn.Linear(6, 3),
    )


def perceptron():
    return nn.Sequential(nn.Linear(5, 8, bias=False), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 3))


class Attention(nn.Module):
    """Fused projections in torch's encoder layer, and separate ones in bare attention."""

    input_size = (5, 6)

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, kdim=4, vdim=4, batch_first=True)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        x = self.encoder(x)
        return self.fc(self.attention(x, x[..., :4], x[..., :4])[0].mean(1))


BACKBONES = {
    "resnet50": (lambda: timm.create_model("resnet50"), (3, 32, 32)),
    "densenet121": (lambda: timm.create_model("densenet121"), (3, 32, 32)),
    "efficientnet": (lambda: timm.create_model("tf_efficientnet_lite0"), (3, 32, 32)),
    "mobilenet": (lambda: timm.create_model("mobilenetv3_large_100"), (3, 32, 32)),
    "convnext": (lambda: timm.create_model("convnext_atto"), (3, 32, 32)),
    "vit": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3), (3, 32, 32)),
    "transformers-vit": (vit, (3, 32, 32)),
    "transformers-resnet": (
        lambda: ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])),
        (3, 32, 32),
    ),
    "transformers-convnext": (
        lambda: ConvNextV2ForImageClassification(
            ConvNextV2Config(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], image_size=32)
        ),
        (3, 32, 32),
    ),
    "transformers-swin": (swin, (3, 32, 32)),
    "wide-resnet": (lambda: wide_resnet(10, 1, 10), (3, 32, 32)),
    "resnet26": (lambda: resnet26(10, 0.25), (3, 32, 32)),
    "one-dimension": (one_dimension, (2, 20)),
    "two-dimensions": (two_dimensions, (3, 8, 8)),
    "three-dimensions": (three_dimensions, (2, 6, 6, 6)),
    "perceptron": (perceptron, (5,)),
    "attention": (Attention, (5, 6)),
}


def build(name):
    make, shape = BACKBONES[name]
    torch.manual_seed(0)
    return settled(make()).eval(), batch(4, *shape)


@torch.no_grad()
def by_hand(backbone, task):
    """The backbone with each weight replaced by equation (2), term by term, in float64."""
    plain = copy.deepcopy(backbone)
    for name, transform in task.transforms.items():
        assert isinstance(transform, Masked)
        w, m = plain.get_parameter(name).double(), transform.mask().double()
        k0, k1, k2, k3 = transform.values().double()
        place(plain, name, k0 * w + k1 + k2 * m + k3 * w * m)
    for name, tensor in task.owned.items():
        place(plain, name, tensor)
    return plain


def place(module, name, tensor):
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    if attribute in owner._parameters:
        owner._parameters[attribute] = nn.Parameter(tensor.float())
    else:
        owner._buffers[attribute] = tensor.clone()


@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_takes_a_task(name, tmp_path):
    backbone, images = build(name)
    net = Network(backbone)
    assert torch.equal(run(net, images), run(backbone, images))

    task = net.add_task("t", classes=5, method="full", preset=None)
    learn(net, "t", images, steps=2, rate=1e-5)
    lost = [n for n, p in task.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not lost
    still = {n for n, p in task.named_parameters() if not p.grad.any()}
    assert {n for n in still if not n.endswith(".k1")} == set()  # k1 may have no effect next to a layer norm
    assert len(still) < len(task.transforms)

    result = run(net, images, task="t")
    assert result.shape == (4, 5)
    torch.testing.assert_close(result, run(by_hand(backbone, task), images), rtol=1e-3, atol=1e-4)

    net.save_task("t", tmp_path / "t.safetensors")
    net.load_task(tmp_path / "t.safetensors", name="again")
    assert torch.equal(run(net, images, task="again"), result)
    assert torch.equal(run(net.export("t"), images), result)
    assert torch.equal(run(net, images), run(backbone, images))


@pytest.mark.parametrize("method", ["finetune", "adapters-parallel", "adapters-series", "lora", "dan", "packnet"])
@pytest.mark.parametrize("name", ["one-dimension", "two-dimensions", "three-dimensions", "perceptron", "attention"])
def test_every_kind_of_layer_takes_every_kind_of_transform(name, method, tmp_path):
    backbone, images = build(name)
    net = Network(backbone)
    task = net.add_task("t", classes=5, method=method, preset=None)
    learn(net, "t", images, steps=2, rate=0.01)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in task.parameters())
    result = run(net, images, task="t")
    net.save_task("t", tmp_path / "t.safetensors")
    net.load_task(tmp_path / "t.safetensors", name="again")
    assert torch.equal(run(net, images, task="again"), result)
    assert torch.equal(run(net.export("t"), images), result)


def test_transformers_keep_their_output_their_loss_and_their_labels():
    backbone, images = build("transformers-vit")
    net = Network(backbone)
    net.add_task("t", classes=["cat", "dog", "eel"])
    labels = torch.tensor([0, 1, 2, 0])
    output = net(images, task="t", labels=labels)
    torch.testing.assert_close(output.loss, nn.functional.cross_entropy(output.logits, labels))
    plain = net.export("t")
    assert (plain.config.num_labels, plain.num_labels, plain.classifier.out_features) == (3, 3, 3)
    assert backbone.config.num_labels == 2
    assert scores(plain(images)).shape == (4, 3)


class Recurrent(nn.Module):
    input_size = (5, 6)

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.lstm(x)[0].mean(1))


@pytest.mark.parametrize("method", ["finetune", "full", "lora"])
def test_a_recurrent_layer_runs_with_the_tasks_weights(method):
    torch.manual_seed(0)
    backbone, images = Recurrent(), batch(4, 5, 6)
    net = Network(backbone)
    assert list(net.anatomy.weights) == ["lstm.weight_ih_l0", "lstm.weight_hh_l0"]
    task = net.add_task("t", classes=3, method=method)
    learn(net, "t", images, rate=1.0)
    assert all(p.grad is not None and p.grad.any() for p in task.parameters())
    plain = net.export("t")
    assert torch.equal(run(net, images, task="t"), run(plain, images))
    plain.lstm.load_state_dict(backbone.lstm.state_dict())
    assert not torch.equal(run(net, images, task="t"), run(plain, images))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=8, n_embd=16, n_layer=1, n_head=2, **ENDS))


def bert():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(vocab_size=30, max_position_embeddings=8, **sizes))


def llama():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=30, tie_word_embeddings=True, **sizes, **ENDS))


ENDS = {"bos_token_id": 1, "eos_token_id": 2}
TEXT = {
    "gpt2": (gpt2, "lm_head", "transformer.h.0.attn.c_attn.weight"),
    "bert": (bert, "cls.predictions.decoder", "bert.encoder.layer.0.attention.self.query.weight"),
    "llama": (llama, "lm_head", "model.layers.0.self_attn.q_proj.weight"),
}


@pytest.mark.parametrize("example", [None, {"input_ids": torch.tensor([[3, 4]])}])
@pytest.mark.parametrize("kind", ["classes", "keep"])
@pytest.mark.parametrize("name", TEXT)
def test_a_language_model_with_a_tied_head_takes_a_task(name, kind, example, tmp_path):
    torch.manual_seed(0)
    make, head, weight = TEXT[name]
    words = torch.tensor([[3, 9, 27, 5], [1, 2, 3, 4]])
    net = Network(make().eval(), example=example, head=head if example is None else "auto")
    assert net.anatomy.head == head
    assert weight in net.anatomy.weights
    assert not any("embed" in name or "wte" in name for name in net.anatomy.weights)
    net.add_task("t", **({"classes": 5} if kind == "classes" else {"head": "keep"}))
    learn(net, "t", words)
    result = run(net, words, task="t")
    assert result.shape == (2, 4, 5 if kind == "classes" else 30)
    assert torch.equal(run(net.export("t"), words), result)
    net.save_task("t", tmp_path / "t.safetensors")
    net.load_task(tmp_path / "t.safetensors", name="again")
    assert torch.equal(run(net, words, task="again"), result)


def test_gpt2s_linear_layers_have_their_outputs_last():
    net = Network(gpt2().eval())
    weight = net.anatomy.weights["transformer.h.0.attn.c_attn.weight"]
    assert (tuple(weight.shape), weight.outputs) == ((16, 48), 48)
    made = net.add_task("t", classes=2, per="channel").transforms[weight.name]
    with torch.no_grad():
        made.k1.copy_(torch.arange(48.0))
    base = net.anatomy.tensor(weight.name)
    torch.testing.assert_close(net.tasks["t"].tensors()[weight.name], base + torch.arange(48.0))


@pytest.mark.parametrize("make", [lambda: wide_resnet(10, 1, 0), lambda: resnet26(0, 0.25)])
def test_our_networks_return_features_without_a_head(make):
    net = Network(make())
    assert (net.anatomy.head, net.anatomy.head_known) == (None, True)
    assert run(net, batch(2, 3, 32, 32)).shape == (2, net.anatomy.features)


def test_our_networks_are_as_deep_and_wide_as_published():
    with torch.device("meta"):
        wide, narrow = wide_resnet(28, 4), resnet26()
    kernels = [m.kernel_size for m in wide.modules() if isinstance(m, nn.Conv2d)]
    assert (kernels.count((3, 3)), kernels.count((1, 1))) == (25, 3)
    assert [wide.conv1.out_channels, *(stage[-1].conv2.out_channels for stage in wide.stages)] == [16, 64, 128, 256]
    assert sum(isinstance(m, nn.Conv2d) for m in narrow.modules()) == 25
    assert [narrow.conv1.out_channels, *(s[-1].conv2.out_channels for s in narrow.stages)] == [32, 64, 128, 256]
    assert wide.fc.out_features == narrow.fc.out_features == 1000
