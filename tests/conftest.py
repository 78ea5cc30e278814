import pytest
import torch

from bitgraft.transforms import cpu

torch.set_num_threads(1)  # tests run beside one another; small networks gain nothing from more


@pytest.fixture(params=["one thread", "torch's threads", "python's threads"])
def threads(request, monkeypatch):
    """Whose threads compiled loops run in."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.param == "one thread" else 2)
    if request.param == "python's threads":
        monkeypatch.setattr(cpu, "_team", lambda: None)
    yield
    torch.set_num_threads(before)
