"""Freed memory stays with the process until it is returned. Each test runs in a process of its own."""

import subprocess
import sys

import pytest

CHURN = """
import resource
from bitgraft.runtime.memory import give_memory_back, keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [b"x" * 2**24 for _ in range(4)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""
PAGES = 4 * 2**24 // 4096
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is Linux'")


def printed(code: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", CHURN + code], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


def test_freed_memory_is_kept_for_the_next_batch():
    (usual,) = printed("faults(); print(faults())")
    (kept,) = printed("keep_freed_memory(); faults(); print(faults())")
    assert usual > PAGES / 2
    assert kept < PAGES / 10


def test_memory_is_given_back_when_asked():
    (again,) = printed("keep_freed_memory(); faults(); give_memory_back(); print(faults())")
    assert again > PAGES / 2
