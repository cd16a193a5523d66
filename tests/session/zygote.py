"""Forks training processes on demand, so that a test can kill many of them without importing torch for each.

Reads one run path per line; answers with the child's pid. The child trains until it is killed, and appends every step
that `session.flush()` has acknowledged to the file `<path>.acked`.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile

import torch

import sonde


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    return model, torch.optim.Adam(model.parameters())


def train(path: str) -> None:
    model, optimizer = build()
    acked = os.open(f"{path}.acked", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # Judging the first steps takes most of such a short life: of a thousand, one in four does it.
    judges = "SONDE_KILLS" not in os.environ or os.getpid() % 4 == 0
    resume = os.path.exists(path)  # noqa: PTH110
    session = sonde.watch(model, optimizer, run=path, resume=resume, max_disk_mb=1, diagnose=judges)
    while True:
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        if session.flush():
            os.write(acked, f"{session.current_step} {loss.item():.9g}\n".encode())


def warm_up() -> None:
    """Import here what each child would have to import: much of torch and Sonde is loaded at the first step."""
    model, optimizer = build()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # no backward pass: autograd may start threads, which forks lack
    with tempfile.TemporaryDirectory() as folder, sonde.watch(model, optimizer, run=f"{folder}/run") as session:
        with torch.no_grad():
            model(torch.zeros(4, 8))
        optimizer.step()
        session.log(loss=0.0)
        session.flush()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    torch.set_num_threads(1)
    warm_up()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            train(line.strip())
        print(pid, flush=True)
    os._exit(0)  # tearing torch down takes a second


if __name__ == "__main__":
    main()
