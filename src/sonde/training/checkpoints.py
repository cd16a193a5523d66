"""Checkpoints: which epochs keep one, how they are written and read, and where an interrupted run resumes.

work_dir/ checkpoint_latest.pt -> epoch_4/checkpoint.pt checkpoint_best.pt -> epoch_2/checkpoint.pt epoch_4/
checkpoint.pt written when the epoch has been trained debugger/, samples/ captures of its validation
validation_scores.json written last: if it exists, the validation is complete
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from sonde import probes
from sonde.core.files import replacing
from sonde.errors import OptionError, RunError
from sonde.store.layout import VALIDATION_SCORES, epoch_folder, epoch_of

# --------------------------------------------------------------------------------
# Save, restore and seed random state: Python's, numpy's, and torch's on the CPU and every CUDA device in use.


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


# --------------------------------------------------------------------------------


logger = logging.getLogger("sonde")

FORMAT: Final = 1
CHECKPOINT: Final = "checkpoint.pt"
LATEST: Final = "checkpoint_latest.pt"
BEST: Final = "checkpoint_best.pt"


def checkpoint_indices(epochs: int, method: Any = "latest") -> list[int]:
    """Return the epochs, counted from 0, whose checkpoint is kept and whose captures are saved.

    Args:
        epochs: How many epochs there are.
        method: `"all"`; `"latest"`, the last epoch only; or a number n: each n-th epoch, and the last.

    Raises:
        OptionError: The method is something else.

    >>> checkpoint_indices(10, 3)
    [2, 5, 8, 9]

    """
    if method == "all":
        return list(range(epochs))
    if method == "latest":
        return [epochs - 1]
    if isinstance(method, bool) or not isinstance(method, int) or method < 1:
        raise OptionError(f"checkpoint_method={method!r}: choose 'all', 'latest' or a whole number of at least 1.")
    return sorted({*range(method - 1, epochs, method), epochs - 1})


def epochs_in(work_dir: Path) -> list[int]:
    """Return the epochs that have a folder, in order."""
    found = {epoch_of(entry.name) for entry in work_dir.iterdir()} if work_dir.is_dir() else set()
    # Not `epoch_04`: the trainer never writes that.
    return sorted(epoch for epoch in found if epoch is not None and epoch_folder(work_dir, epoch).exists())


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically: the file is the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        torch.save({"format": FORMAT, **state}, file)


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint. Only tensors and plain values are loaded, so an untrusted file cannot run code.

    Raises:
        RunError: The file is missing, damaged, or holds more than that.

    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise RunError(f"There is no checkpoint {path}.") from None
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"{path} holds more than tensors and plain values, so it is not loaded: {reason}") from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise RunError(f"{path} cannot be read as a checkpoint: {error}") from error
    if not isinstance(state, dict):
        raise RunError(f"{path} holds a {type(state).__name__}; a checkpoint is a dict.")
    return state


def model_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the model's state in a checkpoint, or the whole checkpoint if it holds nothing else."""
    state = checkpoint.get("model", checkpoint)
    return state if isinstance(state, dict) else checkpoint


def point_to(link: Path, target: Path) -> None:
    """Point a link in the work_dir to a checkpoint, atomically."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target.relative_to(link.parent))
    except (OSError, NotImplementedError):  # a file system without links
        shutil.copyfile(target, temporary)
    temporary.replace(link)


def drop_old_checkpoints(work_dir: Path, keep: set[int]) -> None:
    """Delete the checkpoints of all epochs except those to keep. Scores and captures stay."""
    for epoch in epochs_in(work_dir):
        if epoch not in keep:
            (epoch_folder(work_dir, epoch) / CHECKPOINT).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run resumes."""

    epoch: int = 0
    """The first epoch that is not complete."""
    checkpoint: dict[str, Any] | None = None
    """The state to load; None to start from the beginning."""
    trained_epoch: int | None = None
    """The epoch the checkpoint belongs to."""

    @property
    def is_trained(self) -> bool:
        """Whether `epoch` has been trained already and lacks only its validation."""
        return self.trained_epoch == self.epoch and self.checkpoint is not None


def find_resume_point(work_dir: Path, *, validates: bool) -> ResumePoint:
    """Find the newest checkpoint that can be read, and whether its epoch was finished.

    An epoch that was interrupted in training has no checkpoint and is trained again. One that was interrupted in
    validation has a checkpoint and no scores: only its validation is repeated.
    """
    for epoch in reversed(epochs_in(work_dir)):
        folder = epoch_folder(work_dir, epoch)
        if not (folder / CHECKPOINT).is_file():
            continue
        try:
            state = load_checkpoint(folder / CHECKPOINT)
            _check_format(state, folder / CHECKPOINT)
        except RunError as error:
            logger.warning("%s Going back to an earlier epoch.", error)
            continue
        is_complete = not validates or (folder / VALIDATION_SCORES).is_file()
        return ResumePoint(epoch=epoch + is_complete, checkpoint=state, trained_epoch=epoch)
    return ResumePoint()


def _check_format(state: dict[str, Any], path: Path) -> None:
    if state.get("format") != FORMAT:
        raise RunError(f"{path} was not written by this version's trainer (format {state.get('format')!r}).")


def set_aside(folder: Path, names: Iterable[str]) -> None:
    """Move the results of a complete epoch aside before it is trained again because its checkpoint was lost.

    Captures are never overwritten. The scores are moved first: without them the epoch counts as unfinished, even if
    the process dies here.
    """
    scores = folder / VALIDATION_SCORES
    if not scores.is_file():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.superseded-{number}")).exists():
        number += 1
    aside.mkdir()
    for name in (scores.name, *names):
        if (folder / name).exists():
            (folder / name).rename(aside / name)
