"""Training on an accelerator: the same results, and no step waits for the device."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from stripes import SHORT, network, stripes

from bitgraft import fit

CONFIG = SHORT.changed(accumulate=2, optimizers={"head": "sgd"})
SIMULATED = textwrap.dedent(
    """
    import sys, torch
    sys.path[:0] = [{tests!r}, {tests!r} + "/training"]
    torch.set_num_threads(1)
    from accelerate import Accelerator
    from simulated_device import SIM, Sim, waits
    from test_devices import CONFIG, network, stripes
    from bitgraft import fit

    class Simulated(Accelerator):
        device = SIM

    class Waits:
        def __init__(self):
            self.steps, self.epochs = [], []
        def note(self, seen):
            seen.append(dict(waits))
            waits.clear()
        def begin(self, *args): waits.clear()
        def step(self, *args): self.note(self.steps)
        def look(self, *args): pass
        def epoch(self, record): self.note(self.epochs)
        def end(self): pass

    found = {{60: {{}}, 130: {{}}}}
    for val, method in ((60, "full"), (60, "lora"), (130, "full"), (130, "lora")):
        net, noted = network(method), Waits()
        with Sim():
            result = fit(net, "stripes", stripes(80, 1), stripes(val, 2), CONFIG, accelerator=Simulated(cpu=True),
                         callbacks=[noted])
            task = net.tasks["stripes"]
            assert all(tensor.device == SIM for tensor in (*task.parameters(), *task.buffers()))
        found[val][method] = dict(steps=noted.steps, epochs=noted.epochs, history=result.history)
    torch.save(found, {out!r})
    """
)


def test_a_device_gives_what_the_cpu_gives_and_is_never_waited_for_in_a_step(tmp_path):
    source = SIMULATED.format(tests=str(Path(__file__).parents[1]), out=str(tmp_path / "found.pt"))
    subprocess.run([sys.executable, "-c", source], check=True)
    few, many = torch.load(tmp_path / "found.pt", weights_only=True).values()
    for method in ("full", "lora"):
        net = network(method)
        expected = fit(net, "stripes", stripes(80, 1), stripes(60, 2), CONFIG, accelerator=Accelerator(cpu=True))
        assert few[method]["steps"] == [{}] * 10
        assert [epoch["tolist"] for epoch in few[method]["epochs"]] == [3, 3]  # loss, record and validation, at its end
        assert few[method]["epochs"] == many[method]["epochs"]  # however many batches are validated
        for mine, theirs in zip(few[method]["history"], expected.history, strict=True):
            assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-3)
            assert mine["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-3)
