"""Figures say what records and files say: every line is read back off the axes."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from images import bitgraft

from bitgraft import Network, wide_resnet
from bitgraft.errors import FigureError
from bitgraft.format.inspect import inspect_file
from bitgraft.paper.figures import (
    draw,
    draw_curves,
    draw_k,
    draw_ones,
    learned_k,
    parameter_analysis,
    rendered,
    save,
)

RECORDS = [
    {"epoch": 1, "train_loss": 2.0, "train_accuracy": 0.25, "val_loss": 1.5, "val_accuracy": 0.5},
    {"epoch": 2, "train_loss": 1.0, "train_accuracy": 0.75, "val_loss": 1.25, "val_accuracy": 0.625},
]


@pytest.fixture
def task_file(tmp_path):
    def make(name="flowers", method="full", width=1, **options):
        torch.manual_seed(0)  # the same backbone each time
        net = Network(wide_resnet(10, width))
        task = net.add_task(name, classes=3, method=method, preset=None, **options)
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for _, parameter in task.roles():
                parameter.copy_(torch.randn(parameter.shape, generator=noise))
        path = tmp_path / f"{name}-{width}.safetensors"
        net.save_task(name, path)
        return str(path)

    return make


def lines(axes):
    """Labelled lines and those without a label, as lists of points."""
    drawn = [(line.get_label(), list(zip(*line.get_data(), strict=True))) for line in axes.get_lines()]
    return {label: points for label, points in drawn if not label.startswith("_")}, [points for _, points in drawn]


def panels(figure):
    return {axes.get_title(): axes for axes in figure.axes if axes.axison}


def curves(runs):
    return draw([[lambda axes, what=what: draw_curves(axes, runs, what) for what in ("loss", "accuracy")]])


def test_learning_curves_are_the_records():
    loss, accuracy = curves({"full": RECORDS, "simple": RECORDS[:1]}).axes
    for axes, wanted in (
        (loss, [[(1, 1.5), (2, 1.25)], [(1, 2.0), (2, 1.0)], [(1, 1.5)], [(1, 2.0)]]),
        (accuracy, [[(1, 50.0), (2, 62.5)], [(1, 25.0), (2, 75.0)], [(1, 50.0)], [(1, 25.0)]]),
    ):
        named, every = lines(axes)
        assert [points for points in every if points] == wanted
        assert list(named) == ["full", "simple", "on training images"]


def test_a_run_without_validation_has_its_training_curve():
    records = [{key: value for key, value in record.items() if not key.startswith("val")} for record in RECORDS]
    loss, _ = curves({"full": records}).axes
    assert [points for points in lines(loss)[1] if points] == [[(1, 2.0), (2, 1.0)]]


def test_shares_and_k_are_those_of_the_file(task_file):
    found = inspect_file(task_file())
    axes = panels(draw([[lambda axes: draw_ones(axes, [found], "ones"), lambda axes: draw_k(axes, found, "k")]]))
    assert lines(axes["ones"])[0]["flowers, full"] == [
        (depth, 100 * layer.density) for depth, layer in enumerate(found.layers, 1)
    ]
    named, _ = lines(axes["k"])
    for i in (1, 2, 3):
        assert named[f"k{i}"] == [(depth, layer.k[i].mean) for depth, layer in enumerate(found.layers, 1)]


def test_k_of_channels_are_shaded_from_lowest_to_highest(task_file):
    found = inspect_file(task_file(per="channel"))
    (axes,) = panels(draw([[lambda axes: draw_k(axes, found)]])).values()
    assert len(axes.collections) == 3
    for i, shade in enumerate(axes.collections, 1):
        heights = shade.get_paths()[0].vertices[:, 1]
        assert heights.min() == pytest.approx(min(layer.k[i].low for layer in found.layers))
        assert heights.max() == pytest.approx(max(layer.k[i].high for layer in found.layers))
        low, high = axes.get_ylim()
        assert low < heights.min() < heights.max() < high


@pytest.mark.parametrize(
    ("method", "ks"), [("full", [1, 2, 3]), ("simple", [1, 2]), ("piggyback", []), ("dan", []), ("classifier", [])]
)
def test_only_k_that_were_learned_count(method, ks, task_file):
    assert learned_k(inspect_file(task_file(method=method))) == ks


def test_all_masks_in_one_panel_and_k_of_each_task(task_file):
    files = [task_file("cars-full"), task_file("cars-piggyback", "piggyback"), task_file("cubs", "simple")]
    figure = parameter_analysis([inspect_file(file) for file in (*files, task_file("plain", "classifier"))])
    assert [axes.get_title() for axes in figure.axes] == ["share of ones", "k of cars-full", "k of cubs, simple"]
    assert list(lines(figure.axes[0])[0]) == ["cars-full", "cars-piggyback", "cubs, simple"]


def test_what_has_neither_masks_nor_k_is_refused(task_file):
    found = [inspect_file(task_file(method, method)) for method in ("classifier", "finetune", "dan")]
    with pytest.raises(FigureError, match="nothing to draw"):
        parameter_analysis(found)


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_files_are_what_their_ending_says_and_the_same_each_time(ending, begins, tmp_path):
    written = []
    for number in (1, 2):
        save(curves({"full": RECORDS}), tmp_path / f"{number}.{ending}")
        written.append((tmp_path / f"{number}.{ending}").read_bytes())
    assert written[0].startswith(begins)
    assert written[0] == written[1]


def test_text_in_svg_stays_text():
    assert b"on training images</text>" in rendered(curves({"full": RECORDS}), "svg")


def test_matplotlib_is_loaded_late_and_its_global_state_stays():
    code = (
        "import sys, bitgraft.paper.figures as figures; before = 'matplotlib' in sys.modules; "
        "figures.check_installed(); figure = figures.draw([[lambda axes: axes.plot([1])]]); "
        "figures.rendered(figure, 'png'); import matplotlib; "
        "print(before, 'matplotlib.pyplot' in sys.modules, matplotlib.rcParams['axes.spines.top'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]


def test_the_command_draws_many_files(task_file, tmp_path, capsys, monkeypatch):
    files, out = [task_file("a"), task_file("b", "piggyback")], tmp_path / "masks.svg"
    assert bitgraft(capsys, monkeypatch, "inspect", *files, "--figure", str(out)) == (0, f"wrote {out}\n", "")
    assert all(text in out.read_text() for text in ("a, full", "b, piggyback", "share of ones"))
    code, shown, _ = bitgraft(capsys, monkeypatch, "inspect", *files, "--json", "--figure", str(out))
    assert code == 0
    assert json.loads(shown) == {"figure": str(out)}


def test_the_command_shows_many_files(task_file, capsys, monkeypatch):
    code, out, err = bitgraft(
        capsys, monkeypatch, "inspect", "--layers", task_file("first"), task_file("second", "dan")
    )
    assert (code, err) == (0, "")
    places = [out.index(text) for text in ("first", "conv1.weight", "second", "values")]
    assert all(before < after for before, after in pairwise(places))


def test_the_command_refuses_what_it_cannot_write(task_file, tmp_path, capsys, monkeypatch):
    code, out, err = bitgraft(capsys, monkeypatch, "inspect", "nope.safetensors", "--figure", "masks.gif")
    assert (code, out) == (2, "")
    assert "cannot write a figure to masks.gif: the name must end in .png, .svg, .pdf" in err
    code, _, err = bitgraft(capsys, monkeypatch, "inspect", task_file(), "--figure", str(tmp_path / "no/masks.png"))
    assert code == 1
    assert str(tmp_path / "no") in err
    assert len(err.splitlines()) == 1


def test_without_matplotlib_one_sentence_says_what_to_install(task_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = bitgraft(capsys, monkeypatch, "inspect", task_file(), "--figure", str(tmp_path / "masks.png"))
    assert (code, out) == (1, "")
    remedy = "in your clone of bitgraft, pip install '.[figures]'"
    assert err == f"error: figures need matplotlib: {remedy}\n"
