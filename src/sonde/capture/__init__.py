"""Write captures to disk: copied in the hook, written by one thread in bounded memory."""

from sonde.capture.capture import Capture
from sonde.capture.legacy import write_legacy_pages, write_pickled_pages
from sonde.capture.values import PerSample, copy_outputs, part_of, to_plain, to_plain_outputs
from sonde.capture.worker import Failure

__all__ = [
    "Capture",
    "Failure",
    "PerSample",
    "copy_outputs",
    "part_of",
    "to_plain",
    "to_plain_outputs",
    "write_legacy_pages",
    "write_pickled_pages",
]
