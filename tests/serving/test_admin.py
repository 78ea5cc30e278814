"""Changing tasks: put, remove, rollback and canaries, over HTTP and as single functions."""

import os
import shutil
import signal
import socket
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from services import Served, add, new_store, offline, picture, served, until

from bitgraft.network import Network
from bitgraft.serving.http_error import HttpError
from bitgraft.serving.library import Library
from bitgraft.serving.versions import LOCK, Versions

KEY = {"X-API-Key": "an-admin-secret"}


def listed(folder: Path) -> list[Path]:
    """Every file of a store except the lock, which the first change creates."""
    return sorted(path for path in folder.rglob("*") if path.name != LOCK)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A store with birds and cars, and two later versions of birds."""
    folder = tmp_path_factory.mktemp("admin")
    store, net = new_store(folder)
    (folder / "admin").write_text("an-admin-secret\n")
    files, answers = [store.path("birds").read_bytes()], [offline(net, "birds", picture())]
    for seed in (11, 12):
        add(store, net, "birds", seed=seed, classes=3)
        files.append(store.path("birds").read_bytes())
        answers.append(offline(net, "birds", picture()))
    store.path("birds").write_bytes(files[0])
    return folder, store, files, answers


@pytest.fixture(scope="module")
def service(place):
    with served(place[0], "--admin-key-file", "admin", "--max-task", "100kB", "--poll", "0.1") as running:
        yield running


def test_a_task_is_put_replaced_rolled_back_and_removed(service: Served, place):
    _, store, files, answers = place
    first = service.http.put("/v1/tasks/new", content=files[0], headers=KEY).json()
    assert (first["name"], first["classes"], first["previous"]) == ("new", 4, False)
    assert service.answers("new", picture()) == answers[0]
    second = service.http.put("/v1/tasks/new", content=files[1], headers=KEY).json()
    assert (second["previous"], second["version"] != first["version"]) == (True, True)
    assert service.predict("new", picture()).json()["version"] == second["version"]
    for turn in (0, 1):  # back and forth
        assert service.http.post("/v1/tasks/new/rollback", headers=KEY).status_code == 200
        assert service.answers("new", picture()) == answers[turn]
    gone = service.http.delete("/v1/tasks/new", headers=KEY).json()
    assert gone == {"name": "new", "version": None, "previous": True}
    assert service.predict("new", picture()).status_code == 404
    assert service.http.post("/v1/tasks/new/rollback", headers=KEY).json()["version"] == second["version"]
    assert service.http.delete("/v1/tasks/new", headers=KEY).status_code == 200
    assert [path.name for path in store.folder.glob(".*")] == [LOCK]


def test_a_canary_gets_its_share_until_it_is_promoted_or_ended(service: Served, place):
    _, _, files, answers = place
    service.http.put("/v1/tasks/shared", content=files[0], headers=KEY)
    told = service.http.put("/v1/tasks/shared", params={"canary": 0.5}, content=files[1], headers=KEY).json()
    assert told["canary"]["share"] == 0.5
    seen: list = []

    def both() -> bool:
        seen.append(service.answers("shared", picture()))
        return all(answer in seen for answer in answers[:2])

    until(both, "one of the versions never answers")
    assert all(answer in answers[:2] for answer in seen)
    numbers = service.http.get("/metrics").text
    for version, answer in (("stable", answers[0]), ("canary", answers[1])):
        line = f'bitgraft_task_requests_total{{status="200",task="shared",version="{version}"}} {seen.count(answer)}.0'
        assert line in numbers
    assert service.http.delete("/v1/tasks/shared/canary", headers=KEY).json().get("canary") is None
    assert [service.answers("shared", picture()) for _ in range(4)] == [answers[0]] * 4
    service.http.put("/v1/tasks/shared", params={"canary": 1}, content=files[2], headers=KEY)
    assert service.answers("shared", picture()) == answers[2]
    assert service.http.post("/v1/tasks/shared/promote", headers=KEY).json().get("canary") is None
    assert service.tasks()["shared"]["classes"] == 3
    assert service.http.post("/v1/tasks/shared/rollback", headers=KEY).json()["classes"] == 4
    assert service.http.post("/v1/tasks/shared/promote", headers=KEY).status_code == 404


def test_examples_have_the_fields_of_real_responses(service: Served, place):
    paths = service.http.get("/openapi.json").json()["paths"]

    def same(method, path, **request) -> None:
        said = paths[path.partition("?")[0]][method]["responses"]["200"]["content"]["application/json"]["example"]
        response = service.http.request(method, path.replace("{task}", "shown"), headers=KEY, **request)
        assert response.status_code == 200, response.text
        stated = {field for field, value in response.json().items() if value is not None}  # FastAPI drops null
        assert stated <= said.keys() <= response.json().keys(), (method, path)
        rows = {row.get("name"): row for row in response.json().get("tasks", ())}
        for shown in said.get("tasks", ()) if path == "/v1/tasks" else ():
            assert rows[shown["name"].replace("flowers", "shown")].keys() == shown.keys()

    at, files = "/v1/tasks/{task}", place[2]
    service.http.put("/v1/tasks/shown", content=files[0], headers=KEY)
    same("put", f"{at}?canary=0.5", content=files[1])
    same("delete", f"{at}/canary")
    service.http.put("/v1/tasks/shown?canary=1", content=files[1], headers=KEY)
    same("post", f"{at}/promote")
    same("post", f"{at}/rollback")
    same("get", at)
    same("get", "/v1/tasks")
    same("post", "/v1/predict/{task}", content=picture())
    same("post", "/v1/predict?task=shown", content=picture())
    same("delete", at)


@pytest.mark.parametrize(
    ("method", "path", "data", "status", "sentence"),
    [
        ("PUT", "/v1/tasks/bad", b"hello", 422, "the task file was rejected: bad.safetensors"),
        ("PUT", "/v1/tasks/bad", b"", 422, "the task file was rejected"),
        ("PUT", "/v1/tasks/bad", bytes(100_001), 413, "larger than 0.1 MB"),
        ("PUT", "/v1/tasks/..%2Fbad", b"", 405, "see /docs"),
        ("PUT", "/v1/tasks/.bad", b"x", 400, "cannot be a task's name"),
        ("PUT", "/v1/tasks/bad%00", b"x", 400, "cannot be a task's name"),
        ("PUT", "/v1/tasks/bad?canary=0", b"x", 422, "canary: "),
        ("PUT", "/v1/tasks/bad?canary=2", b"x", 422, "canary: "),
        ("DELETE", "/v1/tasks/bad", b"", 404, "there is no task 'bad'"),
        ("DELETE", "/v1/tasks/original", b"", 409, "backbone's own"),
        ("POST", "/v1/tasks/cars/rollback", b"", 404, "no previous version"),
        ("DELETE", "/v1/tasks/cars/canary", b"", 404, "no canary"),
    ],
)
def test_an_invalid_change_is_refused_and_changes_nothing(service: Served, place, method, path, data, status, sentence):
    before = listed(place[1].folder)
    response = service.http.request(method, path, content=data, headers=KEY)
    assert (response.status_code, sentence in response.json()["error"]) == (status, True), response.text
    assert listed(place[1].folder) == before


def test_a_canary_needs_a_task_and_a_truncated_file_is_rejected(service: Served, place):
    files = place[2]
    missing = service.http.put("/v1/tasks/none", params={"canary": 0.1}, content=files[0], headers=KEY)
    assert (missing.status_code, "put it without a canary" in missing.text) == (404, True)
    cut = service.http.put("/v1/tasks/cars", content=files[0][:-100], headers=KEY)
    assert (cut.status_code, str(place[0]) in cut.text) == (422, False)


def test_only_an_admin_key_may_change_tasks_and_it_is_off_by_default(service: Served, place):
    for headers in ({}, {"X-API-Key": "another-secret"}):
        refused = service.http.put("/v1/tasks/x", content=b"x", headers=headers)
        assert (refused.status_code, "admin key" in refused.text) == (401, True)
    assert service.http.delete("/v1/tasks/birds", auth=("me", "an-admin-secret")).status_code == 401
    assert service.http.get("/v1/tasks").status_code == 200
    folder = place[0]
    (folder / "keys").write_text("an-ordinary-secret\n")
    with served(folder, "--api-key-file", "keys") as closed:
        ordinary = {"X-API-Key": "an-ordinary-secret"}
        refused = closed.http.put("/v1/tasks/x", content=b"x", headers=ordinary)
        assert (refused.status_code, "start the service with --admin-key-file" in refused.text) == (403, True)


def test_concurrent_puts_leave_one_version_and_no_temporary_files(service: Served, place):
    _, store, files, answers = place
    with ThreadPoolExecutor(6) as clients:
        asked = [
            clients.submit(service.http.put, "/v1/tasks/raced", content=files[i % 3], headers=KEY) for i in range(9)
        ]
        assert {one.result(120).status_code for one in asked} == {200}
    assert service.answers("raced", picture()) in answers
    assert store.path("raced").read_bytes() in files
    assert Versions(store).previous("raced").read_bytes() in files
    assert [path.name for path in store.folder.glob(".*")] == [LOCK]


def test_a_worker_killed_during_an_upload_leaves_the_store_unchanged(service: Served, place):
    _, store, files, _ = place
    before = store.path("cars").read_bytes()
    lines = ["PUT /v1/tasks/cars HTTP/1.1", "Host: x", f"X-API-Key: {KEY['X-API-Key']}", "Content-Length: 9999", "", ""]
    with socket.create_connection(("127.0.0.1", service.port), 60) as line:
        line.sendall("\r\n".join(lines).encode() + files[0][:1000])
        until(lambda: len(list(store.folder.glob(".*.part"))) == 1, "the upload did not start")
        (worker,) = service.workers()
        os.kill(worker, signal.SIGKILL)
        until(lambda: service.workers() not in ([], [worker]), "the worker was not replaced")
    until(service._ready, "the service does not answer again")
    assert store.path("cars").read_bytes() == before
    assert "cars" in service.tasks()
    for part in store.folder.glob(".*.part"):
        part.unlink()  # a later write deletes it after an hour


STEPS = ("put", "put again", "canary", "promote", "rollback", "remove")


def act(versions: Versions, step: str, files: list[bytes], part) -> None:
    kind = step.split()[0]
    if kind in ("put", "canary"):
        part.write_bytes(files[STEPS.index(step) % 3])
        versions.put("new", part) if kind == "put" else versions.put_canary("new", part, 0.1)
    else:
        getattr(versions, kind)("new")


def killed_at(number: int, work) -> bool:
    """Run `work` in a child that is killed before its change number `number`. Return whether that was reached."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child only renames files
        process = os.fork()
    if process == 0:
        left = number

        def dying(real):

            def call(*args, **options):
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **options)

            return call

        os.replace, os.unlink, shutil.copyfile = dying(os.replace), dying(os.unlink), dying(shutil.copyfile)
        work()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


@pytest.mark.parametrize("last", range(len(STEPS)))
def test_a_kill_between_any_two_steps_leaves_complete_files_and_the_next_change_works(place, tmp_path, last):
    _, store, files, _ = place
    for number in range(10):
        folder = tmp_path / str(number)
        shutil.copytree(store.folder, folder, ignore=shutil.ignore_patterns("new*", ".*"))
        versions = Versions(type(store)(folder))
        for step in STEPS[:last]:
            act(versions, step, files, versions.part())
        there = (folder / "new.safetensors").exists()
        killed = killed_at(number, lambda versions=versions: act(versions, STEPS[last], files, versions.part()))
        for found in folder.rglob("new.safetensors"):
            assert found.read_bytes() in files
        if there and STEPS[last] != "remove":
            assert (folder / "new.safetensors").exists()
        act(versions, "put", files, versions.part())
        if not killed:
            return
    raise AssertionError("it never ran to its end")


@pytest.fixture
def library(tmp_path):
    store, net = new_store(tmp_path)
    made = Library(store, Network(net.backbone))
    return made, net


def test_a_checked_file_is_not_kept_in_memory(library, tmp_path):
    made, net = library
    before = set(made.net.tasks)
    made.check("birds", made.store.path("birds"))
    assert set(made.net.tasks) == before
    net.add_task("features", head=None)
    net.save_task("features", tmp_path / "file")
    with pytest.raises(HttpError, match="'features' has no classifier"):
        made.check("features", tmp_path / "file")
    assert set(made.net.tasks) == before


def test_a_rollback_to_a_broken_file_is_rejected_and_stale_temporary_files_are_deleted(library):
    made, _ = library
    versions, whole = Versions(made.store), made.store.path("birds").read_bytes()
    made.store.path("birds").write_bytes(whole[:100])
    part, left = versions.part(), versions.part()
    part.write_bytes(whole)
    left.write_bytes(b"left by a kill")
    os.utime(left, (1, 1))
    made.change("put", "birds", part)
    assert not left.exists()
    with pytest.raises(HttpError, match="the task file was rejected: birds"):
        made.change("rollback", "birds")
    assert made.store.path("birds").read_bytes() == whole


def test_a_canary_without_its_share_is_reported(library):
    made, _ = library
    folder = made.store.folder / "canary"
    folder.mkdir()
    shutil.copy(made.store.path("birds"), folder)
    made.scan()
    assert "share from birds.json" in made.errors["canary/birds"]
    assert not made.canaries
    (folder / "birds.json").write_text('{"share": 0.25}')
    os.utime(folder / "birds.safetensors", (1, 1))
    made.scan()
    assert not made.errors
    assert made.info(made.tasks["birds"])["canary"]["share"] == 0.25


def test_a_task_that_others_build_on_cannot_be_removed(tmp_path):
    store, net = new_store(tmp_path, names=())
    for name in ("z", "a"):  # a builds on z
        net.add_task(name, classes=3, method="packnet").prune(0.5)
    for name in ("z", "a"):
        net.tasks[name].freeze()
        net.eval().save_task(name, store.path(name))
    made = Library(store, Network(net.backbone))
    with pytest.raises(HttpError, match="'a' builds on it") as refused:
        made.change("remove", "z")
    assert refused.value.status == 409
    assert made.change("remove", "a")["previous"]


def test_changes_are_serialised(place):
    versions, order = Versions(place[1]), []

    def second() -> None:
        with versions._locked():
            order.append("second")

    with versions._locked():
        other = threading.Thread(target=second)
        other.start()
        order.append("first")
    other.join(60)
    assert order == ["first", "second"]
