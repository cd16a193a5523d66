"""The guard: whatever goes wrong in Sonde's code, training continues, and a part that failed is reported once."""

from __future__ import annotations

import functools
import gc
import logging
import signal
import sys
import types

import pytest
import torch
from torch import nn

from sonde.core.collector import uncollected
from sonde.hooks.guard import Guard, attempt, remove_all
from sonde.hooks.on_step import _STEPS as step_hooks
from sonde.hooks.on_step import on_step
from sonde.hooks.replace_function import BACKWARD


class Fault(Exception):
    """A fault of Sonde's."""


def failing(error):
    def fail(*args):
        raise error

    return fail


@pytest.mark.parametrize("error", [Fault(), MemoryError(), RecursionError()], ids=lambda error: type(error).__name__)
def test_a_part_that_fails_is_reported_once_and_disabled_and_the_others_continue(error):
    reports, ran = [], []
    guard = Guard("isolate", lambda part, trace: reports.append((part, trace)))
    bad, good = guard.wrap("bad", failing(error)), guard.wrap("good", ran.append)
    for number in range(3):
        bad(number)
        good(number)
    assert [part for part, _ in reports] == ["bad"]
    assert type(error).__name__ in reports[0][1]
    assert ran == [0, 1, 2]


def test_of_several_callbacks_each_is_guarded_by_itself():
    reports, ran = [], []
    guard = Guard("isolate", lambda part, trace: reports.append(part) or failing(ValueError())())
    call_all = guard.wrap_all([("bad", failing(Fault())), ("good", ran.append), ("worse", failing(MemoryError()))])
    for number in range(3):
        call_all(number)
    assert reports == ["bad", "worse"]
    assert ran == [0, 1, 2]
    assert guard.failed == {"bad", "worse"}
    assert guard.wrap_all([])(1, 2) is None
    with pytest.raises(Fault):
        Guard("raise", lambda *report: None).wrap_all([("bad", failing(Fault()))])(1)


def test_an_exception_reaches_the_user_if_he_asked_for_that():
    with pytest.raises(Fault):
        Guard("raise", lambda *report: None).wrap("bad", failing(Fault()))()


def test_ctrl_c_always_reaches_the_user():
    guard = Guard("isolate", lambda *report: None)
    with pytest.raises(KeyboardInterrupt):
        guard.wrap("bad", failing(KeyboardInterrupt()))()
    assert not guard.failed


@pytest.mark.parametrize("kind", ["function", "partial", "object"])
def test_what_the_programs_own_signal_handler_raises_comes_out_and_disables_nothing(kind):
    class Handler:
        def __call__(self, number, frame):
            raise Fault("a time limit of the program")

    def handle(*args):
        raise Fault("a time limit of the program")

    reports = []
    guard = Guard("isolate", lambda part, trace: reports.append(part))
    ring = functools.partial(signal.raise_signal, signal.SIGUSR1)
    handler = {"function": handle, "partial": functools.partial(handle, 1), "object": Handler()}[kind]
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for call in (
            lambda: guard.wrap("a part", ring)(),
            lambda: guard.wrap_all([("a part", ring), ("another", ring)])(),
            lambda: guard.run_each([("a part", ring)]),
            lambda: attempt(ring),
            lambda: remove_all([types.SimpleNamespace(remove=ring)]),
        ):
            with pytest.raises(Fault, match="a time limit"):
                call()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not guard.failed
    assert not reports


def test_a_report_that_fails_does_not_reach_the_user_and_the_part_is_disabled():
    calls = []
    guard = Guard("isolate", failing(ValueError("a report")))

    def fail():
        calls.append(1)
        raise Fault

    guarded = guard.wrap("bad", fail)
    guarded()
    guarded()
    assert calls == [1]


def test_a_logging_handler_that_raises_does_not_reach_the_user():
    class Broken(logging.Handler):
        def emit(self, record):
            raise OSError("the log is full")

    logger, handler = logging.getLogger("sonde.test_guard"), Broken()
    logger.addHandler(handler)
    try:
        guard = Guard("isolate", lambda part, trace: logger.warning("%s failed", part))
        guard.wrap("bad", failing(Fault()))()
        assert guard.failed == {"bad"}
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_clock_that_fails_does_not_reach_the_user_and_the_meter_stays_sound(fails_at):
    guard = Guard("isolate", lambda *report: None)
    times = 0

    def clock():
        nonlocal times
        times += 1
        if times == fails_at:
            raise OSError("no clock")
        return float(times)

    guard.meter.clock = clock
    guard.wrap("timed", lambda: None)()
    assert guard.failed == {"timed"}
    assert guard.meter.span.depth == 0


def test_a_program_at_its_recursion_limit_only_loses_the_part():
    guard = Guard("isolate", lambda *report: None)
    guarded = guard.wrap("deep", lambda: None)

    def descend():
        try:  # noqa: SIM105 - it has to need no further frames
            descend()
        except RecursionError:
            pass
        guarded()

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(200)
    try:
        try:
            descend()
        except RecursionError as error:  # entering the guard itself may be one call too many
            frames = []
            trace = error.__traceback__
            while trace is not None:
                frames.append(trace.tb_frame.f_code.co_name)
                trace = trace.tb_next
            assert "guarded" not in frames
    finally:
        sys.setrecursionlimit(limit)
    assert guard.meter.span.depth == 0


def test_all_hooks_are_removed_even_if_one_cannot_be():
    class Stuck:
        def remove(self):
            raise Fault

    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer, steps = torch.optim.SGD([parameter]), []
    guard = Guard("isolate", lambda *report: None)
    handles = [Stuck(), *on_step(guard.wrap("before", steps.append), guard.wrap("after", steps.append)), Stuck()]
    remove_all(handles)
    optimizer.step()
    assert not handles
    assert not steps
    assert not guard.failed


def test_what_fails_while_no_garbage_is_collected_leaves_the_collector_and_the_lock_free():
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        uncollected(fail)
    # A handler of a signal may run the model once more in the middle of it.
    assert uncollected(lambda: (gc.isenabled(), uncollected(gc.isenabled), gc.isenabled())) == (False, False, False)
    assert gc.isenabled()
    gc.disable()
    try:
        assert not uncollected(gc.isenabled)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_listeners_are_called_while_their_guard_is_awake_or_asleep_or_always():
    guard, other, seen = Guard("isolate", print), Guard("isolate", print), []

    def note(who, name):
        return who.wrap(name, lambda *args: seen.append(name))

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    during = ("always", "awake", "asleep")
    handles = [BACKWARD.listen(before=note(guard, f"backward {each}"), during=each) for each in during]
    handles += [
        each for name in during for each in on_step(note(guard, name), note(guard, f"after {name}"), during=name)
    ]
    handles.append(BACKWARD.listen(before=note(other, "another's"), during="awake"))
    try:
        for asleep in (False, True, False):
            (guard.sleep if asleep else guard.wake)()
            seen.clear()
            torch.ones(1, requires_grad=True).sum().backward()
            optimizer.step()
            now = "asleep" if asleep else "awake"
            expected = [
                "backward always",
                f"backward {now}",
                "another's",
                "always",
                now,
                "after always",
                f"after {now}",
            ]
            assert seen == expected
    finally:
        guard.sleep()
        guard.release()
        other.release()
    assert not Guard.asleep
    seen.clear()
    torch.ones(1, requires_grad=True).sum().backward()
    optimizer.step()
    assert not seen


def test_what_is_woken_before_a_call_takes_part_in_it():
    guard, seen = Guard("isolate", print), []
    wake = guard.wrap("wake", lambda *args: guard.wake())
    see, end = guard.wrap("see", lambda *args: seen.append("before")), guard.wrap("end", lambda: seen.append("end"))
    BACKWARD.listen(before=wake, during="asleep")
    BACKWARD.listen(before=see, end=end, during="awake")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    on_step(wake, wake, during="asleep")
    on_step(see, see, during="awake")
    try:
        guard.sleep()
        torch.ones(1, requires_grad=True).sum().backward()
        assert seen == ["before", "end"]
        guard.sleep()
        optimizer.step()
        assert seen == ["before", "end", "before", "before"]
    finally:
        guard.release()


def test_a_fault_in_choosing_who_hears_of_a_step_does_not_reach_the_program(monkeypatch):
    steps = []
    guard = Guard("isolate", lambda part, trace: None)
    (listener,) = on_step(guard.wrap("before", steps.append), guard.wrap("after", lambda *args: steps.append("after")))
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(2)

    def fail(self):
        raise RecursionError

    with monkeypatch.context() as patch:
        patch.setattr(type(step_hooks), "_settle", fail)
        patch.setattr(step_hooks, "_asleep", frozenset({-1}))
        optimizer.step()
        with pytest.raises(RecursionError):
            listener.remove()
    assert steps[-1] == "after"
    assert not step_hooks._handles
    listener.remove()
