"""Plain data that the recording and the reading side both know. No torch here.

Site     a place where something is measured: `encoder.0.weight:gradient`
Reading  what was measured at one site in one step (or in a merged window of steps)
Block    all readings of one step, as arrays: what travels from the recorder to the sinks
Numbers  many steps of which only single numbers are known
Event    something that happened, at a step
Finding  what is wrong, where, since when, why, and what to do about it
RunHeader  the description of a run
Sink     whatever takes sites, blocks and events: the store, a live monitor, a test
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Final, Literal, Protocol, Self, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sonde.core import files, schema, statistics
from sonde.core.files import Finite
from sonde.core.schema import Bins, Rows

Quantity = Literal[
    "parameter",
    "gradient",
    "update",
    "output",
    "output_gradient",
    "input",  # what the model was called with
    "state",  # optimizer state, such as Adam's moments
    "scalar",  # what `session.log` was given, learning rates, and the like
    "value",  # what `session.record` was given
    "vital",  # a relation of the training loop that a diagnosis needs; see `sonde.core.signals`
]
QUANTITIES: Final[tuple[Quantity, ...]] = get_args(Quantity)
HELD: Final[tuple[Quantity, ...]] = ("parameter", "gradient", "update", "state")
"""Quantities of parameters, which ranks hold copies or pieces of; all others are each rank's own data."""
Phase = Literal["train", "eval"]
Severity = Literal["info", "warning", "critical"]
SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)
Basis = Literal["exact", "experiment", "statistics"]
BASES: Final[tuple[Basis, ...]] = get_args(Basis)
"""Kinds of evidence, the strongest first."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Site:
    """A place where something is measured, and what is measured there.

    `id` counts from 0 within one rank's folder of a run. Sites are named, shown and selected by their `key`.
    """

    id: int
    name: str
    quantity: Quantity
    phase: Phase = "train"
    call: int = 0
    """Which call of a module that runs several times in a step."""
    part: str = ""
    """Where in a nested output: `[0]`, `.logits`, `['loss']`; empty for a plain tensor."""
    kind: str = ""
    """Class of the module, or of the parameter's owner."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor (tied weights, shared modules)."""
    same_as: int | None = None
    """The site whose tensor this one passes on unchanged; its readings are recorded there only."""
    placement: str = ""
    """What its rank holds of the tensor: `shard 1/4`, `partial 0/2`, `stage 1`, `own 3`, `replica`. Ranks with the same
    text hold copies. Empty for a parameter, gradient, update or state that is whole, and for data of the rank's own."""

    @property
    def key(self) -> str:
        """The readable identity: `name:quantity`, then part, call and phase where they are not the usual ones."""
        call = f"#{self.call}" if self.call else ""
        phase = "@eval" if self.phase == "eval" else ""
        return f"{self.name}:{self.quantity}{self.part}{call}{phase}"

    def __repr__(self) -> str:
        shape = f" {tuple(self.shape)}" if self.shape else ""
        return f"<Site {self.key}{shape}>"

    def to_json(self) -> dict[str, Any]:
        """Return the site as JSON-ready values, leaving out what has its default."""
        plain: dict[str, Any] = {"id": self.id, "name": self.name, "quantity": self.quantity}
        for name, usual in _USUAL_SITE:
            value = getattr(self, name)
            if value != usual:
                plain[name] = list(value) if type(value) is tuple else value
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Self:
        """Return the site that `to_json` described, ignoring fields of later versions."""
        known = {name: value for name, value in plain.items() if name in cls.__slots__}
        for name in ("shape", "aliases"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)


_USUAL_SITE: Final = tuple((each.name, each.default) for each in fields(Site) if each.default is not MISSING)
"""The fields of a site that are stored only where they have another value."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Reading:
    """The summary of one site in one step, or in `span` steps that were merged.

    Readings of parts merge exactly into the reading of the whole:

    >>> one, two = (Reading.of([1.0, 2.0]), Reading.of([3.0]))
    >>> one.merge(two).mean, one.merge(two).count
    (2.0, 3)
    """

    row: Rows
    bins: Bins | None = None
    step: int = 0
    span: int = 1

    @classmethod
    def of(cls, values: Any, *, step: int = 0) -> Self:
        """Summarise plain numbers (a list or numpy array) with numpy, in float64."""
        row, bins = summarise(np.asarray(values, dtype=np.float64))
        return cls(row, bins, step)

    def __repr__(self) -> str:
        at = f"step {self.step}" if self.span == 1 else f"steps {self.step} to {self.step + self.span - 1}"
        known = {name: self.get(name) for name in ("mean", "std", "min", "max")}
        words = "".join(f", {name} {value:.4g}" for name, value in known.items() if value is not None)
        bad = f", {self.nonfinite} not finite" if self.nonfinite else ""
        return f"<Reading at {at}: {self.count} elements{words}{bad}>"

    def merge(self, other: Reading) -> Self:
        """Return the reading of both sets of elements together."""
        bins = None if self.bins is None or other.bins is None else self.bins + other.bins
        first, last = min(self.step, other.step), max(self.step + self.span, other.step + other.span)
        return replace(self, row=schema.merge_rows(self.row, other.row), bins=bins, step=first, span=last - first)

    def get(self, name: str) -> float | None:
        """Return a statistic by name (see `sonde.core.statistics`), or None where it is not known."""
        value = float(statistics.compute(name, self.row, self.bins))
        return None if np.isnan(value) else value

    def abs_quantile(self, q: float) -> tuple[float, float, float] | None:
        """Return an estimate of the q-quantile of |x| with its lower and upper bound, or None without a histogram."""
        if self.bins is None:
            return None
        estimate, low, high = (float(part) for part in statistics.abs_quantile(self.row, self.bins, q))
        return None if np.isnan(estimate) else (estimate, low, high)

    @property
    def count(self) -> int:
        """Number of elements, finite or not."""
        return int(self.row[schema.COUNT])

    @property
    def finite(self) -> int:
        """Number of finite elements."""
        return int(schema.finite(self.row))

    @property
    def nonfinite(self) -> int:
        """Number of NaN and infinite elements."""
        return int(statistics.nonfinite(self.row))

    @property
    def mean(self) -> float | None:
        """Mean of the finite elements."""
        return self.get("mean")

    @property
    def std(self) -> float | None:
        """Sample standard deviation of the finite elements."""
        return self.get("std")

    @property
    def norm(self) -> float | None:
        """Euclidean norm of the finite elements."""
        return self.get("norm")

    @property
    def min(self) -> float | None:
        """Smallest finite element."""
        return self.get("min")

    @property
    def max(self) -> float | None:
        """Largest finite element."""
        return self.get("max")


def summarise(values: NDArray[np.float64]) -> tuple[Rows, Bins]:
    """Summarise an array with plain numpy: the slow, obvious way, for values that are passed in."""
    flat = values.reshape(-1)
    good = flat[np.isfinite(flat)]
    row = np.zeros(schema.NUM_COLUMNS)
    row[schema.SEEN], row[schema.COUNT] = 1, flat.size
    row[schema.NAN] = np.isnan(flat).sum()
    row[schema.POS_INF], row[schema.NEG_INF] = np.isposinf(flat).sum(), np.isneginf(flat).sum()
    row[schema.ZERO], row[schema.GE_ONE] = (good == 0).sum(), (np.abs(good) >= 1).sum()
    if good.size:
        row[schema.MIN], row[schema.MAX] = good.min(), good.max()
        row[schema.MEAN] = good.mean()
        row[schema.M2] = np.square(good - row[schema.MEAN]).sum()
        row[schema.ABS_SUM] = np.abs(good).sum()
    exponents = np.frexp(good[good != 0])[1] - 1 - schema.FIRST_EXPONENT
    bins = np.bincount(np.clip(exponents, 0, schema.NUM_BINS - 1), minlength=schema.NUM_BINS)
    return row, bins.astype(np.uint64)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Block:
    """All readings of one step. Row i of `rows` and `bins` belongs to the site with id `sites[i]`, in rising order.

    `binned[i]` is whether row i has a histogram; where it has none, its bins are zero.
    """

    step: int
    time: float
    """Seconds since the epoch at which the step ended."""
    sites: NDArray[np.uint32]
    rows: Rows
    bins: Bins
    binned: NDArray[np.bool_]
    span: int = 1
    epoch: int | None = None
    skipped: bool = False
    """The optimizer was held back in this step (a gradient scaler found an infinity)."""

    def __len__(self) -> int:
        return len(self.sites)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return int(self.sites.nbytes + self.rows.nbytes + self.bins.nbytes + self.binned.nbytes)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Numbers:
    """Many steps of which nothing but the same single numbers is known, in the order in which they came.

    `values[i, j]` is the number of step `steps[i]` at the site with id `sites[j]`. Sites are in rising order. No two of
    the steps are the same.
    """

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    sites: NDArray[np.uint32]
    values: NDArray[np.float64]
    epoch: int | None = None

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def rows(self) -> Rows:
        """The rows that summarise the numbers, `[step, site, column]`."""
        rows = schema.rows_of_values(self.values.reshape(-1))
        return rows.reshape(*self.values.shape, schema.NUM_COLUMNS)

    def blocks(self) -> Iterator[Block]:
        """Yield the same, step by step."""
        for index, rows in enumerate(self.rows):
            yield self._block(index, rows)

    @property
    def last(self) -> Block:
        """The last step."""
        return self._block(-1, schema.rows_of_values(self.values[-1]))

    def _block(self, index: int, rows: Rows) -> Block:
        return Block(
            step=int(self.steps[index]),
            time=float(self.times[index]),
            sites=self.sites,
            rows=rows,
            bins=np.zeros((len(rows), schema.NUM_BINS), np.uint64),
            binned=np.zeros(len(rows), np.bool_),
            epoch=self.epoch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened: a warning, an epoch, an exception, a note of the user's."""

    event_type: str
    message: str
    step: int | None = None
    timestamp: float
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One number that a finding rests on, with the threshold it is held against."""

    name: str
    """What the number is, in words: `share of the gradient left over from the step before`."""
    value: float
    threshold: float | None = None
    relation: Literal["<", "<=", ">", ">=", "==", "!="] | None = None
    """How the value stands to the threshold: `value relation threshold` is true."""
    series: str = ""
    """Where to look: the key of a site and a statistic, `fc1.weight:gradient norm`; empty if there is no curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is wrong with a run: the cause, the evidence, and how to fix it."""

    kind: str
    """A stable name, such as `missing_zero_grad`."""
    severity: Severity
    step: int
    """The step at which it was first seen."""
    last_step: int
    """The step at which it was last seen."""
    confidence: float | None = None
    """How often warnings of this kind named the right cause in the benchmark of faulty programs, from 0 to 1. None for
    kinds that never came up there, and for mere information."""
    exact: bool = False
    """Whether it rests on an exact relation or on a repeated step, not on statistics."""
    experiment: str = ""
    """What was changed when a taped step was repeated, and what that did; empty where no experiment confirmed it."""
    sites: tuple[str, ...] = ()
    """The culprits: modules or parameters by name, or `loss_fn`, `loader`, `optimizer`, `scheduler`, `(loop)`."""
    evidence: tuple[Evidence, ...] = ()
    cause: str = ""
    fix: str = ""
    refute: str = ""
    """A test that would prove the finding wrong."""
    explains: tuple[str, ...] = ()
    """Kinds of the symptoms that were found too and are folded under this one."""
    data: dict[str, Any] = field(default_factory=dict)
    """Structured details that are not in the text: an operation's source line, offending indices."""
    withdrawn: bool = False
    """It was reported before and no longer holds, or is folded under a cause that was found since."""

    @property
    def basis(self) -> Basis:
        """The kind of evidence it rests on."""
        if self.exact:
            return "exact"
        return "experiment" if self.experiment else "statistics"

    def __str__(self) -> str:
        where = f" ({', '.join(self.sites[:3])})" if self.sites else ""
        fix = f" Fix: {self.fix}" if self.fix else ""
        return f"{self.severity} {self.kind}{where} since step {self.step}: {self.cause}{fix}"

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON-ready values."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        plain["evidence"] = [{name: getattr(item, name) for name in item.__slots__} for item in self.evidence]
        plain["sites"], plain["explains"] = list(self.sites), list(self.explains)
        return plain

    @classmethod
    def from_json(cls, plain: Any, where: str = "What was given") -> Self:
        """Return the finding that `to_json` described, ignoring fields of later versions.

        Raises:
            RunDamaged: It does not describe a finding; the message names `where` and the field.

        """
        if isinstance(plain, dict) and isinstance(plain.get("evidence"), list):
            plain = plain | {"evidence": [_with_numbers(item) for item in plain["evidence"]]}
        return files.convert(plain, cls, where, "a finding")


def _with_numbers(item: Any) -> Any:
    """Return a piece of evidence with its numbers as numbers, also those that strict JSON has to write as text."""
    if not isinstance(item, dict):
        return item
    return item | {name: files.number(item[name]) for name in ("value", "threshold") if name in item}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """The description of a run, written once when it starts."""

    schema_version: int
    created: Finite
    sonde_version: str
    model: dict[str, Any] = field(default_factory=dict)
    """`name`, `modules` (path, class, parameters) and `parameters` (name, shape, dtype, trainable, aliases)."""
    environment: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


class Sink(Protocol):
    """Takes what a session records. Called from the worker thread only, in order."""

    def take_sites(self, sites: list[Site]) -> None:
        """Take sites that are new; a site comes before the first block that names it."""

    def take_block(self, block: Block) -> None:
        """Take the readings of one step. A further block of the same step replaces its readings of a site."""

    def take_event(self, event: Event) -> None:
        """Take an event."""

    def take_finding(self, finding: Finding) -> None:
        """Take a finding. A later one of the same kind replaces what an earlier one said."""

    def flush(self) -> None:
        """Make everything taken so far visible to others."""

    def close(self) -> None:
        """Finish. Called once, last."""


@runtime_checkable
class NumberSink(Protocol):
    """A sink that takes numbers of many steps at once; any other one gets them as blocks, step by step."""

    def take_numbers(self, numbers: Numbers) -> None:
        """Take numbers of steps that come after all that were taken before."""


class Judge(Sink, Protocol):
    """A sink that diagnoses what it has taken so far."""

    seconds: float
    """What judging has taken so far."""

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, best first; from any thread."""

    @property
    def nbytes(self) -> int:
        """Bytes of history currently held; can be read from any thread."""

    @property
    def patience_s(self) -> float:
        """For how many seconds `close` may wait for experiments."""


_ACRONYMS: Final = {
    spelling: written
    for written in ("DDP", "EMA", "FP16", "LR", "NaN", "ReLU", "RNG", "RNN")
    for spelling in (written.lower(), written.capitalize())
}


def words_of(kind: str) -> str:
    """Return the name of a finding as words.

    >>> words_of("missing_zero_grad"), words_of("lr_too_high")
    ('Missing zero grad', 'LR too high')
    """
    words = kind.replace("_", " ")
    return " ".join(_ACRONYMS.get(word, word) for word in f"{words[:1].upper()}{words[1:]}".split(" "))
