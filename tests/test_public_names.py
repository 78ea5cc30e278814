"""Public names: all exist, all are documented, and importing them is cheap."""

import re
import subprocess
import sys
from pathlib import Path

import bitgraft

ROOT = Path(__file__).parents[1]
PAGES = "\n".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_every_name_that_the_docs_use_exists():
    used = set(re.findall(r"\bbitgraft\.([A-Za-z_]\w*)\b(?!\.)", PAGES))
    modules = {path.stem for path in (ROOT / "src" / "bitgraft").iterdir()}
    assert used - modules <= set(bitgraft.__all__)
    assert "Network" in used


def test_every_public_name_is_documented():
    assert {name for name in bitgraft.__all__ if not re.search(rf"\b{name}\b", PAGES)} == set()


def test_every_name_resolves_to_an_object_of_that_name():
    for name in bitgraft.__all__:
        assert getattr(bitgraft, name).__name__ == name


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(bitgraft, "nothing_of_the_kind")


def test_dir_lists_the_public_names():
    assert set(bitgraft.__all__) < set(dir(bitgraft))


def test_importing_the_package_loads_nothing_heavy():
    code = "import bitgraft, sys; print([m for m in ('torch', 'timm', 'numpy', 'safetensors') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_explained_on_the_reference_page():
    page = (ROOT / "docs" / "api.md").read_text()
    for name in bitgraft.__all__:
        if not name.endswith(("Error", "Warning")):  # the module of errors draws their tree
            assert re.search(rf"\b{name}\b", page), name
            assert (getattr(bitgraft, name).__doc__ or name).partition("(")[0] != name, name  # a dataclass has its own
