"""Save, restore and seed random state: Python's, numpy's, and torch's on the CPU and every CUDA device in use."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from sonde import probes
from sonde.errors import OptionError


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call] # torch


def random_state() -> dict[str, Any]:
    """Return the state of every generator, as tensors and plain numbers, so that a checkpoint can hold it."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys, np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _uses_cuda() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore every generator to what `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        devices = min(len(state["cuda"]), torch.cuda.device_count())
        for index, each in enumerate(state["cuda"][:devices]):
            torch.cuda.set_rng_state(each.cpu(), index)


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the random state at the end, whatever is drawn or seeded inside."""
    with probes.kept_random_state(list(range(torch.cuda.device_count())) if _uses_cuda() else []):
        yield


def seed_everything(seed: Any) -> None:
    """Seed Python, numpy and torch."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise OptionError(f"A seed is a whole number of 0 or more; got {seed!r}.")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_of(seeds: Any, epoch: int, key: str) -> int | None:
    """Return the seed of an epoch: its entry in a list, or a number plus the epoch.

    Raises:
        OptionError: The list is too short.

    """
    if seeds is None:
        return None
    if isinstance(seeds, int):
        return seeds + epoch
    if epoch >= len(seeds):
        raise OptionError(f"{key} has {len(seeds)} seeds, and epoch {epoch} has none.")
    return int(seeds[epoch])


@contextlib.contextmanager
def kept_switches(*, deterministic: bool | None, detect_anomaly: bool | None) -> Iterator[None]:
    """Set torch's process-wide switches, and restore them at the end; None leaves one unchanged."""
    backend = torch.backends.cudnn
    kept = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        backend.deterministic,
        backend.benchmark,
    )
    anomaly, check_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    try:
        if deterministic is not None:
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            backend.deterministic, backend.benchmark = deterministic, not deterministic and backend.benchmark
        if detect_anomaly is not None:
            torch.autograd.set_detect_anomaly(detect_anomaly)
        yield
    finally:
        torch.use_deterministic_algorithms(kept[0], warn_only=kept[1])
        backend.deterministic, backend.benchmark = kept[2], kept[3]
        torch.autograd.set_detect_anomaly(anomaly, check_nan)
