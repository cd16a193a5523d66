"""Keep what is needed to repeat the present step: its batch, random numbers and precision, by reference.

Nothing is copied but the states of the random number generators (5 KB each), and nothing outlives the step. Until it
ends this keeps alive, on whatever device it lies:

- the inputs of the last pass, which the program mostly holds itself, and those of up to 7 micro-batches before it, up
  to 256 MB of storage in all; without the graphs that computed them;
- the gradients that came to the models' outputs, up to 64 MB in all, the last pass first: they would have been freed.
"""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from sonde.core import schema, statistics
from sonde.core.collector import uncollected
from sonde.core.schema import Rows
from sonde.forensics.values import storage_of
from sonde.hooks.autograd_graph import next_sequence
from sonde.hooks.guard import UNGUARDED, Guard
from sonde.hooks.on_backward import on_gradient
from sonde.hooks.unpack import unpack
from sonde.hooks.user_line import Line, current_line
from sonde.records import Block, Event, Finding, Numbers, Quantity, Site

# Passes without a random number of Python's or numpy's after which those generators are no longer kept.
_PASSES_TO_TRUST: Final = 16
# Micro-batches of one step that are kept at most; beyond them the oldest goes.
MAX_PASSES: Final = 8
# What the inputs of all passes but the last may weigh together; beyond it the oldest pass goes.
MAX_INPUT_BYTES: Final = 256 << 20
# What the gradients at the outputs of all passes may weigh together; beyond it those of the oldest pass go.
MAX_GRADIENT_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """The states of all random number generators at one moment."""

    cpu: Tensor
    cuda: dict[int, Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls, device: torch.device | None = None, *, of_torch_only: bool = False) -> RandomState:
        """Take the states, on the CPU and one other device. A CUDA generator's is kept by the host: nothing waits.

        With `of_torch_only` those of Python and numpy are left out, which take ten times as long to copy.
        """
        cuda = {}
        if device is not None and device.type == "cuda" and device.index is not None:
            cuda = {device.index: uncollected(torch.cuda.default_generators[device.index].get_state)}
        cpu = uncollected(torch.get_rng_state)
        if of_torch_only:
            return cls(cpu, cuda, None, None)
        numpy_state = np.random.get_state() if "numpy.random" in sys.modules else None
        return cls(cpu, cuda, random.getstate(), numpy_state)

    def is_torch_only_since(self) -> bool:
        """Return whether no random number of Python's or numpy's was drawn since these states were taken."""
        if self.python != random.getstate():
            return False
        if self.numpy is None:
            return "numpy.random" not in sys.modules
        now: Any = np.random.get_state()
        return bool(np.array_equal(self.numpy[1], now[1])) and self.numpy[2:] == now[2:]

    def put(self) -> None:
        """Make these the states of the generators."""
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)


@dataclass(frozen=True, slots=True)
class Precision:
    """Whether and how autocast was on, for one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> Precision:
        """Take the present settings."""
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def scope(self) -> torch.autocast:
        """Return a scope in which these settings hold. Its casts are not cached: they would outlive it."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


@dataclass(slots=True, eq=False, weakref_slot=True)
class KeptPass:
    """One training pass of a model: its arguments and its output."""

    model: nn.Module
    step: int
    random: RandomState
    precision: Precision
    called_at: Line | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    """Input tensors with their version counters: another counter later means that they were written over."""
    outputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """The gradients that came to the outputs, by their place in them."""
    gradient_bytes: int = 0
    lacks_gradients: bool = False
    """Gradients came that there was no room for."""
    storages: dict[int, int] = field(default_factory=dict)
    """What its inputs keep alive, in bytes by storage."""
    computed: set[int] = field(default_factory=set)
    """By id: inputs that are not data, since the program computed them with a graph."""
    sequence: int = 0
    """The number the next autograd node would have had when the pass ended: later ones belong to the loss."""
    backwards: int = 0
    returned: bool = False
    is_alone: bool = True
    """Not yet seen to talk to other processes, which would not take part if it was repeated."""

    @property
    def inputs(self) -> list[tuple[str, Tensor]]:
        """The tensors the model was called with, by their place in the call."""
        return inputs_of(self.args, self.kwargs)

    @property
    def is_intact(self) -> bool:
        """Return whether the inputs are still what the model got."""
        return all(tensor._version == version for tensor, version in self.versions)

    @property
    def batch_size(self) -> int | None:
        """The length of the first dimension of the first input that has one."""
        return next((tensor.shape[0] for _, tensor in self.inputs if tensor.dim() > 0), None)


class Keeper:
    """Holds the passes of the present step."""

    def __init__(self, guard: Guard = UNGUARDED) -> None:
        self.passes: list[KeptPass] = []
        self._torch_only = 0
        """Passes in a row that drew no random number of Python's or numpy's."""
        self._guard = guard
        self._take = guard.wrap("keeping gradients", self._take_gradient)

    def begin(self, model: nn.Module, args: tuple[Any, ...], step: int) -> None:
        """Note that a training pass of a model begins."""
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        if device.type == "meta":
            return  # it computes no values that could go bad
        states = RandomState.now(device, of_torch_only=self._torch_only >= _PASSES_TO_TRUST)
        kept = KeptPass(model, step, states, Precision.now(device.type), current_line())
        kept.versions = _versions(unpack(args))
        self.passes = [*self._earlier(), kept]

    def end(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note what the pass was called with and what it returned."""
        kept = self.passes[-1] if self.passes else None
        if kept is None or kept.model is not model or kept.returned:
            return
        # Arguments by keyword are not known before the pass has ended.
        kept.versions += _versions([(key, tensor) for key, _, tensor in _keywords(kwargs)])
        kept.args, kept.kwargs = _without_graphs((args, kwargs), kept.computed)
        kept.storages = dict(storage_of(tensor) for _, tensor in kept.inputs)
        kept.returned = True
        if kept.random.python is not None:
            self._torch_only = self._torch_only + 1 if kept.random.is_torch_only_since() else 0
        for index, (_, tensor) in enumerate(unpack(output)):
            kept.outputs.append(weakref.ref(tensor))
            # A leaf, such as an embedding's weight, would outlive the step and gather a hook in each.
            if tensor.requires_grad and not tensor.is_leaf:
                self._listen(kept, index, tensor)
        kept.sequence = next_sequence()

    def forget(self, models: set[int] | None = None) -> None:
        """Release the passes of these models (by id), or all."""
        self.passes = [] if models is None else [each for each in self.passes if id(each.model) not in models]

    def _earlier(self) -> list[KeptPass]:
        """Return the passes to keep beside one that begins: the last ones, as far as there is room for their inputs."""
        chosen: list[KeptPass] = []
        storages: dict[int, int] = {}
        for kept in reversed([each for each in self.passes if each.returned]):
            storages |= kept.storages
            if len(chosen) == MAX_PASSES - 1 or sum(storages.values()) > MAX_INPUT_BYTES:
                break
            chosen.insert(0, kept)
        return chosen

    def _listen(self, kept: KeptPass, index: int, tensor: Tensor) -> None:
        # The hook belongs to the tensor and must keep neither the pass nor the keeper alive.
        keeper, reference = weakref.ref(self), weakref.ref(kept)

        def keep(gradient: Tensor | None) -> None:
            here, kept = keeper(), reference()
            if here is not None and kept is not None and gradient is not None:  # operations may pass none on
                here._take(kept, index, gradient)

        on_gradient(tensor, self._guard.catch("keeping gradients", keep))

    def _take_gradient(self, kept: KeptPass, index: int, gradient: Tensor) -> None:
        if index in kept.gradients:
            kept.gradient_bytes -= storage_of(kept.gradients.pop(index))[1]
        _, size = storage_of(gradient)
        room = MAX_GRADIENT_BYTES - size - sum(each.gradient_bytes for each in self.passes)
        older = self.passes[: next((at for at, each in enumerate(self.passes) if each is kept), 0)]
        if room + sum(each.gradient_bytes for each in older) < 0:
            kept.lacks_gradients = True
            return
        for each in older:
            if room < 0 and each.gradient_bytes:
                room += each.gradient_bytes
                each.gradients, each.gradient_bytes, each.lacks_gradients = {}, 0, True
        kept.gradients[index] = gradient
        kept.gradient_bytes += size


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the tensors of a call, by their place in it."""
    return unpack(args) + [(f"{key}{part}", tensor) for key, part, tensor in _keywords(kwargs)]


def _without_graphs(value: Any, computed: set[int]) -> Any:
    """Return nested inputs, those with a graph cut off from it and noted in `computed`.

    Held as they are, they would keep all activations of their graph, also where no backward comes that frees them.
    """
    if isinstance(value, Tensor):
        if value.grad_fn is None:
            return value
        cut = value.detach().requires_grad_()
        computed.add(id(cut))
        return cut
    if type(value) is dict:
        return {key: _without_graphs(item, computed) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_graphs(item, computed) for item in value)
    return value


def _versions(tensors: list[tuple[str, Tensor]]) -> list[tuple[Tensor, int]]:
    # Without its graph a tensor still counts what is written to it.
    return [
        (tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)
        for _, tensor in tensors
        if not tensor.is_inference()
    ]


def _keywords(kwargs: dict[str, Any]) -> list[tuple[str, str, Tensor]]:
    return [(key, part, tensor) for key, value in kwargs.items() for part, tensor in unpack(value)]


# --------------------------------------------------------------------------------
# The readings of the last few steps, as the worker hands them out: what led to something non-finite.


NUM_STEPS: Final = 16
GUARD_SITE: Final = "guard.found_inf"
"""Where it is recorded whether a fused optimizer held itself back."""


class Recent:
    """A sink that keeps the rows of the last steps, and notes the first step whose readings are not finite."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: dict[int, Site] = {}
        self._guard_site = -1
        self._blocks: deque[tuple[int, Any, Rows]] = deque(maxlen=NUM_STEPS)
        self.bad_step: int | None = None
        """The first step whose gradients or parameters were seen to be non-finite since `forget_bad`."""
        self._bad: list[Site] = []
        self._guarded: int | None = None
        self._spoilt: int | None = None
        self._taken_until = -1

    def history(self, name: str, quantity: Quantity = "output") -> list[dict[str, Any]]:
        """Return how large a module's outputs (or other readings by that name) were, step by step."""
        with self._lock:
            ids = {site.id for site in self._sites.values() if (site.name, site.quantity) == (name, quantity)}
            blocks = list(self._blocks)
        found = []
        for step, sites, rows in blocks:
            chosen = rows[np.isin(sites, list(ids))] if ids else rows[:0]
            if len(chosen):
                found.append({"step": step, **_worst(chosen)})
        return found

    def bad_sites(self) -> list[Site]:
        """Return the sites of the first bad step that are not finite, in the order in which they first came up."""
        with self._lock:
            return list(self._bad)

    def forget_bad(self) -> None:
        """Begin to look for a first bad step anew."""
        with self._lock:
            self.bad_step, self._bad = None, []

    def take_guarded(self) -> int | None:
        """Return the first step in which a fused optimizer held itself back, once."""
        with self._lock:
            step, self._guarded = self._guarded, None
            return step

    def note_spoilt(self, step: int) -> None:
        """Mark a step as one whose gradients or parameters are not finite."""
        with self._lock:
            self._note_spoilt(step)

    def take_spoilt(self, until: int) -> int | None:
        """Return the first step whose gradients or parameters are not finite, once.

        Readings of steps up to `until` that arrive later tell of the same, and are not taken for another.
        """
        with self._lock:
            step, self._spoilt = self._spoilt, None
            if step is not None:
                self._taken_until = until
            return step

    def take_sites(self, sites: list[Site]) -> None:
        """Take sites that are new."""
        with self._lock:
            self._sites |= {site.id: site for site in sites}
            self._guard_site = next((site.id for site in sites if site.name == GUARD_SITE), self._guard_site)

    def take_block(self, block: Block) -> None:
        """Take the readings of one step."""
        with self._lock:
            guarded = block.skipped and self._guard_site in block.sites
            if guarded and self._guarded is None:
                self._guarded = block.step
            if guarded or not block.skipped:  # else it is a gradient scaler's business
                self._judge(block, guarded)
            self._blocks.append((block.step, block.sites, block.rows))

    def take_numbers(self, numbers: Numbers) -> None:
        """Leave logged numbers to others."""

    def _judge(self, block: Block, guarded: bool) -> None:
        bad = _is_bad(block.rows)
        if not bad.any():
            return
        numbers = [int(site) for site in block.sites[bad] if int(site) in self._sites]
        sites = [self._sites[number] for number in numbers]
        if not any(site.quantity == "gradient" or self._was_finite(site) for site in sites):
            return
        if not guarded:
            self._note_spoilt(block.step)
        if self.bad_step is None:
            self.bad_step, self._bad = block.step, sites

    def _note_spoilt(self, step: int) -> None:
        if step > self._taken_until:
            self._spoilt = step if self._spoilt is None else min(step, self._spoilt)

    def _was_finite(self, site: Site) -> bool:
        """Return whether a parameter was finite before: one that never was is a mask of intended infinities."""
        return site.quantity == "parameter" and any(
            bool((~_is_bad(rows[sites == site.id])).any()) for _, sites, rows in self._blocks
        )

    def take_event(self, event: Event) -> None:
        """Leave events to others."""

    def take_finding(self, finding: Finding) -> None:
        """Leave findings to others."""

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Release the readings."""
        with self._lock:
            self._blocks.clear()


def _is_bad(rows: Rows) -> Any:
    return rows[:, schema.NAN : schema.NEG_INF + 1].any(axis=1)


def _worst(rows: Rows) -> dict[str, float]:
    return {
        "min": float(rows[:, schema.MIN].min()),
        "max": float(rows[:, schema.MAX].max()),
        "nonfinite": int(statistics.nonfinite(rows).sum()),
    }
