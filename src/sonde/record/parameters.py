"""The parameters of the watched models: who they are, which are chosen, and what they were a step ago."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sonde.records import Quantity
from sonde.stats.protocol import Recorder


@dataclass(slots=True, eq=False)
class WatchedParameter:
    """A parameter and the sites of what is measured of it."""

    parameter: nn.Parameter
    name: str
    kind: str
    aliases: tuple[str, ...]
    site: int = -1
    gradient_site: int = -1
    update_site: int = -1
    state_sites: dict[str, int] = field(default_factory=dict)
    shadow: Tensor | None = None
    """The parameter's values after the last step in which they were looked at."""
    shadow_version: int = -1
    """The parameter's version counter when the shadow was taken; another one now means it was written to since."""
    seen_version: int = -1
    """The same for the last reading of the parameter."""

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
            found = [(entry, grad) for entry in group if (grad := entry.parameter.grad) is not None]
            for entry, grad in found:
                if entry.gradient_site < 0:
                    entry.gradient_site = self._site(entry, "gradient", grad)
            if found:
                self._recorder.see_many([grad for _, grad in found], [entry.gradient_site for entry, _ in found])

    def see_values(self, entries: list[WatchedParameter]) -> None:
        """Report the parameters as they are now."""
        for group in _by_device([entry for entry in entries if entry.is_ready()]):
            for entry in group:
                if entry.site < 0:
                    self._name(entry)
                entry.seen_version = entry.parameter._version
            self._recorder.see_many([entry.parameter for entry in group], [entry.site for entry in group])

    def see_changes(self, entries: list[WatchedParameter]) -> None:
        """Report the parameters as they are now and how they differ from their shadows, which are refreshed."""
        for group in _by_device(entries):
            shadowed = [entry for entry in group if entry.shadow is not None]
            plain = [entry for entry in group if entry.shadow is None]
            for entry in shadowed:
                if entry.update_site < 0:
                    self._name(entry)
                    entry.update_site = self._site(entry, "update", entry.parameter)
                entry.seen_version = entry.shadow_version = entry.parameter._version
            if shadowed:
                self._recorder.see_changes(
                    [entry.parameter for entry in shadowed],
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
                        tensors.append(value)
                        sites.append(self._state_site(entry, key, value))
            for tensors, sites in found.values():
                self._recorder.see_many(tensors, sites)

    def refresh_shadows(self, entries: list[WatchedParameter]) -> None:
        """Copy those parameters that were written to since their shadow was taken."""
        self._move_shadows(entries)
        stale = [
            entry
            for entry in entries
            if entry.shadow is not None
            and (self.distrusts_versions or entry.shadow_version != entry.parameter._version)
        ]
        if not stale:
            return
        with torch.no_grad():
            for group in _by_device(stale):
                shadows = [entry.shadow for entry in group if entry.shadow is not None]
                torch._foreach_copy_(shadows, [entry.parameter.detach() for entry in group])
        for entry in stale:
            entry.shadow_version = entry.parameter._version

    def _move_shadows(self, entries: list[WatchedParameter]) -> None:
        """Follow parameters that were moved to another device or dtype in the middle of a run."""
        for entry in entries:
            shadow, parameter = entry.shadow, entry.parameter
            if shadow is not None and (shadow.device != parameter.device or shadow.dtype is not parameter.dtype):
                entry.shadow, entry.shadow_version = _shadow_of(parameter), -1

    def make_shadows(self, budget_bytes: int) -> list[WatchedParameter]:
        """Give parameters a shadow as far as the budget goes; return those that got none."""
        left_out = []
        for entry in self:
            parameter = entry.parameter
            if not parameter.requires_grad or not _can_shadow(parameter):
                continue
            size = parameter.numel() * parameter.element_size()
            if size > budget_bytes:
                left_out.append(entry)
                continue
            budget_bytes -= size
            entry.shadow = _shadow_of(parameter)
        return left_out

    def _name(self, entry: WatchedParameter) -> None:
        if entry.site < 0:
            entry.site = self._site(entry, "parameter", entry.parameter)

    def _site(self, entry: WatchedParameter, quantity: Quantity, tensor: Tensor) -> int:
        return self._recorder.site(entry.name, quantity, kind=entry.kind, tensor=tensor, aliases=entry.aliases)

    def _state_site(self, entry: WatchedParameter, key: str, value: Tensor) -> int:
        site = entry.state_sites.get(key)
        if site is None:
            site = self._recorder.site(entry.name, "state", part=f".{key}", kind=entry.kind, tensor=value)
            entry.state_sites[key] = site
        return site


def _shadow_of(parameter: nn.Parameter) -> Tensor:
    # Same layout as the parameter, so that both can be walked through in memory order. Not filled yet: version -1 marks
    # it as stale.
    return torch.empty_like(parameter, requires_grad=False, memory_format=torch.preserve_format).detach()


def _can_shadow(parameter: nn.Parameter) -> bool:
    # A subclass (DTensor, quantised) or a parameter without storage yet cannot be copied element by element here.
    return type(parameter) is nn.Parameter and parameter.device.type != "meta" and parameter.layout == torch.strided


def _by_device(entries: list[WatchedParameter]) -> list[list[WatchedParameter]]:
    """Split entries by the device their parameter is on now; usually there is one."""
    if len({entry.parameter.device for entry in entries}) == 1:
        return [entries]
    groups: dict[torch.device, list[WatchedParameter]] = {}
    for entry in entries:
        groups.setdefault(entry.parameter.device, []).append(entry)
    return list(groups.values())
