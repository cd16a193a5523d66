"""Small programs to watch: each returns what the doctor said of it at the end."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import sonde
from sonde.records import Finding


def data(samples: int = 256, features: int = 8, classes: int = 3, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, features, generator=generator)
    y = torch.randint(classes, (samples,), generator=generator)
    return centres[y] + torch.randn(samples, features, generator=generator), y


def perceptron(act=nn.ReLU, features: int = 8, width: int = 16, classes: int = 3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, width), act(), nn.Linear(width, width), act(), nn.Linear(width, classes))


def classify(output, target):
    """Compute the usual loss, looked up at each call as in programs that write `F.cross_entropy(...)`."""
    return F.cross_entropy(output, target)


def nothing():
    """Do nothing."""


def train(
    folder, model, optimizer, x, y, *, steps=60, size=32, loss_fn=classify, before_step=nothing, after_step=nothing
):
    """Train as people do and return the findings."""
    generator = torch.Generator().manual_seed(1)
    session = sonde.watch(model, optimizer, run=folder / "run", on_error="raise")
    with session:
        for _ in range(steps):
            chosen = torch.randint(len(x), (size,), generator=generator)
            loss = loss_fn(model(x[chosen]), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            before_step()
            optimizer.step()
            after_step()
            session.log(loss=loss)
    assert session._pipeline.judge.broken == {}
    return session.findings


def kinds(findings: list[Finding], *, notes: bool = True) -> list[str]:
    """Return the kinds of findings, best first, with those folded under them; warnings only unless `notes`."""
    found = [finding for finding in findings if notes or finding.severity != "info"]
    return [kind for finding in found for kind in (finding.kind, *finding.explains)]
