"""`bitgraft eval`, `predict`, `tasks`, `export` and `demo` on a store of two tasks."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from images import NET, bitgraft, exit_code, furnish, photos
from safetensors.torch import load_file

from bitgraft.data.preprocessing import Preprocessing, evaluation_tensor
from bitgraft.network import Network
from bitgraft.store import Backbone, Store
from bitgraft.workflows import prediction

SHOT = "photos/test/red/0.png"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with images, a network and a store of two tasks."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        furnish(folder, patch)
        common = ["train", "photos", "--backbone", NET, "--size", "16", "--batch", "8", "--epochs", "3"]
        for more in (["--task", "colours", "--method", "finetune"], ["--task", "hues", "--no-flip"]):
            assert exit_code(patch, *common, *more) == 0
    return folder


@pytest.fixture
def run(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    return lambda *args: bitgraft(capsys, monkeypatch, *args)


def answer(path: str, task: str) -> list[float]:
    store = Store("bitgraft-store")
    net = store.network()
    held = store.load(net, task)
    image = evaluation_tensor(Path(path), Preprocessing.from_dict(held.metadata.preprocessing))
    with torch.no_grad():
        return net.eval()(image[None], task=task).softmax(1)[0].tolist()


def test_eval_agrees_with_what_training_measured(run):
    code, out, err = run("eval", "photos", "--task", "colours", "--by-class", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["images"] == 9
    assert [row["class"] for row in report["by_class"]] == ["blue", "green", "red"]
    assert sum(row["correct"] for row in report["by_class"]) == report["correct"]
    tasks = json.loads(run("tasks", "--json")[1])["tasks"]
    assert report["accuracy"] == pytest.approx(tasks[0]["accuracy"])
    code, out, _ = run("eval", "photos", "--task", "colours", "--split", "val", "--workers", "1")
    assert "of 9 val images are right" in out


def test_eval_matches_classes_by_name(run, trained, tmp_path):
    """The data has only some of the task's classes, under other indices."""
    photos(tmp_path / "fewer", classes=("green", "red"))
    report = json.loads(run("eval", str(tmp_path / "fewer"), "--task", "colours", "--by-class", "--json")[1])
    assert [row["class"] for row in report["by_class"]] == ["green", "red"]
    for part in ("train", "val", "test"):
        (tmp_path / "fewer" / part / "green").rename(tmp_path / "fewer" / part / "olive")
    code, _, err = run("eval", str(tmp_path / "fewer"), "--task", "colours")
    assert code == 1
    assert "task 'colours' does not know 1 of the 2 classes in the data: olive; it knows blue, green, red" in err


def test_every_engine_gives_the_same_answers(run, monkeypatch):
    monkeypatch.setattr("bitgraft.workflows.prediction.MANY", 2)
    engines = ("torch", "onnxruntime", "auto")
    made = [run("predict", "photos/test", "--task", "colours", "--engine", engine, "--json") for engine in engines]
    assert [(code, err) for code, _, err in made] == [(0, "")] * 3
    exact, *others = [json.loads(out) for _, out, _ in made]
    assert others[0] == others[1]
    for ours, theirs in zip(exact, others[0], strict=True):
        assert ours["image"] == theirs["image"]
        for one, other in zip(ours["tasks"]["colours"], theirs["tasks"]["colours"], strict=True):
            assert one["class"] == other["class"]
            assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)
    reports = {run("eval", "photos", "--task", "colours", "--engine", engine, "--json")[1] for engine in engines}
    assert len(reports) == 1


def test_without_onnxruntime_auto_says_why_and_runs_on_pytorch(run, monkeypatch):
    monkeypatch.setattr("bitgraft.workflows.prediction.MANY", 2)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    plain = run("predict", "photos/test", "--task", "hues", "--engine", "torch", "--json")
    code, out, err = run("predict", "photos/test", "--task", "hues", "--json")
    assert (code, out) == plain[:2]
    assert err.startswith("note: hues runs on PyTorch: ONNX needs onnxruntime, which cannot be imported")
    code, out, err = run("predict", SHOT, "--task", "hues", "--engine", "onnxruntime")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "pip install '.[onnx]'" in err


def test_few_images_are_not_worth_a_session(run, monkeypatch):
    monkeypatch.setattr("bitgraft.workflows.prediction.task_session", None)
    assert run("predict", SHOT, "--task", "hues")[0] == 0


def test_eval_without_such_images(run, tmp_path):
    photos(tmp_path / "flat", test=0)
    for name in ("blue", "green", "red"):
        (tmp_path / "flat/test" / name).rmdir()
    (tmp_path / "flat/test").rmdir()
    code, _, err = run("eval", str(tmp_path / "flat"), "--task", "colours")
    assert code == 1
    assert "has no test images: choose --split train or --split val" in err


def test_eval_needs_no_training_images(run, tmp_path):
    folder = photos(tmp_path / "new", test=5)
    for part in ("train", "val"):
        shutil.rmtree(folder / part)
    for data, unsplit in ((folder, False), (folder / "test", True)):
        code, out, err = run("eval", str(data), "--task", "colours")
        assert code == 0
        assert ("if the task was trained on them" in err) == unsplit
        assert "of 15 images are right)" in out
        assert json.loads(run("eval", str(data), "--task", "colours", "--json")[1])["images"] == 15
    counts = [
        json.loads(run("eval", str(folder / "test"), "--task", "colours", "--split", split, "--json")[1])["images"]
        for split in ("train", "val")
    ]
    assert counts == [15, 2]
    code, _, err = run("train", str(folder), "--task", "new")
    assert (code, "has test/ but no train/" in err) == (1, True)


def test_eval_names_an_unreadable_image(run, tmp_path):
    folder = photos(tmp_path / "bad")
    (folder / "test/red/1.png").write_bytes(b"")
    for workers in ("0", "1"):
        code, _, err = run("eval", str(folder), "--task", "colours", "--workers", workers)
        assert code == 1
        assert err.count("\n") == 1
        assert "test/red/1.png" in err


def test_commands_in_half_precision(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for dtype in ("half", "bfloat16"):
        (tmp_path / f"in_{dtype}.py").write_text(
            f"import own_net\n\ndef build():\n    return own_net.build().{dtype}()\n"
        )
        common = ("--backbone", f"in_{dtype}:build", "--size", "16", "--batch", "8", "--epochs", "1")
        store = ("--store", str(tmp_path / dtype))
        assert run("train", "photos", "--task", "colours", *common, *store)[0] == 0
        for command in (["eval", "photos", "--task", "colours", "--union"], ["identify", "photos/test/red/0.png"]):
            code, _, err = run(*command, *store)
            assert (code, err) == (0, "")


def test_an_unreadable_image_is_one_sentence_with_workers_as_well(run, tmp_path):
    shutil.copytree("photos", tmp_path / "photos")
    for part in ("train", "test"):
        (tmp_path / "photos" / part / "red/1.png").write_bytes(b"nonsense")
    before = Path("bitgraft-store/colours.safetensors").read_bytes()
    data = str(tmp_path / "photos")
    for command in (["describe", "colours", data], ["eval", data, "--task", "colours", "--union"]):
        for workers in ("0", "1"):
            code, out, err = run(*command, "--workers", workers)
            assert (code, out, err.count("\n")) == (1, "", 1)
            assert "1.png: it is not an image that PIL knows" in err
    assert Path("bitgraft-store/colours.safetensors").read_bytes() == before


@pytest.mark.parametrize("more", [["--by-class"], ["--engine", "onnxruntime"]])
def test_the_union_takes_no_option_that_it_would_ignore(run, more):
    code, out, err = run("eval", "photos", "--task", "colours", "--union", *more)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--union takes neither --by-class nor --engine onnxruntime" in err


def test_predict_gives_what_the_network_gives(run):
    code, out, err = run("predict", SHOT, "--task", "colours", "--json", "--top", "2")
    assert (code, err) == (0, "")
    ((image, best),) = [(row["image"], row["tasks"]["colours"]) for row in json.loads(out)]
    expected = answer(SHOT, "colours")
    assert image == SHOT
    assert len(best) == 2
    assert best[0]["probability"] == pytest.approx(max(expected), abs=1e-6)
    assert best[0]["class"] == ("blue", "green", "red")[expected.index(max(expected))]


def test_predict_folders_and_tasks(run):
    code, out, _ = run("predict", "photos/test", SHOT, "--all-tasks", "--json")
    rows = json.loads(out)
    assert code == 0
    assert len(rows) == 9
    assert all(set(row["tasks"]) == {"colours", "hues"} for row in rows)
    lines = run("predict", SHOT, "--task", "hues", "--task", "original", "--top", "1")[1].splitlines()
    assert [line.split()[:-3] for line in lines[2:]] == [[SHOT, "hues"], ["original"]]


def test_predict_names_imagenets_classes(run, monkeypatch):
    monkeypatch.setattr(prediction, "imagenet_names", lambda network, backbone: ("tench", "goldfish", *"abc"))
    answers = json.loads(run("predict", SHOT, "--task", "original", "--json")[1])[0]["tasks"]["original"]
    assert {answer["class"] for answer in answers} == {"tench", "goldfish", *"abc"}


def test_predict_loads_a_task_once_that_another_builds_on(run, tmp_path):
    backbone = Backbone(NET, pretrained=False)
    net = Network(backbone.build())
    store = Store.create(tmp_path / "store", backbone, net)
    for name in ("z", "a"):  # a builds on z
        net.add_task(name, classes=3, method="packnet", preprocessing={"size": [16, 16]}).prune(0.5)
    for name in ("z", "a"):
        net.tasks[name].freeze()
        net.eval().save_task(name, store.path(name))
    code, out, err = run("predict", SHOT, "--all-tasks", "--store", str(store.folder), "--json")
    assert (code, err) == (0, "")
    assert set(json.loads(out)[0]["tasks"]) == {"a", "z"}


def test_predict_answers_the_rest_when_one_cannot_be_read(run, tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"nonsense")
    code, out, err = run("predict", str(tmp_path / "bad.jpg"), SHOT, "nowhere.png", "--task", "colours")
    assert code == 1
    assert SHOT in out
    assert "bad.jpg" not in out
    assert [line.partition(":")[0] for line in err.splitlines()] == ["error", "error"]
    assert "bad.jpg" in err
    assert "nowhere.png: there is no such file" in err
    rows = json.loads(run("predict", str(tmp_path / "bad.jpg"), SHOT, "--task", "colours", "--json")[1])
    assert ["error" in row for row in rows] == [False, True]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("predict", SHOT, "--task", "hues", "--all-tasks"), 2, "give either --task or --all-tasks"),
        (("predict", SHOT, "--task", "shapes"), 1, "has no task 'shapes'; it has colours, hues"),
        (("predict", SHOT, "--task", "hues", "--top", "0"), 2, "--top must be at least 1; see"),
        (("predict", SHOT, "--task", "hues", "--store", "nowhere"), 1, "there is no store at nowhere"),
        (("eval", "photos", "--task", "shapes"), 1, "has no task 'shapes'"),
        (("eval", "photos"), 2, "--task"),
        (("tasks", "--store", "nowhere"), 1, "there is no store at nowhere"),
        (("export", "--task", "shapes"), 1, "has no task 'shapes'"),
        (("export", "--task", "original"), 1, "has no task 'original'"),
        (("export", "--task", "hues", "--output", "own_net.py"), 1, "already exists"),
        (("train", "photos", "--task", "original"), 1, "'original' is the backbone's own task"),
        (("pull", "bitgraft-store", "--task", "hues", "--as", "original"), 1, "'original' is the backbone's own task"),
    ],
)
def test_a_wrong_command_is_one_sentence(run, args, code, said):
    left, out, err = run(*args)
    assert (left, out) == (code, "")
    assert said in err
    assert err.count("\n") == 1


def test_tasks_lists_what_is_there_and_what_is_broken(run, trained):
    code, out, _ = run("tasks")
    assert code == 0
    assert "3 separate networks, including the backbone's own" in out
    rows = {row["name"]: row for row in json.loads(run("tasks", "--json")[1])["tasks"]}
    assert rows["hues"]["method"] == "full"
    assert rows["hues"]["classes"] == 3
    assert rows["colours"]["bits_per_weight"] > 32
    broken = trained / "bitgraft-store/broken.safetensors"
    broken.write_bytes(b"nonsense")
    try:
        code, out, _ = run("tasks")
        assert code == 0
        assert "broken is broken:" in out
        assert "hues" in out
        assert "error" in json.loads(run("tasks", "--json")[1])["tasks"][0]
    finally:
        broken.unlink()


def test_export_loads_without_bitgraft(run, tmp_path):
    path = tmp_path / "plain.safetensors"
    code, out, _ = run("export", "--task", "hues", "--output", str(path))
    assert code == 0
    assert "To load it:" in out
    from own_net import build

    model = build(num_classes=3).eval()
    model.load_state_dict(load_file(path))
    store = Store("bitgraft-store")
    held = store.load(store.network(), "hues")
    image = evaluation_tensor(Path(SHOT), Preprocessing.from_dict(held.metadata.preprocessing))
    with torch.no_grad():
        assert model(image[None]).softmax(1)[0].tolist() == pytest.approx(answer(SHOT, "hues"), abs=1e-6)


def test_export_says_what_to_type_for_timm(run, tmp_path):
    import timm

    backbone = Backbone("test_resnet", pretrained=False)
    net = Network(backbone.build())
    store = Store.create(tmp_path / "store", backbone, net)
    for name, method in (("a", "full"), ("b", "adapters-series")):
        net.add_task(name, classes=4, method=method)
        net.tasks[name].freeze()
        net.save_task(name, store.path(name))
    path = tmp_path / "a.safetensors"
    out = run("export", "--task", "a", "--store", str(store.folder), "--output", str(path))[1]
    line = next(line for line in out.splitlines() if "create_model" in line)
    found: dict = {"timm": timm}
    exec(line.strip(), found)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(found["model"].eval()(images), net.eval()(images, task="a"), atol=1e-5)
    out = run("export", "--task", "b", "--store", str(store.folder), "--output", str(tmp_path / "b.safetensors"))[1]
    assert "adds layers of its own" in out


def test_demo_runs_the_demo(run, monkeypatch):
    import bitgraft.paper.demo

    asked = []
    monkeypatch.setattr(bitgraft.paper.demo, "run", lambda folder, console: asked.append(folder))
    assert run("demo", "--folder", "somewhere")[0] == 0
    assert asked == [Path("somewhere")]


def test_the_shell_completes_names_of_tasks(run):
    from bitgraft.cli.options import complete_tasks

    context = type("Context", (), {"params": {"store": "bitgraft-store"}})
    assert complete_tasks(context, "") == ["colours", "hues"]
    assert complete_tasks(context, "h") == ["hues"]


@pytest.mark.parametrize("command", [("predict", SHOT, "--task", "colours"), ("eval", "photos", "--task", "colours")])
@pytest.mark.parametrize("device", ["cuda:99", "nowhere"])
def test_a_device_that_is_not_here_is_one_sentence(run, command, device):
    code, out, err = run(*command, "--device", device)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"--device {device} does not work here: " in err
    assert run(*command, "--device", "cpu")[0] == 0
