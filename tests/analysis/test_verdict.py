"""Spikes, jumps and the verdict line: what happened is named with its step and cause, and noise is nothing."""

from dataclasses import replace

import numpy as np
import pytest
from tests.analysis.made_run import START, Recipe, gaussian

from sonde.analysis import curves_of, events_of, incidents_of, verdict_on
from sonde.core import schema
from sonde.diagnosis.jumps import find_rate_jumps, find_spikes
from sonde.records import Block, Event, Finding, Site
from sonde.store import RunWriter, open_run


def noise(kind, seed, size=3000):
    draw = np.random.default_rng(seed)
    made = {
        "normal": lambda: 1 + 0.1 * draw.standard_normal(size),
        "lognormal": lambda: np.exp(0.5 * draw.standard_normal(size)),
        "gamma": lambda: draw.gamma(2.0, 1.0, size),
        "exponential": lambda: draw.exponential(1.0, size) + 0.01,
    }
    return made[kind]()


@pytest.mark.parametrize("kind", ["normal", "lognormal", "gamma", "exponential"])
def test_batch_noise_on_a_falling_loss_is_not_a_spike(kind):
    falling = 2 * np.exp(-np.arange(3000) / 800) + 0.3
    for seed in range(3):
        assert find_spikes(np.arange(3000), falling * noise(kind, seed), least_factor=1.2) == []


def test_a_spike_is_found_with_its_step_and_size_and_is_one_event_while_it_decays():
    loss = 1.5 + 0.1 * np.random.default_rng(0).standard_normal(420)
    loss[301:311] += 1.2 * 0.8 ** np.arange(10)
    (found,) = find_spikes(np.arange(1, 421), loss, least_factor=1.2)
    assert found.step in (302, 303)
    assert found.factor == pytest.approx(1.8, abs=0.15)


@pytest.mark.parametrize(
    "rates",
    [
        np.minimum(1, np.arange(1, 1000) / 100),
        np.cos(np.arange(1000) / 700) ** 2 + 1e-6,
        1 / np.sqrt(np.arange(1.0, 1000)),
    ],
)
def test_schedules_do_not_jump(rates):
    assert find_rate_jumps(np.arange(len(rates)), rates) == []


def test_a_learning_rate_that_is_wrong_for_one_step_is_one_jump_and_a_step_decay_is_one():
    rates = np.full(100, 3e-3)
    rates[60] *= 60
    (found,) = find_rate_jumps(np.arange(100), rates)
    assert (found.step, round(found.factor)) == (60, 60)
    decayed = np.where(np.arange(100) < 50, 1.0, 0.1)
    assert [each.step for each in find_rate_jumps(np.arange(100), decayed)] == [50]


def write(path, *, steps=200, state="finished", event=None, **curves):
    """Write a run of scalars, and of one layer whose gradient and update follow `gradient` and `update`."""
    scalars = [name for name in curves if name not in TENSORS]
    sites = [Site(id=at, name=name, quantity="scalar") for at, name in enumerate(scalars)]
    sites += [Site(id=len(sites), name="fc.weight", quantity="parameter", shape=(8, 8))]
    tensors = [name for name in curves if name in TENSORS]
    sites += [
        Site(id=len(sites) + at, name="fc.weight", quantity=name, shape=(8, 8)) for at, name in enumerate(tensors)
    ]
    writer = RunWriter(path, Recipe().run_header())
    writer.take_sites(sites)
    for at in range(steps):
        rows = [_row(site, curves, at) for site in sites]
        known = [number for number, row in enumerate(rows) if row is not None]
        writer.take_block(
            Block(
                step=at + 1, time=START + at, sites=np.array(known, np.uint32),
                rows=np.stack([rows[number] for number in known]),
                bins=np.zeros((len(known), schema.NUM_BINS), np.uint64), binned=np.zeros(len(known), np.bool_),
            )
        )  # fmt: skip
    if event is not None:
        writer.take_event(event)
    writer.final_state = state
    writer.close()
    return open_run(path)


TENSORS = ("gradient", "update")
TIMES = "\N{MULTIPLICATION SIGN}"


def _row(site, curves, at):
    if site.quantity == "parameter":
        return gaussian(64, 1.0)[0]
    value = curves[site.quantity if site.quantity in TENSORS else site.name][at]
    if value is None:
        return None
    return schema.row_of_value(value) if site.quantity == "scalar" else gaussian(64, value)[0]


def falling(steps=200, seed=0):
    loss = 2 * np.exp(-np.arange(steps) / 100) + 0.2
    return loss * (1 + 0.02 * np.random.default_rng(seed).standard_normal(steps))


def test_the_spike_of_a_loss_names_the_learning_rate_and_the_update_before_it(tmp_path):
    loss, rate, update = falling(), np.full(200, 3e-3), np.full(200, 3e-3)
    loss[151:156] *= 1.67
    rate[150], update[150] = 0.18, 0.14
    run = write(tmp_path / "run", loss=loss, **{"optimizer.group0.lr": rate}, update=update)
    spike = next(each for each in incidents_of(run) if each.is_spike)
    assert spike.step in range(152, 157)
    assert f"learning rate {TIMES}60 (0.003 → 0.18)" in spike.cause
    assert f"update ratio {TIMES}46.7 (0.003 → 0.14)" in spike.cause
    assert [event.event_type for event in events_of(run)] == ["jump", "spike"]
    text = verdict_on(run).text
    assert text.startswith("Still learning: loss ")
    assert f"spike at step {spike.step}" in text
    assert f"learning rate {TIMES}60" in text


def test_a_healthy_run_has_no_incident_and_its_constants_are_no_curves(tmp_path):
    run = write(tmp_path / "run", loss=falling(), gradient=1 + 0.1 * noise("normal", 1, 200),
                **{"optimizer.group0.lr": np.full(200, 1e-3), "optimizer.group0.eps": np.full(200, 1e-8)})  # fmt: skip
    assert incidents_of(run) == []
    known = curves_of(run)
    assert known.constants == pytest.approx({"lr": 1e-3, "eps": 1e-8})
    assert [curve.name for curve in known.curves] == ["loss", "gradient norm"]


def test_converged_is_earned(tmp_path):
    flat = np.concatenate([np.geomspace(2.0, 0.2, 80), np.full(220, 0.2)])
    flat *= 1 + 0.02 * np.random.default_rng(0).standard_normal(300)
    assert verdict_on(write(tmp_path / "long", steps=300, loss=flat)).headline == "converged"
    rising = [None if at % 20 else 0.3 + at / 1000 for at in range(300)]
    ill = verdict_on(write(tmp_path / "overfits", steps=300, loss=flat, val_loss=rising), ())
    assert ill.headline == "the loss is flat now"
    assert "val_loss 0.58 and rising" in ill.text
    better = [each and 1 - each for each in rising]
    learns = verdict_on(write(tmp_path / "learns", steps=300, loss=flat, val_loss=better), ())
    assert learns.headline == "still learning (val_loss improves)"
    flat[250:254] *= 3
    assert verdict_on(write(tmp_path / "spikes", steps=300, loss=flat)).headline == "the loss is flat now"


def test_a_loss_that_the_doctor_calls_a_plateau_is_not_called_falling(tmp_path):
    """A slow fall within the noise is a trend to the curve, and none to the doctor: one page says one thing."""
    slow = 3.3 * np.exp(-np.arange(600) / 40) + np.linspace(2.6, 2.3, 600)
    run = write(tmp_path / "slow", steps=600, loss=slow + 0.1 * np.random.default_rng(0).standard_normal(600))
    assert verdict_on(run, ()).headline == "still learning"
    note = Finding(kind="loss_plateau", severity="info", step=400, last_step=600, cause="The loss has stopped falling.")
    ill = verdict_on(run, [note])
    assert (ill.tone, ill.headline, ill.metrics[0].going) == ("fine", "the loss is flat now", "flat")
    assert verdict_on(run, [replace(note, step=200, last_step=300)]).headline == "still learning"  # it was one


def test_each_of_several_losses_is_named(tmp_path):
    verdict = verdict_on(write(tmp_path / "gan", d_loss=falling(), g_loss=1 + falling(seed=3)))
    assert verdict.headline == "nothing wrong was found; 2 losses"
    assert "d_loss " in verdict.text
    assert "g_loss " in verdict.text


def test_a_loss_that_is_nan_says_since_when_and_one_that_is_infinite_too(tmp_path):
    loss = falling()
    loss[150:] = np.nan
    nan = verdict_on(write(tmp_path / "nan", loss=loss))
    assert (nan.tone, nan.headline) == ("bad", "NaN in loss since step 151")
    assert "loss NaN since step 151" in nan.text
    loss[150:] = np.inf
    assert "loss infinite since step 151" in verdict_on(write(tmp_path / "inf", loss=loss)).text


def test_a_failed_run_names_the_innermost_line_of_the_users_own(tmp_path):
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 40, in main\n    check(batch)\n'
        '  File "/src/sonde/src/sonde/hooks/patches.py", line 98, in wrapped\n    return function(*args)\n'
        '  File "/home/me/checks.py", line 7, in check\n    raise ValueError("odd")\n'
        '  File "/src/sonde/src/sonde/hooks/patches.py", line 98, in wrapped\n    return function(*args)\n'
        "ValueError: odd\n"
    )
    failed = Event(
        event_type="exception", message="ValueError: odd", step=200, timestamp=START, data={"traceback": trace}
    )
    verdict = verdict_on(write(tmp_path / "run", loss=falling(), state="failed", event=failed))
    assert verdict.tone == "bad"
    assert verdict.text.startswith("Failed at step 200: The training raised ValueError: odd (checks.py:7); loss ")


def test_the_end_of_a_schedule_that_is_recorded_now_and_then_is_no_jump():
    steps = np.array([120, 121, 143, 144, 145, 162, 163, 169, 193, 208, 209, 217, 237, 238])
    rates = 1e-3 * (1 + np.cos(np.pi * steps / 240))
    assert find_rate_jumps(steps, rates) == []
    rates[10:] *= 0.05
    assert [jump.step for jump in find_rate_jumps(steps, rates)] == [209]


def test_a_loss_that_came_back_from_a_rise_is_not_called_falling(tmp_path):
    losses = np.concatenate([np.full(6, 2.3), np.linspace(9.0, 2.4, 60), np.full(4, 2.35)])
    verdict = verdict_on(write(tmp_path / "run", steps=70, loss=losses + 0.01 * np.sin(np.arange(70.0))))
    assert verdict.headline == "the loss is no lower than at the start"
    assert verdict.metrics[0].going == "no lower than at the start"
