"""A small training that has everything: random batches, dropout, batch norm, a schedule."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from sonde.training import Accuracy, LossPerSample


class Points(Dataset):
    """Points in six dimensions, in three classes."""

    def __init__(self, count=40, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 6, generator=draw)
        self.y = (self.x[:, 0] > 0).long() + (self.x[:, 1] > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class NamedPoints(Points):
    """The same as dicts, with names."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"inputs": x, "labels": y, "meta_info": {"idx": f"point-{index:03d}"}}


def network(dropout=0.3):
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


class FakeDebugger:
    """Does what a trainer asks of a debugger, and nothing else."""

    def __init__(self, model, log=None):
        self.model = model
        self.enabled = False
        self.buffer = {}
        self.saved = {}
        self.log = [] if log is None else log

    def __call__(self, datapoint, model):
        assert model is self.model
        assert not model.training
        ids = datapoint["meta_info"]["idx"]
        self.buffer.update(zip(ids, datapoint["outputs"].argmax(1).tolist(), strict=True))
        return {"prediction": datapoint["outputs"].argmax(1)}

    def reset_buffer(self):
        self.log.append("reset")
        self.buffer = {}

    def save_all(self, output_dir):
        self.log.append(f"save {Path(output_dir).relative_to(Path(output_dir).parents[1])}")
        self.saved[output_dir] = dict(self.buffer)
        Path(output_dir).mkdir(parents=True)
        for sample, value in self.buffer.items():
            (Path(output_dir) / f"{sample}.txt").write_text(str(value))


def make_config(work_dir, **changes):
    config = {
        "work_dir": str(work_dir),
        "epochs": 3,
        "init_seed": 7,
        "model": {"class": network, "args": {}},
        "train_dataset": {"class": Points, "args": {"count": 40}},
        "train_dataloader": {"class": DataLoader, "args": {"batch_size": 8, "shuffle": True}},
        "val_dataset": {"class": Points, "args": {"count": 10, "seed": 1}},
        "val_dataloader": {"class": DataLoader, "args": {"batch_size": 4}},
        "criterion": {"class": nn.CrossEntropyLoss, "args": {}},
        "metric": [
            {"class": Accuracy, "args": {}},
            {"class": LossPerSample, "args": {"criterion": {"class": nn.CrossEntropyLoss, "args": {}}}},
        ],
        "optimizer": {"class": torch.optim.AdamW, "args": {"lr": 0.01}},
        "scheduler": {"class": torch.optim.lr_scheduler.StepLR, "args": {"step_size": 1, "gamma": 0.7}},
        "device": "cpu",
        "watch": False,
    }
    return {key: value for key, value in (config | changes).items() if value is not None}


def same_state(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
