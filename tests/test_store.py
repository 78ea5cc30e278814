"""A store: atomic files, one backbone, concurrent commands."""

import json
import threading
from pathlib import Path

import pytest
import torch

from bitgraft.errors import StoreError, UnknownTaskError
from bitgraft.network import Network
from bitgraft.store import Backbone, Size, Store

BACKBONE = Backbone("wrn-10-1", pretrained=False)


@pytest.fixture(scope="module")
def net():
    return Network(BACKBONE.build())


def test_a_store_is_made_once_and_opened_again(tmp_path, net):
    made = Store.create(tmp_path / "a" / "store", BACKBONE, net)
    again = Store.create(made.folder, BACKBONE, net)
    assert again.backbone == BACKBONE
    assert again.fingerprint == net.fingerprint
    assert again.size == Size.of(net)
    assert [path.name for path in made.folder.iterdir()] == ["store.json"]


def test_random_weights_are_the_same_each_time_and_randomness_is_left_alone(tmp_path, net):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    store = Store.create(tmp_path, BACKBONE, net)
    assert store.network().fingerprint == net.fingerprint
    assert torch.rand(1) == expected


def test_weights_in_a_file_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Backbone("resnet18", "w.pth").weights == str(tmp_path / "w.pth")
    assert Backbone("resnet18", "package:some").weights == "package:some"


def test_another_backbone_is_refused(tmp_path, net):
    Store.create(tmp_path, BACKBONE, net)
    other = Backbone("wrn-10-2", pretrained=False)
    with pytest.raises(StoreError, match=r"has the backbone wrn-10-1 .* not wrn-10-2 .*choose another with --store"):
        Store.create(tmp_path, other, Network(other.build()))
    assert Store(tmp_path).backbone == BACKBONE


def test_changed_weights_are_refused(tmp_path, net):
    store = Store.create(tmp_path, BACKBONE, net)
    about = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps({**about, "fingerprint": "0" * 64}))
    with pytest.raises(StoreError, match="have changed since the store"):
        Store(store.folder).network()


def test_concurrent_creation_keeps_the_first_store(tmp_path, net):
    others = [Backbone("wrn-10-1", f"/weights/{i}", False) for i in range(8)]
    gate = threading.Barrier(len(others))
    seen = []

    def begin(backbone):
        gate.wait()
        seen.append(Store.create(tmp_path, backbone, net).backbone)

    threads = [threading.Thread(target=begin, args=(backbone,)) for backbone in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == len(others)
    assert len(set(seen)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["store.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "backbone": {"nom": 1}}', "\0"])
def test_a_damaged_store_is_refused(tmp_path, text):
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(StoreError, match=r"store.json is damaged"):
        Store(tmp_path)


def test_a_missing_store_and_a_newer_format_are_refused(tmp_path, net):
    with pytest.raises(StoreError, match="there is no store at"):
        Store(tmp_path / "nowhere")
    Store.create(tmp_path, BACKBONE, net)
    about = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps({**about, "format": 2}))
    with pytest.raises(StoreError, match="format 2, but this bitgraft only supports 1"):
        Store(tmp_path)


def test_a_folder_that_cannot_be_created(tmp_path, net):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot create a store"):
        Store.create(tmp_path / "file" / "store", BACKBONE, net)


def test_tasks_load_with_the_tasks_that_they_build_on(tmp_path, net):
    store = Store.create(tmp_path, BACKBONE, net)
    first = store.network()
    for name in ("a", "b"):
        first.add_task(name, classes=2, method="packnet")
        first.tasks[name].prune(0.5)
        first.tasks[name].freeze()
        first.save_task(name, store.path(name))
    (tmp_path / ".hidden.safetensors").write_text("")
    assert store.names() == ["a", "b"]
    assert [size > 0 for _, size in store.sizes()] == [True, True]
    fresh = store.network()
    store.load(fresh, "b")
    assert set(fresh.tasks) == {"a", "b"}
    with pytest.raises(UnknownTaskError, match="has no task 'c'; it has a, b"):
        store.archive("c")


@pytest.mark.parametrize("stated", ["absolute", "relative"])
def test_a_store_that_holds_its_weights_can_be_moved(tmp_path, monkeypatch, net, stated):
    monkeypatch.chdir(tmp_path)
    weights = Path("old", "weights", "backbone.safetensors")
    weights.parent.mkdir(parents=True)
    net.save_backbone(weights)
    Store.create("old", Backbone("wrn-10-1", str(weights if stated == "relative" else weights.absolute())), net)
    assert Store("old").backbone == Backbone("wrn-10-1", str(weights))
    (tmp_path / "elsewhere").mkdir()
    Path("old").rename("elsewhere/new")
    monkeypatch.chdir("elsewhere")
    moved = Store("new")
    assert moved.backbone.weights == str(tmp_path / "elsewhere/new/weights/backbone.safetensors")
    assert moved.network().fingerprint == net.fingerprint


def test_weights_outside_the_folder_stay_where_they_are_when_a_store_is_moved(tmp_path, monkeypatch, net):
    monkeypatch.chdir(tmp_path)
    net.save_backbone("w.safetensors")
    Store.create("old", Backbone("wrn-10-1", "w.safetensors"), net)
    (tmp_path / "elsewhere").mkdir()
    Path("old").rename("elsewhere/new")
    monkeypatch.chdir("elsewhere")
    assert Store("new").network().fingerprint == net.fingerprint
