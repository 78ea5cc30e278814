"""Both notebooks run from top to bottom."""

import os
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

BOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("default")  # of jupyter's own
@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_it_runs(book, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(tmp_path / "kernel"))  # no ports
    notebook = nbformat.read(book, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, km=manager, timeout=600, resources={"metadata": {"path": os.fspath(tmp_path)}}).execute()
