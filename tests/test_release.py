"""What a release stands on: one version everywhere, workflows that call the Makefile's targets, forms that parse."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"])


def test_the_version_is_the_same_everywhere():
    problems = runpy.run_path(str(ROOT / ".ci" / "check_release.py"))["problems"]
    assert problems() == problems("v0.1.0") == []
    (said,) = problems("v9.9")
    assert said.startswith("the tag is v9.9, but the version is 0.1.0")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_yaml_can_be_read(file):
    assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict)


def test_workflows_call_what_people_call():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set()
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            called |= {step["run"].split()[1] for step in job["steps"] if "run" in step}
    assert called == {"check", "test", "docs", "dist"}
    assert called <= targets


def test_the_site_is_built_with_the_packages_of_its_extra():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    line = re.search(r"constraints\.txt (mkdocs-material .*)", (ROOT / "Makefile").read_text())
    assert line[1].replace('"', "").split() == [package.partition(">")[0] for package in extra]


README = re.findall(r"\]\((http[^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
PLACES = {
    "https://bitgraft.github.io/bitgraft/": "docs",
    "https://github.com/bitgraft/bitgraft/blob/main/": ".",
    "https://raw.githubusercontent.com/bitgraft/bitgraft/main/": ".",
}


@pytest.mark.parametrize("link", README)
def test_links_of_the_readme_lead_to_pages_and_files_that_exist(link):
    """They are whole addresses, so that they also work on a package index."""
    (base,) = [base for base in PLACES if link.startswith(base)]
    path = ROOT / PLACES[base] / link.removeprefix(base).rstrip("/")
    assert path.is_file() or path.with_suffix(".md").is_file() or (path / "README.md").is_file()


def test_the_readme_has_no_link_that_only_works_in_the_repository():
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links == README != []
