"""The service survives killed workers, files replaced under traffic, slow clients and floods of bad requests."""

import json
import os
import random
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from services import Served, add, bomb, near, new_store, offline, picture, served, until

from bitgraft.errors import ServingError
from bitgraft.serving.settings import Settings
from bitgraft.serving.supervisor import check_device, listen


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    store, net = new_store(folder, ("birds", "cars"))
    return folder, store, net


@pytest.fixture(scope="module")
def service(place):
    """On onnxruntime; the Ctrl-C test below runs exact answers on PyTorch."""
    pinned = ("--engine", "onnxruntime", "--pin", "birds", "--pin", "cars")
    with served(place[0], "--workers", "2", "--patience", "1", "--poll", "0.1", *pinned) as running:
        yield running


def answers_with_retries(service: Served, name: str, data: bytes) -> list:
    """Retry when the connection breaks, as a client would."""
    for _ in range(50):
        try:
            return service.answers(name, data)
        except httpx.TransportError:
            continue
    raise AssertionError("no answer after 50 tries")


def test_a_killed_worker_is_replaced_while_the_other_answers(service: Served, place):
    _, _, net = place
    wanted = {(name, seed): offline(net, name, picture(seed)) for name in ("birds", "cars") for seed in range(3)}
    before = service.workers()
    assert len(before) == 2
    ended = threading.Event()

    def ask(number: int) -> int:
        asked = 0
        while not ended.is_set():
            for (name, seed), want in wanted.items():
                assert near(answers_with_retries(service, name, picture(seed)), want)
                asked += 1
        return asked

    with ThreadPoolExecutor(3) as clients:
        asking = [clients.submit(ask, number) for number in range(3)]
        try:
            for worker in before:
                os.kill(worker, signal.SIGKILL)
                until(lambda: len(service.workers()) == 2, "the worker was not replaced")
            until(lambda: not set(service.workers()) & set(before), "the old workers are still there")
        finally:
            ended.set()
        assert all(one.result(60) > 0 for one in asking)
    assert service.said.count("starting another") == 2


def test_a_file_replaced_under_traffic_gives_old_or_new_answers_and_no_mixture(service: Served, place):
    _, store, net = place
    versions = [offline(net, "birds", picture())]
    said: list = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            said.append(service.answers("birds", picture()))

    with ThreadPoolExecutor(2) as clients:
        asking = [clients.submit(ask) for _ in range(2)]
        try:
            for seed, classes in [(11, 3), (12, 6), (13, 4)]:
                add(store, net, "birds", seed=seed, classes=classes)
                versions.append(new := offline(net, "birds", picture()))
                until(lambda new=new: any(near(one, new) for one in said[-2:]), "the new file was not loaded")
        finally:
            ended.set()
        for one in asking:
            one.result(60)
    assert len({str(version) for version in versions}) == 4
    assert all(any(near(answer, version) for version in versions) for answer in said)
    new = versions[-1]
    until(lambda: all(near(service.answers("birds", picture()), new) for _ in range(8)), "a worker has the old file")


def test_slow_clients_are_disconnected_and_block_nobody(service: Served, place):
    _, _, net = place
    head = b"POST /v1/predict/cars HTTP/1.1\r\nHost: x\r\n"
    parts = [b"", b"POST /v1", head, head + b"Content-Length: 100\r\n\r\n" + b"x" * 10]
    lines = [socket.create_connection(("127.0.0.1", service.port), 60) for _ in range(60)]
    try:
        for number, line in enumerate(lines):
            line.sendall(parts[number % 4])
        assert near(service.answers("cars", picture()), offline(net, "cars", picture()))
        for number, line in enumerate(lines):
            reply = line.recv(4096)  # until the server closes the connection
            assert reply == b"" if number % 4 < 3 else b" 408 " in reply
    finally:
        for line in lines:
            line.close()


def test_a_flood_of_bad_requests_does_not_affect_good_ones(service: Served, place):
    _, _, net = place
    rng = random.Random(0)
    whole = picture(1, kind="JPEG")
    nonsense = [
        b"hello",
        b"\x89PNG\r\n\x1a\n" + rng.randbytes(200),
        whole[: len(whole) // 2],
        bomb(30_000, 30_000),
        rng.randbytes(50_000),
        b"",
    ]
    broken = [whole[:at] + rng.randbytes(40) + whole[at + 40 :] for at in range(0, len(whole) - 40, 400)]
    paths = ["cars", "..%2F..%2Fstore", "%00", "x" * 2000, "birds?top=-1"]

    def bad(number: int) -> int:
        data = (nonsense + broken)[number % (len(nonsense) + len(broken))]
        try:
            return service.http.post(f"/v1/predict/{paths[number % len(paths)]}", content=data).status_code
        except httpx.TransportError:  # an idle connection that was closed just then
            return bad(number)

    def good(number: int) -> bool:
        data = picture(number % 5)
        return near(answers_with_retries(service, "cars", data), offline(net, "cars", data))

    with ThreadPoolExecutor(8) as clients:
        flood = [clients.submit(bad, number) for number in range(300)]
        fine = [clients.submit(good, number) for number in range(30)]
        assert {one.result(120) for one in flood} <= {200, 400, 404, 413, 415, 422, 429, 503}
        assert all(one.result(120) for one in fine)
    assert service.http.get("/healthz").status_code == 200
    assert "Traceback" not in service.said


def test_ctrl_c_finishes_accepted_requests_without_a_traceback(place):
    """A terminal sends SIGINT to every process, and the supervisor SIGTERM to its workers, in any order."""
    folder, _, net = place
    data, wanted = picture(), offline(net, "cars", picture())
    head = f"POST /v1/predict/cars HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with served(folder) as service, socket.create_connection(("127.0.0.1", service.port), 60) as line:
        line.sendall(head + data[:9])
        (worker,) = service.workers()
        # an answer means that the earlier connection was accepted
        until(lambda: "readyz" in service.http.get("/metrics").text, "it does not answer")
        os.kill(service.pid, signal.SIGTERM)
        until(lambda: "Waiting for connections" in service.said, "it does not wait")
        os.kill(worker, signal.SIGINT)
        line.sendall(data[9:])
        reply = b"".join(iter(lambda: line.recv(4096), b""))
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["answers"] == [wanted]
        until(service.ended, "it did not end")
        assert (service.code, "Traceback" in service.said) == (0, False)


def test_bad_options_are_one_line_errors(tmp_path, capsys, monkeypatch):
    from images import bitgraft

    code, _, err = bitgraft(capsys, monkeypatch, "serve", "--store", str(tmp_path / "none"))
    assert (code, err.count("\n"), "there is no store" in err) == (1, 1, True)
    code, _, err = bitgraft(capsys, monkeypatch, "serve", "--memory-budget", "much")
    assert (code, "--memory-budget much: give a size" in err) == (2, True)
    code, _, err = bitgraft(capsys, monkeypatch, "serve", "--device", "nonsense")
    assert (code, err.count("\n"), "--device nonsense does not work here: Expected" in err) == (2, 1, True)
    code, _, err = bitgraft(capsys, monkeypatch, "serve", "--api-key-file", str(tmp_path / "none"))
    assert (code, err.endswith("none: No such file or directory\n")) == (1, True)


def test_a_missing_device_and_a_taken_port_are_reported_before_workers_start(place):
    with pytest.raises(ServingError, match=r"^device nonsense does not work here: Expected one of cpu, cuda"):
        check_device("nonsense")
    check_device("meta")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServingError, match=rf"^cannot listen on 127.0.0.1 port {port}: Address already in use$"):
            listen(Settings(store=place[0], port=port))
