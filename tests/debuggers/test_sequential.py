"""The surface that code written for these classes relies on, and what the options add to it."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from tests.debuggers.conftest import datapoint, image
from torch import nn

from sonde.debuggers import (
    BaseDebugger,
    FeatureMapDebugger,
    ForwardDebugger,
    PerSample,
    SequentialDebugger,
    get_layer_by_name,
)
from sonde.errors import ClosedError, OptionError, RunExists, SelectionError
from sonde.store.pages import BatchValue, load_debug_outputs
from sonde.testing import assert_no_taps


class Raw(ForwardDebugger):
    def process_forward(self, module, input, output):
        return {"output": output}


class Answer(BaseDebugger):
    def __call__(self, datapoint, model):
        return {"answer": 42}


def test_the_base_class_cannot_be_made():
    with pytest.raises(TypeError):
        BaseDebugger()
    with pytest.raises(TypeError):
        ForwardDebugger("layer")


def test_a_forward_debugger_alone_keeps_what_it_saw_last(model):
    debugger = Raw("stem")
    assert debugger.last_capture is None
    handle = model.stem.register_forward_hook(debugger.forward_hook_fn)
    dp = datapoint(model, 1)
    handle.remove()
    assert torch.equal(debugger(dp, model)["output"], model.stem(dp["inputs"]))
    assert debugger(dp, model) is debugger.last_capture
    debugger.last_capture = {"mine": 1}
    assert debugger(dp, model) == {"mine": 1}


def test_a_debugger_can_be_copied_and_pickled():
    debugger = FeatureMapDebugger("stem")
    debugger.last_capture = 1
    for other in (copy.deepcopy(debugger), copy.copy(debugger), pickle.loads(pickle.dumps(debugger))):
        assert other.layer_name == "stem"
        assert other.last_capture is None


def test_a_subclass_need_not_call_the_init_of_its_base(build, model):
    class Careless(ForwardDebugger):
        def __init__(self):
            self.layer_name = "stem"

        def process_forward(self, module, input, output):
            return output

    outputs = build(mine=Careless())(datapoint(model, 1), model)
    assert outputs["mine"].shape == (1, 4, 6, 6)


def test_what_a_new_one_looks_like(model):
    with SequentialDebugger([{"name": "a", "debugger_config": Raw("stem")}], model, page_size_mb=2) as debugger:
        assert debugger.enabled is False
        assert debugger.page_size == 2 * 1024 * 1024
        assert (debugger.current_page_idx, debugger.current_page_size, debugger.current_page_data) == (0, 0, {})
        assert debugger.output_dir is None
        assert list(debugger.debuggers) == ["a"]
        assert debugger.forward_debuggers == {"stem": [debugger.debuggers["a"]]}
        assert debugger._buffer_thread.is_alive()
        assert debugger._buffer_thread.daemon
        assert debugger._buffer_queue.empty()
        with debugger._buffer_lock:
            pass
    assert not debugger._buffer_thread.is_alive()


def test_nothing_happens_while_it_is_disabled(model):
    with SequentialDebugger([{"name": "a", "debugger_config": Answer()}], model) as debugger:
        assert debugger(datapoint(model, 1), model) == {}
        debugger.add_to_buffer({"a": 1}, {"meta_info": {"idx": 1}})
        assert debugger.current_page_data == {}


def test_outputs_wait_until_a_folder_is_known_then_lie_in_pages(build, model, tmp_path):
    debugger = build(a=Raw("stem"), b=Answer())
    for idx in range(3):
        debugger(datapoint(model, idx), model)
    debugger._buffer_queue.join()
    assert list(debugger.current_page_data) == [0, 1, 2]
    assert list(debugger.current_page_data[0]) == ["a", "b"]
    assert debugger.current_page_size >= 3 * 4 * 6 * 6 * 4
    debugger.save_all(str(tmp_path / "debugger"))
    assert debugger.current_page_data == {}
    assert debugger.output_dir == str(tmp_path / "debugger")
    assert (tmp_path / "debugger" / "page_0.safetensors").exists()
    assert list(load_debug_outputs(tmp_path / "debugger")) == [0, 1, 2]


def test_resetting_forgets_what_waits(build, model):
    debugger = build(b=Answer())
    debugger(datapoint(model, 1), model)
    debugger.reset_buffer()
    assert (debugger.current_page_idx, debugger.current_page_size, debugger.current_page_data) == (0, 0, {})


def test_a_folder_named_before_the_loop_is_written_as_captures_come(build, model, tmp_path):
    debugger = build(a=Raw("stem"))
    debugger.open(tmp_path / "debugger", epoch=4, split="val")
    debugger(datapoint(model, 7), model)
    debugger._buffer_queue.join()
    outputs = load_debug_outputs(tmp_path / "debugger")  # before the page is full or the epoch has ended
    assert list(outputs) == [7]
    assert outputs.info(7) == {"epoch": 4, "split": "val", "rank": 0}
    debugger.save_all(tmp_path / "debugger")
    assert list(load_debug_outputs(tmp_path / "debugger")) == [7]


def test_assigning_the_folder_names_it_too(build, model, tmp_path):
    debugger = build(a=Answer())
    debugger.output_dir = tmp_path / "x"
    debugger(datapoint(model, 1), model)
    debugger._buffer_queue.join()
    assert 1 in load_debug_outputs(tmp_path / "x")


def test_saving_twice_adds_and_pages_of_others_are_refused(build, model, tmp_path):
    debugger = build(a=Answer())
    for idx in (1, 2):
        debugger(datapoint(model, idx), model)
        debugger.save_all(tmp_path / "mine")
    assert list(load_debug_outputs(tmp_path / "mine")) == [1, 2]
    other = build(a=Answer())
    other(datapoint(model, 1), model)
    with pytest.raises(RunExists):
        other.save_all(tmp_path / "mine")
    other.open(tmp_path / "mine", resume=True)
    other.save_all(tmp_path / "mine")


def test_a_name_that_comes_twice_is_an_assertion_error(model):
    item = {"name": "same", "debugger_config": {"class": Answer, "args": {}}}
    with pytest.raises(AssertionError, match="Duplicate debugger name: same"):
        SequentialDebugger([item, item], model)


def test_configs_and_instances_mix(model):
    config = [
        {"name": "described", "debugger_config": {"class": Raw, "args": {"layer_name": "stem"}}},
        {"name": "built", "debugger_config": Raw("head")},
    ]
    with SequentialDebugger(config, model) as debugger:
        assert {name: each.layer_name for name, each in debugger.debuggers.items()} == {
            "described": "stem",
            "built": "head",
        }


@pytest.mark.parametrize("item", [{"name": "x"}, {"name": "x", "debugger_config": 3}, "x"])
def test_an_item_that_describes_no_debugger_is_refused(model, item):
    with pytest.raises(OptionError):
        SequentialDebugger([item], model)


def test_options_that_mean_nothing_are_refused(model):
    with pytest.raises(OptionError, match="page_format"):
        SequentialDebugger([], model, page_format="zip")
    with pytest.raises(OptionError, match="on_error"):
        SequentialDebugger([], model, on_error="ignore")


def test_a_missing_layer_is_named_and_recorded(model, build, capsys, tmp_path):
    debugger = build(a=Raw("stam"))
    assert "Could not find layer 'stam'" in capsys.readouterr().out
    outputs = debugger(datapoint(model, 1), model)
    assert "no layer 'stam'" in outputs["a"]["error"]
    debugger.save_all(tmp_path)
    assert load_debug_outputs(tmp_path).info(1)["not_run"] == ["a"]


def test_a_missing_layer_is_an_error_with_near_misses_if_strict(model):
    with pytest.raises(SelectionError, match=r"'stam' \(nearest: .*stem"):
        SequentialDebugger([{"name": "a", "debugger_config": Raw("stam")}], model, strict=True)


def test_names_of_layers_are_those_of_the_model_as_written(model):
    assert get_layer_by_name(model, "stem") is model.stem
    assert get_layer_by_name(model, "stem.weight") is None
    assert get_layer_by_name(model, "forward") is None
    assert get_layer_by_name(model, "nothing.at.all") is None
    assert get_layer_by_name(model, "") is model
    wrapped = nn.DataParallel(model)
    assert get_layer_by_name(wrapped, "stem") is model.stem
    assert get_layer_by_name(wrapped, "module.stem") is model.stem
    compiled = torch.compile(model, backend="eager")
    assert get_layer_by_name(compiled, "stem") is model.stem
    assert get_layer_by_name(nn.Sequential(nn.Sequential(nn.ReLU())), "0.0").__class__ is nn.ReLU


class Failing(BaseDebugger):
    def __call__(self, datapoint, model):
        if datapoint["meta_info"]["idx"] == [2]:
            raise ValueError("no such luck")
        return {"fine": True}


class FailingForward(ForwardDebugger):
    def process_forward(self, module, input, output):
        raise KeyError("inside the hook")


def test_an_error_in_a_debugger_reaches_the_caller(build, model):
    with pytest.raises(ValueError, match="no such luck"):
        build(a=Failing())(datapoint(model, 2), model)
    build_failing = build(b=FailingForward("stem"))
    with pytest.raises(KeyError, match="inside the hook"):
        datapoint(model, 1)
    build_failing.enabled = False


def test_an_isolated_error_stays_with_its_datapoint(build, model, tmp_path, caplog):
    debugger = build({"on_error": "isolate"}, a=Failing(), b=FailingForward("stem"), c=Answer())
    with caplog.at_level(logging.WARNING, "sonde"):
        for idx in (1, 2, 3, 2):
            outputs = debugger(datapoint(model, idx), model)
            assert outputs["c"] == {"answer": 42}
    assert debugger.counters["debugger_errors"] == 2 + 4
    assert [record.message.split(" failed")[0] for record in caplog.records] == ["Debugger 'b'", "Debugger 'a'"]
    debugger.save_all(tmp_path)
    stored = load_debug_outputs(tmp_path)
    assert stored[1]["a"] == {"fine": True}
    assert stored[2]["a"] == {"error": "ValueError: no such luck"}
    assert stored[3]["b"] == {"error": "KeyError: 'inside the hook'"}
    assert stored.info(2)["failed"] == {
        "a": "ValueError: no such luck",
        "b": "KeyError: 'inside the hook'",
    }


def test_a_failure_in_a_pass_that_was_no_datapoint_is_not_blamed_on_the_next(build, model, tmp_path, caplog):
    class FailsOnce(ForwardDebugger):
        failed = False

        def process_forward(self, module, input, output):
            if not self.failed:
                self.failed = True
                raise KeyError("a warm-up")
            return {"fine": True}

    debugger = build({"on_error": "isolate"}, a=FailsOnce("stem"))
    datapoint(model, 0)  # the model runs, and nobody hands the datapoint in
    with caplog.at_level(logging.WARNING, "sonde"):
        assert debugger(datapoint(model, 1), model)["a"] == {"fine": True}
    assert "Debugger 'a' failed: KeyError: 'a warm-up'" in caplog.text
    assert debugger.counters["debugger_errors"] == 1
    debugger.save_all(tmp_path)
    assert "failed" not in load_debug_outputs(tmp_path).info(1)
    assert debugger.take_problems() == {}


def test_the_hook_never_replaces_an_output(build, model):
    class Meddling(ForwardDebugger):
        def forward_hook_fn(self, module, input, output):
            self.last_capture = output
            return torch.zeros_like(output)

        def process_forward(self, module, input, output):
            return None

    expected = datapoint(model, 3)["outputs"]
    debugger = build(a=Meddling("stem"))
    dp = datapoint(model, 3)
    assert torch.equal(dp["outputs"], expected)
    assert float(debugger(dp, model)["a"].min()) < 0  # copied at the hook, before the ReLU in place


def test_a_capture_set_by_hand_counts(build, model):
    debugger = build(a=Raw("stem"))
    debugger.debuggers["a"].last_capture = {"by": "hand"}
    for idx in range(2):
        assert debugger({"meta_info": {"idx": idx}}, model)["a"] == {"by": "hand"}
    datapoint(model, 1)
    assert "output" in debugger({"meta_info": {"idx": 3}}, model)["a"]
    assert "did not run" in debugger({"meta_info": {"idx": 4}}, model)["a"]["error"]


def test_an_own_call_is_asked_for_every_capture(build, model):
    class Mine(Raw):
        def __call__(self, datapoint, model):
            return {"norm": float(self.last_capture["output"].norm()), "idx": datapoint["meta_info"]["idx"]}

    outputs = build(a=Mine("cell"))(datapoint(model, 5), model)
    assert list(outputs["a"]) == ["#0", "#1", "#2"]
    assert all(each["idx"] == [5] for each in outputs["a"].values())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (3, [3]),
        ("img/3.png", ["img/3.png"]),
        ([3], [3]),
        ([3, 4], [3, 4]),
        (("a", "b"), ["a", "b"]),
        (torch.tensor([3]), [3]),
        (torch.tensor([3, 4]), [3, 4]),
        (torch.tensor(3), [3]),
        (np.array([3, 4]), [3, 4]),
        (np.int64(3), [3]),
        ([torch.tensor(3), np.int32(4)], [3, 4]),
        (range(2), [0, 1]),
    ],
)
def test_samples_are_named_by_numbers_or_texts_in_any_wrapping(build, model, given, expected):
    debugger = build(a=Answer())
    debugger({"meta_info": {"idx": given}}, model)
    assert list(debugger.current_page_data) == expected


@pytest.mark.parametrize("given", [1.5, None, [None], True, [], [[1, 2]]])
def test_what_names_no_sample_is_refused(build, model, given):
    with pytest.raises(ValueError, match="meta_info"):
        build(a=Answer())({"meta_info": {"idx": given}}, model)


def test_a_datapoint_without_a_name_is_an_assertion_error(build, model):
    debugger = build(a=Answer())
    with pytest.raises(AssertionError, match="meta_info"):
        debugger({"inputs": 1}, model)
    with pytest.raises(AssertionError, match="idx"):
        debugger({"meta_info": {"path": "x"}}, model)


def test_entries_for_each_sample_are_handed_out(build, model):
    class Each(BaseDebugger):
        def __call__(self, datapoint, model):
            return {"own": PerSample([{"rank": i} for i in range(3)]), "shape": [1, 2, 3], "whole": torch.ones(2)}

    debugger = build(a=Each())
    debugger({"meta_info": {"idx": [7, 8, 9]}}, model)
    assert debugger.current_page_data[8]["a"]["own"] == {"rank": 1}
    assert debugger.current_page_data[8]["a"]["shape"] == BatchValue([1, 2, 3], (7, 8, 9))
    assert debugger.current_page_data[8]["a"]["whole"].value.tolist() == [1, 1]


class WholeBatch(ForwardDebugger):
    """As people write them: numbers of whatever came, a map, and texts."""

    def process_forward(self, module, input, output):
        return {
            "map": output,
            "stats": {"mean": float(output.mean()), "any": bool((output > 0).any()), "shape": list(output.shape)},
            "max": output.max(),
            "channels": output.mean((0, 2, 3))[:3],
            "numpy": np.float32(output.std()),
            "layer_name": self.layer_name,
            "nothing": None,
        }


def test_a_number_of_a_whole_batch_is_never_one_sample_s(build, model, tmp_path):
    debugger = build(a=WholeBatch("stem"))
    batch = datapoint(model, 4, 5)
    debugger(batch, model)
    debugger(datapoint(model, 6), model)
    debugger.save_all(tmp_path)
    read = load_debug_outputs(tmp_path)
    output = model.stem(batch["inputs"]).detach()
    for at, sample in enumerate((4, 5)):
        found = read[sample]["a"]
        assert np.array_equal(found["map"], output[at : at + 1])
        assert found["stats"]["mean"] == BatchValue(float(output.mean()), (4, 5))
        assert found["stats"]["any"] == BatchValue(True, (4, 5))
        assert found["stats"]["shape"] == BatchValue([2, 4, 6, 6], (4, 5))
        assert found["max"].value == float(output.max())
        assert found["channels"].samples == (4, 5)
        assert found["channels"].value.shape == (3,)
        assert found["numpy"] == BatchValue(np.float32(output.std()), (4, 5))
        assert (found["layer_name"], found["nothing"]) == ("stem", None)
        assert read.tensor(sample, "a", "channels").value.shape == (3,)
        assert read.tensor(sample, "a", "stats/mean") == found["stats"]["mean"]
        assert set(read.previews(sample)["a"]) == {"map", "max", "channels"}
        assert read.info(sample)["batch"] == [4, 5]
    alone = read[6]["a"]
    assert alone["stats"]["mean"] == float(model.stem(image(6)[None]).detach().mean())
    assert "batch" not in read.info(6)


def test_pickled_pages_mark_a_number_of_a_whole_batch_too(build, model, tmp_path):
    joblib = pytest.importorskip("joblib")
    debugger = build({"page_format": "pickle"}, a=WholeBatch("stem"))
    debugger(datapoint(model, 4, 5), model)
    debugger.save_all(tmp_path)
    stats = joblib.load(tmp_path / "page_0.pkl")[5]["a"]["stats"]
    assert stats["any"] == {"scope": "batch", "value": True, "samples": [4, 5]}


def test_smaller_numbers_can_be_stored(build, model, tmp_path):
    debugger = build({"save_dtype": torch.float16}, a=Raw("stem"))
    debugger(datapoint(model, 1), model)
    debugger.save_all(tmp_path)
    assert load_debug_outputs(tmp_path, tensors="torch")[1]["a"]["output"].dtype == torch.float16


def test_only_the_worst_stay_once_scores_are_known(build, model, tmp_path):
    debugger = build({"keep": "worst:2+control:1"}, a=Raw("stem"))
    for idx in range(10):
        debugger(datapoint(model, idx), model)
    debugger.save_all(tmp_path, scores={idx: float(idx) for idx in range(10)}, higher_is_better=False)
    kept = set(load_debug_outputs(tmp_path))
    assert {8, 9} < kept
    assert len(kept) == 3
    assert debugger.counters["discarded"] == 7


def test_old_tools_get_pickled_pages_if_asked_for(build, model, tmp_path):
    joblib = pytest.importorskip("joblib")
    debugger = build({"page_format": "pickle"}, a=Raw("stem"))
    for idx in range(3):
        debugger(datapoint(model, idx), model)
    debugger.save_all(tmp_path / "debugger")
    page = joblib.load(tmp_path / "debugger" / "page_0.pkl")
    assert list(page) == [0, 1, 2]
    assert torch.equal(page[1]["a"]["output"], model.stem(datapoint(model, 1)["inputs"]))


def test_it_cleans_up_when_closed_dropped_or_left(model):
    config = [{"name": "a", "debugger_config": Raw("stem")}]
    with SequentialDebugger(config, model) as debugger:
        debugger.enabled = True
        assert model.stem._forward_hooks
    assert_no_taps(model)
    debugger.close()
    with pytest.raises(ClosedError):
        debugger.enabled = True

    dropped = SequentialDebugger(config, model)
    dropped.enabled = True
    gone = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert gone() is None
    assert_no_taps(model)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sonde")]


def test_the_model_is_not_kept_alive_by_a_closed_debugger_s_hooks():
    model = nn.Sequential(nn.Linear(2, 2))
    with SequentialDebugger([{"name": "a", "debugger_config": Raw("0")}], model) as debugger:
        debugger.enabled = True
        model(torch.ones(1, 2))
    gone = weakref.ref(model)
    del model, debugger
    gc.collect()
    assert gone() is None


def test_a_layer_that_is_not_there_is_named_with_the_nearest(model, build, capsys):
    name = next(name for name, _ in model.named_modules() if len(name) > 2)
    build(a=Raw(f"{name}x"))
    assert f"it will capture nothing. Nearest: {name}" in capsys.readouterr().out


@pytest.mark.parametrize("config", [None, 3, "features"])
def test_what_describes_no_debuggers_is_refused(model, config):
    with pytest.raises(OptionError, match="Debuggers are described by a list of"):
        SequentialDebugger(config, model)


def test_a_datapoint_that_is_not_a_dict_is_refused(model, build):
    with pytest.raises(OptionError, match=r"A datapoint is a dict with 'inputs', 'outputs' and .*; got Tensor"):
        build(a=Raw(""))(torch.ones(2), model)


def test_a_layer_that_did_not_run_is_reported_with_what_to_do(model, build):
    debugger = build(a=Raw(""))
    outputs = debugger({"inputs": None, "meta_info": {"idx": [0]}}, model)
    assert "call the model that the debugger was built with, after debugger.enabled = True" in outputs["a"]["error"]
