"""Which operations of torch may be called by a name that a file holds. A tape or a bundle may come from a stranger."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._ops import OpOverload, OpOverloadPacket

_OUTSIDE: Final = frozenset(
    {"from_file", "set_", "record_stream", "_pin_memory", "pin_memory", "save", "load", "_print"}
)
"""Operations with effects outside of their tensors."""
_TRUSTING: Final = (
    "_reshape_alias",
    "_sparse",
    "sparse_",
    "_to_sparse",
    "_nested",
    "_jagged",
    "_padded_dense",
    "_cslt",
    "_coalesced",
    "_unsafe_masked",
    "_test",
    "quantized_",
    "fbgemm_",
    "mkldnn_",
    "_mkldnn",
)
"""How operations begin that do not check the sizes, strides or indices that they are given, or unpack pointers."""


def packet(name: str) -> OpOverloadPacket | None:
    """Return the ATen operation of a name such as `addmm`; None if there is none, or it may not be called."""
    if name in _OUTSIDE or name.startswith(_TRUSTING):
        return None
    found = getattr(torch.ops.aten, name, None)
    return found if isinstance(found, OpOverloadPacket) else None


def overload(name: str, kind: str) -> OpOverload[..., Any] | None:
    """Return one form of an operation, such as `default`; None as `packet` does."""
    found = getattr(packet(name), kind, None)
    return found if isinstance(found, OpOverload) else None
