"""What a run frees stays with the process while it trains, and goes back to the system afterwards."""

import subprocess
import sys

import pytest

from bitgraft.training.cpu import memory

FAULTS = """
import resource, torch
from bitgraft.training.cpu.memory import kept

def faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        torch.ones(300_000)  # 1.2 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def held():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

with kept():
    faults(50)
    assert faults(50) < 50, "pages are taken anew"
    many = [torch.ones(300_000) for _ in range(200)]
    full = held()
    del many
    assert full - held() < 20e6
assert full - held() > 200e6
"""


@pytest.mark.skipif(memory._glibc() is None or sys.platform != "linux", reason="glibc alone has these thresholds")
def test_memory_is_kept_for_the_next_step_and_given_back_at_the_end():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_without_glibc_nothing_happens(monkeypatch):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    with memory.kept():
        pass
    assert memory._glibc() is None


def test_an_error_ends_it_as_well(monkeypatch):
    said = []
    monkeypatch.setattr(memory, "_set", lambda libc, parameters: said.append(parameters))

    def fails():
        with memory.kept():
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert said == [memory.KEEPING, memory.USUAL]
