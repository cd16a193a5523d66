"""Copies of weights that a program keeps beside its model: averages, target networks, teachers.

A copy is any set of tensors with the shapes of a trained module, found in the variables of the program: a module, a
dictionary by name, or a list. A few values of each are read at the beginning of some steps. Two steps in a row tell how
the copy is made: `new = share * old + (1 - share) * weights` has one unknown for many values, so whether it holds, and
with which weights and which share, is a matter of rounding alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from sonde.core.facts import Plain
from sonde.hooks.names import unwrap

MAX_COPIES: Final = 16
_MAX_SEEN: Final = 512
_MAX_ITEMS: Final = 64
_MAX_TENSORS: Final = 10_000
_DEPTH: Final = 2
_SAMPLED: Final = 4
_VALUES: Final = 64
_LAST: Final = 4
_MAX_WAITING: Final = 64
_MAX_WHOLES: Final = 8
FOLLOWERS: Final = frozenset(
    {"ema", "target", "avg", "average", "averaged", "shadow", "momentum", "swa", "polyak", "teacher"}
)
"""Words in the names of variables that hold weights which follow those of a model."""
_NOT_ENTERED: Final = ("torch", "numpy", "builtins", "sonde", "collections", "types", "typing", "logging", "pathlib")
"""Packages whose objects hold no weights of the program's own."""
_CONTAINERS: Final = (dict, OrderedDict, list, tuple)
_COPIED: Final = 1e-3
"""Share below which the first average is a copy."""
_ROUNDING: Final = 100.0
"""How much larger than the rounding error of a value a difference must be to be measured."""


@dataclass(slots=True, eq=False)
class TensorSet:
    """Weights under one name: those of a module, or tensors that the program keeps by name or in a list."""

    path: str
    tensors: dict[str, Tensor]
    is_module: bool = True
    is_named: bool = True
    statistics: tuple[Tensor, ...] = ()
    """Running means of the batch norms of a module in evaluation mode, which uses them."""

    def form(self) -> Hashable:
        """Return what two modules of the same architecture have in common."""
        return tuple((name, each.shape) for name, each in self.tensors.items())

    def like(self, module: TensorSet) -> list[Tensor] | None:
        """Return the tensors that correspond to the parameters of a module, in their order; None if some lack."""
        wanted = {name: each for name, each in module.tensors.items() if each.is_floating_point()}
        found: list[Tensor | None]
        if self.is_named:
            found = [self.tensors.get(name) for name in wanted]
        elif len(self.tensors) == len(wanted):
            found = list(self.tensors.values())
        else:
            return None
        pairs = zip(found, wanted.values(), strict=True)
        same = wanted and all(one is not None and one.shape == own.shape for one, own in pairs)
        return [each for each in found if each is not None] if same else None

    def floats(self) -> list[Tensor]:
        """Return the tensors of real numbers."""
        return [each for each in self.tensors.values() if each.is_floating_point()]


def tensor_sets(scopes: Iterable[Mapping[str, Any]]) -> list[TensorSet]:
    """Return the modules and other sets of weights among the variables of the program and in its objects, each once."""
    found: list[TensorSet] = []
    seen: set[int] = set()
    for path, value in _named_well(scopes):
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            module = unwrap(value)
            found.append(TensorSet(path, dict(module.named_parameters()), statistics=_running_means(module)))
        elif type(value) in _CONTAINERS and 0 < len(value) <= _MAX_TENSORS:
            is_named = isinstance(value, dict)
            if not isinstance(next(iter(value.values() if is_named else value)), Tensor):
                continue
            items = list(value.items() if is_named else enumerate(value))
            tensors = {str(key): each for key, each in items if isinstance(each, Tensor)}
            if is_named or len(tensors) == len(items):
                found.append(TensorSet(path, tensors, is_module=False, is_named=is_named))
    return found


def _may_follow(path: str, value: Any, owners: Mapping[int, object]) -> bool:
    """Return whether a value holds weights that no optimizer trains, or is named as a copy, by its first tensor."""
    first: Any = None
    if isinstance(value, nn.Module):
        first = next(unwrap(value).parameters(), None)
    elif type(value) in _CONTAINERS and value:
        first = next(iter(value.values() if isinstance(value, dict) else value))
    return isinstance(first, Tensor) and (id(first) not in owners or is_follower(path))


def _running_means(module: nn.Module) -> tuple[Tensor, ...]:
    """Return the running means that a module in evaluation mode uses; torch's own averages are looked at elsewhere."""
    if module.training or isinstance(module, AveragedModel):
        return ()
    means = (getattr(each, "running_mean", None) for each in module.modules() if not each.training)
    return tuple(each for each in means if isinstance(each, Tensor) and _are_plain([each]))[:_SAMPLED]


def _named_well(scopes: Iterable[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Return what the scopes hold, last what a method of a module calls `self`: the caller has a name for that."""
    first: list[tuple[str, Any]] = []
    last: list[tuple[str, Any]] = []
    for scope in scopes:
        is_method = isinstance(scope.get("self"), nn.Module)
        for path, value in within(scope, _DEPTH):
            is_own = is_method and (path == "self" or path.startswith("self."))
            (last if is_own else first).append((path, value))
    return first + last


def within(scope: Mapping[str, Any], depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield variables and what their objects hold: items, parts of modules, and attributes. No code of theirs runs."""
    left = _MAX_SEEN
    level = list(scope.items())
    for remaining in range(depth, -1, -1):
        level = level[:left]
        left -= len(level)
        yield from level
        level = [each for path, value in level for each in _inside(path, value)] if remaining else []


def _inside(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        return [(f"{path}.{name}", each) for name, each in list(unwrap(value)._modules.items())[:_MAX_ITEMS]]
    if type(value) in _CONTAINERS:
        if isinstance(value, list | tuple) and value and isinstance(value[0], int | float | str | Tensor):
            return []
        items = list(islice(value.items() if isinstance(value, dict) else enumerate(value), _MAX_ITEMS))
        return [(f"{path}[{key!r}]" if type(key) in (str, int) else path, each) for key, each in items]
    package = str(getattr(type(value), "__module__", "")).partition(".")[0]
    own = None if package in _NOT_ENTERED or isinstance(value, type) else getattr(value, "__dict__", None)
    return [(f"{path}.{name}", each) for name, each in list(own.items())[:_MAX_ITEMS]] if isinstance(own, dict) else []


@dataclass(slots=True, eq=False)
class _Seen:
    """Some values of a copy and of the modules that it may be a copy of, at the beginning of a step."""

    step: int
    values: Tensor
    version: int
    """Which tensors they were, and how often they had been written to."""
    sources: dict[str, Tensor]
    statistics: Tensor | None = None
    """Some running means of the copy's batch norms, if it is evaluated with them."""

    def read(self) -> None:
        """Fetch the values; waits for their device."""
        self.values = self.values.to("cpu", torch.float64)
        self.sources = {name: each.to("cpu", torch.float64) for name, each in self.sources.items()}
        if self.statistics is not None:
            self.statistics = self.statistics.to("cpu", torch.float64)


@dataclass(slots=True, eq=False)
class Copy:
    """What is known of one copy."""

    path: str
    holder: str = ""
    """The optimizer that holds its tensors."""
    of: str = ""
    """The module that it was equal to when it was first seen, if there was just one."""
    follows: str = ""
    """The module whose weights it took last."""
    pairs: int = 0
    """How often it was seen in two steps in a row, while the module that it is a copy of changed."""
    changed: int = 0
    rewritten: int = 0
    """In how many of these it was written to and kept its values."""
    averaged: int = 0
    """In how many of these it changed by an average."""
    shares: list[float] = field(default_factory=list)
    """The share of itself that it kept in the last averages."""
    least: float = 1.0
    """The smallest share of itself that it kept in any average that was measured."""
    last: int = 0
    """The step of the last average."""
    still: int = 0
    """The last step until which it had the values that it began with, while its module had others."""
    stale: int = 0
    """How often in a row it changed, and its running means did not."""
    before: _Seen | None = None
    first: Tensor | None = None
    waiting: list[_Seen] = field(default_factory=list)
    """What was seen on a device that is not waited for."""

    def facts(self) -> dict[str, Plain]:
        """Return what is known as plain values."""
        names = ("holder", "of", "follows", "pairs", "changed", "rewritten", "averaged", "last", "still", "stale")
        plain: dict[str, Plain] = {name: getattr(self, name) for name in names} | {"named": is_follower(self.path)}
        measured = {"share": self.shares[-1], "most": max(self.shares), "least": self.least} if self.shares else {}
        return plain | measured

    def read(self) -> None:
        """Compare what was seen with what was seen one step before."""
        for new in self.waiting:
            new.read()
            before, self.before = self.before, new
            if before is None or self.first is None:
                self.first = new.values
                same = [name for name, values in new.sources.items() if torch.equal(values, new.values)]
                self.of = same[0] if len(same) == 1 else ""
                continue
            if before.step == new.step - 1 and before.values.shape == new.values.shape:
                self._compare(before, new)
            if not torch.equal(self.first, new.values):
                self.still = 0
            elif self.of in new.sources and not torch.equal(new.sources[self.of], new.values):
                self.still = new.step
        self.waiting = []

    def _compare(self, before: _Seen, new: _Seen) -> None:
        known = {name: (before.sources.get(name), values) for name, values in new.sources.items()}
        moved = {
            name: (old, now) for name, (old, now) in known.items() if old is not None and not torch.equal(old, now)
        }
        if not moved or (self.of and self.of not in moved):
            return
        self.pairs += 1
        if torch.equal(before.values, new.values):
            self.rewritten += before.version != new.version
            return
        self.changed += 1
        means = before.statistics, new.statistics
        is_stale = means[0] is not None and means[1] is not None and torch.equal(means[0], means[1])
        self.stale = self.stale + 1 if is_stale else 0
        for name, (old, now) in moved.items():
            for weights in (now, old):  # an average is taken after the optimizer's step, or before it
                share = _share(before.values, new.values, weights)
                if share is not None:
                    self.follows, self.last = name, new.step
                    self.averaged += 1
                    self.shares = [*self.shares, share][-_LAST:]
                    if self.averaged > 1 or share > _COPIED:  # some begin with a copy of the weights
                        self.least = min(self.least, share)
                    return


def _share(old: Tensor, new: Tensor, weights: Tensor) -> float | None:
    """Return the share of itself that an average kept; None if it is not one of these weights.

    >>> old, weights = torch.tensor([1.0, 2.0, 4.0]).double(), torch.tensor([2.0, 2.5, 3.0]).double()
    >>> round(_share(old, 0.9 * old + 0.1 * weights, weights), 6)
    0.9
    >>> _share(old, old + torch.tensor([0.1, 0.2, 0.9]), weights) is None
    True
    """
    way, left = old - weights, new - weights
    rounding = torch.finfo(torch.float32).eps * float(torch.cat([old, new, weights]).abs().max())
    length = float(way.dot(way))
    if not math.sqrt(length / max(1, len(way))) > _ROUNDING * rounding:
        return None
    share = float(left.dot(way)) / length
    return share if float((left - share * way).abs().max()) <= 4 * rounding else None


class Copies:
    """The copies of weights in a program, by path."""

    def __init__(self) -> None:
        self.found: dict[str, Copy] = {}

    def look(self, step: int, scopes: Iterable[Mapping[str, Any]], owners: Mapping[int, tuple[str, int]]) -> None:
        """Keep some values of every copy; `owners` holds the optimizers of parameters by id. Waits for no device."""
        scopes = list(scopes)
        if not any(_may_follow(path, value, owners) for scope in scopes for path, value in within(scope, _DEPTH)):
            return  # listing the weights of every part of a model takes long
        sets = [each for each in tensor_sets(scopes) if each.tensors]
        holders = [
            next((owners[key][0] for key in map(id, each.tensors.values()) if key in owners), "") for each in sets
        ]
        # One that an optimizer holds learns, unless it is named as a copy. Most programs have nothing else.
        copies = [
            (each, holder)
            for each, holder in zip(sets, holders, strict=True)
            if (not holder or is_follower(each.path)) and _are_plain(each.tensors.values())
        ]
        if not copies:
            return
        trained: dict[Hashable, list[TensorSet]] = {}
        for each, holder in zip(sets, holders, strict=True):
            if each.is_module and holder and _are_plain(each.tensors.values()):
                trained.setdefault(each.form(), []).append(each)
        wholes = [one for some in trained.values() for one in some if "." not in one.path][:_MAX_WHOLES]
        for each, holder in copies:
            if any(each.path.startswith(f"{path}.") for path in self.found):
                continue  # a part of a copy
            modules = trained.get(each.form(), []) if each.is_module else wholes
            pairs = [(own, like) for own in modules if own is not each and (like := each.like(own))]
            pairs = [(own, like) for own, like in pairs if _are_others(like, own.tensors.values())]
            if pairs and (each.path in self.found or len(self.found) < MAX_COPIES):
                seen = self.found.setdefault(each.path, Copy(each.path, holder))
                self._see(seen, step, pairs, each.statistics)

    @staticmethod
    def _see(
        copy: Copy, step: int, pairs: list[tuple[TensorSet, list[Tensor]]], statistics: tuple[Tensor, ...]
    ) -> None:
        if len(copy.waiting) < _MAX_WAITING:
            copy.waiting.append(_see(step, pairs))
            if statistics and len({each.device for each in statistics}) == 1:
                copy.waiting[-1].statistics = _sample(list(statistics), list(range(len(statistics))))
        if all(tensor.device.type == "cpu" for own, like in pairs for tensor in (*like, *own.tensors.values())):
            copy.read()

    def read(self) -> None:
        """Compare what was seen on all devices."""
        for copy in self.found.values():
            copy.read()


def is_follower(path: str) -> bool:
    """Return whether a variable is named as weights that follow others.

    >>> is_follower("self.target_net"), is_follower("targets"), is_follower("agent.q")
    (True, False, False)
    """
    words = path.lower().replace(".", "_").replace("[", "_").replace("'", "").replace("]", "").split("_")
    return not FOLLOWERS.isdisjoint(words)


def _see(step: int, pairs: list[tuple[TensorSet, list[Tensor]]]) -> _Seen:
    like = pairs[0][1]
    chosen = sorted(range(len(like)), key=lambda at: -like[at].numel())[:_SAMPLED]
    chosen = [at for at in chosen if like[at].device == like[chosen[0]].device]
    version = hash(tuple((id(like[at]), like[at]._version) for at in chosen))
    return _Seen(step, _sample(like, chosen), version, {own.path: _sample(own.floats(), chosen) for own, _ in pairs})


def _sample(tensors: list[Tensor], chosen: list[int]) -> Tensor:
    parts = [tensors[at].detach().reshape(-1) for at in chosen]
    return torch.cat([part[:: max(1, len(part) // _VALUES)][:_VALUES].to(torch.float32) for part in parts])


def _are_others(like: list[Tensor], own: Iterable[Tensor]) -> bool:
    """Return whether no two tensors share memory: a state dict holds views of the very weights."""
    return {each.data_ptr() for each in like}.isdisjoint(each.data_ptr() for each in own)


def _are_plain(tensors: Iterable[Tensor]) -> bool:
    return all(
        type(each) in (Tensor, nn.Parameter)
        and not each.is_inference()
        and each.layout is torch.strided
        and each.device.type != "meta"
        for each in tensors
    )
