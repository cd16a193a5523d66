"""Where in the forward pass torch's anomaly mode says a NaN gradient comes from.

Torch issues it as a warning, apart from the error it raises. The warning is collected and passed on.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any, Final

from sonde.hooks.user_line import is_users

_BEGINS: Final = "Error detected in "
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


class AnomalyTraces:
    """What torch said: the text of each warning, and the user's line in the last one."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @property
    def source(self) -> str:
        """`file:line in function` of the innermost line of the user's that made the last bad operation, or ""."""
        frames = _FRAME.findall(self.texts[-1]) if self.texts else []
        users = [frame for frame in frames if is_users(frame[0])]
        return "{}:{} in {}".format(*users[-1]) if users else ""


@contextlib.contextmanager
def collect_anomaly_traces() -> Iterator[AnomalyTraces]:
    """Collect torch's warnings about anomalies while the block runs."""
    traces, show = AnomalyTraces(), warnings.showwarning

    def collect(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if str(message).startswith(_BEGINS):
            traces.texts.append(str(message)[-8000:])  # the innermost lines come last
        show(message, *args, **kwargs)

    warnings.showwarning = collect
    try:
        yield traces
    finally:
        if warnings.showwarning is collect:  # else code inside the block has replaced it
            warnings.showwarning = show
