"""Reports as files and as a command: formats, figures, what is printed."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.text import Text
from records import record, write

from bitgraft.cli import main as cli
from bitgraft.paper.figures import rendered
from bitgraft.paper.report.figures import Point, against_parameters
from bitgraft.paper.report.render import Cell, Line, Table, from_template, latex, markdown
from bitgraft.paper.report.results import Stat
from bitgraft.paper.report.tables import number
from bitgraft.paper.report.write import usual_place, write_report
from bitgraft.paper.scores import domain_titles

NASTY = "a|b_c & 50% <script> $x$ {#} ~^\\"
PNG = b"\x89PNG\r\n\x1a\n"
SEVERAL = [
    record(row, name, seed, 0.5 + 0.01 * seed + 0.1 * (row == "full"))
    for row in ("finetune", "simple", "full")
    for name in ("gtsrb", "dtd")
    for seed in range(2)
]


def table(title: str = "Full", heading: str = "GTSR") -> Table:
    best = number(Stat(80.04, 1.26, 3), 1)
    return Table(
        name="t",
        caption="caption",
        corner="Method",
        headings=("Params", heading),
        lines=(
            Line(title, (number(1.171, 2), Cell(best.text, best.value, best.sd, best.n, best.spread, "best"))),
            Line("Simple", (Cell("–"), Cell("79.0", 79.0, None, 1, "", "second"))),
        ),
        notes=("a note.",),
    )


@pytest.fixture
def report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    def run(*options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bitgraft", "report", str(tmp_path / "runs"), *options])
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return run


def test_markdown() -> None:
    assert markdown(table()) == "\n".join(
        [
            "**caption**",
            "",
            "| Method | Params |           GTSR |",
            "| :----- | -----: | -------------: |",
            "| Full   |   1.17 | **80.0** ± 1.3 |",
            "| Simple |      – |    <u>79.0</u> |",
            "",
            "- a note.",
        ]
    )


def test_latex() -> None:
    assert latex(table(title="PackNet ↓")).splitlines() == [
        r"\begin{table}[t]",
        r"\centering",
        r"\caption{caption. a note.}",
        r"\label{tab:t}",
        r"\begin{tabular}{lrr}",
        r"\hline",
        r"Method & Params & GTSR \\",
        r"\hline",
        r"PackNet $\downarrow$ & 1.17 & \textbf{80.0} $\pm$ 1.3 \\",
        r"Simple & -- & \underline{79.0} \\",
        r"\hline",
        r"\end{tabular}",
        r"\end{table}",
    ]


class Reader(HTMLParser):
    """The text of each cell, the tags seen, and whether all are closed."""

    VOID = ("meta", "img", "!doctype")

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.seen: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("th", "td"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"th", "td"} & set(self.open):
            self.cells[-1] += data


def test_html() -> None:
    reader = Reader()
    reader.feed(from_template("report.html", title="title", tables=[table()], drawings=[], origin="origin"))
    assert reader.open == []
    assert reader.cells == ["Method", "Params", "GTSR", "Full", "1.17", "80.0 ± 1.3", "Simple", "–", "79.0"]
    assert {"b", "u", "caption", "ul"} <= reader.seen


def test_names_cannot_break_a_format() -> None:
    odd = table(title=NASTY, heading=NASTY)
    reader = Reader()
    reader.feed(
        from_template("report.html", title=NASTY, tables=[odd], drawings=[("<svg></svg>", NASTY)], origin=NASTY)
    )
    assert reader.cells.count(NASTY) == 2
    assert "script" not in reader.seen
    bars = [line for line in markdown(odd).splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in bars} == {4}
    rows = [line for line in latex(odd).splitlines() if line.endswith(r" \\")]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {2}
    assert r"a|b\_c \& 50\% <script> \$x\$ \{\#\} \textasciitilde{}\textasciicircum{}\textbackslash{}" in rows[1]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 20), st.floats(0, 3000)), min_size=1, max_size=12))
def test_labels_in_a_figure_never_meet(values: list[tuple[float, float]]) -> None:
    points = [Point(f"Method {i}", params, Stat(value, None, 1)) for i, (params, value) in enumerate(values)]
    drawn = against_parameters(points, "S", "title")
    drawn.draw_without_rendering()
    boxes = [Text.get_window_extent(label) for label in drawn.axes[0].texts]  # without their arrows
    for place, box in enumerate(boxes):
        for other in boxes[:place]:
            beside = box.x0 < other.x1 and other.x0 < box.x1
            assert not beside or box.y0 >= other.y1 or other.y0 >= box.y1


def test_one_point_and_equal_points_can_be_drawn() -> None:
    point = Point("Full", 1.0, Stat(3000.0, None, 1))
    for points in ([point], [point] * 9):
        assert rendered(against_parameters(points, "S", "title"), "png").startswith(PNG)


def test_a_long_title_stays_within_its_figure() -> None:
    figure = against_parameters([Point("Full", 1.0, Stat(3.0, None, 1))], "S", "a rather long title of a suite " * 6)
    figure.draw_without_rendering()
    (title,) = figure.findobj(lambda one: getattr(one, "get_text", str)().startswith("a rather"))
    box = title.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_the_command_writes_every_format(tmp_path: Path, report) -> None:
    write(tmp_path / "runs", *SEVERAL)
    code, out, err = report("--out", str(tmp_path / "out"), "--published")
    assert (code, err) == (0, "")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {
        "report.md",
        "report.tex",
        "report.html",
        "mini-by-method.png",
        "mini-params.png",
        "records.jsonl",
    }
    assert all(str(tmp_path / "out" / name) in out for name in names)
    for name in ("mini-by-method.png", "mini-params.png"):
        picture = (tmp_path / "out" / name).read_bytes()
        assert picture.startswith(PNG)
        assert len(picture) < 300_000
    page = (tmp_path / "out" / "report.html").read_text()
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert page.count("<svg ") == 2  # the figures are inside, in the page's own colours
    assert not re.search(r"src=|href=\"http", page)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "**60.5** ± 0.7" in text
    assert "Full (paper)" in text
    assert "![mini, net: decathlon score S against parameters](mini-params.png)" in text
    assert (tmp_path / "out" / "report.tex").read_text().count(r"\begin{tabular}") == 3


def test_json_holds_the_numbers(tmp_path: Path, report) -> None:
    write(tmp_path / "runs", *SEVERAL)
    code, out, _ = report("--json", "--baseline", "finetune")
    told = json.loads(out)
    assert code == 0
    assert [one["name"] for one in told["tables"]] == ["mini-accuracies", "mini-scores", "mini-cost"]
    accuracies, scores, _ = told["tables"]
    full = {one["title"]: one["cells"] for one in accuracies["rows"]}["Full"]
    assert full[-1]["value"] == pytest.approx(60.5)
    assert (full[-1]["n"], full[-1]["mark"]) == (2, "best")
    base = {one["title"]: one["cells"] for one in scores["rows"]}["Fine-tuning"]
    assert base[1]["value"] == pytest.approx(250, abs=1)  # the mean of S over seeds, not S of the mean
    assert all(Path(file).is_file() for file in told["files"])
    assert {Path(file).parent for file in told["files"]} == {tmp_path / "runs" / "report"}


def test_a_second_report_reads_the_same_records(tmp_path: Path) -> None:
    """What a report leaves in the folder of runs is not taken for a record."""
    write(tmp_path / "runs", *SEVERAL)
    first = write_report(tmp_path / "runs", tmp_path / "runs" / "report")
    kept = {file: file.read_bytes() for file in first.files}
    second = write_report(tmp_path / "runs", tmp_path / "runs" / "report")
    assert second == first
    assert {file: file.read_bytes() for file in second.files} == kept


def test_what_is_committed_makes_the_same_report(tmp_path: Path) -> None:
    """The records of a report make it again, to the last byte, in the same place or elsewhere."""
    write(tmp_path / "runs", *SEVERAL, suite={"name": "mini", "form": "decathlon", "baseline": "finetune"})
    first = write_report(tmp_path / "runs", tmp_path / "docs" / "mini", published=True)
    kept = {file.name: file.read_bytes() for file in first.files}
    assert usual_place(tmp_path / "runs") == tmp_path / "runs" / "report"
    for source in (tmp_path / "docs" / "mini", tmp_path / "docs" / "mini" / "records.jsonl"):
        assert usual_place(source) == tmp_path / "docs" / "mini"
        again = write_report(source, tmp_path / "again", published=True)
        assert {file.name: file.read_bytes() for file in again.files} == kept
        write_report(source, usual_place(source), published=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "docs" / "mini").iterdir()} == kept


def test_the_page_says_where_its_records_come_from(tmp_path: Path) -> None:
    machine = {"system": "Linux", "processor": "x86", "cores": 2, "threads": 1, "gpu": None}
    about = {"machine": machine, "versions": {"bitgraft": "0.1", "torch": "9.9", "timm": "1"}}
    runs = [record(seed=seed, date=f"2026-11-1{seed}T10:00:00+00:00", **about) for seed in (6, 5)]
    write_report(write(tmp_path / "runs", *runs), tmp_path / "out")
    assert (tmp_path / "out" / "report.md").read_text().splitlines()[-1] == (
        "From 2 records, records.jsonl (2026-11-15 to 2026-11-16; bitgraft 0.1, torch 9.9; 2 cores, 1 thread "
        "per run, no GPU)."
    )


def test_figures_of_a_whole_decathlon_are_small_enough_to_commit(tmp_path: Path) -> None:
    runs = [
        record(f"row-{number}", name, seed, (40 + 7 * number + 3 * seed + len(name)) % 100 / 100, bits=10 * number)
        for number in range(12)
        for name in domain_titles()
        for seed in range(3)
    ]
    made = write_report(write(tmp_path / "runs", *runs), tmp_path / "out", published=True)
    sizes = [file.stat().st_size for file in made.files if file.suffix == ".png"]
    assert len(sizes) == 2
    assert max(sizes) < 300_000


def test_selected_epochs_and_validation(tmp_path: Path, report) -> None:
    write(tmp_path / "runs", *SEVERAL)
    assert "25.0" in report("--selected")[1]
    code, out, _ = report("--validation")
    assert code == 0
    assert "in per cent on the validation set" in out
    code, _, err = report("--validation", "--published")
    assert code == 2
    assert "give either --validation or --published" in err


def test_several_suites_and_backbones_keep_their_files_apart(tmp_path: Path) -> None:
    write(tmp_path / "runs", record(), record(backbone="other/net"), record(suite="ab", dataset="mine"))
    names = {file.name for file in write_report(tmp_path / "runs", tmp_path / "out").files}
    assert {"ab-by-method.png", "mini-net-params.png", "mini-other-net-params.png"} <= names
    assert {file.name for file in (tmp_path / "out").iterdir()} == names


def test_only_unlabelled_tests_make_tables_of_dashes(tmp_path: Path) -> None:
    write(tmp_path / "runs", record(test=None))
    made = write_report(tmp_path / "runs", tmp_path / "out")
    assert any("Missing: Full on all." in note for note in made.tables[0].notes)
    assert not any(file.suffix == ".png" for file in made.files)


def test_an_ablation_has_no_figure_of_parameters(tmp_path: Path) -> None:
    suite = {"name": "mini", "form": "ablation"}
    made = write_report(write(tmp_path / "runs", *SEVERAL, suite=suite), tmp_path / "out", published=True)
    assert [file.name for file in made.files if file.suffix == ".png"] == ["mini-by-method.png"]


def test_without_matplotlib_there_are_tables_and_a_word(
    tmp_path: Path, report, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "runs", *SEVERAL)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = report()
    assert code == 0
    assert err == "no figures: matplotlib is not installed; run pip install matplotlib\n"
    assert "report.html" in out
    assert ".png" not in (tmp_path / "runs" / "report" / "report.html").read_text()


def test_a_fault_is_one_sentence_and_nothing_is_written(tmp_path: Path, report) -> None:
    code, out, err = report()
    assert (code, out) == (1, "")
    assert "there is no folder" in err
    write(tmp_path / "runs", *SEVERAL)
    code, out, err = report("--baseline", "nobody")
    assert (code, out) == (1, "")
    assert err == "error: --baseline nobody: neither a row of mini nor a file\n"
    assert not (tmp_path / "runs" / "report").exists()
    (tmp_path / "file").touch()
    code, out, err = report("--output", str(tmp_path / "file" / "report"))
    assert (code, out) == (2, "")
    assert f"{tmp_path / 'file'} is a file, not a folder" in err


def test_a_baseline_without_a_score_is_refused(tmp_path: Path, report) -> None:
    write(tmp_path / "runs", *SEVERAL, suite={"name": "mini", "form": "accuracy"})
    code, out, err = report("--baseline", "nobody")
    assert (code, out) == (1, "")
    assert err == "error: --baseline nobody: mini has no score S that a baseline would change\n"


def test_a_report_needs_neither_torch_nor_for_help_matplotlib(tmp_path: Path) -> None:
    write(tmp_path / "runs", *SEVERAL)
    code = f"""
import sys
from bitgraft.cli.main import app
app(["report", "--help"], standalone_mode=False)
app(["score", "--help"], standalone_mode=False)
early = {{"matplotlib", "numpy", "torch"}} & set(sys.modules)
app(["report", {str(tmp_path / "runs")!r}], standalone_mode=False)
print(sorted(early), "torch" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[] False"


@pytest.mark.parametrize("command", ["report", "score"])
def test_help_ends_with_lines_to_paste(command: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bitgraft", command, "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith(f"    bitgraft {command}")
