"""Train a small CNN on digits, with captures of what it sees at every third epoch.

sonde train --config-filepath examples/digits_config.py
sonde show runs/digits_training
"""

from __future__ import annotations

import torch
from digits_parts import Digits, Network
from torch import nn
from torch.utils.data import DataLoader

from sonde.debuggers import ActivationStatsDebugger, FeatureMapDebugger, GradCAMDebugger, SequentialDebugger
from sonde.training import Accuracy, LossPerSample

criterion = {"class": nn.CrossEntropyLoss, "args": {}}

config = {
    "work_dir": "runs/digits_training",
    "epochs": 6,
    "init_seed": 0,
    "model": {"class": Network, "args": {"width": 16}},
    "train_dataset": {"class": Digits, "args": {"split": "train"}},
    "train_dataloader": {"class": DataLoader, "args": {"batch_size": 64, "shuffle": True}},
    "val_dataset": {"class": Digits, "args": {"split": "val"}},
    "val_dataloader": {"class": DataLoader, "args": {"batch_size": 64}},
    "criterion": criterion,
    # The first score, here the loss, decides which epoch is best and which samples are worst.
    "metric": [
        {"class": LossPerSample, "args": {"criterion": criterion}},
        {"class": Accuracy, "args": {}},
    ],
    "optimizer": {"class": torch.optim.AdamW, "args": {"lr": 3e-3}},
    "scheduler": {"class": torch.optim.lr_scheduler.CosineAnnealingLR, "args": {"T_max": 6}},
    "early_stopping": {"patience": 3},
    "checkpoint_method": 3,
    "save_samples": {"max": 100, "policy": "worst"},
    "debugger": {
        "class": SequentialDebugger,
        "args": {
            "page_size_mb": 10,
            "debuggers_config": [
                {
                    "name": "features",
                    "debugger_config": {"class": FeatureMapDebugger, "args": {"layer_name": "backbone.2"}},
                },
                {
                    "name": "statistics",
                    "debugger_config": {"class": ActivationStatsDebugger, "args": {"layer_name": "backbone.1"}},
                },
                {
                    "name": "where_it_looks",
                    "debugger_config": {"class": GradCAMDebugger, "args": {"target_layer": "backbone.2"}},
                },
            ],
        },
    },
}
