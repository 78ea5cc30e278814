"""Suites and their runs: what a file may say, what a record holds, and what happens when a run is killed."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from images import NET, SOURCE, bitgraft, photos
from PIL import Image

from bitgraft.bench import pools, runner, suite, worker
from bitgraft.bench.pools import Ended, Local, Place
from bitgraft.bench.suite import Cell, load_suite, parse
from bitgraft.errors import SuiteError

SMALL = {
    "name": "small",
    "backbone": {"name": NET},
    "config": {"size": 16, "batch": 8, "epochs": 2},
    "datasets": [
        {"name": "photos", "data": "photos", "classes": 3, "images": {"train": 24, "val": 9, "test": 9}},
        {"name": "again", "data": "photos"},
    ],
    "rows": [{"row": "full", "method": "full"}, {"row": "head", "method": "classifier"}],
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A root with images and a network of one's own, which workers find, too."""
    photos(tmp_path / "photos")
    (tmp_path / "own_net.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    return Place(tmp_path, tmp_path / "runs", threads=1)


def small(**changes):
    return parse({**SMALL, **changes})


def record(place, row, dataset, seed=0):
    return json.loads((place.runs / row / f"seed-{seed}" / "runs" / dataset / "record.json").read_text())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": []}, "at least one of"),
        ({"row": []}, "has no setting 'row'; did you mean 'rows'"),
        ({"rows": [{"row": "full"}]}, r"\[\[rows\]\] 1 lacks 'method'"),
        ({"rows": [{"row": "a", "method": "ful"}]}, "row a: there is no method 'ful'; did you mean 'full'"),
        ({"rows": [{"row": "a", "method": "full", "options": {"k9": 1}}]}, "row a: method 'full' has no option 'k9'"),
        ({"rows": [{"row": "a", "method": "full", "config": {"epoch": 1}}]}, "row a: there is no setting 'epoch'"),
        ({"rows": [{"row": "a", "method": "packnet", "order": ["b"]}]}, "row a: there is no data set 'b'"),
        ({"rows": [{"row": "../a", "method": "full"}]}, "the row '../a' is a folder's name"),
        ({"rows": [SMALL["rows"][0]] * 2}, "two of the rows are called 'full'"),
        ({"datasets": [{"name": "a", "data": "a", "images": {"dev": 1}}]}, "not 'dev'"),
        ({"backbone": {}}, r"\[backbone\] lacks 'name'"),
        ({"preset": "slow"}, "there is no preset 'slow'"),
    ],
)
def test_a_suite_that_cannot_be_run_says_why(changes, said):
    with pytest.raises(SuiteError, match=said):
        small(**changes)


def test_every_suite_of_ours_can_be_read():
    assert "decathlon-mini" in suite.built_in()
    for name in suite.built_in():
        held = load_suite(name)
        assert held.name == name
        assert list(held.cells())


def test_unknown_and_broken_suites(tmp_path):
    with pytest.raises(SuiteError, match="did you mean 'decathlon-mini'"):
        load_suite("decathlon-mimi")
    with pytest.raises(SuiteError, match="cannot read the suite"):
        load_suite(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(SuiteError, match=r"suite .*bad\.toml: "):
        load_suite(tmp_path / "bad.toml")


def test_chains_and_joint_runs_are_one_cell_each():
    held = small(
        seeds=[0, 1],
        rows=[
            {"row": "full", "method": "full"},
            {"row": "up", "method": "packnet", "order": ["again", "photos"], "seeds": [0]},
            {"row": "joint", "method": "adapters-joint", "seeds": [5]},
        ],
    )
    assert list(held.cells()) == [
        *(Cell("full", seed, (name,)) for seed in (0, 1) for name in ("photos", "again")),
        Cell("up", 0, ("again", "photos")),
        Cell("joint", 5, ("photos", "again")),
    ]
    chosen = held.chosen(rows=["up", "full"], seeds=[7], datasets=["photos"])
    assert list(chosen.cells()) == [Cell("full", 7, ("photos",)), Cell("up", 7, ("photos",))]
    with pytest.raises(SuiteError, match="no row 'ful'; it has full, up, joint"):
        held.chosen(rows=["ful"])


def test_the_row_has_the_last_word():
    held = small(
        datasets=[{"name": "photos", "data": "photos", "config": {"flip": False, "epochs": 3}}],
        rows=[{"row": "a", "method": "full", "config": {"rates": {"k": 0.5}, "epochs": 4}}],
    )
    config = held.config_of(held.rows[0], held.datasets[0], 9)
    assert (config.flip, config.epochs, config.rates["k"], config.batch, config.seed) == (False, 4, 0.5, 8, 9)


def test_a_run_leaves_a_record_and_is_not_made_again(place):
    held = small()
    cell = Cell("full", 0, ("photos",))
    worker.run_cell(held, cell, place.root, place.runs)
    found = record(place, "full", "photos")
    assert found["images"] == {"train": 24, "val": 9, "test": 9}
    assert (found["row"], found["method"], found["dataset"], found["seed"]) == ("full", "full", "photos", 0)
    assert (found["last"]["epoch"], found["train_images_seen"]) == (2, 48)
    assert 0 <= found["selected"]["test_accuracy"] <= 1
    assert found["selected"]["val_accuracy"] >= found["last"]["val_accuracy"]
    assert found["bits"] < found["backbone_bits"]
    assert found["seconds"] > 0
    file = place.runs / "full" / "seed-0" / "photos.safetensors"
    written = file.stat().st_mtime_ns
    worker.run_cell(held, cell, place.root, place.runs)
    assert file.stat().st_mtime_ns == written
    assert runner.plan(held, place.runs).done == [cell]
    with pytest.raises(SuiteError, match="made with other settings"):
        runner.plan(small(config={**SMALL["config"], "epochs": 3}), place.runs)
    (place.runs / "full" / "seed-0" / "runs" / "photos" / "record.json").write_text("{")
    with pytest.raises(SuiteError, match="is damaged"):
        runner.plan(held, place.runs)


def test_the_selected_epoch_is_tried_as_it_was(place):
    """Validation's choice on the test images is what a run that keeps its best epoch comes to."""
    changes = {"epochs": 6, "rates": {"norms": 0.3, "head": 0.3}}  # so wild that the best epoch is seldom the last
    rows = [
        {"row": "last", "method": "full", "config": changes},
        {"row": "best", "method": "full", "config": {**changes, "keep": "best"}},
    ]
    held = small(rows=rows)
    for seed in range(3):
        for row in ("last", "best"):
            worker.run_cell(held, Cell(row, seed, ("photos",)), place.root, place.runs)
        last, best = (record(place, row, "photos", seed) for row in ("last", "best"))
        assert last["selected"]["epoch"] == best["selected"]["epoch"]
        assert last["selected"]["test_accuracy"] == best["last"]["test_accuracy"]


def test_chains_and_joint_training_leave_a_record_of_each_data_set(place):
    rows = [{"row": "chain", "method": "packnet"}, {"row": "joint", "method": "adapters-joint"}]
    held = small(rows=rows)
    for row in ("chain", "joint"):
        worker.run_cell(held, Cell(row, 0, ("photos", "again")), place.root, place.runs)
        for name in ("photos", "again"):
            assert record(place, row, name)["last"]["test_accuracy"] is not None
    assert len(runner.plan(held, place.runs).done) == 2


def test_data_that_are_not_as_the_suite_says_are_refused(place):
    held = small(datasets=[{**SMALL["datasets"][0], "images": {"train": 25}}])
    with pytest.raises(SuiteError, match="photos: train has 24 images, and must have 25"):
        worker.run_cell(held, Cell("full", 0, ("photos",)), place.root, place.runs)
    held = small(datasets=[{**SMALL["datasets"][0], "classes": 4}])
    with pytest.raises(SuiteError, match="3 classes, and must be 4"):
        worker.run_cell(held, Cell("full", 0, ("photos",)), place.root, place.runs)


def test_a_run_that_fails_does_not_hold_up_the_others(place):
    held = small()

    def pool(_suite, cells, _place):
        return (Ended(cell, "no luck" if cell.row == "head" else None) for cell in cells)

    boards = []

    class Watcher:
        def changed(self, board):
            boards.append((len(board.done), len(board.failed), len(board.left)))

    board = runner.run(held, place, pool, [Watcher()])
    assert (len(board.done), [ended.fault for ended in board.failed]) == (2, ["no luck"] * 2)
    assert boards == [(0, 0, 4), (1, 0, 3), (2, 0, 2), (2, 1, 1), (2, 2, 0)]


def test_a_killed_worker_is_reported_and_its_run_goes_on(place):
    """What a run that was killed comes to is what an uninterrupted one does, to the byte."""
    held = small(datasets=SMALL["datasets"][:1], rows=SMALL["rows"][:1], config={**SMALL["config"], "epochs": 40})
    cell = next(held.cells())
    going: list[subprocess.Popen[str]] = []
    state = place.runs / "full" / "seed-0" / "runs" / "photos" / "state.pt"

    def kill(process):
        going.append(process)
        while not state.exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)

    line = pools.job(held, cell, place)
    fault = pools.work(line, lambda process: threading.Thread(target=kill, args=(process,), daemon=True).start())
    assert fault == "the process was ended by signal 9"
    assert going[0].returncode == -signal.SIGKILL
    assert not (state.parent / "record.json").exists()
    (ended,) = Local(1)(held, [cell], place)
    assert ended.fault is None
    resumed = (place.runs / "full" / "seed-0" / "photos.safetensors").read_bytes()
    assert record(place, "full", "photos")["train_images_seen"] < 40 * 24
    worker.run_cell(held, cell, place.root, place.root / "others")
    assert (place.root / "others" / "full" / "seed-0" / "photos.safetensors").read_bytes() == resumed


def test_a_worker_whose_parent_is_gone_keeps_its_state_and_leaves(place):
    held = small(datasets=SMALL["datasets"][:1], rows=SMALL["rows"][:1], config={**SMALL["config"], "epochs": 500})
    command = [sys.executable, "-m", "bitgraft.bench.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdin.write(pools.job(held, next(held.cells()), place) + "\n")
        process.stdin.flush()
        folder = place.runs / "full" / "seed-0" / "runs" / "photos"
        while not (folder / "metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.stdin.close()
        assert process.wait() == pools.STOPPED
    assert (folder / "state.pt").exists()


def test_the_command(place, capsys, monkeypatch):
    rows = '[[rows]]\nrow = "head"\nmethod = "classifier"\n'
    datasets = '[[datasets]]\nname = "photos"\ndata = "photos"\n'
    config = "[config]\nsize = 16\nbatch = 8\nepochs = 1\n"
    text = f'name = "mine"\nseeds = [0, 1]\n[backbone]\nname = "{NET}"\n{config}{datasets}{rows}'
    Path("mine.toml").write_text(text)
    run = lambda *args: bitgraft(capsys, monkeypatch, "bench", *args)  # noqa: E731
    assert run("mine.toml", "--plan")[1].splitlines()[0] == "0 runs are done, 2 are left"
    code, out, err = run("mine.toml", "--seeds", "1", "--threads", "1", "--json")
    assert (code, json.loads(out)["done"]) == (0, 1), err
    assert Path("runs/mine/head/seed-1/runs/photos/record.json").exists()
    assert json.loads(Path("runs/mine/suite.json").read_text())["rows"] == [{"row": "head", "title": "head"}]
    assert run("mine.toml", "--plan")[1].splitlines()[0] == "1 runs are done, 1 are left"
    assert run("mine.toml", "--rows", "tail")[0] == 1
    assert run("mine.toml", "--seeds", "a")[0] == 2
    assert run()[0] == 2
    assert "decathlon-mini" in run("--list")[1]
    Path("mine.toml").write_text(text.replace('data = "photos"', 'data = "nowhere"').replace('"mine"', '"other"'))
    code, out, err = run("mine.toml", "--seeds", "0")
    assert code == 1
    assert "error: head, photos, seed 0: no data set at 'nowhere'" in err


def _worker_of_ray() -> int:
    """The Ray process that waits for one of our workers; other benchmarks on this machine are none of our business."""
    while True:
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if b"bitgraft.bench.worker" in (folder / "cmdline").read_bytes():
                    parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                    if Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"ray::"):
                        return parent
        time.sleep(0.02)


def test_on_ray_a_lost_worker_is_replaced(place, monkeypatch):
    import ray

    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        held = small(rows=SMALL["rows"][1:], config={**SMALL["config"], "epochs": 30})
        killer = threading.Thread(target=lambda: os.kill(_worker_of_ray(), signal.SIGKILL), daemon=True)
        killer.start()
        board = runner.run(held, place, pools.Ray(None))
        killer.join()
    finally:
        ray.shutdown()
    assert [ended.fault for ended in board.failed] == []
    assert len(board.done) == 2
    for name in ("photos", "again"):
        assert record(place, "head", name)["last"]["epoch"] == 30


def test_data_check(place, capsys, monkeypatch):
    check = '[[datasets]]\nname = "photos"\ndata = "photos"\nclasses = 3\nimages = { train = 24, val = 9, test = 9 }\n'
    row = '[[rows]]\nrow = "head"\nmethod = "classifier"\n'
    text = f'name = "mine"\n[backbone]\nname = "{NET}"\n{check}{row}'
    Path("mine.toml").write_text(text)
    run = lambda *args: bitgraft(capsys, monkeypatch, "data", "check", "mine.toml", *args)  # noqa: E731
    assert run()[:2] == (0, "photos          ready\n")
    gone = '[[datasets]]\nname = "gone"\ndata = "gone"\nsource = "the moon"\n'
    file = Path("photos/train/red/0.png")
    good, bad = hashlib.sha256(file.read_bytes()).hexdigest(), "0" * 64
    sums = f'[datasets.checksums]\n"{file}" = "sha256:{bad}"\n"none.zip" = "md5:{bad}"\n'
    Path("mine.toml").write_text(text.replace("train = 24", "train = 25").replace(row, sums + gone + row))
    code, out, _ = run()
    assert code == 1
    assert "none.zip is missing" in out
    assert f"has the sha256 {good}" in out
    assert "train has 24 images, and must have 25" in out
    assert "gone            no data set at 'gone'" in out
    assert "from: the moon" in out
    faults = json.loads(run("--json")[1])
    assert not faults["gone"]["ready"]
    assert len(faults["photos"]["faults"]) == 3


def test_the_backbones_own_data_are_tried_once_and_not_trained_on(place):
    held = small(datasets=[*SMALL["datasets"][:1], {"name": "own", "data": "photos", "original": True}])
    assert list(held.cells())[-1] == Cell("original", 0, ("own",))
    worker.run_cell(held, Cell("original", 0, ("own",)), place.root, place.runs)
    found = record(place, "original", "own")
    assert (found["bits"], found["train_images_seen"]) == (0, 0)
    assert 0 <= found["last"]["test_accuracy"] <= 1
    assert Cell("original", 0, ("own",)) in runner.plan(held, place.runs).done


def test_a_submission_answers_every_test_image(tmp_path, capsys, monkeypatch):
    """From training to the challenge's own format, and what the scorer says of it is what the record says."""
    devkit = tmp_path / "kit"
    for part, first in (("train", 0), ("val", 100), ("test", 200)):
        rows = []
        for number in range(12):
            name = f"data/dtd/{part}/{number:06d}.png"
            (devkit / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (250, 0, 0) if number % 2 else (0, 0, 250)).save(devkit / name)
            rows.append({"id": first + number, "file_name": name, "category": 41 + number % 2})
        listing = {
            "categories": [{"id": 41, "name": "blue"}, {"id": 42, "name": "red"}],
            "images": [{"id": row["id"], "file_name": row["file_name"]} for row in rows],
            "annotations": [{"image_id": row["id"], "category_id": row["category"]} for row in rows],
        }
        (devkit / "annotations").mkdir(exist_ok=True)
        (devkit / "annotations" / f"dtd_{part}.json").write_text(json.dumps(listing))
    (tmp_path / "own_net.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    Path("mine.toml").write_text(
        f'name = "mine"\n[backbone]\nname = "{NET}"\n[config]\nsize = 16\nbatch = 8\nepochs = 2\n'
        '[[datasets]]\nname = "dtd"\ndata = "kit:dtd"\n[[rows]]\nrow = "full"\nmethod = "full"\n'
    )
    code, _, err = bitgraft(capsys, monkeypatch, "bench", "mine.toml", "--submission", "results.json", "--train-on-val")
    assert code == 0, err
    answers = json.loads(Path("results.json").read_text())
    assert [answer["image_id"] for answer in answers] == list(range(200, 212))
    right = sum(answer["category_id"] == 41 + index % 2 for index, answer in enumerate(answers))
    found = json.loads(Path("runs/mine-train-on-val/full/seed-0/runs/dtd/record.json").read_text())
    assert found["images"] == {"train": 24, "val": 0, "test": 12}
    assert right / 12 == found["last"]["test_accuracy"]
