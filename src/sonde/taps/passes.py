"""How modules follow each other, found in the first training passes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from sonde.hooks.unpack import unpack


class PassTrace:
    """Notes the order of leaf modules, who hands a tensor to whom, and the dtype of autocast."""

    def __init__(self) -> None:
        self.order: dict[str, None] = {}
        self.edges: dict[tuple[str, str], None] = {}
        self.autocast = ""
        self.producers: dict[str, str] = {}
        """By leaf module the class of what handed it its input; empty where that was more than one class."""
        self._kinds: dict[str, str] = {}
        self._made: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def enter(self, name: str, kind: str, args: tuple[Any, ...]) -> None:
        """Take what a leaf module is called with."""
        self._kinds[name] = kind
        self.order.setdefault(name)
        for _, tensor in unpack(args):
            made = self._made.get(id(tensor))
            if made is not None and made[0]() is tensor and made[1] != name:
                self.edges.setdefault((made[1], name))
                before = self._kinds[made[1]]
                self.producers[name] = before if self.producers.get(name, before) == before else ""
            if not self.autocast and not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type):
                self.autocast = str(torch.get_autocast_dtype(tensor.device.type)).removeprefix("torch.")

    def leave(self, name: str, output: Any) -> None:
        """Take what a leaf module returned."""
        for _, tensor in unpack(output):
            self._made[id(tensor)] = (weakref.ref(tensor), name)

    def end_pass(self) -> None:
        """Forget the tensors of a pass."""
        self._made.clear()
