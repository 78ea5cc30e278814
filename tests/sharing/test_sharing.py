"""Push and pull: files are checked first, and a failure leaves the store unchanged."""

import hashlib
import json
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.file_download
import pytest
import yaml
from fake_hub import COMMIT, TOKEN, FakeHub, serving
from images import bitgraft
from tiny import batch, learn

from bitgraft import Network
from bitgraft.errors import (
    ArchiveError,
    CorruptError,
    MissingTaskError,
    SharingError,
    StoreError,
    UnsafeNameError,
    WrongBackboneError,
)
from bitgraft.format.archive import read_archive, to_bytes
from bitgraft.sharing import web
from bitgraft.sharing.pulling import fetch, install
from bitgraft.sharing.pushing import model_card, push
from bitgraft.store import Backbone, Store

pytestmark = pytest.mark.filterwarnings(r"ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own upload

SOURCE = """
import sys
sys.path.insert(0, {tests!r})
from tiny import tiny
def build(): return tiny()
def other(): return tiny(seed=1)
"""
CLASSES = ["rose | red", "<b>tulip</b>", "向日葵"]


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A folder with a store of one task, another empty one of the same backbone, and one of another backbone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop_net.py").write_text(SOURCE.format(tests=str(Path(__file__).parents[1])))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop_net", raising=False)
    for folder, build in (("ours", "build"), ("theirs", "build"), ("wrong", "other")):
        backbone = Backbone(f"shop_net:{build}")
        net = Network(backbone.build())
        store = Store.create(folder, backbone, net)
        if folder == "ours":
            task = net.add_task("flowers", classes=CLASSES)
            learn(net, "flowers", batch())
            task.freeze()
            task.metrics = {"test": {"accuracy": 0.875}}
            net.save_task("flowers", store.path("flowers"))
    return tmp_path


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True, raising=False)  # not faked
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(FakeHub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)  # what importing makes of HF_ENDPOINT
        for module in (huggingface_hub.constants, huggingface_hub.file_download):
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        yield hub


@pytest.fixture
def site(hub, shop):
    """A web server with the task's file at /flowers.safetensors."""
    data = Path("ours/flowers.safetensors").read_bytes()
    hub.pages["/flowers.safetensors"] = lambda handler: handler.answer(data)
    return hub


def contents(folder: str) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def refuse(
    error: type[Exception], said: str, source: str, task: str | None = None, into: str = "theirs", **options
) -> str:
    """Pulling raises this error and leaves the store unchanged."""
    before = contents(into)
    with pytest.raises(error, match=said) as caught:
        install(fetch(source, task, **options), Store(into))
    assert contents(into) == before
    assert TOKEN not in str(caught.value)
    return str(caught.value)


def test_there_and_back_through_the_hub(shop, hub):
    url = push(Store("ours"), "flowers", "me/flowers", licence="cc-by-4.0", private=True)
    assert url == f"{hub.address}/me/flowers/commit/{COMMIT}"
    assert set(hub.repos["me/flowers"]) == {"flowers.safetensors", "README.md"}
    assert hub.private["me/flowers"] in (True, "private")
    for source in ("hf:me/flowers", "me/flowers", f"hf:me/flowers@{COMMIT}"):
        fetched = fetch(source)
        assert install(fetched, Store("theirs"), overwrite=True) == "flowers"
    assert Path("theirs/flowers.safetensors").read_bytes() == Path("ours/flowers.safetensors").read_bytes()
    net = Store("theirs").network()
    assert Store("theirs").load(net, "flowers").classes == tuple(CLASSES)
    assert not [path for path in Path("theirs").iterdir() if path.name.startswith(".")]


def test_the_model_card_says_what_the_file_says(shop):
    store = Store("ours")
    text = model_card(store, "flowers", "me/flowers", "cc-by-4.0")
    front = yaml.safe_load(text.split("---")[1])
    assert front == {
        "license": "cc-by-4.0",
        "library_name": "bitgraft",
        "pipeline_tag": "image-classification",
        "tags": ["bitgraft"],
    }
    assert "license" not in model_card(store, "flowers", "me/flowers")
    for said in ("| method | full |", "| accuracy | 87.5 % of test images |", store.fingerprint, "| classes | 3 |"):
        assert said in text
    assert "0. rose \\| red" in text
    assert "<b>" not in text
    assert "bitgraft pull hf:me/flowers --task flowers --backbone shop_net:build" in text


def test_a_hub_that_sends_other_bytes(shop, hub, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # huggingface_hub tries again a few times
    push(Store("ours"), "flowers", "me/flowers")
    good = hub.repos["me/flowers"]["flowers.safetensors"]
    flipped = bytearray(good)
    flipped[-1] ^= 1
    hub.send = lambda data: data[:-7]
    refuse(SharingError, "to the Hub failed|changed in transit", "hf:me/flowers")
    hub.send = lambda data: bytes(flipped)
    refuse(SharingError, "changed in transit: .* the Hub states", "hf:me/flowers")
    hub.send = lambda data: data
    hub.repos["me/flowers"]["flowers.safetensors"] = bytes(flipped)  # changed on the Hub itself
    refuse(CorruptError, "checksum", "hf:me/flowers")
    hub.repos["me/flowers"]["flowers.safetensors"] = good
    refuse(SharingError, "more than 0: raise --max-size", "hf:me/flowers", limit=100)
    refuse(SharingError, "is not the expected file", "hf:me/flowers", sha256="0" * 64)


def test_which_file_of_a_repository(shop, hub):
    good = Path("ours/flowers.safetensors").read_bytes()
    odd = {"../up.safetensors": good, "sub/x.safetensors": good, ".hidden.safetensors": good, "weights.bin": b""}
    hub.repos["me/odd"] = dict(odd)
    refuse(SharingError, "me/odd has no task file", "hf:me/odd")
    hub.repos["me/odd"] |= {"a.safetensors": good, "b.safetensors": good}
    refuse(SharingError, "has the tasks a, b: choose one with --task NAME", "hf:me/odd")
    refuse(SharingError, "has the tasks a, b, but not c", "hf:me/odd", "c")
    refuse(UnsafeNameError, "cannot be a task's name", "hf:me/odd", "../up")
    assert install(fetch("hf:me/odd", "b"), Store("theirs"), "b") == "b"


@pytest.mark.parametrize("repo", ["me/../you", "me", "me/a/b", "/etc/passwd", "me/--x", "me/a b", "me/ä"])
def test_names_that_are_not_repositories(shop, repo):
    refuse(SharingError, "is not the name of a Hub repository", f"hf:{repo}")
    with pytest.raises(SharingError, match="is not the name of a Hub repository"):
        push(Store("ours"), "flowers", repo)


def test_the_hub_refuses(shop, hub):
    refuse(SharingError, "no repository me/nothing, or it is private", "hf:me/nothing")
    hub.read_only = True
    with pytest.raises(SharingError, match=r"refused the request for me/flowers \(403\): log in") as caught:
        push(Store("ours"), "flowers", "me/flowers")
    assert TOKEN not in str(caught.value)


def test_from_the_web(site):
    data = Path("ours/flowers.safetensors").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    fetched = fetch(f"{site.address}/flowers.safetensors?key=hush#sha256={digest.upper()}")
    assert fetched.sha256 == digest
    assert "hush" not in fetched.source
    assert install(fetched, Store("theirs"), "roses") == "roses"
    assert Path("theirs/roses.safetensors").read_bytes() == data
    said = refuse(
        SharingError, "is not the expected file", f"{site.address}/flowers.safetensors?k=hush#sha256={'0' * 64}"
    )
    assert "hush" not in said
    refuse(SharingError, "64 hexadecimal digits", f"{site.address}/flowers.safetensors#sha256=12")
    refuse(SharingError, "the server returned 404", f"{site.address}/nothing")


def test_a_web_server_that_misbehaves(site):
    data = Path("ours/flowers.safetensors").read_bytes()
    here = site.address

    def endless(handler):
        handler.send_response(200)
        handler.end_headers()
        handler.close_connection = True
        for _ in range(64):
            handler.wfile.write(bytes(1 << 16))

    site.pages |= {
        "/short": lambda handler: handler.answer(data[:-9], length=len(data)),
        "/cut": lambda handler: handler.answer(data[:-9]),
        "/changed": lambda handler: handler.answer(data[:-1] + bytes([data[-1] ^ 1])),
        "/page": lambda handler: handler.answer(b"<html>log in first</html>"),
        "/empty": lambda handler: handler.answer(b""),
        "/endless": endless,
        "/away": lambda handler: handler.answer(b"", 302, {"Location": "http://example.org/x"}),
        "/file": lambda handler: handler.answer(b"", 302, {"Location": "file:///etc/passwd?key=hush"}),
        "/round": lambda handler: handler.answer(b"", 302, {"Location": f"{here}/round"}),
        "/moved": lambda handler: handler.answer(b"", 302, {"Location": f"{here}/flowers.safetensors"}),
    }
    refuse(SharingError, r"was cut off after [\d,]+ of [\d,]+ bytes", f"{here}/short")
    for page in ("cut", "changed", "page", "empty"):
        refuse(CorruptError, f"127.0.0.1.*{page}", f"{here}/{page}")
    refuse(SharingError, "is larger than 1 MB: raise --max-size", f"{here}/endless", limit=1_000_000)
    refuse(SharingError, "is larger than 0 MB", f"{here}/flowers.safetensors", limit=10)
    refuse(SharingError, "http://example.org/x is not encrypted", f"{here}/away")
    assert "hush" not in refuse(SharingError, "returned 302 Found", f"{here}/file")
    refuse(SharingError, "returned 302", f"{here}/round")
    assert fetch(f"{here}/moved").archive.metadata.name == "flowers"
    with pytest.raises(SharingError, match="took too long"):
        web.download(f"{here}/flowers.safetensors", Path("out"), 1 << 30, deadline=-1.0)


def test_a_dead_address_is_named_in_words(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens here
        address = f"http://127.0.0.1:{free.getsockname()[1]}/x"
        with pytest.raises(SharingError, match=r"/x could not be fetched \(Connection refused\): check the address"):
            web.download(address, tmp_path / "out", 1 << 30)


def test_a_silent_server_is_left(site):
    release = threading.Event()
    site.pages["/silent"] = lambda handler: release.wait(20)
    try:
        with pytest.raises(SharingError, match=r"silent could not be fetched \(timed out\)"):
            web.download(f"{site.address}/silent", Path("out"), 1 << 30, timeout=0.05)
    finally:
        release.set()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://example.org/x.safetensors", "is not encrypted"),
        ("ftp://example.org/x.safetensors", "is not encrypted"),
        ("file:///etc/passwd", "is not encrypted"),
        ("http://localhost.example.org/x", "is not encrypted"),
        ("https://me:hush@[example.org/x", "is not an address on the web"),
        ("https://me:hush@example.org/x", "must not contain a password"),
        ("http://127.0.0.1@example.org/x", "must not contain a password"),
    ],
)
def test_addresses_that_are_refused(shop, address, said):
    assert "hush" not in refuse(SharingError, said, address)


def test_from_a_folder(shop):
    assert install(fetch("ours"), Store("theirs")) == "flowers"
    before = contents("theirs")
    with pytest.raises(StoreError, match="has a task 'flowers' already: pass --overwrite, or --as"):
        install(fetch("ours/flowers.safetensors"), Store("theirs"))
    assert contents("theirs") == before
    refuse(SharingError, "there is no file or folder nowhere; for a repository", "nowhere")
    Path("theirs/runs").mkdir(exist_ok=True)  # a folder, not a repository
    refuse(SharingError, "theirs/runs has no task file", "theirs/runs")
    refuse(SharingError, "raise --max-size", "ours", limit=10)
    with pytest.raises(UnsafeNameError):
        install(fetch("ours"), Store("theirs"), "../flowers")


def test_tasks_that_do_not_fit_the_store(shop):
    refuse(WrongBackboneError, "pull it into a store of its backbone", "ours", into="wrong")
    archive = read_archive("ours/flowers.safetensors")
    Path("box").mkdir()
    evil = Path("box/evil.safetensors")
    evil.write_bytes(to_bytes(replace(archive, metadata=replace(archive.metadata, name="../../up"))))
    refuse(ArchiveError, "cannot be a task's name", "box")
    leaning = replace(archive.metadata, method="packnet", options={}, depends_on={"flowers": "0" * 64})
    evil.write_bytes(to_bytes(replace(archive, metadata=leaning)))
    refuse(MissingTaskError, "builds on task 'flowers', which the store at theirs does not have", "box")
    before = contents("ours")
    with pytest.raises(MissingTaskError):  # same name, other content
        install(fetch("box"), Store("ours"), "new")
    assert contents("ours") == before


def test_every_truncation_is_refused(shop):
    data = Path("ours/flowers.safetensors").read_bytes()
    for length in {0, 1, 8, 9, len(data) // 3, len(data) // 2, len(data) - 1}:
        Path("cut.safetensors").write_bytes(data[:length])
        refuse(CorruptError, "cut.safetensors", "cut.safetensors")
    for place in range(0, len(data), max(1, len(data) // 40)):
        Path("cut.safetensors").write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        refuse(ArchiveError, "cut.safetensors|cannot be a task's name", "cut.safetensors")


def test_the_commands(shop, hub, monkeypatch, capsys):
    def run(*args: str) -> tuple[int, str, str]:
        return bitgraft(capsys, monkeypatch, *args)

    code, out, err = run("push", "me/flowers", "--task", "flowers", "--store", "ours", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["repository"] == "me/flowers"
    card = hub.repos["me/flowers"]["README.md"]
    assert run("push", "me/flowers", "--task", "flowers", "--store", "ours", "--no-card", "--license", "mit")[0] == 0
    assert hub.repos["me/flowers"]["README.md"] == card
    code, out, err = run("pull", "hf:me/flowers", "--store", "theirs", "--json")
    assert (code, err) == (0, "")
    digest = hashlib.sha256(Path("ours/flowers.safetensors").read_bytes()).hexdigest()
    assert json.loads(out)["sha256"] == digest
    assert run("pull", "hf:me/flowers", "--store", "theirs") == (
        1, "", "error: the store has a task 'flowers' already: pass --overwrite, or --as another name\n"
    )  # fmt: skip
    assert run("pull", "hf:me/flowers", "--store", "theirs", "--as", "more")[0] == 0
    assert run("pull", "ours", "--store", "new", "--backbone", "shop_net:build")[0] == 0
    assert [row["name"] for row in json.loads(run("tasks", "--store", "new", "--json")[1])["tasks"]] == ["flowers"]
    code, _, err = run("pull", "ours", "--store", "fresh", "--backbone", "shop_net:other")
    assert code == 1
    assert "no store was created" in err
    assert not Path("fresh").exists()
    code, _, err = run("pull", "ours", "--store", "fresh", "--backbone", "shop_net:build", "--as", "original")
    assert (code, "'original' is the backbone's own task" in err) == (1, True)
    assert not Path("fresh").exists()
    code, _, err = run("pull", "ours", "--store", "fresh")
    assert (code, "there is no store at fresh" in err) == (1, True)
    assert run("pull", "ours", "--store", "theirs", "--weights", "x.pt")[0] == 2
