"""Trainings with real frameworks, as their users write them: each with and without its one line of Sonde.

    torchrun --standalone --nproc-per-node 2 programs.py lightning FOLDER '{"run": "runs/first"}'

Each function returns the losses of its training iterations, one for each backward pass, and leaves the weights in the
model. `run` is the folder of the run, or empty to train without Sonde.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, PER_EPOCH = 4, 8
"""Rows of a batch, batches of an epoch on each rank."""


@dataclass
class How:
    """How a program trains."""

    run: str = ""
    epochs: int = 2
    accumulate: int = 1
    precision: str = "32"
    resume: bool = False
    """Go on from the checkpoint that the first call has written."""
    checkpoint: bool = False


@dataclass
class Trained:
    """What a program has done."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)

    @property
    def hash(self) -> str:
        numbers = [each.detach().float().numpy().tobytes() for each in self.model.parameters()]
        return hashlib.sha256(b"".join(numbers)).hexdigest()


class Network(nn.Module):
    """A regression that returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layers(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def make(ranks: int = 1) -> tuple[Network, TensorDataset, TensorDataset]:
    torch.manual_seed(0)
    x = torch.randn(BATCH * (PER_EPOCH * ranks + 4), 8)
    y = x[:, :3].sum(1, keepdim=True) + 0.1 * x[:, 3:4]
    cut = BATCH * PER_EPOCH * ranks
    return Network(), TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])


def use_scaler(accelerator: Any, how: How) -> None:
    """Have Accelerate scale gradients as it does on a GPU: on a CPU it takes "fp16" and computes in float32."""
    if how.precision == "fp16":
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def transformers(folder: Path, how: How) -> Trained:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, train, validation = make(world())
    trained = Trained(model)
    model.register_forward_hook(lambda m, a, out: trained.losses.append(float(out["loss"])) if m.training else None)
    callbacks: list[TrainerCallback] = []
    if how.run:
        from sonde.integrations.transformers import SondeCallback

        callbacks = [SondeCallback(run=how.run, budget=None)]
    arguments = TrainingArguments(
        str(folder / "out"),
        num_train_epochs=how.epochs,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=how.accumulate,
        learning_rate=1e-2,
        bf16=how.precision == "bf16",
        fp16=how.precision == "fp16",
        eval_strategy="epoch",
        save_strategy="epoch" if how.checkpoint or how.resume else "no",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo" if world() > 1 else None,
    )

    def rows(data: TensorDataset) -> list[dict[str, torch.Tensor]]:
        return [{"x": x, "labels": y} for x, y in data]

    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows(train), eval_dataset=rows(validation), callbacks=callbacks
    )
    use_scaler(trainer.accelerator, how)
    trainer.train(resume_from_checkpoint=how.resume or None)
    return trained


def lightning(folder: Path, how: How) -> Trained:
    import lightning as pl
    from lightning.pytorch.plugins import MixedPrecision

    model, train, validation = make(world())

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.model(*batch)["loss"]
            trained.losses.append(float(loss.detach()))
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.model(*batch)["loss"], sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    trained = Trained(model)
    callbacks: list[pl.Callback] = []
    if how.run:
        from sonde.integrations.lightning import SondeCallback

        callbacks = [SondeCallback(run=how.run, budget=None)]
    trainer = pl.Trainer(
        max_epochs=how.epochs,
        accumulate_grad_batches=how.accumulate,
        precision="bf16-mixed" if how.precision == "bf16" else None,
        plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")) if how.precision == "fp16" else None,
        accelerator="cpu",
        devices=world(),
        strategy="ddp" if world() > 1 else "auto",
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    kept = folder / "kept.ckpt"
    trainer.fit(
        Module(), DataLoader(train, BATCH), DataLoader(validation, BATCH), ckpt_path=kept if how.resume else None
    )
    if how.checkpoint:
        trainer.save_checkpoint(kept)
    return trained


def accelerate(folder: Path, how: How) -> Trained:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier program may have had another precision
    model, train, validation = make(world())
    trained = Trained(model)
    tracker = None
    if how.run:
        from sonde.integrations.accelerate import SondeTracker

        tracker = SondeTracker(run=how.run, budget=None, resume=how.resume)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="no" if how.precision == "32" else how.precision,
        gradient_accumulation_steps=how.accumulate,
        log_with=tracker,
    )
    use_scaler(accelerator, how)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    wrapped, optimizer, loader, tests = accelerator.prepare(
        model, optimizer, DataLoader(train, BATCH), DataLoader(validation, BATCH)
    )
    accelerator.init_trackers("project", config={"lr": 1e-2})
    first = 0
    if how.resume:
        accelerator.load_state(str(folder / "state"))
        first = how.epochs // 2
    for _ in range(first, how.epochs):
        wrapped.train()
        for x, y in loader:
            with accelerator.accumulate(wrapped):
                loss = wrapped(x, y)["loss"]
                trained.losses.append(float(loss.detach()))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                accelerator.log({"train_loss": float(loss.detach())})
        wrapped.eval()
        with torch.no_grad():
            total = torch.stack([wrapped(x, y)["loss"] for x, y in tests]).mean()
        accelerator.log({"val_loss": float(total)})
    if how.checkpoint:
        accelerator.save_state(str(folder / "state"))
    accelerator.end_training()
    return trained


def ignite(folder: Path, how: How) -> Trained:
    import ignite.distributed as idist
    from ignite.engine import Engine, Events

    model, train, validation = make(world())
    trained = Trained(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    wrapped = model
    if world() > 1:
        idist.initialize("gloo")
        wrapped = idist.auto_model(model)
    scaler = torch.amp.GradScaler("cpu", enabled=how.precision == "fp16")
    dtype = torch.float16 if how.precision == "fp16" else torch.bfloat16
    sampler = torch.utils.data.DistributedSampler(train, shuffle=False) if world() > 1 else None

    def update(engine: Engine, batch: Any) -> float:
        with torch.autocast("cpu", dtype, enabled=how.precision != "32"):
            loss = wrapped(*batch)["loss"]
        trained.losses.append(float(loss.detach()))
        scaler.scale(loss / how.accumulate).backward()
        if engine.state.iteration % how.accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return float(loss.detach())

    def evaluate(engine: Engine, batch: Any) -> None:
        with torch.no_grad():
            engine.state.metrics["loss"] = float(model(*batch)["loss"])

    trainer, evaluator = Engine(update), Engine(evaluate)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run(DataLoader(validation, BATCH)))
    if how.resume:
        state = torch.load(folder / "kept.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        trainer.load_state_dict({**state["trainer"], "max_epochs": how.epochs})
    if how.run:
        from sonde.integrations.ignite import SondeHandler

        SondeHandler(wrapped, optimizer, run=how.run, budget=None).attach(trainer, {"validation": evaluator})
    trainer.run(DataLoader(train, BATCH, sampler=sampler), max_epochs=how.epochs)
    if how.checkpoint:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "trainer": trainer.state_dict()}
        torch.save(state, folder / "kept.pt")
    if world() > 1:
        idist.finalize()
    return trained


PROGRAMS = {each.__name__: each for each in (transformers, lightning, accelerate, ignite)}


if __name__ == "__main__":
    ended = PROGRAMS[sys.argv[1]](Path(sys.argv[2]), How(**json.loads(sys.argv[3])))
    name = Path(sys.argv[2]) / f"{sys.argv[4]}-{os.environ.get('RANK', 0)}.json"
    name.write_text(json.dumps({"hash": ended.hash, "losses": ended.losses}))
    if torch.distributed.is_initialized():  # else gloo's threads may abort the process as it ends
        torch.distributed.destroy_process_group()
