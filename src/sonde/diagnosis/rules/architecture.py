"""Rules about how the modules of a model are connected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from sonde.core import signals
from sonde.core.facts import ReshapeFacts
from sonde.core.tape import Op
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import is_learning_well
from sonde.diagnosis.rule import Found, Threshold, above, by_number, fact, few, rule
from sonde.diagnosis.symptoms import NOT_TRAINED
from sonde.diagnosis.tape.data import inverted_mask
from sonde.diagnosis.tape.graphs import edges_in_one_direction, graphs_that_overlap
from sonde.diagnosis.tape.losses import mixed_axes
from sonde.diagnosis.tape.tokens import reads_and_predicts, unshifted
from sonde.records import Severity, Site

_TRANSPARENT: Final = frozenset({"Identity", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d"})
_LINEAR: Final = frozenset({"Linear", "LazyLinear", "Conv1d", "Conv2d", "Conv3d"})


@rule(
    "layer_repeated",
    needs=["facts.parameters"],
    exact=True,
    fix="Make a new layer for each place: [nn.Linear(8, 8) for _ in range(4)], or copy.deepcopy(layer).",
    refute="Compare id() of the layers: if they differ, this finding is wrong.",
)
def layer_repeated(case: Case) -> Found | None:
    """One layer stands at several places of a list, so that these places share their weights."""
    for each in case.need_facts().parameters:
        places = _places_in_list([each.name, *each.aliases]) if each.trainable and each.aliases else []
        kinds = {case.modules[place].kind for place in places if place in case.modules}
        if places and len(kinds) < 2:  # an embedding and an output layer share a weight, and are two layers
            return Found(
                step=1,
                sites=tuple(places[:8]),
                evidence=(fact("places that hold the same layer", len(places)),),
                cause=f"{few(places)} are one and the same layer: [layer] * n repeats a reference, so these places "
                "share their weights.",
            )
    return None


def _places_in_list(names: list[str]) -> list[str]:
    """Return the places of one list that hold what has these names; none if it has other names too.

    >>> _places_in_list(["layers.0.weight", "layers.1.weight"]), _places_in_list(["embed.weight", "head.weight"])
    (['layers.0', 'layers.1'], [])
    """
    parts = [name.split(".") for name in names]
    if len({len(each) for each in parts}) != 1:
        return []
    differs = [at for at, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    if len(differs) != 1 or not all(each[differs[0]].isdigit() for each in parts):
        return []
    return [".".join(each[: differs[0] + 1]) for each in parts]


@rule(
    "linear_stack",
    needs=["facts.edges"],
    exact=True,
    fix="Put an activation between them (nn.ReLU(), nn.GELU()), or make them one layer.",
    refute="Replace both by one layer with the product of their weights: if the outputs differ, this finding is wrong.",
)
def linear_stack(case: Case) -> Found | None:
    """Linear layers follow each other without a nonlinearity between them."""
    facts = case.need_facts()
    if not facts.edges:
        raise NotMeasured("how modules follow each other")
    hops = _hops(case)
    uses = Counter(first for first, _ in hops)  # what several layers share, as queries and keys do, saves weights
    pairs = [(a, b) for a, b in hops if a != b and uses[a] == 1 and _is_wasted(case, a, b)]
    if not pairs:
        return None
    names = tuple(dict.fromkeys(name for pair in pairs for name in pair))
    return Found(
        severity=_severity(case, len(pairs)),
        step=1,
        sites=names[:8],
        evidence=(
            above("pairs of linear layers without anything between them", len(pairs), 1),
            fact("layers in such pairs", len(names)),
        ),
        cause=f"{pairs[0][0]} passes its output straight to {pairs[0][1]}: together they can do no more than one "
        "layer.",
    )


def _hops(case: Case) -> list[tuple[str, str]]:
    """Return which module feeds which, skipping modules that change nothing in evaluation."""
    after: dict[str, list[str]] = {}
    for first, second in case.facts.edges:
        after.setdefault(first, []).append(second)
    hops = []
    for start in after:
        waiting, seen = list(after[start]), {start}
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            module = case.modules.get(name)
            if module is not None and module.kind in _TRANSPARENT:
                waiting.extend(after.get(name, ()))
            else:
                hops.append((start, name))
    return hops


def _is_wasted(case: Case, first: str, second: str) -> bool:
    """Return whether two layers do no more than one; a narrow waist makes a low rank, which may be intended."""
    modules = case.modules
    kinds = [modules[name].kind if name in modules else "" for name in (first, second)]
    weights = [case.parameters.get(f"{name}.weight") for name in (first, second)]
    if kinds[0] != kinds[1] or kinds[0] not in _LINEAR or weights[0] is None or weights[1] is None:
        return False
    if any(modules[name].settings.get("groups", 1) != 1 for name in (first, second)):
        return False
    one, two = weights[0].shape, weights[1].shape
    if len(one) > 2 and (one[2:] == (1,) * len(one[2:]) or two[2:] == (1,) * len(two[2:])):
        return False  # pointwise kernels factorise on purpose
    narrow = len(one) >= 2 and len(two) >= 2 and one[0] < min(one[1], two[0])
    return not narrow and "lora" not in f"{first}.{second}".lower()


def _severity(case: Case, pairs: int) -> Severity:
    # One pair in a deep network wastes a layer; several leave a network that is mostly linear.
    return "warning" if pairs >= 2 and not is_learning_well(case) else "info"


_LAYERS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "InstanceNorm1d", "InstanceNorm2d",
          "InstanceNorm3d")  # fmt: skip


@rule(
    "bias_before_norm",
    needs=["facts.edges"],
    severity="info",
    exact=True,
    fix="Write bias=False in those layers; it saves memory and changes nothing else.",
    refute="Add 1 to the bias and run a batch in train() mode: if the output changes, this finding is wrong.",
)
def bias_before_norm(case: Case) -> Found | None:
    """A layer has a bias that the norm after it cancels."""
    if not case.need_facts().edges:
        raise NotMeasured("how modules follow each other")
    layers = [
        before
        for before, after in case.facts.edges
        if (layer := case.modules.get(before)) is not None
        and (norm := case.modules.get(after)) is not None
        and layer.kind in _LAYERS
        and norm.kind in _NORMS
        and layer.settings.get("bias") is True
    ]
    if not layers:
        return None
    return Found(
        step=0,
        sites=tuple(dict.fromkeys(layers)),
        evidence=(fact("layers with a bias right before such a norm", len(set(layers))),),
        cause=f"The norm after {few(layers)} subtracts the mean of each channel, so "
        f"{by_number(layers, 'its bias has', 'their biases have')} no effect.",
    )


@rule(
    "batch_axis_mixed",
    needs=["output", "facts.reshapes", "facts.losses"],
    explains=[*NOT_TRAINED, "overfitting"],
    severity="critical",
    exact=True,
    fix="Use transpose or permute to move axes; view and reshape only split or merge neighbouring axes.",
    refute="Change one sample of a batch: if the outputs of all others stay the same, this finding is wrong.",
    since=2,
)
def batch_axis_mixed(case: Case) -> Found | None:
    """Samples of a batch are mixed with each other.

    A sequence layer runs along the batch axis, or a view changes the shape where axes should be moved.
    """
    if (taped := mixed_axes(case) or graphs_that_overlap(case)) is not None:
        return taped
    case.need_facts()
    for site in _sequences(case):
        return _along_the_batch(site)
    return _mixed_by_view(case.facts.reshapes[0]) if case.facts.reshapes else None


def _sequences(case: Case) -> Iterator[Site]:
    """Yield outputs of layers that take the first axis as time, though it has a row for each target."""
    # A loss with one answer per sample shows how many samples there are; any other may count words or pixels.
    counts = {
        loss.target_shape[0]
        for loss in case.facts.losses
        if loss.target_shape
        and loss.input_shape[:1] == loss.target_shape[:1]
        and max(loss.target_shape[1:], default=1) == 1
    }
    for site in case.sites("output"):
        module = case.modules.get(site.name)
        if module is None or module.settings.get("batch_first") is not False or len(site.shape) != 3:
            continue
        if site.part not in ("", "[0]"):  # the weights of an attention begin with the batch whatever the layout
            continue
        first, second = site.shape[:2]
        if counts == {first} and first > 1 and second > 1 and first != second:
            yield site


def _along_the_batch(site: Site) -> Found:
    rows, steps, _ = site.shape
    return Found(
        step=1,
        sites=(site.name,),
        evidence=(
            fact("size of the axis that it takes as time", rows),
            fact("samples in the batch, according to the loss", rows),
            fact("size of the axis that it takes as samples", steps),
        ),
        cause=f"{site.name} ({site.kind}) runs along the batch: it was created with batch_first=False and takes the "
        f"first axis as time, but that axis holds the {rows} samples. Each sample is read as the continuation of the "
        "one before.",
        fix=f"Create it with batch_first=True, or pass x.transpose(0, 1), which begins with ({steps}, {rows}) here.",
    )


def _mixed_by_view(reshape: ReshapeFacts) -> Found:
    where = reshape.module or "(model)"
    return Found(
        step=1,
        sites=(where, signals.LOSS) if where == "(model)" else (where, "(model)"),
        evidence=(
            fact("size of the first axis that changed before", reshape.before[_moved(reshape)]),
            fact("the same after", reshape.after[_moved(reshape)]),
        ),
        cause=f"A view or reshape turns {reshape.before} into {reshape.after}: the same sizes in another order. This "
        "does not move axes but regroups the elements, so that samples and steps get mixed.",
        refute="Compare it with .transpose on torch.arange(...): if both are equal, this finding is wrong.",
    )


def _moved(reshape: ReshapeFacts) -> int:
    pairs = zip(reshape.before, reshape.after, strict=True)
    return next(at for at, (before, after) in enumerate(pairs) if before != after)


AHEAD_SHARE = Threshold(0.05, "share of attention on later positions; 0 with a causal mask, about 0.5 without one")
NEXT_TOKEN_SHARE = Threshold(0.99, "share of targets that are the next token: all of them but for the ends of texts")


@rule(
    "future_leak",
    needs=[signals.LOOKS_AHEAD, signals.NEXT_TOKEN, "facts.softmaxes"],
    explains=["attention_entropy_collapse", "overfitting"],
    severity="critical",
    exact=True,
    fix=(
        "Mask later positions: scores.masked_fill(mask, -inf) with torch.ones(T, T).triu(1).bool(), is_causal=True "
        "in scaled_dot_product_attention, or attn_mask (src_mask) in torch's layers."
    ),
    refute="Change the last token of an input: if no output before it changes, this finding is wrong.",
    lasting=True,
)
def future_leak(case: Case) -> Found | None:
    """A language model can see the token that it should predict.

    The targets are the inputs shifted by one, and no attention is masked.
    """
    if (taped := unshifted(case)) is not None and _is_causal(case):
        return taped
    ahead = case.need_vital(signals.LOOP, signals.LOOKS_AHEAD)
    # An encoder may look ahead, its decoder may not: one masked attention is enough to decide nothing.
    share, least = _share_of_next(case), float(ahead.stat("min")[0])
    if share < NEXT_TOKEN_SHARE or least < AHEAD_SHARE:
        return None
    if case.learning.state == "broken":  # an inverted mask leaves the last position nothing: NaN is the cause then
        return None
    return Found(
        step=1,
        sites=_sites(case),
        evidence=(
            above("share of targets that are the next token of the input", share, NEXT_TOKEN_SHARE),
            above("share of attention on later positions, lowest of all layers", least, AHEAD_SHARE),
        ),
        cause="The model should predict the next token but can see it: no attention is masked, so each position "
        "attends "
        "to later ones. The loss becomes very small, and generated text makes no sense.",
    )


def _share_of_next(case: Case) -> float:
    """Return the share of targets that are the next token of the input, as a sensor or a tape has seen it."""
    following = case.vital(signals.LOSS, signals.NEXT_TOKEN)
    if following is None and any(reading.once("reads and predicts", reads_and_predicts) for reading in case.rounds):
        return 1.0
    return float(case.need_vital(signals.LOSS, signals.NEXT_TOKEN).numbers().min())


def _is_causal(case: Case) -> bool:
    """Return whether the model is made to see only what came before: only then must targets be shifted."""
    if case.taped is not None and any(map(_masks_later, case.taped.tape.ops)):
        return True
    ahead = case.vital(signals.LOOP, signals.LOOKS_AHEAD)
    if ahead is not None:
        return float(ahead.stat("min")[0]) < AHEAD_SHARE
    layers = [module for module in case.facts.modules if module.kind in _RECURRENT]
    return bool(layers) and all(module.settings.get("bidirectional") is not True for module in layers)


def _masks_later(op: Op) -> bool:
    """Return whether an operation makes or uses a causal mask."""
    return op.phase in ("forward", "between") and (op.kind in ("triu", "tril") or op.args.get("is_causal") is True)


def _sites(case: Case) -> tuple[str, ...]:
    """Return the modules with attention, where they are known."""
    held = [each.module for each in case.facts.softmaxes if each.used == "weights" and each.module]
    named = [module.name for module in case.facts.modules if "attention" in module.kind.lower()]
    return tuple(dict.fromkeys((*held, *named))) or ("(model)",)


@rule(
    "mask_inverted",
    severity="critical",
    exact=True,
    explains=[*NOT_TRAINED],
    fix=(
        "Turn the mask round: masked_fill and key_padding_mask take True for what to ignore; a factor of the loss and "
        "the boolean mask of scaled_dot_product_attention take True for what to keep."
    ),
    refute="Print the mask beside the tokens of a row: if it is right for the padding, this finding is wrong.",
)
def mask_inverted(case: Case) -> Found | None:
    """A mask keeps padding and drops real tokens."""
    case.need_tape()
    return inverted_mask(case)


_RECURRENT: Final = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")


@rule(
    "rnn_state_not_detached",
    severity="critical",
    exact=True,
    fix="Detach it between batches (hidden = hidden.detach(), for an LSTM both parts), or start each from zeros.",
    refute="Start every batch from a state of zeros: if the error remains, this finding is wrong.",
    since=0,
)
def rnn_state_not_detached(case: Case) -> Found | None:
    """A hidden state is carried into the next batch with its graph.

    Torch raised the error of a second backward pass through the same graph, in a model with a recurrent layer.
    """
    recurrent = [module.name for module in case.facts.modules if module.kind in _RECURRENT]
    errors = [
        event
        for event in case.events
        if event.event_type == "exception" and "backward through the graph a second time" in event.message
    ]
    if not recurrent or not errors:
        return None
    return Found(
        step=case.step if errors[0].step is None else errors[0].step,
        sites=tuple(recurrent[:4]),
        evidence=(fact("errors of a second backward through the same graph", len(errors)),),
        cause="The hidden state of the previous batch still carries its graph, which the backward pass has freed.",
    )


@rule(
    "rnn_state_not_reset",
    needs=["facts.carried", "facts.loader"],
    exact=True,
    fix="Start each batch without a state (pass None or zeros), or read the samples in order with shuffle=False.",
    refute="If sample i of each batch continues sample i of the previous batch, this finding is wrong.",
    since=2,
)
def rnn_state_not_reset(case: Case) -> Found | None:
    """A recurrent state is carried over between unrelated samples.

    A recurrent module starts with the state of the previous step, though the loader shuffles.
    """
    carried = case.facts.carried
    if not carried:
        return None
    loader = case.facts.loader
    if loader is not None and "shuffle" in loader.settings:
        is_shuffled = loader.settings["shuffle"] is True
    else:
        is_shuffled = case.need_tape().takes_random_rows
    if not is_shuffled:
        return None  # consecutive pieces of one long text: the state belongs to them
    return Found(
        step=2,
        sites=(*carried, "loader"),
        evidence=(
            fact("recurrent modules that start with the state of the previous step", len(carried)),
            fact("samples are drawn in random order", 1),
        ),
        cause=f"{few(carried)} starts each batch with the state in which the previous batch ended, but samples are "
        "drawn "
        "in random order: that state belongs to other samples.",
    )


@rule(
    "edges_one_way",
    explains=["overfitting", "underfitting", "loss_plateau"],
    fix="List each edge both ways: edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1).",
    refute="If the graph is directed, and its nodes are numbered in the direction of its edges, this finding is wrong.",
)
def edges_one_way(case: Case) -> Found | None:
    """A graph without directions lists each edge once, so that messages pass one way only."""
    case.need_tape()
    return edges_in_one_direction(case)
