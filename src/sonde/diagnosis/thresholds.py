"""Every number that a rule compares with, in one table, with where it comes from.

Exact relations need none. Where a threshold is a matter of judgement it is relative to the run's own history or to
other layers, and the source says what it was measured on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number and the reason for it."""

    value: float
    source: str


# missing_zero_grad
LEFTOVER_SHARE = Threshold(0.5, "exact relation: any parameter left over counts; half keeps partial clearing out")
LEFTOVER_STEPS = Threshold(3, "persistence: once may be meant, three times in a row is a habit")


# ---------------------------------------------------------------- learning rate, schedule, clipping, decay
# lr_too_high
PACE_HIGH = Threshold(0.1, "a healthy step moves a weight by about a thousandth of its size; a tenth is a leap")
PACE_HIGH_WORSE = Threshold(0.03, "with a loss above its start, a third of that is enough to blame the step length")
PACE_STEPS = Threshold(3, "persistence: one long first step is common with Adam")
OVERSHOOT = Threshold(1.5, "times the first loss; random labels or a dead loss never rise above where they began")
# lr_too_low
PACE_LOW = Threshold(1e-4, "rule of thumb: log10 of the update ratio lies between -4 and -1 in runs that learn")
PACE_VERY_LOW = Threshold(1e-5, "so slow that a weight moves by a tenth in ten thousand steps")
PACE_SLOW = Threshold(1e-3, "the pace of a healthy step: enough to blame it where the loss does fall, only slowly")
PACE_LOW_STEPS = Threshold(40, "long enough to be past a short warm-up")
# lr_schedule_collapse
LR_COLLAPSED = Threshold(1e-3, "times the highest: the last two percent of a cosine lie below, no more")
LR_COLLAPSED_SHARE = Threshold(0.1, "of the run: five times what the end of a cosine takes")
LR_COLLAPSED_STEPS = Threshold(6, "persistence")
LR_USEFUL_STEPS = Threshold(300, "a schedule that ends this early was made for epochs, not batches")
# scheduler_never_called
SCHEDULER_IDLE_STEPS = Threshold(30, "steps without a call of a scheduler that is made for every step")
# missing_warmup
EARLY_RISE = Threshold(1.3, "times the first loss, within the first steps, before it falls")
# clip_always_active
CLIPPED_SHARE = Threshold(0.5, "Google's tuning playbook: if more than half of the updates are clipped, cut the rate")
CLIPPED_FACTOR = Threshold(3.0, "norm over limit: below this, clipping changes the step's length little")
CLIPPED_GRAVE = Threshold(10.0, "norm over limit: steps are ten times shorter than the learning rate says")
CLIP_LOOKS = Threshold(30, "updates to judge by")
CLIPPED_PACE = Threshold(1e-3, "update over weight that steps of a usual length have; clipped ones are shorter")
# clip_after_step
APPLIED_OVER_LIMIT = Threshold(1.05, "gradients that were clipped never exceed the limit by more than rounding")
# weight_decay_on_norm_bias
DECAY_ON_NORMS = Threshold(0.02, "above AdamW's own default, so that somebody chose it")
# weight_decay_too_large
DECAY_GRADIENT = Threshold(3.0, "pull of the decay over the gradient: the weights go where the decay wants them")
DECAY_LEFT = Threshold(0.3, "of a weight's first size left: decay in balance with gradients takes less")
DECAY_SHARE = Threshold(0.5, "of the weights: one layer may shrink because it is not needed")
# dropout_too_high
DROPPED_SHARE = Threshold(
    0.8, "of the units dropped; usual recipes drop 0.1 to 0.5, and the original paper at most 0.8"
)
# momentum_state_stale
EVEN_UPDATE = Threshold(0.97, "mean over largest magnitude of an update: 1 at Adam's first step, about 0.2 later")
# adam_eps
EPS_ROUNDS_TO_ZERO = Threshold(2.98e-8, "half of float16's smallest number, 2**-24: anything below rounds to 0")
EPS_OVER_GRADIENT = Threshold(10.0, "eps ten times the gradient's size: Adam becomes plain descent at lr/eps")

# ---- exact relations: wiring of loop, parameters and optimizer

# zero_grad_misplaced, double_step, optimizer_step_noop, graph_break_detach, unused_parameters, ...
CLEARED_STEPS = Threshold(2, "persistence: a step without any gradient after a backward pass, twice in a row")
THROWN_STEPS = Threshold(5, "persistence: steps that had the gradient of the last of several passes only")
NOOP_STEPS = Threshold(3, "persistence: a weight that is bitwise the same after three steps in a row")
NOOP_RELATIVE_STEP = Threshold(1e-6, "float32 resolves 1.2e-7 of a weight: a larger step must show")
ORPHAN_STEPS = Threshold(2, "persistence: a gradient that nobody applies, in two steps")
BROKEN_STEPS = Threshold(5, "persistence: steps of its own optimizer without a gradient")
EXTRACTOR_SHARE = Threshold(0.1, "of all trainable elements; a model whose features are used is most of what runs")
UNUSED_STEPS = Threshold(10, "persistence: multi-task loops and routed experts take turns within fewer steps")
ROUTED_STEPS = Threshold(64, "modules with siblings that ran may be routed to; the longest stretch that is compared")
UNUSED_SHARE = Threshold(0.02, "poolers and spare heads of published models stay below 1 % of the weights")
DOUBLE_STEPS = Threshold(4, "two rounds of two steps")
NEVER_STEPPED = Threshold(5, "backward passes before a run ended without one step; more than usual accumulation")
IDLE_STEPS = Threshold(50, "steps of other optimizers while one never steps; pre-training phases are longer or planned")
TWIN_STEPS = Threshold(5, "steps after which layers that began equal are still equal to the last bit")
LEAK_SHARE = Threshold(0.05, "of the resident memory after warming up; allocators round and caches fill by less")
LEAK_BYTES = Threshold(32 << 20, "less than this is the noise of allocators and readers")


# ---------------------------------------------------------------- initialisation, activations, gradient flow
# dead_relu, dormant_units
DEAD_SHARE = Threshold(0.9, "of a layer's units never positive: what is left cannot carry what the layer should")
DEAD_SAMPLES = Threshold(300, "values per unit: a unit that fires for one sample in a hundred is missed by 5 %")
DEAD_LOOKS = Threshold(5, "looks in different steps")
DORMANT_SHARE = Threshold(0.3, "of the units: a third of the layer is paid for and not used")
DORMANT_SAMPLES = Threshold(2000, "values per unit, so that rare features have had their turn")
# saturated_activation
SATURATED_SHARE = Threshold(0.5, "of the inputs beyond +-5, where a sigmoid passes on less than 0.7 % of the gradient")
SATURATED_BORN = Threshold(0.6, "of the inputs from the first look on: not a trained layer that has become sure")
SATURATED_LOOKS = Threshold(5, "looks in different steps")
# vanishing_gradient
GRADIENT_FALL = Threshold(1e-3, "gradient over weight, first layer over last: three orders lost on the way down")
GRADIENT_STEPS = Threshold(15, "persistence")
GRADIENT_FAINT = Threshold(
    1e-10, "gradient over weight: float32 rounds a plain step away, and Adam's (eps 1e-8, rate 1e-3) is below 1e-5"
)
ROUNDS_AWAY = Threshold(2.0**-24, "step over weight: float32 rounds to the weight itself")
WEIGHT_SMALL = Threshold(0.02, "rms of a weight whose size is not known; the smallest of common recipes, GPT-2's")
# exploding_gradient
GRADIENT_LEAP = Threshold(100, "times the running median of the norm")
GRADIENT_LEAPS = Threshold(3, "one leap may be a single odd batch")
GRADIENT_OVER_WEIGHT = Threshold(1e3, "norm of all gradients over that of all weights; healthy runs stay below 10")
# one step against its own history
MOMENT_HISTORY = Threshold(10, "values before it: the first steps of a training are unlike the rest")
MOMENT_WINDOW = 64
"""How many values before a step make its history: as many steps as the rules compare layers over."""
# bad_init_scale
GAIN_HIGH = Threshold(5.0, "rms of a weight times the root of its inputs; He has 1.4, torch's default 0.6")
GAIN_LOW = Threshold(0.05, "the same; the smallest of common recipes, GPT-2's for narrow layers, has 0.1")
OUTPUT_STD_HIGH = Threshold(10.0, "standard deviation of a layer's outputs at the first step")
OUTPUT_STD_LOW = Threshold(0.01, "the same, in a layer that no norm follows")
FADE = Threshold(1e-3, "over all hidden layers; torch's default, whose biases keep the signal up, stays above 0.05")
CALL_GROWTH = Threshold(
    30.0, "of a module's output from its first calls of a pass to its last; an orthogonal matrix has 1"
)
FADE_LAYERS = Threshold(0.75, "share of layers at which the signal fades: one narrow layer is no trend")
# symmetric_init
ROWS_APART = Threshold(1e-5, "spread between units over the spread of all: rounding only")
# constant_output
OUTPUT_SPREAD = Threshold(1e-6, "variance of the output across samples over what it should be")
# exploding_activation
ACTIVATION_HIGH = Threshold(1e3, "largest magnitude of an output; normalised networks stay below 100")
ACTIVATION_GROWTH = Threshold(10.0, "times the largest of the first steps")
# attention_entropy_collapse
ATTENTION_LOW = Threshold(0.15, "of the logarithm of the length: each row looks at one or two places")
ATTENTION_BORN = Threshold(0.25, "of the logarithm of the length, from the first look on; fresh attention has 0.95")
ATTENTION_FALL = Threshold(0.2, "how far it has fallen since the first steps, in the same unit")
# logit_drift
LOG_Z_HIGH = Threshold(50.0, "log of the sum of exponentials: float16 overflows beyond 11, bfloat16 loses all digits")
LOG_Z_GROWTH = Threshold(2.0, "times that of the first steps")

# ---- exact relations: loss and outputs

LOSS_LOOKS = Threshold(2, "persistence: batches in which the relation holds")
ROW_SUM_ERROR = Threshold(1e-3, "float32 softmax rows sum to 1 within 1e-6; 1e-3 leaves room for large vocabularies")
COARSE_SUM_ERROR = Threshold(2e-2, "bfloat16 has eight bits: rows of a thousand classes sum to 1 within a percent")
RELU_ZERO_SHARE = Threshold(0.2, "exact zeros among logits that are never negative; real logits have none")
SUM_UPDATE_RATIO = Threshold(0.03, "a step of 3 % of the weights: thirty times the usual thousandth")
ROOT_RATIO = Threshold(0.9, "backward on the loss itself gives 1; divided by the number of micro-batches 0.5 or less")
INITIAL_LOSS_RATIO = Threshold(2.0, "initial loss over that of a uniform guess; default layers start at 1.0 to 1.1")
HUGE_INITIAL_LOSS_RATIO = Threshold(4.0, "logits that large are sure of wrong answers; language models start below 2")
RANGE_MARGIN = Threshold(0.02, "share of the target's spread that may lie outside the range of the output")
FALLING_BELOW = Threshold(10.0, "a negative loss many times as large as the loss at the start")
SCORE_LOST = Threshold(0.3, "of a score that only ever should rise, lost since the start while the loss did not rise")
CLAMPED_SHARE = Threshold(0.2, "exact zeros among the probabilities of a fresh model; a sigmoid gives none")
AUX_SHARE = Threshold(
    10.0, "the total over the loss within it, in the first steps: nine parts of ten are something else"
)

# ---- exact relations: normalisation and modes

MODE_STEPS = Threshold(3, "persistence: steps trained in evaluation mode")
FEW_PER_CHANNEL = Threshold(8, "values per channel below which a batch's variance is off by half")
TOO_FEW_PER_CHANNEL = Threshold(4, "values per channel; with two, every output is +1 or -1")

# ---- exact relations: numerics

FLOAT16_NEAR_LIMIT = Threshold(0.9 * 65504, "float16 ends at 65504")
SCALE_FLOOR = Threshold(1.0, "a scale below 1 means that gradients overflow without any scaling")
SKIPPED_SHARE = Threshold(0.2, "calibration skips a few steps at the start and one in 2000 later")
SKIP_WINDOW = Threshold(30, "steps over which held-back ones are counted, so that calibration is over")
UNDERFLOW_SHARE = Threshold(0.5, "zeros among the gradients of weights; in float32 the same layers have none")
FLOAT16_SMALLEST_NORMAL = Threshold(2.0**-14, "below it float16 loses digits, and below 2**-24 everything")
STALL_SHARE = Threshold(0.75, "elements a step leaves as they were; 40 to 60 % are usual in bfloat16")
STALL_STEPS = Threshold(20, "persistence")

# ---- exact relations: resuming

FRESH_STEP_EVENNESS = Threshold(0.97, "rms over largest element of an update: Adam's first step moves all alike")
FRESH_STEP_WEIGHTS = Threshold(0.8, "share of weights for which that holds")


# ---------------------------------------------------------------- data and loader
# label_shuffle_mismatch
MISMATCH_STEPS = Threshold(60, "steps at a healthy pace without any progress")
MISMATCH_LOSS = Threshold(0.95, "of the entropy of the labels: nothing but their frequency was learnt")
MISMATCH_SIGMAS = Threshold(
    3.0, "standard errors above chance that neighbours' agreement must reach to show a relation"
)
# unnormalised_inputs
COLUMN_RATIO = Threshold(1e3, "largest over smallest standard deviation of a feature")
COLUMN_LARGE = Threshold(100.0, "standard deviation of the largest feature")
INPUT_OFFSET = Threshold(10.0, "distance of the inputs from zero in standard deviations")
INPUT_LARGE = Threshold(30.0, "rms of an input of real numbers; pixels from 0 to 255 have about 100")
# constant_feature
CONSTANT_SHARE = Threshold(0.5, "of the features with one value for all samples of a look; less is usual for pixels")
# double_normalised
INPUT_TINY = Threshold(0.01, "standard deviation of all inputs: normalised twice, or divided by 255 twice")
# train_val_preproc_mismatch
INPUT_SHIFT = Threshold(0.5, "standard deviations between the means of training and evaluation inputs")
INPUT_SHIFT_SIGMAS = Threshold(6.0, "the same in units of what a batch's mean varies by")
INPUT_STRETCH = Threshold(2.0, "ratio of the spread of training and evaluation inputs; augmentation stays below 1.5")
# data_leakage, sampler_draws_few
SEEN_SHARE = Threshold(0.9, "of the rows of every evaluation; in a sound split none, but for copies within the data")
ALIKE_SHARE = Threshold(0.05, "of a batch's rows that repeat another: rows of few values meet again by themselves")
DRAWN_SHARE = Threshold(0.2, "different rows over what even drawing from the whole data would give")
# duplicate_data_workers
DUPLICATE_SHARE = Threshold(0.3, "of the batches equal to one of the few before")
# not_shuffled
BATCH_ENTROPY = Threshold(0.5, "of what a batch of that size should have: half is missing")
BATCH_LOOKS = Threshold(5, "batches in a row")
# class_imbalance_collapse
IMBALANCE_ENTROPY = Threshold(0.33, "nats: the entropy of two classes at 9 to 1")
PREDICTED_ENTROPY = Threshold(1e-3, "nats: all answers of a batch are the same class")
IMBALANCE_STEPS = Threshold(50, "steps in which it could have learnt better")
# target_scale
TARGET_STD = Threshold(100.0, "standard deviation of a target of real numbers")
TARGET_OFFSET = Threshold(10.0, "distance of the target from zero in standard deviations")
TARGET_REACH = Threshold(30.0, "size of the target over that of the model's first outputs: they must grow thirtyfold")
# constant_target
SAME_TARGET_STEPS = Threshold(20, "steps in which all targets are one number: more than a class in order takes, mostly")
# token_mean_of_means
UNEQUAL_TARGETS = Threshold(1.5, "most targets that count over fewest, among the micro-batches of a step")
UNEQUAL_GRAVE = Threshold(3.0, "the same: a target in one micro-batch weighs three times one in another")
# future_leak
NEXT_TOKEN_SHARE = Threshold(0.99, "of the targets: all of them, but for the ends of texts")
AHEAD_SHARE = Threshold(0.05, "of the weight; with a mask none, and fresh attention without one has nearly half there")
# padding_dominates
VALID_SHARE = Threshold(0.5, "of the targets that count")
COUNTED_SHARE = Threshold(0.5, "of the targets that are padding and count: more than about words, the loss is about it")
# bad_batch_spike, loss_spike
SPIKE_MADS = Threshold(10.0, "median absolute deviations above the median of the losses around it")
SPIKE_RATIO = Threshold(2.0, "times the median: small losses have small deviations")
# starved_loader
WAIT_SHARE = Threshold(0.3, "of the step's time spent waiting for data")
WAIT_MOSTLY = Threshold(0.5, "of the time: a loop that waits longer than it works is worth a warning")
WAIT_SECONDS = Threshold(0.02, "seconds a step: below, the waiting is of a tiny program's own making")
WAIT_STEPS = Threshold(30, "steps")

# ---------------------------------------------------------------- outcomes
# loss_divergence
DIVERGED = Threshold(2.0, "times the best level reached")
DIVERGED_STEPS = Threshold(20, "losses in a row above it")
# loss_oscillation
OSCILLATION = Threshold(0.4, "spread from one step to the next over the level of the loss")
# loss_plateau, not_learning, underfitting
PLATEAU_STEPS = Threshold(200, "losses without progress")
NOT_LEARNING_STEPS = Threshold(100, "losses without progress since the start")
LEARNT = Threshold(0.02, "of the loss of guessing that a noisy loss must lie below it to have learnt, for certain")
NOISY_LOSS = Threshold(0.3, "of the first loss: where as much could be learnt unnoticed, nothing can be said")
UNDERFIT = Threshold(0.8, "of the first loss left at the end")
# overfitting
OVERFIT_EVALS = Threshold(3, "evaluations in a row above the best")
OVERFIT_RISE = Threshold(1.1, "times the best validation loss")
BY_HEART = Threshold(0.01, "training loss over validation loss: what is trained on is known by heart")
NOT_MORE = Threshold(0.5, "of the loss of guessing, in validation: what was learnt by heart helps with nothing else")
OVERFIT_GRAVE = Threshold(1.5, "times the best validation loss")
