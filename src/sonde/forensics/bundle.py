"""A reproduction bundle: what is needed to repeat one step, as `bundle.json` and `tensors.safetensors`.

run/bundles/step-000123/ bundle.json the call, random numbers, modes, precision, the finding, checksums of the
outputs tensors.safetensors inputs, weights, buffers, gradients at the output, states of the generators
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import random
import shutil
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from sonde.core import files
from sonde.core.files import Natural
from sonde.errors import RunDamaged, RunNotFound, SondeError
from sonde.forensics.keeper import KeptPass, Precision, RandomState
from sonde.forensics.origin import Incident, Origin
from sonde.probes.memory.process import available_bytes
from sonde.records import Finding
from sonde.version import VERSION

# --------------------------------------------------------------------------------
# Nested arguments as JSON with references to tensors, and back: no pickle, so a bundle is safe to open.
#
# What a call was given becomes plain lists and objects. Anything that is not plain is an object with one key that
# names its type: `{"tensor": "input.0"}`, `{"tuple": [...]}`, `{"dtype": "float16"}`, `{"float": "nan"}`.


class Packing:
    """Turns nested values into JSON, and gathers their tensors under names that begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.opaque: list[str] = []
        """Classes of values that cannot be kept."""
        self._prefix = prefix

    def pack(self, value: Any) -> Any:
        """Return a value as JSON."""
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Tensor | np.ndarray):
            return self._tensor(value)
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        return self._container(value)

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {"dict": [[self.pack(key), self.pack(item)] for key, item in value.items()]}
        if isinstance(value, list):
            return [self.pack(item) for item in value]
        if type(value) is tuple:
            return {"tuple": [self.pack(item) for item in value]}
        if isinstance(value, slice):
            return {"slice": [self.pack(part) for part in (value.start, value.stop, value.step)]}
        self.opaque.append(type(value).__qualname__)
        return {"opaque": type(value).__qualname__}

    def _tensor(self, value: Tensor | np.ndarray[Any, Any]) -> dict[str, Any]:
        name = f"{self._prefix}.{len(self.tensors)}"
        if isinstance(value, np.ndarray):
            self.tensors[name] = torch.from_numpy(np.ascontiguousarray(value))
            return {"array": name}
        self.tensors[name] = value.detach()
        return {"tensor": name, "requires_grad": True} if value.requires_grad else {"tensor": name}


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value that `Packing.pack` described.

    Raises:
        RunDamaged: The description makes no sense, or a value could not be kept.

    """
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    for kind, read in _READERS.items():
        if kind in value:
            try:
                return read(value, tensors)
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise RunDamaged(f"the bundle describes an argument in a way that cannot be read: {value!r:.80}") from (
                    error
                )
    raise RunDamaged(f"an argument of the model could not be kept in the bundle: {value.get('opaque', value)!r:.80}")


def _read_tensor(value: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    return tensors[value["tensor"]].requires_grad_(bool(value.get("requires_grad")))


def _read_dtype(value: dict[str, Any], tensors: dict[str, Tensor]) -> torch.dtype:
    dtype = getattr(torch, str(value["dtype"]))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(value)
    return dtype


_READERS: dict[str, Any] = {
    "tensor": _read_tensor,
    "array": lambda value, tensors: tensors[value["array"]].numpy(),
    "tuple": lambda value, tensors: tuple(unpack(item, tensors) for item in value["tuple"]),
    "dict": lambda value, tensors: {unpack(key, tensors): unpack(item, tensors) for key, item in value["dict"]},
    "float": lambda value, tensors: float(value["float"]),
    "dtype": _read_dtype,
    "device": lambda value, tensors: torch.device(str(value["device"])),
    "slice": lambda value, tensors: slice(*(unpack(part, tensors) for part in value["slice"])),
}


# --------------------------------------------------------------------------------


FORMAT: Final = 1
INFO: Final = "bundle.json"
TENSORS: Final = "tensors.safetensors"
FOLDER: Final = "bundles"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Metadata of a bundle, apart from the step."""

    reason: str
    step: int
    created: float
    finding: Finding | None = None


def save_bundle(run: Path, incident: Incident, note: Note, *, max_bytes: int) -> tuple[Path, str]:
    """Write a bundle and return its folder, and what had to be left out, in words.

    A folder appears whole or not at all.
    """
    kept = incident.kept
    assert kept is not None
    info, tensors = _describe(kept, incident, note)
    left_out = _weigh(info, tensors, kept.model, max_bytes)
    target = _free_name(run / FOLDER, note.step)
    draft = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    storable = {name: _storable(each) for name, each in tensors.items()}
    info["crc32"] = {name: zlib.crc32(_bytes(each)) for name, each in storable.items()}
    safetensors.torch.save_file(storable, draft / TENSORS)
    files.write(draft / INFO, info, indent=1)
    draft.replace(target)
    return target, left_out


def checksums(outputs: list[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Return a fingerprint that shows whether outputs are bit for bit the same."""
    return [
        {
            "part": part,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "sha256": hashlib.sha256(_bytes(tensor)).hexdigest(),
        }
        for part, tensor in outputs
    ]


class _Precision(msgspec.Struct):
    device_type: str
    enabled: bool
    dtype: str


class _Random(msgspec.Struct):
    """The states of the generators; long ones are among the tensors."""

    python: tuple[int, tuple[int, ...], float | None]
    cuda: tuple[Natural, ...] = ()
    numpy: tuple[str, int, int, float] | None = None


class _Stored(msgspec.Struct):
    """What is used of `bundle.json`."""

    precision: _Precision
    random: _Random
    args: Any
    kwargs: Any
    step: Natural = 0
    model: str = ""
    weights: bool = False
    in_eval: frozenset[str] = frozenset()
    aliases: dict[str, str] = {}
    gradients: dict[Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}$")], str] = {}
    origin: dict[str, Any] | None = None
    finding: dict[str, Any] | None = None
    crc32: dict[str, Natural] = {}
    """Of each tensor; empty in bundles of older versions."""


class Bundle:
    """A bundle on disk. Opening it runs no code of the one who made it."""

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        self._info = info
        self._stored = files.convert(info, _Stored, str(path / INFO), "a bundle")

    @property
    def info(self) -> dict[str, Any]:
        """What `bundle.json` holds."""
        return self._info

    @property
    def step(self) -> int:
        """The step it repeats."""
        return self._stored.step

    @property
    def has_weights(self) -> bool:
        """Whether the weights are in it; False if they were too large."""
        return self._stored.weights

    @property
    def finding(self) -> Finding | None:
        """What was found in that step, if it was not saved by hand."""
        plain = self._stored.finding
        return None if plain is None else Finding.from_json(plain, f"{self.path / INFO}: its finding")

    @property
    def origin(self) -> Origin | None:
        """Where it began, if it was not saved by hand."""
        plain = self._stored.origin
        return None if plain is None else Origin.from_json(plain, f"{self.path / INFO}: its origin")

    def tensors(self) -> dict[str, Tensor]:
        """Read all tensors, and compare them with their checksums, where the bundle has them.

        Raises:
            RunDamaged: They cannot be read, or are not what was written.

        """
        path = self.path / TENSORS
        try:
            # Read and not mapped: cutting a file that is mapped ends the process.
            found = dict(safetensors.torch.load(files.read_file(path, _most_bytes())))
        except (OSError, safetensors.SafetensorError) as error:
            raise RunDamaged(f"{path} cannot be read: {error}") from error
        for name, crc in self._stored.crc32.items():
            if name not in found or zlib.crc32(_bytes(found[name])) != crc:
                raise RunDamaged(f"{path}: the tensor {name!r:.80} is missing or does not match its checksum.")
        return found

    def load(self, model: nn.Module) -> tuple[KeptPass, dict[str, Tensor]]:
        """Bring a model into the state it had in that step; return the pass to repeat, and all tensors.

        Raises:
            RunDamaged: The bundle cannot be read, or the model has other parameters than the one that was saved.

        """
        tensors = self.tensors()
        if self.has_weights:
            self._load_weights(model, tensors)
        stored = self._stored
        for name, module in model.named_modules():
            module.training = name not in stored.in_eval
        precision = Precision(stored.precision.device_type, stored.precision.enabled, self._dtype())
        kept = KeptPass(model, self.step, _random_from(stored.random, tensors), precision, None)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        here = {name: each if name.startswith("random.") else each.to(device) for name, each in tensors.items()}
        kept.args = unpack(stored.args, here)
        kept.kwargs = unpack(stored.kwargs, here)
        kept.gradients = {int(index): here[name] for index, name in stored.gradients.items() if name in here}
        kept.returned = True
        return kept, here

    def _dtype(self) -> torch.dtype:
        dtype = getattr(torch, self._stored.precision.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise RunDamaged(f"{self.path / INFO}: torch has no type {self._stored.precision.dtype!r:.60}.")
        return dtype

    def _load_weights(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        state = {name.removeprefix("model."): each for name, each in tensors.items() if name.startswith("model.")}
        state |= {name: state[other] for name, other in self._stored.aliases.items() if other in state}
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise RunDamaged(
                f"the model that was built is not the one of the bundle ({self._stored.model}): {error}"
            ) from error

    def replay(self, model: nn.Module | Callable[[], nn.Module]) -> Any:
        """Repeat the step on a model, or on what a function builds; see `sonde.forensics.repeat`.

        Raises:
            RunDamaged: The bundle cannot be read, or the model fails on what it holds.

        """
        from sonde.forensics.repeat import replay

        try:
            return replay(self, model)
        except SondeError:
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RunDamaged(
                f"{self.path}: the step cannot be repeated. {type(error).__name__}: {error!s:.400}"
            ) from error

    def __repr__(self) -> str:
        return f"<Bundle {self.path} (step {self.step})>"


def load_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Open a bundle, or the last one of a run.

    Raises:
        RunNotFound: There is none.
        RunDamaged: It cannot be read.

    """
    folder = Path(path)
    if not (folder / INFO).is_file():
        found = sorted(each.parent for each in (folder / FOLDER).glob(f"step-*/{INFO}"))
        if not found:
            raise RunNotFound(f"{folder} is neither a bundle nor a run with bundles: there is no {INFO} in it.")
        folder = found[-1]
    info = files.read_object(folder / INFO)
    if info.get("format") != FORMAT:
        raise RunDamaged(f"{folder / INFO} has the format {info.get('format')!r}; this version reads {FORMAT}.")
    return Bundle(folder, info)


# ---------------------------------------------------------------------- writing


def _describe(kept: KeptPass, incident: Incident, note: Note) -> tuple[dict[str, Any], dict[str, Tensor]]:
    inputs = Packing("input")
    args, kwargs = inputs.pack(tuple(kept.args)), inputs.pack(dict(kept.kwargs))
    tensors = dict(inputs.tensors)
    gradients = {}
    for index, gradient in kept.gradients.items():
        tensors[f"gradient.{index}"] = gradient
        gradients[str(index)] = f"gradient.{index}"
    for name, operand in incident.operands.items():
        tensors[f"operand.{name}"] = operand
    info = {
        "format": FORMAT,
        "step": note.step,
        "reason": note.reason,
        "created": note.created,
        "sonde": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "model": f"{type(kept.model).__module__}.{type(kept.model).__qualname__}",
        "in_eval": [name for name, module in kept.model.named_modules() if not module.training],
        "threads": torch.get_num_threads(),
        "args": args,
        "kwargs": kwargs,
        "opaque": inputs.opaque,
        "inputs_written_over": not kept.is_intact,
        "random": _random_to(kept.random, tensors),
        "precision": {
            "device_type": kept.precision.device_type,
            "enabled": kept.precision.enabled,
            "dtype": str(kept.precision.dtype).removeprefix("torch."),
        },
        "gradients": gradients,
        "outputs": checksums(incident.outputs),
        "origin": incident.origin.to_json() if note.finding is not None else None,
        "finding": note.finding.to_json() if note.finding is not None else None,
    }
    return info, tensors


def _weigh(info: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module, max_bytes: int) -> str:
    """Add the weights if they fit; return a description of what was left out."""
    size = sum(map(_size, tensors.values()))
    state, aliases = _weights(model)
    info["weights"] = size + sum(map(_size, state.values())) <= max_bytes
    if info["weights"]:
        info["aliases"] = aliases
        tensors |= {f"model.{name}": each for name, each in state.items()}
        return ""
    left_out = "the weights"
    if size > max_bytes:
        left_out = "the weights and the batch"
        for name in [name for name in tensors if not name.startswith("random.")]:
            del tensors[name]
        info["gradients"] = {}
    info["left_out"] = f"{left_out} do not fit into {max_bytes >> 20} MB"
    return left_out


def _weights(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    state: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
        else:
            seen[key] = name
            state[name] = tensor.detach()
    return state, aliases


def _random_to(state: RandomState, tensors: dict[str, Tensor]) -> dict[str, Any]:
    tensors["random.cpu"] = state.cpu
    for index, each in state.cuda.items():
        tensors[f"random.cuda.{index}"] = each
    # Passes that drew no number of Python's need no state of its generator: any will do.
    version, words, gauss = state.python or random.getstate()
    plain: dict[str, Any] = {"cuda": sorted(state.cuda), "python": [version, list(words), gauss]}
    if state.numpy is not None:
        name, keys, position, has_gauss, cached = state.numpy
        tensors["random.numpy"] = torch.from_numpy(np.asarray(keys, dtype=np.uint32).view(np.int32).copy())
        plain["numpy"] = [name, position, has_gauss, cached]
    return plain


def _random_from(stored: _Random, tensors: dict[str, Tensor]) -> RandomState:
    try:
        numpy_state = None
        if stored.numpy is not None:
            name, *rest = stored.numpy
            numpy_state = (name, tensors["random.numpy"].numpy().view(np.uint32), *rest)
        cuda = {index: tensors[f"random.cuda.{index}"] for index in stored.cuda}
        usable = {index: each for index, each in cuda.items() if index < torch.cuda.device_count()}
        return RandomState(tensors["random.cpu"], usable, stored.python, numpy_state)
    except (KeyError, TypeError, ValueError) as error:
        raise RunDamaged(f"the bundle's random numbers cannot be read: {error}") from error


def _most_bytes() -> int:
    """Return how large the tensors of a bundle may be: they are in memory twice while they are read."""
    left = available_bytes()
    return sys.maxsize if left is None else left // 2


def _free_name(folder: Path, step: int) -> Path:
    target = folder / f"step-{step:06d}"
    number = 2
    while target.exists():
        target = folder / f"step-{step:06d}-{number}"
        number += 1
    return target


def _storable(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
