"""Free outputs: replace what the model answers by free numbers, and see how low the loss goes and what it asks for."""

from __future__ import annotations

from sonde.core.tape import Op
from sonde.forensics.experiments.subject import DoesNotApply, Lowest, Measured, Subject


def free_outputs(subject: Subject) -> Measured:
    """Minimise the taped loss over the model's outputs alone.

    Compares cuts from the last layer with weights on to the function of the loss: where a later cut allows a far lower
    loss than an earlier one, what lies between keeps the model from it. `guess` is the lowest loss with the same output
    for every sample.
    """
    cuts = {"scores": subject.scores, "outputs": subject.outputs, "loss_inputs": subject.loss_inputs}
    cuts = {name: cut for name, cut in cuts.items() if cut}
    if not cuts:
        raise DoesNotApply("no output of a model that reaches the loss is known")
    numbers: dict[str, float | None] = {}
    words: dict[str, str] = {}
    lowest: dict[str, Lowest] = {}
    for name, cut in cuts.items():
        twin = next((other for other in lowest if cuts[other] == cut), None)
        lowest[name] = lowest[twin] if twin is not None else subject.lowest(cut)
        numbers |= _describe(subject, name, cut, lowest[name], words)
    main = next(iter(cuts))
    numbers["start"] = lowest[main].start
    numbers["guess"] = subject.scale.guess
    if len(cuts) > 1:
        between = _between(subject, next(iter(cuts.values())), cuts.get("loss_inputs", []))
        words["between"] = " ".join(dict.fromkeys(op.kind for op in between))
        lines = (subject.tape.line_of(op) for op in between if op.kind in RANGES)
        words["line"] = next((f"{line}: {line.text}" for line in lines if line is not None), "")
        words["module"] = next((op.module for op in between if op.kind in RANGES), "")
    words["loss"] = _loss_function(subject)
    words["shapes"] = _other_shape(subject)
    text = f"with free outputs the loss falls from {lowest[main].start:.4g} to {lowest[main].loss:.4g}"
    if lowest[main].gradient == 0:
        text = "the loss has no gradient at the model's outputs"
    elif lowest[main].is_unbounded:
        text = f"with free outputs the loss falls from {lowest[main].start:.4g} without end"
    return Measured(text, numbers, words)


RANGES = frozenset(
    {"_softmax", "softmax", "sigmoid", "relu", "tanh", "clamp", "clamp_min", "clamp_max", "hardtanh", "softplus", "elu"}
    | {"hardsigmoid", "relu_", "sigmoid_", "tanh_", "hardtanh_", "exp", "abs", "_log_softmax", "log_softmax", "log"}
)
"""Operations that limit the range of what they return."""


def _describe(subject: Subject, name: str, cut: list[int], found: Lowest, words: dict[str, str]) -> dict[str, float]:
    numbers = {
        f"{name}.lowest": found.loss,
        f"{name}.gradient": found.gradient,
        f"{name}.unbounded": float(found.is_unbounded),
    }
    before = subject.agreement([subject.exact.values[each] for each in cut])
    after = subject.agreement(found.values)
    if before is not None and after is not None:
        words["agreement"] = after[0]
        numbers[f"{name}.agreement_before"], numbers[f"{name}.agreement_after"] = before[1], after[1]
    return numbers


def _between(subject: Subject, first: list[int], last: list[int]) -> list[Op]:
    if not last or first == last:
        return []
    inside = subject.tape.descendants(first) & subject.tape.ancestors(last)
    made = {subject.tape.values[each].made_by for each in inside - set(first)}
    return [op for op in subject.program.ops if op.index in made]


def _loss_function(subject: Subject) -> str:
    cut = set(subject.loss_inputs)
    if not cut:
        return ""
    return next((op.function for op in subject.program.ops if cut & {each for _, each in op.inputs()}), "")


def _other_shape(subject: Subject) -> str:
    """Return the shapes of an output and a target that differ in dimensions of size 1 only, such as a column."""
    for each in subject.outputs:
        shape = subject.tape.values[each].shape
        for target in subject.targets:
            other = subject.tape.values[target].shape
            squeezed = [[size for size in each if size != 1] for each in (shape, other)]
            if shape != other and squeezed[0] == squeezed[1]:
                return f"{list(shape)} and {list(other)}"
    return ""
