"""Both notebooks run from top to bottom, and are stored without outputs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))
RUN = """
import sys
import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip="kernel")  # a socket in this folder, no ports
NotebookClient(nbformat.read(sys.argv[1], as_version=4), km=manager, timeout=900).execute()
"""


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_it_runs(book, tmp_path, monkeypatch):
    """In a process of its own, with jupyter's own warnings."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    done = subprocess.run([sys.executable, "-c", RUN, book], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_it_holds_no_outputs(book):
    assert not any(cell.get("outputs") for cell in json.loads(book.read_text(encoding="utf-8"))["cells"])
