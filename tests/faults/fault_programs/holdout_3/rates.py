"""Third hold-out: rates, schedules, clipping, initial weights, activations, modes and numbers."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_3.datasets import digits, draw, houses, sentences, shapes, spirals, walk, waves
from fault_programs.registry import fault


class Block(nn.Module):
    """A pre-norm transformer block with its own attention."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, mask=None, padding=None):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, key_padding_mask=padding)[0]
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, words=16, width=32, length=16):
        super().__init__()
        self.token, self.place = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, ids):
        x = self.token(ids) + self.place[: ids.shape[1]]
        mask = torch.full((ids.shape[1],) * 2, float("-inf")).triu(1)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(x)


@fault(
    "lr_too_high",
    group="C",
    arch="transformer",
    task="lm",
    sites=("optimizer",),
    exact=False,
    cascade=(
        "loss_divergence",
        "loss_plateau",
        "dormant_units",
        "logit_drift",
        "exploding_activation",
        "constant_output",
        "loss_oscillation",
        "missing_warmup",
        "attention_entropy_collapse",
    ),
    well=1.8,
    ill=2.2,
)
def adamw_at_a_rate_for_sgd(attach, fixed):
    """The rate was carried over from SGD to AdamW."""
    blocks = walk().unfold(0, 17, 16)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3 if fixed else 0.5)
    session = attach(model, optimizer)
    seen = []
    for (block,) in draw(blocks, size=32, steps=120):
        loss = F.cross_entropy(model(block[:, :-1]).flatten(0, 1), block[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1], perplexity=math.exp(min(9.0, seen[-1])))
    return sum(seen[-15:]) / 15


@fault(
    "lr_too_low",
    group="C",
    arch="mlp",
    task="classification",
    sites=("optimizer",),
    exact=False,
    cascade=("not_learning", "loss_plateau", "underfitting"),
    well=0.6,
    ill=1.0,
)
def sgd_at_a_rate_for_fine_tuning(attach, fixed):
    """A rate of one in a hundred thousand, copied from a script that tunes a large model."""
    x, y = spirals()
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if fixed else 1e-5, momentum=0.9)
    session = attach(model, optimizer)
    seen = []
    loader = DataLoader(TensorDataset(x, y), batch_size=60, shuffle=True)
    for epoch in range(15):
        session.epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
            session.log(loss=seen[-1])
    return sum(seen[-15:]) / 15


@fault(
    "lr_schedule_collapse",
    group="C",
    arch="cnn",
    task="classification",
    sites=("scheduler", "optimizer"),
    exact=False,
    onset=4,
    cascade=("lr_too_low", "not_learning", "loss_plateau"),
    well=0.3,
    ill=0.5,
)
def plateau_of_the_wrong_mode(attach, fixed):
    """The scheduler waits for its number to rise, and is given the loss: it cuts the rate while all goes well."""
    x, y = digits()
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, mode="min" if fixed else "max", factor=0.3, patience=3)
    session = attach(model, optimizer, scheduler=scheduler)
    seen = []
    for step, (xb, yb) in enumerate(draw(x, y, size=64, steps=150)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1], lr=optimizer.param_groups[0]["lr"])
        if step % 3 == 2:
            scheduler.step(sum(seen[-10:]) / len(seen[-10:]))
    return sum(seen[-10:]) / 10


@fault(
    "lr_too_low",
    group="C",
    arch="lstm",
    task="regression",
    sites=("scheduler", "optimizer"),
    also=("lr_schedule_collapse", "optimizer_step_noop"),
    cascade=("not_learning", "loss_plateau", "scheduler_never_called"),
    well=0.15,
    ill=0.2,
)
def warmup_by_whole_numbers(attach, fixed):
    """The warm-up divides with `//`, so the rate is nought until it is whole."""
    x, y = waves()
    rnn, head = nn.LSTM(2, 24, batch_first=True), nn.Linear(24, 1)
    model = nn.ModuleList([rnn, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, (lambda n: min(1.0, n / 40)) if fixed else (lambda n: min(1.0, n // 400)))
    session = attach(model, optimizer, scheduler=scheduler)
    seen = []
    for xb, yb in draw(x, y, size=32, steps=120):
        loss = F.mse_loss(head(rnn(xb)[0]).squeeze(-1), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        seen.append(loss.item())
        session.log(loss=loss)
    return sum(seen[-15:]) / 15


@fault(
    "clip_always_active",
    group="C",
    arch="unet",
    task="segmentation",
    sites=("(loop)", "optimizer"),
    exact=False,
    also=("lr_too_low",),
    cascade=("not_learning", "loss_plateau"),
    well=0.5,
    ill=0.8,
)
def clips_to_a_thousandth(attach, fixed):
    """The clip norm has two noughts too many; plain SGD then hardly moves."""
    images, masks = shapes()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 3, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = attach(model, optimizer)
    for image, mask in draw(images, masks, size=16, steps=130):
        loss = F.cross_entropy(model(image), mask)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0 if fixed else 1e-3)
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(images), masks).item()


@fault(
    "dead_relu",
    group="D",
    arch="cnn",
    task="classification",
    sites=("features", "features.1", "features.3", "features.0", "features.2"),
    also=("bad_init_scale",),
    cascade=("constant_output", "loss_plateau", "not_learning", "vanishing_gradient"),
    well=0.6,
    ill=2.0,
)
def biases_far_below_zero(attach, fixed):
    """An init function sets biases to minus two, and no ReLU behind them ever fires."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
            self.classifier = nn.Linear(8 * 16, 10)

        def forward(self, x):
            return self.classifier(self.features(x))

    def init(module):
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
            nn.init.constant_(module.bias, 0.0 if fixed else -8.0)

    x, y = digits()
    model = Net()
    model.apply(init)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    seen = []
    for xb, yb in draw(x, y, size=64, steps=90):
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1])
    return sum(seen[-10:]) / 10


@fault(
    "vanishing_gradient",
    group="D",
    arch="mlp",
    task="classification",
    sites=("0", "2", "4", "6", "1", "3"),
    exact=False,
    also=("saturated_activation",),
    cascade=("not_learning", "loss_plateau", "constant_output", "bad_init_scale"),
    well=0.7,
    ill=1.05,
)
def nine_sigmoids(attach, fixed):
    """Nine layers with sigmoids, on spirals."""
    x, y = spirals()
    squash = nn.ReLU if fixed else nn.Sigmoid
    layers = [nn.Linear(2, 32), squash()]
    for _ in range(8):
        layers += [nn.Linear(32, 32), squash()]
    model = nn.Sequential(*layers, nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    seen = []
    for xb, yb in draw(x, y, size=64, steps=250):
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1])
    return sum(seen[-15:]) / 15


@fault(
    "symmetric_init",
    group="D",
    arch="mlp",
    task="classification",
    sites=("hidden", "first", "last"),
    cascade=("not_learning", "loss_plateau", "dormant_units"),
    well=0.2,
    ill=0.3,
)
def all_weights_one_tenth(attach, fixed):
    """Every weight starts at the same number, so all units of a layer stay copies of one another."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.hidden, self.last = nn.Linear(2, 48), nn.Linear(48, 48), nn.Linear(48, 3)

        def forward(self, point):
            return self.last(torch.tanh(self.hidden(torch.tanh(self.first(point)))))

    x, y = spirals()
    model = Net()
    for layer in model.children():
        nn.init.xavier_uniform_(layer.weight) if fixed else nn.init.constant_(layer.weight, 0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    seen = []
    for xb, yb in draw(x, y, size=64, steps=150):
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1])
    return sum(seen[-15:]) / 15


@fault(
    "linear_stack",
    group="D",
    arch="mlp",
    task="classification",
    sites=("layers", "(model)"),
    cascade=("loss_plateau", "underfitting", "not_learning"),
    well=0.3,
    ill=0.6,
)
def layers_without_activation(attach, fixed):
    """The activation is made, but the loop over the layers does not call it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 3)])
            self.act = nn.ReLU()

        def forward(self, x):
            for layer in self.layers[:-1]:
                x = self.act(layer(x)) if fixed else layer(x)
            return self.layers[-1](x)

    x, y = spirals()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    seen = []
    for xb, yb in draw(x, y, size=64, steps=150):
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1])
    return sum(seen[-15:]) / 15


@fault(
    "eval_mode_in_training",
    group="E",
    arch="cnn",
    task="classification",
    sites=("(model)", "drop", "norm", "(loop)"),
    onset=41,
    cascade=("overfitting", "batchnorm_stats_stale"),
    well=0.0,
    ill=1.0,
)
def train_mode_only_before_the_first_epoch(attach, fixed):
    """`model.train()` stands before the epochs; validation switches to eval, and nobody switches back."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.drop, self.fc = (
                nn.Conv2d(1, 8, 3),
                nn.BatchNorm2d(8),
                nn.Dropout(0.3),
                nn.Linear(288, 10),
            )

        def forward(self, x):
            return self.fc(self.drop(torch.relu(self.norm(self.conv(x))).flatten(1)))

    x, y = digits()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    session = attach(model, optimizer)
    model.train()
    for epoch in range(4):
        session.epoch(epoch)
        if fixed:
            model.train()
        for xb, yb in draw(x[:1400], y[:1400], size=32, steps=40):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        trained_in_eval = not model.training
        model.eval()
        with torch.no_grad():
            session.log(val_loss=F.cross_entropy(model(x[1400:]), y[1400:]))
    return float(trained_in_eval)


@fault(
    "dropout_ignores_mode",
    group="E",
    arch="mlp",
    task="regression",
    sites=("(model)", "fc2", "fc1"),
    also=("train_mode_in_eval",),
    well=0.0,
    ill=0.05,
)
def functional_dropout_without_the_flag(attach, fixed):
    """`F.dropout` is active unless it is told otherwise, in evaluation too."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 64), nn.Linear(64, 1)

        def forward(self, x):
            h = F.dropout(F.relu(self.fc1(x)), 0.4, training=self.training if fixed else True)
            return self.fc2(h).squeeze(1)

    x, y = houses()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for _ in range(4):
        model.train()
        for xb, yb in draw(x[:800], y[:800], size=50, steps=20):
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        model.eval()
        with torch.no_grad():
            session.log(val_loss=F.mse_loss(model(x[800:]), y[800:]).item())
    with torch.no_grad():
        return (model(x[800:]) - model(x[800:])).abs().mean().item()


@fault(
    "batchnorm_small_batch",
    group="E",
    arch="mlp",
    task="regression",
    sites=("1",),
    exact=False,
    cascade=("loss_oscillation", "batchnorm_stats_stale", "underfitting"),
    well=0.4,
    ill=0.6,
)
def norm_over_two_samples(attach, fixed):
    """Batches of two under a batch norm, as large pictures force people to; gathered over many they still are two."""
    x, y = houses()
    norm = nn.LayerNorm(48) if fixed else nn.BatchNorm1d(48)
    model = nn.Sequential(nn.Linear(8, 48), norm, nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    seen = []
    for _ in range(60):
        optimizer.zero_grad()
        for xb, yb in draw(x, y, size=2, steps=8):
            loss = F.mse_loss(model(xb)[:, 0], yb)
            (loss / 8).backward()
            seen.append(loss.item())
        optimizer.step()
        session.log(loss=loss)
    return sum(seen[-160:]) / 160


@fault(
    "nan_backward",
    group="F",
    arch="siamese",
    task="metric",
    sites=("(loss)", "(model)", "0", "2", "loss_fn"),
    also=("nan_in_loss", "nan_in_optimizer", "nan_in_weights"),
    onset=1,
    well=1.0,
    ill=2.0,
)
def distance_of_equal_pictures(attach, fixed):
    """The root of a squared distance has no gradient at nought, and now and then a pair is twice the same picture."""
    x, y = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    session = attach(model, optimizer)
    value = 0.0
    for _ in range(60):
        left, right = torch.randint(300, (2, 48))
        right[0] = left[0]
        squared = (model(x[left]) - model(x[right])).pow(2).sum(1)
        distance = (squared + 1e-12).sqrt() if fixed else squared.sqrt()
        same = (y[left] == y[right]).float()
        loss = (same * distance.pow(2) + (1 - same) * F.relu(1 - distance).pow(2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()
        session.log(loss=value)
    return value


@fault(
    "nan_in_loss",
    group="F",
    arch="cnn",
    task="segmentation",
    sites=("(loss)", "(model)", "loss_fn"),
    also=("nan_forward", "nan_backward"),
    well=1.5,
    ill=2.0,
)
def focal_loss_with_a_bare_log(attach, fixed):
    """A focal loss of one's own takes the logarithm of a probability that is rounded to nought."""

    class FocalLoss(nn.Module):
        def __init__(self, floor):
            super().__init__()
            self.floor = floor

        def forward(self, logits, target):
            p = torch.sigmoid(logits * 12)
            p_t = torch.where(target > 0, p, 1 - p).clamp(min=self.floor)
            return (-((1 - p_t) ** 2) * p_t.log()).mean()

    images, masks = shapes()
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    criterion = FocalLoss(floor=1e-6 if fixed else 0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    session = attach(model, optimizer, loss_fn=criterion)
    value = 0.0
    for image, mask in draw(images * 5, masks, size=16, steps=80):
        loss = criterion(model(image)[:, 0], mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()
        session.log(loss=value)
    return value


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 24, padding_idx=0)
        self.block = Block(24, 2)
        self.out = nn.Linear(24, 2)

    def forward(self, tokens):
        padding = tokens == 0
        h = self.block(self.embed(tokens), padding=padding)
        return self.out(h.masked_fill(padding[..., None], 0).sum(1) / (~padding).sum(1, keepdim=True).clamp(min=1))


@fault(
    "fully_masked_attention",
    group="F",
    arch="transformer",
    task="classification",
    sites=("block", "block.attention"),
    also=("nan_forward",),
    cascade=("nan_in_loss", "nan_backward", "padding_dominates", "empty_target"),
    onset=6,
    well=0.8,
    ill=2.0,
)
def an_empty_sentence(attach, fixed):
    """One sentence of the corpus is empty; its row is all padding, and attention over nothing is not a number."""
    tokens, _, topic = sentences()
    tokens, topic = tokens[:480].clone(), topic[:480]
    tokens[170] = torch.tensor([1] + [0] * 13) if fixed else 0
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    seen = []
    loader = DataLoader(list(zip(tokens, topic, strict=True)), batch_size=32, shuffle=False)
    for _ in range(3):
        for ids, label in loader:
            loss = F.cross_entropy(model(ids), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
            session.log(loss=seen[-1])
    return sum(seen[-10:]) / 10


@fault(
    "low_precision_stall",
    group="F",
    arch="mlp",
    task="classification",
    sites=("optimizer", "(model)", "0", "3"),
    exact=False,
    cascade=("not_learning", "loss_plateau", "lr_too_low"),
    well=1.4,
    ill=1.8,
)
def whole_model_in_bfloat16(attach, fixed):
    """The model was cast to bfloat16 as a whole; most steps are smaller than the gap between two such numbers."""
    x, y = digits()
    x = x.flatten(1)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 10))
    model = model.to(torch.float32 if fixed else torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session = attach(model, optimizer)
    seen = []
    for image, label in draw(x, y, size=64, steps=250):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(image)
        loss = F.cross_entropy(logits.float(), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1])
    return sum(seen[-20:]) / 20


@fault(
    "rnn_state_not_reset",
    group="D",
    arch="gru",
    task="classification",
    sites=("rnn", "(loop)", "(model)"),
    exact=False,
    cascade=("loss_plateau", "overfitting"),
    well=0.05,
    ill=0.1,
)
def state_of_other_sentences(attach, fixed):
    """The state of the last batch is handed on, detached, though shuffled batches have nothing in common."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.out = nn.Embedding(24, 16), nn.GRU(16, 24, batch_first=True), nn.Linear(24, 2)

        def forward(self, tokens, state):
            h, state = self.rnn(self.embed(tokens), state)
            return self.out(h.mean(1)), state.detach()

    tokens, _, topic = sentences()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    state = given = None
    for ids, label in draw(tokens, topic, size=32, steps=100):
        given = None if fixed else state
        logits, state = model(ids, given)
        loss = F.cross_entropy(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        handed, fresh = model(tokens[:32], given)[0], model(tokens[:32], None)[0]
    return (handed.softmax(-1) - fresh.softmax(-1)).abs().max().item()
