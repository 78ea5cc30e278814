"""benchmarks/curve.py: where bits per weight come from, and which rows are plotted."""

import json

import pytest
from records import record, write

from benchmarks import curve

DOMAINS = ("a", "b")


def run(row, seed=0, test=0.5, domains=DOMAINS, **other):
    accuracies = {"epoch": 1, "val_accuracy": 0.5, "test_accuracy": test}
    return [record(row, name, seed, selected=accuracies, **other) for name in domains]


def lines(path, records):
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def test_records_alone_give_the_points(tmp_path):
    runs = [*run("full", 0, 0.6, bits_per_weight=1.25), *run("full", 1, 0.7, bits_per_weight=1.75)]
    file, folder = lines(tmp_path / "records.jsonl", runs), write(tmp_path / "runs", *runs)
    (point,) = curve.points(curve.read([file], []))
    assert (point["backbone"], point["row"], point["seeds"], point["domains"]) == ("net", "Full", 2, 2)
    assert (point["bits"], point["accuracy"]) == (1.5, pytest.approx(65))
    assert point["spread"] == pytest.approx(50**0.5)
    assert curve.points(curve.read([folder], [])) == [point]


def test_older_records_take_the_bits_of_the_last_figure(tmp_path, capsys):
    old = run("full") + run("lora") + run("norms", domains=DOMAINS[:1])
    file = lines(tmp_path / "records.jsonl", old)
    earlier = [{"backbone": "net", "row": "Full", "bits": 1.37}, {"backbone": "other", "row": "Lora", "bits": 3.0}]
    assert [(point["row"], point["bits"]) for point in curve.points(curve.read([file], earlier))] == [("Full", 1.37)]
    said = capsys.readouterr().err
    assert "left out Lora on net" in said
    assert "Norms" not in said  # it lacks a domain, not bits
    new = lines(tmp_path / "new.jsonl", run("full", seed=1, bits_per_weight=2.37))
    (point, *_) = curve.points(curve.read([file, new], earlier))
    assert point["bits"] == pytest.approx(1.87)


def test_trials_of_other_settings_are_not_plotted(tmp_path):
    runs = [*run("full", bits_per_weight=1.25), *run("full-2", bits_per_weight=1.25, title="Full, 4e-3")]
    (point,) = curve.points(curve.read([lines(tmp_path / "records.jsonl", runs)], []))
    assert point["row"] == "Full"


def test_the_command_writes_the_figure_and_the_points(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "records.jsonl", run("full", bits_per_weight=1.25) + run("classifier", bits_per_weight=0.0))
    monkeypatch.setattr("sys.argv", ["curve", "records.jsonl", "--output", "c.svg", "--json", "c.json"])
    curve.main()
    assert "| net | Full | 1.25 | 50.0 | 1 | 2 |" in capsys.readouterr().out
    points = json.loads((tmp_path / "c.json").read_text())
    assert [list(point) for point in points] == [
        ["backbone", "row", "bits", "accuracy", "spread", "seeds", "domains"]
    ] * 2
    assert (tmp_path / "c.svg").read_text().lstrip().startswith("<?xml")
