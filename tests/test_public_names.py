import subprocess
import sys

import bitgraft

NAMES = [
    "Anatomy",
    "Archive",
    "ArchiveError",
    "BackboneError",
    "BitgraftError",
    "Config",
    "Method",
    "Network",
    "Task",
    "TaskError",
    "compress",
    "fit",
    "method_names",
    "read_anatomy",
    "read_archive",
    "register_method",
    "resnet26",
    "wide_resnet",
]


def test_the_public_names_are_these():
    assert sorted(bitgraft.__all__) == NAMES


def test_every_name_resolves_to_what_is_called_so():
    for name in bitgraft.__all__:
        assert getattr(bitgraft, name).__name__ == name


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(bitgraft, "nothing_of_the_kind")


def test_dir_lists_the_public_names():
    assert set(NAMES) < set(dir(bitgraft))


def test_importing_the_package_loads_nothing_heavy():
    code = "import bitgraft, sys; print([m for m in ('torch', 'timm', 'numpy', 'safetensors') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
