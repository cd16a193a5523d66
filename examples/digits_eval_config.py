"""Evaluate what digits_config.py trained, keeping captures of its worst answers and of some good ones.

sonde eval --config-filepath examples/digits_eval_config.py
"""

from __future__ import annotations

from digits_config import config as trained

from sonde.debuggers import FeatureMapDebugger, GradCAMDebugger, SequentialDebugger

config = {
    "work_dir": "runs/digits_evaluation",
    "checkpoint_filepath": "runs/digits_training/checkpoint_best.pt",
    "model": trained["model"],
    "metric": trained["metric"],
    "eval_dataset": trained["val_dataset"],
    "eval_dataloader": trained["val_dataloader"],
    "eval_n_jobs": 2,
    "debugger": {
        "class": SequentialDebugger,
        "args": {
            "keep": "worst:20+control:5",
            "debuggers_config": [
                {
                    "name": "features",
                    "debugger_config": {"class": FeatureMapDebugger, "args": {"layer_name": "backbone.2"}},
                },
                {
                    "name": "where_it_looks",
                    "debugger_config": {"class": GradCAMDebugger, "args": {"target_layer": "backbone.2"}},
                },
            ],
        },
    },
}
