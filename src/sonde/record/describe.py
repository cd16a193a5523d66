"""Describe the model, its helpers and the machine in a run's header, without touching random state or devices."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import sys
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from sonde.hooks.names import named_modules, named_parameters

# A command line or an object's settings can be long; a header stays small.
_MAX_TEXT: Final = 2000
SAFE_VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTHONHASHSEED",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "SLURM_JOB_ID",
)
"""The only environment variables that a run holds: others may be secrets."""
_SECRET: Final = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)


def describe_model(roots: dict[str, nn.Module]) -> dict[str, Any]:
    """Return the module tree and the parameter table as JSON-ready values."""
    modules = [
        {"name": name, "kind": type(module).__name__, "aliases": list(aliases), "training": module.training}
        for name, module, aliases in named_modules(roots)
    ]
    parameters = [
        {
            "name": name,
            "shape": _shape(parameter),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": str(parameter.device),
            "trainable": parameter.requires_grad,
            "aliases": list(aliases),
        }
        for name, parameter, aliases in named_parameters(roots)
    ]
    kinds = [type(root).__name__ for root in roots.values()]
    total = sum(_numel(parameter) for _, parameter, _ in named_parameters(roots))
    return {"name": " + ".join(kinds), "modules": modules, "parameters": parameters, "num_parameters": total}


def describe_environment() -> dict[str, Any]:
    """Return versions, machine, command line, seed and git state."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "argv": hide_secrets([text[:_MAX_TEXT] for text in sys.argv[:64]]),
        "variables": {name: os.environ[name][:200] for name in SAFE_VARIABLES if name in os.environ},
        "directory": str(Path.cwd()),
        "seed": torch.initial_seed(),
    }
    if torch.cuda.is_available():
        facts["cuda"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    commit = _git_commit(Path.cwd())
    if commit:
        facts["git_commit"] = commit
    return facts


def hide_secrets(arguments: list[str]) -> list[str]:
    """Return a command line without the values of options that are called a key, token, secret or password.

    >>> hide_secrets(["train.py", "--api-key=abc", "--token", "def", "--lr", "0.1"])
    ['train.py', '--api-key=***', '--token', '***', '--lr', '0.1']
    """
    hidden: list[str] = []
    for at, text in enumerate(arguments):
        name, equals, _ = text.partition("=")
        before = arguments[at - 1] if at else ""
        if equals and _SECRET.search(name):
            hidden.append(f"{name}=***")
        elif before.startswith("-") and "=" not in before and _SECRET.search(before) and not text.startswith("-"):
            hidden.append("***")
        else:
            hidden.append(text)
    return hidden


def describe_helper(helper: object) -> dict[str, Any]:
    """Return the class of an optimizer, loader, scheduler, loss or scaler, with its plain settings."""
    facts: dict[str, Any] = {"kind": type(helper).__name__}
    for name in ("batch_size", "num_workers", "drop_last", "pin_memory", "reduction", "ignore_index", "last_epoch"):
        value = getattr(helper, name, None)
        if isinstance(value, bool | int | float | str):
            facts[name] = value
    groups = getattr(helper, "param_groups", None)
    if isinstance(groups, list):
        facts["groups"] = [_plain_settings(group) for group in groups]
    return facts


def _plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if isinstance(value, bool | int | float | str)}
    return settings | {"num_parameters": len(group.get("params", ()))}


def _shape(parameter: nn.Parameter) -> list[int] | None:
    return None if _is_uninitialised(parameter) else list(parameter.shape)


def _numel(parameter: nn.Parameter) -> int:
    return 0 if _is_uninitialised(parameter) else parameter.numel()


def _is_uninitialised(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, nn.parameter.UninitializedParameter)


def _git_commit(start: Path) -> str | None:
    """Read the checked-out commit from the files of .git; no process is started inside a training program."""
    with contextlib.suppress(OSError, ValueError):  # not for us to read, no descriptor left, or not text
        for folder in (start, *start.parents):
            git = _git_folder(folder)
            if (git / "HEAD").is_file():
                text = (git / "HEAD").read_text().strip()
                return _read_ref(git, text.removeprefix("ref: ")) if text.startswith("ref: ") else text
    return None


def _git_folder(folder: Path) -> Path:
    """Return where git keeps its files: `.git`, or where a file of this name points to, as in a second work tree."""
    git = folder / ".git"
    text = git.read_text().strip() if git.is_file() else ""
    return folder / text.removeprefix("gitdir: ") if text.startswith("gitdir: ") else git


def _read_ref(git: Path, ref: str) -> str | None:
    shared = git / "commondir"
    git = git / shared.read_text().strip() if shared.is_file() else git
    loose = git / ref
    if loose.is_file():
        return loose.read_text().strip()
    packed = git / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {ref}")), None)
