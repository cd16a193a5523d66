"""The parameters of the watched models: their names, which are chosen, and their values a step ago."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.hooks.names import named_modules, named_parameters
from sonde.parallel.placements import WHOLE, Holding, find_holdings, holding_of
from sonde.records import Quantity
from sonde.select import Selector
from sonde.stats.adapt import PLAIN_TYPES
from sonde.stats.protocol import Recorder

# A model may have a thousand small parameters: then what runs for each of them must be little, and in C where it can.
_DEVICE: Final = attrgetter("parameter.device")
_LAYOUT: Final[Callable[[Tensor], Any]] = attrgetter("device", "dtype", "shape")


@dataclass(slots=True, eq=False)
class WatchedParameter:
    """A parameter and the sites of what is measured of it."""

    parameter: nn.Parameter
    name: str
    kind: str
    aliases: tuple[str, ...]
    held: Holding = WHOLE
    """What this rank holds of it, where the parameter itself does not show that."""
    site: int = -1
    gradient_site: int = -1
    update_site: int = -1
    state_sites: dict[str, int] = field(default_factory=dict)
    shadow: Tensor | None = None
    """The parameter's values after the last step in which they were looked at."""
    shadow_layout: Any = None
    shadow_version: int = -1
    """The parameter's version counter when the shadow was taken; another one now means it was written to since."""
    seen_version: int = -1
    """The same for the last reading of the parameter."""

    @property
    def local(self) -> Tensor:
        """The elements of the parameter on this rank."""
        return self.held.local(self.parameter)

    @property
    def version(self) -> int:
        """How often the parameter was written to; -1 for one made in inference mode, which torch does not count."""
        return -1 if self.parameter.is_inference() else self.parameter._version

    def is_ready(self) -> bool:
        """Return whether the parameter has values; one of a lazy module has none before its first forward."""
        parameter = self.parameter
        return type(parameter) is nn.Parameter or not isinstance(parameter, nn.parameter.UninitializedParameter)


class ParameterTable:
    """All chosen parameters, by identity."""

    def __init__(self, parameters: Iterable[WatchedParameter], recorder: Recorder) -> None:
        self._entries = {id(entry.parameter): entry for entry in parameters}
        self._recorder = recorder
        self.distrusts_versions = False
        """Whether parameters are written to without torch counting it, as by the replay of a CUDA graph."""

    def __iter__(self) -> Iterator[WatchedParameter]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, parameters: Iterable[Tensor]) -> list[WatchedParameter]:
        """Return the entries of those parameters that are watched."""
        entries = (self._entries.get(id(parameter)) for parameter in parameters)
        return [entry for entry in entries if entry is not None]

    def without(self, owned: set[int]) -> list[WatchedParameter]:
        """Return the entries whose parameter's id is not in `owned`."""
        return [entry for key, entry in self._entries.items() if key not in owned]

    def clear(self) -> None:
        """Forget the parameters and their shadows."""
        self._entries.clear()

    def see_gradients(self, entries: list[WatchedParameter]) -> None:
        """Report the gradients that are there; a gradient that is None is not measured."""
        for group in _by_device(entries):
            grads = [entry.parameter.grad for entry in group]
            tensors = [grad for grad in grads if grad is not None]
            if len(tensors) < len(group):
                group = [entry for entry, grad in zip(group, grads, strict=True) if grad is not None]
            sites = [entry.gradient_site for entry in group]
            if -1 in sites:
                sites = [self._gradient_site(entry, grad) for entry, grad in zip(group, tensors, strict=True)]
            if tensors:
                self._recorder.see_many(_local(group, tensors), sites)

    def see_values(self, entries: list[WatchedParameter]) -> None:
        """Report the parameters as they are now."""
        for group in _by_device([entry for entry in entries if entry.is_ready()]):
            for entry, version in zip(group, _versions(group), strict=True):
                if entry.site < 0:
                    self._name(entry)
                entry.seen_version = version
            self._recorder.see_many(_local(group), [entry.site for entry in group])

    def see_changes(self, entries: list[WatchedParameter]) -> None:
        """Report the parameters as they are now and how they differ from their shadows, which are refreshed."""
        for group in _by_device(entries):
            shadowed = [entry for entry in group if entry.shadow is not None]
            plain = [entry for entry in group if entry.shadow is None]
            for entry, version in zip(shadowed, _versions(shadowed), strict=True):
                if entry.update_site < 0:
                    self._name(entry)
                    entry.update_site = self._site(entry, "update", entry.parameter)
                entry.seen_version = entry.shadow_version = version
            if shadowed:
                self._recorder.see_changes(
                    _local(shadowed),
                    [entry.shadow for entry in shadowed if entry.shadow is not None],
                    [entry.site for entry in shadowed],
                    [entry.update_site for entry in shadowed],
                )
            if plain:
                self.see_values(plain)

    def see_state(self, entries: list[WatchedParameter], state: dict[Tensor, dict[str, object]]) -> None:
        """Report the tensors an optimizer keeps for the parameters, such as Adam's moments."""
        for group in _by_device(entries):
            found: dict[torch.device, tuple[list[Tensor], list[int]]] = {}
            for entry in group:
                for key, value in state.get(entry.parameter, {}).items():
                    if isinstance(value, Tensor):
                        tensors, sites = found.setdefault(value.device, ([], []))
                        tensors.append(entry.held.local(value) if value.shape == entry.parameter.shape else value)
                        sites.append(self._state_site(entry, key, value))
            for tensors, sites in found.values():
                self._recorder.see_many(tensors, sites)

    def refresh_shadows(self, entries: list[WatchedParameter]) -> None:
        """Copy those parameters that were written to since their shadow was taken."""
        shadowed = [entry for entry in entries if entry.shadow is not None]
        self._move_shadows(shadowed)
        versions = _versions(shadowed)
        if versions == [entry.shadow_version for entry in shadowed] and not self.distrusts_versions:
            return
        stale = [
            entry
            for entry, version in zip(shadowed, versions, strict=True)
            if self.distrusts_versions or entry.shadow_version != version
        ]
        with torch.no_grad():
            for group in _by_device(stale):
                shadows = [entry.shadow for entry in group if entry.shadow is not None]
                torch._foreach_copy_(shadows, [entry.local.detach() for entry in group])
        for entry in stale:
            entry.shadow_version = entry.version

    def _move_shadows(self, entries: list[WatchedParameter]) -> None:
        """Follow parameters that were moved to another device, dtype or shape in the middle of a run."""
        tensors = _local(entries)
        layouts = list(map(_LAYOUT, tensors))
        if layouts != [entry.shadow_layout for entry in entries]:
            for entry, local, layout in zip(entries, tensors, layouts, strict=True):
                if entry.shadow_layout != layout:
                    _give_shadow(entry, local)

    def make_shadows(self, budget_bytes: int) -> list[WatchedParameter]:
        """Give parameters a shadow as far as the budget goes; return those that got none."""
        left_out = []
        for entry in self:
            if not entry.parameter.requires_grad or not entry.is_ready() or not _can_shadow(entry.local):
                continue
            local = entry.local
            size = local.numel() * local.element_size()
            if size > budget_bytes:
                left_out.append(entry)
                continue
            budget_bytes -= size
            _give_shadow(entry, local)
        return left_out

    def _name(self, entry: WatchedParameter) -> None:
        if entry.site < 0:
            entry.site = self._site(entry, "parameter", entry.parameter)

    def _site(self, entry: WatchedParameter, quantity: Quantity, tensor: Tensor) -> int:
        held = holding_of(tensor, entry.held)
        return self._recorder.site(
            entry.name, quantity, kind=entry.kind, tensor=tensor, aliases=entry.aliases, held=held
        )

    def _gradient_site(self, entry: WatchedParameter, grad: Tensor) -> int:
        if entry.gradient_site < 0:
            entry.gradient_site = self._site(entry, "gradient", grad)
        return entry.gradient_site

    def _state_site(self, entry: WatchedParameter, key: str, value: Tensor) -> int:
        site = entry.state_sites.get(key)
        if site is None:
            held = holding_of(value, entry.held if value.shape == entry.parameter.shape else WHOLE)
            site = self._recorder.site(entry.name, "state", part=f".{key}", kind=entry.kind, tensor=value, held=held)
            entry.state_sites[key] = site
        return site


def _local(entries: list[WatchedParameter], tensors: list[Tensor] | None = None) -> list[Tensor]:
    """Return the elements on this rank of parameters, or of tensors that are laid out like them."""
    if tensors is None:
        tensors = [entry.parameter for entry in entries]
    holdings = [entry.held for entry in entries]
    if PLAIN_TYPES.issuperset(map(type, tensors)) and holdings.count(WHOLE) == len(holdings):
        return tensors
    return [held.local(tensor) for held, tensor in zip(holdings, tensors, strict=True)]


def _versions(entries: list[WatchedParameter]) -> list[int]:
    try:
        return [entry.parameter._version for entry in entries]
    except RuntimeError:  # one was made in inference mode
        return [entry.version for entry in entries]


def _give_shadow(entry: WatchedParameter, local: Tensor) -> None:
    # Same layout as the parameter, so that both can be walked through in memory order. Not filled yet: version -1 marks
    # it as stale.
    shadow = torch.empty_like(local, requires_grad=False, memory_format=torch.preserve_format).detach()
    entry.shadow, entry.shadow_layout, entry.shadow_version = shadow, _LAYOUT(shadow), -1


def _can_shadow(local: Tensor) -> bool:
    # A subclass (quantised) or a parameter without storage yet cannot be copied element by element here.
    return type(local) in PLAIN_TYPES and local.device.type != "meta" and local.layout == torch.strided


def _by_device(entries: list[WatchedParameter]) -> list[list[WatchedParameter]]:
    """Split entries by the device their parameter is on now; usually there is one."""
    if len(set(map(_DEVICE, entries))) == 1:
        return [entries]
    groups: dict[torch.device, list[WatchedParameter]] = {}
    for entry in entries:
        groups.setdefault(entry.parameter.device, []).append(entry)
    return list(groups.values())


def watched_parameters(models: dict[str, nn.Module], chosen: Selector) -> list[WatchedParameter]:
    """Return the parameters of the models that are chosen, by their own names or by those of their modules."""
    kinds = {name: type(module).__name__ for name, module, _ in named_modules(models)}
    holdings = find_holdings(models)
    watched = []
    for name, parameter, aliases in named_parameters(models):
        owner = name.rpartition(".")[0]
        kind = kinds.get(owner, "")
        if chosen(name, kind) or chosen(owner, kind):
            held = holdings.get(id(parameter), WHOLE)
            watched.append(WatchedParameter(parameter, name, kind, aliases, held))
    return watched
