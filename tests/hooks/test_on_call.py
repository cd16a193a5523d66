"""One pair of process-wide hooks for all listeners, and rest in steps that are not recorded."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch.nn.modules import module as torch_module

import sonde
from sonde.hooks import on_call
from sonde.hooks.guard import Guard
from sonde.hooks.on_call import ModuleCalls, RootPasses
from sonde.testing import MemorySink, tiny_mlp


def listen(module, heard, name):
    return ModuleCalls(
        {id(module): name},
        lambda entry, args: heard.append(("before", entry)),
        lambda entry, args, kwargs, output: heard.append(("after", entry)),
    )


def num_hooks():
    return len(torch_module._global_forward_pre_hooks), len(torch_module._global_forward_hooks)


def test_all_listeners_share_one_pair_of_hooks_and_hear_in_the_order_they_came():
    model, heard = tiny_mlp(), []
    first, second = listen(model, heard, "first"), listen(model, heard, "second")
    first.attach()
    second.attach()
    assert num_hooks() == (1, 1)
    model(torch.ones(2, 8))
    assert heard == [("before", "first"), ("before", "second"), ("after", "first"), ("after", "second")]
    first.remove()
    assert num_hooks() == (1, 1)
    second.remove()
    assert num_hooks() == (0, 0)


def test_if_all_rest_there_is_no_hook_at_all():
    model, heard = tiny_mlp(), []
    first, second = listen(model, heard, "first"), listen(model[0], heard, "second")
    first.attach()
    second.attach()
    first.rest()
    model(torch.ones(2, 8))
    assert heard == [("before", "second"), ("after", "second")]
    second.rest()
    assert num_hooks() == (0, 0)
    model(torch.ones(2, 8))
    assert len(heard) == 2
    second.wake()
    second.wake()
    assert num_hooks() == (1, 1)
    for each in (first, second):
        each.remove()
    first.wake()
    assert num_hooks() == (0, 0)


def test_who_listens_to_all_modules_hears_each_by_itself():
    model, heard = tiny_mlp(), []
    calls = ModuleCalls(
        None,
        lambda module, args: heard.append(module),
        lambda module, args, kwargs, output: heard.append(output),
    )
    calls.attach()
    output = model(torch.ones(2, 8))
    calls.remove()
    modules = [each for each in heard if isinstance(each, torch.nn.Module)]
    assert modules == [model, *model]
    assert heard[-1] is output
    assert num_hooks() == (0, 0)


def test_a_call_that_raises_is_reported_at_every_module_it_ends():
    model, heard = tiny_mlp(), []
    chosen = ModuleCalls(
        {id(model): "model", id(model[0]): "first", id(model[1]): "second"},
        lambda entry, args: heard.append(("before", entry)),
        lambda entry, args, kwargs, output: heard.append(("after", entry)),
        lambda entry: heard.append(("raised", entry)),
    )
    everything = ModuleCalls(None, lambda module, args: None, lambda *call: None, heard.append)
    deaf = listen(model, [], "hears of no raise")
    for each in (chosen, everything, deaf):
        each.attach()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 3))
    for each in (chosen, everything, deaf):
        each.remove()
    assert heard == [
        ("before", "model"),
        ("before", "first"),
        ("raised", "first"),
        model[0],
        ("raised", "model"),
        model,
    ]


def test_a_pass_that_raised_does_not_hide_the_passes_of_another_model():
    reply = []

    class Listener:
        def begin_pass(self, model, args):
            reply.append(("begin", model))

        def end_pass(self, model, args, kwargs, output):
            reply.append(("end", model))

    first, second = tiny_mlp(), tiny_mlp()
    passes = RootPasses([first, second], Listener(), Guard("raise", lambda *fault: None))
    passes.attach()
    with pytest.raises(RuntimeError):
        first(torch.ones(2, 3))
    second(torch.ones(2, 8))
    passes.remove()
    assert reply == [("begin", first), ("begin", second), ("end", second)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_can_leave_even_if_the_lock_was_held():
    calls = listen(tiny_mlp(), [], "model")
    calls.attach()
    held, done = threading.Event(), threading.Event()

    def hold():
        with on_call._PAIR.lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if not child:
        calls.remove()
        os._exit(7 if num_hooks() == (0, 0) else 1)
    done.set()
    holder.join()
    calls.remove()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def watch(model, optimizer, path, every):
    session = sonde.watch(model, optimizer, run=path, every=every, diagnose=False)
    sink = MemorySink()
    session.subscribe(sink)
    return session, sink


def test_a_step_that_is_not_recorded_calls_modules_as_if_sonde_were_not_there(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inside = []
    model[1].forward = lambda x: inside.append(num_hooks()[1]) or x.relu()
    session, sink = watch(model, optimizer, tmp_path / "run", every=4)
    with session:
        for _ in range(9):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            assert num_hooks()[1] == 1, "what comes between steps is listened to"
    due = [step % 4 == 0 for step in range(1, 10) for _ in range(2)]
    assert inside == [int(each) for each in due]
    assert [block.step for block in sink.blocks if len(block.sites)] == [0, 4, 8]
    assert list(sink.readings("0:output")) == [4, 8]


def test_an_evaluation_after_a_step_that_is_not_recorded_is_seen(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session, sink = watch(model, optimizer, tmp_path / "run", every=4)
    with session:
        for step in range(1, 8):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            if step == 6:
                with torch.no_grad():
                    model(torch.randn(4, 8))
    assert list(sink.readings("0:output@eval")) == [6], "at the step whose weights it uses"


def test_weights_are_the_same_with_and_without_resting(tmp_path):
    def train(watched):
        torch.manual_seed(0)
        model = tiny_mlp()
        optimizer = torch.optim.Adam(model.parameters())
        session = watch(model, optimizer, tmp_path / "run", every=3)[0] if watched else None
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
        if session is not None:
            session.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(map(torch.equal, train(watched=False), train(watched=True)))
