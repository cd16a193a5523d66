"""Read configs: a Python file that defines `config`, or YAML or JSON with classes as import paths."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import json
import re
import sys
import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from sonde.core.outcome import message_of
from sonde.errors import MissingExtra, OptionError, SondeError

# --------------------------------------------------------------------------------
# Build objects from descriptions: `{"class": C, "args": {...}}` becomes `C(**args)`.


_KEYS: Final = {"class", "args"}
# Other subclasses of dict are settings objects of other libraries: they are passed on unchanged.
_WALKED_DICTS: Final = (dict, OrderedDict, defaultdict)


def build_from_config(config: Any, recursive: bool = True, **kwargs: Any) -> Any:
    """Build the object that `config` describes.

    A dict whose keys are exactly `class` and `args` describes an object. Such dicts inside dicts, lists and tuples are
    built first, from the inside out. Everything else is returned unchanged, so an object can be given wherever a
    description can. The config is never changed: objects get containers of their own, while modules,
    parameters, datasets and other objects in it are shared.

    Args:
        config: A description, something that contains descriptions, or anything else.
        recursive: Whether nested descriptions are built too; if not, `args` are passed on as they are.
        **kwargs: Arguments of the outermost object; they override its `args`.

    Raises:
        OptionError: `class` is neither callable nor the import path of something that is, or does not take its `args`.

    """
    if not is_description(config):
        return build_from_config_inside(config) if recursive else _own(config)
    make = find_class(config["class"])
    inside = build_from_config_inside if recursive else _own
    args = {name: inside(value) for name, value in config["args"].items() if name not in kwargs}
    _check_arguments(make, args | kwargs)
    return make(**args, **kwargs)


def _check_arguments(make: Callable[..., Any], args: dict[str, Any]) -> None:
    """Raise if arguments do not fit, naming close matches, before the object is built."""
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # some classes written in C have no signature
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        strange = [name for name in args if name not in signature.parameters]
        near = get_close_matches(strange[0], signature.parameters, n=3) if strange else []
        hint = f" (nearest: {', '.join(near)})" if near else ""
        # A misspelt name is also a missing argument; report the misspelt one.
        problem = f"it takes no argument {strange[0]!r}{hint}" if strange else str(error)
        raise OptionError(f"{name_of(make)} cannot be built from its config: {problem}.") from error


def build_from_config_inside(value: Any) -> Any:
    """Build every description found in containers, and return everything else unchanged."""
    if is_description(value):
        return build_from_config(value)
    return _rebuild(value, build_from_config_inside)


def is_description(value: Any) -> bool:
    """Return whether a value describes an object to be built."""
    if type(value) not in _WALKED_DICTS or set(value) != _KEYS:
        return False
    if not isinstance(value["args"], dict):
        raise OptionError(
            f"'args' of {name_of(value['class'])} takes a dict of arguments; got {type(value['args']).__name__}."
        )
    return True


def find_class(target: Any) -> Callable[..., Any]:
    """Return the class or function of a `class` entry, importing it if the entry is an import path.

    Raises:
        OptionError: It cannot be imported or called.

    """
    found = import_path(target) if isinstance(target, str) else target
    if not callable(found):
        raise OptionError(f"'class' takes a class, a function or an import path; got {found!r:.80}.")
    return found  # type: ignore[no-any-return] # callable() does not tell mypy what it takes


def import_path(path: str) -> Any:
    """Import `package.module.Name`.

    Raises:
        OptionError: It cannot be imported; the message names the path, the part that failed and close matches.

    """
    module_path, _, name = path.rpartition(".")
    if not module_path or not name:
        raise OptionError(f"{path!r} is not an import path; write it as package.module.Name.")
    owner = _import_owner(module_path, path)
    if hasattr(owner, name):
        return getattr(owner, name)
    near = get_close_matches(name, dir(owner), n=3)
    hint = f" (nearest: {', '.join(near)})" if near else ""
    raise OptionError(f"Cannot import {path!r}: {module_path} has no {name}{hint}.")


def _import_owner(module_path: str, path: str) -> Any:
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        # The owner may be a class inside a module. Another missing package is an error of its own.
        outer = module_path.rpartition(".")[0]
        if outer and error.name == module_path:
            return import_path(module_path)
        raise OptionError(f"Cannot import {path!r}: {error}.") from error
    except (ImportError, ValueError) as error:
        raise OptionError(f"Cannot import {path!r}: {error}.") from error


def name_of(target: Any) -> str:
    """Return the import path of a class or function, for messages and files."""
    if isinstance(target, str):
        return target
    named = hasattr(target, "__qualname__")
    return f"{target.__module__}.{target.__qualname__}" if named else type(target).__name__


def _own(value: Any) -> Any:
    """Return a value in which containers are copies and everything else is shared."""
    return _rebuild(value, _own)


def _rebuild(value: Any, each: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind in _WALKED_DICTS:
        rebuilt = value.copy()  # keeps the kind, and a defaultdict's factory
        rebuilt.update((key, each(item)) for key, item in value.items())
        return rebuilt
    if kind in (list, tuple):
        return kind(each(item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(each(item) for item in value))
    if kind in (set, bytearray, np.ndarray):
        return copy.copy(value)
    return value


# --------------------------------------------------------------------------------


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
