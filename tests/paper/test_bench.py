"""Suites and their runs: what a file may say, what a record holds, and what happens when a run is killed."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from images import NET, SOURCE, bitgraft, photos
from PIL import Image

from benchmarks import curve
from bitgraft.errors import StoppedError, SuiteError
from bitgraft.format.inspect import inspect_file
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.paper.bench import reading, record, runner, submission, worker
from bitgraft.paper.bench.reading import load_suite, parse
from bitgraft.paper.bench.runner import Place
from bitgraft.paper.bench.suite import Cell, on_all_labels, on_backbone, settings
from bitgraft.paper.report.records import as_lines, read_records, read_suites
from bitgraft.paper.report.results import gather, published_table, spelled_out
from bitgraft.paper.report.tables import tables
from bitgraft.paper.scores import domain_titles
from bitgraft.store import Store
from bitgraft.training.budget import planned_epochs, share_of
from bitgraft.training.optimizers import build, phases_of, rate_factor
from bitgraft.training.presets import PAPER, preset

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
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    return Place(tmp_path, tmp_path / "runs", threads=1)


def small(**changes):
    return parse({**SMALL, **changes})


def in_this_process(held, cell, place, stop):
    worker.run_cell(held, cell, place)


def kept(place, row, dataset, seed=0):
    return json.loads((place.runs / row / f"seed-{seed}" / "runs" / dataset / "record.json").read_text())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": []}, "at least one .* are needed"),
        ({"row": []}, "has no setting 'row'; did you mean 'rows'"),
        ({"rows": [{"row": "full"}]}, "rows 1 lacks 'method'"),
        ({"rows": [{"row": "a", "method": "ful"}]}, "row a: there is no method 'ful'; did you mean 'full'"),
        ({"rows": [{"row": "a", "method": "full", "options": {"k9": 1}}]}, "row a: method 'full' has no option 'k9'"),
        ({"rows": [{"row": "a", "method": "full", "config": {"epoch": 1}}]}, "row a: there is no setting 'epoch'"),
        ({"rows": [{"row": "a", "method": "packnet", "order": ["b"]}]}, "row a: there is no data set 'b'"),
        ({"rows": [{"row": "../a", "method": "full"}]}, "the name of row '../a' is used as a folder name"),
        ({"rows": [SMALL["rows"][0]] * 2}, "two rows are called 'full'"),
        ({"datasets": [{"name": "a", "data": "a", "images": {"dev": 1}}]}, "not 'dev'"),
        ({"backbone": {}}, "backbone lacks 'name'"),
        ({"preset": "slow"}, "there is no preset 'slow'"),
        ({"seeds": 3}, "seeds is 3, not a list"),
        ({"seeds": [0, "1"]}, "seeds 2 is '1', not a whole number"),
        ({"form": "tables"}, "form is 'tables', not one of 'accuracy', 'decathlon', 'ablation'"),
        ({"datasets": 5}, "datasets is 5, not a list"),
        ({"datasets": [{"name": "a", "data": "a", "classes": "2"}]}, "classes is '2', not a whole number"),
        ({"baseline": "finetune"}, "the baseline 'finetune' is not one of the rows full, head"),
        ({"rows": [{"row": "original", "method": "full"}]}, "no row can be called 'original'"),
        ({"backbone": {"name": NET, "trained_on": "nothing"}}, "trained_on is 'nothing', not one of the data sets"),
        ({"backbone": {"name": NET, "config": {"epoch": 1}}}, "row original: there is no setting 'epoch'"),
    ],
)
def test_a_suite_that_cannot_be_run_says_why(changes, said):
    with pytest.raises(SuiteError, match=said):
        small(**changes)


def test_rows_have_the_options_of_the_protocol_unless_they_say_others():
    rows = [{"row": "a", "method": "full"}, {"row": "b", "method": "full", "options": {"per": "layer", "k1": 0.0}}]
    quick, paper = small(preset="quick", rows=rows), small(preset="decathlon", rows=rows)
    assert [dict(row.options) for row in quick.rows] == [{"per": "channel"}, {"per": "layer", "k1": 0.0}]
    assert dict(paper.rows[0].options) == {}


def test_every_suite_of_ours_can_be_read():
    assert "decathlon-mini" in reading.built_in()
    for name in reading.built_in():
        held = load_suite(name)
        assert held.name == name
        assert list(held.cells())


def test_unknown_and_broken_suites(tmp_path):
    with pytest.raises(SuiteError, match="did you mean 'decathlon-mini'"):
        load_suite("decathlon-mimi")
    with pytest.raises(SuiteError, match="cannot read suite"):
        load_suite(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(SuiteError, match=r"suite .*bad\.toml: "):
        load_suite(tmp_path / "bad.toml")


def test_a_suite_may_begin_with_another(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'like = "decathlon-mini"\nname = "mine"\nrows = ["packnet-up", "finetune"]\ndatasets = ["dtd", "gtsrb"]\n'
        "seeds = [4]\n[config]\nsteps = 7\n"
    )
    held, ours = load_suite(tmp_path / "mine.toml"), load_suite("decathlon-mini")
    assert (held.name, held.seeds, held.title, held.backbone) == ("mine", (4,), ours.title, ours.backbone)
    assert held.config == {"steps": 7}  # a table comes in place of the other's
    assert held.datasets == (ours.dataset("dtd"), ours.dataset("gtsrb"))
    assert [(row.row, row.order) for row in held.rows] == [("packnet-up", ("dtd", "gtsrb")), ("finetune", ())]
    own = 'rows = ["finetune", { row = "own", method = "full", seeds = [1] }]'
    (tmp_path / "further.toml").write_text(f'like = "mine.toml"\nname = "further"\n{own}\n')
    rows = load_suite(tmp_path / "further.toml").rows
    assert [(row.row, row.seeds) for row in rows] == [("finetune", None), ("own", (1,))]
    (tmp_path / "unnamed.toml").write_text('[[datasets]]\ndata = "photos"\n')
    (tmp_path / "number.toml").write_text("rows = 5\n")
    for text, said in (
        ('like = "decathlon-mimi"', "did you mean 'decathlon-mini'"),
        ("like = 3", "like is 3, not the name of a suite"),
        ('like = "decathlon-mini"\nrows = ["ful"]', "rows has 'ful', but decathlon-mini has only classifier, "),
        ('like = "self.toml"', r"self\.toml extends itself"),
        ('like = "unnamed.toml"', r"suite unnamed\.toml: datasets is not a list of tables, each with a 'name'"),
        ('like = "number.toml"', r"suite number\.toml: rows is not a list of tables, each with a 'row'"),
    ):
        (tmp_path / "self.toml").write_text(text)
        with pytest.raises(SuiteError, match=said):
            load_suite(tmp_path / "self.toml")


def test_the_papers_suites_have_the_rows_and_columns_of_its_tables():
    sketch, decathlon, ablation = (load_suite(name) for name in ("imagenet-to-sketch", "decathlon", "ablation"))
    for held, form in ((sketch, "accuracy"), (ablation, "ablation")):
        printed = published_table(form, "resnet50", ["cubs"])
        ours = [(row.row, spelled_out(row.title)) for row in held.rows]
        assert ours == [(row.row, row.title) for row in printed.rows]
        assert [dataset.name for dataset in held.datasets] == list(printed.datasets)
    printed = published_table("scores", "wrn-28-4", ["dtd"])
    assert [row.row for row in decathlon.rows] == [row.row for row in printed.rows if row.row != "pb-ours"]
    assert [dataset.name for dataset in decathlon.datasets] == list(printed.datasets) == list(domain_titles())
    assert next(decathlon.chosen(rows=["ra-joint"]).cells()).datasets == printed.datasets  # on all ten, as printed
    down, up = sketch.row("packnet-down").order, sketch.row("packnet-up").order
    assert down == ("cubs", "cars", "flowers", "wikiart", "sketch") == up[::-1]


def test_the_ablation_learns_what_the_paper_says():
    """Its columns k0 to k3, and what the titles say of the surrogate, of channels and of norm layers."""
    for row, printed in zip(load_suite("ablation").rows, published_table("ablation", "", ["cubs"]).rows, strict=True):
        options = registry.get(row.method).with_options(row.options)
        words = {"learn": "✓", "auto": "1"}
        assert [words.get(v) or f"{v:g}" for v in (getattr(options, f"k{i}") for i in range(4))] == printed.k
        assert (options.surrogate == "sigmoid") == ("Sigmoid" in row.title)
        assert (options.per == "channel") == ("channel" in row.title)
        assert options.norms == (row.title not in ("Piggyback", "Piggyback*"))


def test_the_example_in_the_docs_is_a_suite(tmp_path, capsys, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    (example,) = (part.partition("```")[0] for part in text.split("```toml\n")[1:] if part.startswith("# mine.toml"))
    (tmp_path / "mine.toml").write_text(example)
    monkeypatch.chdir(tmp_path)
    code, out, err = bitgraft(capsys, monkeypatch, "bench", "mine.toml", "--plan")
    assert (code, err) == (0, "")
    held = load_suite("mine.toml")
    assert out.splitlines()[0] == f"0 runs are done, {len(held.rows) * len(held.datasets)} are left"
    assert bitgraft(capsys, monkeypatch, "data", "check", "mine.toml")[0] == 0


def test_a_protocol_is_shared_out_between_phases():
    """PackNet sees as many images as the others."""
    phases = registry.get("packnet").phases
    for changes, per_epoch, wanted in (
        ({"epochs": 30}, 10, [20, 10]),
        ({"steps": 250}, 89, [2, 1]),
        ({"steps": 250}, 19, [9, 4]),
        ({"epochs": 1}, 10, [1, 1]),
    ):
        epochs = planned_epochs(PAPER.changed(**changes), per_epoch, classes=10, seconds_per_step=1.0)
        assert [share_of(epochs, phase, phases) for phase in phases] == wanted
    assert [rate_factor(PAPER, phases[0], step, 10, 6) for step in (29, 30)] == [1.0, 0.1]  # after 10 of 20: halfway


def test_a_protocol_may_set_the_pace_of_phases():
    method, theirs = registry.get("packnet"), preset("quick", "packnet")
    assert phases_of(method, preset("imagenet-to-sketch", "packnet")) == method.phases
    paced = phases_of(method, theirs)
    assert [(phase.epochs, phase.rate, phase.prune) for phase in paced] == [(20, None, None), (10, None, 0.75)]
    parameter = torch.nn.Parameter(torch.zeros(2))
    for phase in paced:
        (optimizer,) = build([("weights", parameter)], theirs, phase)
        assert optimizer.param_groups[0]["lr"] == theirs.rates["weights"]
        assert rate_factor(theirs.changed(warmup=0.0), phase, 20, 10, 4) == pytest.approx(0.5)  # cosine, halfway


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
    worker.run_cell(held, cell, place)
    found = kept(place, "full", "photos")
    assert found["images"] == {"train": 24, "val": 9, "test": 9}
    assert (found["row"], found["method"], found["dataset"], found["seed"]) == ("full", "full", "photos", 0)
    assert (found["last"]["epoch"], found["train_images_seen"]) == (2, 48)
    assert 0 <= found["selected"]["test_accuracy"] <= 1
    assert found["selected"]["val_accuracy"] >= found["last"]["val_accuracy"]
    assert found["bits"] < found["backbone_bits"]
    assert found["seconds"] > 0
    assert found["processor_seconds"] > 0
    assert found["joint"] is False
    file, store = place.runs / "full" / "seed-0" / "photos.safetensors", Store(place.runs / "full" / "seed-0")
    assert found["bits_per_weight"] == inspect_file(file).bits_per(store.size.weights) > 1
    (read,) = read_records(place.runs)
    assert read.bits_per_weight == found["bits_per_weight"]
    (point,) = curve.points(curve.read([place.runs], []))
    assert point["bits"] == found["bits_per_weight"]
    path = place.runs / "full" / "seed-0" / "runs" / "photos" / "record.json"
    path.write_text(json.dumps({key: value for key, value in found.items() if key != "bits_per_weight"}))
    assert curve.points(curve.read([place.runs], [])) == [point]  # an older record: from the task file beside it
    written = file.stat().st_mtime_ns
    worker.run_cell(held, cell, place)
    assert file.stat().st_mtime_ns == written
    assert runner.plan(held, place.runs).done == [cell]
    with pytest.raises(SuiteError, match="made with other settings"):
        runner.plan(small(config={**SMALL["config"], "epochs": 3}), place.runs)
    path.write_text("{")
    with pytest.raises(SuiteError, match="is damaged"):
        runner.plan(held, place.runs)


def test_records_of_a_report_are_taken_over(place, tmp_path):
    one = small(rows=[{"row": "head", "method": "classifier"}])
    runner.run(one, place, work=in_this_process)
    lines = tmp_path / "records.jsonl"
    lines.write_text(as_lines(read_records(place.runs), {}))
    runner.adopt(lines, one, tmp_path / "elsewhere")
    assert not runner.plan(one, tmp_path / "elsewhere").left
    assert read_records(tmp_path / "elsewhere") == [
        replace(known, where=known.where.replace("/runs/head", "/elsewhere/head")) for known in read_records(place.runs)
    ]
    other = replace(one, config={**one.config, "batch": 4})
    with pytest.raises(SuiteError, match="made with other settings"):
        runner.plan(other, tmp_path / "elsewhere")


def test_records_of_a_report_with_other_settings_are_named_by_file_and_line(place, tmp_path, capsys, monkeypatch):
    one = small(rows=[{"row": "head", "method": "classifier"}])
    runner.run(one, place, work=in_this_process)
    lines = tmp_path / "records.jsonl"
    lines.write_text(as_lines(read_records(place.runs), {}).replace('"batch":8', '"batch":4', 1))
    with pytest.raises(SuiteError) as refused:
        runner.adopt(lines, one, tmp_path / "elsewhere")
    assert str(refused.value) == (
        f"some records were made with other settings: {lines}, line 1 (head, again, seed 0; differing: batch); remove "
        f"them from {lines} to repeat these runs, or choose other rows and data sets"
    )
    assert not (tmp_path / "elsewhere").exists()
    runner.adopt(lines, one.chosen(datasets=["photos"]), tmp_path / "elsewhere")  # the other one is only reported
    lines.write_text("".join(lines.read_text().splitlines(keepends=True)[1:]))
    runner.adopt(lines, one, tmp_path / "once-more")
    assert [cell.datasets for cell in runner.plan(one, tmp_path / "once-more").left] == [("again",)]
    lines.write_text(lines.read_text().replace('"row":"head"', '"row":"../../head"'))
    with pytest.raises(SuiteError, match=r"line 1: row and data set are used as folder names, but '\.\./\.\./head'"):
        runner.adopt(lines, one, tmp_path / "deep" / "er")


def test_an_interrupted_run_with_other_settings_says_what_to_do_in_bench(place):
    """The messages of training name options of `bitgraft train`."""
    held = small(datasets=SMALL["datasets"][:1], rows=SMALL["rows"][:1])
    (cell,) = held.cells()
    stopped = {"stop": lambda: (place.runs / "full" / "seed-0" / "runs" / "photos" / "run.json").exists()}
    with pytest.raises(StoppedError):
        worker.run_cell(held, cell, place, **stopped)
    other = replace(held, config={**held.config, "epochs": 3})
    fault = runner.run_worker(other, cell, place, threading.Event())
    assert "was started with other settings (epochs was 2, is 3)" in fault
    remedy = f"use another --runs folder, or delete {place.runs / 'full' / 'seed-0'} to start this run again)"
    assert fault.endswith(remedy)


def test_the_same_seed_twice_is_one_run():
    assert len(list(small(seeds=[0, 0]).cells())) == len(list(small().chosen(seeds=[3, 3]).cells())) == 4


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
            worker.run_cell(held, Cell(row, seed, ("photos",)), place)
        last, best = (kept(place, row, "photos", seed) for row in ("last", "best"))
        assert last["selected"]["epoch"] == best["selected"]["epoch"]
        assert last["selected"]["test_accuracy"] == best["last"]["test_accuracy"]


def test_chains_and_joint_training_leave_a_record_of_each_data_set(place):
    rows = [{"row": "chain", "method": "packnet"}, {"row": "joint", "method": "adapters-joint"}]
    held = small(rows=rows)
    for row in ("chain", "joint"):
        worker.run_cell(held, Cell(row, 0, ("photos", "again")), place)
        for name in ("photos", "again"):
            assert kept(place, row, name)["last"]["test_accuracy"] is not None
    assert kept(place, "joint", "again")["joint"] is True
    assert kept(place, "chain", "again")["train_images_seen"] == 2 * 24  # as many as any other method
    assert len(runner.plan(held, place.runs).done) == 2


def test_data_that_are_not_as_the_suite_says_are_refused(place):
    held = small(datasets=[{**SMALL["datasets"][0], "images": {"train": 25}}])
    with pytest.raises(SuiteError, match="photos: train has 24 images instead of 25"):
        worker.run_cell(held, Cell("full", 0, ("photos",)), place)
    held = small(datasets=[{**SMALL["datasets"][0], "classes": 4}])
    with pytest.raises(SuiteError, match="3 classes instead of 4"):
        worker.run_cell(held, Cell("full", 0, ("photos",)), place)


def test_a_run_that_fails_does_not_hold_up_the_others(place):
    held = small()

    boards = []

    def changed(board):
        boards.append((len(board.done), len(board.failed), len(board.left)))

    board = runner.run(held, place, 1, changed, lambda suite, cell, *_: "no luck" if cell.row == "head" else None)
    assert (len(board.done), list(board.failed.values())) == (2, ["no luck"] * 2)
    assert boards == [(0, 0, 4), (1, 0, 3), (2, 0, 2), (2, 1, 1), (2, 2, 0)]


def test_a_killed_worker_is_reported_and_its_run_goes_on(place, monkeypatch):
    """What a run that was killed comes to is what an uninterrupted one does, to the byte."""
    held = small(datasets=SMALL["datasets"][:1], rows=SMALL["rows"][:1], config={**SMALL["config"], "epochs": 40})
    cell = next(held.cells())
    state = place.runs / "full" / "seed-0" / "runs" / "photos" / "state.pt"
    Process, going = subprocess.Popen, []  # noqa: N806

    def kill():
        while not (going and state.exists()):
            time.sleep(0.01)
        going[0].send_signal(signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *args, **options: going.append(Process(*args, **options)) or going[0])
        threading.Thread(target=kill, daemon=True).start()
        assert runner.run_worker(held, cell, place, threading.Event()) == "the process was killed by signal 9"
    assert not (state.parent / "record.json").exists()
    board = runner.run(held, place)
    assert (board.done, board.failed) == ([cell], {})
    resumed = (place.runs / "full" / "seed-0" / "photos.safetensors").read_bytes()
    assert kept(place, "full", "photos")["train_images_seen"] < 40 * 24
    worker.run_cell(held, cell, replace(place, runs=place.root / "others"))
    assert (place.root / "others" / "full" / "seed-0" / "photos.safetensors").read_bytes() == resumed


def test_a_worker_whose_input_ends_keeps_its_state_and_leaves(place):
    held = small(datasets=SMALL["datasets"][:1], rows=SMALL["rows"][:1], config={**SMALL["config"], "epochs": 500})
    folder, stop = place.runs / "full" / "seed-0" / "runs" / "photos", threading.Event()

    def wait_for_steps():
        while not (folder / "metrics.jsonl").exists():
            time.sleep(0.01)
        stop.set()

    threading.Thread(target=wait_for_steps, daemon=True).start()
    assert runner.run_worker(held, next(held.cells()), place, stop) == "stopped; run the same command again to resume"
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
    assert json.loads(Path("runs/mine/suite.json").read_text())["rows"] == [{"row": "head", "title": ""}]
    assert run("mine.toml", "--plan")[1].splitlines()[0] == "1 runs are done, 1 are left"
    assert run("mine.toml", "--rows", "tail")[0] == run("nosuch")[0] == 2
    for seeds in ("a", "-1", "0,99999999999999999999"):
        assert run("mine.toml", "--plan", f"--seeds={seeds}")[0] == 2
    assert run()[0] == 2
    assert "decathlon-mini" in run("--list")[1]
    Path("mine.toml").write_text(text.replace('data = "photos"', 'data = "nowhere"').replace('"mine"', '"other"'))
    Path("file").touch()
    for option, path in (("--runs", "file"), ("--runs", "file/runs"), ("--submission", "none/results.json")):
        code, _, err = run("mine.toml", option, path)
        assert (code, f"{option} {path}: " in err, len(err.splitlines())) == (2, True, 1)
    code, out, err = run("mine.toml", "--seeds", "0")
    assert code == 1
    assert "error: head, photos, seed 0: no data set at 'nowhere'" in err


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
    sums = f'[datasets.checksums]\n"{file}" = "sha256:{good}"\n"none.zip" = "md5:{bad}"\n'
    Path("mine.toml").write_text(text.replace(row, sums + row))
    assert run()[:2] == (0, "photos          ready; missing, so not checked: none.zip\n")
    sums = sums.replace(good, bad)
    Path("mine.toml").write_text(text.replace("train = 24", "train = 25").replace(row, sums + gone + row))
    code, out, _ = run()
    assert code == 1
    assert f"has sha256 {good} instead of {bad}" in out
    assert "train has 24 images instead of 25" in out
    assert "gone            no data set at 'gone'" in out
    assert "source: the moon" in out
    assert "files: gone/{train,val,test}/CLASS/IMAGE" in out
    faults = json.loads(run("--json")[1])
    assert not faults["gone"]["ready"]
    assert len(faults["photos"]["faults"]) == 2
    assert faults["photos"]["unchecked"] == ["none.zip"]
    assert faults["photos"]["layout"].startswith("photos/{train,val,test}/CLASS/IMAGE")
    code, _, err = bitgraft(capsys, monkeypatch, "data", "check", "min")
    assert (code, "there is no suite 'min'" in err) == (2, True)


def test_data_of_a_devkit_say_which_files_are_read(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = bitgraft(capsys, monkeypatch, "data", "check", "decathlon")
    assert code == 1
    assert "files: decathlon-1.0/annotations/gtsrb_{train,val,test}.json, and the images they list" in out
    assert out.count("source: ") == 10


def test_the_backbones_own_data_are_tried_once_and_not_trained_on(place):
    held = small(datasets=[*SMALL["datasets"][:1], {"name": "own", "data": "photos", "original": True}])
    assert list(held.cells())[-1] == Cell("original", 0, ("own",))
    worker.run_cell(held, Cell("original", 0, ("own",)), place)
    found = kept(place, "original", "own")
    assert (found["bits"], found["train_images_seen"]) == (0, 0)
    assert 0 <= found["last"]["test_accuracy"] <= 1
    assert Cell("original", 0, ("own",)) in runner.plan(held, place.runs).done


SELF_TRAINED = {
    "backbone": {"name": NET, "trained_on": "photos", "config": {"epochs": 5, "rates": {"weights": 1e-2}}},
    "form": "decathlon",
    "baseline": "finetune",
    "rows": [{"row": "finetune", "method": "finetune"}, {"row": "head", "method": "classifier"}],
}


def test_a_backbone_can_be_trained_first(place):
    held = small(**SELF_TRAINED)
    first, *others = held.cells()
    assert first == Cell("original", 0, ("photos",))
    assert others == [Cell("finetune", 0, ("again",)), Cell("head", 0, ("again",))]
    runner.describe(held, place.runs)
    board = runner.run(held, place, work=in_this_process)
    assert (board.done, board.left, board.failed) == ([first, *others], [], {})
    found = kept(place, "original", "photos")
    assert (found["bits"], found["last"]["epoch"], found["config"]["epochs"]) == (0, 5, 5)
    stores = [Store(place.runs / row / "seed-0") for row in ("finetune", "head")]
    assert len({store.fingerprint for store in stores}) == 1
    worker.evaluate_original(worker.Run(held, first, place))  # the weights that tasks are added to
    assert kept(place, "original", "photos")["last"]["test_accuracy"] == found["last"]["test_accuracy"]
    assert not any(str(place.root) in json.dumps(kept(place, row, "again")) for row in ("finetune", "head"))

    (results,) = gather(read_records(place.runs), read_suites(place.runs))
    assert results.suite.baseline == "finetune"
    assert {line.cells[1].text for line in tables(results)[0].lines} == {f"{100 * found['last']['test_accuracy']:.1f}"}

    record.backbone_file(place.runs).unlink()
    assert runner.plan(held, place.runs).left == [first]


def test_nothing_is_run_on_a_backbone_that_could_not_be_trained(place):
    held = small(**SELF_TRAINED)
    board = runner.run(held, place, work=lambda *_: "no luck")
    assert [cell.row for cell in board.failed] == ["original"]
    assert [cell.row for cell in board.left] == ["finetune", "head"]


def test_the_data_of_a_trained_backbone_stay_whatever_is_chosen():
    held = small(**SELF_TRAINED).chosen(rows=["head"], datasets=["again"])
    assert [cell.row for cell in held.cells()] == ["original", "head"]
    assert parse(json.loads(json.dumps(asdict(held)))) == held  # as a worker gets it
    other = on_backbone(held, "own_net:other", None, True).backbone
    assert (other.name, other.trained_on) == ("own_net:other", "photos")
    assert on_backbone(held, "own_net:other", "file.safetensors", True).backbone.trained_on is None


def test_settings_of_a_plain_backbone_are_those_of_older_records():
    held = small()
    assert settings(held, held.rows[0], held.datasets[0])["backbone"] == {
        "name": NET,
        "weights": None,
        "pretrained": True,
    }


def test_records_with_the_old_names_of_settings_are_found(tmp_path):
    """Long runs that an older bitgraft made are not made again."""
    held = load_suite("imagenet-to-sketch-mini").chosen(rows=["full"], datasets=["flowers"])
    (cell,) = held.cells()
    config = asdict(held.config_of(held.rows[0], held.datasets[0], 0))
    old = {"scale_k2_by_r": "follow", "gradient_centralization": "centre", "mean_shift_correction": "level"}
    old |= {"clip_to_ema_norm": "steady", "head_init": "head_start", "k1": "shift"}
    roles = {
        name: {old.get(role, role): value for role, value in config[name].items()} for name in ("rates", "optimizers")
    }
    renamed = {old.get(name, name): value for name, value in (config | roles).items()}
    path = record.record_path(tmp_path, cell, "flowers")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"settings": settings(held, held.rows[0], held.datasets[0]), "config": renamed}))
    assert runner.plan(held, tmp_path).done == [cell]
    path.write_text(path.read_text().replace('"follow": 0.0', '"follow": 0.1'))
    with pytest.raises(SuiteError, match=r"made with other settings \(scale_k2_by_r\)"):
        runner.plan(held, tmp_path)


def test_labels_of_the_backbones_own_data_are_left_to_try_it_on():
    joined = on_all_labels(load_suite("decathlon"))
    assert joined.dataset("imagenet12").data == "decathlon-1.0:imagenet12"
    assert joined.dataset("dtd").data == "decathlon-1.0:dtd:train+val"


def devkit(folder, domain, first):
    """Blue and red images, 12 in each part."""
    for number, part in enumerate(("train", "val", "test")):
        rows = []
        for image in range(12):
            name = f"data/{domain}/{part}/{image:06d}.png"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (250, 0, 0) if image % 2 else (0, 0, 250)).save(folder / name)
            rows.append({"id": first + 100 * number + image, "file_name": name, "category": 41 + image % 2})
        listing = {
            "categories": [{"id": 41, "name": "blue"}, {"id": 42, "name": "red"}],
            "images": [{"id": row["id"], "file_name": row["file_name"]} for row in rows],
            "annotations": [{"image_id": row["id"], "category_id": row["category"]} for row in rows],
        }
        (folder / "annotations").mkdir(exist_ok=True)
        (folder / "annotations" / f"{domain}_{part}.json").write_text(json.dumps(listing))


KIT = f"""name = "mine"
[backbone]
name = "{NET}"
pretrained = false
trained_on = "imagenet12"
[config]
size = 16
batch = 8
epochs = 2
[[datasets]]
name = "imagenet12"
data = "kit:imagenet12"
[[datasets]]
name = "dtd"
data = "kit:dtd"
[[datasets]]
name = "svhn"
data = "kit:svhn"
[[rows]]
row = "full"
method = "full"
[[rows]]
row = "chain"
method = "packnet"
order = ["svhn", "dtd"]
[[rows]]
row = "joint"
method = "adapters-joint"
datasets = ["imagenet12", "dtd", "svhn"]
"""


def test_a_submission_answers_every_test_image(place, capsys, monkeypatch):
    """From training to the challenge's own format; what the answers are worth is what the records say."""
    domains = {"imagenet12": 1000, "dtd": 2000, "svhn": 3000}
    for domain, first in domains.items():
        devkit(place.root / "kit", domain, first)
    Path("mine.toml").write_text(KIT)
    held = on_all_labels(load_suite("mine.toml"))
    runner.run(held, place, work=in_this_process)
    for row in ("full", "chain", "joint"):
        chosen = held.chosen(rows=[row])
        assert submission.write_submission(chosen, place.root, place.runs, Path("results.json")) == 36
        answers = json.loads(Path("results.json").read_text())
        assert [a["image_id"] for a in answers] == [first + 200 + i for first in domains.values() for i in range(12)]
        for number, name in enumerate(domains):
            some = answers[12 * number : 12 * number + 12]
            right = sum(answer["category_id"] == 41 + index % 2 for index, answer in enumerate(some))
            found = kept(place, "original" if name == "imagenet12" and row != "joint" else row, name)
            assert found["images"] == {"train": 12 if number == 0 else 24, "val": 12 if number == 0 else 0, "test": 12}
            assert right / 12 == found["last"]["test_accuracy"]


def test_the_command_writes_a_submission(place, capsys, monkeypatch):
    devkit(place.root / "kit", "dtd", 0)
    start, rest = KIT.split("trained_on")[0], KIT.partition("[config]")[2]
    Path("mine.toml").write_text(
        f'{start}[config]{rest.partition("[[")[0]}[[datasets]]\nname = "dtd"\ndata = "kit:dtd"\n'
        '[[rows]]\nrow = "head"\nmethod = "classifier"\n'
    )
    command = ["bench", "mine.toml", "--submission", "results.json", "--train-on-val"]
    code, _, err = bitgraft(capsys, monkeypatch, *command)
    assert code == 0, err
    assert "wrote 12 predictions to results.json" in err
    assert len(json.loads(Path("results.json").read_text())) == 12
    found = json.loads(Path("runs/mine-train-on-val/head/seed-0/runs/dtd/record.json").read_text())
    assert found["images"] == {"train": 24, "val": 0, "test": 12}


def test_a_backbone_of_other_classes_answers_for_nothing(place, monkeypatch):
    devkit(place.root / "kit", "imagenet12", 0)
    Path("mine.toml").write_text(KIT.replace('trained_on = "imagenet12"\n', ""))
    held = load_suite("mine.toml").chosen(rows=["full"], datasets=["imagenet12"])
    held = replace(held, datasets=(replace(held.datasets[0], original=True),))
    store = place.runs / "full" / "seed-0"
    net = worker.initial_backbone(held).build()
    Store.create(store, worker.initial_backbone(held), Network(net))
    monkeypatch.setattr(submission, "predicted", lambda *args: [4] * 12)  # of the five that this network knows
    with pytest.raises(SuiteError, match="more classes than the 2 of imagenet12"):
        submission.write_submission(held, place.root, place.runs, Path("results.json"))
