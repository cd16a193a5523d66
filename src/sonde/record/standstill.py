"""Where a rank is stuck: the user's line, the module, the stacks of all threads, and the collectives before it."""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from sonde.core.files import replacing
from sonde.hooks.user_line import users_frame

_MOST_ENTRIES: Final = 64
_MOST_BYTES: Final = 16 << 20
_KEPT: Final = (
    *("collective_seq_id", "p2p_seq_id", "op_id", "profiling_name", "state", "process_group", "input_sizes"),
    *("output_sizes", "input_dtypes", "output_dtypes", "time_created_ns", "time_discovered_started_ns"),
    *("time_discovered_completed_ns", "timeout_ms", "is_p2p"),
)


def users_line(thread: int) -> str:
    """Return `file:line in function` of the user's line that a thread is at, or nothing."""
    frame = users_frame(sys._current_frames().get(thread))
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def module_of(thread: int, name_of: Callable[[Any], str]) -> str:
    """Return the innermost module with a name whose forward a thread is in, or nothing.

    Reading the variables of a running function keeps its tensors for a while, so this is only for a thread that is
    stuck.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            name = name_of(frame.f_locals.get("self"))
            if name:
                return name
        frame = frame.f_back
    return ""


def write_stacks(path: Path) -> None:
    """Write the Python stacks of all threads."""
    with replacing(path, sync=False) as file:
        faulthandler.dump_traceback(file.fileno(), all_threads=True)


def flight_recorder() -> list[dict[str, Any]]:
    """Return the last collectives that torch's flight recorder of this process knows, oldest first; without stacks.

    It records if `TORCH_FR_BUFFER_SIZE` (older: `TORCH_NCCL_TRACE_BUFFER_SIZE`) is above zero. The files that it writes
    itself are pickles, which are not safe to read for others: so it is asked here, in the process that it belongs to.
    """
    c10d = getattr(torch._C, "_distributed_c10d", None)
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            text = dump()
            content = json.loads(text) if len(text) <= _MOST_BYTES else {}
            entries = [_plain(entry) for entry in content.get("entries") or () if isinstance(entry, dict)]
            if entries:
                return entries[-_MOST_ENTRIES:]
    return []


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in _KEPT if name in entry}
