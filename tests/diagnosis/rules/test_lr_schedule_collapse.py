from __future__ import annotations

import numpy as np
import pytest
from patients import asked, patient

from sonde.core.facts import PROGRAM_EVENT, CallFacts, Facts, OptimizerFacts, SchedulerFacts
from sonde.diagnosis.rules.rates import lr_schedule_collapse
from sonde.records import Event


def run(rates):
    return asked(
        lr_schedule_collapse, patient({"optimizer.group0.lr:scalar": list(rates), "loss:scalar": [1.0] * len(rates)})
    )


def test_a_rate_that_is_gone_after_twenty_steps_is_found():
    found = run([0.1 * 0.5 ** (step // 2) for step in range(60)])
    assert found.severity == "warning"
    assert found.sites[0] == "scheduler"
    assert found.step <= 25


def test_schedules_that_end_low_or_begin_low_are_not():
    steps = np.arange(200)
    assert run(0.1 * 0.5 * (1 + np.cos(np.pi * steps / 200))) is None
    assert run(np.where(steps < 50, 1e-6 * (steps + 1), 0.1)) is None
    assert run([0.1 * 0.5 ** (step // 50) for step in range(200)]) is None
    assert run([0.1 * 0.25 ** (step // 40) for step in range(240)]) is None


@pytest.mark.parametrize(
    ("losses", "ill"),
    [
        ([2.4 - 0.003 * min(step, 30) for step in range(70)], True),
        ([2.4] * 70, False),  # it never fell: something else is wrong
        ([2.4 - 0.03 * step for step in range(70)], False),  # it falls all the same
    ],
)
def test_a_rate_that_is_a_hundredth_before_the_loss_has_fallen_is_found(losses, ill):
    rates = [0.1 * 0.9**step for step in range(70)]
    found = asked(lr_schedule_collapse, patient({"optimizer.group0.lr:scalar": rates, "loss:scalar": losses}))
    assert (found is not None) is ill
    assert not ill or "the program itself" in found.cause


def test_the_rate_of_a_second_optimizer_counts_too():
    known = tuple(OptimizerFacts(name=name, kind="Adam") for name in ("optimizer", "optimizer2"))

    def sites(shrink):
        rates = {"optimizer": [1e-3] * 60, "optimizer2": [1e-3 * shrink**step for step in range(60)]}
        curves = {f"{name}.group0.lr:scalar": values for name, values in rates.items()}
        found = asked(lr_schedule_collapse, patient(curves | {"loss:scalar": [1.0] * 60}, Facts(optimizers=known)))
        return None if found is None else found.sites

    assert sites(0.7) == ("scheduler", "optimizer2")
    assert sites(0.99) is None


def plateau(mode, rates):
    facts = Facts(scheduler=SchedulerFacts(kind="ReduceLROnPlateau", settings={"mode": mode}))
    losses = np.exp(-np.arange(len(rates)) / 40).tolist()
    return asked(
        lr_schedule_collapse, patient({"optimizer.group0.lr:scalar": list(rates), "loss:scalar": losses}, facts)
    )


def test_a_plateau_scheduler_that_waits_for_a_loss_to_rise_is_found():
    evenly = [0.1 * 0.3 ** (step // 8) for step in range(100)]
    found = plateau("max", evenly)
    assert (found.severity, "mode='min'" in found.fix) == ("warning", True)
    assert plateau("min", evenly).severity == "info"
    late = [0.1 * 0.3 ** (max(0, step - 40) // 4) for step in range(140)]  # its score rose at first
    assert plateau("max", late).severity == "info"


def test_a_plateau_scheduler_that_gives_up_while_the_loss_falls_is_found():
    rates = [0.1 * 0.1 ** (step // 8) for step in range(100)]

    def severity(losses):
        facts = Facts(scheduler=SchedulerFacts(kind="ReduceLROnPlateau", settings={"mode": "min"}))
        return asked(
            lr_schedule_collapse, patient({"optimizer.group0.lr:scalar": rates, "loss:scalar": losses}, facts)
        ).severity

    assert severity([2.3 - 0.02 * min(step, 24) for step in range(100)]) == "warning"
    assert severity([2.3 - 2.0 * min(step, 10) / 10 for step in range(100)]) == "info"  # it had learnt by then


def stepped(count, *others, **data):
    """Ask about a scheduler that was stepped so often in 100 steps."""
    call = CallFacts(verb="scheduler.step", about="optimizer", count=count, steps=(1,), data=data)
    curves = {"optimizer.group0.lr:scalar": [0.1] * 100, "loss:scalar": [1.0] * 100}
    done = {"program": Facts(program=(call, *others)).to_json()["program"]}
    events = [Event(event_type=PROGRAM_EVENT, message="", timestamp=0.0, data=done)]
    return asked(lr_schedule_collapse, patient(curves, events=events))


def loader(batches):
    return CallFacts(verb="loader.pass", count=2, steps=(1,), data={"length": batches, "trained": 2})


def test_a_cosine_that_falls_and_rises_within_an_epoch_is_found():
    assert "every 20 batches" in stepped(100, loader(50), kind="CosineAnnealingLR", length=10).cause
    assert stepped(100, loader(15), kind="CosineAnnealingLR", length=10) is None  # longer than an epoch
    assert stepped(10, loader(50), kind="CosineAnnealingLR", length=10) is None  # once an epoch


def test_a_plateau_scheduler_that_follows_a_score_downwards_is_found():
    found = stepped(5, kind="ReduceLROnPlateau", mode="min", follows="val_acc")
    assert (found.severity, "mode='max'" in found.fix) == ("warning", True)
    assert "mode='min'" in stepped(5, kind="ReduceLROnPlateau", mode="max", follows="val_loss").fix
    for mode, name in [("max", "val_acc"), ("min", "val_loss"), ("min", "dice_loss"), ("min", "x"), ("max", "")]:
        assert stepped(5, kind="ReduceLROnPlateau", mode=mode, follows=name) is None


def test_a_warm_up_that_begins_again_in_every_epoch_is_found():
    steps = np.arange(100)
    found = run(1e-3 * (1 + steps % 20))
    assert "every 20 steps" in found.cause
    assert run(1e-3 * np.minimum(1 + steps, 20)) is None  # once
    assert run(1e-2 * (1 + np.abs(steps % 40 - 20))) is None  # up and down, step by step
    assert run(1e-2 * (1 + np.cos(np.pi * (steps % 20) / 20))) is None  # warm restarts
