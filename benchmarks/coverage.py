"""Check which networks of timm and torchvision take a task: the smallest of every model module, with random weights.

    python -m benchmarks.coverage                  # about an hour on one idle core; resumes if stopped
    python -m benchmarks.coverage timm.levit       # repeat some modules
    python -m benchmarks.coverage --again          # repeat all

Each module runs in its own process. Each network gets a task of five classes, which is trained for one step, saved,
loaded into a fresh network and exported; both must return bit-identical scores. Modules with distilled networks are
tested with one of those as well. Writes benchmarks/results/coverage.json; the exit code is 1 if a network fails.
"""

import argparse
import inspect
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

from bitgraft import BackboneError, Network
from bitgraft.backbone.tracing import logits

RESULTS = Path(__file__).parent / "results" / "coverage.json"
LIMIT = 1200  # seconds of CPU time per module
CLASSES = 5
NAMED = {"torchvision.video.s3d": {"head": "classifier.1"}}  # it does not state its number of classes
Make = Callable[[], nn.Module]


def modules() -> list[str]:
    timms = {timm.models._registry._model_to_module[name] for name in timm.list_models()}
    return sorted(f"timm.{name}" for name in timms) + sorted({_module_of(name) for name in _torchvision()})


def _torchvision() -> list[str]:
    packages = (torchvision.models, torchvision.models.video)
    return [name for package in packages for name in torchvision.models.list_models(package)]


def _module_of(name: str) -> str:
    return torchvision.models.get_model_builder(name).__module__.replace(".models", "")


def smallest(module: str) -> Iterator[tuple[str, Make]]:
    """Yield the name and builder of a module's smallest network, and of its smallest with several classifiers."""
    library, _, name = module.partition(".")
    made: dict[str, Make] = {}
    if library == "timm":
        for model in timm.list_models(module=name):
            made[model] = lambda model=model: timm.create_model(model)
    else:
        for model in (model for model in _torchvision() if _module_of(model) == module):
            build = torchvision.models.get_model_builder(model)
            plain = {"init_weights": False} if "init_weights" in inspect.signature(build).parameters else {}
            made[model] = lambda build=build, plain=plain: build(weights=None, **plain)
    best: dict[int, tuple[int, str]] = {}
    for model, make in made.items():
        try:
            with torch.device("meta"):
                network = make()
        except RuntimeError:  # RegNet computes its widths with tensors
            network = make()
        stated = (getattr(network, "pretrained_cfg", None) or {}).get("classifier")
        size = sum(p.numel() for p in network.parameters())
        heads = len(stated) if isinstance(stated, tuple) else 1
        best[heads] = min(best.get(heads, (size, model)), (size, model))
    for _, model in best.values():
        yield model, made[model]


def shapes(network: nn.Module, module: str) -> list[tuple[int, ...]]:
    """Return input shapes to try, smallest first."""
    stated = getattr(network, "pretrained_cfg", None) or {}
    if ".video" in module:
        return [(2, 3, 16, 112, 112), (2, 3, 16, 224, 224)]
    if hasattr(network, "AuxLogits"):
        return [(2, 3, 299, 299)]  # its auxiliary classifier needs this size in training
    sizes = [(3, 96, 96), stated.get("min_input_size", (3, 160, 160)), stated.get("input_size", (3, 224, 224))]
    return [(2, *size) for size in (sizes[2:] if stated.get("fixed_input_size") else sizes)]


def read(network: nn.Module, module: str) -> tuple[Network, Tensor]:
    rng = torch.Generator().manual_seed(0)
    tried = shapes(network, module)
    for shape in tried:
        try:
            return Network(network, example=shape, **NAMED.get(module, {})), torch.randn(shape, generator=rng)
        except BackboneError:
            if shape is tried[-1]:
                raise
    raise AssertionError


def check(module: str, make: Make) -> dict[str, Any]:
    """Return one network's row: the share a task can change, after comparing the loaded and the exported task."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net, images = read(make().eval(), module)
    said = [str(warning.message) for warning in caught if "a task can change only" in str(warning.message)]
    parameters = {name: p.numel() for name, p in net.backbone.named_parameters()}
    row = {
        "parameters": sum(parameters.values()),
        "changed": 1 - sum(parameters[name] for name in net.anatomy.outside) / sum(parameters.values()),
        "head": net.anatomy.head,
        "images": list(images.shape),
        "warning": said[0] if said else None,
    }
    task = net.add_task("t", classes=CLASSES, preset=None)
    optimizer = torch.optim.SGD(task.parameters(), 1e-2)
    task.train()
    nn.functional.cross_entropy(logits(net(images, task="t")), torch.tensor([0, 1])).backward()
    assert sum(bool(p.grad is not None and p.grad.any()) for p in task.parameters()) > 1, "nothing learns"
    nn.utils.clip_grad_norm_(task.parameters(), 1.0)  # with random weights, gradients of k can be in the thousands
    optimizer.step()
    task.eval()
    fresh = make().eval()
    fresh.load_state_dict(net.backbone.state_dict())
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        expected = logits(net(images, task="t"))
        assert expected.shape == (2, CLASSES), f"the scores have shape {tuple(expected.shape)}"
        assert expected.isfinite().all(), "the scores are not finite"
        net.save_task("t", f"{folder}/t.safetensors")
        other, _ = read(fresh, module)
        other.load_task(f"{folder}/t.safetensors")
        assert torch.equal(logits(other(images, task="t")), expected), "the loaded task's scores differ"
        assert torch.equal(logits(net.export("t")(images)), expected), "the exported module's scores differ"
    return row


def work(module: str) -> None:
    """Check a module's networks and print a JSON line for each."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    for model, make in smallest(module):
        begun = time.perf_counter()
        row: dict[str, Any] = {"model": model}
        try:
            row |= {**check(module, make), "equal": True}
        except Exception as problem:  # any failure is this network's result
            row |= {"equal": False, "problem": f"{type(problem).__name__}: {problem}".partition("\n")[0]}
        print(json.dumps({**row, "seconds": round(time.perf_counter() - begun, 1)}), flush=True)


def run(module: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.coverage", "--worker", module]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    ended = [{"model": "?", "equal": False, "problem": f"ended with status {done.returncode}", "seconds": 0.0}]
    return rows if done.returncode == 0 else rows + ended


def line(module: str, row: dict[str, Any]) -> str:
    if not row["equal"]:
        return f"| {module} | {row['model']} | | | {row['problem']} | {row['seconds']:.0f} s |"
    size, changed = f"{row['parameters'] / 1e6:.1f} M", f"{row['changed']:.0%}"
    return f"| {module} | {row['model']} | {size} | {changed} | equal | {row['seconds']:.0f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="for example timm.levit or torchvision.squeezenet; all by default")
    parser.add_argument("--again", action="store_true", help="repeat finished modules")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.modules[0])
    versions = {"torch": torch.__version__, "timm": timm.__version__, "torchvision": torchvision.__version__}
    held = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found: dict[str, Any] = held.get("modules", {}) if held.get("versions") == versions else {}
    print(
        "| module | smallest network | parameters | task changes | file and export | time |\n|---|---|--:|--:|---|--:|"
    )
    for module in options.modules or modules():
        done = module in found and all(row["equal"] for row in found[module])
        if options.modules or options.again or not done:
            found[module] = run(module)
            about = {"versions": versions, "machine": platform.machine(), "date": time.strftime("%F")}
            RESULTS.write_text(json.dumps({**about, "modules": dict(sorted(found.items()))}, indent=1) + "\n")
        for row in found[module]:
            print(line(module, row), flush=True)
    failed = False
    for library in ("timm", "torchvision"):
        good = [all(row["equal"] for row in rows) for module, rows in found.items() if module.startswith(f"{library}.")]
        failed |= not all(good)
        print(f"{library}: {sum(good)} of {len(good)} model modules take a task")
    sys.exit(failed)


if __name__ == "__main__":
    main()
