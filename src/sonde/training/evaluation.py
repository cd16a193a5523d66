"""The loop over a dataset without gradients, used by validation, test and evaluation alike."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from sonde.training.datapoints import Datapoint

_WAITING_PER_JOB = 2


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode; at the end every module returns to the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def eval_steps(datapoints: Iterable[Datapoint], step: Callable[[Datapoint], Any], jobs: int = 1) -> Iterator[Datapoint]:
    """Run `step` on every datapoint and yield them in order, with several threads if `jobs` is above 1.

    Each datapoint is used by one thread only. Only a few are in progress at a time, so memory does not grow with the
    dataset. An error in a step is raised here, in order.
    """
    if jobs == 1:
        for datapoint in datapoints:
            with torch.no_grad():
                step(datapoint)
            yield datapoint
        return
    with ThreadPoolExecutor(jobs, thread_name_prefix="sonde-eval") as pool:
        waiting: deque[Future[Datapoint]] = deque()
        try:
            for datapoint in datapoints:
                waiting.append(pool.submit(_run_one, step, datapoint))
                if len(waiting) >= jobs * _WAITING_PER_JOB:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _run_one(step: Callable[[Datapoint], Any], datapoint: Datapoint) -> Datapoint:
    with torch.no_grad():  # set for each thread, like autocast
        step(datapoint)
    return datapoint
