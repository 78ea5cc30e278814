"""What a release stands on: one version everywhere, workflows that call the Makefile's targets, forms that parse."""

import re
import runpy
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
