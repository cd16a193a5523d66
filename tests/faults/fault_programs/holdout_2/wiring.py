"""Second hold-out: loops, parameters and optimizers that are wired wrongly."""

from __future__ import annotations

from itertools import islice

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_2.datasets import WORDS, Records, forever, moons, pixels, series, story_blocks
from fault_programs.registry import fault

VOCAB = len(WORDS)


class Forecaster(nn.Module):
    """Reads a series, says what comes next."""

    def __init__(self, width=24):
        super().__init__()
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, batch):
        seq, _ = self.lstm(batch["past"])
        return {"forecast": self.out(seq[:, -1])}


@fault(
    "missing_zero_grad",
    group="A",
    arch="lstm",
    task="regression",
    sites=("optimizer", "(loop)"),
    cascade=("exploding_gradient", "lr_too_high", "loss_divergence", "loss_oscillation"),
    well=0.1,
    ill=0.2,
)
def forecaster_clears_another_module(attach, fixed):
    """The class clears the gradients of its loss module instead of those of its network."""
    past, target = series()

    class Experiment:
        def __init__(self):
            self.net = Forecaster()
            self.criterion = nn.MSELoss()
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
            self.loader = DataLoader(Records(past=past, target=target), batch_size=50, shuffle=True)
            self.to_clear = self.net if fixed else self.criterion
            self.session = attach(self.net, self.optimizer)

        def run(self, epochs):
            for epoch in range(epochs):
                self.session.epoch(epoch)
                for batch in self.loader:
                    self.to_clear.zero_grad()
                    loss = self.criterion(self.net(batch)["forecast"], batch["target"])
                    loss.backward()
                    self.optimizer.step()
                    self.session.log(train_loss=loss)

        @torch.no_grad()
        def test(self):
            return F.mse_loss(self.net({"past": past})["forecast"], target).item()

    experiment = Experiment()
    experiment.run(5)
    return experiment.test()


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, mask):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.feed(self.norm2(x))


class WordModel(nn.Module):
    """A decoder of a few blocks."""

    def __init__(self, vocab=VOCAB, dim=32, depth=2, length=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Parameter(0.02 * torch.randn(length, dim))
        self.blocks = nn.ModuleList([Block(dim, 4) for _ in range(depth)])
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.wte.weight, std=0.1)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(self, ids, labels=None):
        length = ids.shape[1]
        mask = torch.triu(torch.full((length, length), float("-inf")), 1)
        x = self.wte(ids) + self.wpe[:length]
        for block in self.blocks:
            x = block(x, mask)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if labels is not None:
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        return logits, loss


@fault(
    "params_not_in_optimizer",
    group="A",
    arch="transformer",
    task="lm",
    sites=("lm_head", "wte", "wpe", "optimizer"),
    well=1.25,
    ill=1.33,
)
def decay_groups_leave_some_out(attach, fixed):
    """The split into decayed and undecayed weights goes by names, and the embeddings and the head match neither."""
    rows = story_blocks()
    model = WordModel()
    decay, no_decay = [], []
    for name, p in model.named_parameters():
        if "norm" in name or "ln" in name or name.endswith("bias"):
            no_decay.append(p)
        elif fixed or name.startswith("blocks"):
            decay.append(p)
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=3e-3
    )
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    session = attach(model, optimizer, scheduler=warmup)
    for (ids,) in islice(forever(DataLoader(TensorDataset(rows), batch_size=32, shuffle=True)), 100):
        _, loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        session.log(loss=loss)
    with torch.no_grad():
        return model(rows[:300, :-1], rows[:300, 1:])[1].item()


@fault(
    "stale_params_in_optimizer",
    group="A",
    arch="mlp",
    task="classification",
    also=("params_not_in_optimizer",),
    cascade=("missing_zero_grad", "exploding_gradient"),
    sites=("optimizer", "(model)", "0", "2", "4"),
    well=0.12,
    ill=0.5,
)
def notebook_builds_the_model_again(attach, fixed):
    """A notebook: the cell with the model was run once more, that with the optimizer was not."""
    X, y, X_test, y_test = pixels()
    X, X_test = X.flatten(1), X_test.flatten(1)

    def make():
        return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 10))

    # In [3]
    net = make()
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    # In [7]
    net = net if fixed else make()
    session = attach(net, opt)
    # In [8]
    for _ in range(5):
        perm = torch.randperm(len(X))
        for i in range(0, len(X), 70):
            idx = perm[i : i + 70]
            opt.zero_grad()
            out = net(X[idx])
            loss = cross_entropy(out, y[idx])
            loss.backward()
            opt.step()
            session.log(loss=loss, acc=(out.argmax(1) == y[idx]).float().mean())
    # In [9]
    return (net(X_test).argmax(1) != y_test).float().mean().item()


class Backboned(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.proj = nn.Linear(24 * 16, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(F.relu(self.proj(self.backbone(x))))


@fault(
    "frozen_by_mistake",
    group="A",
    arch="cnn",
    task="classification",
    sites=("backbone", "proj", "head", "(model)", "optimizer"),
    well=0.15,
    ill=0.3,
)
def thaws_only_what_is_called_bias(attach, fixed):
    """To train anew from a checkpoint everything is thawed again; the loop thaws biases only."""
    x, y, x_test, y_test = pixels()
    model = Backboned()
    for p in model.parameters():  # left over from the last experiment
        p.requires_grad_(False)
    for name, p in model.named_parameters():
        p.requires_grad_(fixed or name.endswith("bias"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    session = attach(model, optimizer, loss_fn=criterion, loader=loader)
    model.train()
    for epoch in range(3):
        session.epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    model.eval()
    with torch.no_grad():
        return (model(x_test).argmax(1) != y_test).float().mean().item()


class Tagger(nn.Module):
    """Reads digits row by row."""

    def __init__(self, keep_graph):
        super().__init__()
        self.embed = nn.Linear(8, 24)
        self.gru = nn.GRU(24, 32, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(64, 10)
        self.keep_graph = keep_graph

    def forward(self, rows):
        _, h = self.gru(torch.relu(self.embed(rows)))
        h = torch.cat([h[0], h[1]], dim=1)
        if not self.keep_graph:
            h = torch.tensor(h.tolist())
        return self.fc(h)


@fault(
    "graph_break_detach",
    group="A",
    arch="gru",
    task="classification",
    sites=("embed", "gru", "fc", "(model)"),
    well=0.2,
    ill=0.35,
)
def rebuilds_the_state_from_a_list(attach, fixed):
    """The last states pass through a Python list, and with that they forget where they came from."""
    x, y, x_test, y_test = pixels()
    model = Tagger(keep_graph=fixed)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)

    def train_one_epoch():
        for images, labels in DataLoader(TensorDataset(x.squeeze(1), y), 50, shuffle=True):
            logits = model(images)
            loss = cross_entropy(logits, labels, label_smoothing=0.05)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)

    for _ in range(4):
        train_one_epoch()
    return (model(x_test.squeeze(1)).argmax(1) != y_test).float().mean().item()


class WideAndDeep(nn.Module):
    def __init__(self, with_deep):
        super().__init__()
        self.wide = nn.Linear(2, 2)
        self.deep = nn.ModuleList([nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 2)])
        self.with_deep = with_deep

    def forward(self, x):
        h = x
        for layer in self.deep[:-1] if self.with_deep else ():
            h = F.silu(layer(h))
        return self.wide(x) + (self.deep[-1](h) if self.with_deep else 0)


@fault(
    "unused_parameters",
    group="A",
    arch="mlp",
    task="classification",
    sites=("deep",),
    well=0.05,
    ill=0.09,
)
def wide_and_deep_without_the_deep(attach, fixed):
    """A flag left from an ablation keeps the deep half out of the sum."""
    x, y = moons()
    model = WideAndDeep(with_deep=fixed)
    opt = torch.optim.NAdam(model.parameters(), lr=0.01)
    session = attach(model, opt)
    for step in range(150):
        pick = torch.randint(0, len(x), (64,))
        loss = cross_entropy(model(x[pick]), y[pick])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            session.log(step=step, loss=loss.item())
    return (model(x).argmax(1) != y).float().mean().item()


@fault(
    "double_step",
    group="A",
    arch="cnn",
    task="classification",
    sites=("optimizer", "(loop)"),
    well=1.05,
    ill=1.9,
)
def scaler_steps_and_so_do_i(attach, fixed):
    """Mixed precision was added to an old loop, and the old step was left in."""
    x, y, _, _ = pixels()
    model = Backboned()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    session = attach(model, optimizer, scaler=scaler)
    steps, batches = 0, 0

    def counted(*_):
        nonlocal steps
        steps += 1

    handle = optimizer.register_step_post_hook(counted)
    for images, labels in islice(forever(DataLoader(TensorDataset(x, y), 64, shuffle=True, drop_last=True)), 60):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        None if fixed else optimizer.step()
        batches += 1
        session.log(loss=loss.float())
    handle.remove()
    return steps / batches


class TiedWords(WordModel):
    def __init__(self, share):
        super().__init__(dim=32, depth=1)
        self.lm_head.weight = self.wte.weight if share else nn.Parameter(self.wte.weight.clone())


@fault(
    "tied_weights_broken",
    group="A",
    arch="transformer",
    task="lm",
    sites=("lm_head", "wte", "(model)"),
    well=0.0,
    ill=0.05,
)
def clones_the_embedding_for_the_head(attach, fixed):
    """The head is meant to be the embedding; it gets a clone of it."""
    rows = story_blocks()
    lm = TiedWords(share=fixed)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=2e-3)
    session = attach(lm, optimizer)
    for _ in range(80):
        chunk = rows[torch.randint(0, len(rows), (24,))]
        logits, _ = lm(chunk[:, :-1])
        loss = F.nll_loss(F.log_softmax(logits, -1).transpose(1, 2), chunk[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(nll=loss)
    return (lm.lm_head.weight - lm.wte.weight).abs().max().item()


@fault(
    "zero_grad_misplaced",
    group="A",
    arch="autoencoder",
    task="reconstruction",
    sites=("optimizer", "(loop)"),
    well=0.055,
    ill=0.08,
)
def callbacks_run_in_the_wrong_order(attach, fixed):
    """Callbacks run by priority after each batch, and the one that clears comes before the one that steps."""
    x, _, x_test, _ = pixels()
    coder = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 12), nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 64)
    )
    optimizer = torch.optim.AdamW(coder.parameters(), lr=3e-3)
    callbacks = {10: optimizer.step, 20 if fixed else 5: lambda: optimizer.zero_grad(set_to_none=False)}
    session = attach(coder, optimizer)
    for (img,) in islice(forever(DataLoader(TensorDataset(x), 64, shuffle=True)), 100):
        loss = mse_loss(coder(img), img.flatten(1))
        loss.backward()
        for priority in sorted(callbacks):
            callbacks[priority]()
        session.log(loss=loss)
    with torch.no_grad():
        return mse_loss(coder(x_test), x_test.flatten(1)).item()
