"""Busy tasks move to onnxruntime within a memory budget; the others keep running."""

import asyncio
import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from services import Served, add, near, new_store, offline, picture, served, until

from bitgraft.errors import ExportError, ServingError
from bitgraft.runtime.onnx_graph import MissingGraphError
from bitgraft.serving import sessions as tiers
from bitgraft.serving.engine import Engine
from bitgraft.serving.http_error import HttpError
from bitgraft.serving.library import Library
from bitgraft.serving.sessions import BUSY, Sessions
from bitgraft.serving.settings import Settings
from bitgraft.serving.supervisor import open_library, prepare_graphs
from bitgraft.workflows.prediction import best, task_session, torch_scores

SIZE = 100  # bytes of a fake session
NAMES = ("birds", "cars", "dogs")


class FakeSession:
    """A fake session."""

    graph = None

    def __init__(self, net, task_id) -> None:
        self.task_id, self.nbytes = task_id, SIZE


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sessions")
    store, net = new_store(folder, NAMES)
    return folder, store, net


@pytest.fixture
def library(tmp_path):
    store, net = new_store(tmp_path, NAMES)
    return Library(store, net.joint_copy())


def settings(library, **given) -> Settings:
    return Settings(store=library.store.folder, threads=1, poll=3600.0, **given)


def holding(library, *, sessions: float, make=FakeSession, pinned=(), **options) -> Sessions:
    made = Sessions(library, settings(library, memory_budget=int(sessions * SIZE), pin=pinned), make=make, **options)
    made._estimate = lambda: SIZE
    made.start()
    return made


def busy(held: Sessions, entry, images: int = BUSY):
    held.get(entry, images)
    until(lambda: held.get(entry, 1) is not None, "it got no session")


def test_a_task_runs_on_pytorch_until_it_is_busy(library):
    held = holding(library, sessions=3)
    birds, cars = library.tasks["birds"], library.tasks["cars"]
    assert [held.get(birds, 1) for _ in range(BUSY - 1)] == [None] * (BUSY - 1)
    assert held.engine(birds) == "torch"
    busy(held, birds, 1)
    assert held.get(birds, 1).task_id == birds.task_id
    assert (held.engine(birds), held.get(cars, 1), len(held.held), held.nbytes) == ("onnxruntime", None, 1, SIZE)


def test_a_busy_task_replaces_the_least_recently_used_session(library):
    events: list = []
    held = holding(library, sessions=2, on_event=lambda *event: events.append(event))
    birds, cars, dogs = (library.tasks[name] for name in NAMES)
    busy(held, birds, 10 * BUSY)
    busy(held, cars)
    held.get(dogs, BUSY - 1)
    assert [held.engine(entry) for entry in (birds, cars, dogs)] == ["onnxruntime", "onnxruntime", "torch"]
    busy(held, dogs, 1)
    assert [held.engine(entry) for entry in (birds, cars, dogs)] == ["torch", "onnxruntime", "onnxruntime"]
    held.get(cars, 1)
    busy(held, birds)
    assert [held.engine(entry) for entry in (birds, cars, dogs)] == ["onnxruntime", "onnxruntime", "torch"]
    dropped = [("birds", "dropped"), ("dogs", "made"), ("dogs", "dropped"), ("birds", "made")]
    assert events == [("birds", "made"), ("cars", "made"), *dropped]
    assert held.nbytes == 2 * SIZE


def test_a_session_that_is_running_is_not_replaced(library):
    began, go = threading.Event(), threading.Event()

    class Running(FakeSession):
        def __call__(self, images):
            began.set()
            assert go.wait(60)
            return images

    held = holding(library, sessions=2, make=Running)
    birds, cars, dogs = (library.tasks[name] for name in NAMES)
    busy(held, birds)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(held.run, birds, torch.zeros(1))
        assert began.wait(60)
        busy(held, cars)
        busy(held, dogs)
        assert [held.engine(entry) for entry in (birds, cars, dogs)] == ["onnxruntime", "torch", "onnxruntime"]
        go.set()
        assert running.result(60)[1] == "onnxruntime"
    held.get(dogs, 1)
    busy(held, cars)
    assert held.engine(birds) == "torch"


def test_a_budget_below_one_session_makes_none(library):
    held = holding(library, sessions=0.5, make=None)
    assert [held.get(library.tasks["birds"], 1) for _ in range(4 * BUSY)] == [None] * 4 * BUSY
    assert not held.reasons


def test_pytorch_gets_the_rest_of_the_budget(library):
    held = holding(library, sessions=3)
    library.net(torch.zeros(1, 3, 32, 32), task=library.tasks["birds"].task_id)
    assert library.net.resident == {library.tasks["birds"].task_id}
    busy(held, library.tasks["birds"])
    until(lambda: library.net.memory == 2 * SIZE, "the budget is not shared")
    assert not library.net.resident


@pytest.mark.parametrize("problem", [ExportError("it has no graph"), MemoryError("no room")])
def test_a_session_that_cannot_be_made_is_tried_once_and_logged(library, problem, caplog):
    tried = []

    def fail(net, task_id):
        tried.append(task_id)
        raise problem

    held, birds = holding(library, sessions=3, make=fail, pinned=("birds",)), library.tasks["birds"]
    until(held.ready, "it never becomes ready")
    assert [held.get(birds, BUSY) for _ in range(5)] == [None] * 5
    assert tried == [birds.task_id]
    assert str(problem) in held.reasons[birds]
    assert f"birds: stays on PyTorch: {held.reasons[birds]}" in caplog.text
    assert birds.task_id in library.net.resident  # still pinned


def test_pinned_tasks_get_sessions_at_the_start_and_keep_them(library):
    began, go = threading.Event(), threading.Event()

    def slowly(net, task_id):
        began.set()
        assert go.wait(60)
        return FakeSession(net, task_id)

    held = holding(library, sessions=1, make=slowly, pinned=("birds",))
    assert began.wait(60)
    assert not held.ready()
    go.set()
    until(held.ready, "it is not ready")
    held.get(library.tasks["cars"], 100 * BUSY)
    assert [held.engine(library.tasks[name]) for name in ("birds", "cars")] == ["onnxruntime", "torch"]


def test_a_replaced_task_loses_its_session(library, caplog):
    caplog.set_level("INFO")  # handlers may keep log records, which must not keep the task
    held = holding(library, sessions=3, pinned=("birds",))
    until(held.ready, "it is not ready")
    add(library.store, new_net(library), "birds", seed=7)
    library.scan()
    until(lambda: gc.collect() >= 0 and not held.held, "the old version keeps its session")  # a thread may end late
    assert not held.ready()
    held.keep_pinned()
    until(held.ready, "the new version has no session")
    assert held.get(library.tasks["birds"], 1).task_id == library.tasks["birds"].task_id


def new_net(library):
    return library.net.joint_copy().eval()


def test_exact_and_cuda_use_no_sessions(place):
    folder = place[0] / "store"
    with pytest.raises(ServingError, match="exact answers need PyTorch"):
        Settings(store=folder, exact=True, engine="onnxruntime")
    assert not Settings(store=folder, exact=True).use_sessions
    assert not Settings(store=folder, device="cuda").use_sessions


@pytest.fixture(scope="module")
def service(place):
    with served(place[0], "--engine", "onnxruntime", "--pin", "cars", "--poll", "0.1") as running:
        yield running


def has_session(service: Served, name: str) -> bool:
    row = service.tasks()[name]
    return row["engine"] == "onnxruntime" and row["resident"]


def test_a_pinned_task_has_its_session_when_the_service_is_ready(service: Served, place):
    assert {name: row["engine"] for name, row in service.tasks().items()} == {
        "birds": "torch",
        "cars": "onnxruntime",
        "dogs": "torch",
        "original": "torch",
    }
    assert near(service.answers("cars", picture()), offline(place[2], "cars", picture()))


def test_answers_stay_the_same_while_a_session_is_made(service: Served, place):
    wanted = {seed: offline(place[2], "birds", picture(seed)) for seed in range(6)}
    ended = threading.Event()

    def ask(number: int) -> bool:
        good = True
        while not ended.is_set():
            for seed, want in wanted.items():
                good &= near(service.answers("birds", picture(seed)), want)
        return good

    with ThreadPoolExecutor(3) as clients:
        asking = [clients.submit(ask, number) for number in range(3)]
        try:
            until(lambda: has_session(service, "birds"), "it stays on PyTorch")
        finally:
            ended.set()
        assert all(one.result(60) for one in asking)
    assert near(service.answers("birds", picture()), wanted[0])
    assert "bitgraft_sessions 2.0" in service.http.get("/metrics").text


def test_a_replaced_file_gives_the_new_answers(service: Served, place):
    _, store, net = place
    add(store, net, "cars", seed=21, classes=6)
    new = offline(net, "cars", picture())
    until(lambda: service.answers("cars", picture())[0]["class"] == new[0]["class"], "the new file was not loaded")
    until(lambda: has_session(service, "cars"), "it has no session")
    assert near(service.answers("cars", picture()), new)


def test_a_new_graph_is_exported_in_another_process_during_traffic(service: Served, place):
    """Tracing here would patch the calls of every module that is running."""
    _, store, net = place
    add(store, net, "dogs", seed=5, size=24)
    wanted = offline(net, "dogs", picture())
    until(lambda: near(service.answers("dogs", picture()), wanted), "the new file was not loaded")

    def over() -> bool:
        assert near(service.answers("dogs", picture()), wanted)
        return has_session(service, "dogs")

    until(over, "it has no session")
    assert near(service.answers("dogs", picture()), wanted)


def test_a_failed_export_is_the_tasks_reason(library, monkeypatch):
    def missing(net, task_id):
        raise MissingGraphError("it is not there")

    asked: list = []
    monkeypatch.setattr(tiers, "export_graph", lambda store, task: asked.append((store, task)))
    held, birds = holding(library, sessions=3, make=missing), library.tasks["birds"]
    held.get(birds, BUSY)
    until(lambda: birds in held.reasons, "it never becomes ready")
    assert (asked, held.reasons[birds]) == ([(library.store.folder, "birds")], "it is not there")


def started(library, **options) -> Engine:
    engine = Engine(library, settings(library, **options))
    engine.sessions._make = task_session
    engine.start()
    return engine


def ask(engine: Engine, name: str, images: int = 1, seed: int = 0) -> list:
    (inferred,) = asyncio.run(engine.infer([name], [picture(seed)] * images))
    return best(inferred.probabilities[0], inferred.classes, 5)


def test_a_task_whose_session_cannot_be_made_keeps_answering(library):
    def fail(net, task_id):
        raise ExportError("it has no graph")

    engine, net = started(library), library.net
    engine.sessions._make = fail
    birds = library.tasks["birds"]
    assert len(ask(engine, "birds", BUSY)) == 4
    until(lambda: birds in engine.sessions.reasons, "no session was tried")
    wanted = offline(net, birds.task_id, picture())
    assert near(ask(engine, "birds", BUSY), wanted)
    (row,) = [row for row in asyncio.run(engine.tasks())["tasks"] if row["name"] == "birds"]
    assert (row["engine"], row["engine_reason"]) == ("torch", "it has no graph")


def test_a_tasks_full_queue_is_a_429_that_names_the_task(library):
    engine = Engine(library, settings(library, max_queue=2))  # not started, so nothing leaves the queue
    birds, cars = library.find("birds"), library.find("cars")
    engine.scheduler.submit({birds: [torch.zeros(3, 32, 32)]})
    with pytest.raises(HttpError) as refused:
        engine.scheduler.submit({cars: [torch.zeros(3, 32, 32)], birds: [torch.zeros(3, 32, 32)] * 2})
    message = "the queue of task 'birds' is full (1 waiting, at most 2): try again later"
    assert (refused.value.status, refused.value.message, refused.value.retry_after) == (429, message, 1)
    assert engine.scheduler.waiting == 1


def test_all_tasks_answer_with_a_budget_for_one_session(library):
    size = task_session(library.net, library.tasks["birds"].task_id).nbytes
    engine = started(library, memory_budget=int(1.5 * size))
    wanted = {name: offline(library.net, library.tasks[name].task_id, picture()) for name in NAMES}
    for turn, name in enumerate(NAMES * 3):
        assert near(ask(engine, name, 2**turn % 60 + BUSY), wanted[name])
        until(lambda: not len(engine.sessions._pending), "a session is never made")
        assert engine.sessions.nbytes <= 1.5 * size
    assert len(engine.sessions.held) == 1


def test_a_task_without_a_session_runs_in_the_shared_graph_once_it_agrees(library, monkeypatch):
    add(library.store, library.net.joint_copy().eval(), "small", seed=3, size=24)
    library.scan()
    engine = started(library, memory_budget=1)  # no room for weights
    held, image = engine.sessions, lambda entry: torch.randn(2, 3, *entry.preprocessing.size)
    held._graph = task_session(library.net, library.tasks["birds"].task_id).graph
    for name in ("birds", "cars", "small"):
        entry, engines = library.tasks[name], []
        for _ in range(3):
            images = image(entry)
            scores, engine_name = held.run_without_session(entry, images)
            engines.append(engine_name)
            torch.testing.assert_close(scores, torch_scores(library.net, entry.task_id, images), rtol=1e-4, atol=1e-5)
            library.net.release(entry.task_id)
        row = next(row for row in asyncio.run(engine.tasks())["tasks"] if row["name"] == name)
        assert (row["engine"], row["resident"]) == (engines[-1], False)
        assert engines == [
            "torch",
            *["torch" if name == "small" else "onnxruntime"] * 2,
        ]  # another image size

    def refuse(given, expected):
        raise ExportError("they differ")

    monkeypatch.setattr(tiers, "check_agreement", refuse)
    dogs = library.tasks["dogs"]
    assert [held.run_without_session(dogs, image(dogs))[1] for _ in range(3)] == ["torch"] * 3


def test_a_task_with_its_own_modules_runs_on_torch_when_its_session_is_dropped(library):
    held, own = started(library, memory_budget=1).sessions, library.tasks["original"]
    held._pinned = (own.name,)
    held._add(own, task_session(library.net, own.task_id))
    del held.held[own]
    assert held.run_without_session(own, torch.randn(2, 3, *own.preprocessing.size))[1] == "torch"
    assert held._new(own).nbytes > 0


def test_added_and_removed_tasks_leave_no_memory_behind(library, caplog):
    """benchmarks/churn.py does this with 1,000 tasks over HTTP."""
    caplog.set_level("INFO")
    engine, store, net = started(library), library.store, library.net
    before, file = set(net.tasks), store.path("birds").read_bytes()
    resident: list[int] = []
    for turn in range(4):
        names = [f"new-{turn}-{number}" for number in range(8)]
        for name in names:
            store.path(name).write_bytes(file)
        library.scan()
        for name in names:
            ask(engine, name, BUSY)
        until(lambda: not len(engine.sessions._pending), "a session is never made")
        assert (len(engine.sessions.held), len(net.tasks)) == (8, len(before) + 8)
        for name in names:
            store.path(name).unlink()

        def gone(*_) -> bool:
            library.scan()
            gc.collect()
            return not engine.sessions.held and set(net.tasks) == before

        until(gone, "something is left of them")
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert resident[-1] <= 1.05 * resident[0]


def test_without_onnxruntime_the_service_runs_on_pytorch(library, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    held = Sessions(library, settings(library, pin=("birds",)))
    held.start()
    until(held.ready, "it never becomes ready")
    assert "onnxruntime, which cannot be imported" in held.reasons[library.tasks["birds"]]


def test_a_missing_onnxruntime_is_an_error_only_with_engine_onnxruntime(library, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    folder = library.store.folder
    prepare_graphs(Settings(store=folder), library)
    assert "tasks run on PyTorch: ONNX needs onnxruntime" in caplog.text
    with pytest.raises(ServingError, match="the tasks cannot run on onnxruntime: ONNX needs onnxruntime"):
        prepare_graphs(Settings(store=folder, engine="onnxruntime"), library)


def test_an_unknown_task_cannot_be_pinned(place, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(place[0]), *sys.path])
    monkeypatch.delitem(sys.modules, "served_net", raising=False)
    with pytest.raises(ServingError, match="no task 'fish' to pin; the store has birds, cars"):
        open_library(Settings(store=place[0] / "store", pin=("fish",)))
