"""The loss functions of torch, from the ones people call down to those that these call, and how to read a call.

A program that says `from torch.nn.functional import mse_loss` before a session begins holds the function itself, so
that replacing the attribute comes too late. Its body still looks up the function below it when it runs; that is where
such a call is seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as functional
from torch import Tensor

from sonde.core.facts import LossFacts, Plain
from sonde.hooks.autograd_graph import maker_of
from sonde.hooks.replace_function import OverridableFunction
from sonde.sensors.tensors import is_plain

NAMES: Final = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
)
_COMPARED: Final = ("input", "target")
# By the name under which a loss is known: where the function below it lives, its name, and its positional arguments.
_BELOW: Final[dict[str, tuple[Any, str, tuple[str, ...]]]] = {
    "binary_cross_entropy": (torch._C._nn, "binary_cross_entropy", (*_COMPARED, "weight", "reduction")),
    "binary_cross_entropy_with_logits": (
        torch,
        "binary_cross_entropy_with_logits",
        (*_COMPARED, "weight", "pos_weight", "reduction"),
    ),
    "cross_entropy": (
        torch._C._nn,
        "cross_entropy_loss",
        (*_COMPARED, "weight", "reduction", "ignore_index", "label_smoothing"),
    ),
    "huber_loss": (torch._C._nn, "huber_loss", (*_COMPARED, "reduction", "delta")),
    "kl_div": (torch, "kl_div", (*_COMPARED, "reduction")),
    "l1_loss": (torch._C._nn, "l1_loss", (*_COMPARED, "reduction")),
    "mse_loss": (torch._C._nn, "mse_loss", (*_COMPARED, "reduction")),
    "nll_loss": (torch._C._nn, "nll_loss_nd", (*_COMPARED, "weight", "reduction", "ignore_index")),
    "smooth_l1_loss": (torch._C._nn, "smooth_l1_loss", (*_COMPARED, "reduction", "beta")),
}
_REDUCTIONS: Final = ("none", "mean", "sum")
_WEIGHTS: Final = ("weight", "pos_weight")
# How torch calls what a loss compares, by the order in which to look.
_INPUTS: Final = ("input", "input1", "anchor", "log_probs")
_TARGETS: Final = ("target", "targets")


@dataclass(frozen=True, slots=True, eq=False)
class LossCall:
    """One call of a loss function, or one loss that was written out by hand."""

    kind: str
    values: Tensor
    target: Tensor | None
    output: Tensor
    number: int
    """Which loss it is: those of another kind, or that follow each other before a backward pass, have other ones."""
    settings: dict[str, Plain] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Shapes of input and target before they were made to fit each other, where they have changed since."""

    @property
    def class_dim(self) -> int | None:
        """The dimension of classes; None if there is only one number per sample."""
        if self.values.dim() < 2:
            return None
        return 1 if self.kind in ("cross_entropy", "nll_loss", "multi_margin_loss") else self.values.dim() - 1

    @property
    def classes(self) -> int | None:
        """How many classes there are to choose from, where the loss chooses one."""
        if self.kind not in ("cross_entropy", "nll_loss", "multi_margin_loss"):
            return None
        return int(self.values.shape[1 if self.values.dim() > 1 else 0])

    def facts(self) -> LossFacts:
        """Return what the call says about the loss."""
        target = self.target
        input_shape = tuple(self.values.shape)
        target_shape = tuple(target.shape) if target is not None else ()
        if self.shapes is not None:
            input_shape, target_shape = self.shapes
        return LossFacts(
            kind=self.kind,
            settings=self.settings,
            input_shape=input_shape,
            target_shape=target_shape,
            target_dtype=str(target.dtype).removeprefix("torch.") if target is not None else "",
            classes=self.classes,
            made_by=maker_of(self.values),
        )


Reader = Callable[[tuple[Any, ...], dict[str, Any], Tensor, int], LossCall | None]
"""Makes a LossCall of the arguments of a call, what it returned, and its number."""


@dataclass(frozen=True, slots=True, eq=False)
class LossFunction:
    """A place where a call of a loss can be seen."""

    kind: str
    function: OverridableFunction
    read: Reader


def _reader(kind: str, function: Callable[..., Any]) -> Reader:
    """Return how to read a call of a function of `torch.nn.functional`."""
    parameters = inspect.signature(function).parameters
    names = tuple(parameters)
    defaults = {name: each.default for name, each in parameters.items() if each.default is not inspect.Parameter.empty}
    plain = {name: value for name, value in defaults.items() if isinstance(value, Plain)}

    def read(args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, number: int) -> LossCall | None:
        given = dict(zip(names, args, strict=False)) | kwargs
        values = next((given[name] for name in _INPUTS if name in given), None)
        target = next((given[name] for name in _TARGETS if name in given), None)
        if not isinstance(values, Tensor) or not is_plain(values):
            return None
        settings = {name: given.get(name, value) for name, value in plain.items()}
        settings = {name: value for name, value in settings.items() if isinstance(value, Plain) and value is not None}
        settings["weighted"] = any(isinstance(given.get(name), Tensor) for name in _WEIGHTS)
        return LossCall(kind, values, target if isinstance(target, Tensor) else None, output, number, settings)

    return read


def _reader_below(kind: str, names: tuple[str, ...]) -> Reader:
    """Return how to read a call of a function below those of `torch.nn.functional`."""

    def read(args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, number: int) -> LossCall | None:
        given = dict(zip(names, args, strict=False)) | kwargs
        values, target = given.get("input"), given.get("target")
        if not isinstance(values, Tensor) or not is_plain(values):
            return None
        settings: dict[str, Plain] = {
            name: value for name, value in given.items() if isinstance(value, Plain) and value is not None
        }
        reduction = settings.pop("reduction", None)
        # What kl_div calls "batchmean" comes down here as a sum that is divided afterwards.
        if isinstance(reduction, int) and 0 <= reduction < len(_REDUCTIONS) and (kind, reduction) != ("kl_div", 2):
            settings["reduction"] = _REDUCTIONS[reduction]
        settings["weighted"] = any(isinstance(given.get(name), Tensor) for name in _WEIGHTS)
        if not isinstance(target, Tensor):
            return LossCall(kind, values, None, output, number, settings)
        shapes = _shape_before(values), _shape_before(target)
        return LossCall(kind, values, target, output, number, settings, shapes)

    return read


def _shape_before(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape a tensor had before it was blown up: along such dimensions all elements are one in memory."""
    sizes = (1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(sizes)


def _all_functions() -> tuple[LossFunction, ...]:
    above = [
        LossFunction(name, OverridableFunction(functional, name), _reader(name, getattr(functional, name)))
        for name in NAMES
        if hasattr(functional, name)
    ]
    below = [
        LossFunction(kind, OverridableFunction(owner, name), _reader_below(kind, names))
        for kind, (owner, name, names) in _BELOW.items()
    ]
    return tuple(each for each in (*above, *below) if each.function.exists)


FUNCTIONS: Final = _all_functions()
