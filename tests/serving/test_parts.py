"""Unit tests: the scheduler, the library, image decoding, keys and settings."""

import io
import pickle
import socket
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from services import PREPROCESSING, add, bomb, new_store, offline, picture, until
from starlette.datastructures import Headers

from bitgraft.data.preprocessing import Preprocessing, evaluation_tensor
from bitgraft.errors import ServingError, TaskError, UnknownTaskError, UnsafeNameError
from bitgraft.network import Network
from bitgraft.serving.access import is_authorized, read_keys
from bitgraft.serving.http_error import HttpError
from bitgraft.serving.library import Library
from bitgraft.serving.predictions import FORMATS, decode
from bitgraft.serving.scheduler import Scheduler
from bitgraft.serving.settings import Settings
from bitgraft.serving.supervisor import listen

WANTED = [Preprocessing.from_dict(PREPROCESSING)]


def recording(turns: list, **bounds: int) -> Scheduler:
    def note(key, items):
        turns.append((key, list(items)))
        return [item * 2 for item in items]

    return Scheduler(note, wait=0.0, **bounds)


def submit(scheduler: Scheduler, task: str, values: Sequence) -> list[Future]:
    return scheduler.submit({task: values})[task]


def results(futures: list[Future]) -> list:
    return [future.result(60) for future in futures]


def test_items_that_arrive_together_are_one_batch_and_each_gets_its_result():
    turns: list = []
    scheduler = recording(turns, batch=8, queue=99, total=99)
    asked = [submit(scheduler, "a", [number]) for number in range(5)]
    scheduler.start()
    assert [results(futures) for futures in asked] == [[0], [2], [4], [6], [8]]
    assert turns == [("a", [0, 1, 2, 3, 4])]


def test_a_busy_task_delays_the_others_by_one_batch():
    turns: list = []
    scheduler = recording(turns, batch=4, queue=99, total=999)
    futures = [submit(scheduler, *one) for one in (("busy", range(20)), ("quiet", [1]), ("other", range(5)))]
    scheduler.start()
    assert [len(results(one)) for one in futures] == [20, 1, 5]
    assert [key for key, _ in turns] == ["busy", "quiet", "other", "busy", "other", "busy", "busy", "busy"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6)), max_size=12), st.integers(1, 5))
def test_every_item_runs_once_in_order_and_no_batch_is_too_large(asked, most):
    turns: list = []
    scheduler = recording(turns, batch=most, queue=999, total=999)
    wanted: dict = {}
    futures: list = []
    for number, (key, count) in enumerate(asked):
        values = [100 * number + item for item in range(count)]
        wanted.setdefault(key, []).extend(values)
        futures += submit(scheduler, key, values)
    scheduler.start()
    results(futures)
    ran: dict = {}
    for key, items in turns:
        assert 1 <= len(items) <= most
        ran.setdefault(key, []).extend(items)
    assert ran == wanted


def test_turns_run_concurrently_and_divide_the_queue():
    both, turns = threading.Barrier(2, timeout=60), []

    def meet(key, items):
        both.wait()  # times out unless both turns run
        turns.append((key, list(items)))
        return items

    scheduler = Scheduler(meet, batch=8, wait=0.0, queue=99, total=99, turns=2)
    futures = [submit(scheduler, *one) for one in (("a", range(6)), ("b", [1]))]
    scheduler.start()
    assert [len(results(one)) for one in futures] == [6, 1]
    assert scheduler.alive
    assert max(len(items) for _, items in turns) == 3


@pytest.mark.parametrize("values", [{"a": [1, 2]}, {"a": [1], "b": [2]}])
def test_idle_turns_share_one_request(values):
    both = threading.Barrier(2, timeout=20)

    def meet(key, items):
        both.wait()  # times out unless both turns run
        return items

    scheduler = Scheduler(meet, batch=8, wait=0.0, queue=99, total=99, turns=2)
    scheduler.start()
    until(lambda: len(scheduler._changed._waiters) == 2, "the turns are not idle")
    futures = scheduler.submit(values)
    assert {task: results(of_task) for task, of_task in futures.items()} == values


def test_full_queues_refuse_whole_requests_with_a_retry_time():
    scheduler = recording([], batch=4, queue=4, total=6)
    submit(scheduler, "a", range(3))
    with pytest.raises(HttpError, match=r"queue of task 'a' is full \(3 waiting, at most 4\)") as crowded:
        submit(scheduler, "a", range(2))
    assert (crowded.value.status, scheduler.waiting) == (429, 3)
    submit(scheduler, "b", range(3))
    with pytest.raises(HttpError, match="try again later") as full:
        submit(scheduler, "c", [1])
    assert full.value.status == 503
    assert full.value.retry_after >= 1


@pytest.mark.parametrize(("seconds", "header"), [(None, None), (0.0, 1), (1, 1), (2.1, 3), (1000.0, 60)])
def test_retry_after_is_rounded_up_and_survives_pickling(seconds, header):
    refusal = HttpError(503, "try later", seconds)
    assert refusal.retry_after == header
    assert pickle.loads(pickle.dumps(refusal)).retry_after == header


def test_values_of_several_tasks_are_queued_together_or_not_at_all():
    turns: list = []
    scheduler = recording(turns, batch=4, queue=2, total=9)
    accepted = submit(scheduler, "b", [1, 2])
    with pytest.raises(HttpError, match="queue of task 'b' is full"):
        scheduler.submit({"a": [3], "b": [4]})
    assert scheduler.waiting == 2
    scheduler.start()
    results(accepted)
    assert turns == [("b", [1, 2])]


def test_a_failing_batch_does_not_affect_others():
    def run_or_fail(key, items):
        if key == "bad":
            raise ValueError("no")
        return items

    scheduler = Scheduler(run_or_fail, batch=4, wait=0.0, queue=9, total=9)
    scheduler.start()
    (bad,), (good,) = submit(scheduler, "bad", [1]), submit(scheduler, "good", [2])
    with pytest.raises(ValueError, match="no"):
        bad.result(60)
    assert good.result(60) == 2


def test_draining_starts_waiting_batches():
    scheduler = Scheduler(lambda task, items: items, batch=4, wait=600.0, queue=9, total=9)
    scheduler.start()
    futures = submit(scheduler, "a", [1, 2, 3])
    assert not futures[0].done()
    scheduler.drain()
    assert results(futures) == [1, 2, 3]
    assert results(submit(scheduler, "a", [4])) == [4]


def test_cancelled_items_do_not_run():
    turns: list = []
    scheduler = recording(turns, batch=4, queue=9, total=9)
    for future in submit(scheduler, "a", [1, 2]):
        assert future.cancel()
    kept = submit(scheduler, "b", [3])
    scheduler.start()
    results(kept)
    assert turns == [("b", [3])]


def test_the_scheduler_keeps_no_reference_to_finished_tasks():
    class Task:
        pass

    scheduler, task = Scheduler(lambda task, items: items, batch=4, wait=0.0, queue=9, total=9), Task()
    scheduler.start()
    results(submit(scheduler, task, [1]))
    held = weakref.ref(task)
    del task
    until(lambda: held() is None, "the scheduler holds a task that has run")


def best_class(library: Library, name: str, data: bytes) -> str:
    """Return the name of a task's most likely class."""
    entry = library.find(name)
    with torch.no_grad():
        scores = library.net(evaluation_tensor(data, entry.preprocessing)[None], task=entry.task_id)[0]
    return entry.classes[int(scores.argmax())]


def test_the_library_follows_its_folder(tmp_path):
    store, net = new_store(tmp_path)
    served = Library(store, Network(net.backbone))
    assert not served.scan()
    assert list(served.tasks) == ["birds", "cars", "original"]
    assert best_class(served, "birds", picture()) == offline(net, "birds", picture())[0]["class"]
    old = served.find("birds")
    task_id = old.task_id
    add(store, net, "birds", seed=9, size=24)
    add(store, net, "new", seed=3)
    store.path("cars").unlink()
    assert served.scan()
    assert list(served.tasks) == ["birds", "new", "original"]
    assert task_id in served.net.tasks  # a request still uses it
    assert best_class(served, "birds", picture()) == offline(net, "birds", picture())[0]["class"]
    del old
    served.scan()
    assert task_id not in served.net.tasks


def test_the_version_is_that_of_the_bytes_that_were_loaded(tmp_path, monkeypatch):
    store, net = new_store(tmp_path, ("birds",))
    loaded, register = store.path("birds").read_bytes(), Network._register

    def replace_the_file(self, task):
        store.path("birds").write_bytes(b"written while the task was being loaded")
        return register(self, task)

    monkeypatch.setattr(Network, "_register", replace_the_file)
    served = Library(store, Network(net.backbone))
    assert served.tasks["birds"].info["version"] == xxhash.xxh3_64_hexdigest(loaded)


def test_a_broken_file_is_reported_and_the_old_version_stays(tmp_path):
    store, net = new_store(tmp_path)
    served = Library(store, Network(net.backbone))
    whole = store.path("birds").read_bytes()
    before = served.tasks["birds"]
    store.path("birds").write_bytes(whole[:-7])
    store.path("junk").write_bytes(b"no task")
    assert served.scan()
    assert served.tasks["birds"] is before
    assert set(served.errors) == {"birds", "junk"}
    assert str(tmp_path) not in "".join(served.errors.values())
    with pytest.raises(UnknownTaskError, match="its file is broken"):
        served.find("junk")
    store.path("birds").write_bytes(whole)
    store.path("junk").unlink()
    served.scan()
    assert not served.errors
    assert best_class(served, "birds", picture()) == offline(net, "birds", picture())[0]["class"]


def test_an_unreadable_folder_removes_no_task(tmp_path):
    store, net = new_store(tmp_path)
    served = Library(store, Network(net.backbone))
    store.folder.rename(tmp_path / "elsewhere")
    assert not served.scan()
    assert "cannot read the store" in served.errors[""]
    assert best_class(served, "cars", picture()) == offline(net, "cars", picture())[0]["class"]
    (tmp_path / "elsewhere").rename(store.folder)
    assert served.scan()
    assert not served.errors


def test_tasks_are_loaded_after_those_they_build_on(tmp_path):
    store, net = new_store(tmp_path, names=())
    for name in ("z", "a"):  # a builds on z
        net.add_task(name, classes=3, method="packnet", preprocessing=PREPROCESSING).prune(0.5)
    for name in ("z", "a"):
        net.tasks[name].freeze()
        net.eval().save_task(name, store.path(name))
    served = Library(store, Network(net.backbone))
    assert not served.errors
    assert best_class(served, "a", picture()) == offline(net, "a", picture())[0]["class"]
    store.path("z").unlink()
    served.scan()
    assert list(served.tasks) == ["a", "original"]
    assert best_class(served, "a", picture()) == offline(net, "a", picture())[0]["class"]


def test_files_that_cannot_be_served_have_an_error(tmp_path):
    store, net = new_store(tmp_path, names=())
    net.add_task("features", head=None)
    net.save_task("features", store.path("features"))
    net.add_task("odd", classes=2, preprocessing={"colour": "blue"})
    net.save_task("odd", store.path("odd"))
    (store.folder / "not a name.safetensors").write_bytes(b"")
    served = Library(store, Network(net.backbone))
    assert list(served.tasks) == ["original"]
    assert "has no classifier" in served.errors["features"]
    assert "does not know" in served.errors["odd"]
    assert "cannot be a task's name" in served.errors["not a name"]
    assert not served.net.tasks
    with pytest.raises(UnsafeNameError):
        served.find("../store")
    with pytest.raises(TaskError):
        served.find("")


def test_loaded_matrices_are_aligned_as_torch_aligns_its_own(tmp_path):
    """Otherwise a task's answers would differ in the last bit between processes."""
    store, net = new_store(tmp_path)
    for _ in range(8):
        loaded = Network(net.backbone).load_task(store.path("birds"))
        assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded.owned.values() if tensor.dim() > 1)


@pytest.mark.parametrize(
    ("data", "status", "sentence"),
    [
        (b"hello", 415, "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 415, "not an image"),
        (bomb(5_000, 5_000), 413, "5000 x 5000 pixels"),
        (bomb(60_000, 60_000), 413, "pixels: make it smaller"),
        (picture()[:700], 422, "cannot be decoded"),
        (picture(kind="JPEG")[:700], 422, "cannot be decoded"),
        (picture()[:20], 422, "header cannot be read"),
    ],
)
def test_bad_images_get_a_status_and_a_message(data, status, sentence):
    with pytest.raises(HttpError, match=sentence) as refused:
        decode(data, WANTED, 10_000_000, "the image")
    assert refused.value.status == status


def test_a_bomb_is_never_decoded(monkeypatch):
    def decoded(*args):
        raise AssertionError("decoded")

    monkeypatch.setattr("bitgraft.serving.predictions.evaluation_tensor", decoded)
    with pytest.raises(HttpError, match="pixels"):
        decode(bomb(20_000, 20_000), WANTED, 32_000_000, "the image")


@pytest.mark.parametrize("kind", FORMATS)
def test_images_of_every_format_are_preprocessed_as_in_evaluation(kind):
    data = picture(kind=kind)
    other = Preprocessing.from_dict({**PREPROCESSING, "size": [24, 24]})
    first, second, third = decode(data, [*WANTED, other, *WANTED], 10**6, "the image")
    assert torch.equal(first, evaluation_tensor(Image.open(io.BytesIO(data)), WANTED[0]))
    assert second.shape == (3, 24, 24)
    assert third is first


def sent(**headers: str) -> Headers:
    return Headers({name.replace("_", "-"): value for name, value in headers.items()})


def test_keys_are_accepted_in_three_headers_and_must_match_exactly(tmp_path):
    (tmp_path / "keys").write_text("# ours\nfirst-key-1\n\nsecond-key-2\n")
    keys = read_keys(tmp_path / "keys")
    assert is_authorized(sent(x_api_key="second-key-2"), keys)
    assert is_authorized(sent(authorization="Bearer first-key-1"), keys)
    assert is_authorized(sent(authorization="Basic YW55Om5vOmZpcnN0LWtleS0x"), keys) is False  # "any:no:first-key-1"
    assert is_authorized(sent(authorization="Basic YW55OmZpcnN0LWtleS0x"), keys)  # "any:first-key-1"
    for wrong in ("", "first-key", "first-key-11", "# ours", "\xff"):
        assert not is_authorized(sent(x_api_key=wrong, authorization="Basic %%%"), keys)
    assert not is_authorized(sent(authorization="Basic \xe9"), keys)
    assert not is_authorized(sent(), keys)
    assert not any(b"first" in key for key in keys)


@pytest.mark.parametrize("text", ["", "short\n", "# nothing\n"])
def test_a_file_without_a_key_is_refused(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ServingError, match="at least 8"):
        read_keys(tmp_path / "keys")


def test_sizes():
    sizes = {"12": 12, "2GB": 2 * 10**9, "1.5 mb": 1_500_000, "1GiB": 2**30, "3k": 3000}
    assert {text: Settings(store=".", memory_budget=text).memory_budget for text in sizes} == sizes
    for text in ("", "GB", "-1GB", "two"):
        with pytest.raises(ServingError, match="give a size such as 2GB"):
            Settings(store=".", memory_budget=text)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("port", 65536, "it should be less than or equal to 65535"),
        ("workers", 0, "it should be greater than or equal to 1"),
        ("memory_budget", -1, "give a size such as 2GB, 500MB or 1GiB"),
        ("poll", float("nan"), "it should be greater than or equal to 0.05"),
    ],
)
def test_settings_out_of_bounds_are_named(name, value, expected):
    with pytest.raises(ServingError) as refused:
        Settings(store=".", **{name: value})
    assert str(refused.value) == f"{name} {value}: {expected}"


@pytest.mark.parametrize(
    ("given", "turns", "per_turn"),
    [
        ({"threads": 8}, 4, 2),
        ({"threads": 2}, 2, 1),
        ({"threads": 8, "turns": 1}, 1, 8),
        ({"threads": 2, "turns": 4}, 4, 1),
    ],
)
def test_turns_divide_the_threads(tmp_path, given, turns, per_turn):
    made = Settings(store=tmp_path, **given)
    assert (made.turns_per_worker, made.threads_per_turn) == (turns, per_turn)


def test_accepted_connections_have_nagles_algorithm_off(tmp_path):
    """It would hold back a response's body until the client acknowledges the headers, 40 ms later."""
    with listen(Settings(store=tmp_path, port=0)) as listener:
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
