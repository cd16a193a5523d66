"""Captured tensors on disk: pages that are plain safetensors files, written datapoint by datapoint."""

from sonde.store.pages.nodes import BatchValue, FromTorch, Unsupported
from sonde.store.pages.preview import Preview
from sonde.store.pages.reader import DebugOutputs, load_debug_outputs
from sonde.store.pages.record import Datapoint
from sonde.store.pages.writer import PageWriter
from sonde.store.verify import verify_pages

__all__ = [
    "BatchValue",
    "Datapoint",
    "DebugOutputs",
    "FromTorch",
    "PageWriter",
    "Preview",
    "Unsupported",
    "load_debug_outputs",
    "verify_pages",
]
