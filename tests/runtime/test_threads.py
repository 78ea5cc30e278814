"""Threads that share a network get the same results as a single thread."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import METHODS, batch, learn, run, tiny
from torch.nn import functional as F

from bitgraft import Network


@pytest.fixture(autouse=True)
def restless():
    """Switch threads far more often than usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def together(count, work):
    """Run `work(i)` in `count` threads that start at the same time, and return the results."""
    barrier = threading.Barrier(count)

    def begin(i):
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(begin, i) for i in range(count)]]


@pytest.mark.parametrize("active", [1, 8])
@pytest.mark.parametrize("count", [2, 8])
def test_threads_that_run_different_tasks_get_their_own_answers(count, active):
    net = Network(tiny(), active=active)
    methods = [METHODS[i % len(METHODS)] for i in range(count)]
    for i, method in enumerate(methods):
        net.add_task(f"t{i}", classes=3 + i, method=method, seed=i)
        learn(net, f"t{i}", batch(), steps=1)
    net.eval()
    inputs = [batch(seed=i) for i in range(count)]
    answers = [run(net, inputs[i], task=f"t{i}") for i in range(count)]

    def work(i):
        return sum(not torch.equal(run(net, inputs[i], task=f"t{i}"), answers[i]) for _ in range(60))

    assert together(count, work) == [0] * count
    assert len(net.resident) <= active


@pytest.mark.parametrize("active", [1, 8])
@pytest.mark.parametrize("grad", [True, False])
def test_threads_that_run_the_same_tasks_get_the_same_answers(active, grad):
    net, x = Network(tiny(), active=active), batch()
    for name in ("a", "b"):
        net.add_task(name, classes=3, seed=ord(name))
        learn(net, name, x, steps=1)
    net.eval()
    names = ["a", "b", "original"]
    with torch.set_grad_enabled(grad):
        answers = {name: net(x, task=name) for name in names}

    def work(i):
        wrong = 0
        with torch.set_grad_enabled(grad):
            for turn in range(60):
                name = names[(i + turn) % 3]
                wrong += not torch.equal(net(x, task=name), answers[name])
        return wrong

    assert together(8, work) == [0] * 8


def test_mixed_batches_in_threads():
    net, x = Network(tiny(), active=1), batch(6)
    net.add_task("a", classes=3)
    net.add_task("b", classes=3, seed=1)
    names = ["a", "b", "original", "b", "a", "a"]
    with torch.no_grad():
        answer = net(x, task=names)

    def work(i):
        with torch.no_grad():
            return all(torch.equal(*rows) for _ in range(20) for rows in zip(net(x, task=names), answer, strict=True))

    assert together(4, work) == [True] * 4


@pytest.mark.parametrize("active", [1, 8])
def test_one_thread_learns_while_another_evaluates(active):
    x = batch()
    alone = Network(tiny())
    alone.add_task("a", classes=3)
    losses = learn(alone, "a", x, steps=30)

    net = Network(tiny(), active=active)
    net.add_task("a", classes=3)
    net.add_task("b", classes=3, seed=1)
    net.eval()
    answer = run(net, x, task="b")

    def work(i):
        if i == 0:
            return all(map(torch.equal, learn(net, "a", x, steps=30), losses))
        return all(torch.equal(run(net, x, task="b"), answer) for _ in range(60))

    assert together(3, work) == [True] * 3
    assert torch.equal(run(net, x, task="a"), run(alone, x, task="a"))


def test_gradients_are_whole_while_other_threads_evaluate_the_same_task():
    net, x = Network(tiny()), batch()
    task = net.add_task("t", classes=3).eval()
    labels = torch.arange(4) % 3
    expected = torch.autograd.grad(F.cross_entropy(net(x, task="t"), labels), list(task.parameters()))
    answer = run(net, x, task="t")

    def work(i):
        if i % 2:
            return all(torch.equal(run(net, x, task="t"), answer) for _ in range(60))
        for _ in range(30):
            found = torch.autograd.grad(F.cross_entropy(net(x, task="t"), labels), list(task.parameters()))
            if not all(map(torch.equal, found, expected)):
                return False
        return True

    assert together(4, work) == [True] * 4


def test_tasks_come_and_go_while_others_run():
    net, x = Network(tiny(), active=2), batch()
    net.add_task("stays", classes=3)
    answer = run(net, x, task="stays")

    def work(i):
        if i < 2:
            return all(torch.equal(run(net, x, task="stays"), answer) for _ in range(60))
        for turn in range(15):
            net.add_task(f"t{i}", classes=3, seed=turn)
            if not torch.equal(run(net, x, task=f"t{i}"), run(net.export(f"t{i}"), x)):
                return False
            net.remove_task(f"t{i}")
        return True

    assert together(4, work) == [True] * 4
    assert list(net.tasks) == ["stays"]
