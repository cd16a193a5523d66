"""One capture in the queue; its tensors may still be on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from sonde.capture.values import compact, map_leaves, num_bytes
from sonde.store.pages.record import Datapoint

# What an item takes besides its elements and texts: measured for one small tensor in two dicts.
_ITEM_BYTES: Final = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """What was captured of one datapoint, and the events after which its tensors can be read."""

    datapoint: Datapoint
    outputs: dict[str, Any]
    info: dict[str, Any]
    nbytes: int
    ready: list[torch.cuda.Event] = field(default_factory=list)


def take(
    datapoint: Datapoint, outputs: Mapping[str, Any], info: Mapping[str, Any], save_dtype: torch.dtype | None
) -> Item:
    """Return a capture as an item: detached, without the rest of its batch, as `save_dtype`."""
    devices: set[torch.device] = set()

    def detach(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = compact(leaf.detach())
        if save_dtype is not None and leaf.is_floating_point():
            leaf = leaf.to(save_dtype)
        if leaf.is_cuda:
            devices.add(leaf.device)
        return leaf

    taken = {str(name): map_leaves(value, detach) for name, value in outputs.items()}
    noted = {str(name): map_leaves(value, detach) for name, value in info.items()}
    # The worker copies from the device on a stream of its own, after the pending work of this one.
    ready = [torch.cuda.current_stream(device).record_event() for device in devices]
    return Item(datapoint, taken, noted, num_bytes(taken) + num_bytes(noted) + _ITEM_BYTES, ready)
