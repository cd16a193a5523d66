"""Read configs: a Python file that defines `config`, or YAML or JSON with classes as import paths."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from sonde.errors import MissingExtra, OptionError, SondeError
from sonde.outcome import message_of
from sonde.training.builder import import_path, name_of

Config = dict[str, Any]

# What a mistake in a Python file raises.
_SLIPS: Final = (SyntaxError, ImportError, NameError, AttributeError, LookupError, TypeError, ValueError, OSError)

SHARED_KEYS: Final = (
    "work_dir",
    "model",
    "metric",
    "monitor",
    "debugger",
    "device",
    "amp",
    "eval_n_jobs",
    "watch",
    "save_samples",
    "deterministic",
    "detect_anomaly",
    "batch_size",
    "runner",
)
TRAINER_KEYS: Final = (
    *SHARED_KEYS,
    "epochs",
    "train_dataset",
    "train_dataloader",
    "val_dataset",
    "val_dataloader",
    "test_dataset",
    "test_dataloader",
    "criterion",
    "optimizer",
    "scheduler",
    "scheduler_interval",
    "init_seed",
    "train_seeds",
    "val_seeds",
    "test_seed",
    "accumulation_steps",
    "clip_grad_norm",
    "clip_grad_value",
    "early_stopping",
    "checkpoint_method",
    "resume",
)
EVALUATOR_KEYS: Final = (
    *SHARED_KEYS,
    "eval_dataset",
    "eval_dataloader",
    "seed",
    "checkpoint_filepath",
    "overwrite",
)


def load_config(path: str | Path) -> Config:
    """Read a config file: `.py` with `config = {...}`, `.yaml`, `.yml` or `.json`.

    A Python file is executed, and can import modules beside it. In YAML and JSON a class is written as its import path,
    and `{"import": "package.name"}` imports any other object, such as a collate function.

    Raises:
        OptionError: The file does not exist, or holds no config.

    """
    path = Path(path)
    if path.is_dir():
        raise OptionError(f"{path} is a folder; name the config file in it.")
    if not path.is_file():
        near = (
            get_close_matches(path.name, [each.name for each in path.parent.iterdir()]) if path.parent.is_dir() else []
        )
        hint = f" (nearest: {', '.join(str(path.parent / name) for name in near)})" if near else ""
        raise OptionError(f"There is no config file {path}{hint}.")
    with _neighbours(path.parent):
        if path.suffix == ".py":
            return _from_python(path)
        return _resolve(_parse(path), str(path))  # type: ignore[no-any-return]


@contextlib.contextmanager
def _neighbours(folder: Path) -> Iterator[None]:
    """Let a config file import modules beside it."""
    before = list(sys.path)
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path[:] = before


def _line_in(path: Path, error: BaseException) -> str:
    """Return the line of a file where an error was raised; a syntax error names it itself."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if Path(frame.f_code.co_filename).resolve() == path.resolve()]
    return f" (line {lines[-1]})" if lines else ""


def _from_python(path: Path) -> Config:
    name = f"sonde_config_{re.sub(r'[^0-9A-Za-z]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} cannot be run as Python.")
    module = importlib.util.module_from_spec(spec)
    # Registered, so that classes defined in the config can be pickled into the workers of a loader.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SondeError:
        raise  # its message is complete
    except _SLIPS as error:
        raise OptionError(f"{path} could not be run: {message_of(error)}{_line_in(path, error)}.") from error
    config = getattr(module, "config", None)
    if not isinstance(config, dict):
        found = "no variable 'config'" if config is None else f"a 'config' that is a {type(config).__name__}"
        raise OptionError(f"{path} has {found}; it must define config = {{...}}.")
    return config


def _parse(path: Path) -> Config:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            config = json.loads(text)
        except ValueError as error:
            raise OptionError(f"{path} is not valid JSON: {error}.") from error
    elif path.suffix in (".yaml", ".yml"):
        config = _parse_yaml(text, path)
    else:
        raise OptionError(f"{path}: a config is a .py, .yaml, .yml or .json file.")
    if not isinstance(config, dict):
        raise OptionError(f"{path} holds a {type(config).__name__}; a config is a mapping of keys to values.")
    return config


def _parse_yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtra("PyYAML", "yaml", "Reading a YAML config") from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc] # yaml has no types
        """The safe loader, which also reads 1e-3 as a number; YAML 1.1 requires 1.0e-3."""

    # Resolvers are kept by first character; the exponent form must be tried on those that begin numbers.
    exponent = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise OptionError(f"{path} is not valid YAML: {error}") from error


def _resolve(value: Any, where: str) -> Any:
    """Replace the import paths in a parsed file by the imported objects."""
    if isinstance(value, dict):
        if set(value) == {"import"}:
            return _import(value["import"], f"{where}.import")
        inside = {key: _resolve(item, f"{where}.{key}") for key, item in value.items()}
        if set(value) == {"class", "args"}:
            inside["class"] = _import(value["class"], f"{where}.class")
            inside["args"] = inside["args"] or {}
        elif isinstance(value.get("runner"), str):
            inside["runner"] = _import(value["runner"], f"{where}.runner")
        return inside
    if isinstance(value, list):
        return [_resolve(item, f"{where}[{index}]") for index, item in enumerate(value)]
    return value


def _import(path: Any, where: str) -> Any:
    if not isinstance(path, str):
        raise OptionError(f"{where} takes an import path such as torch.optim.SGD; got {path!r:.80}.")
    try:
        return import_path(path)
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from error


def check_config(config: Any, *, required: Iterable[str], known: Iterable[str]) -> Mapping[str, Any]:
    """Return a read-only config, after checking for keys that are missing or misspelt.

    Unknown keys are left for subclasses, unless they look like misspelt ones.

    Raises:
        OptionError: A key is missing, or is almost the name of a known one.

    """
    if not isinstance(config, Mapping):
        raise OptionError(f"A config is a dict; got {type(config).__name__}. Use load_config(path) to read a file.")
    known = tuple(known)
    strange = [str(key) for key in config if key not in known]
    for key in required:
        if config.get(key) is None:
            near = get_close_matches(key, strange, n=3)
            hint = (
                f" (nearest in it: {', '.join(near)})"
                if near
                else f"; it has {', '.join(map(str, config)) or 'no keys'}"
            )
            raise OptionError(f"The config lacks {key!r}{hint}.")
    for key in strange:
        near = get_close_matches(key, known, n=1, cutoff=0.85)
        if near and near[0] not in config:
            raise OptionError(f"The config has {key!r}, which nothing reads (nearest: {near[0]}).")
    return MappingProxyType(dict(config))


def check_choice(config: Mapping[str, Any], key: str, choices: tuple[Any, ...]) -> Any:
    """Return an option that must be one of `choices`; the first is the default.

    Raises:
        OptionError: It is none of them.

    """
    value = config.get(key, choices[0])
    if value not in choices:
        raise OptionError(f"{key}={value!r}: choose from {', '.join(map(repr, choices))}.")
    return value


def describe(value: Any) -> Any:
    """Return a config as JSON: classes and functions by import path, objects by their type."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [describe(item) for item in value]
    if isinstance(value, Path | torch.device | torch.dtype):
        return str(value)
    if isinstance(value, torch.Tensor):
        return f"<tensor {tuple(value.shape)} {value.dtype}>"
    if callable(value) and hasattr(value, "__qualname__"):
        return name_of(value)
    return f"<{type(value).__module__}.{type(value).__qualname__}>"
