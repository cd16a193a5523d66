"""What a taped step shows: each fault with a twin that looks almost the same and is healthy."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import sonde
from sonde.core import tape as tapes
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import on_tape
from sonde.diagnosis.rules import RULES
from sonde.diagnosis.tape.pairing import scored_in_loss
from sonde.diagnosis.tape.roles import is_policy_objective
from sonde.diagnosis.tape.signs import drawn_to_targets
from sonde.diagnosis.tape.tokens import wraps_around
from sonde.diagnosis.tape.unused import ignored_argument, unread_outputs

SAMPLES, TIME, FEATURES, CLASSES, WORDS = 32, 10, 6, 3, 20
ROWS = torch.randn(SAMPLES, FEATURES)
SERIES = torch.randn(SAMPLES, TIME, FEATURES)
TOKENS = torch.randint(0, WORDS, (SAMPLES, TIME))
LABELS = torch.arange(SAMPLES) % CLASSES
PADDED = torch.where(torch.arange(TIME) < torch.randint(4, TIME, (SAMPLES, 1)), TOKENS.clamp_min(1), 0)
PICTURES = torch.randn(SAMPLES, 1, 8, 8)
RULE = {rule.kind: rule for rule in RULES}


def taped(path: Path, model: nn.Module, tensors, loss_of, iterate=iter) -> Case:
    """Train four steps of eight samples and return a case that knows their tapes, and nothing else."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    data = tensors if isinstance(tensors, Dataset) else TensorDataset(*tensors)
    with sonde.watch(model, optimizer, run=path):
        for batch in iterate(DataLoader(data, 8)):
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()
    case = Case()
    for folder in tapes.folders(path).values():
        case.take_tape(tapes.read(folder))
    assert case.taped is not None
    return case


def found(kind: str, case: Case):
    """Return what a rule finds by the tape alone."""
    try:
        return RULE[kind].check(case)
    except NotMeasured:  # everything else that the rule could read is missing
        return None


def mlp(*last: nn.Module, inputs: int = FEATURES, outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs), *last)


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def nll(dim):
    return lambda model, x, y: F.nll_loss(F.log_softmax(model(x), dim), y)


def with_attention_weights(model, x, y):
    weights = torch.softmax(model(x), 1)
    return F.cross_entropy(weights * model(x), y)


def contrastive(model, x, y):
    one, two = F.normalize(model(x)), F.normalize(model(x + torch.randn_like(x)))
    return F.cross_entropy(one @ two.T, torch.arange(len(x)))


def by_words(model, x, y):
    return F.cross_entropy(model(x).reshape(-1, WORDS), y.reshape(-1))


def squares(model, x, y):
    return ((model(x) - y) ** 2).mean()


def pairs(model, x, y):
    scores = model(x).squeeze(1)
    return F.softplus(scores[:, None] - scores[None, :]).mean() + 0 * y.sum()


class Heads(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.words, self.project, self.out, self.how = (
            nn.Embedding(WORDS, 16),
            nn.Linear(16, 48),
            nn.Linear(16, 20),
            how,
        )

    def forward(self, x):
        count, steps = x.shape
        parts = self.project(self.words(x)).chunk(3, -1)
        if self.how == "viewed":
            parts = [part.reshape(count, 4, steps, 4) for part in parts]
        else:
            parts = [part.view(count, steps, 4, 4).transpose(1, 2) for part in parts]
        return self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(count, steps, 16))


class PairsOfWords(nn.Module):
    """Reads two words for each output, so that there is one output fewer than words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, 16), nn.Conv1d(16, WORDS, 2)

    def forward(self, x):
        return self.mix(self.words(x).transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.words, self.layer, self.out, self.how = nn.Embedding(WORDS, 16), nn.GRU(16, 16), nn.Linear(16, WORDS), how

    def forward(self, x):
        states = self.out(self.layer(self.words(x).transpose(0, 1))[0])
        return states.transpose(0, 1) if self.how == "turned back" else states


class LastState(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.LSTM(FEATURES, 16, batch_first=True, bidirectional=True)
        self.out, self.how = nn.Linear(32, CLASSES), how

    def forward(self, x):
        state = self.layer(x)[1][0]
        return self.out(state.view(len(x), -1) if self.how == "viewed" else state.transpose(0, 1).reshape(len(x), -1))


class Stacked(nn.Module):
    """Two frames become one, and channels become pixels: views that cut axes on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.out = nn.Linear(2 * FEATURES, 16), nn.Linear(4, CLASSES)

    def forward(self, x):
        count, steps, features = x.shape
        frames = self.frames(x.reshape(count, steps // 2, 2 * features))
        pixels = F.pixel_shuffle(frames.view(count, steps // 2, 4, 4)[:, :4], 2)
        return self.out(pixels.flatten(1)[:, :4])


class Attention(nn.Module):
    """As many samples as features of a head: sizes that could be mistaken for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.out = nn.Embedding(WORDS, 16), nn.MultiheadAttention(16, 2), nn.Linear(16, WORDS)

    def forward(self, x):
        hidden = self.words(x).transpose(0, 1)
        return self.out(self.layer(hidden, hidden, hidden)[0]).transpose(0, 1)


class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, 16), nn.Conv1d(16, WORDS, 3, padding=1)

    def forward(self, x):
        return self.layer(self.words(x).transpose(1, 2))


class Detached(nn.Module):
    def __init__(self, cut) -> None:
        super().__init__()
        self.first, self.second, self.cut = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES), cut

    def forward(self, x):
        return self.second(self.cut(self.first(x)).relu())


class Masked(nn.Module):
    """Attention that does not look at padding, or at nothing else."""

    def __init__(self, ignored) -> None:
        super().__init__()
        self.words, self.out, self.ignored = nn.Embedding(WORDS, 16), nn.Linear(16, CLASSES), ignored

    def forward(self, x):
        hidden = self.words(x)
        scores = (hidden @ hidden.transpose(1, 2)).masked_fill(self.ignored(x)[:, None, :], -1e9)
        return self.out((scores.softmax(-1) @ hidden).mean(1))


class Coder(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.encode, self.decode, self.factor = nn.Linear(FEATURES, 8), nn.Linear(4, FEATURES), factor

    def forward(self, x):
        mean, log_var = self.encode(x).chunk(2, 1)
        exponent = log_var if self.factor == 1 else self.factor * log_var
        return self.decode(mean + torch.randn_like(mean) * exponent.exp()), mean, log_var


class Sequence(nn.Module):
    """A layer along time, or along the batch."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.words, self.layer, self.out = nn.Embedding(WORDS, 16), layer, nn.Linear(16, WORDS)

    def forward(self, x):
        hidden = self.layer(self.words(x))
        return self.out(hidden[0] if isinstance(hidden, tuple) else hidden)


def attention(*, batch_first: bool, dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=batch_first)


class Positions(nn.Module):
    """Positions that are added along time, or along the batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.words, self.out, self.how = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS), how
        self.register_buffer("table", torch.randn(50, 1, 16))

    def forward(self, x):
        hidden = self.words(x)
        if self.how == "batch":
            return self.out(hidden + self.table[: hidden.size(0)])
        return self.out(hidden + self.table[: hidden.size(1)].transpose(0, 1))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.times, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Embedding(10, 4), nn.Conv2d(4, 1, 1)

    def forward(self, x, t):
        return self.last(self.first(x) + self.times(t)[:, :, None, None])


def with_setting(name, value):
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, CLASSES))
    setattr(model[2] if name != "requires_grad" else model[0], name, value)
    return model


def denoising(shape):
    levels = torch.linspace(0.1, 0.9, 10)

    def loss_of(model, x):
        t = torch.randint(0, 10, (len(x),))
        level, noise = levels[t].view(shape), torch.randn_like(x)
        return F.mse_loss(model(x * level + noise * (1 - level), t), noise)

    return loss_of


def with_advantage(model, x, y):
    """Return the loss of an actor and a critic: the advantage is held, so the critic's value only nears its goal."""
    actor, critic = model
    values, rewards = critic(x)[:, 0], (y == 0).float()
    chosen = actor(x).log_softmax(1).gather(1, y[:, None])[:, 0]
    return -(chosen * (rewards - values.detach())).mean() + 0.01 * F.mse_loss(values, rewards)


def log_bound(share):
    """Return a bound of which the noise is scaled by the logarithm of the variance, or by a share of it."""

    def loss(model, x, _):
        mean, log_var = model.encode(x).chunk(2, 1)
        rebuilt = model.decode(mean + torch.randn_like(mean) * (log_var if share == 1 else share * log_var))
        return F.mse_loss(rebuilt, x) - 0.5 * (1 + log_var - mean**2 - log_var.exp()).mean()

    return loss


def of_deviations(model, x, _):
    mean, deviation = model.encode(x).chunk(2, 1)
    rebuilt = model.decode(mean + torch.randn_like(mean) * deviation)
    return F.mse_loss(rebuilt, x) - 0.5 * (1 + (deviation**2).log() - mean**2 - deviation**2).mean()


def bound(model, x, _):
    rebuilt, mean, log_var = model(x)
    return F.mse_loss(rebuilt, x) - 0.5 * (1 + log_var - mean**2 - log_var.exp()).mean()


def bound_of_deviations(model, x, _):
    rebuilt, mean, log_deviation = model(x)
    return F.mse_loss(rebuilt, x) - 0.5 * (1 + 2 * log_deviation - mean**2 - log_deviation.exp() ** 2).mean()


def on_own_answers(model, x, y):
    scores = model(x)
    return F.cross_entropy(scores, scores.argmax(1))


def on_pseudo_labels(model, x, y):
    return F.cross_entropy(model(x), y) + F.cross_entropy(model(x), model(x + 1).argmax(1))


def weighed(keeps):
    def loss_of(model, x, y):
        losses = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none") * keeps(x).float()
        return losses.sum() / keeps(x).sum()

    return loss_of


def bag(model, x, y):
    hidden = model(x)
    whole = (hidden[:, :1].softmax(0) * hidden).sum(0)
    return F.binary_cross_entropy_with_logits(whole[1:], y[:2] / CLASSES)


def gradient_penalty(model, x, y):
    x = x.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x + 1).mean() - model(x).mean() + 10 * ((slopes.norm(2, dim=1) - 1) ** 2).mean()


def policy(sign):
    def loss_of(model, x, y):
        chosen = torch.distributions.Categorical(logits=model(x))
        action = chosen.sample()
        return sign * (chosen.log_prob(action) * ((action == y).float() - 0.3)).mean()

    return loss_of


def surrogate(sign, choose=torch.min, turn=1):
    def loss_of(model, x, y):
        old, weight = torch.zeros(len(x)), turn * torch.where(y == 0, 1.0, -0.5)
        ratio = (torch.distributions.Categorical(logits=model(x)).log_prob(y) - old).exp()
        return sign * choose(ratio * weight, ratio.clamp(0.8, 1.2) * weight).mean()

    return loss_of


def dice(activate, activate_mask=lambda mask: mask):
    def loss_of(model, x, y):
        out, mask = activate(model(x)), activate_mask(F.one_hot(y, CLASSES).float())
        both, total = (out * mask).sum(1), out.sum(1) + mask.sum(1)
        return 1 - ((2 * both + 1) / (total + 1)).mean()

    return loss_of


def soft_targets(sign):
    return lambda model, x, y: sign * (x.softmax(1)[:, :CLASSES] * model(x).log_softmax(1)).sum(1).mean()


def loss_and(term):
    return lambda model, x, y: F.cross_entropy(model(x), y) + 0.1 * term(model(x))


def distances(model, x, y):
    squares, out = model(x).square(), model(x)
    apart = squares.sum(1, keepdim=True) + squares.sum(1) - 2 * out @ out.T
    return ((-apart.clamp_min(0)).exp() * (y[:, None] != y[None, :])).mean()


def added_as(number):
    """Add the mean square of the outputs to a loss: as it is, or as what a function makes of it."""
    return lambda model, x, y: F.cross_entropy(out := model(x), y) + 0.25 * number((out**2).mean())


def mixture(dim):
    def loss_of(model, x, y):
        shares, mean, spread = model(x).chunk(3, 1)
        likelihood = torch.distributions.Normal(mean, spread.exp()).log_prob(y[:, None].float())
        return -(shares.log_softmax(dim) + likelihood).logsumexp(1).mean()

    return loss_of


AS_MANY_CLASSES = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, TIME))
"""A model of sequences whose number of classes is that of their positions."""


def chosen_along(dim):
    """Return the loss of a value that is chosen for each sample, as that of an action is."""

    def loss_of(model, x, y):
        values = model(x)
        chosen = values.gather(dim, (y % min(values.shape))[:, None])[:, 0]
        return F.smooth_l1_loss(chosen, y.float())

    return loss_of


ILL = {
    "softmax before cross entropy": ("double_softmax", mlp(nn.Softmax(1)), (ROWS, LABELS), cross_entropy),
    "sigmoid before cross entropy": ("double_softmax", mlp(nn.Sigmoid()), (ROWS, LABELS), cross_entropy),
    "softmax and a view before it": (
        "double_softmax",
        nn.Sequential(nn.Embedding(WORDS, WORDS), nn.Softmax(-1)),
        (TOKENS, TOKENS),
        by_words,
    ),
    "sigmoid before logits": (
        "double_sigmoid",
        mlp(nn.Sigmoid(), outputs=1),
        (ROWS, LABELS.float()),
        lambda model, x, y: F.binary_cross_entropy_with_logits(model(x).squeeze(1), y),
    ),
    "relu before logits": ("relu_before_logits", mlp(nn.ReLU()), (ROWS, LABELS), cross_entropy),
    "nll of probabilities": (
        "logits_into_prob_loss",
        mlp(nn.Softmax(1)),
        (ROWS, LABELS),
        lambda model, x, y: F.nll_loss(model(x), y),
    ),
    "softmax over the batch": ("wrong_dim_softmax", mlp(), (ROWS, LABELS), nll(0)),
    "shares of a mixture over the batch": ("wrong_dim_softmax", mlp(outputs=9), (ROWS, LABELS), mixture(0)),
    "relu before log-softmax": ("relu_before_logits", mlp(nn.ReLU()), (ROWS, LABELS), nll(1)),
    "softmax before log-softmax": ("double_softmax", mlp(nn.Softmax(1)), (ROWS, LABELS), nll(1)),
    "softmax of one output": (
        "single_class_output",
        mlp(nn.Softmax(1), outputs=1),
        (ROWS, (LABELS > 0).float()),
        lambda model, x, y: F.binary_cross_entropy(model(x).squeeze(1), y),
    ),
    "term as a number": ("term_without_gradient", mlp(), (ROWS, LABELS), added_as(lambda term: term.item())),
    "positions for classes": ("wrong_dim_softmax", AS_MANY_CLASSES, (TOKENS, TOKENS % TIME), cross_entropy),
    "gate over the batch": ("wrong_dim_softmax", mlp(nn.Softmax(0), nn.Linear(3, 3)), (ROWS, LABELS), cross_entropy),
    "column and row": ("broadcast_loss", mlp(outputs=1), (ROWS, ROWS.sum(1)), squares),
    "minus": ("loss_sign_flipped", mlp(), (ROWS, LABELS), lambda *given: -0.5 * cross_entropy(*given)),
    "mean and sum": ("wrong_loss_reduction", mlp(), (ROWS, LABELS), loss_and(lambda out: (out**2).sum())),
    "detached term": ("term_without_gradient", mlp(), (ROWS, LABELS), loss_and(lambda out: (out.detach() ** 2).mean())),
    "heads by view": ("batch_axis_mixed", Heads("viewed"), (TOKENS, TOKENS), by_words),
    "time first against samples first": ("batch_axis_mixed", Recurrent("as it is"), (TOKENS, TOKENS), by_words),
    "last state by view": ("batch_axis_mixed", LastState("viewed"), (SERIES, LABELS), cross_entropy),
    "channels by view": (
        "batch_axis_mixed",
        Channels(),
        (TOKENS, TOKENS),
        lambda model, x, y: F.cross_entropy(model(x).view(-1, WORDS), y.view(-1)),
    ),
    "mask of tokens in attention": ("mask_inverted", Masked(lambda x: x != 0), (PADDED, LABELS), cross_entropy),
    "mask of padding in the loss": (
        "mask_inverted",
        nn.Embedding(WORDS, WORDS),
        (PADDED, TOKENS),
        weighed(lambda x: x == 0),
    ),
    "variance for deviation": ("variance_as_deviation", Coder(1), (ROWS, LABELS), bound),
    "overlap of logits": ("logits_into_prob_loss", mlp(), (ROWS, LABELS), dice(lambda out: out)),
    "sigmoid of labels": ("arguments_swapped", mlp(), (ROWS, LABELS), dice(lambda out: out, torch.sigmoid)),
    "clipped surrogate without a minus": ("loss_sign_flipped", mlp(), (ROWS, LABELS), surrogate(1)),
    "the larger surrogate": ("loss_sign_flipped", mlp(), (ROWS, LABELS), surrogate(-1, torch.max)),
    "the smaller of two costs": ("loss_sign_flipped", mlp(), (ROWS, LABELS), surrogate(1, torch.min, turn=-1)),
    "rewards without a minus": ("loss_sign_flipped", mlp(), (ROWS, LABELS), policy(1)),
    "soft targets without a minus": ("loss_sign_flipped", mlp(), (ROWS, LABELS), soft_targets(1)),
    "itself": (
        "target_from_output",
        mlp(),
        (ROWS, LABELS),
        lambda model, x, y: F.mse_loss(out := model(x), out.detach()),
    ),
    "own answers": ("target_from_output", mlp(), (ROWS, LABELS), on_own_answers),
    **{
        f"along the batch: {name}": ("batch_axis_mixed", Sequence(layer), (TOKENS, TOKENS), by_words)
        for name, layer in {
            "LSTM": nn.LSTM(16, 16),
            "GRU": nn.GRU(16, 16),
            "attention": attention(batch_first=False),
            "attention with dropout": attention(batch_first=False, dropout=0.1),
        }.items()
    },
    "positions over the batch": ("batch_axis_mixed", Positions("batch"), (TOKENS, TOKENS), by_words),
    "chosen among the samples": ("batch_axis_mixed", mlp(), (ROWS, LABELS), chosen_along(0)),
    "levels over pixels": ("batch_axis_mixed", Denoiser(), (PICTURES,), denoising((-1,))),
    "freezes by name": ("setting_without_effect", with_setting("requires_grad", False), (ROWS, LABELS), cross_entropy),
    "misspelt": ("setting_without_effect", with_setting("inplce", True), (ROWS, LABELS), cross_entropy),
}

HEALTHY = {
    "an advantage that is detached": (nn.ModuleList([mlp(), mlp(outputs=1)]), (ROWS, LABELS), with_advantage),
    "a deviation that no exponential is taken of": (Coder(0), (ROWS, LABELS), of_deviations),
    "chosen among the classes": (mlp(), (ROWS, LABELS), chosen_along(1)),
    "logits": (mlp(), (ROWS, LABELS), cross_entropy),
    "log-softmax over classes": (mlp(), (ROWS, LABELS), nll(1)),
    "softmax inside, logits at the end": (mlp(), (ROWS, LABELS), with_attention_weights),
    "samples against each other": (mlp(), (ROWS, LABELS), contrastive),
    "two columns": (mlp(outputs=1), (ROWS, ROWS.sum(1, keepdim=True)), squares),
    "classes in their place": (
        AS_MANY_CLASSES,
        (TOKENS, TOKENS % TIME),
        lambda model, x, y: F.cross_entropy(model(x).transpose(1, 2), y),
    ),
    "sigmoid of one output": (
        mlp(nn.Sigmoid(), outputs=1),
        (ROWS, (LABELS > 0).float()),
        lambda model, x, y: F.binary_cross_entropy(model(x).squeeze(1), y),
    ),
    "term with a gradient": (mlp(), (ROWS, LABELS), added_as(lambda term: (term.item(), term)[1])),
    "number that is added, and no term": (mlp(), (ROWS, LABELS), added_as(lambda term: 0.1 if term.item() else 0.2)),
    "overlap of probabilities": (mlp(), (ROWS, LABELS), dice(torch.sigmoid)),
    "clipped surrogate": (mlp(), (ROWS, LABELS), surrogate(-1)),
    "the larger of two costs": (mlp(), (ROWS, LABELS), surrogate(1, torch.max, turn=-1)),
    "shares of a mixture": (mlp(outputs=9), (ROWS, LABELS), mixture(1)),
    "squared distances of all pairs": (mlp(), (ROWS, LABELS), distances),
    "all pairs on purpose": (mlp(outputs=1), (ROWS, ROWS.sum(1)), pairs),
    "sum over features, mean over samples": (
        mlp(),
        (ROWS, LABELS),
        loss_and(lambda out: (out**2).sum(1).mean()),
    ),
    "sum that is divided": (mlp(), (ROWS, LABELS), loss_and(lambda out: (out**2).sum() / len(out))),
    "penalty on weights": (
        mlp(),
        (ROWS, LABELS),
        lambda model, x, y: F.cross_entropy(model(x), y) + 1e-4 * sum((p**2).sum() for p in model.parameters()),
    ),
    "minus before an entropy": (
        mlp(),
        (ROWS, LABELS),
        loss_and(lambda out: (out.softmax(1) * out.log_softmax(1)).sum(1).mean()),
    ),
    "weight that is detached": (mlp(), (ROWS, LABELS), loss_and(lambda out: (out.detach() * out).mean())),
    "heads by transpose": (Heads("moved"), (TOKENS, TOKENS), by_words),
    "turned back": (Recurrent("turned back"), (TOKENS, TOKENS), by_words),
    "last state by transpose": (LastState("moved"), (SERIES, LABELS), cross_entropy),
    "frames and pixels": (Stacked(), (SERIES, LABELS), cross_entropy),
    "attention of torch": (Attention(), (TOKENS, TOKENS), by_words),
    "classes in the second dimension": (Channels(), (TOKENS, TOKENS), cross_entropy),
    "mask of padding in attention": (Masked(lambda x: ~(x != 0)), (PADDED, LABELS), cross_entropy),
    "a class picked out": (nn.Embedding(WORDS, WORDS), (TOKENS, TOKENS), weighed(lambda x: x == 1)),
    "mask of tokens in the loss": (nn.Embedding(WORDS, WORDS), (PADDED, TOKENS), weighed(lambda x: x != 0)),
    "root of the variance": (Coder(0.5), (ROWS, LABELS), bound),
    "logarithm of the deviation": (Coder(1), (ROWS, LABELS), bound_of_deviations),
    "pseudo-labels beside labels": (mlp(), (ROWS, LABELS), on_pseudo_labels),
    "rewards with a minus": (mlp(), (ROWS, LABELS), policy(-1)),
    "soft targets with a minus": (mlp(), (ROWS, LABELS), soft_targets(-1)),
    "samples that are one bag": (mlp(), (ROWS, LABELS), bag),
    "penalty on slopes": (mlp(), (ROWS, LABELS), gradient_penalty),
    **{
        f"along time: {name}": (Sequence(layer), (TOKENS, TOKENS), by_words)
        for name, layer in {
            "LSTM": nn.LSTM(16, 16, batch_first=True),
            "GRU": nn.GRU(16, 16, batch_first=True),
            "attention": attention(batch_first=True, dropout=0.1),
        }.items()
    },
    "positions over time": (Positions("time"), (TOKENS, TOKENS), by_words),
    "levels over samples": (Denoiser(), (PICTURES,), denoising((-1, 1, 1, 1))),
    "settings of one's own": (with_setting("rate_of_this_layer", 0.5), (ROWS, LABELS), cross_entropy),
}


class Siamese(nn.Module):
    """Compares two rows by one layer."""

    def __init__(self, *, forgets: bool) -> None:
        super().__init__()
        self.layer, self.out, self.forgets = nn.Linear(FEATURES, 8), nn.Linear(8, 1), forgets

    def forward(self, one, other):
        return self.out((self.layer(one) - self.layer(one if self.forgets else other)).abs()).squeeze(1)


class Quantised(nn.Module):
    """An encoder whose outputs are replaced by the nearest of some codes."""

    def __init__(self, *, straight: bool) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = nn.Linear(FEATURES, 4), nn.Embedding(6, 4), nn.Linear(4, FEATURES)
        self.straight = straight

    def forward(self, x):
        coded = self.encoder(x)
        nearest = self.codes(torch.cdist(coded, self.codes.weight).argmin(1))
        commitment = F.mse_loss(nearest, coded.detach()) + 0.1 * F.mse_loss(coded, nearest.detach())
        passed = coded + (nearest - coded).detach() if self.straight else nearest
        return self.decoder(passed), commitment


class LateDropout(nn.Module):
    """Drops values by a module that it makes while it runs, or by one of its own."""

    def __init__(self, *, owns: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.dropout = nn.Dropout(0.5) if owns else None

    def forward(self, x):
        return self.layer((self.dropout or nn.Dropout(0.5))(x))


class Chosen(nn.Module):
    """Returns 0 where a condition does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def forward(self, x):
        y = self.layer(x).squeeze(1)
        return torch.where(x[:, 0] > 0, y, torch.zeros_like(y))


def gaussian_policy(model, x):
    policy = torch.distributions.Normal(model(x), 1.0)
    action = policy.sample()
    reward = -(action - x[:, :1]).square()
    return -(policy.log_prob(action) * (reward - reward.mean())).mean()


class Pooled(nn.Module):
    """Means over the steps of each sample, or over all samples."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        self.layer, self.out, self.together = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), together

    def forward(self, x):
        seen = self.layer(x.flatten(0, 1))
        mean = seen.mean(0).expand(len(x), 8) if self.together else seen.view(len(x), -1, 8).mean(1)
        return self.out(mean)


class Reader(nn.Module):
    """A causal language model that may shift its labels."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.words, self.layer, self.out = nn.Embedding(WORDS, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, WORDS)
        self.shift = shift

    def forward(self, tokens, labels):
        scores = self.out(self.layer(self.words(tokens))[0])
        scores, labels = scores[:, : TIME - 1 - self.shift], labels[:, self.shift :]
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Last(nn.Module):
    """Reads the last output of a recurrent layer, or that at the length of each sample."""

    def __init__(self, *, at_length: bool) -> None:
        super().__init__()
        self.words, self.layer, self.out = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, CLASSES)
        self.at_length = at_length

    def forward(self, tokens):
        seen, _ = self.layer(self.words(tokens))
        last = (tokens != 0).sum(1) - 1 if self.at_length else torch.full((len(tokens),), TIME - 1)
        return self.out(seen[torch.arange(len(tokens)), last])


class Masked(nn.Module):
    """Attends to tokens by the boolean mask of torch's attention, which is true for what takes part."""

    def __init__(self, *, inverted: bool) -> None:
        super().__init__()
        self.words, self.out, self.inverted = nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES), inverted

    def forward(self, tokens):
        seen, mask = self.words(tokens), (tokens != 0)[:, None, :]
        mask = ~mask if self.inverted else mask
        return self.out(F.scaled_dot_product_attention(seen.mean(1, keepdim=True), seen, seen, attn_mask=mask)[:, 0])


class Sorted(nn.Module):
    """Sorts its samples, and may undo that."""

    def __init__(self, *, undoes: bool) -> None:
        super().__init__()
        self.layer, self.undoes = nn.Linear(FEATURES, CLASSES), undoes

    def forward(self, x):
        order = x[:, 0].argsort()
        out = self.layer(x[order])
        return out[order.argsort()] if self.undoes else out


def signs(zeros):
    """Compare pairs of embeddings; targets are 0 and 1, or -1 and 1."""

    def loss_of(model, x, y):
        like = (y == 0).float()
        return F.cosine_embedding_loss(model(x), model(x.roll(1, 0)), like if zeros else 2 * like - 1)

    return loss_of


def spoken(first, *, raw=False):
    """Return a loss of sequences whose labels are counted from a number."""

    def loss_of(model, x, y):
        scores = model(x).transpose(0, 1)
        labels = torch.stack([y, (y + 1) % CLASSES], 1) + first
        sizes = torch.full((len(x),), TIME), torch.full((len(x),), 2)
        return F.ctc_loss(scores if raw else scores.log_softmax(-1), labels, *sizes)

    return loss_of


def many_labels(last):
    def loss_of(model, x, y):
        return F.binary_cross_entropy(last(model(x)), (x[:, :CLASSES] > -1).float())

    return loss_of


def denoise(target, joins=False):
    """Predict noise: that which was added, other noise, or compare with the noisy input, alone or beside a time."""

    def loss_of(model, x):
        noise = torch.randn_like(x)
        noisy = x + 0.5 * noise
        goal = {"added": noise, "other": torch.randn_like(x), "input": noisy, "clean": x}[target]
        return F.mse_loss(model(torch.cat([noisy, torch.ones(len(x), 1)], 1) if joins else noisy), goal)

    return loss_of


def discounted(uses, by_operation=False):
    """Learn values; the value of the next state counts at the end of an episode too, or not."""

    def loss_of(model, x, y):
        over = (y % 2 == 1).float() if by_operation else torch.tensor([float(each % 2) for each in y.tolist()])
        with torch.no_grad():
            later = 0.9 * model(x.roll(1, 0)).max(1).values
            goal = x[:, 0] + (later * (1 - over) if uses else later)
        return F.mse_loss(model(x)[:, 0], goal)

    return loss_of


def bytes_minus(mean):
    def loss_of(model, x, y):
        rows = (x.abs() * 20).clamp_max(200).to(torch.uint8)
        return F.cross_entropy(model((rows.float() - 30.0 if mean is None else rows - mean).float() / 30), y)

    return loss_of


def teach(model_learns):
    """Add the distance to fixed scores, of the model or of the scores themselves."""

    def loss_of(model, x, y):
        goal = x[:, :CLASSES].softmax(1)
        scores = model(x)
        return F.cross_entropy(scores, y) + F.kl_div(
            (scores if model_learns else goal).log_softmax(1), goal, reduction="batchmean"
        )

    return loss_of


class Ratings(nn.Module):
    """Scores of users and items."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(WORDS, 4), nn.Embedding(WORDS, 4)

    def forward(self, users, items):
        return (self.users(users) * self.items(items)).sum(1)


def ranking(sign):
    """Rank items that were chosen above others drawn at random, or below."""

    def loss_of(model, pairs):
        users, items = pairs[:, 0], pairs[:, 1]
        gap = model(users, items) - model(users, torch.randint(0, WORDS, (len(items),)))
        return -F.logsigmoid(sign * gap).mean()

    return loss_of


def overlap(sign):
    """Maximise the overlap of outputs and a mask, or minimise it."""

    def loss_of(model, x):
        mask, chosen = (x > 0).float(), model(x).sigmoid()
        return sign * (2 * (chosen * mask).sum(1) / (chosen.sum(1) + mask.sum(1) + 1)).mean()

    return loss_of


def own_likelihood(model, x):
    """Use a mask and its complement."""
    mask, chosen = (x > 0).float(), model(x).sigmoid()
    return -(mask * chosen.log() + (1 - mask) * (1 - chosen).log()).mean()


def exploring(sign):
    """Learn a policy with a bonus for its entropy, or a penalty."""

    def loss_of(model, x, y):
        choices = torch.distributions.Categorical(logits=model(x))
        return -(choices.log_prob(y) * x[:, 0]).mean() + sign * 0.1 * choices.entropy().mean()

    return loss_of


ILL |= {
    "ranked the wrong way round": ("loss_sign_flipped", Ratings(), (TOKENS,), ranking(-1)),
    "an overlap that is minimised": ("loss_sign_flipped", mlp(outputs=FEATURES), (ROWS,), overlap(1)),
    "an entropy that is minimised": ("loss_sign_flipped", mlp(), (ROWS, LABELS), exploring(1)),
    "targets 0 and 1 for a loss of signs": ("label_out_of_range", mlp(), (ROWS, LABELS), signs(zeros=True)),
    "labels that are the blank": ("label_out_of_range", nn.Linear(FEATURES, 4), (SERIES, LABELS), spoken(0)),
    "scores for a loss of sequences": (
        "logits_into_prob_loss", nn.Linear(FEATURES, 4), (SERIES, LABELS), spoken(1, raw=True)),
    "one class": (
        "single_class_output", mlp(outputs=1), (ROWS, LABELS),
        lambda model, x, y: F.cross_entropy(model(x), y.float().unsqueeze(1))),
    "labels that are not exclusive": (
        "output_range_mismatch", mlp(), (ROWS,), lambda model, x: many_labels(nn.Softmax(1))(model, x, None)),
    "bytes below zero": ("integer_wraparound", mlp(), (ROWS, LABELS), bytes_minus(torch.tensor(30, dtype=torch.uint8))),
    "noise that was not added": ("label_shuffle_mismatch", mlp(outputs=FEATURES), (ROWS,), denoise("other")),
    "the noisy input as a target": ("target_is_input", mlp(outputs=FEATURES), (ROWS,), denoise("input")),
    "the noisy part of the input as a target": (
        "target_is_input", mlp(inputs=FEATURES + 1, outputs=FEATURES), (ROWS,), denoise("input", joins=True)),
    "a target within the input": (
        "data_leakage", mlp(outputs=1), (ROWS, ROWS[:, 2].clone()),
        lambda model, x, y: F.mse_loss(model(x).squeeze(1), y)),
    "labels that are shifted twice": (
        "shifted_twice", Reader(1), (TOKENS,), lambda model, x: model(x[:, :-1], x[:, 1:])),
    "values after the end": ("terminal_bootstrapped", mlp(), (ROWS, LABELS), discounted(uses=False)),
    "values after an end that is computed": (
        "terminal_bootstrapped", mlp(), (ROWS, LABELS), discounted(uses=False, by_operation=True)),
    "logarithm of the variance for deviation": ("variance_as_deviation", Coder(0), (ROWS, LABELS), log_bound(1.0)),
    "half the logarithm of the variance for deviation": (
        "variance_as_deviation", Coder(0), (ROWS, LABELS), log_bound(0.5)),
    "the state after the padding": ("padding_dominates", Last(at_length=False), (PADDED, LABELS), cross_entropy),
    "an inverted mask of attention": ("mask_inverted", Masked(inverted=True), (PADDED, LABELS), cross_entropy),
    "samples in another order": ("label_shuffle_mismatch", Sorted(undoes=False), (ROWS, LABELS), cross_entropy),
    "the same input twice": (
        "input_ignored", Siamese(forgets=True), (ROWS, ROWS.flip(0), LABELS),
        lambda model, x, other, y: F.binary_cross_entropy_with_logits(model(x, other), (y > 0).float())),
    "a choice without a gradient": (
        "graph_break_detach", Quantised(straight=False), (ROWS,),
        lambda model, x: F.mse_loss(model(x)[0], x) + model(x)[1]),
    "a dropout that the model does not own": (
        "dropout_ignores_mode", LateDropout(owns=False), (ROWS, LABELS), cross_entropy),
    "a teacher that teaches itself": ("term_without_gradient", mlp(), (ROWS, LABELS), teach(model_learns=False)),
    "samples that are pooled": ("batch_axis_mixed", Pooled(together=True), (SERIES, LABELS), cross_entropy),
}  # fmt: skip
HEALTHY |= {
    "ranked above random items": (Ratings(), (TOKENS,), ranking(1)),
    "a mask and its complement": (mlp(outputs=FEATURES), (ROWS,), own_likelihood),
    "an overlap that is maximised": (mlp(outputs=FEATURES), (ROWS,), overlap(-1)),
    "an entropy that is rewarded": (mlp(), (ROWS, LABELS), exploring(-1)),
    "targets -1 and 1 for a loss of signs": (mlp(), (ROWS, LABELS), signs(zeros=False)),
    "labels beside the blank": (nn.Linear(FEATURES, 4), (SERIES, LABELS), spoken(1)),
    "independent labels": (mlp(), (ROWS,), lambda model, x: many_labels(nn.Sigmoid())(model, x, None)),
    "bytes as floats": (mlp(), (ROWS, LABELS), bytes_minus(None)),
    "noise that was added": (mlp(outputs=FEATURES), (ROWS,), denoise("added")),
    "the clean data as a target": (mlp(outputs=FEATURES), (ROWS,), denoise("clean")),
    "the clean part of the input as a target": (
        mlp(inputs=FEATURES + 1, outputs=FEATURES), (ROWS,), denoise("clean", joins=True)),
    "a part of the input to be reproduced": (
        mlp(outputs=1), (ROWS,), lambda model, x: F.mse_loss(model(x).squeeze(1), x[:, 2])),
    "labels after pairs of words": (
        PairsOfWords(), (TOKENS,),
        lambda model, x: F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 2:].flatten())),
    "labels that are shifted once": (Reader(0), (TOKENS,), lambda model, x: model(x[:, :-1], x[:, 1:])),
    "values until the end": (mlp(), (ROWS, LABELS), discounted(uses=True)),
    "an end that is computed": (mlp(), (ROWS, LABELS), discounted(uses=True, by_operation=True)),
    "the state before the padding": (Last(at_length=True), (PADDED, LABELS), cross_entropy),
    "a mask of attention": (Masked(inverted=False), (PADDED, LABELS), cross_entropy),
    "samples in their order again": (Sorted(undoes=True), (ROWS, LABELS), cross_entropy),
    "two inputs": (
        Siamese(forgets=False), (ROWS, ROWS.flip(0), LABELS),
        lambda model, x, other, y: F.binary_cross_entropy_with_logits(model(x, other), (y > 0).float())),
    "a choice that is passed straight through": (
        Quantised(straight=True), (ROWS,), lambda model, x: F.mse_loss(model(x)[0], x) + model(x)[1]),
    "a dropout of the model": (LateDropout(owns=True), (ROWS, LABELS), cross_entropy),
    "a teacher": (mlp(), (ROWS, LABELS), teach(model_learns=True)),
    "a mask that the output is made of": (
        Chosen(), (ROWS,), lambda model, x: F.smooth_l1_loss(model(x), torch.where(x[:, 0] > 0, -10.0, 0.0))),
    "an action that a policy draws": (mlp(outputs=1), (ROWS,), gaussian_policy),
    "steps that are pooled": (Pooled(together=False), (SERIES, LABELS), cross_entropy),
}  # fmt: skip


class Forgetful(nn.Module):
    """Computes something and goes on without it, or with it."""

    def __init__(self, what: str, *, keeps: bool) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(FEATURES, 16), nn.GRUCell(FEATURES, 16), nn.Linear(16, CLASSES)
        self.what, self.keeps = what, keeps

    def forward(self, x):
        if self.what == "state":
            return self.last(self._read(x))
        if self.what == "end":
            return self._read_and_answer(x)
        hidden = self.first(x)
        if self.what == "rows":
            return self.last(hidden - hidden.mean(1 if self.keeps else 0, keepdim=True))
        changed = hidden.relu() if self.what == "relu" else hidden.masked_fill(hidden < 0, 0.0)
        return self.last(changed if self.keeps else hidden)

    def _read(self, x):
        state = new = x.new_zeros(len(x), 16)
        for step in range(TIME):
            new = self.cell(x[:, step], state)
            state = new if self.keeps else state
        return new

    def _read_and_answer(self, x):
        state, answer = x.new_zeros(len(x), 16), 0
        for step in range(TIME):
            answer = answer + self.last(state)
            state = self.cell(x[:, step], state)
        return answer


class Clocked(nn.Module):
    """Gets a time beside its input, and uses its numbers or only its shape."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.times, self.out, self.reads = nn.Embedding(CLASSES, FEATURES), nn.Linear(FEATURES, CLASSES), reads

    def forward(self, x, time):
        return self.out(x + self.times(time if self.reads else torch.zeros_like(time)))


class Policy(nn.Module):
    """Takes a state and the ends of episodes, as recurrent policies do, and has no use of either if it is none."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.is_recurrent = nn.Linear(FEATURES, CLASSES), False

    def forward(self, x, state, ends):
        if self.is_recurrent:
            state = state * ends
        return self.out(x), state


def by_steps(adds):
    """Compute a loss in a loop and add it up, or overwrite it."""

    def loss_of(model, x, y):
        total = 0
        for step in range(3):
            part = F.cross_entropy(model(x[:, step]), y)
            total = total + part if adds else part
        return total

    return loss_of


def actor_critic(detaches):
    def loss_of(model, x, y):
        scores = model(x)
        choices = torch.distributions.Categorical(logits=scores[:, :2])
        advantage = x[:, 0] - scores[:, 2]
        weight = advantage.detach() if detaches else advantage
        return -(choices.log_prob(y.clamp_max(1)) * weight).mean() + advantage.square().mean()

    return loss_of


def ratio_to(old):
    def loss_of(model, x, y):
        new = torch.distributions.Categorical(logits=model(x)).log_prob(y)
        return -((new - old(new)).exp() * x[:, 0]).mean() + 0.01 * model(x).square().mean()

    return loss_of


def augmented(labels):
    """Mix inputs with others, and labels too or not."""

    def loss_of(model, x, y):
        order = torch.randperm(len(x))
        out = model(0.7 * x + 0.3 * x[order])
        return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[order] if labels else y)

    return loss_of


def weighed(weights):
    rare = (torch.arange(SAMPLES) % 8 == 0).long()
    return (
        mlp(outputs=2),
        (ROWS.repeat(2, 1), rare.repeat(2)),
        lambda model, x, y: F.cross_entropy(
            model(torch.cat([x] * 4)), torch.cat([y] * 4), weight=torch.tensor(weights)
        ),
    )


def neighbours(masks):
    def loss_of(model, x, y):
        z = F.normalize(model(x))
        near = z @ z.T / 0.5
        near = near.masked_fill(torch.eye(len(x), dtype=torch.bool), -1e9) if masks else near
        return F.cross_entropy(near, (torch.arange(len(x)) + len(x) // 2) % len(x))

    return loss_of


MASK = (torch.arange(TIME) < torch.randint(3, TIME, (SAMPLES, 1))).float()
OUTSIDE = torch.full((2,), 0.5, requires_grad=True)


def masked_squares(uses):
    def loss_of(model, x, y, mask):
        errors = (model(x).squeeze(-1) - y) ** 2
        return (errors * mask).sum() / mask.sum() if uses else errors.mean()

    return loss_of


def scaled_by(tensor):
    return lambda model, x, y: F.cross_entropy(model(x), y) * (-tensor[0]).exp() + tensor[0]


def in_place(model, x):
    rows = ROWS.clone()[:8] if model.training is None else ROWS_OF_ALL[:8]
    rows += 0.01
    return model(rows).square().mean() + 0 * x.sum()


ROWS_OF_ALL = torch.randn(SAMPLES, FEATURES)
ILL |= {
    "an activation that is dropped": (
        "result_discarded", Forgetful("relu", keeps=False), (ROWS, LABELS), cross_entropy),
    "a masked copy that is dropped": (
        "result_discarded", Forgetful("mask", keeps=False), (ROWS, LABELS), cross_entropy),
    "a state that is not passed on": (
        "result_discarded", Forgetful("state", keeps=False), (SERIES, LABELS), cross_entropy),
    "losses that are overwritten": ("result_discarded", mlp(), (SERIES, LABELS), by_steps(adds=False)),
    "a mean over the samples": ("batch_axis_mixed", Forgetful("rows", keeps=False), (ROWS, LABELS), cross_entropy),
    "a time of which the shape is used": (
        "input_ignored", Clocked(reads=False), (ROWS, LABELS), lambda model, x, y: F.cross_entropy(model(x, y), y)),
    "an advantage with a gradient": ("target_not_detached", mlp(), (ROWS, LABELS), actor_critic(detaches=False)),
    "a ratio to itself": ("term_without_gradient", mlp(), (ROWS, LABELS), ratio_to(lambda new: new)),
    "inputs that are mixed": ("label_shuffle_mismatch", mlp(), (ROWS, LABELS), augmented(labels=False)),
    "weights that grow with a class": ("class_imbalance_collapse", *weighed([7.0, 1.0])),
    "samples beside themselves": ("pairs_with_itself", mlp(), (ROWS, LABELS), neighbours(masks=False)),
    "a mask that is not applied": (
        "mask_not_applied", nn.Linear(FEATURES, 1), (SERIES, SERIES[..., 0].clone(), MASK), masked_squares(uses=False)),
    "one sample of many": (
        "samples_left_out", mlp(), (ROWS, LABELS), lambda model, x, y: F.cross_entropy(model(x)[:1], y[:1])),
    "targets without their fractions": (
        "data_truncated", mlp(outputs=1), (ROWS, ROWS[:, 0].sigmoid()),
        lambda model, x, y: F.mse_loss(model(x).squeeze(1), y.long().float())),
    "data that is overwritten": ("data_overwritten", mlp(), (ROWS,), in_place),
    "a weight outside the optimizer": ("params_not_in_optimizer", mlp(), (ROWS, LABELS), scaled_by(OUTSIDE)),
}  # fmt: skip
HEALTHY |= {
    "an activation": (Forgetful("relu", keeps=True), (ROWS, LABELS), cross_entropy),
    "a masked copy": (Forgetful("mask", keeps=True), (ROWS, LABELS), cross_entropy),
    "a state that is passed on": (Forgetful("state", keeps=True), (SERIES, LABELS), cross_entropy),
    "a state that is last changed when all is said": (Forgetful("end", keeps=True), (SERIES, LABELS), cross_entropy),
    "a pass that learns the shapes": (
        mlp(), (ROWS, LABELS), lambda model, x, y: (model(x.detach()), F.cross_entropy(model(x), y))[1]),
    "losses that are added": (mlp(), (SERIES, LABELS), by_steps(adds=True)),
    "a mean over the features": (Forgetful("rows", keeps=True), (ROWS, LABELS), cross_entropy),
    "a time": (Clocked(reads=True), (ROWS, LABELS), lambda model, x, y: F.cross_entropy(model(x, y), y)),
    "a state that is handed on": (
        Policy(), (ROWS, LABELS), lambda model, x, y: F.cross_entropy(model(x, x[:, :1], x[:, 1:2].clone())[0], y)),
    "an advantage": (mlp(), (ROWS, LABELS), actor_critic(detaches=True)),
    "a ratio to the old policy": (mlp(), (ROWS, LABELS), ratio_to(torch.detach)),
    "inputs and labels that are mixed": (mlp(), (ROWS, LABELS), augmented(labels=True)),
    "weights that fall with a class": weighed([1.0, 7.0]),
    "samples beside others": (mlp(), (ROWS, LABELS), neighbours(masks=True)),
    "a mask that is applied": (
        nn.Linear(FEATURES, 1), (SERIES, SERIES[..., 0].clone(), MASK), masked_squares(uses=True)),
    "a constant outside the optimizer": (mlp(), (ROWS, LABELS), scaled_by(torch.full((2,), 0.5))),
}  # fmt: skip


class Drawn(nn.Module):
    """Draws a code around what it computed, with a gradient or without."""

    def __init__(self, *, learns: bool) -> None:
        super().__init__()
        self.code, self.out, self.learns = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES), learns

    def forward(self, x):
        codes = torch.distributions.Normal(self.code(x), 0.1)
        return self.out(codes.rsample() if self.learns else codes.sample())


def yes_or_no(swaps):
    def loss_of(model, x, y):
        pair = model(x), (x[:, :CLASSES] > 0).float()
        return F.binary_cross_entropy_with_logits(*(pair[::-1] if swaps else pair))

    return loss_of


def alike(sign):
    """Make outputs and data more alike, or less."""
    return lambda model, x: sign * F.cosine_similarity(model(x), x.roll(1, 1)).mean()


ILL |= {
    "answers that should differ": ("loss_sign_flipped", mlp(outputs=FEATURES), (ROWS,), alike(1)),
    "arguments the wrong way round": ("arguments_swapped", mlp(), (ROWS, LABELS), yes_or_no(swaps=True)),
    "answers that are dropped": ("dropout_on_output", mlp(nn.Dropout(0.5)), (ROWS, LABELS), cross_entropy),
    "codes without a gradient": ("graph_break_detach", Drawn(learns=False), (ROWS, LABELS), cross_entropy),
}
HEALTHY |= {
    "answers that should be alike": (mlp(outputs=FEATURES), (ROWS,), alike(-1)),
    "arguments in their order": (mlp(), (ROWS, LABELS), yes_or_no(swaps=False)),
    "codes with a gradient": (Drawn(learns=True), (ROWS, LABELS), cross_entropy),
}
BY_TAPE = sorted({kind for kind, *_ in ILL.values()})


@pytest.mark.parametrize("name", ILL)
def test_a_taped_step_shows_what_is_wrong(name, tmp_path):
    kind, *program = ILL[name]
    finding = found(kind, taped(tmp_path / "run", *program))
    assert finding is not None
    assert finding.severity != "info"
    assert "test_tapes.py" in finding.cause or kind in (
        "batch_axis_mixed",
        "setting_without_effect",
        "input_ignored",
        "mask_not_applied",
    )


@pytest.mark.parametrize("name", HEALTHY)
def test_a_taped_step_of_a_healthy_program_shows_nothing(name, tmp_path):
    case = taped(tmp_path / "run", *HEALTHY[name])
    assert {kind: finding.cause for kind in BY_TAPE if (finding := found(kind, case)) is not None} == {}


class Noisy(Dataset):
    """Adds noise to its samples: to the rows it keeps, to copies of them, or to buffers that it makes or keeps."""

    def __init__(self, way):
        self.rows, self.way = torch.randn(SAMPLES, FEATURES), way
        self.visits = torch.zeros(SAMPLES)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.visits[index] += 1
        row = self.rows[index]
        if self.way == "copy":
            row = row.clone()
        elif self.way == "buffer":
            row = torch.zeros(2, FEATURES)[1].copy_(row)
        row += 0.1
        return (row if self.way != "kept" else row.clone()), index % CLASSES


@pytest.mark.parametrize("way", ["view", "kept", "copy", "buffer"])
def test_a_data_set_that_augments_its_own_rows_in_place_is_found(way, tmp_path):
    finding = found("data_overwritten", taped(tmp_path / "run", mlp(), Noisy(way), cross_entropy))
    assert (finding is not None) is (way in ("view", "kept"))
    assert finding is None or "test_tapes.py" in finding.cause


def test_a_mask_that_is_loaded_a_step_ahead_is_not_taken_for_an_unused_one(tmp_path):
    def one_ahead(loader):  # as the loaders of Accelerate do it
        batches = iter(loader)
        held = next(batches)
        for batch in batches:
            yield held
            held = batch

    program = nn.Linear(FEATURES, 1), (SERIES, SERIES[..., 0].clone(), MASK), masked_squares(uses=True)
    assert found("mask_not_applied", taped(tmp_path / "run", *program, one_ahead)) is None


@pytest.mark.parametrize("cut", [torch.detach, lambda x: x.data, torch.round], ids=["detach", "data", "round"])
def test_the_line_that_cuts_the_graph_is_named(cut, tmp_path):
    model = Detached(cut)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for x, y in [*DataLoader(TensorDataset(ROWS, LABELS), 8)] * 3:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    finding = session.findings[0]
    assert finding.kind == "graph_break_detach"
    assert "self.second(self.cut(self.first(x)).relu())" in finding.cause or "lambda x: x.data" in finding.cause


@pytest.mark.parametrize(("factor", "words"), [(1, "undivided"), (1 / 4, ""), (1 / 16, "divided by 4 twice")])
def test_micro_batches_are_divided_once(factor, words, tmp_path):
    torch.manual_seed(0)
    model = mlp(outputs=1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(4):
            for x, y in DataLoader(TensorDataset(ROWS[:32], LABELS[:32]), 8):
                loss = -F.logsigmoid(model(x).flatten() * (y % 2 * 2 - 1)).mean()
                (loss * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    causes = [each.cause for each in session.findings if each.kind == "accumulation_not_scaled"]
    assert [words in cause for cause in causes] == ([True] if words else [])


@pytest.mark.parametrize(
    "rebuild", [lambda x: torch.tensor(x.tolist()), lambda x: torch.from_numpy(x.detach().numpy() * 1)]
)
def test_numbers_that_leave_torch_and_come_back_cut_the_graph(rebuild, tmp_path):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.down = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.randn(CLASSES, FEATURES) / 4)

        def forward(self, x):
            return self.base(x) + rebuild(x @ self.down.T)

    model = Branch()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for x, y in [*DataLoader(TensorDataset(ROWS, LABELS), 8)] * 4:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    (finding,) = (each for each in session.findings if each.severity != "info")
    assert finding.kind == "graph_break_detach"
    assert finding.sites == ("down",)
    assert "(test_tapes.py" in finding.cause  # the line that lets the numbers go, or takes them back


def test_samples_are_known_without_a_loader_where_rows_are_picked_by_hand(tmp_path):
    model = mlp(nn.Softmax(0), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(6):
            pick = torch.randperm(SAMPLES)[:8]
            optimizer.zero_grad()
            F.cross_entropy(model(ROWS[pick]), LABELS[pick]).backward()
            optimizer.step()
    assert "wrong_dim_softmax" in [finding.kind for finding in session.findings]


@pytest.mark.parametrize("shift", [0, 1])
def test_targets_of_a_causal_model_are_compared_with_its_inputs(shift, tmp_path):
    model = nn.ModuleDict({"words": nn.Embedding(WORDS, 16), "layer": nn.LSTM(16, 16, batch_first=True)})
    model["out"] = nn.Linear(16, WORDS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for (tokens,) in [*DataLoader(TensorDataset(TOKENS), 8)] * 2:
            optimizer.zero_grad()
            scores = model["out"](model["layer"](model["words"](tokens[:, : TIME - shift]))[0])
            F.cross_entropy(scores.flatten(0, 1), tokens[:, shift:].flatten()).backward()
            optimizer.step()
    assert ("future_leak" in [finding.kind for finding in session.findings]) is (shift == 0)


class Labelled(nn.Module):
    """A language model that shifts the labels itself, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)

    def forward(self, tokens, labels, mask):
        scores = self.out(self.block(self.words(tokens), src_mask=mask))
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("masked", [True, False])
def test_a_model_that_shifts_its_labels_itself_must_not_look_ahead(masked, tmp_path):
    model, mask = Labelled(), nn.Transformer.generate_square_subsequent_mask(TIME) if masked else None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(8):
            chosen = torch.randperm(SAMPLES)[:8]
            optimizer.zero_grad()
            model(TOKENS[chosen], TOKENS[chosen], mask).backward()
            optimizer.step()
    assert ("future_leak" in [finding.kind for finding in session.findings]) is not masked


@pytest.mark.parametrize("wraps", [True, False])
def test_a_loss_that_is_wrapped_anew_reaches_no_parameter(wraps, tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for x, y in [*DataLoader(TensorDataset(ROWS, LABELS), 8)] * 3:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss = torch.tensor(loss.item(), requires_grad=True) if wraps else loss
            loss.backward()
            optimizer.step()
    assert ("graph_break_detach" in [finding.kind for finding in session.findings]) is wraps


@pytest.mark.parametrize("way", ["dropped", "copied", "assigned"])
def test_an_average_that_is_computed_and_dropped_is_found(way, tmp_path):
    model = mlp()
    copy = deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sonde.watch({"model": model, "copy": copy}, optimizer, run=tmp_path / "run") as session:
        for x, y in [*DataLoader(TensorDataset(ROWS, LABELS), 8)] * 3:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            for slow, fast in zip(copy.parameters(), model.parameters(), strict=True):
                if way == "assigned":
                    slow.data = 0.9 * slow.data + 0.1 * fast.data
                    continue
                average = 0.9 * slow.data + 0.1 * fast.data
                if way == "copied":
                    slow.data.copy_(average)
    assert ("ema_not_updated" in [finding.kind for finding in session.findings]) is (way == "dropped")


def test_the_last_layer_of_a_loop_over_layers_may_pass_nothing_on(tmp_path):
    layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))
    optimizer = torch.optim.SGD(layers.parameters(), 0.01)
    with sonde.watch(layers, optimizer, run=tmp_path / "run") as session:
        for (x,) in [*DataLoader(TensorDataset(torch.randn(48, 16)), 8)]:
            optimizer.zero_grad()
            for layer in layers:
                (layer(x).square().mean() - 1).abs().backward()
                x = layer(x.flip(0)).detach()
            optimizer.step()
    assert "result_discarded" not in [finding.kind for finding in session.findings]


def test_remembering_an_earlier_token_is_a_task_of_its_own(tmp_path):
    model = nn.ModuleDict({"words": nn.Embedding(WORDS, 16), "layer": nn.LSTM(16, 16, batch_first=True)})
    model["out"] = nn.Linear(16, WORDS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for (tokens,) in [*DataLoader(TensorDataset(TOKENS), 8)] * 2:
            optimizer.zero_grad()
            scores = model["out"](model["layer"](model["words"](tokens))[0])
            F.cross_entropy(scores[:, 1:].flatten(0, 1), tokens[:, :-1].flatten()).backward()
            optimizer.step()
    assert "shifted_twice" not in [finding.kind for finding in session.findings]


@pytest.mark.parametrize(("dim", "ill"), [(-1, True), (0, False), (None, True)])
def test_a_mean_of_probabilities_over_their_own_axis_is_a_constant(dim, ill, tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for x, y in [*DataLoader(TensorDataset(ROWS, LABELS), 8)] * 2:
            optimizer.zero_grad()
            scores = model(x)
            balance = scores.softmax(-1).mean(dim).square().sum()
            (F.cross_entropy(scores, y) + 0.1 * balance).backward()
            optimizer.step()
    assert ("term_without_gradient" in [finding.kind for finding in session.findings]) is ill


@pytest.mark.parametrize("freezes", [True, False])
def test_the_first_loss_of_a_network_that_has_learnt_something_else_may_be_large(freezes, tmp_path):
    torch.manual_seed(0)
    model = mlp()
    with torch.no_grad():
        model[-1].weight.mul_(60)
    model[0].requires_grad_(not freezes)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 1e-3)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for x, y in [*DataLoader(TensorDataset(ROWS, LABELS), 8)] * 3:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    found = {kind for finding in session.findings for kind in (finding.kind, *finding.explains)}
    assert ("large_initial_loss" in found) is not freezes


@pytest.mark.parametrize("detaches", [True, False])
def test_a_term_whose_gradients_are_reset_is_found(detaches, tmp_path):
    maker, judge = mlp(outputs=FEATURES), mlp(outputs=1)
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (maker, judge)]
    with sonde.watch({"maker": maker, "judge": judge}, optimizers, run=tmp_path / "run") as session:
        for (x,) in [*DataLoader(TensorDataset(ROWS), 8)] * 3:
            made = maker(torch.randn_like(x))
            optimizers[1].zero_grad()
            (F.softplus(-judge(x)).mean() + F.softplus(judge(made.detach())).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            shown = made.detach() if detaches else made
            (F.softplus(-judge(shown)).mean() + 0.01 * made.square().mean()).backward()
            optimizers[0].step()
    kinds = [finding.kind for finding in session.findings if finding.severity != "info"]
    assert ("graph_break_detach" in kinds) is detaches


def test_an_attribute_of_a_parameter_that_torch_never_reads_is_found(tmp_path):
    model = mlp()
    for parameter in model[0].parameters():
        parameter.require_grad = False
    finding = found("setting_without_effect", taped(tmp_path / "run", model, (ROWS, LABELS), cross_entropy))
    assert finding is not None
    assert "requires_grad" in finding.cause


@pytest.mark.parametrize("order", ["random", "strided", "by label"])
def test_a_carried_state_is_judged_by_the_order_in_which_rows_are_taken(order, tmp_path):
    layer, head = nn.GRU(FEATURES, 8, batch_first=True), nn.Linear(8, CLASSES)
    optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], 0.01)
    state, weights = None, torch.ones(CLASSES)
    with sonde.watch({"layer": layer, "head": head}, optimizer, run=tmp_path / "run") as session:
        for step in range(6):
            rows = torch.randperm(SAMPLES)[:8] if order == "random" else torch.arange(step % 4, SAMPLES, 4)
            out, state = layer(SERIES[rows] if order != "by label" else SERIES[8 * (step % 4) :][:8], state)
            state = state.detach()
            optimizer.zero_grad()
            losses = F.cross_entropy(head(out[:, -1]), LABELS[rows], reduction="none")
            (losses * weights[LABELS[rows]]).mean().backward()
            optimizer.step()
    assert ("rnn_state_not_reset" in [finding.kind for finding in session.findings]) is (order == "random")


@pytest.mark.parametrize("follows", [True, False])
def test_a_copy_whose_batch_norms_keep_their_first_statistics_is_found(follows, tmp_path):
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
    copy = deepcopy(model).eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sonde.watch({"model": model, "copy": copy}, optimizer, run=tmp_path / "run") as session:
        for x, y in [*DataLoader(TensorDataset(ROWS, LABELS), 8)] * 3:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(copy.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
                for slow, fast in zip(copy.buffers(), model.buffers(), strict=True):
                    if follows:
                        slow.copy_(fast)
    stale = [finding for finding in session.findings if finding.kind == "ema_not_updated"]
    assert [finding.sites for finding in stale] == ([] if follows else [("copy.1",)])


def test_random_positions_in_a_series_are_not_outputs_that_meet_targets(tmp_path):
    model, series = mlp(inputs=8, outputs=8), torch.randn(100)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(6):
            at = torch.randint(90, (8, 1)) + torch.arange(8)  # a window is as long as there are samples
            optimizer.zero_grad()
            F.mse_loss(model(series[at]), series[at + 1]).backward()
            optimizer.step()
    assert "broadcast_loss" not in [finding.kind for finding in session.findings]


@pytest.mark.parametrize(("loud", "cosine"), [(True, False), (False, False), (True, True)])
def test_logits_that_are_products_with_a_loud_embedding_are_found(loud, cosine, tmp_path):
    words = nn.Embedding(WORDS, 256)
    model = nn.ModuleDict({"words": words, "mix": nn.Linear(256, 256)})
    nn.init.normal_(words.weight, std=1.0 if loud else 0.02)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for (tokens,) in [*DataLoader(TensorDataset(TOKENS), 8)] * 3:
            optimizer.zero_grad()
            x = words(tokens[:, :-1])
            x = x + model["mix"](x).tanh()
            table = F.normalize(words.weight) * 16 if cosine else words.weight
            F.cross_entropy((x @ table.T).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    found = {finding.kind: finding for finding in session.findings if finding.severity != "info"}
    assert [finding.sites[0] for kind, finding in found.items() if kind == "large_initial_loss"] == (
        ["words"] if loud and not cosine else []
    )


# ---------------------------------------------------------------- contracts of losses

UNIT = torch.rand(SAMPLES, CLASSES)
TEACHER = mlp().requires_grad_(False)


def binary(scale):
    return lambda model, x, y: F.binary_cross_entropy_with_logits(model(x), scale * y)


def divergence(student, teacher):
    return lambda model, x, y: F.kl_div(student(model(x)), teacher(TEACHER(x)), reduction="batchmean")


def squeezed(how, scale=1.0):
    return lambda model, x, y: F.cross_entropy(scale * how(model(x)), y)


def similar(scale):
    def loss(model, x, y):
        one, other = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1), dim=1)
        return F.cross_entropy(scale * one @ other.T, torch.arange(len(x)))

    return loss


def to_targets(how, shift):
    return lambda model, x, y: ((how(model(x)) - (y + shift)) ** 2).mean()


CONTRACTS = [
    ("label_out_of_range", (ROWS, UNIT), binary(255), binary(1)),
    ("logits_into_prob_loss", (ROWS, LABELS), divergence(lambda s: s.softmax(1), lambda t: t.softmax(1)),
     divergence(lambda s: s.log_softmax(1), lambda t: t.softmax(1))),
    ("logits_into_prob_loss", (ROWS, LABELS), divergence(lambda s: s.log_softmax(1), lambda t: t.log_softmax(1)),
     divergence(lambda s: (s / 2).log_softmax(1), lambda t: (t / 2).softmax(1))),
    ("output_range_mismatch", (ROWS, LABELS), squeezed(torch.tanh), squeezed(torch.tanh, 30.0)),
    ("output_range_mismatch", (ROWS, LABELS), similar(0.07), similar(1 / 0.07)),
    ("output_range_mismatch", (ROWS, UNIT), to_targets(torch.tanh, 3.0), to_targets(torch.sigmoid, 0.0)),
    ("output_range_mismatch", (ROWS, (UNIT > 0.3).float()), lambda model, x, y: F.cross_entropy(model(x), y),
     lambda model, x, y: F.cross_entropy(model(x), y / y.sum(1, keepdim=True).clamp_min(1))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "tensors", "ill", "well"), CONTRACTS)
def test_a_loss_that_gets_what_it_does_not_expect_is_named(tmp_path, kind, tensors, ill, well):
    finding = found(kind, taped(tmp_path / "ill", mlp(), tensors, ill))
    assert finding is not None
    assert " expects " in finding.cause
    assert found(kind, taped(tmp_path / "well", mlp(), tensors, well)) is None


# ---------------------------------------------------------------- samples, weights and gradients


def weighed(reduction):
    return lambda model, x, y: (F.cross_entropy(model(x), y, reduction=reduction) * torch.linspace(0, 1, len(x))).mean()


def focal(reduction):
    def loss(model, x, y):
        each = F.cross_entropy(model(x), y, reduction=reduction)
        return ((1 - torch.exp(-each)) ** 2 * each).mean()

    return loss


def reinforced(draw):
    def loss(model, x, y):
        policy = torch.distributions.Normal(model(x), 1.0)
        action = draw(policy)
        return -(policy.log_prob(action) * (x[:, :CLASSES] - action).square().neg().detach()).mean()

    return loss


def bootstrapped(best):
    def loss(model, x, y):
        with torch.no_grad():
            target = x[:, 0] + 0.9 * best(TEACHER(x))
        return F.smooth_l1_loss(model(x)[:, 0], target)

    return loss


def mixed(second):
    def loss(model, x, y):
        order = torch.randperm(len(x))
        inputs = 0.6 * x + 0.4 * x[order]
        targets = F.one_hot(y, CLASSES).float()
        return -((0.6 * targets + 0.4 * targets[second(order)]) * F.log_softmax(model(inputs), 1)).sum(1).mean()

    return loss


def repeated(times):
    return lambda model, x, y: F.cross_entropy(model(times(x)), y.repeat_interleave(2))


def of_length_one(dim):
    def loss(model, x, y):
        z = F.normalize(model(x), dim=dim)
        return F.cross_entropy(z @ z.detach().T / 0.1, torch.arange(len(x)))

    return loss


def attacked(clear):
    def loss(model, x, y):
        near = x.clone().requires_grad_()
        F.cross_entropy(model(near), y).backward()
        clear(model)
        return F.cross_entropy(model(x + 0.1 * near.grad.sign()), y)

    return loss


def of_a_copy(copy):
    return lambda model, x, y: F.cross_entropy(copy(model)(x), y)


def ratio(sign):
    def loss(model, x, y):
        advantage = torch.linspace(-1, 1, len(x))
        likely = model(x).log_softmax(1).gather(1, y[:, None]).squeeze(1)
        before = TEACHER(x).log_softmax(1).gather(1, y[:, None]).squeeze(1)
        return -(torch.exp(sign * (likely - before)) * advantage).mean()

    return loss


def scaled(times):
    return lambda model, x, y: F.cross_entropy(model((times * x).clamp(-1, 1)), y)


RELATIONS = [
    ("wrong_loss_reduction", weighed("mean"), weighed("none")),
    ("wrong_loss_reduction", focal("mean"), focal("none")),
    ("target_not_detached", reinforced(lambda p: p.rsample()), reinforced(lambda p: p.sample())),
    ("index_for_value", bootstrapped(lambda q: q.argmax(1)), bootstrapped(lambda q: q.max(1)[0])),
    ("label_shuffle_mismatch", mixed(lambda order: order.flip(0)), mixed(lambda order: order)),
    ("label_shuffle_mismatch", repeated(lambda x: x.repeat(2, 1)), repeated(lambda x: x.repeat_interleave(2, 0))),
    ("batch_axis_mixed", of_length_one(0), of_length_one(1)),
    ("missing_zero_grad", attacked(lambda model: None), attacked(lambda model: model.zero_grad())),
    ("graph_break_detach", of_a_copy(deepcopy), of_a_copy(lambda model: model)),
    ("loss_sign_flipped", ratio(-1), ratio(1)),
    ("data_truncated", scaled(1e6), scaled(0.3)),
]


@pytest.mark.parametrize(("kind", "ill", "well"), RELATIONS)
def test_a_relation_between_samples_weights_or_gradients_is_named(tmp_path, kind, ill, well):
    assert found(kind, taped(tmp_path / "ill", mlp(), (ROWS, LABELS), ill)) is not None
    assert found(kind, taped(tmp_path / "well", mlp(), (ROWS, LABELS), well)) is None


@pytest.mark.parametrize("inverted", [True, False])
def test_a_loss_that_draws_unlike_samples_together_is_named(tmp_path, inverted):
    first = 3 * F.one_hot(LABELS, FEATURES).float() + 0.1 * ROWS
    same = torch.arange(2 * SAMPLES) % 2 == 0
    pairs = [first.repeat(2, 1), torch.where(same[:, None], first.repeat(2, 1) + 0.1, first.roll(1, 0).repeat(2, 1))]

    def contrast(model, one, other, label):
        distance = F.pairwise_distance(model(one), model(other))
        return ((1 - label) * distance**2 + label * (4 - distance).clamp_min(0) ** 2).mean()

    def whole(loader):
        return [tuple(loader.dataset.tensors)] * 4

    tensors = (*pairs, (same if inverted else ~same).float())
    case = taped(tmp_path / "run", mlp(), tensors, contrast, iterate=whole)
    assert (found("loss_sign_flipped", case) is not None) == inverted


@pytest.mark.parametrize("clears", [True, False])
def test_a_closure_that_does_not_clear_gradients_is_named(tmp_path, clears):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        if clears:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(ROWS), LABELS)
        loss.backward()
        return loss

    with sonde.watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(4):
            optimizer.zero_grad()
            optimizer.step(closure)
    case = Case()
    for folder in tapes.folders(tmp_path / "run").values():
        case.take_tape(tapes.read(folder))
    assert (found("missing_zero_grad", case) is None) == clears


def test_a_question_is_asked_once_for_each_tape(tmp_path):
    asked = []

    @on_tape
    def ask(reading):
        asked.append(reading)

    case = taped(tmp_path / "run", mlp(), (ROWS, LABELS), cross_entropy)
    assert ask(case) is ask(case) is None
    assert asked == [case.taped]


@pytest.mark.parametrize("split", [True, False])
def test_a_split_of_rows_is_no_leak(tmp_path, split):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = slice(0, 12) if split else slice(0, SAMPLES)
    with sonde.watch(model, optimizer, run=tmp_path / "run", diagnose=True) as session:
        for step in range(24):
            optimizer.zero_grad()
            chosen = model(ROWS)[torch.arange(SAMPLES)[rows]] if split else model(ROWS)
            F.cross_entropy(chosen, LABELS[rows]).backward()
            optimizer.step()
            if step % 4 == 3:
                model.eval()
                with torch.no_grad():
                    session.log(val_loss=F.cross_entropy(model(ROWS)[12:], LABELS[12:]))
                model.train()
    leaks = [each for each in session.findings if each.kind == "data_leakage" and each.severity != "info"]
    assert bool(leaks) is not split


@pytest.mark.parametrize(
    "loss", [lambda p, a, r: (-r * p.log_prob(a)).mean(), lambda p, a, r: -(p.log_prob(a) * -r).mean()]
)
def test_a_minus_before_the_weight_of_a_choice_is_not_judged(tmp_path, loss):
    model, rewards = mlp(), torch.linspace(-1, 1, SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", diagnose=True) as session:
        for _ in range(24):
            optimizer.zero_grad()
            policy = torch.distributions.Categorical(logits=model(ROWS))
            loss(policy, policy.sample(), rewards).backward()
            optimizer.step()
    assert "loss_sign_flipped" not in {each.kind for each in session.findings}


@pytest.mark.parametrize("made_up", [True, False])
def test_noise_is_an_odd_target_only_where_the_model_is_given_data(tmp_path, made_up):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", diagnose=True) as session:
        for _ in range(24):
            optimizer.zero_grad()
            output = model(torch.randn(*ROWS.shape) if made_up else ROWS)
            F.mse_loss(output, torch.randn(*output.shape)).backward()
            optimizer.step()
    assert ("label_shuffle_mismatch" in {each.kind for each in session.findings}) is not made_up


# ---------------------------------------------------------------------- what is compared, joined and passed on


class Seq2Seq(nn.Module):
    """An encoder and a decoder that starts from its state."""

    def __init__(self, cell_of=lambda h, c: c):
        super().__init__()
        self.encoder, self.decoder = (nn.LSTM(1, 8, batch_first=True) for _ in range(2))
        self.head, self.cell_of = nn.Linear(8, 1), cell_of

    def forward(self, past, known):
        _, (h, c) = self.encoder(past.unsqueeze(-1))
        return self.head(self.decoder(known.unsqueeze(-1), (h, self.cell_of(h, c)))[0]).squeeze(-1)


PAST, AHEAD = torch.randn(SAMPLES, TIME), torch.randn(SAMPLES, 5)
BOXES = torch.rand(SAMPLES, 2) * 0.6
BOXES = torch.cat([BOXES, BOXES + 0.1 + 0.3 * torch.rand(SAMPLES, 2)], 1)
CENTRES = torch.cat([(BOXES[:, :2] + BOXES[:, 2:]) / 2, BOXES[:, 2:] - BOXES[:, :2]], 1)
SCHEDULE = torch.linspace(0.1, 0.9, 10)
ANSWERS = 3 * F.one_hot(LABELS, CLASSES).float()
SILENT = SERIES * (torch.arange(TIME)[None, :, None] < torch.arange(SAMPLES)[:, None, None] % 4 + 2)


def forecast(shifted):
    def loss(model, past, ahead):
        return F.mse_loss(model(past, torch.cat([past[:, -1:], ahead[:, :-1]], 1) if shifted else ahead), ahead)

    return loss


def to_corners(box):
    return torch.cat([box[:, :2] - box[:, 2:] / 2, box[:, :2] + box[:, 2:] / 2], 1)


def by_column(box):
    x, y, w, h = box.unbind(1)
    return torch.stack([x - 0.5 * w, y - 0.5 * h, x + 0.5 * w, y + 0.5 * h], 1)


def located(convert):
    return lambda model, x, box: F.smooth_l1_loss(convert(model(x).sigmoid()), convert(box))


def area(model, x, box):
    return (model(x).exp()[:, 0] - (box[:, 2:] - box[:, :2]).prod(1)).square().mean()


def diffused(target):
    def loss(model, x, y):
        a, noise = SCHEDULE[torch.randint(10, (len(x),)), None], torch.randn_like(x)
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        return F.mse_loss(model(noisy), {"noise": noise, "noisy": noisy, "clean": x}[target])

    return loss


def joined(positive, negative, both=1.0):
    def loss(model, x, y):
        query, key = F.normalize(model(x)), F.normalize(model(x + 0.1))
        other = ~torch.eye(len(x), dtype=torch.bool)
        similar = query @ key.T
        scores = torch.cat([similar.diagonal()[:, None] / positive, similar[other].view(len(x), -1) / negative], 1)
        return F.cross_entropy(scores / both, torch.zeros(len(x), dtype=torch.long))

    return loss


def distilled(order):
    def loss(model, x, y, teacher):
        scores, soft = model(x), F.softmax(teacher[order(len(x))], 1)
        return F.cross_entropy(scores, y) + F.kl_div(F.log_softmax(scores, 1), soft, reduction="batchmean")

    return loss


def by_dimension(add_up):
    def loss(model, x, y):
        policy = torch.distributions.Normal(model(x), 1.0)
        action = policy.rsample()
        value = action.square().sum(1, keepdim=True)
        return (value - 0.1 * add_up(policy.log_prob(action))).mean()

    return loss


def critic(target):
    def loss(model, x, y):
        return F.mse_loss(model(x), target(model(x).detach()))

    return loss


class ReadAt(nn.Module):
    """A recurrent layer that is read at one position."""

    def __init__(self, at):
        super().__init__()
        self.rnn, self.head, self.at = nn.LSTM(FEATURES, 8, batch_first=True), nn.Linear(8, CLASSES), at

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[torch.arange(len(x)), self.at(x)])


QUESTIONS = [
    ("data_leakage", Seq2Seq(), (PAST, AHEAD), forecast(False), forecast(True)),
    ("box_format", mlp(outputs=4), (ROWS, BOXES), located(to_corners), area),
    ("box_format", mlp(outputs=4), (ROWS, BOXES), located(by_column), squares),
    ("box_format", mlp(outputs=4), (ROWS, CENTRES), area, located(to_corners)),
    ("target_is_input", mlp(outputs=FEATURES), (ROWS, LABELS), diffused("noisy"), diffused("noise")),
    ("target_is_input", mlp(outputs=FEATURES), (ROWS, LABELS), diffused("noisy"), diffused("clean")),
    ("temperature_on_one_side", mlp(), (ROWS, LABELS), joined(1, 0.1), joined(0.1, 0.1)),
    ("temperature_on_one_side", mlp(), (ROWS, LABELS), joined(0.1, 1), joined(1, 1, 0.1)),
    (
        "label_shuffle_mismatch",
        mlp(),
        (ROWS, LABELS, ANSWERS),
        distilled(lambda count: torch.arange(count).roll(1)),
        distilled(torch.arange),
    ),
    ("broadcast_loss", mlp(), (ROWS, LABELS), by_dimension(lambda p: p), by_dimension(lambda p: p.sum(1, True))),
    (
        "broadcast_loss",
        mlp(outputs=1),
        (ROWS, LABELS),
        critic(lambda q: q + torch.arange(4.0)),
        critic(lambda q: q.expand(-1, 4)),
    ),
]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(("kind", "model", "tensors", "ill", "well"), QUESTIONS)
def test_what_is_compared_joined_or_drawn_is_named(tmp_path, kind, model, tensors, ill, well):
    assert found(kind, taped(tmp_path / "ill", model, tensors, ill)) is not None
    assert found(kind, taped(tmp_path / "well", model, tensors, well)) is None


@pytest.mark.parametrize(("ill", "well"), [(lambda h, c: h, lambda h, c: c), (lambda h, c: h, lambda h, c: c * 0.5)])
def test_a_hidden_state_in_the_place_of_a_cell_state_is_named(tmp_path, ill, well):
    for name, cell_of in (("ill", ill), ("well", well)):
        case = taped(tmp_path / name, Seq2Seq(cell_of), (PAST, AHEAD), forecast(True))
        assert (found("wrong_state_returned", case) is not None) == (name == "ill")


def test_a_state_that_is_read_after_silence_is_named(tmp_path):
    ends = lambda x: (x != 0).any(2).sum(1) - 1  # noqa: E731
    case = taped(tmp_path / "ill", ReadAt(lambda x: torch.full((len(x),), TIME - 1)), (SILENT, LABELS), cross_entropy)
    assert found("padding_dominates", case) is not None
    assert found("padding_dominates", taped(tmp_path / "well", ReadAt(ends), (SILENT, LABELS), cross_entropy)) is None
    model = ReadAt(lambda x: torch.full((len(x),), TIME - 1))
    assert found("padding_dominates", taped(tmp_path / "whole", model, (SERIES, LABELS), cross_entropy)) is None


@pytest.mark.parametrize("sign", [1, -1])
def test_a_tape_shows_whether_a_loss_draws_outputs_to_their_targets(tmp_path, sign):
    def dice(model, x, y):
        found, mask = model(x).sigmoid(), F.one_hot(y, CLASSES).float()
        return 1 - sign * ((2 * found * mask).sum(1) / (found.sum(1) + mask.sum(1) + 1)).mean()

    case = taped(tmp_path / "run", mlp(), (ROWS, LABELS), dice)
    assert drawn_to_targets(case) is (sign == 1)


def squares_in_pictures(move=lambda mask, number: mask, shade=1.0):
    """Return noisy pictures of squares, and their masks, each moved in some way."""
    masks = torch.zeros(SAMPLES, 1, 20, 20)
    for number, mask in enumerate(masks):
        top, left, size = number % 9 + 1, number * 5 % 4 + 1, 4 + number % 5
        mask[0, top : top + size, left : left + size] = 1
    pictures = shade * masks + 0.2 * torch.randn(masks.shape)
    return pictures, torch.stack([move(mask, number) for number, mask in enumerate(masks)])


@pytest.mark.parametrize(
    ("data", "ill"),
    [
        (squares_in_pictures(lambda mask, number: mask.roll((number % 7 - 3, 4 - number % 9), (1, 2))), True),
        (squares_in_pictures(lambda mask, number: mask.flip(2) if number % 2 else mask), True),
        (squares_in_pictures(), False),
        (squares_in_pictures(shade=-1.0), False),
        (squares_in_pictures(lambda mask, number: mask.roll((1, -1), (1, 2))), False),  # as annotations are
        (squares_in_pictures(lambda mask, number: mask.roll(number, 1), shade=0.0), False),  # nothing to be seen
    ],
    ids=["cropped apart", "flipped apart", "aligned", "dark", "rough", "invisible"],
)
def test_masks_that_do_not_lie_on_their_pictures_are_named(tmp_path, data, ill):
    model = nn.Conv2d(1, 1, 5, padding=2)
    case = taped(tmp_path / "run", model, data, lambda model, x, y: F.binary_cross_entropy_with_logits(model(x), y))
    assert (found("label_shuffle_mismatch", case) is not None) is ill


# ---------------------------------------------------------------------- weights, lengths and masks

RARE = (torch.arange(SAMPLES) % 8 == 0).float()
FRAMES, SPOKEN = torch.randn(SAMPLES, TIME, FEATURES), torch.arange(4).repeat(SAMPLES, 1) + 1


def rare(weight):
    weight = torch.tensor([weight])
    return lambda model, x, y: F.binary_cross_entropy_with_logits(model(x)[:, 0], y, pos_weight=weight)


def ignoring(index):
    return lambda model, x, y: F.cross_entropy(model(x), y, ignore_index=index)


def aligned(frames):
    def loss(model, x, y):
        scores = F.log_softmax(model(x[:, :frames]), -1).transpose(0, 1)
        sizes = torch.full((len(x),), frames), torch.full((len(x),), y.shape[1])
        return F.ctc_loss(scores, y, *sizes, zero_infinity=True)

    return loss


def counted(rate, **options):
    return lambda model, x, y: F.poisson_nll_loss(rate(model(x)[:, 0]), y.float(), **options)


def bootstrap(flag):
    def loss(model, x, y):
        with torch.no_grad():
            target = y.float() + 0.9 * flag((torch.arange(len(x)) % 8 == 0).float()) * model(x + 1).amax(1)
        return F.smooth_l1_loss(model(x).gather(1, y[:, None])[:, 0], target)

    return loss


def all_at_once(loader):
    return [tuple(loader.dataset.tensors)] * 4


WEIGHTS = [
    ("class_imbalance_collapse", mlp(), (ROWS, RARE), rare(1 / 7), rare(7.0)),
    ("class_imbalance_collapse", mlp(), (ROWS, RARE), rare(1 / 7), rare(0.5)),  # chosen by hand
    ("class_imbalance_collapse", mlp(), (ROWS, 1 - RARE), rare(7.0), rare(1 / 7)),
    ("samples_left_out", mlp(), (ROWS, LABELS), ignoring(0), ignoring(-1)),
    ("samples_left_out", mlp(outputs=6), (FRAMES, SPOKEN), aligned(3), aligned(TIME)),
    ("output_range_mismatch", mlp(), (ROWS, LABELS), counted(torch.exp), counted(torch.exp, log_input=False)),
    ("output_range_mismatch", mlp(), (ROWS, LABELS), counted(F.softplus), counted(lambda score: score)),
    ("terminal_bootstrapped", mlp(), (ROWS, LABELS), bootstrap(lambda done: done), bootstrap(lambda done: 1 - done)),
]


@pytest.mark.parametrize(("kind", "model", "tensors", "ill", "well"), WEIGHTS)
def test_weights_lengths_and_flags_that_do_not_fit_the_data_are_named(tmp_path, kind, model, tensors, ill, well):
    assert found(kind, taped(tmp_path / "ill", model, tensors, ill, all_at_once)) is not None
    assert found(kind, taped(tmp_path / "well", model, tensors, well, all_at_once)) is None


class Attends(nn.Module):
    """Attention over tokens with a mask that is added to the scores."""

    def __init__(self, mask_of, fused):
        super().__init__()
        self.table, self.head, self.mask_of, self.fused = nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES), mask_of, fused

    def forward(self, tokens):
        x, mask = self.table(tokens), self.mask_of(tokens != 0)[:, None, None, :]
        if self.fused:
            mixed = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)[:, 0]
        else:
            mixed = torch.softmax((x @ x.transpose(1, 2))[:, None] + mask, -1)[:, 0] @ x
        return self.head(mixed.mean(1))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("low", [-1e4, -1e9])
def test_a_mask_that_is_added_the_wrong_way_round_is_named(tmp_path, fused, low):
    ill, well = Attends(lambda keep: keep.float() * low, fused), Attends(lambda keep: (1.0 - keep.float()) * low, fused)
    assert found("mask_inverted", taped(tmp_path / "ill", ill, (PADDED, LABELS), cross_entropy)) is not None
    assert found("mask_inverted", taped(tmp_path / "well", well, (PADDED, LABELS), cross_entropy)) is None


@pytest.mark.parametrize(("sign", "ill"), [(1.0, True), (-1.0, False)])
def test_a_generator_that_helps_its_judge_is_named_though_they_are_trained_in_turn(tmp_path, sign, ill):
    pair = nn.ModuleDict({"maker": mlp(outputs=FEATURES), "judge": mlp(outputs=1)})
    optimizers = {name: torch.optim.SGD(each.parameters(), 0.01) for name, each in pair.items()}
    one = torch.tensor(1.0)
    with sonde.watch(pair, optimizers["maker"], run=tmp_path / "run", budget=None) as session:
        for _ in range(4):
            session.tape()  # is due at the second step from here
            for _ in range(3):
                optimizers["judge"].zero_grad()
                pair["judge"](ROWS).mean().backward(-one)
                pair["judge"](pair["maker"](torch.randn(8, FEATURES)).detach()).mean().backward(one)
                optimizers["judge"].step()
            session.tape()
            optimizers["judge"].step()  # without gradients: the next round is that of the maker
            optimizers["maker"].zero_grad()
            pair["judge"](pair["maker"](torch.randn(8, FEATURES))).mean().backward(sign * one)
            optimizers["maker"].step()
    case = Case()
    for folder in tapes.folders(tmp_path / "run").values():
        case.take_tape(tapes.read(folder))
    assert len(case.rounds) == 2
    assert (found("loss_sign_flipped", case) is not None) is ill


class Encoder(nn.Module):
    """A mean, a logarithm of a variance, and what is decoded of a draw."""

    def __init__(self, size=16):
        super().__init__()
        self.mean, self.variance, self.decoder = nn.Linear(size, 3), nn.Linear(size, 3), nn.Linear(3, size)

    def forward(self, x):
        mean, variance = self.mean(x), self.variance(x)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * variance).exp()), mean, variance


WIDE = torch.randn(SAMPLES, 16)


def bound(of_code, of_data=1.0, reduction="mean", over=torch.sum):
    def loss(model, x):
        back, mean, variance = model(x)
        code = -0.5 * over(1 + variance - mean.pow(2) - variance.exp(), 1).mean()
        fit = F.mse_loss(back, x, reduction=reduction)
        return of_data * (fit / len(x) if reduction == "sum" else fit) + of_code * code

    return loss


@pytest.mark.parametrize(
    ("loss", "ill"),
    [
        (bound(1.0), True),
        (bound(1.0, of_data=16.0), False),
        (bound(0.01), False),
        (bound(1.0, reduction="sum"), False),
        (bound(1.0, over=torch.mean), False),
    ],
)
def test_a_divergence_that_outweighs_an_averaged_reconstruction_is_named(tmp_path, loss, ill):
    case = taped(tmp_path / "run", Encoder(), (WIDE,), loss)
    assert (found("aux_loss_dominates", case) is not None) is ill


def squares(model):
    return sum(each.square().sum() for each in model.parameters())


@pytest.mark.parametrize(
    ("loss", "ill"),
    [
        (lambda model, x: cross_entropy(model, x, LABELS[:8]) + 10 * squares(model), True),
        (lambda model, x: (model(x) - 1).abs().mean() * 2 + 10 * squares(model), True),  # a loss written by hand
        (lambda model, x: cross_entropy(model, x, LABELS[:8]) + 1e-4 * squares(model), False),
        (lambda model, x: cross_entropy(model, x, LABELS[:8]) + 10 * model(x).square().sum(), False),  # made of data
        (lambda model, x: 10 * squares(model) + 0 * model(x).sum(), False),  # nothing else is minimised
    ],
)
def test_a_penalty_on_weights_that_outweighs_the_loss_is_named(tmp_path, loss, ill):
    case = taped(tmp_path / "run", mlp(), (ROWS,), loss)
    finding = found("aux_loss_dominates", case)
    assert (finding is not None) is ill
    assert not ill or "penalty on weights" in finding.cause


@pytest.mark.parametrize("dim", [None, 1])
def test_a_penalty_on_the_gradient_of_the_whole_batch_is_named(tmp_path, dim):
    def loss(model, x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return model(x).mean() + (gradient.norm(2, dim=dim) - 1).square().mean()

    case = taped(tmp_path / "run", mlp(nn.Tanh(), outputs=1), (ROWS,), loss)
    assert (found("batch_axis_mixed", case) is not None) is (dim is None)
    assert found("result_discarded", case) is None


@pytest.mark.parametrize(("maximize", "sign"), [(True, 1), (False, 1), (True, -1)])
def test_an_optimizer_that_maximises_a_loss_is_named(tmp_path, maximize, sign):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, maximize=maximize)
    with sonde.watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(4):
            optimizer.zero_grad()
            (sign * cross_entropy(model, ROWS, LABELS)).backward()
            optimizer.step()
    case = Case()
    for folder in tapes.folders(tmp_path / "run").values():
        case.take_tape(tapes.read(folder))
    assert (found("loss_sign_flipped", case) is not None) is (maximize and sign > 0)


def test_masks_are_compared_with_the_pictures_of_their_own_batch(tmp_path):
    model = nn.Conv2d(1, 1, 5, padding=2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    batches = list(zip(*(each.split(8) for each in squares_in_pictures()), strict=True))
    with sonde.watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(4):
            optimizer.zero_grad()
            for pictures, masks in batches:  # accumulated
                F.binary_cross_entropy_with_logits(model(pictures), masks).backward()
            optimizer.step()
    case = Case()
    for folder in tapes.folders(tmp_path / "run").values():
        case.take_tape(tapes.read(folder))
    assert found("label_shuffle_mismatch", case) is None


# ---------------------------------------------------------------------- samples that a loop takes by itself


def by_index(loader):
    order = torch.arange(SAMPLES).roll(3)
    for at in range(0, SAMPLES, 8):
        yield tuple(each[order[at : at + 8]] for each in loader.dataset.tensors)


def by_slice(loader):
    for at in range(0, SAMPLES, 8):
        yield tuple(each[at : at + 8] for each in loader.dataset.tensors)


class Tagger(nn.Module):
    """Reads words step by step and tags each of them."""

    def __init__(self):
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(WORDS, 8), nn.GRU(8, 8), nn.Linear(8, CLASSES)

    def forward(self, words):
        return self.head(self.rnn(self.table(words.t()))[0])


TAGS = TOKENS % CLASSES


def tagged(order):
    return lambda model, x, y: F.cross_entropy(order(model(x)).reshape(-1, CLASSES), y.reshape(-1))


def drawn_states(table: torch.Tensor, order):
    """Draw states without a loader, and make a target of the value of the next ones."""

    def loss_of(model, x, y):
        states = torch.randint(len(table), (12,))
        reward, following = (states == 3).float(), (states + 1) % len(table)
        target = (reward + 0.9 * order(model(table[following]))).detach()
        return F.mse_loss(model(table[states]).squeeze(1).expand_as(target), target)

    return loss_of


@pytest.mark.parametrize(("order", "ill"), [(lambda value: value, True), (lambda value: value.squeeze(1), False)])
def test_a_column_of_values_and_a_row_of_rewards_of_the_same_states_are_broadcast(tmp_path, order, ill):
    case = taped(tmp_path / "run", mlp(outputs=1), (ROWS, LABELS), drawn_states(ROWS, order), lambda _: [(0, 0)] * 4)
    assert (found("broadcast_loss", case) is not None) is ill


@pytest.mark.parametrize(("sign", "ill"), [(1, True), (-1, False)])
def test_a_generator_that_steps_seldom_is_taped_and_must_raise_what_its_critic_lowers(tmp_path, sign, ill):
    nets = {"generator": mlp(inputs=4, outputs=FEATURES), "critic": mlp(outputs=1)}
    opts = {name: torch.optim.Adam(net.parameters(), 1e-3, betas=(0.5, 0.9)) for name, net in nets.items()}
    with sonde.watch(nets, list(opts.values()), run=tmp_path / "run"):
        for number in range(25):
            opts["critic"].zero_grad()
            made, data = nets["generator"](torch.randn(8, 4)).detach(), torch.randn(8, FEATURES)
            mixed = (made + torch.rand(8, 1) * (data - made)).requires_grad_()
            (slope,) = torch.autograd.grad(nets["critic"](mixed).sum(), mixed, create_graph=True)
            penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
            (nets["critic"](made).mean() - nets["critic"](data).mean() + penalty).backward()
            opts["critic"].step()
            if number % 5 == 4:
                opts["generator"].zero_grad()
                (sign * nets["critic"](nets["generator"](torch.randn(8, 4))).mean()).backward()
                opts["generator"].step()
    run, case = sonde.open_run(tmp_path / "run"), Case()
    assert "turn" in {run.tape(step).reason for step in run.tapes()}
    for folder in tapes.folders(tmp_path / "run").values():
        case.take_tape(tapes.read(folder))
    assert (found("loss_sign_flipped", case) is not None) is ill


@pytest.mark.parametrize(
    ("choose", "ill"),
    [
        (lambda rows: SAMPLES - 1 - rows, True),
        (lambda rows: rows, False),
        (lambda rows: (rows + 1) % SAMPLES, False),  # the next step of a series
    ],
)
def test_targets_of_other_rows_than_the_inputs(tmp_path, choose, ill):
    values = ROWS.sum(1)

    def loss_of(model, x, y):
        rows = torch.randperm(SAMPLES // 2)[:8]
        return F.mse_loss(model(ROWS[rows]).squeeze(1), values[choose(rows)])

    case = taped(tmp_path / "run", mlp(outputs=1), (ROWS, LABELS), loss_of, lambda _: [(0, 0)] * 4)
    assert (found("label_shuffle_mismatch", case) is not None) is ill


def of_an_episode(order):
    """Collect an episode step by step, and weigh its log-probabilities by advantages."""

    def loss_of(model, x, y):
        logs, values, rewards = [], [], []
        for state in torch.randn(12, FEATURES):
            out = model(state)
            chosen = torch.distributions.Categorical(logits=out[:2])
            action = chosen.sample()
            logs.append(chosen.log_prob(action))
            values.append(out[2:])
            rewards.append([float(action)])
        advantage = torch.tensor(rewards) - torch.stack(values)
        return -(torch.stack(logs) * order(advantage).detach()).mean() + advantage.square().mean()

    return loss_of


@pytest.mark.parametrize(("order", "ill"), [(lambda value: value, True), (lambda value: value.squeeze(1), False)])
def test_log_probabilities_in_a_row_and_advantages_in_a_column_are_broadcast(tmp_path, order, ill):
    case = taped(tmp_path / "run", mlp(), (ROWS, LABELS), of_an_episode(order), lambda _: [(0, 0)] * 4)
    assert (found("broadcast_loss", case) is not None) is ill


def of_columns(model, x, y):
    return (model(x) - y).square().mean()


def of_pairs(model, x, y):
    order = torch.arange(len(x)).roll(1)
    return ((model(x) - model(x[order])).square().sum(1) * (y != y[order])).mean()


@pytest.mark.parametrize("take", [by_index, by_slice])
def test_rows_that_a_loop_takes_of_its_data_are_samples(tmp_path, take):
    turned, as_is = tagged(lambda out: out.transpose(0, 1)), tagged(lambda out: out)
    ill = taped(tmp_path / "ill", Tagger(), (TOKENS, TAGS), as_is, take)
    assert found("batch_axis_mixed", ill) is not None
    assert found("batch_axis_mixed", taped(tmp_path / "well", Tagger(), (TOKENS, TAGS), turned, take)) is None
    column = taped(tmp_path / "column", mlp(outputs=1), (ROWS, ROWS[:, 0]), of_columns, take)
    assert found("broadcast_loss", column) is not None
    row = taped(tmp_path / "row", mlp(outputs=1), (ROWS, ROWS[:, :1]), of_columns, take)
    assert found("broadcast_loss", row) is None
    pairs = taped(tmp_path / "pairs", mlp(), (ROWS, LABELS), of_pairs, take)
    assert found("batch_axis_mixed", pairs) is None


@pytest.mark.parametrize(
    ("table", "ill"),
    [
        (lambda alpha: alpha, True),
        (lambda alpha: alpha.cumprod(0), False),
        (lambda alpha: alpha.pow(0.05).cumprod(0), True),  # a product of too few steps
    ],
)
def test_a_schedule_that_never_reaches_noise_is_named(tmp_path, table, ill):
    levels = table(1 - torch.linspace(1e-3, 0.2, 40))

    def loss(model, x, y):
        a, noise = levels[torch.randint(40, (len(x),)), None], torch.randn_like(x)
        return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise), noise)

    case = taped(tmp_path / "run", mlp(outputs=FEATURES), (ROWS, LABELS), loss, all_at_once)
    finding = found("schedule_not_cumulative", case)
    assert (finding is not None) is ill
    assert not ill or ("or all steps together add too little noise" in finding.cause and "larger betas" in finding.fix)


def test_a_question_that_fails_is_reported_once_and_leaves_the_rest_of_its_rule(tmp_path, caplog):
    @on_tape
    def ask(reading):
        raise IndexError("no such place")

    case = taped(tmp_path / "run", mlp(), (ROWS, LABELS), cross_entropy)
    assert ask(case) is ask(case) is None
    assert caplog.text.count("the question ask about a tape failed") == 1


class Pooled(nn.Module):
    """Weighs the steps of a series by attention, after a norm."""

    def __init__(self, dim, norm=nn.Identity):
        super().__init__()
        self.score, self.head, self.dim, self.norm = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, CLASSES), dim, norm()

    def forward(self, x):
        weights = torch.softmax(self.score(x), self.dim)
        return self.norm(self.head((weights * x).sum(1)))


def test_attention_over_one_element_is_named(tmp_path):
    ill, well = (taped(tmp_path / f"dim{dim}", Pooled(dim), (SERIES, LABELS), cross_entropy) for dim in (2, 1))
    assert found("wrong_dim_softmax", ill) is not None
    assert found("wrong_dim_softmax", well) is None
    short = taped(tmp_path / "short", Pooled(1), (SERIES[:, :1].repeat(1, 1, 1), LABELS), cross_entropy)
    assert found("wrong_dim_softmax", short) is None  # one step of data is not a wrong dimension
    single = taped(tmp_path / "single", OneKey(), (SERIES, LABELS), cross_entropy)
    assert found("wrong_dim_softmax", single) is None


class OneKey(nn.Module):
    """Attends from every step to one summary of them."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.head = (nn.Linear(FEATURES, size) for size in (FEATURES, FEATURES, CLASSES))

    def forward(self, x):
        key = self.key(x.mean(1, keepdim=True))
        weights = torch.softmax(self.query(x) @ key.transpose(1, 2) / FEATURES**0.5, -1)
        return self.head((weights @ key).mean(1))


@pytest.mark.parametrize(
    ("norm", "ill"),
    [
        (lambda: nn.GroupNorm(CLASSES, CLASSES), True),
        (lambda: nn.GroupNorm(1, CLASSES), False),
        (lambda: nn.LayerNorm(CLASSES), False),
    ],
)
def test_a_norm_over_a_single_number_is_named(tmp_path, norm, ill):
    case = taped(tmp_path / "run", Pooled(1, norm), (SERIES, LABELS), cross_entropy)
    assert (found("constant_output", case) is not None) is ill


@pytest.mark.parametrize(("weight", "ill"), [(-1.0, True), (1.0, False), (0.01, False)])
def test_a_divergence_with_the_wrong_sign_is_named(tmp_path, weight, ill):
    case = taped(tmp_path / "run", Encoder(), (WIDE,), bound(weight, of_data=16.0))
    assert (found("loss_sign_flipped", case) is not None) is ill


@pytest.mark.parametrize("cut", [True, False])
def test_a_learnt_factor_before_a_number_of_each_sample_is_no_mean(tmp_path, cut):
    """The temperature of soft actor-critic: its last step was computed of a mean over the samples."""
    model, share = mlp(outputs=1), nn.Parameter(torch.zeros(1))
    kinds = {"model": torch.optim.SGD(model.parameters(), 0.01), "share": torch.optim.SGD([share])}
    with sonde.watch(model, kinds, run=tmp_path / "run") as session:
        for (x,) in [*DataLoader(TensorDataset(ROWS), 8)] * 3:
            kinds["share"].zero_grad()
            (share * (model(x) - 1).detach()).mean().backward()
            kinds["share"].step()
            factor = share.exp()
            kinds["model"].zero_grad()
            weighed = factor * x.sum(1, keepdim=True)
            F.mse_loss(model(x), weighed.detach() if cut else weighed).backward()
            kinds["model"].step()
    assert "wrong_loss_reduction" not in [finding.kind for finding in session.findings]


def test_a_loss_that_is_minimised_after_the_tape_has_ended_is_used(tmp_path):
    """Twin critics, whose losses are computed before either steps, and an actor that steps every other time."""
    models = {name: mlp(outputs=1) for name in ("one", "two", "actor")}
    optimizers = {name: torch.optim.SGD(model.parameters(), 0.01) for name, model in models.items()}
    criterion = nn.MSELoss()
    with sonde.watch(models, optimizers, run=tmp_path / "run") as session:
        for number, (x,) in enumerate([*DataLoader(TensorDataset(ROWS), 8)] * 8):
            y = x.sum(1, keepdim=True)
            first, second = models["one"](x), models["two"](x)
            losses = {"actor": models["actor"](x).square().mean()} if number % 2 == 0 else {}
            losses["one"] = criterion(first, y)
            losses["two"] = criterion(second, y)
            for name, loss in losses.items():
                optimizers[name].zero_grad()
                loss.backward()
                optimizers[name].step()
    assert "result_discarded" not in [finding.kind for finding in session.findings]


@pytest.mark.parametrize("place", [0, 1])
def test_a_program_that_collates_batches_itself_may_put_steps_first(tmp_path, place):
    """Sequences are padded to (steps, samples) unless batch_first=True is asked for."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.run, self.tag = nn.Embedding(WORDS, 8), nn.LSTM(8, 16), nn.Linear(16, WORDS)

        def forward(self, x):
            return self.tag(self.run(self.words(x))[0])

    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loader = DataLoader(list(TOKENS), 8, collate_fn=lambda rows: {"tokens": torch.stack(rows, place)})
    with sonde.watch(model, optimizer, run=tmp_path / "run"):
        for batch in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten()).backward()
            optimizer.step()
    case = Case()
    for folder in tapes.folders(tmp_path / "run").values():
        case.take_tape(tapes.read(folder))
    assert (found("batch_axis_mixed", case) is not None) is (place == 0)


def test_a_fix_names_the_layer_that_bounds_the_outputs(tmp_path):
    def squares(model, x):
        return ((model(x) - 3 * x[:, :1]) ** 2).mean()

    finding = found("output_range_mismatch", taped(tmp_path / "run", mlp(nn.Sigmoid(), outputs=1), (ROWS,), squares))
    assert finding.cause.startswith("A loss of differences expects outputs near the targets")
    assert "without the sigmoid (3)" in finding.fix


class TwoParts(nn.Module):
    """An encoder whose outputs are a mean and a logarithm of a variance."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.encoder, self.out, self.how = nn.Linear(FEATURES, 8), nn.Linear(4, CLASSES), how

    def forward(self, x):
        h = self.encoder(x)
        if self.how == "same":
            mean, spread = h[:, :4], h[:, :4]
        elif self.how == "chunk":
            mean, spread = h.chunk(2, 1)
        elif self.how == "viewed":
            mean, spread = h.view(-1, 2, 4).unbind(1)
        elif self.how == "one half":
            mean, _ = h.view(len(x), 1, 8).split(4, -1)
            mean = spread = mean[:, 0]
        else:
            mean, spread = h[:, :4], h[:, 4:]
        return self.out(mean + torch.randn_like(mean) * spread.exp())


@pytest.mark.parametrize("how", ["same", "one half", "chunk", "slices", "viewed"])
def test_outputs_of_a_layer_that_no_slice_takes_are_found(tmp_path, how):
    case = taped(tmp_path / "run", TwoParts(how), (ROWS, LABELS), cross_entropy)
    named = unread_outputs(case)
    assert (named is not None) is (how in ("same", "one half"))
    if named is not None:
        assert named.sites[0] == "encoder"
        assert "4 to 7" in named.cause


class Conditioned(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(FEATURES, CLASSES), how

    def forward(self, x, time):
        return Reader(self.layer)(x, time) if self.how == "passed on" else self.layer(x + self.scale(time))

    def scale(self, time):
        return time[:, None] if self.how == "used" else 0.0


class Unread(Conditioned):
    def forward(self, x, time):
        return self.layer(x)


class Reader(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x, time):
        return self.layer(x) * torch.tensor(time.tolist())[:, None]


@pytest.mark.parametrize("weighs", [True, False])
@pytest.mark.parametrize("how", ["used", "passed on", "unread"])
def test_an_argument_that_forward_never_reads_is_found(tmp_path, how, weighs):
    model = Unread(how) if how == "unread" else Conditioned(how)
    times = torch.arange(SAMPLES).float()

    def loss_of(model, x, y, time):
        return F.cross_entropy(model(time[:, None] * x if weighs else x, time), y)

    case = taped(tmp_path / "run", model, (ROWS, LABELS, times), loss_of)
    named = ignored_argument(case)
    assert (named is not None) is (how == "unread")
    if named is not None:
        assert "Argument time of Unread is ignored: forward never reads it" in named.cause
        assert named.severity == ("warning" if weighs else "info"), "an interface may ask for what one model needs not"


def test_an_argument_that_is_all_the_same_may_be_ignored(tmp_path):
    def loss_of(model, x, y):
        return F.cross_entropy(model(x, torch.ones(len(x))), y)

    assert ignored_argument(taped(tmp_path / "run", Unread("unread"), (ROWS, LABELS), loss_of)) is None


# ---------------------------------------------------------------------- data and noise in one sample

KEPT_OF_DATA = (1 - torch.linspace(1e-3, 0.2, 40)).cumprod(0)


def extract(table, t, shape):
    return table.gather(-1, t).reshape(len(t), *[1] * (len(shape) - 1)).expand(shape)


def added(a, b, x, noise):
    return a * x + b * noise


def added_at_once(a, b, x, noise):
    return torch.addcmul(a * x, b, noise)


def in_place_of_data(a, b, x, noise):
    return x.clone().mul_(a).add_(noise * b)


def looked_up(table, t, x):
    return table[t][:, None]


def mixed_by(of_data, of_noise, mix=added, look_up=looked_up, target=lambda x, noise: noise):
    """Predict what noise was mixed with data by a schedule: the factors are functions of the share of the data."""

    def loss(model, x, y):
        t, noise = torch.randint(1, 40, (len(x),)), torch.randn_like(x)
        a, b = (look_up(of(KEPT_OF_DATA), t, x) for of in (of_data, of_noise))
        return F.mse_loss(model(mix(a, b, x, noise)), target(x, noise))

    return loss


def of_time(of_data, of_noise, draw=torch.rand, scored=False):
    """The same with a time that is drawn; the output may be a score, which is multiplied by the deviation."""

    def loss(model, x, y):
        t, noise = draw(len(x), 1), torch.randn_like(x)
        out = model(of_data(t) * x + of_noise(t) * noise)
        return F.mse_loss(out * of_noise(t) if scored else out, -noise if scored else noise)

    return loss


def by_scalars(a, b):
    def loss(model, x, y):
        noise = torch.empty_like(x).normal_()
        return F.mse_loss(model(a * x + b * noise), noise)

    return loss


def rest(kept):
    return 1 - kept


def root_of_rest(kept):
    return (1 - kept).sqrt()


def itself(kept):
    return kept


def by_extract(table, t, x):
    return extract(table, t, x.shape)


MIXTURES = {
    "variance": (mixed_by(torch.sqrt, rest), True),
    "variance, gathered": (mixed_by(torch.sqrt, rest, look_up=by_extract), True),
    "variance, at once": (mixed_by(torch.sqrt, rest, added_at_once), True),
    "variance, in place": (mixed_by(torch.sqrt, rest, in_place_of_data), True),
    "variance, for velocity": (mixed_by(torch.sqrt, rest, target=lambda x, noise: 0.5 * noise - 0.5 * x), True),
    "variance, for the clean data": (mixed_by(torch.sqrt, rest, target=lambda x, noise: x), True),
    "data without a root": (mixed_by(itself, root_of_rest), True),
    "data without a root, gathered": (mixed_by(itself, root_of_rest, look_up=by_extract), True),
    "variance, scalars": (by_scalars(0.7**0.5, 1 - 0.7), True),
    "variance of a continuous time": (of_time(lambda t: (-t).exp(), lambda t: 1 - (-2 * t).exp()), True),
    "roots of both": (mixed_by(torch.sqrt, root_of_rest), False),
    "roots of both, gathered": (mixed_by(torch.sqrt, root_of_rest, added_at_once, by_extract), False),
    "noise of many deviations": (of_time(lambda t: 1.0, lambda t: (3 * t - 1).exp()), False),
    "a straight way": (of_time(lambda t: 1 - t, lambda t: t), False),
    "a decoupled process": (of_time(lambda t: 1 - t, lambda t: t.sqrt()), False),
    "a process below the variance": (of_time(lambda t: (-t).exp(), lambda t: 1 - (-2 * t).exp(), scored=True), False),
    "a denoising autoencoder": (by_scalars(1.0, 0.3), False),
    "scalars by hand": (by_scalars(0.99, 0.1), False),
    "other scalars by hand": (by_scalars(0.5, 0.75), False),
    "roots of both, scalars": (by_scalars(0.7**0.5, 0.3**0.5), False),
    "mixed samples": (augmented(labels=True), False),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_noise_that_is_multiplied_by_its_variance_is_named(tmp_path, name):
    loss, ill = MIXTURES[name]
    outputs = CLASSES if name == "mixed samples" else FEATURES
    case = taped(tmp_path / "run", mlp(outputs=outputs), (ROWS, LABELS), loss, all_at_once)
    finding = found("variance_as_deviation", case)
    assert (finding is not None) is ill
    assert finding is None or "test_tapes.py" in finding.cause


# ---------------------------------------------------------------------- flags of terminal states

REWARDS = torch.randn(SAMPLES)
DONE = (torch.arange(SAMPLES) % 8 == 0).float()


def by_td(target):
    """Learn values from rewards, flags and the values of next states."""

    def loss(model, x, reward, done):
        with torch.no_grad():
            goal = target(reward, done, model(x.roll(1, 0)).amax(1), model)
        return F.smooth_l1_loss(model(x)[:, 0], goal)

    return loss


def by_hand(target):
    """The same as a squared difference of columns."""

    def loss(model, x, reward, done):
        goal = target(reward[:, None], done[:, None], model(x.roll(1, 0))[:, :1].detach(), model)
        return (goal - model(x)[:, :1]).square().mean()

    return loss


def emptied(value, done):
    value[done.bool()] = 0.0
    return value


def only_going_on(r, done, later, model):
    values = torch.zeros_like(later)
    on = done == 0
    values[on] = model(ROWS.roll(1, 0)[on]).amax(1)
    return r + 0.9 * values


FLAGS = {
    "added": (by_td(lambda r, done, later, _: r + 0.9 * ((1 - done) + later)), True),
    "added, stored as going on": (by_td(lambda r, on, later, _: r + 0.9 * (on + later)), True),
    "added in columns": (by_hand(lambda r, done, later, _: r + 0.9 * (later + (1 - done))), True),
    "added as booleans": (by_td(lambda r, done, later, _: r + 0.9 * ((~done.bool()).float() + later)), True),
    "subtracted": (by_td(lambda r, done, later, _: r + 0.9 * (later - done)), True),
    "added without a discount": (by_td(lambda r, done, later, _: r + (1 - done) + 0.9 * later), True),
    "multiplied": (by_td(lambda r, done, later, _: r + 0.9 * (1 - done) * later), False),
    "multiplied, in columns": (by_hand(lambda r, done, later, _: r + 0.9 * (1 - done) * later), False),
    "multiplied later": (by_td(lambda r, done, later, _: r + 0.9 * (later * done.logical_not())), False),
    "added and multiplied": (by_td(lambda r, done, later, _: r + (1 - done) + 0.9 * (1 - done) * later), False),
    "put": (by_td(lambda r, done, later, _: r + 0.9 * emptied(later, done)), False),
    "put, with a bonus": (by_td(lambda r, done, later, _: r + 0.9 * ((1 - done) + emptied(later, done))), False),
    "filled": (by_td(lambda r, done, later, _: r + 0.9 * later.masked_fill(done.bool(), 0.0)), False),
    "chosen": (by_td(lambda r, done, later, _: r + 0.9 * torch.where(done.bool(), 0.0, later)), False),
    "computed where it goes on": (by_td(only_going_on), False),
    "rewards of two steps": (by_td(lambda r, win, later, _: r + 0.9 * win + 0.81 * later), False),
    "rewards of two steps, nested": (by_td(lambda r, win, later, _: r + 0.9 * (win + 0.9 * later)), False),
    "a penalty": (by_td(lambda r, hit, later, _: r - hit + 0.9 * later), False),
    "rewards of 0 and 1": (by_td(lambda _, win, later, __: win + 0.9 * later), False),
    "rewards of 0 and 1 that are discounted": (by_td(lambda _, win, later, __: 0.9 * (win + later)), False),
}


def without_ends(loader):
    rows, rewards, _ = loader.dataset.tensors
    for _ in range(4):
        yield rows, rewards, torch.zeros(SAMPLES, dtype=torch.bool)


def test_flags_of_a_batch_without_ends_are_named_by_their_type(tmp_path):
    added, multiplied = (
        by_td(lambda r, done, later, _: r + 0.9 * ((~done).float() + later)),
        by_td(lambda r, done, later, _: r + 0.9 * (~done).float() * later),
    )
    for name, loss in (("ill", added), ("well", multiplied)):
        case = taped(tmp_path / name, mlp(), (ROWS, REWARDS, DONE), loss, without_ends)
        assert (found("terminal_bootstrapped", case) is not None) is (name == "ill")


@pytest.mark.parametrize("name", FLAGS)
def test_flags_that_are_added_to_the_value_of_the_next_state_are_named(tmp_path, name):
    loss, ill = FLAGS[name]
    case = taped(tmp_path / "run", mlp(), (ROWS, REWARDS, DONE), loss, all_at_once)
    finding = found("terminal_bootstrapped", case)
    assert (finding is not None) is ill
    assert finding is None or "test_tapes.py" in finding.cause


# ---------------------------------------------------------------------- two passes over the same input


def info_nce(one, two):
    return F.cross_entropy(F.normalize(one) @ F.normalize(two).t() / 0.1, torch.arange(len(one)))


def nt_xent(one, two):
    z = F.normalize(torch.cat([one, two]))
    near = (z @ z.t() / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(near, (torch.arange(len(z)) + len(one)) % len(z))


def cosines(one, two):
    return 1 - F.cosine_similarity(one, two).mean()


def redundancy(one, two):
    crossed = (one - one.mean(0)).t() @ (two - two.mean(0)) / len(one)
    return (crossed.diagonal() - 1).square().sum() + crossed.square().sum()


def divergences(one, two):
    p, q = one.log_softmax(1), two.log_softmax(1)
    return F.kl_div(p, q.exp(), reduction="batchmean") + F.kl_div(q, p.exp(), reduction="batchmean")


def towards_constants(one, two):
    """Each side towards the other one, which is detached."""
    one, two = F.normalize(one), F.normalize(two)
    guesses = one.roll(1, 1), two.roll(1, 1)
    return -((guesses[0] * two.detach()).sum(1) + (guesses[1] * one.detach()).sum(1)).mean()


def in_pairs(compare, second=lambda x: x, with_labels=False):
    def loss(model, x, y):
        total = compare(model(x), model(second(x)))
        return total + F.cross_entropy(model(x), y) if with_labels else total

    return loss


def frozen_second(model, x, y):
    one = model(x)
    with torch.no_grad():
        two = model(x)
    return F.mse_loss(one, two + x[:, :CLASSES])


def ratio_of_policies(model, x, y):
    new, old = (torch.distributions.Categorical(logits=model(x)).log_prob(y) for _ in range(2))
    return -((new - old.detach()).exp() * x[:, 0]).mean()


def two_terms(model, x, y):
    return F.cross_entropy(model(x), y) + 0.1 * model(x).square().mean()


def gated(model, x, y):
    return F.cross_entropy(model(x).sigmoid() * model(x), y)


def by_labels(model, x, y):
    return (torch.cdist(model(x), model(x) + 0.0) * (y[:, None] == y)).mean()


def apart_by_weights(model, x, y):
    sides = []
    for _ in range(2):
        sides.append(model(x))
        model[2].bias.data.add_(0.01)
    return cosines(*sides)


def accumulated(model, x, y):
    F.cross_entropy(model(x), y).backward()
    return F.cross_entropy(model(x), y)


def drops():
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES))


def normed():
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, CLASSES))


def deep():
    return nn.Sequential(nn.Linear(FEATURES, CLASSES), *(nn.Linear(CLASSES, CLASSES) for _ in range(120)))


class CellByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x, h=None):
        return self.cell(x, h)


def recurrent(model, x, y):
    first = model(x)
    return cosines(model.head(first), model.head(model(x, first)))


def shifted_rows(x):
    return x.roll(1, 1)


def noisy(x):
    return x + 0.1 * torch.randn_like(x)


PASSES = {
    "contrastive": (mlp, in_pairs(info_nce), True),
    "contrastive, joined": (mlp, in_pairs(nt_xent), True),
    "contrastive, of a copy": (mlp, in_pairs(info_nce, torch.clone), True),
    "contrastive, with batch norm": (normed, in_pairs(nt_xent), True),
    "cosines": (mlp, in_pairs(cosines), True),
    "a deep model": (deep, in_pairs(cosines), True),
    "cosines beside labels": (mlp, in_pairs(cosines, with_labels=True), True),
    "decorrelated": (mlp, in_pairs(redundancy), True),
    "divergences without dropout": (mlp, in_pairs(divergences), True),
    "each towards the other": (mlp, in_pairs(towards_constants), True),
    "one view transformed twice": (
        mlp, lambda model, x, y: info_nce(model(shifted_rows(x)), model(shifted_rows(x))), True),
    "dropout inside": (drops, in_pairs(info_nce), False),
    "divergences with dropout": (drops, in_pairs(divergences), False),
    "another view": (mlp, in_pairs(info_nce, shifted_rows), False),
    "a noisy view": (mlp, in_pairs(nt_xent, noisy), False),
    "two noisy views": (mlp, lambda model, x, y: info_nce(model(noisy(x)), model(noisy(x))), False),
    "a pass without gradients": (mlp, frozen_second, False),
    "the ratio of a policy to itself": (mlp, ratio_of_policies, False),
    "two terms": (mlp, two_terms, False),
    "a gate": (mlp, gated, False),
    "distances by labels": (mlp, by_labels, False),
    "weights that change between": (mlp, apart_by_weights, False),
    "gradients that are added": (mlp, accumulated, False),
    "steps of a cell": (CellByHand, recurrent, False),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_a_pair_of_a_sample_and_itself_is_named(tmp_path, name):
    model, loss, ill = PASSES[name]
    finding = found("pairs_with_itself", taped(tmp_path / "run", model(), (ROWS, LABELS), loss))
    assert (finding is not None) is ill
    assert finding is None or finding.cause.count("test_tapes.py") == 2


class NextWord(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.words, self.how = nn.Embedding(WORDS, 8), how
        self.layer, self.out = nn.GRU(WORDS if how == "one hot" else 8, 16, batch_first=True), nn.Linear(16, WORDS)

    def forward(self, x):
        steps = F.one_hot(x, WORDS).float() if self.how == "one hot" else self.words(x)
        return self.out(self.layer(steps)[0]).transpose(1, 2)


@pytest.mark.parametrize("how", ["embedding", "one hot", "text"])
def test_targets_that_wrap_around_are_found(tmp_path, how):
    text = torch.randint(0, WORDS, (SAMPLES, TIME + 1))
    windows = text[:, :-1].contiguous()
    following = text[:, 1:].contiguous() if how == "text" else torch.roll(windows, -1, 1)
    case = taped(tmp_path / "run", NextWord(how), (windows, following), cross_entropy)
    assert (wraps_around(case) is not None) is (how != "text")


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(256, 1)

    def forward(self, x):
        return self.last(F.leaky_relu(self.first(x)).flatten(1))


@pytest.mark.parametrize("how", ["channels", "flattened", "all", "derivative"])
def test_a_gradient_penalty_for_each_pixel_is_found(tmp_path, how):
    def loss_of(critic, x, y):
        mixed = (x + 0.1 * torch.randn_like(x)).requires_grad_(True)
        slopes = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
        if how == "derivative":
            penalty = slopes.square().mean()
        elif how == "all":
            penalty = ((slopes.norm(2, dim=(1, 2, 3)) - 1) ** 2).mean()
        else:
            penalty = (((slopes.flatten(1) if how == "flattened" else slopes).norm(2, dim=1) - 1) ** 2).mean()
        return critic(x).mean() + 10 * penalty

    case = taped(tmp_path / "run", Critic(), (PICTURES, LABELS), loss_of)
    named = found("wrong_dim_norm", case)
    assert (named is not None) is (how == "channels")
    assert named is None or "taken over dimension 1 alone" in named.cause


@pytest.mark.parametrize("state", ["own", "none"])
def test_a_recurrent_layer_that_is_given_a_state_for_each_column_runs_along_rows(tmp_path, state):
    text = torch.randint(0, WORDS, (40, 20))
    layer, words, out = nn.GRU(8, 16), nn.Embedding(WORDS, 8), nn.Linear(16, WORDS)
    model = nn.ModuleDict({"layer": layer, "words": words, "out": out})
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    hidden = torch.zeros(1, 20, 16)
    with sonde.watch(model, optimizer, run=tmp_path / "run"):
        for start in range(0, 30, 10):
            given, wanted = text[start : start + 10], text[start + 1 : start + 11].reshape(-1)
            states, carried = layer(words(given), *([hidden] if state == "own" else []))
            hidden = carried.detach()
            optimizer.zero_grad()
            F.cross_entropy(out(states).reshape(-1, WORDS), wanted).backward()
            optimizer.step()
    case = Case()
    for folder in tapes.folders(tmp_path / "run").values():
        case.take_tape(tapes.read(folder))
    named = found("batch_axis_mixed", case)
    assert named is None or state == "none"


@pytest.mark.parametrize("score", ["after", "before", "in eval"])
@pytest.mark.parametrize("loss_over", ["all", "both", "train"])
def test_rows_that_are_scored_beside_a_loss_that_has_them_are_found(tmp_path, loss_over, score):
    train, test = torch.arange(SAMPLES) < 16, (torch.arange(SAMPLES) >= 16) & (torch.arange(SAMPLES) < 24)
    chosen = {"all": slice(None), "both": train | test, "train": train}[loss_over]
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(4):
            output = model(ROWS)
            loss = F.cross_entropy(output[chosen], LABELS[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                seen = model(ROWS) if score == "in eval" else output
                right = (seen.argmax(1) == LABELS).float()
                parts = (train, test) if score == "after" else (test,)
                session.log(**{f"acc_{at}": right[part].mean() for at, part in enumerate(parts)})
    case = Case()
    for folder in tapes.folders(tmp_path / "run").values():
        case.take_tape(tapes.read(folder))
    assert (scored_in_loss(case) is not None) is (loss_over == "both")


@pytest.mark.parametrize("how", ["log-probability", "ratio", "clipped ratio", "probabilities", "numbers", "labels"])
def test_objectives_of_a_policy_are_distinguished_from_losses(tmp_path, how):
    credits, before = torch.randn(SAMPLES), torch.full((SAMPLES,), -1.1)

    def loss_of(model, x, y, credit, old):
        new = F.log_softmax(model(x), 1).gather(1, y[:, None])[:, 0]
        if how == "probabilities":
            new = torch.distributions.Categorical(model(x).softmax(1)).log_prob(y)
        elif how == "numbers":
            new = torch.distributions.Normal(model(x)[:, 0], 1.0).log_prob(x[:, 0])
        if how == "labels":
            return -new.mean()
        if how in ("log-probability", "probabilities", "numbers"):
            return -(new * credit).mean()
        ratio = (new - old).exp()
        clipped = ratio.clamp(0.8, 1.2) if how == "clipped ratio" else ratio
        return -torch.minimum(ratio * credit, clipped * credit).mean()

    case = taped(tmp_path / "run", mlp(), (ROWS, LABELS, credits, before), loss_of)
    assert is_policy_objective(case) is (how != "labels")


@pytest.mark.parametrize("sign", [1, -1])
def test_outputs_that_have_gone_beyond_their_targets_do_not_show_a_wrong_sign(sign, tmp_path):
    target = F.one_hot(torch.arange(24) % 3, 3).float()
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(3 * torch.eye(3) - 1 if sign == 1 else torch.full((3, 3), 0.5) + 0.01 * torch.eye(3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(8):
            optimizer.zero_grad()
            (sign * ((model(target) - target) ** 2).mean()).backward()
            optimizer.step()
    assert ("loss_sign_flipped" in [finding.kind for finding in session.findings]) is (sign == -1)


def unlikelihood(model, x, y):
    """Rank scores of classes by a sigmoid."""
    out = model(x)
    return -F.logsigmoid(out.gather(1, y[:, None]) - out).mean()


def aligned(model, x, y):
    """Align outputs with labels."""
    scores = model(x)[:, None].expand(-1, 4, -1).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, y[:, None] % 2 + 1, torch.full_like(y, 4), torch.ones_like(y), zero_infinity=True)


def distilled(model, x, y):
    """Learn soft answers and labels."""
    out = model(x)
    soft = F.kl_div((out / 2).log_softmax(1), (x[:, :CLASSES]).softmax(1), reduction="batchmean")
    return 0.7 * soft * 4 + 0.3 * F.cross_entropy(out, y)


def uncertain(model, x, y):
    """Weigh squares by a variance that is learnt."""
    mean, log_var, _ = model(x).unbind(1)
    return ((mean - x[:, 0]) ** 2 * torch.exp(-log_var.detach())).mean() + (log_var.exp() - log_var).mean()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("loss", [unlikelihood, aligned, distilled, uncertain])
def test_a_loss_without_a_floor_is_named(tmp_path, loss, sign):
    case = taped(tmp_path / "run", mlp(), (ROWS, LABELS), lambda *given: sign * loss(*given))
    assert (found("loss_sign_flipped", case) is not None) is (sign < 0)


def test_a_bound_that_is_maximised_is_named_though_its_divergence_is_written_by_hand(tmp_path):
    case = taped(tmp_path / "run", Encoder(), (WIDE,), lambda *given: -bound(0.01, of_data=16.0)(*given))
    assert found("loss_sign_flipped", case) is not None


def maximised_overlap(model, x, y):
    """Maximise a similarity that has a largest value, which nothing shows in its terms."""
    return -torch.exp(-((model(x) - x[:, :CLASSES]) ** 2)).mean()


def raised_within(model, x, y):
    """Raise a loss for inputs alone, as an attack does, and then lower it for these."""
    x = x.clone().requires_grad_()
    (-F.cross_entropy(model(x), y)).backward()
    model.zero_grad()
    return F.cross_entropy(model((x + 0.1 * x.grad.sign()).detach()), y)


def costly(model, x, y):
    """Log-probabilities weighed by what actions cost: the loss is never positive, and right."""
    chosen = torch.distributions.Categorical(logits=model(x))
    action = chosen.sample()
    return -(chosen.log_prob(action) * -(1.0 + (action != y).float())).mean()


@pytest.mark.parametrize("loss", [maximised_overlap, raised_within, costly])
def test_a_loss_that_falls_below_zero_on_purpose_is_no_finding(tmp_path, loss):
    assert found("loss_sign_flipped", taped(tmp_path / "run", mlp(), (ROWS, LABELS), loss)) is None


def in_random_order(target):
    return target[torch.randperm(len(target))]


def denoised(target_of):
    def loss_of(model, x, y):
        noise = torch.randn_like(x)
        return F.mse_loss(model(x + noise), target_of(noise))

    return loss_of


def bootstrapped(target_of):
    def loss_of(model, x, y):
        with torch.no_grad():
            wanted = x[:, 0] + 0.9 * model(x.flip(1)).amax(1)
        return F.mse_loss(model(x)[torch.arange(len(y)), y], target_of(wanted))

    return loss_of


@pytest.mark.parametrize("order", [in_random_order, lambda target: target])
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (mlp(), lambda order: lambda model, x, y: F.cross_entropy(model(x), order(y))),
        (mlp(outputs=FEATURES), denoised),
        (mlp(), bootstrapped),
    ],
)
def test_targets_in_another_order_are_named(tmp_path, model, loss, order):
    case = taped(tmp_path / "run", model, (ROWS, LABELS), loss(order))
    assert (found("label_shuffle_mismatch", case) is not None) is (order is in_random_order)


def with_wrong_answers(model, x, y):
    """Draw outputs to their targets, and away from those of other samples."""
    out, wanted = model(x), x[:, :CLASSES]
    return ((out - wanted) ** 2).mean() + F.relu(1 - (out - in_random_order(wanted)) ** 2).mean()


def both_in_random_order(model, x, y):
    order = torch.randperm(len(x))
    return F.cross_entropy(model(x[order]), y[order])


def answers_apart(model, x, y):
    """Push each answer away from those of other samples."""
    out = model(x)
    return F.cross_entropy(out, y) + F.relu(1 - (out - in_random_order(out.detach())) ** 2).mean()


@pytest.mark.parametrize("loss", [with_wrong_answers, both_in_random_order, answers_apart])
def test_an_order_that_is_meant_is_no_finding(tmp_path, loss):
    assert found("label_shuffle_mismatch", taped(tmp_path / "run", mlp(), (ROWS, LABELS), loss)) is None


@pytest.mark.parametrize("same", [True, False])
def test_a_view_that_is_compared_with_itself_is_named(tmp_path, same):
    def info_nce(model, x, y):
        one, two = F.normalize(model(x)), F.normalize(model(x + torch.randn_like(x)))
        return F.cross_entropy(one @ (one if same else two).T, torch.arange(len(x)))

    case = taped(tmp_path / "run", mlp(), (ROWS, LABELS), info_nce)
    assert (found("pairs_with_itself", case) is not None) is same


@pytest.mark.parametrize(("sign", "name"), [(1, "critic"), (-1, "critic"), (1, "cost")])
def test_an_actor_that_lowers_its_value_is_named(tmp_path, sign, name):
    actor, critic = mlp(nn.Tanh(), outputs=1), mlp(inputs=FEATURES + 1, outputs=1)
    first, second = (torch.optim.SGD(each.parameters(), 1e-3) for each in (actor, critic))
    with sonde.watch(nn.ModuleDict({"actor": actor, name: critic}), [first, second], run=tmp_path / "run"):
        for _ in range(6):
            with torch.no_grad():
                action = actor(ROWS) + 0.1 * torch.randn(SAMPLES, 1)
            second.zero_grad()
            earned = 3 - (action - ROWS[:, :1]) ** 2
            F.mse_loss(critic(torch.cat([ROWS, action], 1)), earned).backward()
            second.step()
            first.zero_grad()
            (sign * critic(torch.cat([ROWS, actor(ROWS)], 1)).mean()).backward()
            first.step()
    case = Case()
    for folder in tapes.folders(tmp_path / "run").values():
        case.take_tape(tapes.read(folder))
    assert (found("loss_sign_flipped", case) is not None) is (sign > 0 and name == "critic")


class OneStep(nn.Module):
    """Answers from one step of what a recurrent layer returns, or from its state."""

    def __init__(self, layer, take) -> None:
        super().__init__()
        self.layer, self.take = layer, take
        self.out = nn.Linear(16 * (1 + layer.bidirectional), CLASSES)

    def forward(self, x):
        return self.out(self.take(*self.layer(x if self.layer.batch_first else x.transpose(0, 1))))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    ("settings", "take", "ill"),
    [
        ({"batch_first": True}, lambda out, state: out[:, 0], True),
        ({"batch_first": True, "num_layers": 2}, lambda out, state: out[:, :1].squeeze(1), True),
        ({}, lambda out, state: out[0], True),
        ({"batch_first": True}, lambda out, state: out[:, -1], False),
        ({"batch_first": True}, lambda out, state: out.mean(1), False),
        ({"batch_first": True}, lambda out, state: out[:, 0] + out[:, -1], False),
        ({"batch_first": True}, lambda out, state: out[:, 0] + (state[0] if type(state) is tuple else state)[0], False),
        ({"batch_first": True, "bidirectional": True}, lambda out, state: out[:, 0], False),
    ],
)
def test_a_first_step_that_is_read_alone_is_named(tmp_path, kind, settings, take, ill):
    model = OneStep(kind(FEATURES, 16, **settings), take)
    finding = found("input_ignored", taped(tmp_path / "run", model, (SERIES, LABELS), cross_entropy))
    assert (finding is not None and "9 of 10 steps" in finding.cause) is ill


class Letters(nn.Module):
    """Names a class for each step of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.RNN(FEATURES, 16, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.out(self.layer(x.view(1, -1, FEATURES))[0].reshape(-1, 16))


@pytest.mark.parametrize("one", [True, False])
def test_labels_of_the_steps_of_one_sample_are_no_samples(tmp_path, one):
    model, rows = Letters(), ROWS[:8].unsqueeze(0) if one else ROWS[:8]
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(rows), LABELS[:8]).backward()
            optimizer.step()
    assert ("batch_axis_mixed" in [finding.kind for finding in session.findings]) is not one


class AddsNoise(nn.Module):
    """A diffusion that makes its samples noisy itself and returns its loss."""

    def __init__(self, levels) -> None:
        super().__init__()
        self.network = mlp(outputs=FEATURES)
        self.register_buffer("levels", levels)

    def forward(self, x):
        a, noise = self.levels[torch.randint(40, (len(x),)), None], torch.randn_like(x)
        return F.mse_loss(self.network(a.sqrt() * x + (1 - a).sqrt() * noise), noise)


@pytest.mark.parametrize("ill", [True, False])
def test_a_schedule_within_a_model_that_never_reaches_noise_is_named(tmp_path, ill):
    alpha = 1 - torch.linspace(1e-3, 0.2, 40)
    model = AddsNoise(alpha if ill else alpha.cumprod(0))
    case = taped(tmp_path / "run", model, (ROWS, LABELS), lambda model, x, y: model(x), all_at_once)
    assert (found("schedule_not_cumulative", case) is not None) is ill


NODES = torch.randperm(SAMPLES)


def some_mask(start):
    mask = torch.zeros(SAMPLES, dtype=torch.bool)
    mask[NODES[start : start + 10]] = True
    return mask


@pytest.mark.parametrize(
    ("mine", "labelled", "ill"),
    [
        (NODES[:10], NODES[10:20], True),
        (torch.arange(10), torch.arange(15, 25), True),
        (some_mask(0), some_mask(10), True),
        (NODES[:10], NODES[:10].clone(), False),
        (torch.arange(10), torch.arange(2, 12), False),  # steps of a series that lie ahead
        (NODES[:10] % 20, NODES[:10] % 20 + 12, False),
        (some_mask(0), some_mask(0), False),
    ],
)
def test_outputs_and_labels_of_other_nodes_are_named(tmp_path, mine, labelled, ill):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with sonde.watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(ROWS)[mine], LABELS[labelled]).backward()
            optimizer.step()
    case = Case()
    for folder in tapes.folders(tmp_path / "run").values():
        case.take_tape(tapes.read(folder))
    assert (found("label_shuffle_mismatch", case) is not None) is ill


class ValueOfActions(nn.Module):
    """Takes states and actions apart, as most critics do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(inputs=FEATURES + 1, outputs=1)

    def forward(self, x, action):
        return self.layers(torch.cat([x, action], 1))


@pytest.mark.parametrize(("sign", "name"), [(1, "qf1"), (-1, "qf1"), (1, "costs")])
def test_an_actor_that_lowers_the_value_of_states_and_actions_is_named(tmp_path, sign, name):
    actor, judge, old = mlp(nn.Tanh(), outputs=1), ValueOfActions(), torch.randn(SAMPLES, 1)
    first, second = (torch.optim.SGD(each.parameters(), 1e-3) for each in (actor, judge))
    with sonde.watch(nn.ModuleDict({"actor": actor, name: judge}), [first, second], run=tmp_path / "run"):
        for _ in range(6):
            second.zero_grad()
            F.mse_loss(judge(ROWS, old), 3 - (old - ROWS[:, :1]) ** 2).backward()
            second.step()
            first.zero_grad()
            (sign * judge(ROWS, actor(ROWS)).mean()).backward()
            first.step()
    case = Case()
    for folder in tapes.folders(tmp_path / "run").values():
        case.take_tape(tapes.read(folder))
    assert (found("loss_sign_flipped", case) is not None) is (sign > 0 and name == "qf1")


def clipped_ratio(turns):
    def loss_of(model, x, y):
        new = model(x).log_softmax(1).gather(1, y[:, None]).squeeze(1)
        ratio = (new.detach() - new if turns else new - new.detach()).exp()
        return torch.max(-x[:, 0] * ratio, -x[:, 0] * ratio.clamp(0.8, 1.2)).mean()

    return loss_of


def by_likely_actions(detaches):
    """Weigh the logarithm of a probability, as programs do that have no log_softmax."""

    def loss_of(model, x, y):
        scores = model(x)
        likely = scores[:, :2].softmax(1).gather(1, y.clamp_max(1)[:, None]).squeeze(1)
        advantage = x[:, 0] - scores[:, 2]
        return (-likely.log() * (advantage.detach() if detaches else advantage)).mean() + advantage.square().mean()

    return loss_of


def of_an_attached_copy(uses):
    def loss_of(model, x, y):
        following = OTHER(x.flip(1)).amax(1)
        done = torch.tensor([float(each == 0) for each in y])
        return F.mse_loss(model(x)[:, 0], x[:, 0] + 0.9 * following * (1 - done if uses else 1.0))

    return loss_of


OTHER = mlp()


@pytest.mark.parametrize(
    ("kind", "loss_of"),
    [
        ("loss_sign_flipped", lambda well: clipped_ratio(not well)),
        ("target_not_detached", by_likely_actions),
        ("terminal_bootstrapped", of_an_attached_copy),
    ],
)
@pytest.mark.parametrize("well", [True, False])
def test_objectives_of_policies_and_values(tmp_path, kind, loss_of, well):
    case = taped(tmp_path / "run", mlp(), (ROWS, LABELS), loss_of(well))
    assert (found(kind, case) is None) is well


class LoadsAhead:
    """Has the next batch before the step of this one, as loops that watch for the last batch do."""

    def __init__(self, loader) -> None:
        self.loader = loader

    def __iter__(self):
        batches = iter(self.loader)
        now = next(batches)
        for following in batches:
            yield now
            now = following
        yield now


def ends_masked_in_place(model, x, y, done):
    with torch.no_grad():
        following = model(x.flip(1)).amax(1)
        following[done] = 0.0
    return F.mse_loss(model(x)[:, 0], x[:, 0] + 0.9 * following)


def ends_forgotten(model, x, y, done):
    with torch.no_grad():
        following = model(x.flip(1)).amax(1)
    return F.mse_loss(model(x)[:, 0], x[:, 0] + 0.9 * following)


@pytest.mark.parametrize(
    ("loss_of", "iterate", "ill"), [(ends_masked_in_place, LoadsAhead, False), (ends_forgotten, iter, True)]
)
def test_flags_of_a_batch_that_is_loaded_ahead_are_used_in_a_later_step(tmp_path, loss_of, iterate, ill):
    case = taped(tmp_path / "run", mlp(), (ROWS, LABELS, LABELS == 0), loss_of, iterate)
    assert (found("terminal_bootstrapped", case) is not None) is ill


@pytest.mark.parametrize("kept", [0.99, 0.01])
def test_an_average_that_is_swapped_between_two_backwards_is_named(tmp_path, kept):
    policy, value, slow = mlp(), mlp(), mlp()
    first, second = (torch.optim.SGD(each.parameters(), 1e-3) for each in (policy, value))
    with sonde.watch(nn.ModuleDict({"policy": policy, "value": value}), [first, second], run=tmp_path / "run"):
        for _ in range(6):
            second.zero_grad()
            F.mse_loss(value(ROWS), slow(ROWS).detach()).backward()
            second.step()
            for old, new in zip(slow.parameters(), value.parameters(), strict=True):
                old.data.copy_(kept * old.data + (1 - kept) * new.data)
            first.zero_grad()
            cross_entropy(policy, ROWS, LABELS).backward()
            first.step()
    case = Case()
    for folder in tapes.folders(tmp_path / "run").values():
        case.take_tape(tapes.read(folder))
    finding = found("ema_not_updated", case)
    assert (finding is not None and "swapped" in finding.cause) is (kept < 0.5)


@pytest.mark.parametrize("uses", [True, False])
def test_flags_that_are_stacked_and_not_used_are_named(tmp_path, uses):
    def loss_of(model, x, y):
        done = torch.stack([torch.tensor(float(each == 0)) for each in y])
        with torch.no_grad():
            following = model(x.flip(1)).amax(1)
        return F.mse_loss(model(x)[:, 0], x[:, 0] + 0.9 * following * (1 - done if uses else 1.0))

    case = taped(tmp_path / "run", mlp(), (ROWS, LABELS), loss_of)
    assert (found("terminal_bootstrapped", case) is None) is uses


@pytest.mark.parametrize("wraps", [True, False])
def test_a_loss_that_is_a_new_tensor_is_named_where_it_is_made(tmp_path, wraps):
    def loss_of(model, x, y):
        loss = F.cross_entropy(model(x), y)
        return torch.tensor(loss.item(), requires_grad=True) if wraps else loss

    finding = found("graph_break_detach", taped(tmp_path / "run", mlp(), (ROWS, LABELS), loss_of))
    assert (finding is not None and "loss_fn" in finding.sites) is wraps


@pytest.mark.parametrize("dim", [0, 1])
def test_soft_answers_over_another_dimension_than_those_that_learn_them_are_named(tmp_path, dim):
    def in_one_call(model, x, y):
        return F.kl_div(model(x).log_softmax(1), x[:, :CLASSES].softmax(dim), reduction="batchmean")

    def by_hand(model, x, y):
        return -(x[:, :CLASSES].softmax(dim) * model(x).log_softmax(1)).sum(1).mean()

    for loss in (in_one_call, by_hand):
        case = taped(tmp_path / loss.__name__, mlp(), (ROWS, LABELS), loss)
        assert (found("wrong_dim_softmax", case) is not None) is (dim == 0)


@pytest.mark.parametrize("dim", [1, 2])
def test_characters_that_are_normalised_over_time_are_named(tmp_path, dim):
    def loss_of(model, x, y):
        scores = model(x).log_softmax(dim).transpose(0, 1)
        return F.ctc_loss(scores, y[:, None] % 2 + 1, torch.full_like(y, TIME), torch.ones_like(y))

    case = taped(tmp_path / "run", mlp(), (SERIES, LABELS), loss_of)
    assert (found("wrong_dim_softmax", case) is not None) is (dim == 1)


def test_two_softmaxes_that_are_multiplied_are_no_finding(tmp_path):
    def matched(model, x, y):
        scores = model(x) @ x.T[:CLASSES]
        return -(scores.softmax(0) * scores.softmax(1)).diagonal().log().mean()

    assert found("wrong_dim_softmax", taped(tmp_path / "run", mlp(), (ROWS, LABELS), matched)) is None


def test_weights_that_are_clamped_between_steps_are_not_cut_off(tmp_path):
    torch.manual_seed(0)
    critic = mlp()
    optimizer = torch.optim.RMSprop(critic.parameters(), 1e-3)
    with sonde.watch(critic, optimizer, run=tmp_path / "run") as session:
        for x, _ in [*DataLoader(TensorDataset(ROWS, LABELS), 8)] * 6:
            optimizer.zero_grad()
            # The bias of the last layer cancels in the difference, so its gradient is 0.
            (critic(torch.randn_like(x)).mean() - critic(x).mean()).backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in critic.parameters():
                    parameter.clamp_(-0.2, 0.2)
    assert "graph_break_detach" not in [finding.kind for finding in session.findings]


@pytest.mark.parametrize(("sign", "ill"), [(1, False), (-1, True)])
def test_a_score_that_should_be_minus_the_noise_has_no_wrong_sign(sign, ill, tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(8):
            noise = torch.randn(16, FEATURES)
            optimizer.zero_grad()
            (sign * (model(ROWS[:16] + noise) + noise).square().mean()).backward()
            optimizer.step()
    assert ("loss_sign_flipped" in [finding.kind for finding in session.findings]) is ill


def test_a_long_chain_of_operations_is_given_up_and_fails_no_rule(tmp_path, caplog):
    def loss_of(model, x, y):
        total = torch.zeros(())
        for _ in range(300):
            total = total * 0.5 + 0.01
        return F.cross_entropy(model(x), y) + total

    case = taped(tmp_path / "run", mlp(), (ROWS, LABELS), loss_of)
    reading = case.taped
    assert reading is not None
    assert reading.numbers.of(reading.terms[-1].value) is None


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.clone().fill_(0.5),
        lambda x: x.clone().zero_(),
        lambda x: torch.empty_like(x).copy_(x[:1]),
        lambda x: x.new_zeros(4, 2) + x.new_ones(4, 2) + x.new_full((4, 2), 3.0),
        lambda x: x.tril(-1) + x.triu(1),
        lambda x: F.leaky_relu(x, 0.2) + F.silu(x),
        lambda x: x.abs().log1p() + x.expm1(),
        lambda x: x.floor() + x.ceil() + x.round() + x.trunc(),
        lambda x: torch.xlogy(x.relu(), x.abs()),
        lambda x: x.std(1) + x.std(1, correction=0) + x.var(0, unbiased=False).sum() + x.var(),
    ],
)
def test_numbers_are_computed_as_torch_computes_them(tmp_path, compute):
    expected = []

    def loss_of(model, x, y):
        out = compute(x[:, :6])
        expected.append(out.mean().item())
        return F.cross_entropy(model(x), y) + 1.0 * out.mean()

    reading = taped(tmp_path / "run", mlp(), (ROWS, LABELS), loss_of).taped
    assert reading is not None
    number = reading.numbers.of(reading.terms[-1].value)
    assert number is not None
    assert float(number) == pytest.approx(expected[reading.tape.step - 1], rel=1e-5)


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clips_after_the_step(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    clip(model)
    optimizer.zero_grad()


def clips_before_the_step(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    clip(model)
    optimizer.step()
    optimizer.zero_grad()


def reads_the_norm_after_the_step(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.zero_grad()


def clears_between_two_losses(model, optimizer, x, y):
    out = model(x)
    for loss in (F.cross_entropy(out, y), out.square().mean()):
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
    optimizer.step()


def clears_before_two_losses(model, optimizer, x, y):
    out = model(x)
    optimizer.zero_grad()
    for loss in (F.cross_entropy(out, y), out.square().mean()):
        loss.backward(retain_graph=True)
    optimizer.step()


def climbs_before_it_descends(model, optimizer, x, y):
    """Sharpness-aware: the first gradients are used to move the weights, which are moved back before the step."""
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        moves = [each.grad.sign() * 1e-3 for each in model.parameters()]
        for each, move in zip(model.parameters(), moves, strict=True):
            each.add_(move)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for each, move in zip(model.parameters(), moves, strict=True):
            each.sub_(move)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "step", "ill"),
    [
        ("clip_after_step", clips_after_the_step, True),
        ("clip_after_step", clips_before_the_step, False),
        ("clip_after_step", reads_the_norm_after_the_step, False),
        ("zero_grad_misplaced", clears_between_two_losses, True),
        ("zero_grad_misplaced", clears_before_two_losses, False),
        ("zero_grad_misplaced", climbs_before_it_descends, False),
    ],
)
def test_the_order_of_a_step(tmp_path, kind, step, ill):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(8):
            step(model, optimizer, ROWS[:16], LABELS[:16])
    assert (kind in [finding.kind for finding in session.findings if finding.severity != "info"]) is ill


def test_targets_of_a_divergence_may_be_logarithms(tmp_path):
    teacher = mlp()

    def loss_of(model, x, y):
        return F.kl_div(
            model(x).log_softmax(1), teacher(x).log_softmax(1).detach(), reduction="batchmean", log_target=True
        )

    case = taped(tmp_path / "run", mlp(), (ROWS, LABELS), loss_of)
    assert found("logits_into_prob_loss", case) is None


@pytest.mark.parametrize(("factor", "ill"), [(4.0, True), (0.25, False), (1.0, False)])
@pytest.mark.parametrize("masks", [True, False])
def test_scores_that_are_multiplied_by_the_root_of_their_features_are_found(tmp_path, factor, ill, masks):
    parts = nn.ModuleList([nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, WORDS)])

    def loss(model, x, y):
        words, queries, keys, out = model
        hidden = words(x)
        scores = queries(hidden) @ keys(hidden).transpose(1, 2) * factor
        if masks:
            scores = scores.masked_fill(torch.eye(x.size(1), dtype=torch.bool), -1e9)
        return by_words(lambda _: out(scores.softmax(-1) @ hidden), x, y)

    case = taped(tmp_path / "run", parts, (TOKENS, TOKENS), loss)
    assert (found("attention_entropy_collapse", case) is not None) is ill


def test_rows_of_a_table_of_positions_are_not_taken_for_samples(tmp_path):
    layer, table = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True), torch.randn(TIME + 5, 16)
    parts = nn.ModuleList([nn.Embedding(WORDS, 16), layer, nn.Linear(16, WORDS)])

    def loss(model, x, y):
        words, mix, out = model
        return by_words(lambda tokens: out(mix(words(tokens) + table[: tokens.size(1)])), x, y)

    case = taped(tmp_path / "run", parts, (TOKENS, TOKENS), loss, all_at_once)
    assert found("batch_axis_mixed", case) is None


class OfGraphs(nn.Module):
    """Adds up neighbours along edges, then the nodes of each graph."""

    def __init__(self, edges, graphs, *, scatters=False):
        super().__init__()
        self.near, self.out, self.scatters = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES), scatters
        self.edges, self.graphs = edges, graphs

    def forward(self, x):
        x = x.flatten(0, 1)
        source, to = self.edges
        sent = self.near(x)[source]
        if self.scatters:
            near = torch.zeros_like(x).scatter_add(0, to[:, None].expand(-1, FEATURES), sent)
        else:
            near = torch.zeros_like(x).index_add(0, to, sent)
        count = int(self.graphs.max()) + 1
        return self.out(torch.zeros(count, FEATURES).index_add(0, self.graphs, x + near))


PAIRS = torch.combinations(torch.arange(TIME)).T
GRAPHS = torch.arange(8).repeat_interleave(TIME)


def edges_of_batch(offset):
    """Return the edges of a batch of eight graphs of ten nodes, moved by what `offset` says of each."""
    return torch.cat([PAIRS + offset(number) for number in range(8)], 1)


OVERLAPPING = {
    "edges that are not moved": edges_of_batch(lambda number: 0),
    "edges that are moved by too little": edges_of_batch(lambda number: 5 * number),
}


@pytest.mark.parametrize("scatters", [False, True])
@pytest.mark.parametrize("name", OVERLAPPING)
def test_graphs_of_a_batch_that_overlap_are_named(tmp_path, name, scatters):
    model = OfGraphs(OVERLAPPING[name], GRAPHS, scatters=scatters)
    finding = found("batch_axis_mixed", taped(tmp_path / "run", model, (SERIES, LABELS), cross_entropy))
    assert finding is not None
    assert "8 graphs" in finding.cause


@pytest.mark.parametrize(
    ("edges", "graphs"),
    [
        (edges_of_batch(lambda number: TIME * number), GRAPHS),
        (torch.randint(80, (2, 200)), torch.arange(80) % 8),  # clusters of one graph
    ],
    ids=["edges within graphs", "nodes in no order"],
)
def test_graphs_of_a_batch_that_do_not_overlap_are_no_finding(tmp_path, edges, graphs):
    case = taped(tmp_path / "run", OfGraphs(edges, graphs), (SERIES, LABELS), cross_entropy)
    assert found("batch_axis_mixed", case) is None


@pytest.mark.parametrize(
    ("reward", "draws", "ill"),
    [
        (lambda: 10 + torch.rand(8), True, True),
        (lambda: -5 - 0.1 * torch.rand(8), True, True),
        (lambda: torch.rand(8) - 0.5, True, False),
        (lambda: 20 * torch.rand(8), True, False),
        (lambda: torch.ones(8), True, False),
        (lambda: 10 + torch.rand(8), False, False),
    ],
    ids=["all good", "all bad", "centred", "far apart", "all equal", "weights of samples"],
)
def test_rewards_of_one_sign_are_named(tmp_path, reward, draws, ill):
    def loss_of(model, x, y):
        choices = torch.distributions.Categorical(logits=model(x))
        return -(choices.log_prob(choices.sample() if draws else y) * reward()).mean()

    finding = found("rewards_not_centred", taped(tmp_path / "run", mlp(), (ROWS, LABELS), loss_of))
    assert (finding is not None) is ill
    assert not ill or "test_tapes.py" in finding.cause


@pytest.mark.parametrize("rises", [True, False])
def test_an_average_whose_decay_still_rises_is_not_taken_for_one_that_forgets(tmp_path, rises):
    model = mlp()
    average = deepcopy(model).requires_grad_(False)
    steps = 0

    def loss_of(model, x, y):
        nonlocal steps
        steps += 1
        keeps = steps / (10 + steps) if rises else 0.001
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.mul_(keeps).add_(fast, alpha=1 - keeps)
        return cross_entropy(model, x, y)

    case = taped(tmp_path / "run", model, (ROWS, LABELS), loss_of)
    assert (found("ema_not_updated", case) is None) is rises


def drawn_edges(how):
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(0, 80, (2, 600), generator=generator)
    pairs = pairs[:, pairs[0] != pairs[1]].sort(0).values
    if how == "both ways":
        return torch.cat([pairs, pairs.flip(0)], 1)
    if how == "downwards":
        return pairs.flip(0)
    if how == "near ones":
        low = torch.randint(0, 70, (600,), generator=generator)
        return torch.stack([low, low + torch.randint(1, 9, (600,), generator=generator)])
    if how == "a tree":
        high = torch.arange(1, 80).repeat(6)
        return torch.stack([(torch.rand(len(high), generator=generator) * high).long(), high])
    return pairs


@pytest.mark.parametrize(
    ("how", "ill"),
    [("upwards", True), ("downwards", True), ("both ways", False), ("near ones", False), ("a tree", False)],
)
def test_edges_that_are_listed_once_are_named(tmp_path, how, ill):
    model = OfGraphs(drawn_edges(how), GRAPHS)
    finding = found("edges_one_way", taped(tmp_path / "run", model, (SERIES, LABELS), cross_entropy))
    assert (finding is not None) is ill


class WithQuery(nn.Module):
    """Attention of a query that stands before the tokens, or after them."""

    def __init__(self, *, inverted, first):
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES)
        self.query, self.inverted, self.first = nn.Parameter(torch.randn(8)), inverted, first

    def forward(self, tokens):
        ignored = (tokens != 0) if self.inverted else (tokens == 0)
        query, never = self.query.expand(len(tokens), 1, 8), torch.zeros(len(tokens), 1, dtype=torch.bool)
        keys, shut = [query, self.words(tokens)], [never, ignored]
        keys, shut = (torch.cat(each if self.first else each[::-1], 1) for each in (keys, shut))
        scores = (query @ keys.transpose(1, 2)).masked_fill(shut[:, None], float("-inf"))
        return self.out((scores.softmax(-1) @ keys)[:, 0])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("inverted", [True, False])
def test_a_mask_beside_that_of_a_query_is_read(tmp_path, inverted, first):
    case = taped(tmp_path / "run", WithQuery(inverted=inverted, first=first), (PADDED, LABELS), cross_entropy)
    assert (found("mask_inverted", case) is not None) is inverted


class Translator(nn.Module):
    def __init__(self, *, shifts=False):
        super().__init__()
        self.shifts = shifts
        self.read, self.words, self.out = nn.Embedding(WORDS, 8), nn.Embedding(WORDS, 8), nn.Linear(16, WORDS)

    def forward(self, source, given):
        if self.shifts:
            given = torch.cat([torch.zeros_like(given[:, :1]), given[:, :-1]], 1)
        context = self.read(source).mean(1, keepdim=True).expand(-1, given.size(1), -1)
        return self.out(torch.cat([self.words(given), context], 2))


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize(("given", "asked"), [(slice(None), slice(None)), (slice(0, -1), slice(1, None))])
def test_tokens_that_are_given_beside_others_and_asked_for_are_found(tmp_path, given, asked, shifts):
    def loss(model, x, y):
        return F.cross_entropy(model(x, y[:, given]).flatten(0, 1), y[:, asked].flatten())

    case = taped(tmp_path / "run", Translator(shifts=shifts), (TOKENS, TOKENS.flip(0)), loss)
    assert (found("target_is_input", case) is not None) is (given == asked and not shifts)


@pytest.mark.parametrize(
    ("activation", "shift", "ill"), [(nn.Sigmoid, 0.0, True), (nn.Tanh, 0.0, False), (nn.Sigmoid, 0.5, False)]
)
def test_samples_that_cannot_reach_the_data_they_are_judged_with_are_found(tmp_path, activation, shift, ill):
    model = nn.ModuleDict({"maker": mlp(activation(), outputs=FEATURES), "judge": mlp(outputs=1)})

    def loss(model, x, y):
        real, made = (x.tanh() * (1 - shift) + shift).clamp(shift - 1 + shift, 1), model["maker"](torch.randn_like(x))
        real = real if shift == 0 else real.abs().clamp(0, 1)
        sides = model["judge"](real), model["judge"](made)
        return sum(
            F.binary_cross_entropy_with_logits(each, torch.full_like(each, float(at))) for at, each in enumerate(sides)
        )

    assert (found("output_range_mismatch", taped(tmp_path / "run", model, (ROWS, LABELS), loss)) is not None) is ill


def test_inputs_that_are_attacked_and_held_in_a_range_are_no_samples_of_a_model(tmp_path):
    def loss(model, x, y):
        seen = x.clone().requires_grad_()
        (way,) = torch.autograd.grad(cross_entropy(model, seen, y), seen)
        attacked = (x + 0.1 * way.sign()).clamp(0, 1)
        return cross_entropy(model, x, y) + cross_entropy(model, attacked, y)

    assert found("output_range_mismatch", taped(tmp_path / "run", mlp(), (ROWS, LABELS), loss)) is None


@pytest.mark.parametrize("sign", [-0.5, 0.5])
def test_a_divergence_that_is_added_sample_by_sample_has_a_sign(tmp_path, sign):
    def loss(model, x, y):
        rebuilt, mean, log_var = model(x)
        fit = F.mse_loss(rebuilt, x, reduction="none").sum(1)
        return (fit + sign * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1)).mean()

    case = taped(tmp_path / "run", Coder(0.5), (ROWS, LABELS), loss)
    assert (found("loss_sign_flipped", case) is not None) is (sign > 0)


@pytest.mark.parametrize("sign", [-1, 1])
def test_an_actor_that_lowers_the_values_of_a_critic_which_learns_from_a_memory_is_found(tmp_path, sign):
    actor, critic = mlp(nn.Tanh(), outputs=1), mlp(inputs=FEATURES + 1, outputs=1)
    optimizers = [torch.optim.SGD(each.parameters(), 1e-3) for each in (actor, critic)]
    with sonde.watch(nn.ModuleDict({"actor": actor, "critic": critic}), optimizers, run=tmp_path / "run"):
        for state in ROWS.split(8)[:6]:
            action, reward = torch.randn(8, 1), torch.randn(8, 1)
            fit = F.mse_loss(critic(torch.cat([state, action], 1)), reward)
            optimizers[1].zero_grad()
            fit.backward()
            optimizers[1].step()
            value = sign * critic(torch.cat([state, actor(state)], 1)).mean()
            optimizers[0].zero_grad()
            value.backward()
            optimizers[0].step()
    case = Case()
    for folder in tapes.folders(tmp_path / "run").values():
        case.take_tape(tapes.read(folder))
    assert (found("loss_sign_flipped", case) is not None) is (sign > 0)


class RNN(nn.Module):
    """A module of the program with the name of one of torch's, which gets lengths in the place of a state."""

    def __init__(self):
        super().__init__()
        self.read, self.out = nn.LSTM(FEATURES, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states = self.read(packed)[1][0][0].unbind(0)
        return self.out(torch.stack(states))


def test_lengths_are_not_taken_for_the_state_of_a_recurrent_layer(tmp_path, caplog):
    def loss(model, x, y):
        return F.cross_entropy(model(x, torch.arange(len(x), 0, -1).clamp(max=x.size(1))), y)

    case = taped(tmp_path / "run", RNN(), (SERIES, LABELS), loss)
    assert found("batch_axis_mixed", case) is None
    assert "failed" not in caplog.text


def test_pieces_of_a_signal_that_follow_each_other_are_no_samples(tmp_path):
    signal = torch.randn(60, 5)
    model = nn.ModuleList([nn.GRU(1, 8), nn.Linear(8, 1)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with sonde.watch(model, optimizer, run=tmp_path / "run"):
        for start in range(0, 48, 8):
            out, _ = model[0](signal[start : start + 8, :, None])
            optimizer.zero_grad()
            F.mse_loss(model[1](out)[..., 0], signal[start + 1 : start + 9]).backward()
            optimizer.step()
    case = Case()
    for folder in tapes.folders(tmp_path / "run").values():
        case.take_tape(tapes.read(folder))
    assert found("batch_axis_mixed", case) is None
