"""An exported task is an ordinary module that can be loaded without bitgraft."""

import subprocess
import sys

import pytest
import torch
from tiny import METHODS, batch, learn, run, tiny
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from bitgraft import Network
from bitgraft.runtime.task_module import TaskModule

OPEN_WITHOUT_BITGRAFT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("bitgraft", "tiny"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Blocker())
import torch
torch.set_num_threads(1)
for name in sys.argv[2:]:
    module, images, answer = torch.load(f"{sys.argv[1]}/{name}.pt", weights_only=False)
    with torch.no_grad():
        output = module(images)
    assert torch.equal(getattr(output, "logits", output), answer), name
    assert not any(module.training for module in module.modules())
try:
    import bitgraft
except ImportError:
    print("opened", len(sys.argv[2:]))
"""


def sequential():
    """Return a network of torch's own classes, which can be unpickled anywhere."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    ).eval()


def everything_inside(module):
    """Yield everything that a pickle of the module would contain."""
    for part in module.modules():
        yield part
        for name, value in vars(part).items():
            if name.endswith("_hooks"):
                assert not value, (part, name)
            elif isinstance(value, dict):
                yield from value.values()
            else:
                yield value


def homes(module):
    for thing in everything_inside(module):
        yield type(thing).__module__
        yield getattr(thing, "__module__", None) or ""


@pytest.mark.parametrize("method", [*METHODS, None])
def test_nothing_of_bitgraft_is_in_an_exported_module(method):
    net, x = Network(sequential()), batch()
    name = "original"
    if method is not None:
        name = "t"
        net.add_task("t", classes=3, method=method)
        learn(net, "t", x)
    plain = net.export(name)
    assert type(plain) is nn.Sequential
    assert {home for home in homes(plain) if home.startswith("bitgraft")} == set()
    assert torch.equal(run(plain, x), run(net, x, task=name))
    shared = {p.data_ptr() for p in [*net.backbone.parameters(), *net.parameters()]}
    assert not any(p.data_ptr() in shared for p in plain.parameters())
    assert all(type(p) is nn.Parameter and p.requires_grad for p in plain.parameters())


def test_exported_modules_open_where_bitgraft_is_not_installed(tmp_path):
    net, x = Network(sequential()), batch()
    exported = {"original": net.export()}
    for method in METHODS:
        net.add_task(method, classes=3, method=method)
        learn(net, method, x)
        exported[method] = net.export(method)
    net.add_task("module", head=nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)))
    net.add_task("features", head=None)
    exported |= {name: net.export(name) for name in ("module", "features")}
    saved = {name: (module, x, run(net, x, task=name)) for name, module in exported.items()}

    rounded = Network(sequential()).bfloat16()
    rounded.add_task("rounded", classes=2, head=nn.Linear(6, 2), method="adapters-series")
    y = x.bfloat16()
    saved["rounded"] = (rounded.export("rounded"), y, run(rounded, y, task="rounded"))

    wrapped = Network(ResNetForImageClassification(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1])).eval())
    wrapped.add_task("transformers", classes=3, method="adapters-series")
    learn(wrapped, "transformers", x, rate=1e-3)
    saved["transformers"] = (wrapped.export("transformers"), x, run(wrapped, x, task="transformers"))

    for name, triple in saved.items():
        torch.save(triple, tmp_path / f"{name}.pt")
    command = [sys.executable, "-I", "-c", OPEN_WITHOUT_BITGRAFT, str(tmp_path), *saved]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == f"opened {len(saved)}", done.stderr


def test_training_an_exported_module_leaves_the_task_alone():
    net, x = Network(tiny()), batch()
    net.add_task("t", classes=3, method="adapters-series")
    answer = run(net, x, task="t")
    plain = net.export("t").train()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    assert all(p.grad is not None for p in plain.parameters())
    assert torch.equal(run(net, x, task="t"), answer)
    assert not torch.equal(run(plain.eval(), x), answer)


def test_a_layer_that_stands_in_two_places_keeps_its_adapter_in_both():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 3, 3, padding=1)
    net = Network(nn.Sequential(conv, nn.ReLU(), conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)).eval())
    net.add_task("t", classes=2, method="adapters-series")
    learn(net, "t", batch(), rate=1.0)
    plain = net.export("t")
    assert plain[0] is plain[2]
    assert torch.equal(run(plain, batch()), run(net, batch(), task="t"))


def test_parameters_that_the_task_does_not_replace_are_shared_and_buffers_are_not():
    backbone = tiny()
    task = Network(backbone).add_task("t", classes=3, method="classifier")
    task_module = TaskModule(task)
    task_module.refresh()
    assert task_module.module.stem.weight.data_ptr() == backbone.stem.weight.data_ptr()
    assert task_module.module.norm1.running_mean.data_ptr() != backbone.norm1.running_mean.data_ptr()
    assert task_module.module.stem is not backbone.stem


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_series_adapter_adds_to_an_output_that_keeps_its_precision(dtype):
    torch.manual_seed(0)
    net = Network(nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).to(dtype))
    task, x = net.add_task("t", method="adapters-series", head="keep").eval(), batch().to(dtype)
    net.eval()
    assert torch.equal(run(net, x, task="t"), run(net, x))  # A is 0 at the start, and nothing is rounded
    tail = task.transforms["0.weight"].tail
    nn.init.normal_(tail.a.weight)
    nn.init.normal_(tail.norm.running_mean)
    with torch.no_grad():
        y = net.backbone[0](x)
        wide = y.to(torch.promote_types(dtype, torch.float32))
        expected = net.backbone[1:]((wide + tail.a(tail.norm(y.float()))).to(dtype))
    assert torch.equal(run(net, x, task="t"), expected)
    assert torch.equal(run(net.export("t"), x), expected)


def test_exported_tensors_of_a_loaded_task_do_not_share_storage(tmp_path):
    """A loaded task's tensors share one storage, all of which would be saved with any of them."""
    net = Network(tiny())
    net.add_task("t", classes=3)
    net.save_task("t", tmp_path / "t")
    loaded = Network(tiny())
    loaded.load_task(tmp_path / "t")
    held = [*loaded.export("t").parameters(), *loaded.export("t").buffers()]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in held)
