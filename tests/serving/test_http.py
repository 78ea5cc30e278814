"""The service as an HTTP client sees it: answers, errors, keys, pages."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from services import Served, add, bomb, new_store, offline, picture, served, until

NAMES = ("birds", "cars", "dogs", "eggs")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving")
    store, net = new_store(folder, NAMES)
    return folder, store, net


@pytest.fixture(scope="module")
def service(place):
    options = ("--max-upload", "1MB", "--max-pixels", "1000000", "--max-queue", "16", "--poll", "0.1")
    with served(place[0], *options) as running:
        yield running


def test_an_image_as_the_body_or_in_a_form_gets_the_offline_answer(service: Served, place):
    _, _, net = place
    for name in (*NAMES, "original"):
        assert service.answers(name, picture(3)) == offline(net, name, picture(3))
    form = [("image", ("../../a.png", picture(seed), "image/png")) for seed in range(3)]
    said = service.http.post("/v1/predict/birds", files=form, params={"top": 2}).json()
    assert said["task"] == "birds"
    assert said["answers"] == [offline(net, "birds", picture(seed), 2) for seed in range(3)]


def test_several_tasks_answer_one_image(service: Served, place):
    _, _, net = place
    wanted = [("cars", offline(net, "cars", picture(5))), ("birds", offline(net, "birds", picture(5)))]
    query = service.http.post("/v1/predict", params={"task": ["cars", "birds", "cars"]}, content=picture(5)).json()
    form = {"image": ("a.png", picture(5), "image/png")}
    fields = service.http.post("/v1/predict", data={"task": ["cars", "birds"]}, files=form).json()
    for said in (query, fields):
        assert [(task["task"], task["answers"][0]) for task in said["tasks"]] == wanted
        assert said["milliseconds"] > 0


def test_answers_under_mixed_traffic_equal_the_offline_ones_to_the_last_bit(service: Served, place):
    _, _, net = place
    asked = [(NAMES[number % 4], picture(number % 7)) for number in range(48)]
    with ThreadPoolExecutor(8) as clients:
        said = list(clients.map(lambda one: service.answers(*one), asked))
    assert said == [offline(net, name, data) for name, data in asked]


def test_tasks_are_listed(service: Served):
    service.answers("birds", picture())
    row = service.tasks()["birds"]
    assert (row["method"], row["classes"], row["resident"]) == ("full", 4, True)
    assert row["bytes"] > 0
    assert row["bits_per_weight"] > 0
    task = service.http.get("/v1/tasks/birds").json()
    assert task["class_names"] == [f"birds 0.{i}" for i in range(4)]
    assert [layer["name"] for layer in task["layers"]] == ["0.weight", "3.weight"]
    assert all(0 < layer["density"] < 1 and len(layer["k"]) == 4 for layer in task["layers"])
    missing = service.http.get("/v1/tasks/..%2Fstore.json")
    assert missing.status_code == 404


def test_pages_load_nothing_from_other_hosts(service: Served):
    for path in ("/", "/docs"):
        page = service.http.get(path)
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "").replace("http://HOST", "")
        assert "https://" not in page.text
        assert "src=" not in page.text
    api = service.http.get("/openapi.json").json()
    assert {"/v1/predict", "/v1/predict/{task}", "/v1/tasks", "/healthz", "/metrics"} <= set(api["paths"])


def test_health_and_metrics(service: Served):
    service.answers("cars", picture())
    assert service.http.get("/healthz").json() == {"status": "ok"}
    assert service.http.get("/readyz").status_code == 200
    service.http.get("/v1/made-up-by-a-client-1")
    numbers = service.http.get("/metrics").text
    assert 'bitgraft_images_total{task="cars",version="stable"}' in numbers
    assert "bitgraft_request_seconds_bucket" in numbers
    assert "made-up" not in numbers


@pytest.mark.parametrize(
    ("path", "data", "status", "sentence"),
    [
        (
            "/v1/predict/zebras",
            picture(),
            404,
            "there is no task 'zebras'; known tasks are birds, cars, dogs, eggs, original",
        ),
        ("/v1/predict/..%2F..%2Fetc%2Fpasswd", picture(), 400, "cannot be a task's name"),
        ("/v1/predict/%2Fetc%2Fpasswd", picture(), 400, "cannot be a task's name"),
        ("/v1/predict/birds.safetensors", picture(), 404, "there is no task"),
        ("/v1/predict/birds%00", picture(), 400, "cannot be a task's name"),
        ("/v1/predict/birds?top=0", picture(), 422, "top: "),
        ("/v1/predict/birds?top=many", picture(), 422, "top: "),
        ("/v1/predict", picture(), 422, "no task given"),
        ("/v1/predict?task=birds&task=zebras", picture(), 404, "there is no task 'zebras'"),
        ("/v1/predict/birds", b"", 400, "there is no image"),
        ("/v1/predict/birds", b"<svg/>", 415, "not an image"),
        ("/v1/predict/birds", picture()[:900], 422, "cannot be decoded"),
        ("/v1/predict/birds", bomb(3000, 3000), 413, "3000 x 3000 pixels"),
        ("/v1/predict/birds", bytes(1_000_001), 413, "larger than 1 MB"),
        ("/v1/nothing", picture(), 404, "see /docs"),
    ],
)
def test_bad_requests_get_a_status_and_a_message(service: Served, path, data, status, sentence):
    response = service.http.post(path, content=data)
    assert (response.status_code, sentence in response.json()["error"]) == (status, True), response.text


def test_bad_forms_get_a_message(service: Served):
    def send(body: bytes, kind: str) -> httpx.Response:
        return service.http.post("/v1/predict/birds", content=body, headers={"Content-Type": kind})

    for body, kind, sentence in [
        (b"x", "multipart/form-data", "cannot be read"),
        (b"x", "multipart/form-data; boundary=b", "cannot be read"),
        (
            b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n--b--\r\n',
            "multipart/form-data; boundary=b",
            "",
        ),
        (b"a=b", "application/x-www-form-urlencoded", "send the image as the body"),
    ]:
        response = send(body, kind)
        assert response.status_code in (400, 415)
        assert sentence in response.json()["error"]
    many = [("image", ("a.png", picture(), "image/png"))] * 17
    assert service.http.post("/v1/predict/birds", files=many).status_code == 400
    one_bad = [("image", ("a.png", data, "image/png")) for data in (picture(), b"hello")]
    refused = service.http.post("/v1/predict/birds", files=one_bad)
    assert (refused.status_code, "image 2" in refused.text) == (415, True)


def test_a_client_that_is_still_sending_can_read_the_error(service: Served):
    """The headers are already wrong, but closing the connection at once would discard the response."""
    for kind, sentence in [
        ("multipart/form-data", b"cannot be read"),
        ("application/x-www-form-urlencoded", b"--data"),
    ]:
        head = f"POST /v1/predict/birds HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: 300\r\n\r\n"
        with socket.create_connection(("127.0.0.1", service.port), 60) as line:
            line.sendall(head.encode())
            for _ in range(3):
                time.sleep(0.1)
                line.sendall(bytes(100))
            said = b"".join(iter(lambda: line.recv(1000), b""))
        assert sentence in said


def test_a_large_upload_is_cut_off_while_it_is_read(service: Served):
    """100 MB without Content-Length: the limit is 1 MB, so most of it is never read."""
    head = b"POST /v1/predict/birds HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"100000\r\n" + bytes(2**20) + b"\r\n"
    sent = 0
    with socket.create_connection(("127.0.0.1", service.port), 60) as line:
        line.sendall(head)
        try:
            for _ in range(100):
                line.sendall(piece)
                sent += len(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert sent < 50 * 2**20

    def refused() -> bool:
        """A client that keeps sending may find the connection closed before it can read the response."""
        try:
            return service.predict("birds", bytes(100_000_000)).status_code == 413
        except httpx.TransportError:
            return False

    until(refused, "the client never got the 413")
    assert service.answers("birds", picture())


def test_a_key_protects_everything_but_health(place, tmp_path):
    folder, _, net = place
    (tmp_path / "keys").write_text("a-long-secret\n")
    with served(folder, "--api-key-file", str(tmp_path / "keys")) as service:
        for path in ("/", "/docs", "/openapi.json", "/metrics", "/v1/tasks", "/nothing"):
            assert service.http.get(path).status_code == 401
        refused = service.predict("birds", picture())
        assert "API key" in refused.json()["error"]
        assert refused.headers["www-authenticate"].startswith("Basic")
        assert service.http.get("/healthz").status_code == 200
        wrong = httpx.post(f"{service.http.base_url}/v1/predict/birds", headers={"X-API-Key": "a-long-secreT"})
        assert wrong.status_code == 401
        service.http.headers["X-API-Key"] = "a-long-secret"
        assert service.answers("birds", picture()) == offline(net, "birds", picture())
        del service.http.headers["X-API-Key"]
        assert service.http.get("/", auth=("anyone", "a-long-secret")).status_code == 200
        assert "a-long-secret" not in service.said


def test_full_queues_send_retry_after_and_sigterm_finishes_accepted_requests(place):
    """Batches wait for ten minutes here, so queues stay full as long as the test needs."""
    folder, _, net = place
    options = ("--max-queue", "1", "--max-wait-ms", "600000", "--grace", "60")
    with served(folder, *options) as service, ThreadPoolExecutor(4) as clients:
        waiting = [clients.submit(service.answers, name, picture()) for name in NAMES]
        until(lambda: "bitgraft_waiting_images 4.0" in service.http.get("/metrics").text, "they were not queued")
        crowded, full = service.predict("birds", picture()), service.predict("original", picture())
        assert [crowded.status_code, full.status_code] == [503, 503]
        assert int(full.headers["retry-after"]) >= 1
        assert service.end() == 0
        assert [one.result(60) for one in waiting] == [offline(net, name, picture()) for name in NAMES]


def test_a_full_queue_leaves_room_for_other_tasks(place):
    folder, _, net = place
    options = ("--max-queue", "1", "--max-batch", "2", "--max-wait-ms", "600000", "--grace", "60")
    with served(folder, *options) as service, ThreadPoolExecutor(2) as clients:
        first = clients.submit(service.answers, "birds", picture())
        until(lambda: "bitgraft_waiting_images 1.0" in service.http.get("/metrics").text, "it was not queued")
        crowded = service.predict("birds", picture())
        assert crowded.status_code == 429
        assert crowded.json()["error"] == "the queue of task 'birds' is full (1 waiting, at most 1): try again later"
        assert int(crowded.headers["retry-after"]) >= 1
        second = clients.submit(service.answers, "cars", picture())
        until(lambda: "bitgraft_waiting_images 2.0" in service.http.get("/metrics").text, "it was not queued")
        assert service.end() == 0
        assert [first.result(60), second.result(60)] == [offline(net, n, picture()) for n in ("birds", "cars")]


def test_files_are_loaded_and_removed_while_it_runs(service: Served, place):
    _, store, net = place
    add(store, net, "fish", seed=7)
    until(lambda: "fish" in service.tasks(), "the new task was not loaded")
    assert service.answers("fish", picture()) == offline(net, "fish", picture())
    whole = store.path("fish").read_bytes()
    store.path("fish").write_bytes(whole[: len(whole) // 2])
    until(lambda: "error" in service.tasks()["fish"], "the broken file was not reported")
    assert service.answers("fish", picture()) == offline(net, "fish", picture())
    until(lambda: "bitgraft_broken_files 1.0" in service.http.get("/metrics").text, "it was not counted")
    store.path("fish").unlink()
    until(lambda: "fish" not in service.tasks(), "the task was not removed")
    assert service.predict("fish", picture()).status_code == 404
