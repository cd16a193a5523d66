"""Copy tensors from a CUDA device to the host on a separate stream, through a small pinned buffer.

`tensor.cpu()` would queue its copy behind the training's work, and copy slowly, because its target is not pinned.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from sonde.capture.values import map_leaves
from sonde.stats.cuda.driver import beside_captures, keep_if_failed, noting_failure

STAGING_BYTES: Final = 16 << 20
"""The size of the pinned buffer of each device."""


class Fetcher:
    """Fetches tensors for one thread. It waits for the device, not for the training thread."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, tuple[torch.cuda.Stream, Tensor]] = {}

    def fetch(self, value: Any, ready: list[torch.cuda.Event]) -> Any:
        """Return a nested value with its CUDA tensors on the host, read after the events in `ready` have happened."""
        if not ready:
            return value

        def fetched(leaf: Any) -> Any:
            return self._fetch(leaf) if isinstance(leaf, Tensor) and _is_plain(leaf) else leaf

        with noting_failure(), beside_captures(), torch.no_grad():
            for event in ready:
                event.synchronize()
            return map_leaves(value, fetched)

    def __del__(self) -> None:
        for _, staging in self._by_device.values():
            keep_if_failed(staging)

    def _fetch(self, tensor: Tensor) -> Tensor:
        stream, staging = self._stream_and_buffer(tensor.device)
        with torch.cuda.stream(stream):
            source = tensor.resolve_conj().resolve_neg().contiguous()
            target = torch.empty(tensor.shape, dtype=tensor.dtype)
            if tensor.numel():
                self._copy(source.reshape(-1).view(torch.uint8), target.reshape(-1).view(torch.uint8), staging, stream)
        return target

    def _copy(self, source: Tensor, target: Tensor, staging: Tensor, stream: torch.cuda.Stream) -> None:
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        for start in range(0, source.numel(), STAGING_BYTES):
            piece = source[start : start + STAGING_BYTES]
            staged = staging[: piece.numel()]
            staged.copy_(piece, non_blocking=True)
            arrived.record(stream)
            arrived.synchronize()
            target[start : start + STAGING_BYTES].copy_(staged)

    def _stream_and_buffer(self, device: torch.device) -> tuple[torch.cuda.Stream, Tensor]:
        found = self._by_device.get(device)
        if found is None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            found = self._by_device[device] = (stream, torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True))
        return found


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain dense tensor on a CUDA device; others are converted by `to_plain`."""
    return tensor.is_cuda and type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized
