"""The tape as plain data: what it answers, and that a file from anyone is safe to read."""

import json

import ml_dtypes
import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sonde.core import files, tape
from sonde.core.tape import Mark, Op, Tape, Value
from sonde.errors import OptionError, RunDamaged, RunNotFound


def small_tape():
    """x @ w, softmax, then a loss with the target y; a running mean m is written to in place."""
    values = (
        Value(id=0, role="input", name="batch[0]", shape=(4, 3), dtype="float32", saved=True),
        Value(id=1, role="parameter", name="fc.weight", shape=(3, 2), dtype="float32", requires_grad=True),
        Value(id=2, role="computed", shape=(4, 2), made_by=0),
        Value(id=3, role="computed", shape=(4, 2), made_by=1),
        Value(id=4, role="target", name="batch[1]", shape=(4,), dtype="int64"),
        Value(id=5, role="computed", made_by=2),
        Value(id=6, role="buffer", name="m", shape=(2,)),
        Value(id=7, role="buffer", name="m", shape=(2,), made_by=3, same_as=6),
    )
    ops = (
        Op(index=0, name="aten.mm.default", args={"self": {"v": 0}, "mat2": {"v": 1}}, outs=(2,), module="fc"),
        Op(index=1, name="aten._softmax.default", args={"self": {"v": 2}, "dim": 1}, outs=(3,), module="act"),
        Op(index=2, name="aten.nll_loss_forward.default", args={"self": {"v": 3}, "target": {"v": 4}}, outs=(5,)),
        Op(index=3, name="aten.add_.Tensor", args={"self": {"v": 6}, "other": {"v": 2}}, outs=(7,), writes=(7,)),
    )
    marks = (
        Mark(index=0, kind="module_enter", data={"path": "", "class": "Net", "root": True, "args": {"[0]": {"v": 0}}}),
        Mark(index=0, kind="module_enter", data={"path": "fc", "class": "Linear", "training": False}),
        Mark(index=1, kind="module_exit", data={"path": "fc"}),
        Mark(index=2, kind="module_exit", data={"path": "", "outs": {"": {"v": 3}}}),
        Mark(index=3, kind="backward", data={"roots": [{"v": 5}]}),
    )
    return Tape(step=3, values=values, ops=ops, marks=marks)


def test_a_value_is_made_of_what_its_operation_got_and_of_what_it_was_before():
    here = small_tape()
    assert here.sources(2) == [0, 1]
    assert here.sources(7) == [6, 2]
    assert here.producer(0) is None
    assert here.producer(5).kind == "nll_loss_forward"
    assert [op.index for op in here.consumers(2)] == [1, 3]


def test_walks_lead_from_losses_to_parameters_and_back():
    here = small_tape()
    assert here.loss_values() == [5]
    assert here.ancestors(5) == {0, 1, 2, 3, 4, 5}
    assert here.descendants(6) == {6, 7}
    assert [op.kind for op in here.path(1, 5)] == ["mm", "_softmax", "nll_loss_forward"]
    assert here.path(4, 3) == []
    assert [each.name for each in here.gradient_sources(5)] == ["fc.weight"]


def test_calls_of_modules_are_put_together_from_their_marks():
    root, inner = small_tape().calls
    assert (root.is_root, root.first, root.last, root.args, root.outs) == (True, 0, 2, {"[0]": 0}, {"": 3})
    assert (inner.path, inner.kind, inner.training, inner.depth) == ("fc", "Linear", False, 1)
    assert small_tape().outputs_of_root() == [3]
    assert small_tape().inputs_of_root() == [0]
    assert [op.kind for op in small_tape().loss_ops()] == ["nll_loss_forward"]


def test_what_was_written_is_read(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    folder = tape.write(tmp_path, small_tape(), lambda path: safetensors.numpy.save_file({"v0": array}, path))
    here = tape.read(tape.find(tmp_path))
    assert here.values == small_tape().values
    assert here.ops == small_tape().ops
    assert here.marks == small_tape().marks
    np.testing.assert_array_equal(here.tensor(0), array)
    assert here.tensor(1) is None
    assert folder == tmp_path / "tapes" / "step_3"
    assert not [each for each in (tmp_path / "tapes").iterdir() if each.name.startswith(".")]


def test_the_last_tape_of_a_step_and_the_last_step_count(tmp_path):
    for step in (3, 20, 3):
        tape.write(tmp_path, msgspec.structs.replace(small_tape(), step=step))
    assert {step: path.name for step, path in tape.folders(tmp_path).items()} == {3: "step_3_2", 20: "step_20"}
    assert tape.find(tmp_path).name == "step_20"
    with pytest.raises(OptionError, match="3, 20"):
        tape.find(tmp_path, 4)
    with pytest.raises(RunNotFound):
        tape.find(tmp_path / "elsewhere")


def test_a_failing_writer_leaves_nothing_behind(tmp_path):
    def fail(path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        tape.write(tmp_path, small_tape(), fail)
    assert list((tmp_path / "tapes").iterdir()) == []


def test_bfloat16_and_empty_tensors_are_read_without_torch(tmp_path):
    raw = np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16)
    header = {
        "v0": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "v1": {"dtype": "F32", "shape": [0, 3], "data_offsets": [4, 4]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "t.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw.tobytes())
    found = tape.read_tensors(tmp_path / "t.safetensors")
    assert found["v0"].tolist() == [1.5, -2.0]
    assert found["v1"].shape == (0, 3)


def broken(change):
    plain = json.loads(msgspec.json.encode(small_tape()))
    change(plain)
    return plain


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["ops"][0].update(outs=[99]),
        lambda t: t["ops"][0]["args"].update(self={"v": -1}),
        lambda t: t["ops"][1].update(line=0),
        lambda t: t["ops"][1].update(index=7),
        lambda t: t["values"][2].update(made_by=4),
        lambda t: t["values"][2].update(same_as=2),
        lambda t: t["values"][1].update(id=0),
        lambda t: t["values"][1].update(role="king"),
        lambda t: t["marks"][4]["data"].update(roots=[{"v": 8}]),
        lambda t: t["marks"][0].update(index=5),
        lambda t: t.update(format=99),
        lambda t: t.update(optimizers=[{"name": "o", "kind": "SGD", "groups": [{"parameters": [77]}]}]),
        lambda t: t.pop("step"),
    ],
)
def test_a_tape_that_contradicts_itself_is_refused(tmp_path, change):
    (tmp_path / tape.INFO).write_text(json.dumps(broken(change)))
    with pytest.raises(RunDamaged):
        tape.read(tmp_path)


def test_a_tape_that_is_too_large_or_too_deep_is_refused(tmp_path, monkeypatch):
    (tmp_path / tape.INFO).write_bytes(b'{"step":1,"settings":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}")
    with pytest.raises(RunDamaged):
        tape.read(tmp_path)
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    with pytest.raises(RunDamaged, match="at most 100 are read"):
        tape.read(tmp_path)


@settings(max_examples=80)
@given(place=st.integers(0, 4000), byte=st.integers(0, 255), cut=st.booleans())
def test_any_damaged_byte_gives_a_tape_or_one_kind_of_error(tmp_path_factory, place, byte, cut):
    folder = tmp_path_factory.mktemp("tape")
    content = bytearray(msgspec.json.encode(small_tape()))
    place %= len(content)
    content[place] = byte
    (folder / tape.INFO).write_bytes(content[:place] if cut else content)
    try:
        here = tape.read(folder)
    except RunDamaged:
        return
    for value in here.values:
        here.ancestors(value.id)
        here.descendants(value.id)
    assert here.calls is not None
    here.outputs_of_root()
    here.loss_ops()


@settings(max_examples=40)
@given(st.binary(max_size=200))
def test_any_file_of_tensors_gives_arrays_or_one_kind_of_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("tape") / "t.safetensors"
    path.write_bytes(content)
    try:
        tape.read_tensors(path)
    except RunDamaged:
        return
