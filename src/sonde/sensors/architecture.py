"""Sensors for how modules are put together: their order, shapes, softmaxes, attention and carried states."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.core.facts import ReshapeFacts, SoftmaxFacts
from sonde.core.signals import LOOKS_AHEAD, LOOP, LOSS, NEXT_TOKEN
from sonde.hooks.autograd_graph import children_of, name_of, saved_by, sequence_of, shape_of, signed, walk
from sonde.hooks.unpack import unpack
from sonde.record.modules import WatchedModule
from sonde.records import Phase
from sonde.schedule import at, first
from sonde.sensors.graph import VIEWS
from sonde.sensors.loss_functions import LossCall
from sonde.sensors.sensor import Context, Graph, Sensor, StepEnd
from sonde.sensors.tensors import is_plain, is_whole

MAX_SOFTMAXES: Final = 16
MAX_RESHAPES: Final = 4
MAX_ATTENTIONS: Final = 16
MAX_TOKENS: Final = 1 << 18
_MAX_CHAIN: Final = 10
_SOFTMAXES: Final = ("SoftmaxBackward0", "LogSoftmaxBackward0")
_PRODUCTS: Final = ("BmmBackward0", "MmBackward0")
_LIKELIHOODS: Final = ("NllLossBackward0", "NllLoss2DBackward0")
# Operations that leave every dimension where it is.
_SAME: Final = (
    "CloneBackward0",
    "DivBackward0",
    "DropoutBackward0",
    "ExpandBackward0",
    "MaskedFillBackward0",
    "MulBackward0",
    "NativeDropoutBackward0",
    "ToCopyBackward0",
)
_MOVES: Final = ("PermuteBackward0", "SqueezeBackward1", "TBackward0", "TransposeBackward0", "UnsqueezeBackward0")
_MAX_WEIGHTS: Final = 1 << 22
_FORBIDDEN: Final = -1e4
_MASKS: Final = ("attn_mask", "attn_bias")


class ModuleOrder(Sensor):
    """The order of leaf modules, which hands a tensor to which, and the dtype of autocast. Counts rounds."""

    produces = ("facts.order", "facts.edges", "facts.autocast")
    when = first(2)
    cost = "a look at the arguments and the output of every leaf module in the first two recorded steps"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._order: dict[str, None] = {}
        self._edges: dict[tuple[str, str], None] = {}
        self._autocast = ""
        self._kinds: dict[str, str] = {}
        self._made: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._stated = 0

    def on_traced_enter(self, entry: WatchedModule, args: tuple[Any, ...]) -> None:
        """Note what a leaf module is called with."""
        name, producers = entry.name, self.context.producers
        self._kinds[name] = entry.kind
        self._order.setdefault(name)
        for _, tensor in unpack(args):
            made = self._made.get(id(tensor))
            if made is not None and made[0]() is tensor and made[1] != name:
                self._edges.setdefault((made[1], name))
                before = self._kinds[made[1]]
                producers[name] = before if producers.get(name, before) == before else ""
            if not self._autocast and not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type):
                self._autocast = str(torch.get_autocast_dtype(tensor.device.type)).removeprefix("torch.")

    def on_traced_call(self, entry: WatchedModule, phase: Phase, args: tuple[Any, ...], output: Any) -> None:
        """Note what a leaf module returned."""
        if phase == "train":
            for _, tensor in unpack(output):
                self._made[id(tensor)] = (weakref.ref(tensor), entry.name)

    def on_pass_end(self) -> None:
        """Forget the tensors of a pass."""
        self._made.clear()

    def on_step_end(self, end: StepEnd) -> None:
        """State what is known by now."""
        known = len(self._order) + len(self._edges)
        if end.due and known != self._stated:
            self._stated = known
            self.context.book.add(order=tuple(self._order), edges=tuple(self._edges), autocast=self._autocast)


class CarriedStates(Sensor):
    """Recurrent modules that begin with the state they ended with in the step before, found without reading it.

    A state that is passed on after `detach()` lies at the same place in memory. Counts rounds.
    """

    produces = ("facts.carried",)
    when = first(2)
    cost = "compares two addresses per call of a recurrent module in the first two recorded steps"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._last: dict[str, tuple[int, Tensor]] = {}

    def on_traced_call(self, entry: WatchedModule, phase: Phase, args: tuple[Any, ...], output: Any) -> None:
        """Compare the first state of a module with its last one of another step."""
        if isinstance(entry.module, nn.RNNBase | nn.RNNCellBase) and self._is_carried(entry, args, output):
            self.context.book.add_carried(entry.name)

    def _is_carried(self, entry: WatchedModule, args: tuple[Any, ...], output: Any) -> bool:
        step, given, before = self.context.steps, _state(args[1:2]), self._last.get(entry.name)
        is_sequence = isinstance(output, tuple) and isinstance(entry.module, nn.RNNBase)
        state = _state(output[1:2] if is_sequence else (output,))
        if state is not None:
            self._last[entry.name] = (step, state.detach())  # without its graph
        return given is not None and before is not None and before[0] != step and _same(given, before[1])


def _state(given: tuple[Any, ...]) -> Tensor | None:
    """Return the state, or the first of the two that an LSTM has."""
    first = given[0] if given else None
    first = first[0] if isinstance(first, tuple) and first else first
    return first if isinstance(first, Tensor) else None


def _same(one: Tensor, two: Tensor) -> bool:
    return one.data_ptr() == two.data_ptr() and one.shape == two.shape


class Reshapes(Sensor):
    """Views that give a tensor the same sizes in another order: axes have not moved, samples were cut up."""

    produces = ("facts.reshapes",)
    when = at(0)
    cost = "a walk over the graph of the first backward pass"

    def on_graph(self, graph: Graph) -> None:
        """Find them."""
        self.context.book.add(reshapes=tuple(read_reshapes(graph.root, graph.module_of)))


def read_reshapes(root: Tensor, module_of: Callable[[int], str]) -> list[ReshapeFacts]:
    """Return views that exchange the sizes of the first axis and another. `module_of` names what made a node."""
    found: list[ReshapeFacts] = []
    for node in walk(root.grad_fn):
        if name_of(node) in VIEWS and len(found) < MAX_RESHAPES:
            before, after = shape_of(children_of(node)[0]), shape_of(node)
            if before is not None and after is not None and _is_swap(before, after):
                found.append(ReshapeFacts(before=before, after=after, module=module_of(sequence_of(node))))
    return found


def _is_swap(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return whether the first size and another one have changed places.

    Attention joins batch and heads behind the first axis, which may look like a swap of two others by chance.

    >>> _is_swap((16, 32, 24), (32, 16, 24)), _is_swap((16, 1), (1, 16)), _is_swap((16, 8, 32), (16, 32, 8))
    (True, False, False)
    """
    if len(before) != len(after) or before == after or min(before) < 2:
        return False
    moved = [at for at in range(len(before)) if before[at] != after[at]]
    return len(moved) == 2 and moved[0] == 0 and before[0] == after[moved[1]] and before[moved[1]] == after[0]


class Softmaxes(Sensor):
    """Which dimension each softmax runs over, and which one is summed over when its result is used.

    Both are in the graph: a softmax saves its dimension, and a product of matrices, a weighted sum or a likelihood
    shows along which dimension the weights are used.
    """

    produces = ("facts.softmaxes",)
    when = at(0)
    cost = "a walk over the graph of the first backward pass"

    def on_graph(self, graph: Graph) -> None:
        """Find them."""
        self.context.book.add(softmaxes=tuple(read_softmaxes(graph.root, graph.module_of)))


def read_softmaxes(root: Tensor, module_of: Callable[[int], str]) -> list[SoftmaxFacts]:
    """Return the softmaxes whose use can be determined. `module_of` names the module of a node, by its number."""
    found: list[SoftmaxFacts] = []
    for node in walk(root.grad_fn):
        for used, below, over in _uses(node):
            chain = _chain(below)
            facts = None if chain is None else _facts(chain, used, over, module_of)
            if facts is not None and facts not in found:
                found.append(facts)
        if len(found) >= MAX_SOFTMAXES:
            break
    return found


def _uses(node: Any) -> list[tuple[str, Any, int]]:
    """Return what a node uses along which dimension, counted from the end: as a likelihood, or as weights."""
    name, children = name_of(node), children_of(node)
    if name in _LIKELIHOODS:
        # Classes come second: (N, C) and, for pictures and sequences, (N, C, H, W).
        return [("likelihood", children[0], -1 if name == "NllLossBackward0" else -3)]
    if name in _PRODUCTS and len(children) == 2:
        return [("weights", children[0], -1), ("weights", children[1], -2)]
    return []


def _chain(node: Any) -> list[Any] | None:
    """Return the nodes from a use down to the softmax whose result is used, the softmax last; None if there is none."""
    chain: list[Any] = []
    for _ in range(_MAX_CHAIN):
        chain.append(node)
        name = name_of(node)
        if name in _SOFTMAXES:
            return chain
        children = [child for child in children_of(node) if child is not None]
        if len(children) != 1 or name not in (*_SAME, *VIEWS, *_MOVES):
            return None
        node = children[0]
    return None


def _facts(chain: list[Any], used: str, over: int, module_of: Callable[[int], str]) -> SoftmaxFacts | None:
    softmax = chain[-1]
    shape, dim = shape_of(softmax), signed(saved_by(softmax, "dim"))
    if shape is None or not isinstance(dim, int):
        return None
    made = dim % len(shape)
    before = {index: index for index in range(len(shape))}
    for node, below in zip(reversed(chain[:-1]), reversed(chain[1:]), strict=True):
        moved = _moved(node, shape_of(below), shape_of(node))
        if moved is None:
            return None
        before = {moved[now]: old for now, old in before.items() if now in moved}
    last = shape_of(chain[0])
    summed = None if last is None else before.get(over % len(last))
    if summed is None:
        return None
    logarithm = name_of(softmax) == "LogSoftmaxBackward0"
    module = module_of(sequence_of(softmax))
    return SoftmaxFacts(shape=shape, dim=made, summed=summed, used=used, logarithm=logarithm, module=module)


def _moved(node: Any, before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> dict[int, int] | None:
    """Return where a node put each dimension that it kept; None if that cannot be determined."""
    if before is None or after is None:
        return None
    name = name_of(node)
    if name in _SAME:
        return {index: index for index in range(len(before))} if len(before) == len(after) else None
    if name in VIEWS:
        return _kept(before, after)
    count = len(before)
    if name == "TBackward0":
        return {0: 1, 1: 0} if count == 2 else None
    if name == "TransposeBackward0":
        one, two = (signed(saved_by(node, each)) for each in ("dim0", "dim1"))
        return {index: index for index in range(count)} | {one % count: two % count, two % count: one % count}
    if name == "PermuteBackward0":
        dims = signed(saved_by(node, "dims"))
        return {int(old) % count: new for new, old in enumerate(dims)}
    at = signed(saved_by(node, "dim")) % len(max(before, after, key=len))
    step = len(after) - count
    return {index: index + step * (index >= at) for index in range(count) if step >= 0 or index != at}


def _kept(before: tuple[int, ...], after: tuple[int, ...]) -> dict[int, int]:
    """Return the dimensions that a change of shape leaves whole.

    >>> _kept((4, 6, 8), (24, 8)), _kept((4, 2, 6, 6), (8, 6, 6))
    ({2: 1}, {2: 1, 3: 2})
    """
    ends = {(prod(after[:index]), size): index for index, size in enumerate(after) if size > 1}
    kept = {index: ends.get((prod(before[:index]), size)) for index, size in enumerate(before)}
    return {old: new for old, new in kept.items() if new is not None}


class LookAhead(Sensor):
    """Detect a next-token model that can attend to the token it predicts. Counts the passes that could be compared.

    Targets that are the inputs moved by one are found by comparing the two. Where attention looks is in the graph of
    the first backward pass: a softmax has saved its weights, a fused attention its mask.
    """

    produces = (NEXT_TOKEN, LOOKS_AHEAD)
    when = first(3)
    cost = "compares at most 262,144 tokens with their targets; reads at most 16 attention maps, once"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._waiting: Tensor | None = None
        self._length = 0
        self._compared = 0

    def on_tokens(self, tokens: Tensor) -> None:
        """Keep the tokens that a training pass begins with; their targets come with the loss."""
        fits = tokens.dim() == 2 and tokens.shape[1] > 2 and tokens.numel() <= MAX_TOKENS
        if fits and self.when(self._compared):
            self._waiting, self._length = tokens, int(tokens.shape[1])

    @torch.no_grad()
    def on_loss(self, call: LossCall) -> None:
        """Compare the targets with the tokens that came last."""
        tokens, self._waiting = self._waiting, None
        target = call.target
        if tokens is None or target is None or not call.classes or not is_whole(target):
            return
        if target.numel() == tokens.numel() and target.device == tokens.device:
            self._compared += 1
            following = target.detach().reshape(tokens.shape)[:, :-1] == tokens[:, 1:]
            self.signals.see(LOSS, NEXT_TOKEN, following.float().mean())

    @torch.no_grad()
    def on_graph(self, graph: Graph) -> None:
        """Read where attention looks, if there were tokens."""
        if self._length:
            found = list(_ahead(graph.root.grad_fn, self._length))
            if found and len({each.device for each in found}) == 1:
                self.signals.see(LOOP, LOOKS_AHEAD, torch.stack(found))


def _ahead(root: Any, length: int) -> Iterator[Tensor]:
    """Yield for each attention of a sequence to itself which part of its weight, or of its mask, lies ahead."""
    found = 0
    for node in walk(root):
        weights = _weights(node, length)
        if weights is not None and found < MAX_ATTENTIONS:
            found += 1
            yield weights.triu(1).sum((-2, -1)).float().mean() / length


def _weights(node: Any, length: int) -> Tensor | None:
    """Return what an attention of every place to every place has saved: its weights, or which of them may be."""
    name = name_of(node)
    if name == "SoftmaxBackward0":
        result = saved_by(node, "result")
        square = is_plain(result) and result.dim() >= 3 and result.shape[-2:] == (length, length)
        return result.detach() if square and result.numel() <= _MAX_WEIGHTS else None
    if not name.startswith("ScaledDotProduct"):
        return None
    query, key = saved_by(node, "query"), saved_by(node, "key")
    if not (is_plain(query) and is_plain(key)) or query.shape[-2] != length or key.shape[-2] != length:
        return None
    whole = torch.full((length, length), 1 / length, device=query.device)
    if saved_by(node, "is_causal"):
        return whole.tril()
    mask = next((each for each in (saved_by(node, name) for name in _MASKS) if isinstance(each, Tensor)), None)
    if mask is None:
        return whole
    allowed = mask if mask.dtype == torch.bool else mask > _FORBIDDEN
    return whole * allowed if allowed.shape[-2:] == (length, length) else None
