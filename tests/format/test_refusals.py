"""Damaged, foreign and mismatched files are refused, and a failed load changes nothing."""

import contextlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from drafts import Draft
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bitgraft
from bitgraft.errors import (
    ArchiveError,
    ClassesError,
    CorruptError,
    MissingTaskError,
    NewerFormatError,
    TaskError,
    UnsafeNameError,
    WrongBackboneError,
)
from bitgraft.format import archive, restore

torch.set_num_threads(1)
GOLDEN = (Path(__file__).parents[1] / "golden" / "format-1.safetensors").read_bytes()
UNSAFE = ["../up", "a/b", "/etc/passwd", "..", ".hidden", "", "a\\b", "a\0b", "nul\n", "ü", "x" * 101, "-rf", "a b", 7]
LATER = "f" * 64
WRONG_NUMBERS = [2, 4, 0, -3, 3.0, True, None, 1 << 21, 10**30]  # of classes, where the head has 3 outputs
WRONG_LISTS = [["a", "b"], ["a", "a", "b"], [], "abc", {"a": 0}, [1, 2, 3], [["a"]]]


def backbone(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4)]
        return nn.Sequential(*layers).eval()


def network(seed: int = 0) -> bitgraft.Network:
    return bitgraft.Network(backbone(seed), example=(2, 3, 8, 8))


def saved(method: str = "full", head: Any = "auto", **options: Any) -> bytes:
    net = network()
    task = net.add_task(
        "t", classes=None if head in ("keep", None) else 3, method=method, head=head, preset=None, **options
    )
    return archive.to_bytes(archive.pack_task(task, net.fingerprint))


def crafted(edit: Callable[[Draft], Any], method: str = "full", head: Any = "auto", **options: Any) -> bytes:
    draft = Draft(saved(method, head, **options))
    edit(draft)
    return draft.build()


def refuse(data: bytes, error: type[Exception], match: str, folder: Path, **loading: Any) -> None:
    """Loading raises exactly this error, and changes neither the network nor its backbone."""
    net = network()
    net.add_task("other", classes=2)
    before, state = net.fingerprint, {name: tensor.clone() for name, tensor in net.state_dict().items()}
    (folder / "file").write_bytes(data)
    with pytest.raises(error, match=match) as caught:
        net.load_task(folder / "file", **loading)
    assert caught.type is error, "its own class, not a relative"
    assert list(net.tasks) == ["other"]
    assert net.anatomy.fingerprint() == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())


def foreign(**metadata: str) -> bytes:
    return safetensors.torch.save({"a": torch.zeros(3)}, metadata or None)


def put(name: str, value: Any) -> Callable[[Draft], None]:
    return lambda draft: draft.about.__setitem__(name, value)


def option(name: str, value: Any) -> Callable[[Draft], None]:
    return lambda draft: draft.about["options"].__setitem__(name, value)


def tensor(name: str, dtype: str, shape: list[int], data: bytes | None = None) -> Callable[[Draft], None]:
    width = {"U8": 1, "BOOL": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "F64": 8, "I64": 8}[dtype]
    filled = bytes(width * math.prod(shape)) if data is None else data
    return lambda draft: draft.tensors.__setitem__(name, (dtype, shape, filled))


def stated(name: str, shape: list[int], *parts: str) -> Callable[[Draft], None]:
    """Add a weight to `shapes`, with zeros for its packed parts."""

    def edit(draft: Draft) -> None:
        draft.about["shapes"][name] = shape
        for part in parts:
            tensor(f"{name}:{part}", "U8", [-(-math.prod(shape) // 8)])(draft)

    return edit


def drop(*names: str) -> Callable[[Draft], None]:
    return lambda draft: [draft.tensors.pop(name) for name in names]


def test_a_crafted_file_without_a_fault_is_accepted(tmp_path: Path) -> None:
    net = network()
    (tmp_path / "file").write_bytes(crafted(lambda draft: None))
    net.load_task(tmp_path / "file")
    assert list(net.tasks) == ["t"]


def test_a_wrong_backbone(tmp_path: Path) -> None:
    net = network(seed=1)
    (tmp_path / "file").write_bytes(saved())
    with pytest.raises(WrongBackboneError, match="belongs to a backbone with fingerprint"):
        net.load_task(tmp_path / "file")
    assert not net.tasks
    refuse(crafted(put("backbone", "0" * 64)), WrongBackboneError, "belongs to a backbone with", tmp_path)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "file is empty"),
        (b"\x01", "truncated, or not a task file"),
        (b"1234567", "truncated, or not a task file"),
        (struct.pack("<Q", 2**63), "header would take 9223372036854775808 of 8 bytes"),
        (struct.pack("<Q", 50) + b"{}", "header would take 50 of 10 bytes"),
        (struct.pack("<Q", 0), "not a task file"),
        (b"PK\x03\x04" + bytes(200), "truncated, or not a task file"),
        (b"{" * 300, "truncated, or not a task file"),
        (struct.pack("<Q", 4) + b"\xff\xfe\xff\xfe", "damaged, or not a task file"),
        (struct.pack("<Q", 2) + b"{}", "no entry 'bitgraft'"),
        (struct.pack("<Q", 2) + b"[]", "damaged, or not a task file"),
        (struct.pack("<Q", 4) + b"null", "damaged, or not a task file"),
        (foreign(), "no entry 'bitgraft'"),
        (foreign(format="pt"), "no entry 'bitgraft'"),
        (foreign(bitgraft="[]"), "no entry 'bitgraft'"),
        (foreign(bitgraft="{}"), "no valid format version"),
        (foreign(bitgraft="{"), "damaged, or not a task file"),
        (foreign(bitgraft='{"format":1}'), "not match its checksum"),
        (foreign(bitgraft='{"format":1,"format":1}'), "duplicate key"),
        (foreign(bitgraft='{"format":NaN}'), "NaN is not a finite"),
        (foreign(bitgraft='{"format":1e999}'), "1e999 is not a finite"),
        (foreign(bitgraft="[" * 100_000), "damaged, or not a task file"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "damaged, or not a task file"),
    ],
)
def test_files_that_are_not_task_files(data: bytes, match: str, tmp_path: Path) -> None:
    refuse(data, CorruptError, match, tmp_path)


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    net = network()
    for path, match in [
        (tmp_path / "missing", "cannot read .*missing: No such file"),
        (tmp_path / "no" / "where", "cannot read .*where: there is no folder .*no"),
        (tmp_path, "it is a folder"),
        ("/dev/zero", "it is a device or a pipe"),
        ("nul\0byte", "cannot read"),
    ]:
        with pytest.raises(ArchiveError, match=match):
            net.load_task(path)
    assert not net.tasks


def test_a_file_cut_at_any_length_says_that_it_is_truncated(tmp_path: Path) -> None:
    (size,) = struct.unpack("<Q", GOLDEN[:8])
    for length in range(len(GOLDEN)):
        with pytest.raises(CorruptError, match="empty" if length == 0 else "truncated"):
            archive.from_bytes(GOLDEN[:length])
    assert len(GOLDEN) > 8 + size > 1000, "the cuts went through length, header and tensors"
    refuse(saved()[:-1], CorruptError, "truncated: it has .* bytes", tmp_path)


def test_every_bit_counts() -> None:
    for index in range(len(GOLDEN)):
        for bit in range(8):
            changed = bytearray(GOLDEN)
            changed[index] ^= 1 << bit
            with pytest.raises(ArchiveError):
                archive.from_bytes(bytes(changed))


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.data())
def test_flipped_cut_and_inserted_bytes_are_refused(data: st.DataObject) -> None:
    changed = bytearray(GOLDEN)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed)))
        edit = data.draw(st.sampled_from(["flip", "cut", "insert", "remove", "repeat"]))
        if edit == "flip" and at < len(changed):
            changed[at] ^= data.draw(st.integers(1, 255))
        elif edit == "cut":
            del changed[at:]
        elif edit == "insert":
            changed[at:at] = data.draw(st.binary(min_size=1, max_size=20))
        elif edit == "remove":
            del changed[at : at + data.draw(st.integers(1, 20))]
        elif edit == "repeat":
            changed[at:at] = changed[: data.draw(st.integers(1, 50))]
    if bytes(changed) != GOLDEN:
        with pytest.raises(ArchiveError):
            archive.from_bytes(bytes(changed))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptError):
        archive.from_bytes(data)


def test_a_newer_format(tmp_path: Path) -> None:
    refuse(crafted(put("format", 4)), NewerFormatError, "task format 4, .* reads up to 3: install a newer", tmp_path)
    refuse(crafted(put("format", 2)), CorruptError, "its metadata fields are", tmp_path)
    refuse(crafted(lambda d: d.about.update(format=9, new={})), NewerFormatError, "task format 9", tmp_path)
    for wrong in (0, -1, True, 1.0, "1", None, [1]):
        refuse(crafted(put("format", wrong)), CorruptError, "no valid format version", tmp_path)


@pytest.mark.parametrize("name", UNSAFE)
def test_an_unsafe_name(name: Any, tmp_path: Path) -> None:
    refuse(crafted(put("name", name)), UnsafeNameError, "cannot be a task's name", tmp_path)
    if isinstance(name, str):
        leaning = put("leans_on", {name: LATER})
        refuse(crafted(leaning, "packnet"), UnsafeNameError, "cannot be a task's name", tmp_path)
        refuse(saved(), UnsafeNameError, "cannot be a task's name", tmp_path, name=name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    refuse(crafted(put("name", "other")), TaskError, "there is a task 'other' already", tmp_path)
    refuse(crafted(put("name", "original")), TaskError, "'original' is the backbone's own task", tmp_path)
    refuse(saved(), TaskError, "there is a task 'other' already", tmp_path, name="other")


@pytest.mark.parametrize("classes", [*WRONG_NUMBERS, *WRONG_LISTS])
def test_classes_that_do_not_fit_the_head(classes: Any, tmp_path: Path) -> None:
    refuse(crafted(put("classes", classes)), ClassesError, "classes", tmp_path)


def test_a_number_of_classes_is_bounded_where_no_head_bounds_it() -> None:
    most = archive.from_bytes(crafted(put("classes", 2**20), head="keep"))
    assert len(most.metadata.classes or ()) == 2**20
    with pytest.raises(ClassesError, match="classes 1048577 are"):
        archive.from_bytes(crafted(put("classes", 2**20 + 1), head="keep"))


def test_classes_and_kinds_of_head_that_do_not_go_together(tmp_path: Path) -> None:
    refuse(crafted(put("classes", 3), head=None), ClassesError, "head of kind 'none'", tmp_path)
    refuse(crafted(put("head", "none")), ClassesError, "head of kind 'none'", tmp_path)
    for kind in ("keep", "linear", "module"):
        refuse(crafted(put("head", kind)), CorruptError, f"a head of kind '{kind}' does not use", tmp_path)
    claimed = crafted(lambda draft: draft.about.update(head="classes", classes=3), head="keep")
    refuse(claimed, CorruptError, r"its head needs \['4.bias', '4.weight'\]", tmp_path)
    refuse(crafted(tensor("head:weight", "F32", [3, 5])), CorruptError, "tensors of a head module", tmp_path)


@pytest.mark.parametrize(
    ("edit", "error", "match"),
    [
        (drop("0.weight:mask"), CorruptError, "parts should be"),
        (drop("0.weight:k"), CorruptError, "parts should be"),
        (drop("1.weight"), CorruptError, "'1.weight' is missing"),
        (drop("1.running_var"), CorruptError, "'1.running_var' is missing"),
        (drop("4.weight"), CorruptError, "its head needs .*'4.weight'"),
        (drop("4.bias"), CorruptError, "its head needs .*'4.bias'"),
        (drop("4.bias", "4.weight"), CorruptError, "its head needs .*'4.bias'"),
        (tensor("0.weight", "F32", [5, 3, 3, 3]), CorruptError, "does not replace"),
        (tensor("0.bias", "F32", [5]), CorruptError, "does not replace"),
        (tensor("1.num_batches_tracked", "I64", []), CorruptError, "num_batches_tracked"),
        (tensor("0.weight:extra", "F32", [1]), CorruptError, "parts should be"),
        (tensor("0.weight:", "F32", [1]), CorruptError, "parts should be"),
        (stated("0.bias", [5], "mask"), WrongBackboneError, "'0.bias', which is not a weight"),
        (stated("1.running_mean", [5], "mask"), WrongBackboneError, "which is not a weight"),
        (stated("9.weight", [2, 4], "mask"), WrongBackboneError, "'9.weight', which is not a weight"),
        (stated("", [8], "mask"), WrongBackboneError, "'', which is not a weight"),
        (tensor("9.weight", "F32", [1]), WrongBackboneError, "does not have"),
        (tensor("../../etc/passwd", "F32", [1]), WrongBackboneError, "does not have"),
        (tensor("__class__.weight", "F32", [1]), WrongBackboneError, "does not have"),
        (tensor("0.weight:mask", "U8", [16]), CorruptError, "needs 17 bytes"),
        (tensor("0.weight:mask", "U8", [17, 1]), CorruptError, "needs 17 bytes"),
        (tensor("0.weight:mask", "U8", [0]), CorruptError, "needs 17 bytes"),
        (tensor("0.weight:k", "F32", [3]), CorruptError, "parts should be"),
        (tensor("0.weight:k", "F32", [4, 5]), CorruptError, "parts should be"),
        (tensor("1.weight", "F32", [6]), WrongBackboneError, "of shape .6,., the backbone needs .5,."),
        (tensor("1.weight", "F32", []), WrongBackboneError, "of shape"),
        (tensor("4.weight", "F32", [3, 6]), WrongBackboneError, "of shape .3, 6., the backbone needs .3, 5."),
        (tensor("4.weight", "F32", [15]), ClassesError, "lists 3 classes, but its head has 15 outputs"),
        (tensor("4.weight", "F32", []), ClassesError, "lists 3 classes"),
        (tensor("4.bias", "F32", [4]), ClassesError, "lists 3 classes, but its head has 4 outputs"),
        (tensor("4.bias", "F32", [3, 1]), WrongBackboneError, "of shape"),
        (tensor("0.weight:mask", "F32", [17]), CorruptError, "float32, expected torch.uint8"),
        (tensor("0.weight:mask", "BOOL", [17]), CorruptError, "bool, expected torch.uint8"),
        (tensor("0.weight:k", "I32", [4]), CorruptError, "int32, expected torch.float32"),
        (tensor("0.weight:k", "F64", [4]), CorruptError, "float64, expected torch.float32"),
        (tensor("0.weight:k", "BF16", [4]), CorruptError, "bfloat16, expected torch.float32"),
        (tensor("1.weight", "I64", [5]), CorruptError, "int64, expected torch.float32"),
        (tensor("1.weight", "F64", [5]), CorruptError, "float64, expected torch.float32"),
        (tensor("1.running_mean", "F16", [5]), CorruptError, "float16, expected torch.float32"),
        (tensor("4.weight", "F64", [3, 5]), CorruptError, "float64, expected torch.float32"),
        (tensor("0.weight:mask", "U8", [17], b"\0" * 16 + b"\x80"), CorruptError, "bits set after the last weight"),
        (put("method", "fuller"), NewerFormatError, "there is no method 'fuller'.*install a newer bitgraft"),
        (put("method", None), CorruptError, "its method is None"),
        (put("method", ["full"]), CorruptError, "its method is"),
        (option("new", 1), NewerFormatError, "no option 'new' for method 'full'"),
        (option("per", "channel"), CorruptError, "parts should be"),
        (option("per", 3), CorruptError, "per=3"),
        (option("norms", False), CorruptError, "does not replace"),
        (option("norms", "no"), CorruptError, "norms='no'"),
        (option("k1", True), CorruptError, "k1=True"),
        (option("init", None), CorruptError, "init=None"),
        (option("init", [1]), CorruptError, "init="),
        (option("threshold", {}), CorruptError, "threshold="),
        (option("own", [3]), CorruptError, "own="),
        (put("options", []), CorruptError, "'options' is"),
        (put("metrics", None), CorruptError, "'metrics' is None"),
        (put("preprocessing", "x"), CorruptError, "'preprocessing' is 'x'"),
        (put("leans_on", ["a"]), CorruptError, "'leans_on' is"),
        (put("leans_on", {"other": LATER}), MissingTaskError, "builds on another task 'other'"),
        (put("leans_on", {"a": LATER, "b": LATER}), CorruptError, "method 'full' cannot depend on"),
        (put("leans_on", {"other": "short"}), CorruptError, "64 hexadecimal digits"),
        (put("backbone", "abc"), CorruptError, "64 hexadecimal digits"),
        (put("backbone", None), CorruptError, "64 hexadecimal digits"),
        (put("head", "tail"), CorruptError, "its head is 'tail', not one of"),
        (put("head", ["classes"]), CorruptError, "its head is"),
        (put("head_layer", None), CorruptError, "head of kind 'classes' cannot have head_layer None"),
        (put("head_layer", 4), CorruptError, "cannot have head_layer 4"),
        (put("head_layer", "0"), WrongBackboneError, "expects '0' as .* this one has '4': pass Network"),
        (put("shapes", []), CorruptError, "'shapes' is"),
        (put("shapes", {}), CorruptError, "'0.weight' has parts but no shape"),
        (put("shapes", {"0.weight": 135}), CorruptError, "135 is not a shape .'0.weight'"),
        (put("shapes", {"0.weight": [5, 3, 3, 3.0]}), CorruptError, "is not a shape"),
        (put("shapes", {"0.weight": [5, 3, 3, True]}), CorruptError, "is not a shape"),
        (put("shapes", {"0.weight": [5, -3, -3, 3]}), CorruptError, "is not a shape"),
        (put("shapes", {"0.weight": [5, 3, 3, 4]}), CorruptError, "needs 23 bytes"),
        (put("shapes", {"0.weight": [5, 3, 9]}), WrongBackboneError, "the backbone .5, 3, 3, 3."),
        (put("shapes", {"0.weight": [133]}), WrongBackboneError, "of shape .133,., the backbone"),
        (stated("4.weight", [4, 5]), CorruptError, "parts should be"),
        (stated("9.weight", [4, 5]), WrongBackboneError, "'9.weight', which is not a weight"),
        (put("new", 1), CorruptError, "metadata fields"),
        (lambda d: d.about.pop("metrics"), CorruptError, "metadata fields"),
        (lambda d: d.about.pop("name"), CorruptError, "metadata fields"),
        (lambda d: d.beside.update(format="pt"), CorruptError, "metadata of other tools"),
    ],
)
def test_faults_with_a_valid_checksum(edit: Any, error: type[Exception], match: str, tmp_path: Path) -> None:
    refuse(crafted(edit), error, match, tmp_path)


@pytest.mark.parametrize(
    ("method", "edit", "error", "match"),
    [
        ("classifier", stated("0.weight", [5, 3, 3, 3], "mask"), CorruptError, "'classifier' does not transform"),
        ("finetune", drop("0.weight"), CorruptError, "'0.weight' is missing"),
        ("finetune", drop("1.bias"), CorruptError, "'1.bias' is missing"),
        ("finetune", stated("0.weight", [5, 3, 3, 3], "mask"), CorruptError, "'finetune' does not transform"),
        ("packnet", put("leans_on", {"other": LATER}), MissingTaskError, "builds on another task 'other'"),
        ("packnet", put("leans_on", {"gone": LATER}), MissingTaskError, "'gone', not here"),
        ("packnet", put("leans_on", {"a": LATER, "b": LATER}), CorruptError, "cannot depend on"),
        ("packnet", drop("0.weight:values"), CorruptError, "parts should be"),
        ("packnet", tensor("0.weight:values", "F32", [3]), CorruptError, "parts should be"),
        ("packnet", tensor("0.weight:mask", "U8", [17], b"\xff" * 17), CorruptError, "bits set after"),
        ("packnet", option("keep", 1.5), CorruptError, "keep=1.5"),
        ("packnet", option("base", 1), CorruptError, "base=1"),
        ("lora", option("rank", 3), CorruptError, "parts should be"),
        ("lora", option("rank", 0), CorruptError, "rank=0"),
        ("lora", option("alpha", "8"), CorruptError, "alpha='8'"),
        ("lora", drop("0.weight:a"), CorruptError, "parts should be"),
        ("dan", tensor("0.weight:p", "F32", [5, 4]), CorruptError, "parts should be"),
        ("adapters-parallel", tensor("0.weight:a", "F32", [5, 3]), CorruptError, "parts should be"),
        ("adapters-series", drop("0.weight:tail.norm.bias"), CorruptError, "parts should be"),
        (
            "adapters-series",
            tensor("0.weight:tail.norm.num_batches_tracked", "I64", []),
            CorruptError,
            "int64, expected torch.float32",
        ),
    ],
)
def test_faults_of_other_methods(method: str, edit: Any, error: type[Exception], match: str, tmp_path: Path) -> None:
    refuse(crafted(edit, method), error, match, tmp_path)


def test_a_linear_head_that_does_not_fit(tmp_path: Path) -> None:
    net = bitgraft.Network(backbone()[:-1].eval(), example=(2, 3, 8, 8), head=None)
    data = archive.to_bytes(archive.pack_task(net.add_task("t", classes=3, preset=None), net.fingerprint))
    net.remove_task("t")
    for edit, error, match in [
        (put("classes", 4), ClassesError, "lists 4 classes, but its head has 3 outputs"),
        (tensor("head:weight", "F32", [3, 6]), CorruptError, "head module does not match"),
        (tensor("head:weight", "F32", [15]), ClassesError, "lists 3 classes, but its head has 15 outputs"),
        (tensor("head:weight", "F32", []), CorruptError, "head module does not match"),
        (tensor("head:bias", "F32", []), CorruptError, "head module does not match"),
        (tensor("head:extra", "F32", [3]), CorruptError, "head module does not match"),
        (drop("head:bias"), CorruptError, "head module does not match"),
        (drop("head:bias", "head:weight"), CorruptError, "head module does not match"),
        (tensor("head:weight", "F64", [3, 5]), CorruptError, "float64"),
        (put("head", "classes"), CorruptError, "head of kind 'classes' cannot have head_layer None"),
        (lambda d: d.about.update(head="classes", head_layer="4"), WrongBackboneError, "expects '4' as the"),
    ]:
        draft = Draft(data)
        edit(draft)  # type: ignore[operator]
        (tmp_path / "file").write_bytes(draft.build())
        with pytest.raises(error, match=match):
            net.load_task(tmp_path / "file")
        assert not net.tasks


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["as bitgraft writes", "as others may"])
def test_headers_that_lie_about_tensors(tmp_path: Path, separators: tuple[str, str]) -> None:
    def written(value: Any) -> str:
        return json.dumps(value, separators=separators)

    def lie(name: str, **entry: Any) -> bytes:
        draft = Draft(saved())
        header = draft.header()
        header[name] = {**header[name], **entry}
        return draft.build(written(header).encode())

    invalid = "not a valid safetensors file"
    shapes = [[2**62, 2**62], [10**12], [-5], [5.0]]
    offsets = [[0, 20], [-20, 0], [0, 10**12], None, [0]]
    lies = [{"dtype": "F7"}, *({"shape": shape} for shape in shapes), *({"data_offsets": each} for each in offsets)]
    for entry in lies:
        refuse(lie("1.weight", **entry), CorruptError, invalid, tmp_path)
    refuse(Draft(saved()).build(tail=b"more"), CorruptError, invalid, tmp_path)
    draft = Draft(saved())
    for name in ("1.weight", "__metadata__"):
        twice = f"{written(draft.header())[:-1]}{separators[0]}{written({name: draft.header()[name]})[1:]}"
        refuse(draft.build(twice.encode()), CorruptError, "duplicate key", tmp_path)
    for top in (b"[]", b"1", b'{"__metadata__":[]}', b'{"__metadata__":{"bitgraft":"{"},"a":1}'):
        refuse(struct.pack("<Q", len(top)) + top, CorruptError, "damaged, or not a task file", tmp_path)


def test_a_header_may_be_written_otherwise(tmp_path: Path) -> None:
    """Another order of keys, and spaces between tokens."""
    draft, net = Draft(saved()), network()
    header = dict(reversed(draft.header().items()))
    (tmp_path / "file").write_bytes(draft.build(json.dumps(header).encode()))
    net.load_task(tmp_path / "file", name="other")
    (tmp_path / "file").write_bytes(saved())
    net.load_task(tmp_path / "file", name="usual")
    held = [net.tasks[name].state_dict() for name in ("other", "usual")]
    assert held[0].keys() == held[1].keys()
    assert all(torch.equal(tensor, held[1][name]) for name, tensor in held[0].items())


def test_deeply_nested_metadata(tmp_path: Path) -> None:
    value: Any = 1
    for _ in range(40):
        value = [value]
    refuse(crafted(put("metrics", {"a": value})), CorruptError, "nested deeper than 32", tmp_path)


def test_values_that_are_not_finite_are_loaded(tmp_path: Path) -> None:
    """A diverged task is restored to the last bit."""
    nan = struct.pack("<4f", math.nan, math.inf, -math.inf, 0.0)
    (tmp_path / "file").write_bytes(crafted(tensor("0.weight:k", "F32", [4], nan)))
    task = network().load_task(tmp_path / "file")
    assert task.transforms["0.weight"].parts()["k"].numpy().tobytes() == nan  # type: ignore[union-attr]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NET, TASK = network(), saved()
NOT_OBJECTS = json_values.filter(lambda value: not isinstance(value, dict))
WRONG: dict[str, st.SearchStrategy[Any]] = {
    "backbone": json_values,
    "checksum": st.nothing(),
    "classes": json_values.filter(lambda value: value != 3),
    "format": json_values.filter(lambda value: value != 1 or value is True),
    "head": json_values,
    "head_layer": json_values.filter(lambda value: value != "4"),
    "leans_on": json_values.filter(lambda value: value != {}),
    "method": json_values,
    "metrics": NOT_OBJECTS,
    "name": json_values.filter(lambda value: not isinstance(value, str)),
    "options": NOT_OBJECTS,
    "preprocessing": NOT_OBJECTS,
    "shapes": json_values,
}


def load(data: bytes) -> bitgraft.Task:
    return restore.restore_task(archive.from_bytes(data), NET.anatomy, (), None)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_a_value_of_the_wrong_type_in_any_field_is_refused(data: st.DataObject) -> None:
    draft = Draft(TASK)
    assert set(draft.about) == set(WRONG)
    field = data.draw(st.sampled_from(sorted(set(WRONG) - {"checksum"})))
    draft.about[field] = data.draw(WRONG[field])
    with pytest.raises(ArchiveError):
        load(draft.build())


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_any_options_load_or_are_refused_with_our_own_errors(data: st.DataObject) -> None:
    draft = Draft(TASK)
    draft.about["method"] = data.draw(st.sampled_from(bitgraft.method_names()))
    name = data.draw(
        st.sampled_from([*sorted(draft.about["options"].keys() - {"bits"}), "rank", "alpha", "keep", "base"])
    )
    draft.about["options"] = {name: data.draw(json_values)}
    with contextlib.suppress(ArchiveError):
        assert load(draft.build()).metadata.options[name] is not None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_any_tensors_load_or_are_refused_with_our_own_errors(data: st.DataObject) -> None:
    draft = Draft(TASK)
    for _ in range(data.draw(st.integers(1, 3))):
        weight = data.draw(st.sampled_from(["", *NET.anatomy.places]))
        part = data.draw(st.sampled_from(["", ":mask", ":k"]))
        shape = data.draw(st.lists(st.integers(0, 6), max_size=3))
        tensor(weight + part, data.draw(st.sampled_from(["U8", "F32", "I64"])), shape)(draft)
    with contextlib.suppress(ArchiveError):
        assert load(draft.build()).tensors().keys() <= NET.anatomy.places.keys()
