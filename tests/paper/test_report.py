"""From records to tables: what is read, what is refused, and the numbers in the cells."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import record, write

from bitgraft.errors import DataError
from bitgraft.paper.report.records import Suite, as_lines, read_records, read_suites
from bitgraft.paper.report.render import Table
from bitgraft.paper.report.results import (
    Results,
    gather,
    published_table,
    published_tables,
    spelled_out,
    stat,
)
from bitgraft.paper.report.tables import (
    ablation_table,
    accuracy_table,
    baselines_of,
    cost_table,
    decathlon_table,
    marks,
    score_table,
    tables,
)
from bitgraft.paper.scores import challenge_baselines, decathlon_score, domain_titles


def results(
    folder: Path, *records: Mapping[str, Any], suite: Mapping[str, Any] | None = None, **options: Any
) -> Results:
    write(folder, *records, suite=suite)
    (one,) = gather(read_records(folder), read_suites(folder), **options)
    return one


def texts(table: Table) -> dict[str, list[str]]:
    return {line.title: [cell.text + cell.spread for cell in line.cells] for line in table.lines}


def test_published_means_and_totals_agree_with_their_cells() -> None:
    """A slip of the pen in the packaged tables would show here."""
    tables = published_tables()
    assert [(t.form, t.backbone, len(t.rows), len(t.datasets)) for t in tables] == [
        ("accuracy", "resnet50", 8, 6),
        ("accuracy", "densenet121", 8, 6),
        ("scores", "wrn-28-4", 10, 10),
        ("decathlon", "wrn-28-4", 10, 10),
        ("ablation", "resnet50", 10, 5),
    ]
    for row in tables[2].rows:
        assert sum(row.values.values()) == pytest.approx(row.whole, abs=1)
    for row in tables[3].rows:
        assert statistics.fmean(row.values.values()) == pytest.approx(row.whole, abs=0.1)
    ablation, main = ({row.row: row.values for row in tables[i].rows} for i in (4, 0))
    for row in ("simple", "full", "piggyback-bn"):  # the same runs in two tables
        assert {name: main[row][name] for name in ablation[row]} == ablation[row]
    assert all(len(row.k) == 4 for row in tables[4].rows)


def test_the_published_table_is_that_of_the_backbone() -> None:
    assert published_table("accuracy", "densenet121", ["cubs"]).backbone == "densenet121"
    assert published_table("accuracy", "other", ["cubs"]).backbone == "resnet50"
    assert published_table("accuracy", "resnet50", ["mine"]) is None


def test_records_are_found_at_any_depth_and_gathered_by_suite_and_backbone(tmp_path: Path) -> None:
    write(tmp_path, record(), record(backbone="other"), record(suite="second"), record(seed=1))
    found = gather(read_records(tmp_path), {})
    assert [(one.suite.name, one.backbone, len(one.rows["full"].runs)) for one in found] == [
        ("mini", "net", 2),
        ("mini", "other", 1),
        ("second", "net", 1),
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 2}, "it has format 2, but this version reads format 1"),
        ({"row": None}, "row is None, not a text"),
        ({"last": {"test_accuracy": 80.0}}, "last: test_accuracy is 80.0, not between 0 and 1"),
        ({"last": {"test_accuracy": float("nan")}}, "is nan, not between 0 and 1"),
        ({"selected": {"val_accuracy": -1}}, "selected: val_accuracy is -1, not between 0 and 1"),
        ({"bits": -1}, "bits is -1"),
        ({"bits": "many"}, "bits is 'many', not a number"),
        ({"seconds": float("inf")}, "seconds is inf"),
        ({"config": 3}, "config is 3, not a table"),
    ],
)
def test_records_that_make_no_sense_are_refused_with_their_file(
    tmp_path: Path, change: Mapping[str, Any], told: str
) -> None:
    write(tmp_path, record() | change)
    with pytest.raises(DataError, match=told) as refused:
        read_records(tmp_path)
    assert str(tmp_path / "deep" / "0" / "record.json") in str(refused.value)


def test_a_record_without_a_key_and_a_torn_one_are_refused(tmp_path: Path) -> None:
    whole = record()
    del whole["bits"]
    write(tmp_path / "a", whole)
    with pytest.raises(DataError, match="lacks 'bits'"):
        read_records(tmp_path / "a")
    write(tmp_path / "b", record())
    file = tmp_path / "b" / "deep" / "0" / "record.json"
    file.write_text(file.read_text()[:50])
    with pytest.raises(DataError, match="cannot read"):
        read_records(tmp_path / "b")
    file.write_text("[]")
    with pytest.raises(DataError, match="is not a JSON object"):
        read_records(tmp_path / "b")


def test_an_empty_folder_and_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no record\.json"):
        read_records(tmp_path)
    with pytest.raises(DataError, match="there is no folder"):
        read_records(tmp_path / "nowhere")


def test_the_same_run_twice_is_refused_unless_it_is_a_copy(tmp_path: Path) -> None:
    write(tmp_path / "a", record(), record(test=0.1))
    with pytest.raises(DataError, match=r"record the same run \(full on gtsrb, seed 0\)"):
        read_records(tmp_path / "a")
    write(tmp_path / "b", record(), record())
    assert len(read_records(tmp_path / "b")) == 1


SUITE = {
    "name": "mini",
    "form": "decathlon",
    "title": "Mini ↓",
    "baseline": "finetune",
    "rows": [{"row": "full", "title": "Full"}, {"row": "finetune", "title": "Finetune"}],
    "datasets": [{"name": "gtsrb", "title": "Signs"}, {"name": "dtd", "title": "Textures"}],
}


def test_records_in_one_file_are_the_same_records(tmp_path: Path) -> None:
    rows = [record(row, name, seed) for row in ("finetune", "full") for name in ("gtsrb", "dtd") for seed in (1, 0)]
    write(tmp_path / "runs", *rows, suite=SUITE)
    records, suites = read_records(tmp_path / "runs"), read_suites(tmp_path / "runs")
    file = tmp_path / "kept" / "deeper" / "records.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(as_lines(records, suites))
    assert len(file.read_text().splitlines()) == 1 + 8
    for source in (file, tmp_path / "kept"):
        assert read_suites(source) == suites
        assert {one.key: one.content for one in read_records(source)} == {one.key: one.content for one in records}
        assert as_lines(read_records(source), read_suites(source)) == file.read_text()
    (tmp_path / "runs" / "records.jsonl").write_text(json.dumps(record("stale")) + "\n")
    assert {one.row for one in read_records(tmp_path / "runs")} == {"finetune", "full"}  # files of runs come first


def test_a_bad_line_is_named_by_its_number(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(record()) + "\n\n" + json.dumps(record(seed=1)) + "\n{torn\n")
    with pytest.raises(DataError, match=r"cannot read .*records\.jsonl, line 4: "):
        read_records(file)
    file.write_text(json.dumps({**record(), "bits": -1}))
    with pytest.raises(DataError, match=r"records\.jsonl, line 1 is not a record of a run: bits is -1"):
        read_records(file)


@pytest.mark.parametrize(
    "suite",
    [{"form": "decathlon"}, {"name": "a", "form": "other"}, {"name": "a", "rows": [{}]}, {"name": "a", "rows": 3}],
)
def test_a_suite_that_makes_no_sense_is_refused(tmp_path: Path, suite: Mapping[str, Any]) -> None:
    write(tmp_path, record(), suite=suite)
    with pytest.raises(DataError, match=r"suite\.json is not a description of a suite"):
        read_suites(tmp_path)


def test_order_and_titles_come_from_the_suite_and_the_rest_follows_by_name(tmp_path: Path) -> None:
    suite = {
        "name": "mini",
        "form": "accuracy",
        "rows": [{"row": "simple", "title": "Simple!"}, {"row": "never"}],
        "datasets": [{"name": "z", "title": "Z"}],
    }
    rows = [record(row, name) for row in ("simple", "full", "dan") for name in ("z", "b", "a")]
    one = results(tmp_path, *rows, suite=suite)
    assert {name: row.title for name, row in one.rows.items()} == {
        "simple": "Simple!",
        "never": "never",
        "dan": "Dan",
        "full": "Full",
    }
    assert one.datasets == {"z": "Z", "a": "a", "b": "b"}


def test_without_a_suite_the_domains_say_the_form(tmp_path: Path) -> None:
    one = results(tmp_path / "a", record(dataset="omniglot"), record(dataset="dtd"))
    assert one.form == "decathlon"
    assert list(one.datasets) == ["dtd", "omniglot"]
    assert results(tmp_path / "b", record(dataset="omniglot"), record(dataset="mine")).form == "accuracy"


@given(st.lists(st.floats(0, 100), min_size=2, max_size=6))
def test_spread_is_the_textbooks(values: list[float]) -> None:
    found = stat(values)
    mean = sum(values) / len(values)
    assert found.mean == pytest.approx(mean)
    assert found.sd == pytest.approx((sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5, abs=1e-9)
    assert found.n == len(values)


def test_no_seed_and_one_seed() -> None:
    assert stat([]) is None
    assert stat([3.0]).sd is None


def test_means_totals_and_their_spread_go_by_seed(tmp_path: Path) -> None:
    grid = {("gtsrb", 0): 0.9, ("gtsrb", 1): 0.7, ("dtd", 0): 0.3, ("dtd", 1): 0.5}
    one = results(tmp_path, *(record("full", name, seed, test) for (name, seed), test in grid.items()))
    mean = one.rows["full"].total(one.datasets, statistics.fmean)
    assert (mean.mean, mean.sd, mean.n) == (pytest.approx(60), pytest.approx(0), 2)  # 60 for either seed
    assert one.rows["full"].cell("gtsrb").sd == pytest.approx(statistics.stdev([90, 70]))


def test_seeds_that_differ_between_data_sets_give_no_spread_of_the_mean(tmp_path: Path) -> None:
    one = results(
        tmp_path, record("full", "gtsrb", 0, 0.9), record("full", "gtsrb", 1, 0.7), record("full", "dtd", 0, 0.4)
    )
    mean = one.rows["full"].total(one.datasets, statistics.fmean)
    assert (mean.mean, mean.sd, mean.n) == (pytest.approx(60), None, 1)


def test_last_epoch_by_default_and_selected_when_asked(tmp_path: Path) -> None:
    assert results(tmp_path / "a", record()).rows["full"].values["gtsrb"] == {0: pytest.approx(80)}
    one = results(tmp_path / "b", record(), selected=True)
    assert one.rows["full"].values["gtsrb"] == {0: pytest.approx(25)}
    assert "epoch selected on validation" in decathlon_table(one).caption
    blind = results(tmp_path / "c", record(selected=None), selected=True)
    assert blind.rows["full"].values["gtsrb"] == {}


def test_validation_accuracies_are_shown_when_asked(tmp_path: Path) -> None:
    one = results(tmp_path / "a", record(), validation=True)
    assert one.rows["full"].values["gtsrb"] == {0: pytest.approx(50)}
    assert "on the validation set, last epoch" in decathlon_table(one).caption
    one = results(tmp_path / "b", record(), validation=True, selected=True)
    assert one.rows["full"].values["gtsrb"] == {0: pytest.approx(60)}


OWN = [record("original", "imagenet", test=0.762, method="classifier", bits=0)]


def test_on_the_backbones_own_data_every_row_has_its_accuracy(tmp_path: Path) -> None:
    runs = [
        record(row, "cubs", seed, 0.8 + 0.01 * seed, bits=bits)
        for row, bits in (("packnet", 200), ("full", 100), ("finetune", 1000), ("adapters-joint", 100))
        for seed in range(3)
    ]
    suite = {"name": "mini", "form": "accuracy", "datasets": [{"name": "imagenet", "title": "ImageNet"}]}
    one = results(tmp_path, *OWN, *runs, suite={**suite, "rows": [{"row": "never"}]})
    table = accuracy_table(one)
    assert table.headings == ("never", "Adapters-joint", "Fine-tuning", "Full", "Packnet")
    assert texts(table) == {
        "ImageNet": ["–", "–", "76.2", "76.2", "76.2"],
        "cubs": ["–", *["81.0 ± 1.0"] * 4],
        "# Params": ["–", "–", "2.00", "1.10", "1.20"],
    }
    assert "over 3 seeds" in table.caption  # that of the backbone was tried once, and is not counted
    said = "all rows share its accuracy (except joint training, which changes the backbone)."
    assert any(note.endswith(said) for note in table.notes)
    assert any("is not pruned here" in note for note in table.notes)
    assert "Missing: never on all; Adapters-joint on ImageNet." in table.notes
    mean = one.rows["full"].total(one.datasets, statistics.fmean)
    assert (mean.mean, mean.n) == (pytest.approx((76.2 + 81) / 2), 3)
    assert mean.sd == pytest.approx(0.5)
    assert [line.title for line in cost_table(one).lines] == [
        "never",
        "Adapters-joint",
        "Fine-tuning",
        "Full",
        "Packnet",
    ]


def test_a_joint_row_that_trained_on_the_backbones_data_has_its_own_accuracy(tmp_path: Path) -> None:
    runs = [record("adapters-joint", "imagenet", test=0.5, bits=100), record("full", "cubs")]
    one = results(tmp_path, *OWN, *runs, suite={"name": "mini", "form": "accuracy"})
    assert one.rows["adapters-joint"].values["imagenet"] == {0: 50}
    assert one.rows["full"].values["imagenet"] == {0: pytest.approx(76.2)}
    assert one.rows["full"].parameters(one.datasets) == pytest.approx(1.1)


def test_the_backbone_alone_is_a_row_while_there_is_no_other(tmp_path: Path) -> None:
    table = accuracy_table(results(tmp_path, *OWN, suite={"name": "mini", "form": "accuracy"}))
    assert texts(table)["imagenet"] == ["76.2"]


def test_parameters_add_up_over_data_sets_not_over_seeds(tmp_path: Path) -> None:
    runs = [record("full", name, seed, bits=bits) for name, bits in (("gtsrb", 100), ("dtd", 300)) for seed in range(3)]
    one = results(tmp_path, *runs, record("simple", "dtd"))
    assert one.rows["full"].parameters(one.datasets) == pytest.approx((1000 + 100 + 300) / 1000)
    assert one.rows["simple"].parameters(one.datasets) is None  # on one data set of two it says nothing


def slow_marks(shown: list[float | None]) -> list[str | None]:
    """By the rank of each: one more than how many are better."""
    there = [value for value in shown if value is not None]
    ranks = [None if value is None else 1 + sum(other > value for other in there) for value in shown]
    if len(there) < 2 or max(there) <= 0:
        return [None] * len(shown)
    return [{1: "best", 2: "second"}.get(rank) for rank in ranks]


@given(st.lists(st.one_of(st.none(), st.integers(0, 4).map(float)), max_size=8))
def test_marks_are_ranks(shown: list[float | None]) -> None:
    assert marks(shown) == slow_marks(shown)


def test_accuracy_table_has_data_sets_down_and_parameters_last(tmp_path: Path) -> None:
    suite = {
        "name": "mini",
        "form": "accuracy",
        "rows": [{"row": row} for row in ("classifier", "simple", "full", "dan", "finetune")],
    }
    tests = {
        "classifier": (0.5, 0.99),
        "simple": (0.8, 0.7),
        "full": (0.8, 0.75),
        "dan": (0.6, None),
        "finetune": (0.9, 0.9),
    }
    runs = [
        record(row, name, test=test)
        for row, some in tests.items()
        for name, test in zip(("cubs", "cars"), some, strict=True)
    ]
    table = accuracy_table(results(tmp_path, *runs, suite=suite))
    assert (table.corner, table.headings) == ("Dataset", ("classifier", "simple", "full", "dan", "finetune"))
    assert texts(table) == {
        "cars": ["99.0", "70.0", "75.0", "–", "90.0"],
        "cubs": ["50.0", "80.0", "80.0", "60.0", "90.0"],
        "# Params": ["1.20"] * 5,
    }
    found = {line.title: [cell.mark for cell in line.cells] for line in table.lines}
    assert found["cars"] == [None, "second", "best", None, None]  # references do not compete
    assert found["cubs"] == [None, "best", "best", None, None]
    assert found["# Params"] == [None] * 5
    assert "Missing: dan on cars." in table.notes
    assert "Best in bold, second underlined; references, not ranked: classifier, finetune." in table.notes


def test_published_columns_stand_beside_ours(tmp_path: Path) -> None:
    table = accuracy_table(
        results(tmp_path, record("full", "cubs"), record("full", "mine"), suite={"name": "mini", "form": "accuracy"}),
        True,
    )
    assert table.headings[0] == "Full"
    assert table.headings[-2:] == ("Full (paper)", "Fine-tuning (paper)")
    assert texts(table)["cubs"][-2:] == ["82.4", "82.8"]
    assert texts(table)["mine"][-2:] == ["–", "–"]
    assert texts(table)["# Params"][-2:] == ["1.17", "6"]
    assert not any("Missing" in note for note in table.notes)


def all_domains(test: float = 0.9) -> list[dict[str, Any]]:
    return [record("full", name, test=test) for name in domain_titles()]


def test_decathlon_tables_have_the_papers_columns_and_its_printed_wholes(tmp_path: Path) -> None:
    one = results(tmp_path, *all_domains())
    table = decathlon_table(one, True)
    assert table.headings == ("Params", *map(spelled_out, domain_titles().values()), "Mean")
    assert texts(table)["Full"] == ["2.00", *["90.0"] * 10, "90.0"]
    assert texts(table)["Full (paper)"][-2:] == ["48.6", "77.2"]
    scores = score_table(one, challenge_baselines(), True)
    assert texts(scores)["Piggyback (paper)"][-1] == "2838"  # as printed, though its cells add up to 2837
    expected = [decathlon_score(10, error) for error in challenge_baselines().errors.values()]
    assert texts(scores)["Full"][1:] == [f"{value:.0f}" for value in [*expected, sum(expected)]]
    assert not any("not comparable" in note for note in scores.notes)


def test_on_a_subset_the_total_is_over_what_is_there_and_says_so(tmp_path: Path) -> None:
    one = results(tmp_path, *all_domains()[:3])
    scores = score_table(one, challenge_baselines(), True)
    assert any("covers 3 data sets" in note and "not comparable" in note for note in scores.notes)
    assert texts(scores)["Full (paper)"][1:] == ["262", "164", "246", str(262 + 164 + 246)]


def test_score_over_seeds_is_the_mean_of_scores(tmp_path: Path) -> None:
    one = results(tmp_path, record(test=0.96), record(seed=1, test=0.99))
    each = [decathlon_score(4, 2.47), decathlon_score(1, 2.47)]
    (cell,) = score_table(one, challenge_baselines()).lines[0].cells[-1:]
    assert (cell.value, cell.sd, cell.n) == (
        pytest.approx(statistics.fmean(each)),
        pytest.approx(statistics.stdev(each)),
        2,
    )


def test_a_row_can_be_the_baseline(tmp_path: Path) -> None:
    one = results(tmp_path, record("finetune", test=0.9), record("full", test=0.95), record("bare", test=None))
    baselines = baselines_of(one, "finetune")
    assert baselines.errors == {"gtsrb": pytest.approx(10)}
    assert texts(score_table(one, baselines))["Fine-tuning"][-1] == "250"
    with pytest.raises(DataError, match="bare cannot be the baseline: it has no result, or an error of 0, on gtsrb"):
        baselines_of(one, "bare")
    with pytest.raises(DataError, match="neither a row of mini nor a file"):
        baselines_of(one, "nothing")


def test_a_suites_own_baseline_is_used_without_asking(tmp_path: Path) -> None:
    grid = {"finetune": (0.9, 0.6), "full": (0.95, 0.6)}
    rows = [
        record(row, name, test=test)
        for row, some in grid.items()
        for name, test in zip(("gtsrb", "dtd"), some, strict=True)
    ]
    one = results(tmp_path, *rows, suite=SUITE)
    _, scores, _ = tables(one)
    assert texts(scores)["Fine-tuning"][1:] == ["250", "250", "500"]
    assert texts(scores)["Full"][1:] == [f"{decathlon_score(5, 10):.0f}", "250", f"{decathlon_score(5, 10) + 250:.0f}"]
    assert scores.notes[0].startswith("S is relative to Fine-tuning in this table")
    _, challenge, _ = tables(results(tmp_path / "b", *rows, suite={**SUITE, "baseline": None}))
    assert challenge.notes[0].startswith("S is relative to the challenge's baselines")


def test_while_the_suites_baseline_is_not_there_the_rest_of_the_report_is(tmp_path: Path) -> None:
    rows = [record("finetune", "gtsrb"), record("full", "gtsrb"), record("full", "dtd")]
    one = results(tmp_path / "a", *rows, suite=SUITE)
    made = tables(one)
    assert [table.name for table in made] == ["accuracies", "cost"]
    assert made[0].notes[-1].startswith("No S yet: the baseline row finetune lacks results")
    with pytest.raises(DataError, match="finetune cannot be the baseline: it has no result, or an error of 0, on dtd"):
        tables(one, baseline="finetune")
    one = results(tmp_path / "b", *rows[:2], suite=SUITE)  # nobody was tried on dtd
    assert [table.name for table in tables(one)] == ["accuracies", "scores", "cost"]


def test_a_data_set_outside_the_challenge_needs_a_baseline(tmp_path: Path) -> None:
    one = results(tmp_path, record(dataset="mine"), suite={"name": "mini", "form": "decathlon"})
    with pytest.raises(DataError, match="no baseline error for mine"):
        score_table(one, challenge_baselines())


def test_number_of_seeds_is_in_the_caption_or_where_it_differs_in_the_cell(tmp_path: Path) -> None:
    same = [record(row, seed=seed, test=0.8 + 0.01 * seed) for row in ("full", "simple") for seed in range(3)]
    table = decathlon_table(results(tmp_path / "a", *same))
    assert "mean ± standard deviation over 3 seeds" in table.caption
    assert texts(table)["Full"][1] == "81.0 ± 1.0"
    table = decathlon_table(results(tmp_path / "b", *same[:-1]))
    assert "(number of seeds)" in table.caption
    assert [texts(table)[row][1] for row in ("Full", "Simple")] == ["81.0 ± 1.0 (3)", "80.5 ± 0.7 (2)"]
    assert "one seed" in decathlon_table(results(tmp_path / "c", record())).caption


def test_seeds_with_other_settings_are_pointed_out(tmp_path: Path) -> None:
    one = results(tmp_path, record(), record(seed=1, config={"epochs": 4, "seed": 1}))
    assert "Seeds of one cell were run with different settings: Full on Traffic signs." in decathlon_table(one).notes


def test_ablation_says_what_is_learned(tmp_path: Path) -> None:
    runs = [
        record("piggyback-bn-k1", method="piggyback-bn", options={"k1": "learn"}),
        record("simple"),
        record("no-bias", method="simple", options={"k1": 0.0}),
        record("full"),
        record("alien", method="alien"),
    ]
    table = ablation_table(results(tmp_path, *runs, suite={"name": "mini", "form": "ablation"}), True)
    assert table.headings == ("k0", "k1", "k2", "k3", "gtsrb")
    ks = {title: cells[:4] for title, cells in texts(table).items()}
    assert ks == {
        "Piggyback-bn-k1": ["0", "✓", "0", "1"],
        "Simple": ["1", "✓", "✓", "0"],
        "No-bias": ["1", "0", "✓", "0"],
        "Full": ["1", "✓", "✓", "✓"],
        "Alien": ["–"] * 4,
    }


def test_cost_is_relative_to_finetuning_on_the_same_data_sets(tmp_path: Path) -> None:
    def run(row: str, name: str, seconds: float, memory: float | None) -> dict[str, Any]:
        return record(row, name, seconds=seconds, peak_memory=memory)

    one = results(
        tmp_path,
        run("finetune", "gtsrb", 10, 2e6),
        run("finetune", "dtd", 40, 4e6),
        run("full", "gtsrb", 20, 3e6),
        run("full", "dtd", 20, None),
        run("dan", "dtd", 60, 4e6),
    )
    assert texts(cost_table(one)) == {
        "Fine-tuning": ["50.00", "1.00", "3", "1.00"],
        "Full": ["40.00", "1.00", "3", "1.50"],  # twice and half as long
        "Dan": ["120.00", "1.50", "4", "1.00"],
    }


def test_the_processors_time_is_shown_where_it_was_recorded(tmp_path: Path) -> None:
    runs = [record("finetune", processor_seconds=5.0), record("full", processor_seconds=6.0), record("dan")]
    table = cost_table(results(tmp_path, *runs))
    assert table.headings[2:4] == ("processor ms", "relative processor time")
    assert {title: cells[2:4] for title, cells in texts(table).items()} == {
        "Fine-tuning": ["10.00", "1.00"],
        "Full": ["12.00", "1.20"],
        "Dan": ["–", "–"],
    }
    assert len(set(table.headings)) == len(table.headings)
    assert "Relative to Fine-tuning: the geometric mean over the data sets that both rows have." in table.notes


def test_cost_without_finetuning_says_so(tmp_path: Path) -> None:
    table = cost_table(results(tmp_path, record(), record(seed=1, machine={"cpu": "two"}, seconds=None)))
    assert texts(table)["Full"] == ["20.00", "–", "2", "–"]
    assert "No relative cost: there is no fine-tuning row." in table.notes


def test_a_suite_without_records_of_its_name_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, record(), suite={"name": "another", "rows": [{"row": "x"}]})
    (one,) = gather(read_records(tmp_path), read_suites(tmp_path))
    assert one.suite == Suite("mini")
    assert list(one.rows) == ["full"]
