"""Small trainings that between them reach what a session does to a program: each is run bare and watched.

A program takes a `Recorder` and returns what must be the same bits in both cases.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVERYTHING = ("parameters", "gradients", "updates", "outputs", "output_gradients", "optimizer_state")
STEPS = 8


class Bare:
    """Takes the place of a session in the bare program: whatever it is asked to do, it does nothing."""

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: None

    def loading(self, loader: Any) -> Any:
        """Return the loader."""
        return loader


class Recorder:
    """Starts the sessions of one program, and knows the models they watch."""

    def __init__(self, folder: Path, watch: Callable[..., Any] | None, faults: Any) -> None:
        self.folder = folder
        self.models: list[nn.Module] = []
        self.sessions: list[Any] = []
        self._watch = watch
        self._faults = faults

    @property
    def is_bare(self) -> bool:
        """Whether nothing is watched."""
        return self._watch is None

    def __call__(self, model: Any, optimizer: Any = None, *, name: str = "run", **options: Any) -> Any:
        """Watch a model; faults are armed before, or from here on."""
        self.models += model.values() if isinstance(model, dict) else [model]
        if self._watch is None:
            return Bare()
        if self._faults is not None:
            self._faults.arm(is_started=False)
        session = self._watch(model, optimizer, run=self.folder / name, **options)
        self.sessions.append(session)
        if self._faults is not None:
            self._faults.arm(is_started=True)
        return session


Program = Callable[[Recorder], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Enter a program in the list."""
    PROGRAMS[function.__name__] = function
    return function


def _state(*models: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for model in models for value in model.state_dict().values()]


@program
def supervised(watch: Recorder) -> Any:
    """Train a small network with a loader, a loss module, accumulation, an evaluation, hooks, and most verbs."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    loss_fn = nn.CrossEntropyLoss()
    data = TensorDataset(torch.randn(32, 8), torch.randint(0, 4, (32,)))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    seen: list[Any] = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.detach().sum()))
    options = {"what": EVERYTHING, "loss_fn": loss_fn, "loader": loader, "scheduler": scheduler, "budget": 0.5}
    losses = []
    with watch(model, optimizer, **options) as session:
        for epoch in range(2):
            session.epoch(epoch)
            for number, (x, y) in enumerate(session.loading(loader)):
                loss = loss_fn(model(x), y) / 2
                loss.backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                session.log(loss=loss, epoch=epoch)
                losses.append(loss.detach())
            scheduler.step()
            session.record("scores", model[6].weight)
            session.record("numbers", [1.0, 2.0, 3.0], quantity="value")
            session.event("note", "an epoch has ended", {"epoch": epoch})
            session.tape()
            model.eval()
            with torch.no_grad():
                losses.append(loss_fn(model(torch.randn(4, 8)), y))
            model.train()
            if not watch.is_bare:
                _ = (session.findings, session.cost, session.held_bytes, session.dropped_steps, session.current_step)
                _ = (session.optimizer_steps, session.is_closed, repr(session))
            session.flush()
    return losses, seen, _state(model)


@program
def crashing(watch: Recorder) -> Any:
    """End with an exception of the program's own, which has to come out as it is."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.suppress(ZeroDivisionError), watch(model, optimizer) as session:
        for step in range(STEPS):
            loss = F.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log({"loss/train": loss})
            if step == STEPS - 2:
                with contextlib.suppress(RuntimeError):  # the program's own fault, which it handles
                    model(torch.randn(4, 9))
                1 / 0  # noqa: B018
    return _state(model)


@program
def going_bad(watch: Recorder) -> Any:
    """Meet gradients that are not finite, which are investigated, held in a bundle and skipped."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer) as session:
        for step in range(STEPS):
            x = torch.randn(4, 8)
            loss = model(x).square().sub(0.0 if step != 5 else 1e9).clamp(min=-1.0).log1p().mean()
            if step == 3 and not watch.is_bare:
                session.save_bundle()
            optimizer.zero_grad()
            loss.backward()
            if step != 5 or not all(torch.isfinite(each.grad).all() for each in model.parameters()):
                optimizer.step()
            session.log(loss=loss)
    return [torch.nan_to_num(value) for value in _state(model)]


@program
def adversarial(watch: Recorder) -> Any:
    """Train two models in turn, one step each, with a gradient scaler, a closure, and steps ended by hand."""
    generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1, momentum=0.9)
    of_critic = torch.optim.LBFGS(critic.parameters(), max_iter=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    models = {"generator": generator, "critic": critic}
    with watch(models, [of_generator, of_critic], scaler=scaler) as session:
        for _ in range(4):
            real = torch.randn(4, 8)

            def closure(real: torch.Tensor = real) -> torch.Tensor:
                of_critic.zero_grad()
                scores = torch.cat([critic(real), critic(generator(torch.randn(4, 4)).detach())])
                loss = F.binary_cross_entropy_with_logits(scores, torch.cat([torch.ones(4, 1), torch.zeros(4, 1)]))
                loss.backward()
                return loss

            of_critic.step(closure)
            of_generator.zero_grad()
            loss = -critic(generator(torch.randn(4, 4))).mean()
            scaler.scale(loss).backward()
            scaler.step(of_generator)
            scaler.update()
            session.log(loss=loss)
            session.step()
    return _state(generator, critic)


class Attention(nn.Module):
    """A small transformer with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the scores of the next token."""
        return {"logits": self.head(self.encoder(self.embed(tokens)))}


@program
def language(watch: Recorder) -> Any:
    """Train a transformer with clipping, autocast and no optimizer handed in; the loop has a generator of batches."""
    model = Attention()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    losses = []
    with watch(model, what=EVERYTHING) as session:
        batches = (torch.randint(0, 16, (2, 6)) for _ in range(STEPS))
        for tokens in session.loading(batches):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(tokens)["logits"]
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss.item())
            losses.append(loss.detach())
    return losses, _state(model)


@program
def by_hand(watch: Recorder) -> Any:
    """Change the weights without an optimizer, through a graph that is walked twice."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 2))
    with watch(model) as session:
        for _ in range(STEPS):
            loss = model(torch.randn(4, 8)).square().mean()
            model.zero_grad()
            loss.backward(retain_graph=True)
            loss.backward()
            with torch.no_grad():
                for each in model.parameters():
                    each -= 0.1 * each.grad
            session.log(loss=loss)
    return _state(model)


@program
def resumed(watch: Recorder) -> Any:
    """Fill a small disk budget, so that journals are sealed and thinned; then resume the run."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for attempt in range(2):
        with watch(model, optimizer, max_disk_mb=1, resume=bool(attempt), what=EVERYTHING, tape=False) as session:
            for _ in range(30):
                loss = model(torch.randn(2, 4)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss)
    return _state(model)


@program
def ranked(watch: Recorder) -> Any:
    """Train as the first of two ranks: heartbeats, progress and fingerprints."""
    with _environment(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0"):
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer, stuck_after=60.0) as session:
            for _ in range(STEPS):
                loss = F.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 4))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss)
        return _state(model)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
