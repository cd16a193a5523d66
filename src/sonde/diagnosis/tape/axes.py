"""Which axis of the data each dimension of a taped value runs over.

Every dimension of every value gets a label: the axes that it is made of, from slow to fast. Parameters and constants
start with axes of their own, data with one for each of its dimensions. Operations carry labels on; where two
dimensions are matched, as by an addition, their axes become one. The axis of samples is known for certain, because a
loader puts it first or labels have no other. So one can tell what a dimension is that a softmax runs over, which axes a
view cuts, and whether the rows of an output and those of its target are the same samples.

An axis about which nothing is known matches every other: what is unknown leads to no statement.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from math import prod
from typing import Final

from sonde.core.tape import Op, Tape, Value, references

Dim = tuple[int, ...]
"""The axes of a dimension, from slow to fast; empty for one of size 1."""
Label = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two dimensions that were matched though one runs over samples and the other over something else."""

    op: int
    size: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A view that breaks up an axis although one of its results has the very size of that axis."""

    op: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    axes: frozenset[int]
    """The axes that were broken up."""


@dataclass(slots=True)
class Axes:
    """Axes as sets that grow together (union-find), with the pieces that views cut them into."""

    parents: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    known: list[bool] = field(default_factory=list)
    """Whether the axis is known to be another than that of samples."""
    data: list[bool] = field(default_factory=list)
    """Whether the axis is one of data, not of weights."""
    features: list[bool] = field(default_factory=list)
    """Whether the axis is that of the units of a layer."""
    samples: set[int] = field(default_factory=set)
    pieces: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    whole: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """Of a piece: the axis it was cut from, and whether it is the slow one."""

    def new(self, size: int, *, known: bool = False, data: bool = False) -> int:
        """Return a fresh axis."""
        self.data.append(data)
        self.features.append(False)
        self.parents.append(len(self.parents))
        self.sizes.append(size)
        self.known.append(known)
        return len(self.parents) - 1

    def find(self, axis: int) -> int:
        """Return the representative of all axes that are the same."""
        while self.parents[axis] != axis:
            self.parents[axis] = self.parents[self.parents[axis]]
            axis = self.parents[axis]
        return axis

    def dim(self, size: int, *, known: bool = False, data: bool = False) -> Dim:
        """Return a fresh dimension."""
        return () if size == 1 else (self.new(size, known=known, data=data),)

    def origin(self, axis: int) -> int:
        """Return the axis that a piece was cut from, or the axis itself."""
        axis = self.find(axis)
        while axis in self.whole:
            axis = self.find(self.whole[axis][0])
        return axis

    def is_sample(self, axis: int) -> bool:
        """Return whether an axis, or the one it was cut from, is that of samples."""
        return self.origin(axis) in {self.find(each) for each in self.samples}

    def has_samples(self, dim: Dim) -> bool:
        """Return whether a dimension runs over samples."""
        return any(self.is_sample(axis) for axis in dim)

    def is_known(self, axis: int) -> bool:
        """Return whether an axis is known to be one of data."""
        return self.is_sample(axis) or self.known[self.origin(axis)]

    def split(self, axis: int, slow: int) -> tuple[int, int]:
        """Return the two pieces of an axis, of which the first has `slow` elements."""
        axis = self.find(axis)
        key = (axis, slow)
        if key not in self.pieces:
            pair = (self.new(slow), self.new(self.sizes[axis] // slow))
            self.pieces[key] = pair
            self.whole |= {pair[0]: (axis, True), pair[1]: (axis, False)}
        return self.pieces[key]

    def join(self, dim: Dim) -> Dim:
        """Return a dimension in which pieces that lie as they were cut are one axis again."""
        found: list[int] = []
        for axis in dim:
            found.append(self.find(axis))
            while len(found) > 1 and (one := self._joined(found[-2], found[-1])) is not None:
                found[-2:] = [one]
        return tuple(found)

    def _joined(self, slow: int, fast: int) -> int | None:
        if self.whole.get(slow, (None, False))[1] is False or fast not in self.whole:
            return None
        axis = self.whole[slow][0]
        pair = self.pieces.get((self.find(axis), self.sizes[slow])) or self.pieces.get((axis, self.sizes[slow]))
        if pair is None or (self.find(pair[0]), self.find(pair[1])) != (self.find(slow), self.find(fast)):
            return None
        return self.find(axis)

    def match(self, one: Dim, other: Dim) -> bool:
        """Make two dimensions of the same size the same; return False if they cannot be."""
        first, second = list(reversed(self.join(one))), list(reversed(self.join(other)))
        fits = True
        while first and second:
            a, b = first.pop(), second.pop()
            small, large = sorted((a, b), key=lambda axis: self.sizes[self.find(axis)])
            size, most = self.sizes[self.find(small)], self.sizes[self.find(large)]
            if size != most:
                if most % size:
                    return fits and not (self.is_sample(a) or self.is_sample(b))
                head, tail = self.split(large, size)
                (first if large == a else second).append(tail)
                fits &= self._unite(small, head)
                continue
            fits &= self._unite(a, b)
        return fits

    def _unite(self, a: int, b: int) -> bool:
        a, b = self.find(a), self.find(b)
        if a == b:
            return True
        if self.is_sample(a) or self.is_sample(b):
            known = self.is_known(a) and self.is_known(b)
            if known:
                return False
        keep, drop = (a, b) if self.is_known(a) or a in self.whole else (b, a)
        if drop in self.whole and keep not in self.whole:
            self.whole[keep] = self.whole[drop]
        self.parents[drop] = keep
        self.known[keep] = self.known[keep] or self.known[drop]
        self.data[keep] = self.data[keep] or self.data[drop]
        self.features[keep] = self.features[keep] or self.features[drop]
        return True

    def mark_features(self, dim: Dim) -> Dim:
        """Note that a dimension runs over the units of a layer, and return it."""
        if len(dim) == 1:
            self.features[self.find(dim[0])] = True
        return dim

    def is_of_data(self, dim: Dim) -> bool:
        """Return whether a dimension runs over one axis of data, which is not matched with the units of a layer."""
        axis = self.find(dim[0]) if len(dim) == 1 else None
        return axis is not None and self.data[axis] and not self.features[axis]

    def is_of_units(self, dim: Dim) -> bool:
        """Return whether a dimension runs over the units of a layer, which are not matched with an axis of data."""
        axis = self.find(dim[0]) if len(dim) == 1 else None
        return axis is not None and self.features[axis] and not self.data[axis]


_SAME: Final = frozenset(
    {"clone", "detach", "_to_copy", "contiguous", "alias", "lift_fresh", "native_dropout", "dropout", "_softmax"}
    | {"_log_softmax", "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit"}
    | {"_native_batch_norm_legit_functional", "cudnn_batch_norm", "cumsum", "cumprod", "logcumsumexp", "flip", "roll"}
    | {"sort", "argsort", "bernoulli", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"}
    | {"tril", "triu", "_batch_norm_with_update", "nan_to_num"}
)
_VIEWS: Final = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "flatten"})
_REDUCTIONS: Final = frozenset(
    {"sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "var_mean", "prod", "logsumexp"}
    | {"linalg_vector_norm", "norm", "any", "all", "nansum", "median", "mode"}
)
_RESIZING: Final = frozenset(
    {"slice", "narrow", "split", "split_with_sizes", "chunk", "constant_pad_nd", "index_select", "topk", "repeat"}
    | {"unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"}
    | {"max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d", "avg_pool1d", "avg_pool2d", "avg_pool3d"}
    | {"_adaptive_avg_pool2d", "adaptive_avg_pool1d", "adaptive_max_pool2d", "reflection_pad1d", "reflection_pad2d"}
    | {"upsample_nearest1d", "upsample_nearest2d", "upsample_linear1d", "upsample_bilinear2d"}
)
_ATTENTIONS: Final = frozenset(
    {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"}
    | {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_fused_attention_overrideable"}
)
_KEEPING_ROWS: Final = frozenset(
    {"index", "slice", "select", "index_select", "_to_copy", "clone", "detach", "argmax", "squeeze", "contiguous", "eq"}
    | {"gt", "lt", "ge", "le", "ne", "sum", "mean", "remainder", "alias", "add", "mul", "sub", "div", "sin", "cos"}
)
"""Operations after which a tensor with one dimension still has a number for each row of the data."""
_DROPPING: Final = frozenset({"squeeze", "argmax", "sum", "mean"})
"""Those of them that take a dimension away, which may be that of the rows."""
_WITH_TARGET: Final = frozenset(
    {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"}
    | {"kl_div", "soft_margin_loss"}
)


def label(tape: Tape) -> Labels:
    """Return the labels of all values that a tape's forward operations made."""
    labels = Labels(tape)
    labels.run()
    return labels


class Labels:
    """The labels of a tape's values, and what was noticed while they were found."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.axes = Axes()
        self.of: dict[int, Label] = {}
        self.conflicts: list[Conflict] = []
        self.cuts: list[Cut] = []
        self.positions: dict[int, set[int]] = {}
        """By loss: the tokens that its input has a row for each of, in the same order."""
        self._tokens: list[int] = []
        self.indexed: list[tuple[int, int]] = []
        """Operations that match samples with rows of a longer table of the model: the operation, and the table."""
        self.are_pieces = False
        """Whether samples are only known to be rows next to each other, which may be a piece of a signal as well."""
        self.crossed: list[tuple[int, int]] = []
        """Losses whose classes are positions of the data, and the dimension in which they have units of a layer."""
        self._start()

    # ------------------------------------------------------------------ data

    def _start(self) -> None:
        count = count_samples(self.tape)
        if count is not None:
            self.axes.samples.add(self.axes.new(count, data=True))
        self._entries = entries_of(self.tape) if count is not None else frozenset()
        self._loaded = frozenset(loaded_by(self.tape))
        given = {value.id for value in data_of(self.tape)}
        self._counted, self._data = count is not None, given
        self._slices: dict[tuple[object, ...], Dim] = {}
        for value in self.tape.values:
            if value.is_given and value.same_as < 0:
                plain = tuple(self.axes.dim(size, data=value.id in given) for size in value.shape)
                self.of[value.id] = self._with_samples(value, plain) if value.id in given else plain

    def _with_samples(self, value: Value, label: Label) -> Label:
        """Return the label of data with the axis of samples in its place, where there is only one for it."""
        sample = next(iter(self.axes.samples), None)
        loaded = value.id in self._loaded and value.shape[:1] == (self.axes.sizes[sample or 0],)
        at = None if sample is None else 0 if loaded else sample_dim(value, self.axes.sizes[sample])
        if at is None or sample is None:
            return label
        for dim in label:
            for axis in dim:
                self.axes.known[self.axes.find(axis)] = True
        return tuple((sample,) if place == at else dim for place, dim in enumerate(label))

    def get(self, value: int) -> Label:
        """Return the label of a value; fresh axes where nothing is known of it."""
        found = self.of.get(value)
        if found is None or len(found) != len(self.tape.values[value].shape):
            found = self.of[value] = self._fresh(value)
        return found

    def _fresh(self, value: int) -> Label:
        return tuple(self.axes.dim(size) for size in self.tape.values[value].shape)

    # ------------------------------------------------------------------ operations

    def run(self) -> None:
        """Follow all operations of the forward pass."""
        for op in self.tape.ops:
            if op.phase in ("forward", "between") and (op.outs or op.writes):
                self._follow(op)

    def _follow(self, op: Op) -> None:
        kind = op.kind.removesuffix("_") if not op.kind.startswith("_") else op.kind
        handler = _HANDLERS.get(kind)
        try:
            made = handler(self, op) if handler is not None else self._elementwise(op)
        except (IndexError, KeyError, TypeError, ValueError):
            made = None  # arguments of a form that is not known: nothing is known of the result
        for out in dict.fromkeys((*op.outs, *op.writes)):
            if out in self.of and out not in op.outs[:1]:
                continue
            fits = made is not None and self._fits(made, self.tape.values[out].shape)
            self.of[out] = made if made is not None and fits else self._fresh(out)
            if out in self._entries:
                self.of[out] = self._with_samples(self.tape.values[out], self._fresh(out))

    def _fits(self, label: Label, shape: tuple[int, ...]) -> bool:
        return len(label) == len(shape) and all(
            prod(self.axes.sizes[self.axes.find(axis)] for axis in dim) == size
            for dim, size in zip(label, shape, strict=True)
        )

    def _given(self, op: Op, name: str = "self") -> tuple[Label, Value]:
        value = op.input(name)
        if value is None:
            raise KeyError(name)
        return self.get(value), self.tape.values[value]

    def _same(self, op: Op) -> Label:
        return self._given(op, "self" if "self" in op.args else next(iter(op.args)))[0]

    def match(self, op: Op, one: Dim, other: Dim, size: int) -> None:
        """Make two dimensions the same, and note it where one runs over samples and the other does not."""
        if one and other and not self.axes.match(one, other):
            self.conflicts.append(Conflict(op.index, size))

    def _elementwise(self, op: Op) -> Label | None:
        """Match the dimensions of all operands from the last on, as broadcasting does."""
        out = op.outs[0] if op.outs else op.writes[0]
        shape = self.tape.values[out].shape
        result: list[Dim] = [()] * len(shape)
        for _, value in op.inputs():
            operand, sizes = self.get(value), self.tape.values[value].shape
            if len(sizes) > len(shape):
                return None
            for back in range(1, len(sizes) + 1):
                size, dim = sizes[-back], operand[-back]
                if size == 1:
                    continue
                if size != shape[-back]:
                    return None
                if result[-back]:
                    self._note_table(op, (result[-back], dim), size)
                    self.match(op, result[-back], dim, size)
                    better = self.axes.has_samples(dim) and not self.axes.has_samples(result[-back])
                    result[-back] = dim if better else result[-back]
                else:
                    result[-back] = dim
        return tuple(dim or self.axes.dim(size) if size > 1 else () for dim, size in zip(result, shape, strict=True))

    def _note_table(self, op: Op, dims: tuple[Dim, Dim], size: int) -> None:
        """Note where the first rows of a table of the model, as many as there are samples, are matched with samples."""
        if not any(map(self.axes.has_samples, dims)):
            return
        for _, value in op.inputs():
            found = self._rows_of_table(value)
            if found is None:
                continue
            source, at, placed = found
            table = self.tape.values[source]
            is_longer = table.shape[at] > size == self.tape.values[value].shape[placed]
            if is_longer and table.role in ("parameter", "buffer") and self.get(value)[placed] in dims:
                self.indexed.append((op.index, source))

    def _rows_of_table(self, value: int) -> tuple[int, int, int] | None:
        """Return the table that a value is the first rows of, the dimension of its rows, and where that is now."""
        maker, added = self.tape.producer(value), -1
        if maker is not None and maker.kind == "unsqueeze" and (before := maker.input("self")) is not None:
            added = int(maker.args["dim"]) % len(self.tape.values[value].shape)
            maker = self.tape.producer(before)
        source = maker.input("self") if maker is not None and maker.kind in ("slice", "narrow") else None
        if source is None or maker is None:
            return None
        at = int(maker.args.get("dim", 0))
        return source, at, at + (0 <= added <= at)

    # ------------------------------------------------------------------ shapes

    def _view(self, op: Op) -> Label:
        before, value = self._given(op)
        out = self.tape.values[op.outs[0]]
        factors = [self.axes.find(axis) for dim in before for axis in self.axes.join(dim)]
        return self._regroup(op, factors, value.shape, out.shape)

    def _regroup(self, op: Op, factors: list[int], before: tuple[int, ...], after: tuple[int, ...]) -> Label:
        """Deal axes out to new sizes, cutting those that do not fit as a whole."""
        waiting = list(reversed(factors))
        label: list[Dim] = []
        for size in after:
            dim = self._take(waiting, size)
            if dim is None:  # a row ends in the middle of another
                label += [self.axes.dim(each) for each in after[len(label) :]]
                break
            label.append(dim)
        whole = {axis for dim in label for axis in dim}
        cut = {axis for axis in factors if axis not in whole}
        wanted = {size for size, dim in zip(after, label, strict=True) if len(dim) != 1 or dim[0] not in factors}
        displaced = frozenset(axis for axis in self._broken(label, cut) if self.axes.sizes[axis] in wanted)
        if displaced:
            self.cuts.append(Cut(op.index, before, after, displaced))
        return tuple(label)

    def _take(self, waiting: list[int], size: int) -> Dim | None:
        """Take axes of a total size from the end of a list, cutting the last; None if none of its pieces fits."""
        dim: list[int] = []
        while size > 1:
            axis = waiting.pop()
            have = self.axes.sizes[axis]
            if have > size and have % size == 0:
                axis, rest = self.axes.split(axis, size)
                waiting.append(rest)
                have = size
            if size % have:
                return None
            dim.append(axis)
            size //= have
        return self.axes.join(tuple(dim))

    def _broken(self, label: list[Dim], cut: set[int]) -> set[int]:
        """Return the axes whose fast piece shares a dimension with another axis, or whose pieces are unknown.

        A slow piece that joins a slower axis is usual for features, as where heads are treated like samples, but not
        for data.
        """
        if any(len(dim) == 1 and dim[0] not in cut and self.axes.origin(dim[0]) == dim[0] for dim in label):
            known = {self.axes.origin(axis) for dim in label for axis in dim}
            torn = {axis for axis in cut if self.axes.origin(axis) not in known}
        else:
            torn = set()
        shared = {
            self.axes.find(self.axes.whole[axis][0])
            for dim in label
            if len({self.axes.origin(axis) for axis in dim}) > 1
            for axis in dim
            if axis in self.axes.whole and (not self.axes.whole[axis][1] or self.axes.data[self.axes.origin(axis)])
        }
        return torn | (shared & cut)

    def _permute(self, op: Op) -> Label:
        label, _ = self._given(op)
        return tuple(label[dim] for dim in op.args["dims"])

    def _transpose(self, op: Op) -> Label:
        label = list(self._given(op)[0])
        if op.kind == "t":
            return tuple(reversed(label))
        one, other = op.args["dim0"], op.args["dim1"]
        label[one], label[other] = label[other], label[one]
        return tuple(label)

    def _squeeze(self, op: Op) -> Label:
        label, value = self._given(op)
        chosen = op.args.get("dim")
        dims = range(len(label)) if chosen is None else [chosen] if isinstance(chosen, int) else chosen
        gone = {dim % len(label) for dim in dims if value.shape[dim] == 1}
        return tuple(dim for place, dim in enumerate(label) if place not in gone)

    def _unsqueeze(self, op: Op) -> Label:
        label = list(self._given(op)[0])
        label.insert(op.args["dim"] % (len(label) + 1), ())
        return tuple(label)

    def _expand(self, op: Op) -> Label:
        label, value = self._given(op)
        shape = self.tape.values[op.outs[0]].shape
        new = len(shape) - len(label)
        kept = [
            dim if value.shape[place] == shape[place + new] else self.axes.dim(shape[place + new])
            for place, dim in enumerate(label)
        ]
        return (*(self.axes.dim(size) for size in shape[:new]), *kept)

    def _resized(self, op: Op) -> Label:
        """Keep dimensions whose size stays; others are new, as after a slice, a pooling or a padding."""
        label, value = self._given(op)
        shape = self.tape.values[op.outs[0]].shape
        found = [
            dim if size == now else self.axes.dim(now) for dim, size, now in zip(label, value.shape, shape, strict=True)
        ]
        if (
            op.kind == "slice"
            and op.args.get("dim", 0) == 0
            and value.shape[0] != shape[0] > 1
            and value.id in self._data
        ):
            # The same rows of inputs and targets are the same samples.
            key = (value.shape[0], op.args.get("start"), op.args.get("end"), op.args.get("step"))
            found[0] = self._slices.setdefault(key, found[0])
            if len(value.shape) > 1:
                self._note_rows(op, found[0])
        return tuple(found)

    def _select(self, op: Op) -> Label:
        label = list(self._given(op)[0])
        del label[op.args.get("dim", 0)]
        return tuple(label)

    def _reduce(self, op: Op) -> Label:
        label, _ = self._given(op)
        gone = reduced(op, len(label))
        if op.args.get("keepdim"):
            return tuple(() if place in gone else dim for place, dim in enumerate(label))
        return tuple(dim for place, dim in enumerate(label) if place not in gone)

    def _concatenate(self, op: Op) -> Label | None:
        values = [value for _, value in op.inputs()]
        at = op.args.get("dim", 0)
        first = self.get(values[0])
        for value in values[1:]:
            other = self.get(value)
            if len(other) != len(first):
                return None
            for place, (one, two) in enumerate(zip(first, other, strict=True)):
                if op.kind == "stack" or place != at % len(first):
                    self.match(op, one, two, self.tape.values[value].shape[place])
        label = list(first)
        size = self.tape.values[op.outs[0]].shape
        if op.kind == "stack":
            label.insert(at % len(size), self.axes.dim(len(values)))
        elif len(values) > 1:
            label[at] = self.axes.dim(size[at])
        return tuple(label)

    # ------------------------------------------------------------------ products

    def _product(self, op: Op) -> Label:
        left, right = ("mat1", "mat2") if op.kind == "addmm" else ("batch1", "batch2")
        if op.kind in ("mm", "bmm"):
            left, right = "self", "mat2"
        one, a = self._given(op, left)
        two, _ = self._given(op, right)
        self.match(op, one[-1], two[-2], a.shape[-1])
        if len(one) == 3:
            self.match(op, one[0], two[0], a.shape[0])
            return (one[0] or two[0], one[1], two[2])
        return (one[0], self.axes.mark_features(two[1]) if self._is_weight(op, right) else two[1])

    def _is_weight(self, op: Op, name: str) -> bool:
        """Return whether an operand is a parameter, or a transposed one."""
        value = op.input(name)
        maker = None if value is None else self.tape.producer(value)
        source = maker.input("self") if maker is not None and maker.kind in ("t", "transpose") else value
        return source is not None and self.tape.values[source].role == "parameter"

    def _vector_product(self, op: Op) -> Label:
        if op.kind == "dot":
            return ()
        one, a = self._given(op, "self" if op.kind == "mv" else "mat")
        two, _ = self._given(op, "vec")
        self.match(op, one[1], two[0], a.shape[1])
        return (one[0],)

    def _linear(self, op: Op) -> Label:
        one, _ = self._given(op, "input")
        two, _ = self._given(op, "weight")
        return (*one[:-1], self.axes.mark_features(two[0]) if self._is_weight(op, "weight") else two[0])

    def _convolution(self, op: Op) -> Label:
        one, value = self._given(op, "input")
        shape = self.tape.values[op.outs[0]].shape
        spatial = (
            dim if size == now else self.axes.dim(now)
            for dim, size, now in zip(one[2:], value.shape[2:], shape[2:], strict=True)
        )
        return (one[0], self.axes.mark_features(self.axes.dim(shape[1])), *spatial)

    def _recurrent(self, op: Op) -> Label:
        """Carry samples through a fused recurrent layer; features and states are new."""
        label, value = self._given(op, "input")
        count = value.shape[1]
        for out in op.outs[1:]:
            shape = self.tape.values[out].shape
            at = [place for place, size in enumerate(shape) if size == count]
            if len(at) == 1:
                self.of[out] = tuple(
                    label[1] if place == at[0] else self.axes.dim(size) for place, size in enumerate(shape)
                )
        return (label[0], label[1], self.axes.dim(self.tape.values[op.outs[0]].shape[2]))

    def _attention(self, op: Op) -> Label:
        query, _ = self._given(op, "query")
        values, _ = self._given(op, "value")
        return (*query[:-1], values[-1])

    # ------------------------------------------------------------------ indices and losses

    def _flat(self, label: Label) -> list[int]:
        return [axis for dim in label for axis in self.axes.join(dim)]

    def _embedding(self, op: Op) -> Label:
        indices, about = self._given(op, "indices")
        self._tokens.append(about.id)
        weight, _ = self._given(op, "weight")
        return (*indices, weight[1])

    def _gather(self, op: Op) -> Label:
        label, value = self._given(op)
        index, about = self._given(op, "index")
        at = op.args["dim"] % len(label)
        return tuple(
            index[place] if place == at or about.shape[place] != value.shape[place] else label[place]
            for place in range(len(label))
        )

    def _note_rows(self, op: Op, axis: Dim) -> None:
        """Take rows that are chosen of data outside all models for samples, where nothing else shows which they are."""
        source = op.input("self")
        about = None if source is None else self.tape.values[source]
        if about is None or op.module or not about.is_given or about.id not in self._data or len(axis) != 1:
            return
        size, known = self.axes.sizes[self.axes.find(axis[0])], next(iter(self.axes.samples), None)
        if self._counted or size >= about.shape[0] or self._joins_features(op):
            return
        if known is None:
            self.axes.samples.add(axis[0])
            self.are_pieces = op.kind == "slice"
        elif self.axes.sizes[known] == size:  # as many others, such as the second pictures of pairs
            self.axes.parents[self.axes.find(axis[0])] = self.axes.find(known)

    def _joins_features(self, op: Op) -> bool:
        """Return whether rows are added to what was computed of weights, or multiplied by it, as those of positions."""
        uses = [use for use in self.tape.consumers(op.outs[0]) if use.kind.removesuffix("_") in ("add", "mul")]
        return any(value in self._learned for use in uses for _, value in use.inputs())

    @functools.cached_property
    def _learned(self) -> set[int]:
        return self.tape.descendants([value.id for value in self.tape.given("parameter")])

    def _index(self, op: Op) -> Label | None:
        label, _ = self._given(op)
        indices = op.args["indices"]
        given = [place for place, index in enumerate(indices) if index is not None]
        # Rows that are chosen by one list of numbers, or by several that go together, are new; the rest stays.
        if not given or given != list(range(given[0], given[0] + len(given))):
            return None
        shape = self.tape.values[op.outs[0]].shape
        new = len(shape) - (len(label) - len(given))
        if new < 0:
            return None
        middle = tuple(self.axes.dim(size) for size in shape[given[0] : given[0] + new])
        chosen = references(indices[given[0]])
        if len(given) == 1 and chosen and self.tape.values[chosen[0]].dtype != "bool":
            middle = self.get(chosen[0])
            if given == [0] and len(middle) == 1:
                self._note_rows(op, middle[0])
        return (*label[: given[0]], *middle, *label[given[-1] + 1 :])

    def _likelihood(self, op: Op) -> Label:
        label, value = self._given(op)
        target, _ = self._given(op, "target")
        rows = label[:1] + label[2:] if len(label) > 1 else ()
        sizes = value.shape[:1] + value.shape[2:]
        if len(label) > 2 and self.axes.is_of_data(label[1]) and not self.axes.has_samples(label[1]):
            self.crossed += [(op.index, at) for at in range(2, len(label)) if self.axes.is_of_units(label[at])]
        self.positions[op.index] = {each for each in self._tokens if self._flat(self.get(each)) == self._flat(rows)}
        for one, two, size in zip(rows, target, sizes, strict=False):
            self.match(op, one, two, size)
        return rows if op.args.get("reduction") == 0 else ()

    def _loss(self, op: Op) -> Label:
        elementwise = self._elementwise_of(op)
        return elementwise if op.args.get("reduction") == 0 else ()

    def _elementwise_of(self, op: Op) -> Label:
        label, value = self._given(op)
        target, about = self._given(op, "target")
        if value.shape == about.shape:
            for one, two, size in zip(label, target, value.shape, strict=True):
                self.match(op, one, two, size)
        return label


def reduced(op: Op, rank: int) -> set[int]:
    """Return the dimensions that a reduction removes."""
    chosen = op.args.get("dim")
    if chosen is None or chosen == []:
        return set(range(rank))
    dims = [chosen] if isinstance(chosen, int) else chosen
    return {dim % rank for dim in dims} if rank else set()


def data_of(tape: Tape) -> list[Value]:
    """Return the data of a step: what models were called with and losses compare with, as it came."""
    found = tape.given("input", "target", "batch")
    loaded = set(loaded_by(tape))
    return [value for value in found if value.shape] + [
        tape.values[each] for each in sorted(loaded - {value.id for value in found}) if tape.values[each].shape
    ]


def loaded_by(tape: Tape) -> list[int]:
    """Return the values that a loader yielded."""
    return [value for mark in tape.marks if mark.kind == "loader_next" for value in _ids(mark.data.get("values"))]


def _ids(values: object) -> list[int]:
    return [found for each in values.values() for found in references(each)] if isinstance(values, dict) else []


def count_samples(tape: Tape) -> int | None:
    """Return how many samples a step has, if that is certain.

    A loader puts samples first, unless the program collates them itself: then it is the dimension of the batch size.
    Without a loader, labels with one dimension tell it.
    """
    loaded = [tape.values[value].shape for value in loaded_by(tape)]
    firsts = {shape[0] for shape in loaded if shape}
    sizes = {mark.data["batch_size"] for mark in tape.marks if mark.kind == "loader_next" and "batch_size" in mark.data}
    if any(len(shape) > 1 for shape in loaded) and len(firsts) == 1:
        if not sizes or firsts == sizes:
            return _several(firsts.pop())
        if len(sizes) == 1 and all(sizes <= set(shape) for shape in loaded if len(shape) > 1):
            return _several(int(sizes.pop()))
    flat = {tape.values[value].shape[0] for value in _flat_targets(tape)}
    if len(flat) != 1 or _is_of_one_sample(tape, count := flat.pop()):
        return None
    return _several(count)


def _is_of_one_sample(tape: Tape, count: int) -> bool:
    """Return whether a model reads a batch of one, which has as many steps as there are labels."""
    shapes = [tape.values[value].shape for value in tape.inputs_of_root()]
    return any(shape[:1] == (1,) and count in shape[1:] for shape in shapes)


def _flat_targets(tape: Tape) -> list[int]:
    """Return targets with one number for each sample: they have one dimension, and no view has given it to them."""
    found = [value for op in tape.ops if op.phase == "forward" and (value := op.input("target")) is not None]
    return [value for value in dict.fromkeys(found) if len(tape.values[value].shape) == 1 and _is_flat(tape, value)]


def _is_flat(tape: Tape, value: int) -> bool:
    op = tape.producer(value)
    while op is not None and op.kind in _KEEPING_ROWS:
        source = op.input("self")
        if source is None:
            return False
        if op.kind in _DROPPING and tape.values[source].shape[:1] != tape.values[value].shape[:1]:
            return False  # the first dimension went: these are the labels of one sample's steps
        value, op = source, tape.producer(source)
    return op is None or (op.is_random and not op.inputs())


def entries_of(tape: Tape) -> frozenset[int]:
    """Return data that was computed before it was used: what models are called with and flat targets."""
    learned = tape.descendants([value.id for value in tape.given("parameter")])
    used = {*tape.inputs_of_root(), *_flat_targets(tape)}
    return frozenset(value for value in used if value not in learned and not tape.values[value].is_given)


def _several(count: int) -> int | None:
    return count if count > 1 else None


def sample_dim(value: Value, count: int) -> int | None:
    """Return the dimension of some data that runs over samples; None if there is none, or more than one may do."""
    places = [place for place, size in enumerate(value.shape) if size == count]
    return places[0] if len(places) == 1 or (places and places[0] == 0 and len(value.shape) == 1) else None


_HANDLERS: Final = {
    **dict.fromkeys(_SAME, Labels._same),
    **dict.fromkeys(_VIEWS, Labels._view),
    **dict.fromkeys(_REDUCTIONS, Labels._reduce),
    **dict.fromkeys(_WITH_TARGET, Labels._loss),
    "permute": Labels._permute,
    "transpose": Labels._transpose,
    "t": Labels._transpose,
    "squeeze": Labels._squeeze,
    "unsqueeze": Labels._unsqueeze,
    "expand": Labels._expand,
    **dict.fromkeys(_RESIZING, Labels._resized),
    "select": Labels._select,
    "unbind": Labels._select,
    "cat": Labels._concatenate,
    "stack": Labels._concatenate,
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), Labels._product),
    **dict.fromkeys(("mv", "addmv", "dot"), Labels._vector_product),
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "lstm", "gru"), Labels._recurrent),
    "linear": Labels._linear,
    "mkldnn_linear": Labels._linear,
    "convolution": Labels._convolution,
    "mkldnn_convolution": Labels._convolution,
    "cudnn_convolution": Labels._convolution,
    **dict.fromkeys(_ATTENTIONS, Labels._attention),
    "embedding": Labels._embedding,
    "gather": Labels._gather,
    "index": Labels._index,
    "nll_loss_forward": Labels._likelihood,
    "nll_loss2d_forward": Labels._likelihood,
}
