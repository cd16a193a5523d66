"""Why an operation made something non-finite: a table from the operation and its input values to a reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sonde.forensics.origin import Origin

MAX_FLOAT16: Final = 65504.0


@dataclass(frozen=True, slots=True)
class Reason:
    """A likely reason, and what to do about it."""

    key: str
    words: str
    """Completes "it is not finite because ..."."""
    fix: str


BAD_NUMBER: Final = "bad_number"
"""Among the scalars of an origin: what is wrong with a single number that an operation was given."""

UNKNOWN: Final = Reason(
    "unknown",
    "its result is not finite although what it was given is",
    "Look at the values of its inputs above, and bound them before this operation.",
)


def reason_for(origin: Origin) -> Reason:
    """Return the likely reason, or `UNKNOWN`."""
    rules = _BACKWARD if origin.stage == "backward" else _FORWARD
    for rule in rules:
        reason = rule(origin)
        if reason is not None:
            return reason
    return UNKNOWN


# ---------------------------------------------------------------------- forward


def _bad_number(origin: Origin) -> Reason | None:
    if BAD_NUMBER not in origin.scalars:
        return None
    return Reason(
        "bad_number",
        f"one of its operands is a single number, such as a weight of the loss, that is {origin.scalars[BAD_NUMBER]}",
        "Find where that number is computed, and check it there: assert math.isfinite(weight).",
    )


def _logarithm(origin: Origin) -> Reason | None:
    if origin.name not in ("log", "log2", "log10", "log1p", "log_"):
        return None
    shift = 1.0 if origin.name == "log1p" else 0.0
    values = _at(origin, "self")
    if any(value + shift < 0 for value in values):
        return Reason(
            "log_of_negative",
            f"it takes the logarithm of a negative number ({min(values):.4g})",
            "Keep the argument positive: clamp it (x.clamp_min(1e-8)), or use softplus or log-softmax before.",
        )
    return Reason(
        "log_of_zero",
        "it takes the logarithm of 0",
        "Add a small constant or clamp: torch.log(x.clamp_min(1e-8)); for probabilities use F.log_softmax or "
        "F.logsigmoid of the logits, which never take the logarithm of 0.",
    )


def _division(origin: Origin) -> Reason | None:
    if origin.name not in ("div", "div_", "true_divide", "reciprocal", "reciprocal_", "rsqrt", "rsqrt_"):
        return None
    name = "other" if origin.name.startswith(("div", "true")) else "self"
    values = _at(origin, name)
    if values and not any(values):
        what = "0 by 0" if name == "other" and not any(_at(origin, "self") or [1.0]) else "by 0"
        empty = " A mean over an empty selection divides 0 by 0 too: check that the mask selects something."
        return Reason(
            "division_by_zero",
            f"it divides {what}",
            "Add a small constant to the denominator (x / (y + 1e-8)) or clamp it (y.clamp_min(1e-8))."
            + (empty if what == "0 by 0" else ""),
        )
    if origin.name.startswith("rsqrt") and any(value < 0 for value in values):
        return _negative_root(values)
    return _overflow(origin)


def _root(origin: Origin) -> Reason | None:
    if origin.name not in ("sqrt", "sqrt_"):
        return None
    values = _at(origin, "self")
    return _negative_root(values) if any(value < 0 for value in values) else None


def _negative_root(values: list[float]) -> Reason:
    return Reason(
        "sqrt_of_negative",
        f"it takes the square root of a negative number ({min(values):.4g})",
        "Clamp before the root: torch.sqrt(x.clamp_min(0) + 1e-8). A variance computed as E[x^2] - E[x]^2 can fall "
        "below 0 by rounding; use torch.var.",
    )


def _power(origin: Origin) -> Reason | None:
    if origin.name not in ("pow", "pow_"):
        return None
    base, exponent = _at(origin, "self"), origin.scalars.get("exponent", 1.0)
    if any(value < 0 for value in base) and origin.makes == "nan":
        return Reason(
            "power_of_negative",
            f"it raises a negative number ({min(base):.4g}) to a power that is not whole ({exponent})",
            "Take the absolute value or clamp first: x.abs().pow(p), x.clamp_min(0).pow(p).",
        )
    if 0.0 in base:
        return Reason(
            "power_of_zero",
            f"it raises 0 to a negative power ({exponent})",
            "Add a small constant before: (x + 1e-8).pow(p).",
        )
    return _overflow(origin)


def _exponential(origin: Origin) -> Reason | None:
    if origin.name not in ("exp", "exp_", "expm1", "exp2", "sinh", "cosh"):
        return None
    values = _at(origin, "self")
    largest = f" of {max(values):.4g}" if values else ""
    limit = {"float16": "11.1", "bfloat16": "88.7", "float32": "88.7"}.get(origin.dtype, "709.8")
    return Reason(
        "exp_overflow",
        f"it takes the exponential{largest}; in {origin.dtype} it overflows beyond {limit}",
        "Subtract the maximum first (torch.softmax, torch.logsumexp do), or bound the exponent: x.clamp_max(20).",
    )


def _softmax(origin: Origin) -> Reason | None:
    if origin.name not in ("_softmax", "softmax", "_log_softmax", "log_softmax", "_safe_softmax") and (
        "attention" not in origin.name
    ):
        return None
    if not any(about.get("nonfinite") for about in origin.inputs):
        return None
    return Reason(
        "fully_masked_row",
        "every entry of a row is masked with -inf, so the softmax has nothing to choose from and divides 0 by 0",
        "Leave at least one entry of each row unmasked (check samples that are all padding), mask with a large "
        "negative number such as -1e4 instead of -inf, or set the affected rows to 0 afterwards.",
    )


def _few_elements(origin: Origin) -> Reason | None:
    if origin.name not in ("std", "var", "std_mean", "var_mean"):
        return None
    return Reason(
        "std_of_one_element",
        "it takes the standard deviation over a single element, which is 0 / 0 with the default correction of 1",
        "Take it over more than one element, or pass correction=0; drop a last batch of one sample (drop_last=True).",
    )


def _mean(origin: Origin) -> Reason | None:
    if origin.name not in ("mean", "nanmean", "nll_loss_forward", "nll_loss2d_forward") or origin.makes != "nan":
        return None
    if origin.name == "mean":
        if any(math.prod(about["shape"]) for about in origin.inputs):
            return None
        return Reason(
            "mean_of_nothing",
            "it takes the mean of an empty tensor",
            "Check that the selection is not empty before taking its mean, or divide a sum by count.clamp_min(1).",
        )
    return Reason(
        "no_valid_target",
        "all targets of the batch are ignored (ignore_index), so the mean is 0 / 0",
        "Skip batches without a valid target, or use reduction='sum' and divide by the number of valid targets, "
        "at least 1.",
    )


def _outside_domain(origin: Origin) -> Reason | None:
    domains = {"acos": "-1 to 1", "asin": "-1 to 1", "atanh": "-1 to 1", "acosh": "1 and above", "logit": "0 to 1"}
    domain = domains.get(origin.name.strip("_"))
    if domain is None:
        return None
    return Reason(
        "outside_domain",
        f"{origin.name} is defined for {domain} only, and got {_some(_at(origin, 'self'))}",
        "Clamp the argument a little inside its domain, for example x.clamp(-1 + 1e-6, 1 - 1e-6).",
    )


def _normalisation(origin: Origin) -> Reason | None:
    if "norm" not in origin.name or origin.name in ("norm", "linalg_vector_norm"):
        return None
    eps = origin.scalars.get("eps")
    if eps == 0 and origin.makes == "nan":
        return Reason(
            "normalising_a_constant",
            "it divides by a standard deviation of 0: the values to normalise are all the same and eps is 0",
            "Give the normalisation an eps above 0, such as 1e-5.",
        )
    return _overflow(origin)


def _infinities(origin: Origin) -> Reason | None:
    if origin.makes != "nan" or not any(about.get("nonfinite") for about in origin.inputs):
        return None
    if origin.name in ("sub", "add", "sub_", "add_", "rsub"):
        return Reason(
            "inf_minus_inf",
            "it subtracts infinity from infinity",
            "Use a large finite number in place of infinity, or mask the elements out before.",
        )
    if origin.name in ("mul", "mul_", "mm", "bmm", "addmm", "baddbmm"):
        return Reason(
            "zero_times_inf",
            "it multiplies 0 by infinity",
            "Select with torch.where or masked_fill instead of multiplying by a mask of 0 and 1.",
        )
    return None


def _overflow(origin: Origin) -> Reason | None:
    if origin.dtype == "float16" and origin.makes == "inf":
        return Reason(
            "fp16_overflow",
            f"its result is beyond {MAX_FLOAT16:.0f}, the largest float16{_largest(origin)}",
            "Use bfloat16, keep this operation in float32 (torch.autocast(..., enabled=False) around it), take a mean "
            "instead of a sum, or scale its inputs down.",
        )
    if origin.makes == "inf" and origin.inputs:
        return Reason(
            "overflow",
            f"its result is too large for {origin.dtype}{_largest(origin)}",
            "Find out why the values grow: lower the learning rate, clip gradients, normalise or bound the inputs.",
        )
    return None


# ---------------------------------------------------------------------- backward


def _backward_traps(origin: Origin) -> Reason | None:
    trap = _TRAPS.get(_node(origin))
    if trap is None:
        return None
    key, words, fix = trap
    return Reason(key, words, fix)


def _custom_backward(origin: Origin) -> Reason | None:
    if not origin.node or origin.node.endswith(tuple("0123456789")):
        return None
    name = origin.node.removesuffix("Backward")
    return Reason(
        "custom_backward",
        f"the backward of the custom autograd function {name} made it: {_words_of_forward(origin)}",
        f"Repair {name}.backward, and check it with torch.autograd.gradcheck.",
    )


def _words_of_forward(origin: Origin) -> str:
    for rule in _FORWARD:
        reason = rule(origin)
        if reason is not None:
            return reason.words
    return f"{origin.function or 'an operation'} in it has a result that is not finite"


def _gradient_overflow(origin: Origin) -> Reason | None:
    if origin.dtype == "float16" and origin.makes == "inf":
        return Reason(
            "fp16_overflow",
            f"a gradient is beyond {MAX_FLOAT16:.0f}, the largest float16",
            "Use torch.amp.GradScaler, which finds a scale that fits and skips such steps, or bfloat16.",
        )
    return _overflow(origin)


_EPS: Final = "Add a small constant inside: torch.sqrt(x + 1e-8)."
_TRAPS: Final = {
    "sqrt": ("sqrt_backward_at_zero", "the derivative of the square root at 0 is infinite", _EPS),
    "rsqrt": ("sqrt_backward_at_zero", "the derivative of the inverse square root at 0 is infinite", _EPS),
    "norm": (
        "norm_backward_at_zero",
        "the derivative of the norm at 0 is 0 / 0",
        "Add a small constant: torch.sqrt(x.pow(2).sum(-1) + 1e-8), or use F.normalize, which has an eps.",
    ),
    "linalg_vector_norm": (
        "norm_backward_at_zero",
        "the derivative of this norm at 0 does not exist",
        "Add a small constant: torch.sqrt(x.pow(2).sum(-1) + 1e-8), or use F.normalize, which has an eps.",
    ),
    "cdist": (
        "norm_backward_at_zero",
        "the derivative of a distance of 0 does not exist",
        "Use squared distances, or add a small constant before the root.",
    ),
    "pow": (
        "power_backward_at_zero",
        "the derivative of a power below 1 at 0 is infinite",
        "Add a small constant before: (x + 1e-8).pow(p).",
    ),
    "std": (
        "std_backward",
        "the derivative of the standard deviation is infinite where all values are the same, or only one is there",
        "Use the variance, or torch.sqrt(x.var() + 1e-8); take it over more than one element.",
    ),
    "var": (
        "std_backward",
        "the variance of one element divides by 0 in its derivative",
        "Take it over more than one element, or pass correction=0.",
    ),
    "log": (
        "log_backward_at_zero",
        "the derivative of the logarithm at 0 is infinite; where its result is masked out, 0 times infinity is NaN",
        "Clamp or select before the logarithm, not after: torch.log(x.clamp_min(1e-8)).",
    ),
    "div": (
        "division_backward_at_zero",
        "it divides by 0; where the result is masked out afterwards, 0 times infinity is NaN in the derivative",
        "Replace the denominator before dividing: x / torch.where(y == 0, 1.0, y).",
    ),
    "reciprocal": (
        "division_backward_at_zero",
        "the derivative of 1 / x at 0 is infinite",
        "Add a small constant to the denominator.",
    ),
    "acos": ("edge_of_domain", "the derivative of acos at -1 and 1 is infinite", "Clamp a little inside -1 to 1."),
    "asin": ("edge_of_domain", "the derivative of asin at -1 and 1 is infinite", "Clamp a little inside -1 to 1."),
    "atan2": ("edge_of_domain", "the derivative of atan2 at (0, 0) is 0 / 0", "Keep the point away from (0, 0)."),
    "exp": (
        "exp_backward",
        "its result is infinite; where that is masked out afterwards, 0 times infinity is NaN in the derivative",
        "Bound the exponent before: x.clamp_max(20).",
    ),
}


def _node(origin: Origin) -> str:
    name = origin.node.rstrip("0123456789").removesuffix("Backward")
    return "".join(f"_{sign.lower()}" if sign.isupper() else sign for sign in name).lstrip("_")


_Rule = Callable[[Origin], Reason | None]
_FORWARD: Final[tuple[_Rule, ...]] = (
    _bad_number,
    _logarithm,
    _division,
    _root,
    _power,
    _exponential,
    _softmax,
    _few_elements,
    _mean,
    _outside_domain,
    _normalisation,
    _infinities,
    _overflow,
)
_BACKWARD: Final[tuple[_Rule, ...]] = (_custom_backward, _backward_traps, _gradient_overflow, _infinities)


def _at(origin: Origin, name: str) -> list[float]:
    about = next((each for each in origin.inputs if each["name"] == name), {})
    values: list[float] = about.get("at") or []
    return [value for value in values if not math.isnan(value)]


def _some(values: list[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values[:3]) or "values outside"


def _largest(origin: Origin) -> str:
    sizes: list[Any] = [
        max(abs(about["min"]), abs(about["max"])) for about in origin.inputs if "min" in about and "max" in about
    ]
    return f"; its inputs reach {max(sizes):.4g}" if sizes else ""
