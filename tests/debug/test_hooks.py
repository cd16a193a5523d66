"""Hooks: conditions that are false do not fire, actions really act, a failing one is isolated."""

from __future__ import annotations

import re

import pytest
import torch

from sonde.debug import AlertSeverity, HookAction, HookBuilder, HookCondition, HookManager, HookTrigger
from sonde.debug.hooks import matches
from sonde.errors import OptionError
from sonde.testing import FakeClock


def hook(trigger=HookTrigger.EveryForward, action=None, name="h", patterns=(), limit=None):
    builder = (
        HookBuilder(name).trigger(trigger).action(action or HookAction.CustomCallback(lambda occasion: occasion.layer))
    )
    builder = builder.layer_patterns(list(patterns))
    return (builder.max_executions(limit) if limit else builder).build()


def fired(manager, layer="fc", data=(1.0, 2.0), **options):
    return [result.hook_name for result in manager.execute_hooks(layer, list(data), **options)]


@pytest.mark.parametrize(
    ("pattern", "layer", "expected"),
    [
        ("attention.*", "attention_layer_1", True),
        ("layer1", "layer1", True),
        ("layer1", "layer10", False),
        ("*.weight", "fc.weight", True),
        ("encoder.*.attn", "encoder.3.attn", True),
        ("re:enc.*", "encoder", True),
        ("re:enc", "encoder", False),
        ("glob:a.*", "ab", False),
        ("glob:a.*", "a.b", True),
    ],
)
def test_patterns_match_the_whole_name_as_glob_or_expression(pattern, layer, expected):
    assert matches(pattern, layer) is expected


def test_a_broken_expression_is_reported_when_the_hook_is_built():
    with pytest.raises(OptionError, match="not a regular expression"):
        HookBuilder("x").layer_patterns(["re:("])


def test_triggers_fire_when_they_say():
    manager = HookManager()
    manager.register(hook(HookTrigger.EveryForward, name="forward"))
    manager.register(hook(HookTrigger.EveryBackward, name="backward"))
    manager.register(hook(HookTrigger.EveryNSteps(3), name="third"))
    manager.register(hook(HookTrigger.Once, name="once"))
    manager.register(hook(HookTrigger.LayerSpecific(["other"]), name="other"))
    seen = []
    for step in range(4):
        manager.set_step(step)
        seen.append(set(fired(manager)))
    assert seen == [{"forward", "third", "once"}, {"forward"}, {"forward"}, {"forward", "third"}]
    assert fired(manager, is_forward=False) == ["backward"]
    assert "other" in fired(manager, layer="other")


@pytest.mark.parametrize(
    ("condition", "quiet", "loud"),
    [
        (HookCondition.LossThreshold(2.0), {"loss": 1.0}, {"loss": 3.0}),
        (HookCondition.GradientNormThreshold(2.0), {"gradient_norm": 1.0}, {"gradient_norm": 3.0}),
        (HookCondition.MemoryThreshold(100), {"memory_mb": 50}, {"memory_mb": 150}),
        (HookCondition.Statistic("accuracy", "<", 0.5), {"accuracy": 0.9}, {"accuracy": 0.1}),
        (HookCondition.LossThreshold(2.0), {}, {"loss": 2.5}),
        (HookCondition.LossThreshold(2.0), {"loss": float("nan")}, {"loss": 2.5}),
    ],
)
def test_a_condition_that_is_false_does_not_fire(condition, quiet, loud):
    manager = HookManager()
    manager.register(hook(HookTrigger.Conditional(condition)))
    assert fired(manager, metadata=quiet) == []
    assert fired(manager, metadata=loud) == ["h"]


def test_conditions_on_the_tensor_itself():
    manager = HookManager()
    manager.register(hook(HookTrigger.Conditional(HookCondition.NonFinite()), name="nan"))
    manager.register(hook(HookTrigger.Conditional(HookCondition.Statistic("max", ">=", 5)), name="max"))
    manager.register(hook(HookTrigger.Conditional(HookCondition.StepRange(2, 4)), name="steps"))
    manager.register(hook(HookTrigger.Conditional(HookCondition.Custom(lambda o: len(o.values) == 3)), name="three"))
    assert fired(manager, data=[1.0, 2.0]) == []
    assert fired(manager, data=[1.0, float("nan")]) == ["nan"]
    assert fired(manager, data=[1.0, 7.0]) == ["max"]
    assert fired(manager, data=[1.0, 1.0, 1.0]) == ["three"]
    manager.set_step(2)
    assert fired(manager) == ["steps"]


def test_the_norm_of_a_gradient_is_its_own_in_a_backward():
    manager = HookManager()
    manager.register(hook(HookTrigger.Conditional(HookCondition.GradientNormThreshold(4.9))))
    assert fired(manager, data=[3.0, 4.0], is_forward=False) == ["h"]
    assert fired(manager, data=[3.0, 4.0]) == []


def test_max_executions_and_switches():
    manager = HookManager()
    number = manager.register(hook(limit=2))
    assert [len(fired(manager)) for _ in range(3)] == [1, 1, 0]
    assert manager.get_statistics()[number].executions == 2
    other = manager.register(hook())
    manager.enable(other, False)
    assert fired(manager) == []
    manager.enable(other)
    manager.set_enabled(False)
    assert fired(manager) == []
    manager.set_enabled(True)
    assert fired(manager) == ["h"]
    assert manager.remove(other)
    assert not manager.remove(other)
    with pytest.raises(OptionError, match="There is no hook 'hook-9'"):
        manager.enable("hook-9")


def test_a_failing_hook_is_isolated_and_counted(caplog):
    clock = FakeClock(0.0)
    manager = HookManager(clock=clock)

    def fail(occasion):
        clock.advance(2.0)
        raise ZeroDivisionError("planted")

    bad = manager.register(hook(action=HookAction.CustomCallback(fail), name="bad"))
    manager.register(hook(name="good"))
    results = manager.execute_hooks("fc", [1.0])
    assert [(result.hook_name, result.success) for result in results] == [("bad", False), ("good", True)]
    statistics = manager.get_statistics()[bad]
    assert (statistics.failures, statistics.total_time) == (1, 2.0)
    assert "planted" in statistics.last_error
    assert "the hook 'bad' failed on fc" in caplog.text


def test_callbacks_by_name_and_flat_data_with_a_shape():
    manager = HookManager()
    manager.register_callback("shape", lambda occasion: occasion.shape)
    manager.register(hook(action=HookAction.CustomCallback("shape")))
    assert manager.execute_hooks("fc", [1.0, 2.0, 3.0, 4.0], [2, 2], True, None)[0].values == ((2, 2),)
    manager.register(hook(action=HookAction.CustomCallback("missing"), name="missing"))
    assert "No callback 'missing'" in manager.execute_hooks("fc", torch.ones(2))[1].error


def test_an_incomplete_hook_says_what_it_lacks():
    with pytest.raises(OptionError, match=r"call trigger\(...\)"):
        HookBuilder("x").action(HookAction.InspectTensor).build()
    with pytest.raises(OptionError, match=r"call action\(...\)"):
        HookBuilder("x").trigger(HookTrigger.EveryForward).build()


def test_severities_by_name_or_by_constant():
    assert HookAction.Alert("m", "critical") == HookAction.Alert("m", AlertSeverity.Critical)


def test_what_is_not_a_trigger_or_action_is_refused_with_an_example():
    with pytest.raises(OptionError, match=r"such as HookTrigger.EveryNSteps\(10\); got 5"):
        HookBuilder("x").trigger(5)
    with pytest.raises(OptionError, match=r"such as HookAction\.InspectTensor"):
        HookBuilder("x").action(HookAction.Alert)


def builder():
    return HookBuilder("h").trigger(HookTrigger.EveryForward).action(HookAction.CustomCallback(lambda occasion: 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: builder().max_executions("3"), "max_executions takes a whole number of at least 1; got '3'"),
        (lambda: builder().layer_patterns([3]), "layer_patterns takes names of layers; got 3"),
        (lambda: HookTrigger.EveryNSteps("2"), "EveryNSteps takes a whole number"),
        (lambda: HookTrigger.Conditional("loss > 1"), "Conditional takes a condition such as"),
        (lambda: HookCondition.StepRange(5, 5), "holds no step"),
        (lambda: HookAction.Alert("x", "loud"), "severity='loud': choose from info, warning, critical"),
        (lambda: HookAction.Alert("x", webhook="ftp://host"), "begins with http:// or https://"),
        (lambda: HookAction.CustomCallback(5), "takes a function or the name of one; got 5"),
        (lambda: HookManager().register("a hook"), "takes a hook made with HookBuilder"),
    ],
)
def test_a_hook_that_could_not_work_is_refused_when_it_is_made(make, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        make()


def test_one_name_is_a_list_of_one_and_not_of_letters():
    assert builder().layer_patterns("attention.*").build().layer_patterns == ("attention.*",)
    assert HookTrigger.LayerSpecific("layer1").layers == ("layer1",)


def test_a_builder_is_built_and_a_function_is_a_condition_where_they_are_handed_over():
    manager = HookManager()
    manager.register(builder().trigger(HookTrigger.Conditional(lambda occasion: occasion.layer == "a")))
    assert [len(manager.execute_hooks(layer, [1.0])) for layer in "ab"] == [1, 0]


def test_values_that_do_not_fill_their_shape_are_reported():
    manager = HookManager()
    manager.register(builder())
    with pytest.raises(OptionError, match=r"2 values of 'a' do not fill the shape \(3,\)"):
        manager.execute_hooks("a", [1.0, 2.0], [3])
