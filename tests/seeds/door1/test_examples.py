"""Every Python example runs as it stands, but for its import lines."""

from __future__ import annotations

import inspect
import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.seeds.door1.conftest import block

import sonde.debuggers
from sonde.debuggers import BaseDebugger, ForwardDebugger, SequentialDebugger
from sonde.store.pages import load_debug_outputs
from sonde.testing import assert_no_taps
from sonde.training import apply_tensor_op, build_from_config

EXAMPLES = ("feature map", "attention", "activation stats", "layer output", "gradcam", "config")


@torch.no_grad()
def test_overview_debuggers_and_config_capture_every_datapoint(run, model, evaluate, tmp_path):
    space = run("overview", "define", "config", computed_gradcam=torch.ones(1, 8, 8))
    assert space["config"]["checkpoint_method"] == 5
    debugger = build_from_config(space["config"]["debugger"], model=model)
    assert isinstance(debugger, SequentialDebugger)
    debugger.enabled = True
    debugger.reset_buffer()
    seen = evaluate(debugger, model)
    debugger.save_all(str(tmp_path / "epoch_4" / "debugger"))
    debugger.close()
    stored = load_debug_outputs(tmp_path / "epoch_4" / "debugger", tensors="torch")
    assert list(stored) == list(range(6))
    for idx, dp in seen.items():
        features = stored[idx]["backbone_features"]
        expected = model.backbone(dp["inputs"])
        torch.testing.assert_close(features["feature_map"], expected)
        assert features["stats"]["mean"] == pytest.approx(float(expected.mean()), rel=1e-5)
        assert torch.equal(stored[idx]["gradcam_analysis"]["gradcam"], torch.ones(1, 8, 8))
    assert_no_taps(model)


@pytest.mark.parametrize("built_first", [True, False], ids=["built by the trainer", "built directly"])
@torch.no_grad()
def test_all_example_debuggers_run_together(run, model, evaluate, tmp_path, built_first):
    space = run("examples", *EXAMPLES)
    described = space["config"]["debugger"]
    if built_first:
        debugger = build_from_config(described, model=model)
    else:
        debugger = described["class"](**described["args"], model=model)
    with debugger:
        assert list(debugger.debuggers) == [
            "backbone_features",
            "attention_analysis",
            "activation_stats",
            "raw_outputs",
            "gradcam_analysis",
        ]
        assert all(type(each).__module__ != "sonde" for each in debugger.debuggers.values())
        debugger.enabled = True
        seen = evaluate(debugger, model)
        debugger.save_all(tmp_path / "debugger")
    stored = load_debug_outputs(tmp_path / "debugger", tensors="torch")
    for idx, dp in seen.items():
        second = model.backbone.layer2(model.backbone.layer1(dp["inputs"]))
        third = model.backbone.layer3(second)
        outputs = stored[idx]
        torch.testing.assert_close(outputs["backbone_features"]["feature_map"], model.backbone.layer4(third))
        assert outputs["backbone_features"]["stats"]["shape"] == [1, 8, 8, 8]
        torch.testing.assert_close(outputs["attention_analysis"]["attention_map"].sum(-1), torch.ones(1, 64))
        assert outputs["activation_stats"]["module_type"] == "Stage"
        assert outputs["activation_stats"]["activation_stats"]["max"] == pytest.approx(float(third.max()))
        torch.testing.assert_close(outputs["raw_outputs"]["output"], torch.nn.functional.avg_pool2d(second, 2))
        assert outputs["gradcam_analysis"]["gradcam"].shape == (1, 8, 8)
        assert outputs.keys() == dp["debug"].keys()


@torch.no_grad()
def test_the_ready_debuggers_take_the_same_config(run, model, evaluate, tmp_path):
    ready = {name: getattr(sonde.debuggers, name) for name in sonde.debuggers.__all__}
    space = run("examples", "config", **ready)
    with build_from_config(space["config"]["debugger"], model=model) as debugger:
        debugger.enabled = True
        seen = evaluate(debugger, model)
        debugger.save_all(tmp_path / "debugger")
    stored = load_debug_outputs(tmp_path / "debugger", tensors="torch")
    for idx, dp in seen.items():
        outputs = stored[idx]
        features = model.backbone(dp["inputs"])
        torch.testing.assert_close(outputs["backbone_features"]["feature_map"], features)
        assert outputs["backbone_features"]["stats"]["mean"] == pytest.approx(float(features.mean()), rel=1e-5)
        assert outputs["attention_analysis"]["source"] == "returned"
        assert len(outputs["activation_stats"]["activation_stats"]["channel_means"]) == 6
        assert outputs["raw_outputs"]["original_shape"] == [1, 6, 8, 8]
        assert outputs["raw_outputs"]["output"].shape == (1, 6, 4, 4)
        assert outputs["gradcam_analysis"]["target_class"] == int(dp["outputs"].argmax())
        assert outputs["gradcam_analysis"]["gradcam"].max() >= 0


@torch.no_grad()
def test_the_ready_debuggers_give_the_numbers_of_the_examples(run, model, evaluate):
    """Names mean what they mean there: `l1_norm` is the mean of the magnitudes, `l2_norm` the whole norm."""
    space = run("examples", "feature map", "activation stats", "layer output")
    seen = {}
    for source in (space, vars(sonde.debuggers)):
        config = [
            {"name": "features", "debugger_config": source["FeatureMapDebugger"]("backbone.layer4")},
            {"name": "statistics", "debugger_config": source["ActivationStatsDebugger"]("backbone.layer3")},
            {"name": "raw", "debugger_config": source["LayerOutputDebugger"]("backbone.layer2", 2)},
        ]
        with SequentialDebugger(config, model) as debugger:
            debugger.enabled = True
            seen[source is space] = {idx: dp["debug"] for idx, dp in evaluate(debugger, model).items()}
    for theirs, ours in zip(seen[True].values(), seen[False].values(), strict=True):
        pairs = [(theirs["features"]["stats"], ours["features"]["stats"])]
        pairs += [(theirs["statistics"]["activation_stats"], ours["statistics"]["activation_stats"])]
        for expected, found in pairs:
            for name, value in expected.items():
                torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value), rtol=1e-4, atol=1e-6)
        assert ours["statistics"]["sample_values"].flatten().tolist() == theirs["statistics"]["sample_values"]
        torch.testing.assert_close(ours["raw"].pop("output"), theirs["raw"].pop("output"))
        assert ours["raw"] == theirs["raw"]


def test_drawing_random_numbers_in_a_debugger_changes_nothing_outside(run, model, evaluate, tmp_path):
    """The example that computes Grad-CAM draws it at random; training must not notice."""
    space = run("examples", "gradcam")
    config = [{"name": "mock", "debugger_config": space["GradCAMDebugger"]("backbone.layer4")}]
    with SequentialDebugger(config, model) as debugger:
        debugger.enabled = True
        torch.manual_seed(5)
        evaluate(debugger, model)
        found = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(found, torch.rand(3))


def test_the_reference_signatures_fit():
    names: dict[str, Any] = {"torch": torch, "Any": Any, "Dict": dict, "List": list}
    for name, owner, methods in (
        ("base call", BaseDebugger, ["__call__"]),
        ("forward call", ForwardDebugger, ["process_forward"]),
        ("sequential calls", SequentialDebugger, ["__init__", "__call__"]),
    ):
        space = dict(names)
        exec(block("overview", name), space)
        for method in methods:
            theirs = inspect.signature(space[method]).parameters
            ours = inspect.signature(getattr(owner, method)).parameters
            shared = list(ours)[: len(theirs)]
            assert shared == list(theirs)
            assert all(ours[each].default == theirs[each].default for each in theirs)
            added = [ours[each] for each in list(ours)[len(theirs) :]]
            assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in added)


def test_a_method_of_the_reference_makes_a_class_concrete():
    space: dict[str, Any] = {"torch": torch, "Any": Any, "Dict": dict}
    exec(block("overview", "base call"), space)
    exec(block("overview", "forward call"), space)
    base = type("Mine", (BaseDebugger,), {"__call__": space["__call__"]})
    forward = type("Forward", (ForwardDebugger,), {"process_forward": space["process_forward"]})
    assert base()({}, torch.nn.Identity()) is None
    assert forward("0")({}, torch.nn.Identity()) is None


def test_a_custom_debugger_is_one_method(run, model, evaluate, tmp_path):
    space = run(
        "principles",
        "custom",
        BaseDebugger=BaseDebugger,
        custom_analysis=lambda datapoint, model: {"margin": datapoint["outputs"].max()},
    )
    with SequentialDebugger([{"name": "mine", "debugger_config": space["MyCustomDebugger"]()}], model) as debugger:
        debugger.enabled = True
        seen = evaluate(debugger, model)
        debugger.save_all(tmp_path)
    stored = load_debug_outputs(tmp_path, tensors="torch")
    assert all(stored[idx]["mine"]["margin"] == dp["outputs"].max() for idx, dp in seen.items())


def test_the_patterns_of_other_components_hold(model):
    text = block("principles", "same patterns")
    fragment, _, rest = text.partition("\n# Same async buffer pattern\n")
    config = eval("{" + fragment + "}", {"SequentialDebugger": SequentialDebugger})
    assert config["debugger"]["class"] is SequentialDebugger  # its args are left out of the example
    with SequentialDebugger([], model) as debugger:
        debugger._buffer_worker = lambda: None
        exec(rest, {"self": debugger, "threading": threading, "queue": queue})
        assert isinstance(debugger._buffer_queue, queue.Queue)
        assert debugger._buffer_thread.daemon


def test_the_memory_pattern_runs_on_our_class(model):
    with SequentialDebugger([], model) as debugger:
        space = {"self": debugger, "apply_tensor_op": apply_tensor_op}
        space["debug_outputs"] = {"a": [torch.ones(2, requires_grad=True)]}
        exec(block("principles", "memory"), space)
        assert not space["processed_outputs"]["a"][0].requires_grad
        debugger._save_current_page()


def test_the_one_line_in_an_evaluation_step_is_enough(model):
    dp = {"inputs": torch.randn(1, 3, 8, 8), "meta_info": {"idx": 0}}
    dp["outputs"] = model(dp["inputs"])
    with SequentialDebugger([], model) as debugger:
        runner = SimpleNamespace(debugger=debugger, model=model)
        exec(block("principles", "minimal change"), {"self": runner, "dp": dp})
        assert "debug" not in dp
        debugger.enabled = True
        exec(block("principles", "minimal change"), {"self": runner, "dp": dp})
        assert dp["debug"] == {}


def test_a_new_type_of_debugger_comes_in_through_the_config(model):
    text = block("principles", "new type")
    definition, _, fragment = text.partition("\n# Automatic integration through config\n")
    space: dict[str, Any] = {"BaseDebugger": BaseDebugger, "new_analysis": lambda: {"answer": 42}}
    exec(definition, space)
    config = eval("{" + fragment + "}", space)["debuggers_config"]
    assert config[0]["debugger_config"]["args"] == {...}
    config[0]["debugger_config"]["args"] = {}  # what the example leaves out
    with SequentialDebugger(config, model) as debugger:
        debugger.enabled = True
        assert debugger({"meta_info": {"idx": 0}}, model) == {"new_analysis": {"answer": 42}}
