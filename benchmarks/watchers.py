"""What is put around a training step and compared: nothing, hooks as people write them, peers, and Sonde."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from programs import Program
from torch import nn

import sonde
from sonde.hooks.guard import Guard

# The process that examines a run when it ends would slow the next variant down.
os.environ.setdefault("SONDE_EXAMINE", "0")

Watcher = Callable[[Program, Path], contextlib.AbstractContextManager[Callable[[torch.Tensor], None]]]


@contextlib.contextmanager
def bare(program: Program, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
    yield lambda loss: None


@contextlib.contextmanager
def no_op_hooks(program: Program, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
    handles = [module.register_forward_hook(lambda m, a, o: None) for module in program.model.modules()]
    handles += [p.register_post_accumulate_grad_hook(lambda p: None) for p in program.model.parameters()]
    yield lambda loss: None
    for handle in handles:
        handle.remove()


def naive_statistics(x: torch.Tensor) -> list[Any]:
    """The statistics Sonde records, one operation and one `.item()` each, as hook scripts compute them."""
    x = x.detach().float()
    values = [
        x.mean().item(),
        x.std().item(),
        x.min().item(),
        x.max().item(),
        x.norm().item(),
        x.abs().sum().item(),
        torch.isnan(x).sum().item(),
        torch.isinf(x).sum().item(),
        (x == 0).sum().item(),
        (x.abs() >= 1).sum().item(),
    ]
    return [*values, torch.histc(torch.log2(x.abs().clamp_min(1e-38)), bins=64, min=-47, max=17).tolist()]


def six_statistics(x: torch.Tensor) -> list[Any]:
    x = x.detach()
    return [x.mean().item(), x.std().item(), x.min().item(), x.max().item(), x.norm().item(), x.isnan().any().item()]


def naive(statistics: Callable[[torch.Tensor], list[Any]]) -> Watcher:
    @contextlib.contextmanager
    def watcher(program: Program, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
        row: list[Any] = []
        handles = [
            module.register_forward_hook(lambda m, a, o: row.append(statistics(o)))
            for module in program.model.modules()
            if not list(module.children())
        ]

        def after(loss: torch.Tensor) -> None:
            for parameter in program.model.parameters():
                row.append(statistics(parameter))
                if parameter.grad is not None:
                    row.append(statistics(parameter.grad))
            row.append(loss.item())
            row.clear()

        yield after
        for handle in handles:
            handle.remove()

    return watcher


@contextlib.contextmanager
def tensorboard(program: Program, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    step = 0

    def after(loss: torch.Tensor) -> None:
        nonlocal step
        step += 1
        for name, parameter in program.model.named_parameters():
            writer.add_histogram(f"parameter/{name}", parameter, step)
            if parameter.grad is not None:
                writer.add_histogram(f"gradient/{name}", parameter.grad, step)
        writer.add_scalar("loss", loss, step)

    yield after
    writer.close()


@contextlib.contextmanager
def wandb(program: Program, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder), "WANDB_CONSOLE": "off"}
    folder.mkdir(parents=True, exist_ok=True)
    import wandb as client

    run = client.init(project="bench", dir=str(folder))
    run.watch(program.model, log="all", log_freq=1)
    yield lambda loss: run.log({"loss": loss.item()})
    run.unwatch(program.model)
    run.finish()


@contextlib.contextmanager
def cockpit(program: Program, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
    """Cockpit with its cheapest configuration at every step. It works on a copy, since its hooks cannot be removed."""
    from backpack import extend
    from cockpit import Cockpit
    from cockpit.utils.configuration import configuration

    model = copy.deepcopy(program.model)
    for module in model.modules():
        if hasattr(module, "inplace"):  # which its hooks do not allow
            module.inplace = False
    model = extend(model)
    optimizer = type(program.optimizer)(model.parameters(), lr=program.optimizer.defaults["lr"])
    whole, single = extend(nn.CrossEntropyLoss()), nn.CrossEntropyLoss(reduction="none")
    plane = Cockpit(list(model.parameters()), quantities=configuration("economy"))
    number = 0

    def step() -> torch.Tensor:
        nonlocal number
        x, y = program.batch()
        outputs = model(x).flatten(0, -2)
        loss, losses = whole(outputs, y.flatten()), single(outputs, y.flatten())
        optimizer.zero_grad()
        info = {"batch_size": len(x), "individual_losses": losses, "loss": loss, "optimizer": optimizer}
        with plane(number, info=info):
            loss.backward(create_graph=plane.create_graph(number))
        optimizer.step()
        number += 1
        return loss

    program.step = step  # type: ignore[method-assign]
    try:
        yield lambda loss: None
    finally:
        del program.step  # the method of the class again


# Seconds spent inside Sonde's hooks, in the training thread. Two whole loops on a shared machine differ by several
# percent even when they do the same; this clock around the hooks alone resolves a tenth of one.
inside = 0.0
_depth = 0


@contextlib.contextmanager
def _timed_hooks() -> Iterator[None]:
    wrap = Guard.wrap

    def timed(self: Guard, part: str, function: Callable[..., None]) -> Callable[..., None]:
        guarded = wrap(self, part, function)

        def call(*args: Any) -> None:
            global inside, _depth  # noqa: PLW0603 - one clock for the whole program
            begin = time.perf_counter()
            _depth += 1
            guarded(*args)
            _depth -= 1
            if not _depth:  # a guarded part may call another one
                inside += time.perf_counter() - begin

        return call

    Guard.wrap = timed
    yield
    Guard.wrap = wrap


def watched(kernel: str | None = None, **options: Any) -> Watcher:
    """Sonde with some options, without diagnosis unless asked; `kernel` forces an implementation of the statistics."""

    @contextlib.contextmanager
    def watcher(program: Program, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
        if kernel:
            os.environ["SONDE_KERNEL"] = kernel
        with _timed_hooks():
            session = sonde.watch(program.model, program.optimizer, run=folder, **{"diagnose": False, **options})
        with session:
            os.environ.pop("SONDE_KERNEL", None)
            yield lambda loss: session.log(loss=loss)

    return watcher


def attached_but_disabled(program: Program, folder: Path) -> Any:
    return watched(enabled=False)(program, folder)


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not list(module.children())]
