"""Run programs with one function of Sonde's failing, in forked children.

Reads a list of orders per line as JSON, and answers with a line of JSON for each: what came out in the program, whether
its results are the same bits, and what was left behind after `close()`. The orders of a list are obeyed in one child,
until one of them leaves anything behind, or ends otherwise than wished (`wanted`): those after it are not answered.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import io
import json
import logging
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.injection import instrument

LIMIT_S = 230  # by the clock, on a machine that may be busy; less than who asks waits for an answer
ERRORS = {
    each.__name__: each for each in (RuntimeError, MemoryError, RecursionError, OSError, KeyboardInterrupt, ValueError)
}


class Faults:
    """Makes one function fail, once or always, and counts how often that happened."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.target = order["target"]
        self.error = ERRORS[order.get("error", "RuntimeError")]
        self.left = order.get("times") or 1 << 60
        self.raised = 0
        self.moment = order.get("moment", "entry")

    def arm(self, *, is_started: bool) -> None:
        """Let it fail from now on: while a session starts only if that was ordered."""
        if is_started or self.moment == "start":
            instrument.arm(**{"end" if self.moment == "exit" else "entry": self})
        else:
            instrument.arm()

    def __call__(self, name: str) -> None:
        if name != self.target or self.raised >= self.left:
            return
        if self.error is KeyboardInterrupt and threading.current_thread() is not threading.main_thread():
            return  # Python delivers it to the main thread only
        self.raised += 1
        raise self.error("injected")


class Reached:
    """Notes which functions are reached: at the start of a session and later, and outside the main thread only."""

    def __init__(self) -> None:
        self.names: dict[str, bool] = {}
        self.at_start: set[str] = set()
        self._is_started = False

    def arm(self, *, is_started: bool) -> None:
        """Note from now on."""
        self._is_started = is_started
        instrument.arm(entry=self)

    def __call__(self, name: str) -> None:
        if not self._is_started:
            self.at_start.add(name)
            return
        here = threading.current_thread() is threading.main_thread()
        self.names[name] = self.names.get(name, False) or here


def digest(value: Any) -> str:
    """Return a hash of all bits of tensors in lists and tuples."""
    import torch

    whole = hashlib.sha256()

    def add(each: Any) -> None:
        if isinstance(each, torch.Tensor):
            whole.update(each.detach().contiguous().numpy().tobytes())
        else:
            for item in each:
                add(item)

    add(value)
    return whole.hexdigest()


def torch_functions() -> dict[str, Any]:
    """Return everything of torch that Sonde might stand in for."""
    import torch
    from torch.utils.data import dataloader

    owners = [torch, torch.Tensor, torch.nn.functional, torch.nn.Module, torch.optim.Optimizer, torch.autograd]
    owners += [torch.amp.GradScaler, dataloader._BaseDataLoaderIter, dataloader.DataLoader, torch.cuda]
    return {
        f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items() if callable(value)
    }


def threads_left(patience_s: float) -> list[str]:
    """Return the threads of Sonde's that do not end."""
    deadline = time.monotonic() + patience_s
    found = [each for each in threading.enumerate() if each.name.startswith("sonde")]
    for each in found:
        each.join(max(0.0, deadline - time.monotonic()))
    return [f"thread {each.name}" for each in found if each.is_alive()]


def hooks_left(model: Any) -> list[str]:
    """Return the hooks on a model and on torch that are not the program's own."""
    from sonde.testing import assert_no_taps

    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if "tests" in getattr(getattr(hook, "__code__", None), "co_filename", ""):
                del module._forward_hooks[key]
    try:
        assert_no_taps(model)
    except AssertionError as error:
        return [str(error)]
    return []


def left_behind(models: list[Any], functions: dict[str, Any], limit: int, patience_s: float) -> list[str]:
    """Return what Sonde left in the process."""
    import torch

    from sonde import session
    from sonde.hooks.guard import Guard

    now = torch_functions()
    states = {
        "a dispatch mode": torch._C._len_torch_dispatch_stack() > 0,
        "a paused observer": Guard.paused is not None,
        "a session that counts as open": bool(session._live),
        "another recursion limit": sys.getrecursionlimit() != limit,
        "a garbage collector that is off": not gc.isenabled(),
        "a mode of autograd": torch.is_anomaly_enabled() or not torch.is_grad_enabled(),
    }
    return [
        *threads_left(patience_s),
        *(each for model in models for each in hooks_left(model)),
        *(f"{name} is not torch's own" for name, value in functions.items() if now.get(name) is not value),
        *(name for name, is_left in states.items() if is_left),
    ]


def obey(order: dict[str, Any]) -> dict[str, Any]:
    """Run one program as ordered."""
    import torch
    from tests.injection.programs import PROGRAMS, Recorder

    import sonde

    log = io.StringIO()
    logging.getLogger("sonde").handlers = [logging.StreamHandler(log)]
    logging.getLogger("sonde").propagate = False
    functions, limit = torch_functions(), sys.getrecursionlimit()
    faults: Any = Reached() if order.get("trace") else Faults(order) if order.get("target") else None
    watch = None if order.get("bare") else sonde.watch
    answer: dict[str, Any] = {"escaped": None, "trace": "", "digest": None}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        recorder = Recorder(Path(folder), watch, faults)
        torch.manual_seed(3)
        try:
            answer["digest"] = digest(PROGRAMS[order["program"]](recorder))
        except BaseException as error:  # noqa: BLE001 - whatever comes out is the answer
            answer["escaped"], answer["trace"] = type(error).__name__, traceback.format_exc()
        for session in recorder.sessions:
            try:
                session.close()
            except BaseException as error:  # noqa: BLE001 - as above
                answer["escaped"], answer["trace"] = f"{type(error).__name__} at close", traceback.format_exc()
        instrument.arm()
        answer["left"] = []
        if watch is not None:
            answer["left"] = left_behind(recorder.models, functions, limit, order.get("patience_s", 20.0))
        answer["raised"] = getattr(faults, "raised", None)
        if order.get("trace"):
            answer["reached"], answer["at_start"] = faults.names, sorted(faults.at_start)
    answer["log"] = log.getvalue()[-2000:]
    return answer


def warm_up() -> None:
    """Import here what each child would have to import: much of torch and Sonde is loaded at the first step.

    What there is by then is kept from the garbage collector, which would write to all of it, and so copy it, in each
    child.
    """
    import torch

    import sonde

    for name in ("importlib.resources.readers", "ml_dtypes", "numpy.ctypeslib", "sonde.testing"):
        importlib.import_module(name)

    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # no backward pass: autograd may start threads, which forks lack
    with tempfile.TemporaryDirectory() as folder, sonde.watch(model, optimizer, run=f"{folder}/run") as session:
        with torch.no_grad():
            model(torch.zeros(4, 8))
        optimizer.step()
        session.log(loss=0.0)
        session.flush()
    from tests.injection import programs  # noqa: F401

    gc.collect()
    gc.freeze()


def in_child(orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Obey orders in a forked child, and return its answers; the last is about one that hangs or dies, if any does."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        code = 1
        try:
            with os.fdopen(writing, "w") as file:
                for order in orders:
                    answer = _timed(order)
                    print(json.dumps(answer), file=file, flush=True)
                    if not is_clean(order, answer):
                        break
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as file:
        answers = [json.loads(line) for line in file if line.endswith("\n")]
    _, status = os.waitpid(pid, 0)
    if status:
        died = f"killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "died"
        nothing = {"escaped": died, "trace": "", "digest": None, "left": [], "raised": None, "log": "", "seconds": 0.0}
        answers.append(nothing)
    return answers


def _timed(order: dict[str, Any]) -> dict[str, Any]:
    signal.alarm(LIMIT_S)
    began = time.monotonic()
    with contextlib.redirect_stderr(io.StringIO()):
        answer = obey(order)
    return answer | {"seconds": round(time.monotonic() - began, 3)}


def is_clean(order: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Return whether the process is as it was before an order, as far as can be seen, and all went well."""
    went_well = (answer["escaped"], answer["digest"]) == (None, order.get("wanted"))
    return went_well and not answer["left"] and bool(answer["raised"])


def main() -> None:
    os.environ.setdefault("SONDE_EXAMINE", "0")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print is no answer
    instrument.install()
    import torch

    torch.set_num_threads(1)
    warm_up()
    while select.select([sys.stdin], [], [])[0] and (line := sys.stdin.readline()):
        print(json.dumps(in_child(json.loads(line))), file=out, flush=True)
    os._exit(0)  # tearing torch down takes a second


if __name__ == "__main__":
    main()
