"""Taking hooks away again."""

from __future__ import annotations

from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle


def remove_all(handles: list[RemovableHandle]) -> None:
    """Remove hooks and empty the list.

    Torch keeps a mark of a process-wide hook that takes keyword arguments when the hook itself is gone, and would
    believe in global hooks for ever.
    """
    marks = getattr(torch_module, "_global_forward_hooks_with_kwargs", {})
    for handle in handles:
        handle.remove()
        marks.pop(handle.id, None)
    handles.clear()
