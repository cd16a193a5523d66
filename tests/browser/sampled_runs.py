"""Runs with scored and captured samples: two real ones of the digits, and one with everything that is odd."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from sonde.records import RunHeader
from sonde.store import BatchValue, PageWriter, RunWriter

ROOT = Path(__file__).parents[2]
ATTACK = "<img src=x onerror=alert('sample')>"
TOKENS = ["the", "cat", "sat", ATTACK]


def train_digits(folder: Path, seed: int) -> Path:
    """Train the example's network for two short epochs, with captures of both."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from digits_config import config
    finally:
        sys.path.remove(str(ROOT / "examples"))
    from torch.utils.data import Subset

    from sonde.training import SupervisedTrainer

    trainer_config: dict[str, Any] = config | {
        "work_dir": str(folder),
        "epochs": 2,
        "init_seed": seed,
        "checkpoint_method": "all",
        "model": {"class": config["model"]["class"], "args": {"width": 4}},
        "train_dataset": Subset(config["train_dataset"]["class"]("train"), range(640)),
        "val_dataset": Subset(config["val_dataset"]["class"]("val"), range(60)),
        "save_samples": {"max": 40, "policy": "worst"},
        "watch": False,
    }
    del trainer_config["scheduler"]
    SupervisedTrainer(trainer_config).run()
    if not (folder / "run.json").exists():
        write_header(folder)
    return folder


def write_header(folder: Path) -> None:
    """Make a folder a run."""
    RunWriter(folder, RunHeader(schema_version=1, created=2.0, sonde_version="0", model={"name": "Odd"})).close()


def write_odd(folder: Path) -> Path:
    """Write a run whose samples have texts as names, NaN, masks, tokens, attention, colours and large tensors."""
    write_header(folder)
    random = np.random.default_rng(0)
    epoch = folder / "epoch_0"
    names = ["plain", ATTACK, "7", 7]
    epoch.mkdir()
    scores = {
        "aggregated": {"my/score": 0.5, "parts": [0.1, 0.2]},
        "per_datapoint": {"my/score": ["nan", 0.2, 0.9, 0.4], "parts": [[0, 1], [1, 0], [0.5, 0.5], [1, 1]]},
        "ids": names,
        "directions": {"my/score": 1, "parts": 1},
    }
    (epoch / "validation_scores.json").write_text(json.dumps(scores))
    with PageWriter(epoch / "samples", page_bytes=1 << 20) as pages:
        for name in names[:3]:
            image, outputs = random.uniform(size=(3, 16, 16)), random.normal(size=50)
            pages.add(name, {"inputs": image, "labels": ATTACK, "tokens": TOKENS, "outputs": outputs})
    broken = random.normal(size=(1, 5, 6, 6)).astype(np.float32)
    broken[0, 3, 2, 1], broken[0, 3, 2, 2] = np.nan, np.inf
    attention = random.uniform(size=(1, 2, 4, 4)).astype(np.float32)
    with PageWriter(epoch / "debugger", page_bytes=64 << 20) as pages:
        for name in names:
            pages.add(name, {
                "broken": {"map": broken, "note": ATTACK, ATTACK: 3},
                "attention": {"attention_map": attention / attention.sum(-1, keepdims=True)},
                "vision": {"attention_map": random.uniform(size=(1, 2, 17, 17)).astype(np.float32)},
                "mask": np.arange(64).reshape(8, 8) % 5,
                "deep": random.normal(size=(2, 3, 4, 5, 6)).astype(np.float32),
                "large": np.arange(3 * 700 * 700, dtype=np.float32).reshape(3, 700, 700),
                "nothing": {"empty": np.zeros((0, 4)), "missing": None},
                "texts": {"story": "word " * 3000, "words": np.array(["a", "bc"])},
            })  # fmt: skip
    return folder


def write_scored(folder: Path, epochs: list[list[float]], *, direction: int = -1) -> None:
    """Write a run with the losses of its samples, epoch by epoch."""
    write_header(folder)
    for epoch, losses in enumerate(epochs):
        (folder / f"epoch_{epoch}").mkdir()
        content = {
            "aggregated": {"loss": float(np.mean(losses))},
            "per_datapoint": {"loss": list(losses)},
            "ids": list(range(len(losses))),
            "directions": {"loss": direction},
        }
        (folder / f"epoch_{epoch}" / "validation_scores.json").write_text(json.dumps(content))


def write_batched(folder: Path) -> None:
    """Write a run of which samples were captured in batches of two; the second batch was lost, one debugger failed."""
    write_scored(folder, [[0.1, 0.2, 5.0, 0.3], [0.1, 0.2, 5.0, 0.3]])
    with PageWriter(folder / "epoch_0" / "debugger", page_bytes=1000) as pages:
        for sample in (0, 1):
            outputs = {"mean": BatchValue(0.5, (0, 1)), "channels": BatchValue(np.arange(6.0).reshape(2, 3), (0, 1))}
            pages.add(sample, {"mine": outputs}, info={"failed": {"other": "ValueError: no"}})
    scores = folder / "epoch_0" / "validation_scores.json"
    captures = {
        "complete": False,
        "missing": [2, 3],
        "failed": {"other": [0, 1]},
        "errors": {"other": "ValueError: no"},
    }
    scores.write_text(json.dumps(json.loads(scores.read_text()) | {"captures": captures}))
    (folder / "epoch_1" / "debugger").mkdir()
    (folder / "epoch_1" / "debugger" / "page_0.pkl").write_bytes(b"not to be opened")
