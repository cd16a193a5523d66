"""Vital signs: numbers about the training loop itself that a diagnosis needs and no tensor's statistics hold.

The recorder writes them as readings of quantity `vital`, the rules read them. A vital's site is named after its subject
(a module, a parameter, `optimizer`, `loss_fn`, `(loop)`) and its part is `.` and one of the names below, so its key
reads `optimizer:vital.leftover`. A vital that was not measured is absent.
"""

from __future__ import annotations

from typing import Final

LOOP: Final = "(loop)"
"""The subject of what is about the loop as a whole."""
LOSS: Final = "loss_fn"
"""The subject of what is about the loss function."""

SCHEDULE: Final = ("scheduler.last_epoch", "optimizer.group0.lr")
"""The logged numbers that tell whether a schedule goes on where a run is resumed."""

# About the loop, every step.
FORWARDS: Final = "forwards"
"""Training passes of the model since the step before; if the model itself is never called, those of its parts."""
BACKWARDS: Final = "backwards"
"""Backward passes since the step before that reached a watched parameter; one inside another is not counted."""
ROOT: Final = "root"
"""The number that `backward()` was called on, in the first steps and then sampled; unknown under a gradient scaler."""
DROPPED: Final = "dropped"
"""1 in a step in which `torch.nn.functional.dropout` dropped values while gradients were off; phase `eval`."""
WRITTEN: Final = "written"
"""How many watched trainable parameters were written to since the session began. Only at the end of a run without a
step."""
GRAPHS_KEPT: Final = "graphs_kept"
"""Of how many of the last 64 recorded steps before this one the graph of the loss, or its last part, still exists."""
DATA_WAIT: Final = "data_wait"
"""Seconds spent waiting for the data loader."""
STEP_TIME: Final = "step_time"
"""Seconds from the end of the step before to the end of this one."""
PHASE_TIMES: Final = ("to_device", "forward", "backward", "optimizer", "evaluation", "watching", "other")
"""Seconds of the parts of a step, as parts `.time_forward` and so on; see `time_of`. Together with `DATA_WAIT` they add
up to `STEP_TIME`. `to_device` is from the arrival of a batch to the forward: moving it to the device, and whatever else
is done to it; absent where no loader is seen. `watching` is what Sonde itself needs in its hooks; a part that did not
occur, such as `evaluation`, is absent."""
TURNS: Final = "turns"
"""In a step in which several optimizers have stepped: how many of them did so after a backward pass of their own. 1 if
all use the gradients of one loss; more in a GAN. Absent where one optimizer has stepped."""
LOOKS_AHEAD: Final = "looks_ahead"
"""For each attention of a sequence of tokens to itself, in the first backward pass: which part of its weights, or of
what its mask allows, lies ahead. Written once."""

# About an optimizer (subject `optimizer`, `optimizer2`, ...), every step.
LEFTOVER: Final = "leftover"
"""Share of its parameters whose gradient still held the gradient of the step before when the next was added to it.
Only parameters count that had a gradient at the step before and got one since; absent if there are none, in the first
step, with `create_graph`, and for sparse gradients."""
NO_GRADIENT: Final = "no_gradient"
"""How many of its trainable parameters had no gradient at all, or one that is exactly zero because it was cleared
after the backward pass. Where gradients were written to after the backward pass, in the first three steps and then
each tenth; else every step."""
STATE_STEPS: Final = "state_steps"
"""The step count kept in the optimizer's state, after its step; absent for optimizers without one on the CPU."""
BACKWARDS_SEEN: Final = "backwards_seen"
"""Backward passes that reached its parameters since its own step before."""
WEIGHTS_SET: Final = "weights_set"
"""Of an optimizer: how often weights were written between its steps so far, as when a model is loaded."""
BACKWARDS_ADDED: Final = "backwards_added"
"""How many of those passes the gradients hold: the passes since they were cleared last. Only in steps with more than
one backward pass; fewer than `BACKWARDS_SEEN` where an optimizer looks ahead and clears them in between (SAM)."""
THROWN_AWAY: Final = "thrown_away"
"""Share of its parameters whose gradient was cleared between two backward passes for the same values, so that the step
found that of the last pass only. Only in steps with more than one backward pass."""
STEPS_TAKEN: Final = "steps_taken"
"""How many steps the optimizer itself has taken, in a run in which several step, or in which they step inside the
backward pass. Elsewhere this is the number of the step."""
REPLACED: Final = "replaced"
"""How many optimizers of these parameters the program has dropped after they had stepped, each for a new one that goes
on with the same weights. Written in the first step of each new one, also where other weights came with it."""
CLIP_NORM: Final = "clip_norm"
"""The norm of the gradients before clipping, as `clip_grad_norm_` measured it."""
CLIP_MAX: Final = "clip_max"
"""The norm that `clip_grad_norm_` clips to. Both are written under the optimizer of the first parameter clipped."""
SCALED_CLIP: Final = "scaled_clip"
"""1 if gradients were clipped while they were still multiplied by a gradient scaler's scale, else 0; absent without
a scaler."""

# About a module, sampled: in each of its first 20 training passes, then in each tenth. `#call` numbers further calls
# within a step, as it does for outputs.
EVER_ACTIVE: Final = "ever_active"
"""For each unit of a rectifier: 1 if it was positive for any sample since it was first looked at, else 0. The mean is
the share of units that ever were active, the count is the number of units. For modules of torch's classes ReLU and
ReLU6; units are channels after a convolution, else the last dimension."""
SATURATED: Final = "saturated"
"""For each sampled output of a sigmoid or tanh: 1 if its input lies beyond +-5, of a hardtanh: 1 if it lies at one of
its limits; else 0."""
TRAINING: Final = "training"
"""1 if the module was in training mode when it ran in this pass, else 0; for batch norms, dropouts and the model
itself. Phase as the pass. Written in steps 1 to 3, then only when it has changed since the module ran last: the latest
value holds until the next."""
UNIT_SAMPLES: Final = "unit_samples"
"""Over how many values `EVER_ACTIVE` looked at each unit so far."""
ATTENTION_ENTROPY: Final = "attention_entropy"
"""For each head: the mean entropy of its attention rows over the logarithm of their length. Only where a module whose
class is called an attention returns the weights of each head as its second output."""

# About a parameter, sampled; steps are those of its optimizer.
UNIT_GRADIENT: Final = "unit_gradient"
"""For each unit (row) of a weight: 1 if any element of its gradient was ever non-zero when looked at, else 0. Steps 5,
15, 25, 35, 45, then 105, 205, ...; on the CPU no longer once all are 1."""
ROW_SPREAD: Final = "row_spread"
"""Spread between the rows of a weight over the spread of all its elements: 0 if all units are the same. Steps 0, 1, 5
and 20; of at most 256 rows."""

# About the loss, in the first ten steps and then each 21st (what labels say: each fifth). Further losses of a step have
# `#call` 1, 2, 3. Beside them stand the readings `loss_fn:output`, `loss_fn:input.input` and `loss_fn:input.target` of
# every step (of large inputs evenly chosen rows), for calls of torch's own loss functions, however they were bound, and
# for the usual losses written out by hand, as the graph tells them (setting `by_hand`). Any other loss has
# `loss_fn:output` only, of kind `backward`.
ROW_SUM: Final = "row_sum"
"""For each sampled row of the loss's input: the sum over classes (the dimension that the loss takes for classes, else
the last). Absent if the input has one dimension."""
ROW_MIN: Final = "row_min"
"""For each sampled row of the loss's input: its smallest value."""
COLUMN_SUM: Final = "column_sum"
"""For each class of a two-dimensional input of the loss: the sum over the whole batch."""
ZERO_SHARE: Final = "zero_share"
"""Share of exact zeros in the loss's input."""
SAMPLE_SPREAD: Final = "sample_spread"
"""Variance of the loss's input across the samples of a batch, averaged over its other dimensions; absent for a single
sample."""
TARGET_SPREAD: Final = "target_spread"
"""Variance of a target of real numbers across the batch."""
LABEL_ENTROPY: Final = "label_entropy"
"""Entropy, in nats, of the class labels of this batch."""
LABEL_COUNTS: Final = "label_counts"
"""For each class: how many labels of it this batch has. Also for losses that ask one question of each sample."""
RUNNING_LABEL_ENTROPY: Final = "running_label_entropy"
"""Entropy, in nats, of all class labels looked at so far: in each of the first ten steps, then in each fifth."""
LABEL_RUN: Final = "label_run"
"""Share of neighbouring labels within the batch that are equal."""
COUNTED_PADDING: Final = "counted_padding"
"""Share of a batch's positions that are padding and count in the loss, in the first ten passes: the rows of tokens that
the model is given end in one and the same token, whose labels are all the same and not `ignore_index`."""
NEXT_TOKEN: Final = "next_token"
"""Share of the targets that are the next of the tokens that the model is given, in its first three passes."""
VALID_TARGETS: Final = "valid_targets"
"""How many targets of the batch count, that is, are not `ignore_index`."""
PREDICTED_ENTROPY: Final = "predicted_entropy"
"""Entropy, in nats, of the classes predicted in this batch (the largest outputs)."""
LOG_Z: Final = "log_z"
"""For each sampled row of logits, or of log-probabilities (where it should be 0): log of the sum of exponentials."""
COLUMN_LOG_Z: Final = "column_log_z"
"""For each class of logits or log-probabilities: the logarithm of the sum of exponentials over the batch."""
NEIGHBOUR_AGREEMENT: Final = "neighbour_agreement"
"""For each sample kept in a small buffer of inputs: 1 if its nearest neighbour has the same label, else 0. Written
once, when 512 samples have come (at most 64 of a batch), or after 40 batches if there are at least 64."""

# About the first input of real numbers of the model (subject `(model)`, or the model's name), in its first three passes
# and then in each 50th. Beside them stand the readings `(model):input[0]`, `(model):input['x']` of every step: equal
# batches have equal readings.
COLUMN_SCALE: Final = "column_scale"
"""For each feature of a two-dimensional input: its standard deviation over the batch."""
COLUMN_OFFSET: Final = "column_offset"
"""For each feature of a two-dimensional input: its mean over the batch."""

# About the rows of the model's first input (subject as above), each marked by a number made of its bits.
SEEN_ROWS: Final = "seen_rows"
"""Share of an evaluation's rows that are equal, bit by bit, to one of the first 4,096 rows of training; in the first 64
passes of evaluation."""
REPEATED_ROWS: Final = "repeated_rows"
"""Share of a training batch's rows that repeat another row of it, in the first eight passes."""
DISTINCT_ROWS: Final = "distinct_rows"
"""How many different rows there are among the first 1,024 or so of training. Written once."""

BATCH_MARK: Final = "batch_mark"
"""A whole number made of the bits of a training batch's rows and their order, in the first 64 passes: equal for equal
batches, and only for them."""

# About trainings with several ranks.
REDUCED_PASSES: Final = "reduced_passes"
"""Training passes since the step before whose gradients DistributedDataParallel reduces. Only where the watched model
is wrapped in it."""
DIRECT_PASSES: Final = "direct_passes"
"""Training passes since the step before of the module inside of DistributedDataParallel that went around the
wrapper."""
BUFFER: Final = "buffer"
"""The statistics of a buffer that training writes to, before the first pass of a step; the subject is its name."""
WEIGHT_BEFORE: Final = "weight_before"
"""The statistics of the smallest trained parameter before the first pass of a step, in a training with several ranks:
whether the program has made the ranks alike again since the step before."""

SHOWN: Final = frozenset({UNIT_GRADIENT})
"""Signals that are shown or read by `sonde.debug`, though no rule needs them."""


def time_of(phase: str) -> str:
    """Return the name of the vital that holds the seconds of a part of the step."""
    return f"time_{phase}"


def part_of(name: str) -> str:
    """Return the `part` of the site of a vital."""
    return f".{name}"
