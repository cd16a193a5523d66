"""Rules about how batches are drawn and delivered."""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import signals
from sonde.core.facts import CallFacts
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import generalises, validation_loss
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.rules.data import identities, model_input
from sonde.diagnosis.rules.program import repeated_seed
from sonde.diagnosis.track import Track, Values

BATCH_LOOKS = Threshold(5, "persistence: batches in a row")
BATCH_ENTROPY = Threshold(0.5, "entropy of a batch's labels over what its size allows: half is missing")
BATCH_ENTROPY_LAST = Threshold(0.8, "the same for the last batches: by then they should be mixed, if they ever are")
BATCH_SIZE = Threshold(8, "labels of a batch: the entropy of fewer varies too much")
LABELS_MIXED = Threshold(0.3, "nats of entropy of all labels: of less there is little to mix")


@rule(
    "not_shuffled",
    needs=[
        signals.LABEL_ENTROPY,
        signals.RUNNING_LABEL_ENTROPY,
        signals.VALID_TARGETS,
        signals.WEIGHTS_SET,
        "facts.losses",
    ],
    explains=[
        "class_imbalance_collapse",
        "constant_output",
        "exploding_gradient",
        "lr_too_high",
        "overfitting",
        "vanishing_gradient",
    ],
    fix="Pass shuffle=True to the DataLoader, or shuffle the indices of every epoch.",
    refute="Print the labels of three batches: if each has all classes, this finding is wrong.",
    since=BATCH_LOOKS,
)
def not_shuffled(case: Case) -> Found | None:
    """The data are not shuffled: batches hold only one or a few classes.

    The labels of a batch are far less mixed than those of all batches together. Not judged where weights are set anew
    every few steps: each client of federated training has data of its own.
    """
    if _sets_weights(case):
        return None
    batch = case.need_vital(signals.LOSS, signals.LABEL_ENTROPY)
    running = case.need_vital(signals.LOSS, signals.RUNNING_LABEL_ENTROPY)
    sizes = case.need_vital(signals.LOSS, signals.VALID_TARGETS)
    loss = case.loss_facts("cross_entropy", "nll_loss")
    if loss is None or len(loss.target_shape) != 1:  # the labels of texts and images are sequences
        return None
    looks = int(BATCH_LOOKS)
    if len(batch) < looks or len(batch) != len(running) or len(batch) != len(sizes):
        return None
    size = float(np.median(sizes.numbers()))
    mixed = float(running.numbers()[-1])
    if size < BATCH_SIZE or mixed < LABELS_MIXED:
        return None
    recent = batch.numbers()[-4 * looks :]
    expected = min(mixed, float(np.log(size)))
    ratio = float(recent.mean()) / expected
    if ratio > BATCH_ENTROPY or np.median(recent[-looks:]) > BATCH_ENTROPY_LAST * expected:
        return None
    return Found(
        step=int(batch.steps[0]),
        sites=("loader",),
        evidence=(
            below("entropy of a batch's labels over what it should be", ratio, BATCH_ENTROPY, f"{batch.key} mean"),
            fact("entropy of all labels so far, in nats", mixed, f"{running.key} mean"),
            above("batches compared", len(recent), BATCH_LOOKS),
        ),
        cause="The data are not shuffled: batches hold only one or a few classes, and the model forgets the others.",
    )


def _sets_weights(case: Case) -> bool:
    """Return whether weights were written more than once between steps, but not between all of them."""
    tracks = (case.vital(optimizer.name, signals.WEIGHTS_SET) for optimizer in case.facts.optimizers)
    times = max((float(track.numbers()[-1]) for track in tracks if track is not None and len(track)), default=0.0)
    return 1 < times < case.num_steps / 2


SAME_STEPS = Threshold(10, "persistence: steps with the same batch")
MOST_STEPS = Threshold(0.8, "share of steps, or of repetitions, that count as all but a few")


@rule(
    "same_batch_every_step",
    needs=[signals.BATCH_MARK, signals.DATA_WAIT, "input", "facts.loader", "facts.program"],
    explains=["duplicate_data_workers", "overfitting", "seed_reset_in_loop"],
    exact=True,
    fix="Iterate over the loader: next(iter(loader)) restarts it at each step.",
    refute="Compare two batches element by element: if they differ, this finding is wrong.",
    since=SAME_STEPS,
)
def same_batch_every_step(case: Case) -> Found | None:
    """Every step sees the same batch."""
    track = model_input(case)
    known = identities(case, track)
    known = known[known != -1]
    if len(known) < SAME_STEPS or (known != known[0]).any():
        return None
    loader = case.facts.loader
    length = None if loader is None else loader.settings.get("length")
    if length == 1:  # the batch is the whole set
        return None
    # A deliberate test fetches the batch once; a loop that asks the loader at every step expects others.
    waits = case.vital(signals.LOOP, signals.DATA_WAIT)
    asked = waits is not None and len(_asked(waits)) >= MOST_STEPS * len(known)
    seed = repeated_seed(case)
    if seed is not None:
        return _drawn_again(track, len(known), seed)
    more = _evaluated_samples(case, track)
    by_heart = more and _fails_to_generalise(case)
    why = "as in full-batch training or an overfitting test."
    if by_heart:
        why = f"while the model is evaluated on {more} samples at a time: it learns that one batch by heart."
    return Found(
        severity="warning" if asked or by_heart else "info",
        step=int(track.steps[0]),
        sites=("loader",),
        evidence=(
            above("steps with the same batch", len(known), SAME_STEPS, f"{track.key} mean"),
            fact("steps at which the loader was asked for a batch", 0 if waits is None else len(_asked(waits))),
        ),
        cause="Every step asks the loader and gets the same batch: the loader is restarted each time."
        if asked
        else f"Every step sees the same batch, {why}",
    )


def _fails_to_generalise(case: Case) -> bool:
    return case.learning.state == "improving" and validation_loss(case) is not None and not generalises(case)


def _evaluated_samples(case: Case, track: Track) -> int:
    """Return how many samples an evaluation has at a time, if those are more than the batch that is trained on.

    Full-batch training has more samples than it holds out, unless it is evaluated at points in between.
    """
    evaluated = [each.site for each in case.of("input", "eval") if each.site.name == track.name]
    size = track.site.shape[0] if track.site.shape else math.inf
    return max((each.shape[0] for each in evaluated if each.shape and each.shape[0] > size), default=0)


def _drawn_again(track: Track, steps: int, seed: CallFacts) -> Found:
    return Found(
        step=int(track.steps[0]),
        sites=("(loop)", "loader"),
        evidence=(above("steps with the same batch", steps, SAME_STEPS, f"{track.key} mean"),),
        cause=f"Every step draws the same batch, since {seed.about}({seed.data.get('seed')}){seed.place} sets the "
        "same seed before each.",
        fix="Set the seed once, before the loop.",
    )


SAME_ORDERS = Threshold(2, "passes over the data in a row in one order: sampler and seed would give another")


@rule(
    "same_order_every_epoch",
    needs=["facts.program"],
    exact=True,
    fix="Call sampler.set_epoch(epoch) before each epoch iterates over the loader.",
    refute="Print the indices that the sampler yields in two epochs: if their order differs, this finding is wrong.",
)
def same_order_every_epoch(case: Case) -> Found | None:
    """Every epoch has the same order although a DistributedSampler shuffles: `set_epoch` is not called.

    A DistributedSampler seeds its order by its seed and its epoch. Both stayed the same in passes that were trained on.
    """
    for call in case.facts.calls("loader.pass"):
        passes = call.data.get("same_order")
        if isinstance(passes, int) and passes >= SAME_ORDERS:
            return Found(
                step=call.steps[-1],
                sites=("loader",),
                evidence=(above("passes over the data in the same order", passes, SAME_ORDERS),),
                cause=f"Every epoch{call.place} has the same order: the DistributedSampler shuffles by its epoch, "
                "which nothing sets.",
            )
    return None


DRAWN_SHARE = Threshold(0.2, "distinct rows over what uniform sampling from the whole data would give")
# These draw every sample once: if rows repeat, the data has copies.
_COMPLETE = ("RandomSampler", "SequentialSampler", "DistributedSampler")
_COUNTED = 1024


@rule(
    "sampler_draws_few",
    needs=[signals.DISTINCT_ROWS, "input", "facts.loader", "facts.program"],
    explains=["duplicate_data_workers", "overfitting", "same_batch_every_step"],
    fix="Give WeightedRandomSampler a weight for each sample (class_weights[labels]), not one for each class.",
    refute="Collect the indices of one epoch: if they cover most of the data, this finding is wrong.",
)
def sampler_draws_few(case: Case) -> Found | None:
    """The sampler draws the same few samples again and again, or the dataset says that it has only a few."""
    if (found := _short_length(case)) is not None:
        return found
    loader = case.facts.loader
    length = None if loader is None else loader.settings.get("dataset_length")
    if loader is None or not isinstance(length, int) or loader.settings.get("sampler") in _COMPLETE:
        return None
    track = model_input(case)
    distinct = float(case.need_vital(track.name, signals.DISTINCT_ROWS).numbers()[-1])
    # Drawing uniformly n times from N gives N (1 - (1 - 1/N)^n) distinct samples on average.
    expected = -length * math.expm1(_COUNTED * math.log1p(-1 / length)) if length > 1 else 1.0
    if distinct >= DRAWN_SHARE * expected:
        return None
    return Found(
        step=1,
        sites=("loader",),
        evidence=(
            below("distinct rows over what uniform sampling gives", distinct / expected, DRAWN_SHARE),
            fact(f"distinct rows among the first {_COUNTED} or so", distinct),
            fact("samples in the data", length),
        ),
        cause=f"{loader.settings.get('sampler')} draws the same {distinct:.0f} samples again and again, of {length}: "
        "the model never sees the others.",
    )


SHORT_PASSES = Threshold(2, "passes that were trained on and had a single batch that is not full")


def _short_length(case: Case) -> Found | None:
    """Find a dataset whose length is the number of its lists, each of which holds more than that."""
    for call in case.facts.calls("loader.pass"):
        length, size, hidden, trained = (
            int(value) if isinstance(value := call.data.get(name), int) else 0
            for name in ("dataset_length", "batch_size", "hidden", "trained")
        )
        if trained >= SHORT_PASSES and 0 < length < size and hidden >= size:
            return Found(
                step=call.steps[0],
                sites=("loader",),
                evidence=(
                    below("samples that len(dataset) tells", length, size),
                    fact("samples of a full batch", size),
                    above("items in each of the lists that the dataset holds", hidden, size),
                ),
                cause=f"len(dataset) is {length}, the number of lists that {call.data.get('dataset_kind')} holds, each "
                f"of which has {hidden} items: every pass sees the same {length} samples.",
                fix="Return the number of samples from __len__, as in len(self.items[0]).",
                refute="Print len(dataset): if it is the number of samples, this finding is wrong.",
            )
    return None


DUPLICATE_SHARE = Threshold(0.3, "share of batches that equal one of the few before; 0 where data is split")
DUPLICATE_BATCHES = Threshold(8, "batches to compare")


@rule(
    "duplicate_data_workers",
    needs=[signals.BATCH_MARK, signals.DATA_WAIT, "input", "facts.loader"],
    exact=True,
    fix="Split the data in __iter__ by torch.utils.data.get_worker_info(): worker k takes every n-th item.",
    refute="Count how often each sample comes in one epoch: if each comes once, this finding is wrong.",
    since=DUPLICATE_BATCHES,
)
def duplicate_data_workers(case: Case) -> Found | None:
    """Every worker of the loader delivers the same data.

    Only batches count for which the loader was asked: a program may use one for several steps.
    """
    workers = _workers(case)
    if workers < 2:
        raise NotMeasured("a data loader with several workers")
    track = model_input(case).last(64)
    waits = case.vital(signals.LOOP, signals.DATA_WAIT)
    fetched = np.ones(len(track), np.bool_) if waits is None else np.isin(track.steps, _asked(waits))
    known, steps = identities(case, track)[fetched], track.steps[fetched]
    if len(known) < DUPLICATE_BATCHES or (known == -1).any() or len(set(known.tolist())) <= 2:
        return None
    repeats = np.zeros(len(known), np.bool_)
    for lag in range(1, workers):
        repeats[lag:] |= known[lag:] == known[:-lag]
    share = float(repeats.mean())
    if share < DUPLICATE_SHARE:
        return None
    return Found(
        step=int(steps[repeats][0]),
        sites=("loader",),
        evidence=(
            above("share of batches that equal one of the few before", share, DUPLICATE_SHARE, f"{track.key} mean"),
            fact("workers of the loader", float(workers)),
        ),
        cause="Batches come several times: each worker of the loader iterates over the whole dataset.",
    )


def _asked(waits: Track) -> NDArray[np.int64]:
    """Return the steps at which the loader was asked for a batch."""
    return waits.steps[waits.numbers() > 0]


def _workers(case: Case) -> int:
    count = None if case.facts.loader is None else case.facts.loader.settings.get("num_workers")
    return count if isinstance(count, int) else 0


@rule(
    "worker_rng_identical",
    needs=["facts.loader"],
    exact=True,
    fix=(
        "Seed it per worker in worker_init_fn, or create the generator in __iter__ or __getitem__ from "
        "torch.initial_seed()."
    ),
    refute="Return a random number from __getitem__: if those of two workers differ, this finding is wrong.",
    since=0,
)
def worker_rng_identical(case: Case) -> Found | None:
    """Workers of the loader draw the same random numbers."""
    loader = case.facts.loader
    if loader is None:
        raise NotMeasured("the data loader")
    workers = loader.settings.get("num_workers")
    if not loader.settings.get("generator_in_dataset") or not isinstance(workers, int) or workers < 2:
        return None
    if loader.settings.get("worker_init_fn"):
        return None  # it probably seeds the generators
    return Found(
        step=0,
        sites=("loader",),
        evidence=(
            above("workers that get a copy of it", workers, 2),
            fact("random generators in the dataset", 1),
        ),
        cause="The dataset holds a random generator: each worker gets a copy in the same state, so that all draw the "
        "same augmentations.",
    )


SPIKE_MADS = Threshold(10.0, "median absolute deviations above the median of the losses around it")
SPIKE_RATIO = Threshold(2.0, "loss over that median: small losses have small deviations")
SPIKE_FLOOR = Threshold(1e-3, "least deviation over the median: losses that hardly vary have none to measure by")
SPIKE_LOSSES = Threshold(20, "losses: of fewer the spread is not known")
SPIKE_WARNS = Threshold(3, "persistence: spikes with the same batch that are worth a warning")


@rule(
    "bad_batch_spike",
    needs=[signals.BATCH_MARK, "input"],
    explains=["exploding_gradient"],
    fix="Inspect its samples for wrong labels, broken files or other units.",
    refute="Compute the loss of each of its samples: if none is far above the rest, this finding is wrong.",
    since=SPIKE_LOSSES,
)
def bad_batch_spike(case: Case) -> Found | None:
    """The loss spikes each time the same batch comes."""
    found = case.need_loss()
    track = model_input(case)
    spikes = set(found[0][spike_flags(found[1])].tolist())
    batches = dict(zip(track.steps.tolist(), identities(case, track).tolist(), strict=True))
    hit = Counter(batches[step] for step in spikes if batches.get(step, -1) != -1)
    if not hit:
        return None
    batch, times = hit.most_common(1)[0]
    shown = [step for step, each in batches.items() if each == batch]
    # Where there is only one batch, its first losses are high because nothing was learnt yet.
    if times < 2 or times < MOST_STEPS * len(shown) or len({*batches.values()} - {-1}) < 2:
        return None
    return Found(
        severity="warning" if times >= SPIKE_WARNS else "info",
        step=min(shown),
        sites=("loader",),
        evidence=(
            above("spikes of the loss with the same batch", times, 2, "loss:scalar mean"),
            fact("times that batch was shown", len(shown)),
        ),
        cause=f"The loss spikes each time the same batch comes (steps {', '.join(map(str, sorted(shown)[:4]))}).",
        data={"steps": sorted(shown)[:16]},
    )


def spike_flags(losses: Values) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return which losses are far above those around them."""
    flags = np.zeros(len(losses), np.bool_)
    if len(losses) < SPIKE_LOSSES:
        return flags
    width = 25
    padded = np.pad(losses, width, mode="reflect" if len(losses) > width else "edge")
    around = np.lib.stride_tricks.sliding_window_view(padded, 2 * width + 1)
    middle = np.median(around, axis=1)
    spread = np.median(np.abs(around - middle[:, None]), axis=1)
    with np.errstate(invalid="ignore"):
        high = losses > middle + SPIKE_MADS * np.maximum(spread, SPIKE_FLOOR * np.abs(middle))
        result: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = high & (losses > SPIKE_RATIO * np.abs(middle))
    return result


WAIT_STEPS = Threshold(30, "persistence: steps")
WAIT_SECONDS = Threshold(0.02, "seconds per step: below, the wait is the fixed cost of a tiny program")
WAIT_SHARE = Threshold(0.3, "share of the step's time spent waiting for data")
WAIT_MOSTLY = Threshold(0.5, "the same: a loop that waits longer than it works is worth a warning")
QUARTERS: Final = 4


@rule(
    "starved_loader",
    needs=[signals.DATA_WAIT, signals.STEP_TIME, "facts.loader"],
    fix="Use more workers (num_workers=4, persistent_workers=True), cache decoded samples, or prepare them once.",
    refute="Train on one batch kept in memory: if steps are as slow, this finding is wrong.",
    since=WAIT_STEPS,
)
def starved_loader(case: Case) -> Found | None:
    """Training waits for its data.

    A good part of the time goes into waiting for the loader, in every quarter of the last steps.
    """
    waits = case.need_vital(signals.LOOP, signals.DATA_WAIT).last(64)
    times = case.need_vital(signals.LOOP, signals.STEP_TIME).last(64)
    _, at, of = np.intersect1d(waits.steps, times.steps, return_indices=True)
    if len(at) < WAIT_STEPS:
        return None
    waited, took = waits.numbers()[at], times.numbers()[of]
    each = float(np.median([part.mean() for part in np.array_split(waited, QUARTERS)]))
    share = min(map(_share, np.array_split(waited, QUARTERS), np.array_split(took, QUARTERS)))
    if share < WAIT_SHARE or each < WAIT_SECONDS:
        return None
    workers = None if case.facts.loader is None else case.facts.loader.settings.get("num_workers")
    return Found(
        severity="warning" if share >= WAIT_MOSTLY else "info",
        step=int(waits.steps[0]),
        sites=("loader",),
        evidence=(
            above("share of the step spent waiting for data", share, WAIT_SHARE, f"{waits.key} mean"),
            above("seconds of waiting per step", each, WAIT_SECONDS),
            fact("workers of the loader", workers if isinstance(workers, int) else float("nan")),
        ),
        cause=f"The loop waits for its data for {share:.0%} of the time.",
    )


def _share(waited: Values, took: Values) -> float:
    """Return the share of time spent waiting, without the longest waits: a busy machine causes a few."""
    usual = np.argsort(waited)[: len(waited) - max(1, len(waited) // 8)]
    total = float(took[usual].sum())
    return float(waited[usual].sum()) / total if total > 0 else 0.0
