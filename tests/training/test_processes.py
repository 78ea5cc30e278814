"""Two processes train as one does, for any number of images, and always hold the same task.

Processes are slow to start, so this is one test: one process and then a pair of them run all scripts.
"""

import sys
from pathlib import Path

import pytest
import torch
from launching import TORCHRUN, launched

TESTS = str(Path(__file__).parents[1])
HEAD = f"""
import os, sys, time, torch
from pathlib import Path
sys.path.insert(0, {TESTS!r})
torch.set_num_threads(1)
from torch import nn
from accelerate import Accelerator
from stripes import PROPORTIONATE, SHORT, Network, backbone, network, stop_after, stripes, without_dropout
from bitgraft import fit
from bitgraft.training import checkpoint
from bitgraft.errors import StoppedError
accelerator = Accelerator(cpu=True)
rank, world, main = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
all_found = {{}}
"""
TAIL = """
torch.save(all_found, f"{world}-{rank}.pt")
if world > 1:
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads can abort the interpreter as it ends (pytorch pull request 179291)
"""


METHODS = """
for method in ("full", "finetune"):
    net = without_dropout(network(method))
    result = fit(net, "stripes", stripes(50, 1), stripes(31, 2), PROPORTIONATE, accelerator=accelerator)
    found[method] = {"tensors": net.tasks["stripes"].state_dict(), "history": result.history}
"""


def two_processes_give_what_one_gives(found):
    """The same global batch and batch statistics, up to rounding."""
    (one,), (two, _) = found[1]["methods"], found[2]["methods"]
    # with mean-shift correction k1 has almost no gradient, so its steps are rounding; biases compensate
    for method, rounding in (("full", 1e-3), ("finetune", 1e-5)):
        mine, theirs = one[method], two[method]
        for name, tensor in mine["tensors"].items():
            if tensor.is_floating_point():
                assert torch.allclose(tensor, theirs["tensors"][name], rtol=rounding, atol=rounding / 10), name
        for a, b in zip(mine["history"], theirs["history"], strict=True):
            assert a["train_loss"] == pytest.approx(b["train_loss"], rel=max(rounding, 1e-4))
            assert a["val_accuracy"] == pytest.approx(b["val_accuracy"], abs=0.04)


NORMS = """
from torch.nn import functional as F
from bitgraft.training.sync_bn import synchronised
for mean in (0.0, 100.0, 1000.0, 3000.0):
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(7, 4, 3, 3, generator=rng) * torch.tensor([0.5, 1, 2, 3]).view(1, 4, 1, 1) + mean
    grad, weight = torch.randn(x.shape, generator=rng), torch.rand(4, generator=rng)
    norm = nn.BatchNorm2d(4)
    norm.weight.data.copy_(weight)
    part = x[rank::world].clone().requires_grad_()
    with synchronised():
        y = norm(part)
    (y * grad[rank::world]).sum().backward()
    exact, whole = nn.BatchNorm2d(4).double(), x.double().requires_grad_()
    exact.weight.data.copy_(weight)
    z = exact(whole)
    (z * grad).sum().backward()
    off = lambda a, b: float((a - b).abs().max())
    found[mean] = {
        "output": off(y, z[rank::world]),
        "gradient": off(part.grad, whole.grad[rank::world]),
        "mean": off(norm.running_mean, exact.running_mean) / (1 + mean),
        "variance": off(norm.running_var, exact.running_var),
    }
"""


def batch_statistics_over_processes_are_exact_whatever_the_mean(found):
    """Against one process in float64: E[x²] - E[x]² in float32 is off by 1e3 at a mean of 3,000."""
    for process in found[2]["norms"]:
        for mean, off in process.items():
            assert all(value < 2e-5 for value in off.values()), (mean, off)


UNEVEN = """
cases = {"65": (65, 32, 1, 129), "33": (33, 32, 1, 1), "35 in parts": (35, 32, 2, 30), "3 by one": (3, 1, 1, 3)}
for name, (images, batch, accumulate, val) in cases.items():
    for statistics in ("batch", "kept"):
        if statistics == "batch" and batch == 1:
            continue
        config = PROPORTIONATE.changed(batch=batch, accumulate=accumulate, statistics=statistics)
        net = without_dropout(network("finetune"))
        result = fit(net, "stripes", stripes(images, 1), stripes(val, 2), config, accelerator=accelerator)
        found[f"{name}, {statistics}"] = {**net.tasks["stripes"].state_dict(), **result.history[-1]}
"""


def any_number_of_images_and_micro_batches(found):
    """A process with an empty shard takes part with weight 0."""
    (one,), two = found[1]["uneven"], found[2]["uneven"]
    assert len(one) == 7
    for case, expected in one.items():
        for process in two:
            for name, value in expected.items():
                mine, theirs = (torch.as_tensor(v, dtype=torch.float64) for v in (value, process[case][name]))
                assert torch.allclose(mine, theirs, rtol=2e-3, atol=2e-4), (case, name)


START = """
from bitgraft.training import init
seen, real = [], init._minimise
init._minimise = lambda features, *rest: (seen.append(features), real(features, *rest))
before = without_dropout(network())
config = SHORT.changed(epochs=1, rates=dict.fromkeys(SHORT.rates, 0.0))
if rank:  # as if processes had different seeds
    with torch.no_grad():
        before.tasks["stripes"].owned["9.bias"] += 1
fit(before, "stripes", stripes(51, 1), None, config, accelerator=accelerator)
found["tensors"] = before.tasks["stripes"].state_dict()
found["fitted"] = [len(features) for features in seen]
init._minimise = real
"""


def all_processes_start_from_the_same_head_statistics_and_means(found):
    (one,), two = found[1]["start"], found[2]["start"]
    assert [process["fitted"] for process in (one, *two)] == [[51], [51], []]  # the main process fits the head
    for name, tensor in one["tensors"].items():
        assert torch.equal(two[0]["tensors"][name], two[1]["tensors"][name]), name
        assert torch.allclose(two[0]["tensors"][name].float(), tensor.float(), rtol=1e-3, atol=1e-4), name


RESUMED = """
config = SHORT.changed(statistics="batch", keep="best")
data = stripes(49, 1), stripes(9, 2)
whole = network()
history = fit(whole, "stripes", *data, config, accelerator=accelerator).history
write = checkpoint.write_atomically
def write_late(*args):
    time.sleep(1)
    write(*args)
checkpoint.write_atomically = write_late  # no process goes on before it is written
try:
    fit(network(), "stripes", *data, config, accelerator=accelerator, folder=".", stop=stop_after(2))
except StoppedError:
    found["stopped"] = True
checkpoint.write_atomically = write
again = network()
torch.manual_seed(99)
found["history"] = fit(again, "stripes", *data, config, accelerator=accelerator, folder=".", resume=True).history
found["expected"] = history
for name, net in (("whole", whole), ("again", again)):
    found[name] = net.tasks["stripes"].state_dict()
"""


def each_process_resumes_with_its_own_random_state(found):
    for process in found[2]["resumed"]:
        assert process["stopped"]
        assert process["history"] == process["expected"]
        assert all(torch.equal(tensor, process["again"][name]) for name, tensor in process["whole"].items())


UNUSED = """
class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.spare = backbone(), nn.Conv2d(1, 8, 3)
    def forward(self, x):
        return self.body(x)

asked, prepare = [], accelerator.prepare
def noted(*args):
    if accelerator.ddp_handler is not None:
        asked.append(accelerator.ddp_handler.find_unused_parameters)
    return prepare(*args)
accelerator.prepare = noted
for name, module in (("spare", Spare()), ("plain", backbone())):
    net = Network(module, example=(1, 1, 12, 12))
    net.add_task("stripes", classes=3, method="finetune")
    fit(without_dropout(net), "stripes", stripes(20, 1), None, PROPORTIONATE, accelerator=accelerator)
    found[name] = {key.replace("·body", ""): tensor for key, tensor in net.tasks["stripes"].state_dict().items()}
found["asked"] = asked
accelerator.prepare = prepare
"""


def ddp_looks_for_unused_parameters_only_if_a_layer_never_runs(found):
    for process in found[2]["unused"]:
        assert process["asked"] == [True, False]
        assert any("spare" in name for name in process["spare"])
        for name, tensor in process["plain"].items():
            assert torch.equal(process["spare"][name], tensor), name


ANY = {"methods": METHODS, "uneven": UNEVEN, "start": START}
SCRIPTS = {1: ANY, 2: {**ANY, "norms": NORMS, "resumed": RESUMED, "unused": UNUSED}}


def test_one_process_and_two(tmp_path):
    """`found[2]["norms"]` is what each of two processes found with the script `norms`."""
    found = {}
    for world, scripts in SCRIPTS.items():
        bodies = [f"found = all_found[{name!r}] = {{}}\n{body}" for name, body in scripts.items()]
        (tmp_path / f"{world}.py").write_text("\n".join([HEAD, *bodies, TAIL]))
        command = (sys.executable,) if world == 1 else TORCHRUN
        with launched(*command, str(tmp_path / f"{world}.py"), folder=tmp_path) as group:
            assert group.ended() == 0, group.err
        ranks = [torch.load(tmp_path / f"{world}-{rank}.pt", weights_only=True) for rank in range(world)]
        found[world] = {name: [rank[name] for rank in ranks] for name in scripts}
    two_processes_give_what_one_gives(found)
    batch_statistics_over_processes_are_exact_whatever_the_mean(found)
    any_number_of_images_and_micro_batches(found)
    all_processes_start_from_the_same_head_statistics_and_means(found)
    each_process_resumes_with_its_own_random_state(found)
    ddp_looks_for_unused_parameters_only_if_a_layer_never_runs(found)
