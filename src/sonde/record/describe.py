"""What a run says about its model, its helpers and the machine. Reads; never touches random state or devices."""

from __future__ import annotations

import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from sonde.hooks.names import named_modules, named_parameters

# A command line or an object's settings can be long; a header stays small.
_MAX_TEXT: Final = 2000


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
        "argv": [text[:_MAX_TEXT] for text in sys.argv[:64]],
        "directory": str(Path.cwd()),
        "seed": torch.initial_seed(),
    }
    if torch.cuda.is_available():
        facts["cuda"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    commit = _git_commit(Path.cwd())
    if commit:
        facts["git_commit"] = commit
    return facts


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
    for folder in (start, *start.parents):
        head = folder / ".git" / "HEAD"
        if head.is_file():
            text = head.read_text().strip()
            if not text.startswith("ref: "):
                return text
            return _read_ref(folder / ".git", text.removeprefix("ref: "))
    return None


def _read_ref(git: Path, ref: str) -> str | None:
    loose = git / ref
    if loose.is_file():
        return loose.read_text().strip()
    packed = git / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {ref}")), None)
