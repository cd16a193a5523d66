"""Which kernels and hooks this installation uses, and why it falls back to slower ones."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from sonde.stats import library
from sonde.stats.choose import CHOICE_VARIABLE
from sonde.stats.cuda import NoDeviceKernel, cuda_kernel
from sonde.stats.outputs import why_in_python


@dataclass(frozen=True, slots=True)
class Choice:
    """What does one part of the work."""

    part: str
    used: str
    why: str = ""
    """Why it is a slower one; empty where it is the fastest."""


def check_kernels() -> list[Choice]:
    """Return what computes statistics and takes outputs here. Compiles the kernel of a CUDA device if there is one."""
    return [_cpu(), _outputs(), _cuda()]


def _cpu() -> Choice:
    part = "statistics on the CPU"
    why = f"{CHOICE_VARIABLE}=torch is set" if _wants_torch() else library.why_missing()
    native = None if why else library.load()
    if native is None:
        return Choice(part, "torch operations", why)
    threads = "torch's threads" if native.has_threads else "one thread"
    return Choice(part, f"C ({native.level}, {threads})")


def _outputs() -> Choice:
    why = why_in_python()
    return Choice("module outputs", "Python hooks" if why else "C hooks", why)


def _cuda() -> Choice:
    part = "statistics on CUDA devices"
    if not torch.cuda.is_available():
        return Choice(part, "none", "torch sees no CUDA device")
    if _wants_torch():
        return Choice(part, "torch operations", f"{CHOICE_VARIABLE}=torch is set")
    try:
        cuda_kernel("cuda")
    except NoDeviceKernel as error:
        return Choice(part, "torch operations", str(error))
    return Choice(part, f"CUDA C on {torch.cuda.get_device_name()}")


def _wants_torch() -> bool:
    return os.environ.get(CHOICE_VARIABLE, "").lower() == "torch"
