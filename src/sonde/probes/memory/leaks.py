"""Detect leaking memory: how much a step, which tensors pile up, and which line keeps them."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from torch import Tensor

from sonde.core.robust import Growth, growth
from sonde.hooks.user_line import Line
from sonde.probes.memory.holders import Holder, LongGraph, find_holder, find_long_graph
from sonde.probes.memory.process import heap_bytes

# --------------------------------------------------------------------------------
# Which tensors are alive, counted by kind. Walks all of Python's objects, which takes milliseconds: do it rarely.


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What tensors of one kind have in common."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    grad_fn: str
    """The operation whose graph the tensor keeps alive; empty if it keeps none."""
    leaf: bool
    """It requires a gradient and was not computed: a parameter."""

    def __str__(self) -> str:
        what = f"{self.dtype} {list(self.shape)} on {self.device}"
        return f"{what} with the graph behind {self.grad_fn}" if self.grad_fn else what


@dataclass(slots=True)
class LiveTensors:
    """How many tensors of each kind are alive, and their bytes."""

    counts: Counter[TensorKind] = field(default_factory=Counter)
    bytes: Counter[TensorKind] = field(default_factory=Counter)


def count_live() -> LiveTensors:
    """Count what is alive now. Nothing is kept alive by it, and no tensor's values are touched."""
    found = LiveTensors()
    for tensor in live_tensors():
        kind = kind_of(tensor)
        if kind is not None:
            found.counts[kind] += 1
            found.bytes[kind] += tensor.numel() * tensor.element_size()
    return found


def tensors_of(kind: TensorKind) -> list[Tensor]:
    """Return the living tensors of a kind, roughly the oldest first."""
    return [tensor for tensor in live_tensors() if kind_of(tensor) == kind]


def live_tensors() -> list[Tensor]:
    """Return all tensors that have a Python object."""
    # There are hundreds of thousands of objects: one look-up each has to be enough.
    wanted = set(_with_subclasses(Tensor))
    return [each for each in gc.get_objects() if type(each) in wanted]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = kind.__subclasses__()
    for each in below:
        yield from _with_subclasses(each)


def kind_of(tensor: Tensor) -> TensorKind | None:
    """Return the kind of a tensor; None if it has no memory of its own or is being torn down."""
    try:
        grad_fn, shape = tensor.grad_fn, tuple(tensor.shape)
        if any(type(size) is not int for size in shape):
            return None  # a fake tensor, while torch compiles: its sizes are symbols, and it holds no memory
        return TensorKind(
            shape=shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
            grad_fn=type(grad_fn).__name__ if grad_fn is not None else "",
            leaf=tensor.requires_grad and grad_fn is None,
        )
    except (RuntimeError, NotImplementedError, AttributeError):
        return None  # a wrapper that hides its tensor, or one that is being torn down


# --------------------------------------------------------------------------------
# Is memory leaking, by how much a step, which tensors pile up, and which line keeps them.


# Growth below this over the whole scope is not reported: allocators keep some of the memory that is freed.
LEAST_BYTES: Final = 4 << 20
# Where nothing that piles up was found, memory alone must be this clear: it may be the allocator's.
LEAST_BYTES_UNEXPLAINED: Final = 32 << 20
_LEAST_PER_STEP: Final = 0.15
_LEAST_RISING: Final = 0.8
_MOST_SAMPLES: Final = 64
_MOST_HEAP_SAMPLES: Final = 512
# The part of the time for counting that reading the heap may take in addition.
_HEAP_SHARE: Final = 0.25
_MOST_SUSPECTS: Final = 3
# With fewer counts than this in the later part of a scope, nothing can be said about what becomes more.
_FEWEST_COUNTS: Final = 3
_LOOKED_AT: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PiledUp:
    """Tensors of one kind that become more, and what holds them."""

    kind: TensorKind
    per_step: float
    bytes_per_step: float
    """Of the tensors themselves; a graph behind them comes on top."""
    holder: Holder | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Memory that grows from step to step without end."""

    place: str
    """`process`, or a device such as `cuda:0`."""
    growth: Growth
    phase: str
    """The phase of the step in which it grows most; empty if unknown."""
    piled_up: tuple[PiledUp, ...] = ()
    long_graph: LongGraph | None = None
    counted: bool = True
    """Living tensors were counted often enough to say what piles up, or that nothing does."""

    def explained_by(self, earlier: Leak | None) -> Leak:
        """Return this leak with the cause that was found earlier, if more was known then: a line, or a name."""
        if earlier is None or self._knowledge() >= earlier._knowledge():
            return self
        return replace(self, piled_up=earlier.piled_up, long_graph=earlier.long_graph)

    def _knowledge(self) -> int:
        graph = self.long_graph is not None
        return max([2 * bool(self.lines), int(graph), *(_knowledge(each) > 0 for each in self.piled_up)])

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines of the user's code that keep memory, the likeliest first."""
        holders = [each.holder for each in self.piled_up if each.holder is not None]
        graph = self.long_graph.lines if self.long_graph else ()
        return tuple(dict.fromkeys(itertools.chain(*(holder.lines for holder in holders), graph)))

    @property
    def text(self) -> str:
        """The leak in a few sentences, with the line and a fix."""
        grows = f"{_where(self.place)} grows by {_size(self.growth.per_step)} a step"
        sure = f" (between {_size(self.growth.low)} and {_size(self.growth.high)}, over {self.growth.steps} steps)"
        return f"{grows}{sure}{self._why()}{self._fix()}"

    def _why(self) -> str:
        if self.piled_up:
            return "".join(_describe(each) for each in self.piled_up[:1])
        if self.long_graph is not None:
            graph = self.long_graph
            line = f" {graph.lines[0]}: `{graph.lines[0].text}`" if graph.lines else ""
            return f". The graph of `{graph.name}` in {graph.scope} reaches back over {graph.uses} passes:{line}"
        if not self.counted:
            return ". Living tensors were counted too rarely to say what: watch more steps, or pass max_share=0.2"
        return (
            ". No tensors pile up: look at other Python objects, at native code and at loaders that keep what they read"
        )

    def _fix(self) -> str:
        if self.long_graph is not None and not self.piled_up:
            return ". Add numbers, not graphs: `loss.detach()` or `loss.item()`, and detach a state kept between steps."
        if self.piled_up and self.piled_up[0].kind.grad_fn:
            return ". Each keeps the graph of its pass alive: keep `.detach()`ed tensors or numbers instead."
        return ". Let go of what is not needed any more, or bound the container." if self.piled_up else "."


class TensorWatch:
    """Counts living tensors now and then, in bounded memory and within a share of the time."""

    def __init__(
        self, clock: Callable[[], float], *, max_share: float, heap: Callable[[], int | None] = heap_bytes
    ) -> None:
        self.heap: list[tuple[int, int]] = []
        """Steps and the bytes allocated by malloc."""
        self._heap = heap
        self._clock = clock
        self._max_share = max_share
        self._began = clock()
        self._spent = 0.0
        self._cost = 0.0
        self._heap_cost = self._heap_spent = 0.0
        self.suspected = False
        """Memory has grown lately: then the heap is read whenever it is due."""
        self.bounded: set[TensorKind] = set()
        """Kinds that were seen in a container which cannot grow without bound."""
        self._samples: list[tuple[int, LiveTensors]] = []

    def weigh(self) -> None:
        """Find out what a count takes, before the first step: it depends on how many objects the program has."""
        begin = self._clock()
        count_live()
        self._began = self._clock()
        self._cost = self._began - begin

    @property
    def enough(self) -> bool:
        """Whether there are counts enough to say what becomes more."""
        return len(self._samples) >= _FEWEST_COUNTS

    def see(self, step: int) -> None:
        """Count if a count is due: every second step at first, then every fifth, if time allows."""
        if not (step % 2 == 0 if step <= 20 else step % 5 == 0):
            return
        allowed = self._max_share * (self._clock() - self._began)
        if self.suspected or self._heap_spent + self._heap_cost <= _HEAP_SHARE * allowed:
            self.read_heap(step)
        if self._spent + self._cost <= allowed:
            self.count(step)

    def read_heap(self, step: int) -> int | None:
        """Read malloc's statistics, unless that was done at this step. It is far cheaper than a count."""
        if not self.heap or self.heap[-1][0] != step:
            begin = self._clock()
            held = self._heap()
            self._heap_cost = self._clock() - begin
            self._heap_spent += self._heap_cost
            if held is None:
                return None
            self.heap.append((step, held))
            if len(self.heap) > _MOST_HEAP_SAMPLES:
                del self.heap[1::2]
        return self.heap[-1][1]

    def count(self, step: int) -> None:
        """Count now, unless that was done at this step."""
        if self._samples and self._samples[-1][0] == step:
            return
        self.read_heap(step)
        begin = self._clock()
        self._samples.append((step, count_live()))
        if len(self._samples) > _MOST_SAMPLES:
            del self._samples[1::2]
        self._cost = self._clock() - begin
        self._spent += self._cost

    def rising(self) -> list[tuple[TensorKind, float, float]]:
        """Return kinds of tensors that become more: how many and how many bytes a step, the heaviest first."""
        kinds = set().union(*(sample.counts for _, sample in self._samples)) if self._samples else set()
        found = []
        for kind in kinds:
            rate = self._rate([sample.counts[kind] for _, sample in self._samples])
            if rate is not None and not kind.leaf and kind not in self.bounded:
                bytes_per_step = rate * self._samples[-1][1].bytes[kind] / self._samples[-1][1].counts[kind]
                found.append((kind, rate, bytes_per_step))
        # A graph takes more memory than the number at its end, but its size is not known.
        return sorted(found, key=lambda each: (-bool(each[0].grad_fn), -each[2]))

    def _rate(self, counts: list[int]) -> float | None:
        """Return how many come per step in the later part, if they keep coming; else None."""
        late = slice((len(counts) - 1) // 3, None)
        steps = [step for step, _ in self._samples][late]
        values = counts[late]
        if len(values) < _FEWEST_COUNTS or steps[-1] == steps[0]:
            return None
        rises = [after > before for before, after in itertools.pairwise(values)]
        rate = (values[-1] - values[0]) / (steps[-1] - steps[0])
        return rate if rate >= _LEAST_PER_STEP and np.mean(rises) >= _LEAST_RISING else None


def find_leak(
    place: str, samples: list[tuple[int, int]], watch: TensorWatch, phases: dict[str, dict[str, int]], steps: int
) -> Leak | None:
    """Judge one place's samples of (step, bytes), and search for the cause only if it leaks."""
    # Malloc's own statistics are exact, but not all memory goes through malloc.
    judged = [judge(series) for series in ((watch.heap, samples) if place == "process" else (samples,))]
    found = next((each for each in judged if each.steady and each.total >= LEAST_BYTES), None)
    if found is None:
        return None
    piled = [_pile(*each) for each in watch.rising()[:_MOST_SUSPECTS]]
    # A deque with a bound is on its way to being full. It is remembered, for it may be gone at the next look.
    watch.bounded |= {each.kind for each in piled if each.holder is not None and each.holder.bounded}
    piled = [each for each in piled if each.kind not in watch.bounded]
    graph = find_long_graph(steps) if not any(each.holder and each.holder.lines for each in piled) else None
    if graph is not None:
        piled = []
    if not piled and graph is None and found.total < LEAST_BYTES_UNEXPLAINED:
        return None
    return Leak(
        place=place,
        growth=found,
        phase=_phase(place, found, phases),
        piled_up=tuple(sorted(piled, key=lambda each: -_knowledge(each))),
        long_graph=graph,
        counted=watch.enough,
    )


def _phase(place: str, found: Growth, phases: dict[str, dict[str, int]]) -> str:
    """Return the phase that grew by most of it. Resident memory hides growth that fits into what was freed before."""
    grown = {phase: places.get(place, 0) for phase, places in phases.items()}
    most = max(grown, key=lambda phase: grown[phase], default="")
    return most if most and grown[most] >= found.total / 2 else ""


def judge(samples: list[tuple[int, int]]) -> Growth:
    """Judge samples of (step, bytes)."""
    return growth(*np.array(samples, np.float64).reshape(-1, 2).T)


def _pile(kind: TensorKind, per_step: float, bytes_per_step: float) -> PiledUp:
    tensors = tensors_of(kind)
    some = tensors[:: max(1, len(tensors) // _LOOKED_AT)][:_LOOKED_AT]
    del tensors
    return PiledUp(kind=kind, per_step=per_step, bytes_per_step=bytes_per_step, holder=find_holder(some))


def _knowledge(pile: PiledUp) -> int:
    """Return how much is known of what holds it: 2 for the line, 1 for the name, 0 for nothing."""
    return 0 if pile.holder is None or not pile.holder.name else 2 if pile.holder.lines else 1


def _describe(pile: PiledUp) -> str:
    what = f". Every step leaves {pile.per_step:.1f} tensor(s) {pile.kind}"
    holder = pile.holder
    if holder is None or not holder.name:
        return f"{what}; what holds them was not found"
    line = f": {holder.lines[0]}: `{holder.lines[0].text}`" if holder.lines else ""
    return f"{what} in the {holder.container} `{holder.name}` of {holder.scope}{line}"


def _where(place: str) -> str:
    return "the process's memory" if place == "process" else f"memory on {place}"


def _size(value: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} bytes"
