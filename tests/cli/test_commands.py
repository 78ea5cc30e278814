"""The command line: output, streams and exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import images
import pytest

from bitgraft import Network, __version__, method_names, wide_resnet
from bitgraft.cli.backbone import grouped
from bitgraft.store import Backbone, Store

BITGRAFT = [sys.executable, "-c", "from bitgraft.cli.main import main; main()"]
COMMANDS = ["anatomy", "inspect", "params", "methods"]


@pytest.fixture
def bitgraft(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    return lambda *args: images.bitgraft(capsys, monkeypatch, *args)


@pytest.fixture
def task_file(tmp_path: Path) -> str:
    net = Network(wide_resnet(10, 1))
    net.add_task("flowers", classes=["rose", "tulip"])
    net.save_task("flowers", tmp_path / "flowers.safetensors")
    return str(tmp_path / "flowers.safetensors")


def test_help_loads_nothing_heavy_and_is_quick() -> None:
    code = "import sys; from bitgraft.cli.main import app; app(['--help'], standalone_mode=False); "
    code += "print(*sorted({'torch', 'timm', 'numpy', 'safetensors'} & set(sys.modules)), file=sys.stderr)"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""
    assert all(command in done.stdout for command in COMMANDS)
    assert time.perf_counter() - start < 5  # about 0.2 s on an idle machine


def test_listing_does_not_load_torch(task_file: str) -> None:
    folder = Path(task_file).parent
    Store.create(folder, Backbone("wrn-10-1"), Network(wide_resnet(10, 1)))
    lists = [["tasks", "--store", str(folder)], ["methods"], ["bench", "--list"], ["inspect", task_file]]
    code = "import sys; sys.modules['torch'] = None\nfrom bitgraft.cli.main import app\n"
    code += f"for command in {lists!r}:\n    app(command, standalone_mode=False)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for said in ("flowers", "piggyback-bn", "Visual Decathlon", "bits per weight"):
        assert said in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_lines_to_paste(command: str, bitgraft) -> None:
    code, out, _ = bitgraft(command, "--help")
    assert code == 0
    assert out.rstrip().splitlines()[-1].startswith(f"    bitgraft {command}")


def test_version(bitgraft) -> None:
    assert bitgraft("--version") == (0, f"bitgraft {__version__}\n", "")


@pytest.mark.parametrize("group", [(), ("data",)])
def test_without_a_command_the_help_is_printed(group, bitgraft) -> None:
    code, out, err = bitgraft(*group)
    assert (code, err) == (0, "")
    assert "Commands:" in out


def test_anatomy_names_every_weight_whole(bitgraft) -> None:
    code, out, err = bitgraft("anatomy", "tf_efficientnet_lite0")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "blocks.6.0.conv_pwl.weight" in out
    assert "320×1152×1×1" in out
    assert "classifier (1280 features)" in out


def test_anatomy_json(bitgraft) -> None:
    code, out, _ = bitgraft("anatomy", "wrn-10-1", "--skip", "conv1.*", "--norms", "stages.*", "--json")
    read = json.loads(out)
    assert code == 0
    assert read["head"] == "fc"
    assert "conv1.weight" in read["shared"]
    assert "norm.weight" in read["shared"]
    first = read["weights"][0]
    assert first["name"] == "stages.0.0.conv1.weight"
    assert (first["shape"], first["feeds"], first["k0"]) == ([16, 16, 3, 3], "stages.0.0.norm2", "fixed")
    counts = read["parameters"]
    assert counts["all"] == sum(counts[group] for group in ("transformed", "norms", "shared", "head"))


def test_anatomy_with_another_head_and_example(bitgraft) -> None:
    code, out, _ = bitgraft("anatomy", "wrn-10-1", "--head", "none", "--example", "1,3,32,32", "--json")
    assert code == 0
    assert json.loads(out)["head"] is None


def test_inspect_shows_the_task(bitgraft, task_file: str) -> None:
    code, out, err = bitgraft("inspect", task_file)
    assert (code, err) == (0, "")
    assert "2: rose, tulip" in out
    assert "stages.2.0.shortcut.weight" not in out
    assert "stages.2.0.shortcut.weight" in bitgraft("inspect", task_file, "--layers")[1]
    brief, whole = (json.loads(bitgraft("inspect", task_file, *more, "--json")[1]) for more in ([], ["--layers"]))
    assert brief["name"] == "flowers"
    assert brief == {name: whole[name] for name in brief}
    assert set(whole) - set(brief) == {"density", "layers"}


def test_methods_lists_all(bitgraft) -> None:
    code, out, _ = bitgraft("methods", "--json")
    assert code == 0
    assert [method["name"] for method in json.loads(out)] == method_names()
    assert "W~ = k0 W + k1 1 + k2 M + k3 W∘M" in bitgraft("methods")[1]


def test_params_of_any_backbone(bitgraft) -> None:
    code, out, _ = bitgraft("params", "wrn-28-4", "--tasks", "10", "--json")
    (one,) = json.loads(out)
    relative = {row["method"]: row["relative"] for row in one["rows"]}
    assert code == 0
    assert one["tasks"] == 10
    assert round(relative["full"], 2) == 1.29
    assert set(relative) == set(method_names())


def test_params_of_a_backbone_without_a_head(bitgraft) -> None:
    code, out, err = bitgraft("params", "wrn-10-1", "--head", "none", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)[0]["backbone"] == "wrn-10-1"


def test_params_of_the_paper(bitgraft) -> None:
    code, out, err = bitgraft("params")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["full", "1.17", "1.17", "3.12", "MB", "1.17"] in lines


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["anatomy"], 2, "missing argument NAME; see `bitgraft anatomy --help`"),
        (["anatomy", "wrn-10-1", "--nope"], 2, "there is no option --nope"),
        (["train", "photos", "--task", "t", "--device", "cuda"], 2, "there is no option --device; see"),  # not --resize
        (["bench", "decathlon-mini", "--root", "nowhere"], 2, "--root nowhere: there is no such folder"),
        (["bench", "decathlon-mini", "--plan", "--runs", __file__], 2, "is a file, not a folder"),
        (["anatomy", "wrn-10-1", "--heda", "fc"], 2, "did you mean --head? see `bitgraft anatomy --help`"),
        (["anatomy", "wrn-10-1", "more"], 2, "unexpected argument: more"),
        (["nope"], 2, "there is no command nope; see `bitgraft --help`"),
        (["anatmy"], 2, "did you mean anatomy? see"),
        (["anatomy", "resnet5O"], 2, "did you mean"),
        (["params", "wrn-27-4"], 2, "depth"),
        (["anatomy", "wrn-10-1", "--example", "1,x"], 2, "1,3,64,64"),
        (["params", "--tasks", "4"], 2, "name of a backbone"),
        (["anatomy", "wrn-10-1", "--head", "nope"], 1, "no layer 'nope'"),
        (["anatomy", "wrn-10-1", "--skip", "nope*"], 1, "matches nothing"),
        (["anatomy", "wrn-10-1", "--weights", "nope.pth"], 1, "cannot read the weights"),
        (["params", "tiny:hidden_head"], 1, "--head LAYER"),
        (["inspect", "nope.safetensors"], 1, "cannot read nope.safetensors"),
    ],
)
def test_bad_input_is_one_sentence(args: list[str], code: int, said: str, bitgraft) -> None:
    left, out, err = bitgraft(*args)
    assert (left, out) == (code, "")
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_corrupt_file_is_a_failure(bitgraft, task_file: str) -> None:
    data = bytearray(Path(task_file).read_bytes())
    data[-1] ^= 1
    Path(task_file).write_bytes(data)
    code, out, err = bitgraft("inspect", task_file, "--json")
    assert (code, out) == (1, "")
    assert "checksum" in err


def test_a_closed_pipe_is_no_traceback(task_file: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*BITGRAFT, "inspect", task_file], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_an_interrupt_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "slow_for_test.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen(
        [*BITGRAFT, "anatomy", "slow_for_test:build"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore SIGINT
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"here\n"
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert b"Traceback" not in err


def test_only_terminals_get_colour(monkeypatch: pytest.MonkeyPatch, bitgraft) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    out = bitgraft("methods")[1]
    assert "\x1b" not in out
    assert "masks with a learned scale, shift and product term; own norm layers" in out


def test_names_that_differ_in_numbers_are_grouped() -> None:
    assert grouped(["bn1", "layer1.0.bn1", "layer10.2.bn2"]) == "bn1, layer*.*.bn* (2)"
    assert grouped([]) == "none"
