"""What the docs say of the command line is there: every command has its section, every option that is named exists."""

import re
import shlex
import shutil
from itertools import takewhile
from pathlib import Path

import pytest
import timm
import torch
import typer
from images import NET, bitgraft, furnish
from torch.utils.data import TensorDataset

import bitgraft as package
from bitgraft import Network, load_backbone
from bitgraft.cli.main import app
from bitgraft.training import budget

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
COMMANDS = typer.main.get_command(app).commands


def test_every_command_has_a_section_with_what_it_prints():
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    sections = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        for name in re.split(r", | and ", title.partition(":")[0]):
            sections[name.strip().partition(" ")[0]] = body
    assert set(COMMANDS) <= set(sections)
    for name in COMMANDS:
        assert re.search(rf"^\$ bitgraft {name}\b", sections[name], flags=re.MULTILINE), name
    assert all(f"\n  {name} " in text for name in COMMANDS)  # in the help at the top


def lines_to_paste(page):
    """What follows `bitgraft` at the beginning of a command in a block, without remarks."""
    for line in page.read_text(encoding="utf-8").splitlines():
        if re.match(r"\$ |    ", line):
            for part in line.removeprefix("$").split("&&"):
                if found := re.match(r"\s*bitgraft (.*)", part):
                    yield re.split(r"\s# ", found[1])[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_to_paste_name_commands_and_options_that_exist(page):
    for line in lines_to_paste(page):
        first, *rest = shlex.split(line)
        if first.startswith("-"):
            continue
        command = COMMANDS[first]
        if hasattr(command, "commands"):
            command = command.commands[rest[0]]
        known = {"--help", *(word for one in command.params for word in (*one.opts, *one.secondary_opts))}
        given = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert given <= known, f"{line}: {given - known}"


REPORT = "report docs/results/ablation-mini --output report"


@pytest.mark.parametrize(
    "command", ["--help", "demo --help", "methods", "params", "anatomy wrn-10-1", "bench --list", REPORT]
)
def test_what_is_pasted_is_what_is_printed(command, capsys, monkeypatch, tmp_path):
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    (pasted,) = re.findall(rf"^```console\n\$ bitgraft {re.escape(command)}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    code, out, _ = bitgraft(capsys, monkeypatch, *command.split())
    assert code == 0
    assert out == pasted


def outline(text):
    """What each table in a command's output tells about, and the form of what it ends with."""
    tables, lines = [], text.splitlines()
    for place, line in enumerate(lines):
        if set(line.strip()) == {"─"}:
            headings = re.split(r"\s{2,}", lines[place - 1].strip())
            rows = [re.split(r"\s{2,}", row.strip()) for row in takewhile(str.strip, lines[place + 1 :])]
            facts = [row[0] for row in rows if len(row) == 2]
            last = re.sub(r"-?[\d.,]+(e-\d+)?", "0", rows[0][-1])
            tables.append([headings[0], *facts] if len(headings) == 2 else [*headings, last])
    return tables


def test_tables_that_are_pasted_look_like_those_printed(capsys, monkeypatch, tmp_path):
    furnish(tmp_path, monkeypatch)
    shutil.copy("photos/test/red/0.png", "seven.png")
    begin = ("train", "photos", "--task", "digits", "--backbone", NET, "--epochs", "1", "--size", "16")
    assert bitgraft(capsys, monkeypatch, *begin)[0] == 0
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in ("eval package:digits --task digits --by-class", "predict seven.png --task digits --top 3", "tasks",
                    "inspect bitgraft-store/digits.safetensors --layers"):  # fmt: skip
        (pasted,) = re.findall(
            rf"^```console\n\$ bitgraft {re.escape(command)}\n(.*?)^```", text, re.MULTILINE | re.DOTALL
        )
        code, out, _ = bitgraft(capsys, monkeypatch, *command.replace("package:digits", "photos").split())
        assert code == 0
        assert outline(out) == outline(pasted) != []


def blocks(page):
    """A page's Python that runs; `<!-- not run: why -->` above a block leaves it out."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^(?<!-->\n)```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_run_or_says_why_not(page):
    text = page.read_text(encoding="utf-8")
    for above, block in re.findall(r"^([^\n]*)\n```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        compile(block, str(page), "exec")
        assert not above.endswith("-->") or re.fullmatch("<!-- not run: .+ -->", above)
    opening = re.findall(r"^ *(?:```|~~~).*", text, re.MULTILINE)[::2]
    assert set(opening) <= {"```python", "```console", "```toml"}  # other fences hide code from these tests
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^    (?:net\.|net =|import |bitgraft\.).*", outside, re.MULTILINE)  # indented Python


WITH_CODE = [page.relative_to(ROOT) for page in PAGES if blocks(page.relative_to(ROOT)) and "guides" not in page.parts]


@pytest.mark.parametrize("page", WITH_CODE, ids=str)  # tests/test_guides.py runs the guides
def test_pages_run_as_they_stand(page, tmp_path, monkeypatch):
    """With a small network for ResNet-50, folders of coloured squares, and runs of one epoch."""
    furnish(tmp_path, monkeypatch)
    shutil.copytree("photos", "sketches")
    for name in ("rose.jpg", "cat.jpg"):
        shutil.copy("photos/test/red/0.png", name)
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: load_backbone(NET))
    monkeypatch.setattr(budget, "planned_epochs", lambda *given: 1)
    images, labels = torch.rand(2, 3, 16, 16), torch.arange(2)
    backbone = load_backbone("own_net:wide" if page.name == "take-away.md" else NET)  # few bits need some weights
    net, labelled = Network(backbone), TensorDataset(images, labels)
    net.add_task("flowers", classes=3)
    names = {"bitgraft": package, "images": images, "loader": [(images, labels)], "backbone": backbone, "net": net}
    if page.name == "take-away.md":
        names |= {"model": net.export("flowers"), "names": ["a", "b", "c"], "labelled": labelled}
        torch.save(names["model"].state_dict(), "finetuned.pth")
        net.remove_task("flowers")
    for block in blocks(page):
        exec(block.replace("classes=102", "classes=3"), names)
