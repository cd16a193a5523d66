"""What a taped step shows of whether each target belongs to its sample, and to the part of the data it is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import signals
from sonde.core.tape import Op, references
from sonde.diagnosis.rule import Found, Threshold, fact, on_tape
from sonde.diagnosis.tape.contracts import arguments
from sonde.diagnosis.tape.numbers import MAX_ELEMENTS, Numbers, TapedNumbers
from sonde.diagnosis.tape.reading import RESHAPING, TapeReading
from sonde.diagnosis.tape.targets import MIN_SAMPLES


@on_tape
def crossed_rows(reading: TapeReading) -> Found | None:
    """Find targets of samples that the model was not given in the same row: each row of the data is followed.

    One row of the inputs is changed, and one of the targets, and what is computed of them is computed again.
    """
    inputs = [each for each in reading.tape.inputs_of_root() if reading.tape.values[each].shape]
    firsts = {reading.tape.values[each].shape[0] for each in inputs}
    rows = firsts.pop() if len(firsts) == 1 else 0
    pairs = [
        (target, op)
        for output, target, op in _judged(reading)
        if all(reading.tape.values[each].shape[:1] == (rows,) for each in (output, target))
    ]
    targets = [target for target, _ in pairs if not _is_modelled(reading, target)]
    if rows < MIN_FOLLOWED or not inputs or not targets or _reorders_outputs(reading, rows):
        return None
    for given, wanted in _tables(reading, inputs, targets):
        one, two = _index_into(reading, given), _index_into(reading, wanted)
        if one is not None and two is not None and len(one) == len(two) == rows:
            if len(ahead := np.unique(two - one)) == 1 and ahead[0]:
                continue  # the targets lie so many steps ahead
            missing = int((~np.isin(one, two)).sum())
            if missing > rows / 2:
                return _crossed(reading, pairs[0][1], rows, missing)
        moved = [
            (_moved_rows(reading, given, row, inputs), _moved_rows(reading, wanted, row, targets))
            for row in _used_rows(reading, given, rows)
        ]
        known = [(inputs_of, targets_of) for inputs_of, targets_of in moved if inputs_of and targets_of]
        wrong = [rest for inputs_of, targets_of in known if (rest := targets_of - inputs_of)]
        if len(known) >= MIN_FOLLOWED and len(wrong) > len(known) / 2:
            return _crossed(reading, pairs[0][1], len(known), len(wrong))
    return None


@on_tape
def indexed_apart(reading: TapeReading) -> Found | None:
    """Find rows of an output that are compared with other rows of the labels: each side has an index of its own."""
    for output, target, op in reading.compared():
        one, two = (reading.tape.producer(reading.plain(each).id) for each in (output, target))
        if one is None or two is None or not one.kind == two.kind == "index" or one.module or two.module:
            continue
        first, second = _rows_of(reading, one), _rows_of(reading, two)
        sources = [reading.tape.values[each.args["self"]["v"]] for each in (one, two)]
        if first is None or second is None or len(first) != len(second) or len(first) < MIN_FOLLOWED:
            continue
        # Targets may lie some steps ahead; ranges that do not even overlap are parts of the data, as for a test.
        is_ahead = len(np.unique(second - first)) == 1 and not np.ptp(first) < len(first) <= abs(second[0] - first[0])
        missing = int((~np.isin(first, second)).sum())
        if sources[0].shape[:1] == sources[1].shape[:1] and not is_ahead and missing > len(first) / 2:
            return _crossed(reading, op, len(first), missing)
    return None


def _rows_of(reading: TapeReading, op: Op) -> Numbers | None:
    """Return which rows an operation takes, by their numbers or by a mask; None if it indexes anything else."""
    chosen = references(op.args.get("indices"))
    content = reading.numbers.of(chosen[0]) if len(chosen) == 1 else None
    if content is None or content.ndim != 1:
        return None
    return np.flatnonzero(content) if content.dtype.kind == "b" else content


def _crossed(reading: TapeReading, op: Op, known: int, wrong: int) -> Found:
    return Found(
        severity="critical",
        sites=(signals.LOSS, "(data)"),
        evidence=(fact("rows that were followed", known), fact("with targets elsewhere", wrong)),
        cause=f"Inputs and targets are taken in different orders{reading.where(op)}: of {known} samples that were "
        f"followed through the step, {wrong} are the target of rows that the model was not given them in. Labels do "
        "not belong to their inputs.",
        fix="Use one index, or one permutation, for inputs and targets.",
        refute="Print both indices: if they are equal, this finding is wrong.",
    )


def _index_into(reading: TapeReading, given: int) -> Numbers | None:
    """Return the only list of row numbers by which rows are taken of some data."""
    uses = [op for op in reading.tape.consumers(given) if op.phase == "forward"]
    chosen = [each for op in uses for name in ("indices", "index") for each in references(op.args.get(name))]
    content = reading.numbers.of(chosen[0]) if len(uses) == len(chosen) == 1 else None
    return content if content is not None and content.dtype.kind in "iu" and content.ndim == 1 else None


MIN_FOLLOWED: Final = 4
_MOST_FOLLOWED: Final = 8
_DATA_ROLES: Final = ("batch", "input", "target", "constant", "carried")


def _is_modelled(reading: TapeReading, value: int) -> bool:
    """Return whether a value was computed by a network, as the value of a next state is."""
    return any(op.module for op in reading.makers(value))


def _judged(reading: TapeReading) -> Iterator[tuple[int, int, Op]]:
    """Yield what is compared: also a log-softmax that is multiplied by soft labels."""
    yield from reading.compared()
    for op in reading.forward_ops:
        pair = [each for each in (op.input("self"), op.input("other")) if each is not None]
        if op.kind == "mul" and not op.module and len(pair) == 2:
            one, two = sorted(pair, key=lambda each: not reading.tape.values[each].requires_grad)
            maker = reading.origin(one)
            is_pair = reading.tape.values[one].requires_grad and not reading.tape.values[two].requires_grad
            if is_pair and maker is not None and maker.kind == "_log_softmax":
                yield one, two, op


def _tables(reading: TapeReading, inputs: list[int], targets: list[int]) -> Iterator[tuple[int, int]]:
    """Yield data that inputs are computed of, and other data of as many rows that targets are."""
    one, two = (
        [
            reading.tape.values[each]
            for each in sorted(reading.tape.ancestors(values))
            if reading.tape.values[each].is_given
            and reading.tape.values[each].role in _DATA_ROLES
            and reading.tape.values[each].saved
            and reading.tape.values[each].dtype != "bool"
            and not _is_index(reading, each)
        ]
        for values in (inputs, targets)
    )
    shared = {each.id for each in one} & {each.id for each in two}
    for given in one:
        for wanted in two:
            if not shared and given.shape[:1] == wanted.shape[:1] and given.shape and given.shape[0] >= MIN_FOLLOWED:
                yield given.id, wanted.id


def _is_index(reading: TapeReading, value: int) -> bool:
    after = reading.tape.descendants(value, through=lambda op: op.kind in (*RESHAPING, "slice", "select", "unbind"))
    return any(
        each in references(op.args.get(name))
        for each in after
        for op in reading.tape.consumers(each)
        for name in ("indices", "index")
    )


def _used_rows(reading: TapeReading, given: int, rows: int) -> list[int]:
    """Return some rows of data that the step uses."""
    count = reading.tape.values[given].shape[0]
    if count <= rows:
        return list(range(min(count, _MOST_FOLLOWED)))
    for op in reading.tape.consumers(given):
        chosen = [each for name in ("indices", "index") for each in references(op.args.get(name))]
        content = reading.numbers.of(chosen[0]) if len(chosen) == 1 else None
        if content is not None and content.dtype.kind in "iu" and content.ndim == 1:
            return [int(each) for each in np.unique(content)[:_MOST_FOLLOWED]]
    return []


def _moved_rows(reading: TapeReading, given: int, row: int, values: list[int]) -> set[int]:
    """Return the rows of some values that change with one row of data; none if that cannot be computed."""
    content = reading.tape.tensor(given)
    if content is None or content.size > MAX_ELEMENTS:
        return set()
    differs = (content != content[row]).reshape(len(content), -1).any(axis=1)
    changed = np.array(content)
    changed[row] = content[int(differs.argmax())]  # a row that occurs: a number that does not may be out of range
    again = TapedNumbers(reading.tape, {given: changed})
    found: set[int] = set()
    for value in values:
        if given not in reading.tape.ancestors(value):
            continue
        one, two = reading.numbers.of(value), again.of(value)
        if one is None or two is None:
            return set()
        is_same = np.isclose(one, two, rtol=1e-4, atol=1e-7, equal_nan=True)  # what was saved was rounded otherwise
        found |= set(np.flatnonzero((~is_same).reshape(len(one), -1).any(axis=1)).tolist())
    return found


def _reorders_outputs(reading: TapeReading, rows: int) -> bool:
    """Return whether rows of outputs are taken by an index on their way to the loss."""
    after = reading.tape.descendants(reading.tape.outputs_of_root(), through=lambda op: not op.in_model)
    return any(
        op.kind in ("index", "index_select", "sort", "topk", "cat") and op.input("self") in after and not op.in_model
        for op in reading.forward_ops
    )


SURE = Threshold(4.0, "standard errors below the agreement that the second target claims: by chance in 1 of 30,000")


@on_tape
def disagreeing_targets(reading: TapeReading) -> Found | None:
    """Find classes and probabilities for the same samples that agree no better than by chance.

    Probabilities claim how often they are right; rows of another order are right as often as a guess.
    """
    labels = [loss for loss in reading.losses if loss.kind == "cross_entropy" and loss.target is not None]
    answers = set(reading.tape.outputs_of_root())
    for given in arguments(reading):
        if given.role != "target" or given.function not in ("kl_div", "cross_entropy") or len(given.shape) != 2:
            continue
        chances = given.numbers
        own = set() if given.other is None else answers & reading.tape.ancestors(given.other)
        for loss in labels if chances is not None and chances.dtype.kind == "f" else ():
            op, wanted = loss.op, None if loss.target is None else reading.numbers.of(loss.target)
            if chances is None or wanted is None or wanted.shape != chances.shape[:1] or wanted.min() < 0:
                continue
            if not own or own != answers & reading.tape.ancestors(loss.value):
                continue  # of other samples
            guess, claimed = chances.argmax(axis=1), chances.max(axis=1)
            right, spread = (guess == wanted).mean(), np.sqrt((claimed * (1 - claimed)).sum()) / len(wanted)
            classes = np.arange(chances.shape[1])
            chance = float(((guess[:, None] == classes).mean(axis=0) * (wanted[:, None] == classes).mean(axis=0)).sum())
            error = float(np.sqrt(chance * (1 - chance) / len(wanted)))
            if right > chance + 2 * error or claimed.mean() - right < SURE * max(float(spread), error):
                continue
            return Found(
                severity="critical",
                sites=(signals.LOSS, "(data)", signals.LOOP),
                evidence=(
                    fact("share of samples in which both targets agree", float(right)),
                    fact("share by chance", chance),
                    fact("share that the probabilities claim", float(claimed.mean())),
                ),
                cause=f"Two targets of the same samples do not belong together: labels{reading.where(op)} and "
                f"probabilities{reading.where(given.op)} agree in {right:.0%} of the samples, as by chance, though the "
                f"probabilities claim {claimed.mean():.0%}. They come from different orders of the data.",
                fix="Compute them for the batch at hand, or look them up by the index of each sample.",
                refute="Compare the largest probability of ten samples with their labels: if they agree, this "
                "finding is wrong.",
            )
    return None


LOCATED = Threshold(4.0, "standard errors by which edges of a mask fit those of its picture better than noise")
SHARP = Threshold(0.3, "correlation of these edges where they fit best: what a mask marks can be seen in its picture")
STAYS = Threshold(0.75, "share of masks that fit where they lie, each at least as well as this share of its best fit")
_MOST_PICTURES: Final = 16
_LARGEST: Final = 1 << 16


@on_tape
def misaligned(reading: TapeReading) -> Found | None:
    """Find masks that fit their own pictures, but moved or mirrored, as where both are cropped or flipped apart."""
    for output, target, op in reading.compared():
        masks = _masks_of(reading, target)
        if masks is None:
            continue
        before, used = reading.tape.ancestors(target), reading.tape.ancestors(output)
        for value in reading.tape.inputs_of_root():
            shape = reading.tape.values[value].shape
            if len(shape) != 4 or (shape[0], *shape[2:]) != masks.shape or value in before or value not in used:
                continue  # of another of the batches of a step
            pictures = reading.numbers.of(value)
            found = None if pictures is None or pictures.dtype.kind != "f" else _displaced(pictures, masks)
            if found is not None:
                return Found(
                    severity="critical",
                    sites=("(data)", "loader", signals.LOSS),
                    evidence=(
                        fact("share of masks that fit best where they lie", found[0]),
                        fact("correlation of their edges with the picture where they lie", found[1]),
                        fact("correlation moved or mirrored", found[2]),
                    ),
                    cause=f"Pictures and masks do not lie on each other{reading.where(op)}: {1 - found[0]:.0%} of the "
                    "masks fit their pictures better if they are moved or mirrored. Both were cropped or flipped "
                    "apart, so labels do not belong to their pixels.",
                    fix="Draw the random crop or flip once, and apply it to picture and mask.",
                    refute="Draw ten masks over their pictures: if they fit, this finding is wrong.",
                )
    return None


def _masks_of(reading: TapeReading, target: int) -> Numbers | None:
    """Return targets that mark some pixels of each picture, as 0 and 1."""
    content = reading.numbers.of(target)
    if content is None or content.ndim not in (3, 4) or (content.ndim == 4 and content.shape[1] != 1):
        return None
    marks: Numbers = (content.reshape(len(content), *content.shape[-2:]) > 0).astype(np.float64)
    is_binary = content.dtype.kind in "iub" or np.unique(content).size == 2
    is_usable = len(marks) >= MIN_SAMPLES and min(marks.shape[1:]) >= MIN_SAMPLES and marks[0].size <= _LARGEST
    return marks if is_binary and is_usable and 0 < marks.mean() < 1 else None


def _displaced(pictures: Numbers, masks: Numbers) -> tuple[float, float, float] | None:
    """Return the share of masks that fit where they lie, how well they do, and how well where they fit best."""
    chosen = np.flatnonzero(masks.any(axis=(1, 2)) & ~masks.all(axis=(1, 2)))[:_MOST_PICTURES]
    if len(chosen) < MIN_SAMPLES:
        return None
    pictures, masks = np.asarray(pictures[chosen], np.float64), masks[chosen]
    edges, marks = _edges(pictures.mean(axis=1)), _edges(masks)
    own = _fits_at(edges, marks)
    near = np.max([np.roll(own, (row, column), (1, 2))[:, 0, 0] for row in (-1, 0, 1) for column in (-1, 0, 1)], axis=0)
    mirrored = [_fits_at(edges, each)[:, 0, 0] for each in (marks[:, ::-1], marks[:, :, ::-1])]
    best = np.maximum(own.max(axis=(1, 2)), np.max(mirrored, axis=0))
    noise = np.random.default_rng(0).permuted(edges.reshape(len(edges), -1), axis=1).reshape(edges.shape)
    gain = best - _fits_at(noise, marks).max(axis=(1, 2))
    stays = float((near >= STAYS * best).mean())
    is_located = gain.mean() > LOCATED * gain.std() / np.sqrt(len(gain)) and best.mean() > SHARP
    return (stays, float(own[:, 0, 0].mean()), float(best.mean())) if is_located and stays < STAYS else None


def _edges(pictures: Numbers) -> Numbers:
    rows, columns = np.gradient(pictures, axis=(1, 2))
    found: Numbers = np.hypot(rows, columns)
    return found


def _fits_at(pictures: Numbers, masks: Numbers) -> Numbers:
    """Return the correlation of each picture with its mask, moved by every number of rows and columns."""
    one, two = (each - each.mean(axis=(1, 2), keepdims=True) for each in (pictures, masks))
    scale = np.sqrt(np.square(one).sum(axis=(1, 2)) * np.square(two).sum(axis=(1, 2))) + 1e-12
    product = np.fft.ifft2(np.fft.fft2(one) * np.conj(np.fft.fft2(two))).real
    found: Numbers = product / scale[:, None, None]
    return found


_ORDERS: Final = frozenset({"sort", "argsort", "randperm", "topk"})


@on_tape
def reordered(reading: TapeReading) -> Found | None:
    """Find inputs or targets that are put in another order in the step, while what they belong to is not."""
    return _reordered_inputs(reading) or _reordered_targets(reading)


def _reordered_targets(reading: TapeReading) -> Found | None:
    """Find targets all rows of which are taken in a random order that nothing else follows."""
    pairs = list(_judged(reading))
    for output, target, loss in pairs:
        rows = reading.tape.values[target].shape[:1]
        answers = _answers_in(reading, output)
        others = [reading.tape.ancestors(each) for out, each, _ in pairs if answers & _answers_in(reading, out)]
        for op in reading.makers(target, lambda each: not each.in_model):
            order, source = _drawn_order(reading, op), op.input("self")
            if order is None or source is None or reading.tape.values[order].shape != rows:
                continue
            # Answers of a model in another order, or targets beside their own, are wrong on purpose.
            is_answer = source in reading.of_weights and not reading.is_bootstrap(source)
            is_with_own = any(source in each and order not in each for each in others)
            if not is_answer and not is_with_own and _keeps_order(reading, output, order):
                return _in_another_order(reading, op, loss, rows[0])
    return None


def _answers_in(reading: TapeReading, output: int) -> set[int]:
    """Return what models returned that an output was computed of since."""
    within = reading.tape.ancestors(output, through=lambda op: not op.in_model and op.phase != "backward")
    return within.intersection(reading.tape.outputs_of_root()) or {output}


def _drawn_order(reading: TapeReading, op: Op) -> int | None:
    """Return the random permutation by which an operation takes all rows, if it does."""
    chosen = [*references(op.args.get("indices")), *references(op.args.get("index"))]
    source = op.input("self")
    if op.kind not in ("index", "index_select") or source is None or len(chosen) != 1:
        return None
    maker, order = reading.origin(chosen[0]), reading.tape.values[chosen[0]]
    is_all = maker is not None and maker.kind == "randperm" and order.shape == reading.tape.values[source].shape[:1]
    return order.id if is_all else None


def _keeps_order(reading: TapeReading, output: int, order: int) -> bool:
    """Return whether an output has the rows of data that was in use before an order was drawn, as they were then."""
    drawn, within = reading.origin(order), reading.tape.ancestors(output)
    data = [value for value in within if reading.tape.values[value].role in _DATA_ROLES]
    firsts = [uses[0].index for value in data if (uses := reading.tape.consumers(value))]
    if order in within or drawn is None or not any(first < drawn.index for first in firsts):
        return False
    answers = reading.tape.descendants(reading.tape.outputs_of_root())
    makers = reading.makers(output, lambda op: not op.in_model)
    return not any(op.input("self") in answers and not op.in_model and _moves_rows(reading, op) for op in makers)


def _moves_rows(reading: TapeReading, op: Op) -> bool:
    """Return whether an operation takes rows, other than all of them in their order, as in `q[torch.arange(n), a]`."""
    if op.kind not in ("index", "index_select", *_ORDERS):
        return False
    chosen = references(op.args.get("indices"))
    rows = reading.numbers.of(chosen[0]) if len(chosen) > 1 else None
    return rows is None or not np.array_equal(rows, np.arange(len(rows)))


def _in_another_order(reading: TapeReading, op: Op, loss: Op, rows: int) -> Found:
    return Found(
        severity="critical",
        sites=(signals.LOSS, "(data)", reading.site(op, signals.LOOP)),
        evidence=(fact("targets that are put in another order", rows), fact("inputs that are", 0)),
        cause=f"Targets are put in another order{reading.where(op)}; neither the inputs nor the outputs that they are "
        f"compared with{reading.where(loss)} are: labels do not match their samples.",
        fix="Take inputs and targets in the same order: order = torch.randperm(len(x)); x, y = x[order], y[order].",
        refute="Print the order: if it is 0, 1, 2, ..., this finding is wrong.",
    )


def _reordered_inputs(reading: TapeReading) -> Found | None:
    """Find samples that are put in another order before the model, while neither targets nor outputs are."""
    for op in reading.tape.ops:
        if op.kind not in _ORDERS or op.phase not in ("forward", "between") or not op.outs:
            continue
        uses = [use for use in reading.tape.consumers(op.outs[-1]) if use.phase in ("forward", "between")]
        if not uses or not all(_takes_rows(reading, use, op.outs[-1]) for use in uses):
            continue
        moved = reading.tape.descendants([out for use in uses for out in use.outs])
        if any(target in moved for _, target, _ in reading.compared()):
            continue  # as where pairs of samples are mixed, which are compared with the targets of both
        for output, target, loss in reading.compared():
            rows = reading.tape.values[target].shape[:1]
            if output in moved and target not in moved and rows == reading.tape.values[op.outs[-1]].shape:
                return Found(
                    severity="critical",
                    sites=(signals.LOSS, "(data)", reading.site(op, signals.LOOP)),
                    evidence=(fact("samples that are put in another order", rows[0]), fact("targets that are", 0)),
                    cause=f"Samples are put in another order before the model{reading.where(op)}; neither the "
                    "outputs nor "
                    f"the targets{reading.where(loss)} are: labels do not match their samples.",
                    fix="Take the targets in the same order, or undo it on the outputs: out[order.argsort()].",
                    refute="Print the order: if it is 0, 1, 2, ..., this finding is wrong.",
                )
    return None


def _takes_rows(reading: TapeReading, op: Op, order: int) -> bool:
    """Return whether an operation takes all rows of data in some order, and nothing else uses that data."""
    source = op.input("self")
    if (
        op.kind not in ("index", "index_select")
        or source is None
        or order not in (*references(op.args.get("indices")), op.input("index"))
    ):
        return False
    about = reading.tape.values[source]
    is_all = about.shape[:1] == reading.tape.values[order].shape and not about.requires_grad
    before = reading.tape.ancestors(order)
    others = [
        each for each in reading.tape.consumers(source) if each.phase in ("forward", "between") and each is not op
    ]
    return is_all and all(before.issuperset(each.outs) for each in others)


@on_tape
def scored_in_loss(reading: TapeReading) -> Found | None:
    """Find rows of a model's output that are scored by themselves, as a test is, and are also a part of the loss.

    Where a model answers for all rows at once, as for the nodes of a graph, masks say which rows are trained on.
    """
    trained, scored = _chosen_rows(reading, in_loss=True), _chosen_rows(reading, in_loss=False)
    for size, (loss_rows, op) in trained.items():
        rows, by = scored.get(size, (np.zeros(0, bool), None))
        if by is not None and rows.any() and not (rows & ~loss_rows).any() and rows.sum() < loss_rows.sum():
            return Found(
                severity="critical",
                sites=(signals.LOSS, "(validation)", "(data)"),
                evidence=(fact("rows in the loss", loss_rows.sum()), fact("of them scored by themselves", rows.sum())),
                cause=f"{rows.sum()} rows are scored by themselves{reading.where(by)}, and all of them are among the "
                f"{loss_rows.sum()} rows of the loss{reading.where(op)}: what they show was learnt from their labels.",
                fix="Take the loss over the rows of the training set only: pred[train_mask], labels[train_mask].",
                refute="Intersect the mask of the loss with that of the test: if it is empty, this finding is wrong.",
            )
    return None


def _chosen_rows(reading: TapeReading, *, in_loss: bool) -> dict[int, tuple[NDArray[np.bool_], Op]]:
    """Return the smallest set of rows that are chosen of all outputs, for the loss or beside it, by how many there are.

    Beside the loss the rows that are chosen last count: those before are of the training set, to compare with. They may
    be rows of the outputs of the step before, with which a tape begins.
    """
    found: dict[int, tuple[NDArray[np.bool_], Op]] = {}
    answers = reading.tape.outputs_of_root(of_loss=False)
    shapes = {reading.tape.values[each].shape for each in answers}
    before = [each.id for each in reading.tape.given("carried", "constant") if each.shape in shapes]
    outputs = reading.tape.descendants([*answers, *before])
    for op in reading.tape.ops:
        if op.kind != "index" or op.in_model:
            continue
        source, chosen = op.input("self"), references(op.args.get("indices"))
        if source is None or len(chosen) != 1 or source not in outputs:
            continue
        numbers = reading.numbers.of(chosen[0])
        count = reading.tape.values[source].shape[0]
        if numbers is None or numbers.ndim != 1 or (op.outs[0] in reading.needed) is not in_loss:
            continue
        rows = np.zeros(count, bool)
        rows[numbers] = True
        found[count] = (rows, op)
    return found
