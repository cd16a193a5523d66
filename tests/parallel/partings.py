"""Trainings of several ranks with one planted fault each, and their healthy twin."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from tests.parallel import layouts
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sonde

BAD_STEP = 4
STEPS = 8


class Fault:
    """A healthy training; each fault overrides one moment. The last rank is the one that goes wrong."""

    def __init__(self) -> None:
        self.is_odd = dist.get_rank() == dist.get_world_size() - 1

    def model(self):
        return DistributedDataParallel(layouts.make())

    def prepare(self, model, optimizer) -> None:
        """Change something before the first step."""

    def batch(self, step):
        x, y = layouts.batch(step)
        return layouts.mine(x), layouts.mine(y)

    def call(self, model, step, x):
        return model(x)

    def around_backward(self, model, step):
        return contextlib.nullcontext()

    def after_backward(self, model, step) -> None:
        """Change gradients."""

    def step(self, optimizer, step) -> None:
        optimizer.step()

    def after_step(self, model, step) -> None:
        """Change weights."""


class Start(Fault):
    def prepare(self, model, optimizer):
        if self.is_odd:
            with torch.no_grad():
                model.module.head.weight += 0.1


class Skipped(Fault):
    def step(self, optimizer, step):
        if not (self.is_odd and step == BAD_STEP):
            optimizer.step()


class Twice(Fault):
    def step(self, optimizer, step):
        optimizer.step()
        if self.is_odd and step == BAD_STEP:
            optimizer.step()


class Around(Fault):
    def call(self, model, step, x):
        return (model.module if step >= BAD_STEP else model)(x)


class NoSync(Fault):
    def around_backward(self, model, step):
        return model.no_sync() if step >= BAD_STEP else contextlib.nullcontext()


class NotReduced(Fault):
    def model(self):
        return layouts.make()


class Changed(Fault):
    def after_backward(self, model, step):
        if step >= BAD_STEP:
            for parameter in model.parameters():
                parameter.grad *= 1 + dist.get_rank()


class NotCovered(Fault):
    def model(self):
        model = layouts.make()
        model.head.requires_grad_(False)
        wrapped = DistributedDataParallel(model)
        model.head.requires_grad_(True)
        return wrapped


class Rate(Fault):
    def prepare(self, model, optimizer):
        if self.is_odd:
            optimizer.param_groups[0]["lr"] *= 2


class State(Fault):
    def prepare(self, model, optimizer):
        if self.is_odd:
            for parameter in model.parameters():
                optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.1)


class Written(Fault):
    def after_step(self, model, step):
        if self.is_odd and step == BAD_STEP:
            with torch.no_grad():
                model.module.head.weight *= 1.5


class TensorParallel(Fault):
    def model(self):
        return layouts.tensor_parallel()

    def batch(self, step):
        return layouts.batch(step)


class OtherData(TensorParallel):
    def batch(self, step):
        return layouts.batch(step + 100 * dist.get_rank())


class Dropout(TensorParallel):
    def model(self):
        model = super().model()
        model.head = nn.Sequential(nn.Dropout(0.5), model.head)
        torch.manual_seed(dist.get_rank())
        return model


class SameBatch(Fault):
    def batch(self, step):
        return layouts.batch(step)


class Normed(Fault):
    broadcasts = True

    def model(self):
        model = layouts.make()
        model.blocks[0].norm = nn.BatchNorm1d(10, dtype=torch.float64, device=layouts.device())
        return DistributedDataParallel(model, broadcast_buffers=self.broadcasts)


class OwnBuffers(Normed):
    broadcasts = False


class Averaged(NotReduced):
    """Ranks train by themselves for two steps, then their weights are averaged."""

    def after_step(self, model, step):
        if step % 2 == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()


FAULTS = {
    "healthy": Fault,
    "healthy_averaged": Averaged,
    "healthy_tensor_parallel": TensorParallel,
    "healthy_batch_norm": Normed,
    "start": Start,
    "skipped": Skipped,
    "twice": Twice,
    "around": Around,
    "no_sync": NoSync,
    "not_reduced": NotReduced,
    "not_covered": NotCovered,
    "changed": Changed,
    "setting": Rate,
    "state": State,
    "written": Written,
    "data": OtherData,
    "randomness": Dropout,
    "same_batch": SameBatch,
    "buffers": OwnBuffers,
}


def train(name: str, folder: str, steps: int = STEPS, between=None, until=lambda: False) -> None:
    """Train with a fault, recorded."""
    fault = FAULTS[name]()
    model = fault.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    fault.prepare(model, optimizer)
    with sonde.watch(model, optimizer, run=folder, on_error="raise") as session:
        for step in range(1, steps + 1):
            x, y = fault.batch(step)
            optimizer.zero_grad()
            with fault.around_backward(model, step):
                loss = nn.functional.mse_loss(fault.call(model, step, x), y)
                loss.backward()
            fault.after_backward(model, step)
            fault.step(optimizer, step)
            fault.after_step(model, step)
            session.log(loss=loss)
            if between is not None:
                between(session, step)
                if _anywhere(until()):
                    break


def _anywhere(flag) -> bool:
    flags = torch.tensor(float(bool(flag)), device=layouts.device())
    dist.all_reduce(flags)
    return bool(flags)


def train_all(folder: str, names) -> None:
    """Train with each fault in turn."""
    for name in names:
        train(name, f"{folder}/{name}")
        dist.barrier()
