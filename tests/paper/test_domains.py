"""benchmarks/domains.py: which settings are chosen with a domain left out, and what the tables show."""

import json

import pytest
from records import record

from benchmarks import domains

NAMES = tuple(domains.DOMAINS)


def runs(row, val, test, seed=0, suite=domains.GRID, names=NAMES, **other):
    """A record per domain; `val` and `test` give its accuracy in per cent."""
    return [
        record(
            row,
            name,
            seed,
            suite=suite,
            selected={"val_accuracy": val(i) / 100, "test_accuracy": test(i) / 100},
            **other,
        )
        for i, name in enumerate(names)
    ]


def rows(tmp_path, *records, suites=(domains.GRID,), earlier=()):
    for name, held in (("records.jsonl", records), (domains.EARLIER, earlier)):
        if held:
            (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in held))
    return domains.collect(domains.read_with_earlier([tmp_path]), suites)


def test_the_domain_left_out_does_not_choose(tmp_path):
    """Setting a is best on every domain but the first, where b is far ahead: b wins unless that is left out."""
    a = runs("a", lambda i: 50 if i == 0 else 60, lambda i: 10, method="full")
    b = runs("b", lambda i: 99 if i == 0 else 57, lambda i: 20, method="full")
    grid = rows(tmp_path, *a, *b)
    assert [domains.chosen(grid, name) for name in NAMES] == ["a"] + ["b"] * (len(NAMES) - 1)
    line = next(line for line in domains.settings(grid).splitlines() if "left out" in line)
    assert line.split(" | ")[1:3] == ["10.0", "20.0"]
    assert line.endswith("| 19.0 |")


def test_means_need_every_domain_and_seeds_are_averaged(tmp_path):
    records = [
        *runs("full", lambda i: 50, lambda i: 60, seed=0, suite="domains"),
        *runs("full", lambda i: 50, lambda i: 70, seed=1, suite="domains"),
        *runs("lora", lambda i: 50, lambda i: 70, suite="domains", names=NAMES[1:]),
        *runs("full", lambda i: 50, lambda i: 90, suite="another"),
    ]
    found = rows(tmp_path, *records, suites=("domains",))
    assert (found["full"].mean(), found["lora"].mean()) == (65, None)
    assert found["full"].spread() == pytest.approx(50**0.5)
    assert "| **65.0** ± 7.1 |" in domains.comparison([("full", found["full"])])
    assert found["lora"].accuracy(NAMES[0]) is None


def test_runs_of_earlier_settings_are_marked_until_they_are_repeated(tmp_path):
    old = runs("full", lambda i: 50, lambda i: 60, method="full")
    new = runs("full", lambda i: 50, lambda i: 70, method="full")
    some, all_new = rows(tmp_path, *new[1:], earlier=old), rows(tmp_path, *new, earlier=old)
    assert some["full"].name.endswith(" *")
    assert (some["full"].accuracy(NAMES[0]), some["full"].accuracy(NAMES[1])) == (60, 70)
    assert not all_new["full"].name.endswith("*")


def test_the_ablation_compares_domains_that_both_have(tmp_path):
    ours = runs(domains.OURS, lambda i: 50, lambda i: 80, method="full")
    without = runs(domains.ABLATION[0], lambda i: 50, lambda i: 79 if i else 77, method="full", names=NAMES[:4])
    (line,) = domains.ablation(rows(tmp_path, *ours, *without)).splitlines()[2:]
    assert line.endswith("| +1.5 ± 0.5 | 4 of 4 |")


def test_tables_replace_those_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / domains.PAGE
    page.parent.mkdir(parents=True)
    page.write_text("before\n<!-- domains:rows -->\nold\n<!-- /domains -->\nafter\n")
    records = runs("full", lambda i: 50, lambda i: 60, suite="domains") + runs("classifier", lambda i: 50, lambda i: 40)
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    monkeypatch.setattr("sys.argv", ["domains", "records.jsonl"])
    domains.main()
    text = page.read_text()
    assert text.startswith("before\n<!-- domains:rows -->\n| ")
    assert text.endswith("| **60.0** |\n<!-- /domains -->\nafter\n")
    assert "old" not in text
