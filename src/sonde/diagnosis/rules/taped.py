"""Rules about what a step computes, that only a tape of it shows."""

from __future__ import annotations

from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Found, above, fact, rule
from sonde.diagnosis.symptoms import ANY_STATISTIC, NOT_TRAINED
from sonde.diagnosis.tape.contracts import broken, wrapped_around
from sonde.diagnosis.tape.losses import norm_of_a_part, softmax_of_one
from sonde.diagnosis.tape.repeats import same_input_twice
from sonde.diagnosis.tape.returns import unmasked_bootstrap
from sonde.diagnosis.tape.roles import (
    dropped_answers,
    hidden_as_cell,
    index_as_value,
    itself_among_pairs,
    scaled_in_part,
    swapped_arguments,
)
from sonde.diagnosis.tape.targets import corners_as_sizes, given_answer, noisy_copy, weak_noise
from sonde.diagnosis.tape.tokens import overshifted
from sonde.diagnosis.tape.unused import (
    dropped_result,
    ignored_mask,
    left_out_samples,
    overwritten_data,
    truncated_data,
)


@rule(
    "single_class_output",
    severity="critical",
    exact=True,
    explains=[*ANY_STATISTIC],
    fix="Use binary_cross_entropy_with_logits for one output, or give the last layer one output per class.",
    refute="Print the shape of the output: if its class dimension is larger than 1, this finding is wrong.",
)
def single_class_output(case: Case) -> Found | None:
    """A softmax runs over a single class, so the loss is constant."""
    case.need_tape()
    return broken(case, "single_class_output") or softmax_of_one(case)


@rule(
    "integer_wraparound",
    exact=True,
    explains=[*NOT_TRAINED, "unnormalised_inputs"],
    fix="Convert to float before subtracting: x.float() - mean.",
    refute="Print the dtype on that line: if it is signed or a float, this finding is wrong.",
)
def integer_wraparound(case: Case) -> Found | None:
    """Unsigned integers wrap around below zero on their way to the model."""
    case.need_tape()
    return wrapped_around(case)


@rule(
    "target_is_input",
    exact=True,
    fix="Compare the output with the data before the noise was added.",
    refute="If the model should reproduce the noise, this finding is wrong.",
)
def target_is_input(case: Case) -> Found | None:
    """The output is compared with its own input: the noisy one instead of clean data, or the answer itself."""
    case.need_tape()
    return noisy_copy(case) or given_answer(case)


@rule(
    "shifted_twice",
    exact=True,
    explains=[*NOT_TRAINED],
    fix="Shift labels once: in the data, or in the model.",
    refute="Compare inputs[:, 1:] with the targets of the positions before: if they are equal, this finding is wrong.",
)
def shifted_twice(case: Case) -> Found | None:
    """The target of a position is not the next token but one further on."""
    case.need_tape()
    return overshifted(case)


@rule(
    "wrong_dim_norm",
    exact=True,
    explains=["aux_loss_dominates"],
    fix="Flatten each sample first: gradients.flatten(1).norm(2, dim=1).",
    refute="Print the shape of the norm: if it has one number for each sample, this finding is wrong.",
)
def wrong_dim_norm(case: Case) -> Found | None:
    """A gradient penalty takes the norm over some of the dimensions of a sample, not over all of them."""
    case.need_tape()
    return norm_of_a_part(case)


@rule(
    "terminal_bootstrapped",
    exact=True,
    explains=["loss_divergence", "loss_oscillation"],
    fix="Multiply the value of the next state by (1 - done).",
    refute="If the environment never ends, this finding is wrong.",
)
def terminal_bootstrapped(case: Case) -> Found | None:
    """The value of the next state is added to the target of terminal states too."""
    case.need_tape()
    return unmasked_bootstrap(case)


@rule(
    "result_discarded",
    needs=["facts.program"],
    exact=True,
    explains=[*NOT_TRAINED, "unused_parameters"],
    fix="Assign the result, or use the in-place variant.",
    refute="Remove the line: if the loss of the same batch changes, this finding is wrong.",
)
def result_discarded(case: Case) -> Found | None:
    """A result is computed and dropped, and the program goes on without it."""
    for call in case.facts.calls("state_dict.into"):
        return Found(
            step=call.steps[-1],
            sites=(str(call.data.get("name") or "(model)"), "(loop)"),
            evidence=(fact("tensors in the state that was handed over", int(call.data.get("given") or 0)),),
            cause=f"state_dict(state){call.place} does not load the state: it writes the present weights over it, and "
            "the model keeps them.",
            fix="Write load_state_dict(state).",
            refute="Compare a weight before and after that line: if it changes, this finding is wrong.",
        )
    case.need_tape()
    return dropped_result(case)


@rule(
    "mask_not_applied",
    exact=True,
    explains=[*NOT_TRAINED, "padding_dominates"],
    fix="Apply the mask: pass it to the model, or average the loss over what it marks.",
    refute="Invert the mask: if the loss of the same batch changes, this finding is wrong.",
)
def mask_not_applied(case: Case) -> Found | None:
    """The loader returns a mask that the step does not use."""
    case.need_tape()
    return ignored_mask(case)


@rule(
    "samples_left_out",
    exact=True,
    explains=[*ANY_STATISTIC],
    fix="Compare the outputs of all samples with their targets.",
    refute="Change the last sample of a batch: if its loss changes, this finding is wrong.",
)
def samples_left_out(case: Case) -> Found | None:
    """Only some samples of a batch reach the loss."""
    case.need_tape()
    return left_out_samples(case) or broken(case, "samples_left_out")


@rule(
    "data_truncated",
    exact=True,
    explains=[*ANY_STATISTIC, "constant_target", "constant_feature"],
    fix="Keep it as a float: .float() instead of .long() or .int().",
    refute="Print the data before and after the cast: if both are equal, this finding is wrong.",
)
def data_truncated(case: Case) -> Found | None:
    """A cast to integers cuts off the fractions of data."""
    case.need_tape()
    return truncated_data(case)


@rule(
    "data_overwritten",
    exact=True,
    explains=[*NOT_TRAINED, "unnormalised_inputs", "loss_divergence"],
    fix="Write x = x + noise, or clone the batch before it is changed.",
    refute="Compare the data set with a copy from before training: if both are equal, this finding is wrong.",
)
def data_overwritten(case: Case) -> Found | None:
    """The data set is changed in place while it is used."""
    case.need_tape()
    return overwritten_data(case)


@rule(
    "pairs_with_itself",
    exact=True,
    explains=[*NOT_TRAINED],
    fix="Mask the diagonal of the similarities before the loss, or give each call of the model its own view.",
    refute="Print the diagonal of what the loss gets: if it is -inf or very low, this finding is wrong.",
)
def pairs_with_itself(case: Case) -> Found | None:
    """Where a loss compares samples in pairs, a sample is compared with itself."""
    case.need_tape()
    return itself_among_pairs(case) or same_input_twice(case)


@rule(
    "arguments_swapped",
    severity="critical",
    exact=True,
    explains=[*ANY_STATISTIC],
    fix="Pass the output of the model first, and the target second.",
    refute="Print requires_grad of both arguments: if that of the first is True, this finding is wrong.",
)
def arguments_swapped(case: Case) -> Found | None:
    """Two arguments have changed places: input and target of a loss, or the two betas of Adam."""
    if (found := _swapped_betas(case)) is not None:
        return found
    case.need_tape()
    return swapped_arguments(case)


def _swapped_betas(case: Case) -> Found | None:
    """Find an Adam whose first moment averages over more steps than its second, which it needs for its bounds."""
    for optimizer in case.facts.optimizers:
        for group in optimizer.groups if optimizer.traits.adam else ():
            first, second = group.settings.get("betas0"), group.settings.get("betas1")
            # Convergence is shown for first < sqrt(second): Kingma and Ba 2015, section 4.
            if isinstance(first, float) and isinstance(second, float) and first * first > second:
                return Found(
                    severity="warning",
                    sites=(optimizer.name,),
                    evidence=(above("first beta over the root of the second", first / second**0.5, 1.0),),
                    cause=f"{optimizer.kind} has betas=({first:g}, {second:g}): its first moment averages over more "
                    "steps than its second, so that steps are long and point to gradients of long ago.",
                    fix=f"Swap them: betas=({second:g}, {first:g}).",
                    refute="Train with the betas swapped: if the loss falls no faster, this finding is wrong.",
                )
    return None


@rule(
    "dropout_on_output",
    exact=True,
    explains=[*NOT_TRAINED, "loss_oscillation", "dropout_too_high"],
    fix="Apply dropout before the last layer, not after it.",
    refute="Print the outputs in training mode: if none is exactly 0, this finding is wrong.",
)
def dropout_on_output(case: Case) -> Found | None:
    """Dropout is applied to the answers of the model."""
    case.need_tape()
    return dropped_answers(case)


@rule(
    "index_for_value",
    exact=True,
    explains=[*NOT_TRAINED, "loss_divergence", "target_scale"],
    fix="Use max(dim)[0] or amax(dim), or gather the values at the index.",
    refute="If the index is a quantity, such as a position, this finding is wrong.",
)
def index_for_value(case: Case) -> Found | None:
    """A target is computed of the index of the largest output instead of the output itself."""
    case.need_tape()
    return index_as_value(case)


@rule(
    "temperature_on_one_side",
    exact=True,
    explains=[*NOT_TRAINED],
    fix="Divide all scores by the temperature.",
    refute="Print both parts before they are joined: if both were divided, this finding is wrong.",
)
def temperature_on_one_side(case: Case) -> Found | None:
    """Only some of the scores that compete in a softmax are divided by the temperature."""
    case.need_tape()
    return scaled_in_part(case)


@rule(
    "wrong_state_returned",
    exact=True,
    explains=[*NOT_TRAINED],
    fix="Return both states: h, c = h[...], c[...].",
    refute="Compare both states that it starts from: if they differ, this finding is wrong.",
)
def wrong_state_returned(case: Case) -> Found | None:
    """A recurrent layer starts from the hidden state of another in the place of its cell state."""
    case.need_tape()
    return hidden_as_cell(case)


@rule(
    "box_format",
    exact=True,
    explains=[*NOT_TRAINED, "loss_sign_flipped"],
    fix="Convert the boxes first, or change the format of the labels.",
    refute="Draw ten targets on their pictures: if the boxes fit, this finding is wrong.",
)
def box_format(case: Case) -> Found | None:
    """Boxes of the targets have another format than the loss takes them for."""
    case.need_tape()
    return corners_as_sizes(case)


@rule(
    "schedule_not_cumulative",
    exact=True,
    explains=["underfitting"],
    fix="Index the product of all alphas: torch.cumprod(1 - betas, 0)[t]. If it is that product, take more steps or "
    "larger betas, until it ends near 0.",
    refute="Print the factor of the data at the last time: if it is near 0, this finding is wrong.",
)
def schedule_not_cumulative(case: Case) -> Found | None:
    """Noisy samples of a diffusion are mostly data at every time of its schedule."""
    case.need_tape()
    return weak_noise(case)
