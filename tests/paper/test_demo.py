"""The demo on images that take no time, and its page: whole in itself, and true to what was found."""

import html
import io
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import count

import numpy as np
import pytest
from images import NET, SOURCE, photos
from PIL import Image
from rich.console import Console

from bitgraft.data.images import Images, Splits
from bitgraft.errors import FigureError
from bitgraft.paper import demo, demo_page
from bitgraft.paper.demo_page import Answer
from bitgraft.paper.figures import as_svg, draw, draw_curves
from bitgraft.store import Backbone, Store
from bitgraft.training import callbacks

METHODS = {"colours": demo.METHODS["digits"], "hues": demo.METHODS["solar"]}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder after the demo, what it printed and what it found."""
    folder = tmp_path_factory.mktemp("demo")
    photos(folder / "photos")
    (folder / "own_net.py").write_text(SOURCE)
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delitem(sys.modules, "own_net", raising=False)
        patch.setattr(demo, "BACKBONE", Backbone(NET))
        patch.setattr(demo, "DATA", {"colours": "photos", "hues": "photos"})
        patch.setattr(demo, "ABOUT", {"colours": "squares", "hues": "squares <again>"})
        patch.setattr(demo, "METHODS", METHODS)
        patch.setattr(demo, "MOST", dict.fromkeys(METHODS, 12))
        patch.setattr(demo, "CONFIG", demo.CONFIG.changed(epochs=4, size=16, resize=18, batch=4))
        patch.setattr(demo, "WINDOW", 2)
        patch.setattr(demo, "write", lambda found, path: kept.append(found) or demo_page.write(found, path))
        said = io.StringIO()
        demo.run(folder / "demo", Console(file=said, width=120, highlight=False))
    return folder / "demo", said.getvalue(), kept[0]


def test_it_says_what_it_found(done):
    folder, said, found = done
    assert [(row.data, row.method) for row in found.rows] == [
        (data, method) for data in METHODS for method in METHODS[data]
    ]
    assert "before and after: bit-identical" in said
    assert said.count(": bit-identical") == 3
    assert "report.html" in said.splitlines()[-1]
    assert {f"{row.data}-{row.method}" for row in found.rows} == set(Store(folder / "store").names())
    for row in found.rows:
        assert f"{100 * row.accuracy:.1f} %" in said
        steps = [point["step"] for point in row.curve]
        assert len([point for point in row.curve if "train_loss" in point]) == 6
        assert steps == sorted(steps)
        assert [point["step"] for point in row.curve if "val_accuracy" in point] == [3, 6, 9, 12]


def test_training_images_are_capped_and_the_others_are_not(done):
    assert {shown.images for shown in done[2].shown.values()} == {(12, 9, 9)}


def test_a_cap_keeps_the_share_of_each_class():
    labels = [0] * 60 + [1] * 30 + [2] * 10
    images = Images(np.arange(100, dtype=np.uint8).repeat(4).reshape(100, 2, 2), labels)
    splits = Splits(name="known", classes=("a", "b", "c"), train=images, val=images, test=images)
    few = demo.capped(splits, 50)
    assert Counter(few.train.labels) == {0: 30, 1: 15, 2: 5}
    assert (len(few.val), len(few.test)) == (100, 100)
    assert all(labels[few.train.source[i][0, 0]] == label for i, label in enumerate(few.train.labels))
    assert demo.capped(splits, 50).train.labels == few.train.labels
    assert demo.capped(splits, 100) is splits


def test_a_copy_is_counted_with_the_tasks_own_head(done):
    folder, _, found = done
    net = (store := Store(folder / "store")).network()
    for row in found.rows:
        store.load(net, f"{row.data}-{row.method}")
        copy = sum(tensor.nbytes for tensor in net.export(f"{row.data}-{row.method}").state_dict().values())
        assert row.copy_megabytes == pytest.approx(copy / 1e6)


def test_a_curve_has_means_over_a_few_steps(monkeypatch):
    monkeypatch.setattr(demo, "WINDOW", 2)
    curve, losses = demo.Curve(), [4.0, 2.0, 1.0, 1.0]
    for epoch in range(2):
        for step in range(1, 5):
            curve.step(epoch, step, 8)
            curve.look(sum(losses[:step]) / step, step / 8)
        curve.epoch({"epoch": epoch + 1, "val_loss": 0.5, "train_loss": 2.0})
    assert [(point["step"], point.get("train_loss")) for point in curve.records] == [
        (2, 3.0), (4, 1.0), (4, None), (6, 3.0), (8, 1.0), (8, None)
    ]  # fmt: skip
    assert curve.records[2] == {"step": 4, "val_loss": 0.5}


def test_mistakes_are_counted(done):
    for shown in done[2].shown.values():
        for one in shown.worst:
            assert one.predicted != one.truth
            assert one.count in ("1 of 3", "2 of 3", "3 of 3")


class Outline(HTMLParser):
    """Tags that are closed in order, and whatever an element would fetch."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.fetched, self.tags = [], [], Counter()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.fetched += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_in_itself(done):
    page = (done[0] / "report.html").read_text()
    outline = Outline(page)
    assert outline.open == []
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in outline.fetched)
    assert not re.search(r"url\((?!#)|@import|<script|<link|<iframe", page)
    worst = sum(len(shown.worst) for shown in done[2].shown.values())
    assert outline.tags["img"] == 2 * demo.SHOWN + worst
    assert outline.tags["svg"] == 2 * 4  # loss, accuracy, ones and k, for each data set
    assert outline.tags["tr"] == 1 + 7
    assert page.count('class="ours"') == 2


def test_the_page_is_true_to_what_was_found(done):
    folder, _, found = done
    page = (folder / "report.html").read_text()
    assert "are bit-identical before the first task and after the last" in page
    assert "squares &lt;again&gt;" in page
    for row in found.rows:
        cells = f"<td>{100 * row.accuracy:.1f} %</td><td>{row.kilobytes:,.0f} kB</td>"
        assert cells in re.sub("</?b>", "", page)
    answers = [answer for shown in found.shown.values() for answer in shown.answers]
    right = sum(answer.predicted == answer.truth for answer in answers)
    worst = sum(len(shown.worst) for shown in found.shown.values())
    assert (page.count("✓"), page.count("✗")) == (right, len(answers) - right + worst)


def test_the_page_does_not_hide_a_change(done, tmp_path):
    _, _, found = done
    shown = {data: replace(one, same=False) for data, one in found.shown.items()}
    demo_page.write(replace(found, same=False, shown=shown), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "bit-identical" not in page
    assert "scores CHANGED" in page
    assert page.count("DIFFERENT, which is a bug") == 2


def test_the_share_of_the_most_frequent_class_is_shown(done):
    assert {shown.majority for shown in done[2].shown.values()} == {3 / 9}
    assert "the most frequent class is 33 % of the held-out ones" in (done[0] / "report.html").read_text()


def test_what_the_sizes_count_is_said_in_both_places(done):
    folder, said, _ = done
    for shown in (" ".join(said.split()), html.unescape((folder / "report.html").read_text())):
        assert "bits per weight: without head and description; separate copy: a whole network" in shown


def test_pace_leaves_validation_out(monkeypatch):
    clock = count(step=10)  # each look at it is ten seconds later
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: float(next(clock)))
    pace = callbacks.Clock()
    pace.begin(callbacks.Plan(["task"], 2, 2, 0, None))
    for _ in range(2):
        pace.step(0, 1, 32)
        pace.step(0, 2, 8)
        next(clock)  # validation
        pace.epoch({})
    assert (pace.images, pace.seconds) == (80, 40.0)


def test_without_matplotlib_nothing_is_trained(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FigureError, match="pip install"):
        demo.run(tmp_path / "demo", Console(file=io.StringIO()))
    assert not (tmp_path / "demo").exists()


def test_names_are_no_markup(done, tmp_path):
    _, _, found = done
    answers = [Answer(Image.new("L", (8, 8)), "<b>said</b>", 0.5, "<i>true</i>")]
    given = {"answers": answers, "worst": answers, "about": "<s>about</s>"}
    shown = {data: replace(one, **given) for data, one in found.shown.items()}
    demo_page.write(replace(found, backbone="<u>net</u>", shown=shown), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;said" in page
    assert not re.search("<[ius]>|<b>said", page)


def test_drawings_take_on_the_colours_of_the_page():
    records = [{"epoch": 1, "train_loss": 1.0}]
    drawn = [
        as_svg(draw([[lambda axes, name=name: draw_curves(axes, {name: records}, "loss")]]), name)
        for name in ("a", "b")
    ]
    assert all("currentColor" in svg and "#000000" not in svg for svg in drawn)
    bodies = [dict(re.findall(r'(id="[^"]+")(.*?)/>', svg, re.DOTALL)) for svg in drawn]
    shared = bodies[0].keys() & bodies[1].keys()
    assert all(bodies[0][name] == bodies[1][name] for name in shared)  # on one page the first is taken for both
