"""Facts about the objects of a training program (model, optimizers, loss, loader), as plain data.

The recorder states them in events of type `facts`: once when it attaches, and again, whole, when something turns out
later (an optimizer that was found, the loss that was called, how modules follow each other). The last one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Self, get_type_hints

import msgspec

from sonde.core import files

EVENT_TYPE: Final = "facts"
PROGRAM_EVENT: Final = "program"
"""The type of events that state `Facts.program`. They come more often than facts, and are smaller."""
LIKELIHOOD: Final = "log_likelihood"
"""The kind of a loss that is a mean or sum of log-probabilities without a minus."""
Plain = bool | int | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFacts:
    """A parameter as it was when the session attached."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    trainable: bool = True
    kind: str = ""
    """Class of the module that owns it."""
    owners: tuple[str, ...] = ()
    """Names of the optimizers that hold it."""
    aliases: tuple[str, ...] = ()
    equal_to: tuple[str, ...] = ()
    """Parameters in other storage with bitwise the same values (none for constants such as zeros and ones)."""
    constant: bool = False
    """All elements are the same."""
    zero: bool = False
    """All elements are zero."""
    equal_rows: bool = False
    """All rows (units) are the same, with more than one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """A module: its class, its mode, and the plain settings it carries."""

    name: str
    kind: str
    training: bool = True
    settings: dict[str, Plain] = field(default_factory=dict)
    """Attributes that are plain values: `p`, `momentum`, `eps`, `dim`, `inplace`, `num_features`, `bias` (whether)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """A parameter group of an optimizer."""

    settings: dict[str, Plain] = field(default_factory=dict)
    """`lr`, `weight_decay`, `momentum`, `eps`, ..."""
    parameters: tuple[str, ...] = ()
    """Names of those that belong to the watched models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTraits:
    """What an optimizer does with a gradient, whatever its class is called."""

    adaptive: bool = False
    """The size of its step does not depend on the scale of the gradient."""
    adam: bool = False
    """It keeps Adam's two moments: it counts steps, divides by the root of the second, and adds `eps` to that."""
    even_first_step: bool = False
    """Its first step moves every element by the learning rate, since its moments are corrected for their bias."""
    decoupled_decay: bool = False
    """It shrinks the weights by `lr * weight_decay` beside the step, not by way of the gradient."""
    searches: bool = False
    """It evaluates the loss itself, several times a step, and may end where it began."""
    late_momentum: bool = False
    """A fused SGD, whose momentum is left unfilled by a first step that is skipped."""
    schedule_free: bool = False
    """It averages weights instead of following a schedule: `train()` and `eval()` exchange them."""


# By trait: parts of class names, in lower case. Checked against what torch's own optimizers do in the tests.
_ADAPTIVE: Final = ("ada", "rmsprop", "rprop", "lion", "lamb", "lars", "sophia", "muon", "prodigy", "shampoo")
_EVEN_FIRST_STEP: Final = frozenset({"Adam", "AdamW", "Adamax", "NAdam"})
_DECOUPLED: Final = ("adamw", "adafactor", "sgdw", "lion", "muon")


def optimizer_traits(classes: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> OptimizerTraits:
    """Return the traits of an optimizer by the names of its classes, its own first, and the settings of its groups.

    >>> optimizer_traits(["AdamW"], [{"lr": 1e-3}]).decoupled_decay
    True
    """
    names = [name.lower() for name in classes]

    def is_like(*words: str) -> bool:
        return any(word in name for name in names for word in words)

    return OptimizerTraits(
        adaptive=is_like(*_ADAPTIVE),
        adam=is_like("adam"),
        even_first_step=bool(classes) and classes[0] in _EVEN_FIRST_STEP,
        decoupled_decay=is_like(*_DECOUPLED) or any(each.get("decoupled_weight_decay") is True for each in groups),
        searches=is_like("lbfgs"),
        late_momentum="SGD" in classes and any(each.get("fused") and each.get("momentum") for each in groups),
        schedule_free=is_like("schedulefree") or any("train_mode" in each for each in groups),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """An optimizer and whose parameters it holds."""

    name: str
    kind: str
    groups: tuple[GroupFacts, ...] = ()
    recorded_traits: OptimizerTraits | None = None
    """Absent in runs of earlier versions: use `traits`."""
    foreign: tuple[str, ...] = ()
    """Shapes, as text, of parameters it holds that no watched model has."""
    duplicates: tuple[str, ...] = ()
    """Names of parameters it holds more than once."""

    @property
    def traits(self) -> OptimizerTraits:
        """What it does with a gradient: as recorded, else as the name of its class tells."""
        return self.recorded_traits or optimizer_traits([self.kind], [group.settings for group in self.groups])


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """The loss as it was called."""

    kind: str
    """`cross_entropy`, `nll_loss`, `binary_cross_entropy_with_logits`, `mse_loss`, ...: torch's functional name."""
    settings: dict[str, Plain] = field(default_factory=dict)
    """`reduction`, `ignore_index`, `label_smoothing`, ...; `by_hand` if it calls no function of torch. A reduction by
    hand may also be `divided`, `batchmean` (added up within samples), or `part` (of several terms)."""
    input_shape: tuple[int, ...] = ()
    target_shape: tuple[int, ...] = ()
    target_dtype: str = ""
    classes: int | None = None
    made_by: str = ""
    """The operation that returned its input: `sigmoid`, `relu`, `addmm`, ...; empty where that is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """The data loader that was passed in."""

    kind: str
    settings: dict[str, Plain] = field(default_factory=dict)
    """`batch_size`, `num_workers`, `drop_last`, `pin_memory`, `shuffle`, `iterable`, `length`, `dataset_length`,
    `dataset_kind`, `sampler`, `generator_in_dataset`, `worker_init_fn` (whether)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerFacts:
    """The learning-rate scheduler that was passed in."""

    kind: str
    settings: dict[str, Plain] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxFacts:
    """A softmax of the first training pass and the way its result is used."""

    shape: tuple[int, ...] = ()
    dim: int = 0
    """The dimension it runs over, counted from the front."""
    summed: int = 0
    """The dimension that its result is summed over, or that holds the classes, counted likewise."""
    used: str = ""
    """`weights` of a product of matrices, or `likelihood` of classes."""
    logarithm: bool = False
    module: str = ""
    """The innermost module known to hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnFacts:
    """A column (N, 1) of the loss that was broadcast with a row (N,) of data to (N, N)."""

    operation: str = ""
    """`mul`, `sub`, ...: what was done with both."""
    column: tuple[int, ...] = ()
    result: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshapeFacts:
    """A view or reshape of the first training pass that gives a tensor the same sizes in another order."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    module: str = ""
    """The innermost module known to hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenFacts:
    """A trainable parameter of a module in a plain list, tuple or dict, or a tensor: `parameters()` misses both."""

    name: str
    shape: tuple[int, ...] = ()
    reached: bool = False
    """A backward pass has given it a gradient."""
    tensor: bool = False
    """It is a plain tensor, no parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What the program did between steps to one object, from one of its lines; see `sonde.sensors.program`."""

    verb: str
    """`scheduler.step`, `load_state_dict`, `manual_seed`, ..."""
    about: str = ""
    """The name of the object: `optimizer`, `(model)`, ...; empty where it is not watched."""
    line: str = ""
    """`file:line` in the user's program; empty for what was found when the session began."""
    count: int = 0
    steps: tuple[int, ...] = ()
    """How many steps had ended at each of the calls: the first few calls and the last ones."""
    data: dict[str, Plain] = field(default_factory=dict)
    """What came of it, by verb."""

    @property
    def place(self) -> str:
        """The line in short: ` at train.py:12`, or nothing.

        >>> CallFacts(verb="torch.save", line="/home/me/train.py:12").place
        ' at train.py:12'
        """
        return f" at {self.line.replace(chr(92), '/').rpartition('/')[2]}" if self.line else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that is known about the program's objects."""

    parameters: tuple[ParameterFacts, ...] = ()
    modules: tuple[ModuleFacts, ...] = ()
    optimizers: tuple[OptimizerFacts, ...] = ()
    losses: tuple[LossFacts, ...] = ()
    loader: LoaderFacts | None = None
    scheduler: SchedulerFacts | None = None
    scaler: bool = False
    autocast: str = ""
    """The dtype of an autocast region that the first training pass ran in; empty if there was none."""
    order: tuple[str, ...] = ()
    """Leaf modules in the order of their first training pass."""
    edges: tuple[tuple[str, str], ...] = ()
    """Pairs of leaf modules where the second got the same tensor that the first returned."""
    softmaxes: tuple[SoftmaxFacts, ...] = ()
    reshapes: tuple[ReshapeFacts, ...] = ()
    columns: tuple[ColumnFacts, ...] = ()
    bootstrapped: str = ""
    """The loss whose target is data plus a multiple of what the model says, with a gradient through both."""
    input_gradient: bool = False
    """The first backward pass also reaches a tensor that is not a parameter: an input whose gradient is asked for."""
    carried: tuple[str, ...] = ()
    """Recurrent modules that were given, as their first state, what they returned in the step before."""
    hidden: tuple[HiddenFacts, ...] = ()
    """Unregistered parameters that got a gradient in the first steps and were never updated."""
    tied: tuple[tuple[str, str], ...] = ()
    """Pairs of parameters that the model's own settings say are shared (`tie_word_embeddings`) though they are not."""
    program: tuple[CallFacts, ...] = ()
    """What the program does between its steps. Stated in events of their own."""

    def calls(self, verb: str) -> list[CallFacts]:
        """Return what the program did of one kind.

        >>> Facts(program=(CallFacts(verb="torch.save"),)).calls("torch.save")[0].count
        0
        """
        return [call for call in self.program if call.verb == verb]

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON-ready values."""
        ready: dict[str, Any] = msgspec.to_builtins(self, enc_hook=files.ordinary)
        return ready

    @classmethod
    def from_json(cls, plain: Any) -> Self:
        """Return the facts that `to_json` described. A file may hold anything: a field that does not fit is left out.

        >>> Facts.from_json(Facts(scaler=True).to_json()).scaler
        True
        """
        with suppress(msgspec.ValidationError):
            return msgspec.convert(plain, cls)
        given = files.plain(plain) if isinstance(plain, dict) else {}
        known = {}
        for name, hint in _hints(cls).items():
            if name in given:
                with suppress(msgspec.ValidationError):
                    known[name] = msgspec.convert(given[name], hint)
        return cls(**known)


# Reading annotations is slow, and facts are read again whenever they change, beside the training.
_hints: Callable[[type], dict[str, Any]] = cache(get_type_hints)
