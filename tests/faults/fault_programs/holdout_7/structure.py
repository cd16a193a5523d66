"""Seventh hold-out: how models are put together, and their modes."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_7.about import fault
from fault_programs.holdout_7.matter import (
    batches,
    blobs,
    chunks,
    error_rate,
    pictures,
    prose,
    sounds,
    windows,
)


class SegNet(nn.Module):
    """A stack of convolutions whose number is an argument."""

    def __init__(self, depth, container):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = container([nn.Conv2d(12, 12, 3, padding=1) for _ in range(depth)])
        self.bn2 = container([nn.BatchNorm2d(12) for _ in range(depth)])
        self.conv3 = nn.Conv2d(12, 1, 1)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        for conv, bn in zip(self.conv2, self.bn2):
            x = F.relu(bn(conv(x)))
        return self.conv3(x)


@fault(
    "params_not_in_optimizer",
    area="segmentation",
    source="https://github.com/kanezaki/pytorch-unsupervised-segmentation/pull/6",
    cause="Convolutions and norms are kept in a plain list, so parameters() does not have them and train/eval do not reach them.",
    words=(r"list|ModuleList|regist", r"not (trained|held)|no optimizer"),
    also=("unregistered_modules", "train_mode_in_eval"),
    cascade=("underfitting", "loss_plateau"),
    sites=("optimizer", "conv2", "bn2", "(model)"),
)
def convolutions_in_a_list(attach, fixed):
    """self.conv2 = []."""
    x, y = blobs()
    x = x * (0.35 + 0.65 * torch.rand(len(x), 1, 1, 1, generator=torch.Generator().manual_seed(1)))
    model = SegNet(3, nn.ModuleList if fixed else list)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = attach(model, optimizer)
    for xb, yb in batches(x[:200], y[:200], size=10, epochs=6):
        loss = F.binary_cross_entropy_with_logits(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.binary_cross_entropy_with_logits(model(x[200:]), y[200:]))


class LoRALinear(nn.Module):
    """A frozen layer and a low-rank correction."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + 2.0 * (x @ self.lora_A.T) @ self.lora_B.T


class Block(nn.Module):
    """A residual block of a pretrained body."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Body(nn.Module):
    """Digits 0 to 4 are what it was pretrained on."""

    def __init__(self, dim=48):
        super().__init__()
        self.stem = nn.Linear(64, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(3)])
        self.head = nn.Linear(dim, 10)
        self.checkpointing, self.input_require_grads = False, False

    def forward(self, x):
        h = self.stem(x.flatten(1))
        if self.input_require_grads:
            h.requires_grad_(True)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True) if self.checkpointing else block(h)
        return self.head(h)


def pretrained_body():
    """Return a body that knows the digits 0 to 4."""
    xtr, ytr, _, _ = pictures()
    low = ytr < 5
    body = Body()
    optimizer = torch.optim.Adam(body.parameters(), lr=2e-3)
    for x, y in batches(xtr[low], ytr[low], size=50, epochs=5):
        optimizer.zero_grad()
        F.cross_entropy(body(x), y).backward()
        optimizer.step()
    return body


def add_lora(body):
    body.requires_grad_(False)
    for block in body.blocks:
        block.up, block.down = LoRALinear(block.up), LoRALinear(block.down)


@fault(
    "graph_break_detach",
    area="fine-tuning",
    source="https://github.com/ostris/ai-toolkit/issues/1054",
    cause="With gradient checkpointing and a frozen stem no input of a block needs a gradient, so the checkpoint detaches the adapters.",
    words=(r"checkpoint", r"(no|never|without).*gradient", r"lora|adapter"),
    also=("unused_parameters",),
    cascade=("underfitting", "not_learning", "loss_plateau"),
    sites=("blocks", "(model)"),
)
def adapters_inside_a_checkpoint(attach, fixed):
    """gradient_checkpointing_enable() without enable_input_require_grads()."""
    xtr, ytr, xte, yte = pictures()
    body = pretrained_body()
    add_lora(body)
    body.head.requires_grad_(True)
    body.checkpointing = True
    body.input_require_grads = fixed
    optimizer = torch.optim.AdamW([p for p in body.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
    session = attach(body, optimizer)
    for x, y in batches(xtr, ytr, size=50, epochs=4):
        loss = F.cross_entropy(body(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.cross_entropy(body(xte), yte))


def apply_lora(body, overwrite):
    """Add adapters unless the component has some already."""
    if not isinstance(body.blocks[0].up, LoRALinear):
        add_lora(body)
    elif overwrite:
        for name, p in body.named_parameters():
            p.requires_grad_("lora_" in name)


@fault(
    "frozen_by_mistake",
    area="fine-tuning",
    source="https://github.com/X-GenGroup/Flow-Factory/pull/56",
    cause="The component was frozen after its adapters were loaded, and apply_lora skips a component that has adapters, so they stay frozen.",
    words=(r"frozen|requires_grad|freez",),
    also=("unused_parameters",),
    cascade=("underfitting", "not_learning", "loss_plateau"),
    sites=("blocks", "optimizer", "(model)"),
)
def adapters_frozen_with_the_base(attach, fixed):
    """«Adapter exists. Skipping.»"""
    xtr, ytr, xte, yte = pictures()
    body = pretrained_body()
    apply_lora(body, overwrite=False)
    body.blocks.requires_grad_(False)
    apply_lora(body, overwrite=fixed)
    body.head.requires_grad_(True)
    optimizer = torch.optim.AdamW(body.parameters(), lr=3e-3, weight_decay=0.0)
    session = attach(body, optimizer)
    for x, y in batches(xtr, ytr, size=50, epochs=4):
        loss = F.cross_entropy(body(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.cross_entropy(body(xte), yte))


@fault(
    "setting_without_effect",
    area="fine-tuning",
    source="https://github.com/catalyst-team/catalyst/issues/79",
    cause="requires_grad is set on the module, which has no such attribute, so the encoder is not frozen and is spoiled by a few samples.",
    words=(r"requires_grad", r"no effect|never reads"),
    also=("overfitting",),
    cascade=("lr_too_high",),
    sites=("stem", "blocks", "(model)"),
)
def freezes_the_module_itself(attach, fixed):
    """encoder.requires_grad = False."""
    xtr, ytr, xte, yte = pictures()
    body = Body()
    pre = torch.optim.Adam(body.parameters(), lr=2e-3)
    for x, y in batches(xtr, ytr, size=50, epochs=4):
        pre.zero_grad()
        F.cross_entropy(body(x), y).backward()
        pre.step()
    body.head = nn.Linear(48, 10)
    for encoder in (body.stem, body.blocks):
        encoder.requires_grad_(False) if fixed else setattr(encoder, "requires_grad", False)
    few = torch.randperm(len(xtr), generator=torch.Generator().manual_seed(5))[:60]
    noisy = xtr[few] + 1.2 * torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(6))
    optimizer = torch.optim.Adam(body.parameters(), lr=1e-2)
    session = attach(body, optimizer)
    for x, y in batches(noisy, ytr[few], size=20, epochs=30):
        loss = F.cross_entropy(body(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return error_rate(body, xte, yte)


class Attention(nn.Module):
    """Causal attention with its own softmax."""

    def __init__(self, dim, dropout, softmax_dim=-1, gate=True):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.dropout, self.softmax_dim, self.gate = dropout, softmax_dim, gate

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (part.view(b, t, 4, d // 4).transpose(1, 2) for part in self.c_attn(x).split(d, 2))
        if self.softmax_dim is None:
            p = self.dropout if self.training or not self.gate else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            att = q @ k.transpose(-2, -1) / math.sqrt(d // 4)
            att = att.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf"))
            y = F.softmax(att, dim=self.softmax_dim) @ v
        return self.c_proj(y.transpose(1, 2).reshape(b, t, d))


class NanoGPT(nn.Module):
    """A small GPT."""

    def __init__(self, make_attention, vocab=24, dim=32, length=24, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.attn = nn.ModuleList([make_attention() for _ in range(layers)])
        self.mlp = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim)) for _ in range(layers)]
        )
        self.ln = nn.ModuleList([nn.LayerNorm(dim) for _ in range(2 * layers + 1)])
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for i, (attn, mlp) in enumerate(zip(self.attn, self.mlp)):
            x = x + attn(self.ln[2 * i](x))
            x = x + mlp(self.ln[2 * i + 1](x))
        return self.lm_head(self.ln[-1](x))


def held_out(text):
    ids = torch.stack([text[a : a + 21] for a in range(5000, 5900, 10)])
    return ids[:, :-1], ids[:, 1:]


def lm_loss(logits, targets):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


@fault(
    "dropout_ignores_mode",
    area="language",
    source="https://github.com/karpathy/nanoGPT/pull/240",
    cause="scaled_dot_product_attention gets dropout_p in evaluation too.",
    words=(r"dropout",),
    cascade=("overfitting", "train_mode_in_eval"),
    sites=("attn", "(model)", "(validation)"),
)
def flash_attention_drops_in_evaluation(attach, fixed):
    """dropout_p=self.dropout."""
    text = prose()
    model = NanoGPT(lambda: Attention(32, 0.4, softmax_dim=None, gate=fixed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    x, y = held_out(text)

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        losses = [lm_loss(model(x), y) for _ in range(2)]
        model.train()
        return torch.stack(losses)

    for i, ids in enumerate(chunks(text[:5000], 20, 24, 150)):
        loss = lm_loss(model(ids[:, :-1]), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        if i % 30 == 29:
            session.log(val_loss=estimate_loss().mean())
    measured = estimate_loss().mean()
    for attention in model.attn:
        attention.dropout = 0.0
    return max(0.0, float(measured - estimate_loss().mean()))


@fault(
    "wrong_dim_softmax",
    area="language",
    source="https://github.com/jadore801120/attention-is-all-you-need-pytorch/issues/19",
    cause="The softmax of the attention runs over the queries instead of the keys, so what a token sees depends on later ones.",
    words=(r"softmax.*(dim|over|axis|quer)", r"dim(ension)?"),
    also=("future_leak",),
    cascade=("underfitting", "attention_entropy_collapse", "overfitting"),
    sites=("attn", "(model)"),
)
def attention_sums_to_one_over_queries(attach, fixed):
    """F.softmax(att, dim=-2)."""
    text = prose()
    model = NanoGPT(lambda: Attention(32, 0.0, softmax_dim=-1 if fixed else -2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for ids in chunks(text[:5000], 20, 24, 150):
        loss = lm_loss(model(ids[:, :-1]), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    x, y = held_out(text)
    with torch.no_grad():
        last = torch.stack([model(x[:, :n])[:, -1] for n in range(4, 20)], 1)
        return float(lm_loss(last, y[:, 3:19]))


class PositionalEncoding(nn.Module):
    """Sines and cosines for inputs (batch, sequence, dim) or (sequence, batch, dim)."""

    def __init__(self, dim, length, sequence_axis):
        super().__init__()
        where = torch.arange(length)[:, None] * torch.exp(torch.arange(0, dim, 2) * (-math.log(1e3) / dim))
        pe = torch.stack([where.sin(), where.cos()], 2).flatten(1)
        self.register_buffer("pe", pe.unsqueeze(1 - sequence_axis))
        self.sequence_axis = sequence_axis

    def forward(self, x):
        return x + self.pe.narrow(self.sequence_axis, 0, x.shape[self.sequence_axis])


@fault(
    "position_along_the_batch",
    area="speech",
    source="https://github.com/NeuracoreAI/neuracore/pull/154",
    cause="The positional encoding is unsqueezed on the wrong axis, so it tells samples of the batch apart instead of time steps.",
    words=(r"position.*(batch|axis|dim)", r"(batch|sample).*(index|position)"),
    also=("batch_axis_mixed",),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("pos", "(model)"),
)
def position_of_the_sample_in_the_batch(attach, fixed):
    """pe.unsqueeze(0) where (sequence, batch, dim) came in, and the other way round."""
    x, _ = sounds()

    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(10, 32)
            self.pos = PositionalEncoding(32, 64, sequence_axis=1 if fixed else 0)
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(32, 2)

        def forward(self, x):
            return self.out(self.encoder(self.pos(self.inp(x))).mean(1))

    half = torch.arange(36) < 18
    order = ((x[:, half].clamp(min=1).sum((1, 2))) > (x[:, ~half].clamp(min=1).sum((1, 2)))).long()
    model = Speech()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for xb, yb in batches(x[:450], order[:450], size=50, epochs=12):
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return sum(error_rate(model, x[a : a + 50], order[a : a + 50]) for a in (450, 500, 550)) / 3


class PackedLSTM(nn.Module):
    """An LSTM over packed sequences that gives back its last state."""

    def __init__(self, cell):
        super().__init__()
        self.rnn = nn.LSTM(10, 32, batch_first=True)
        self.cell = cell

    def forward(self, x, lengths):
        _, indices = torch.sort(lengths, descending=True)
        _, back = torch.sort(indices)
        _, (h, c) = self.rnn(pack_padded_sequence(x[indices], lengths[indices], batch_first=True))
        return h[:, back, :], self.cell(h, c)[:, back, :]


@fault(
    "wrong_state_returned",
    area="speech",
    source="https://github.com/salesforce/decaNLP/issues/9",
    cause="The encoder gives back h twice: the cell state that the decoder starts from is not that of the encoder.",
    words=(r"cell state|\bc\b", r"(unused|dropped|discarded|twice)"),
    also=("result_discarded",),
    cascade=("underfitting", "loss_plateau"),
    sites=("rnn", "encoder", "(model)"),
)
def gives_back_h_twice(attach, fixed):
    """h, c = h[:, _indices, :], h[:, _indices, :]."""
    x, y = sounds()
    lengths = torch.randint(30, 37, (len(x),), generator=torch.Generator().manual_seed(9))

    class Seq2Word(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = PackedLSTM((lambda h, c: c) if fixed else (lambda h, c: h))
            self.decoder = nn.LSTMCell(4, 32)
            self.start = nn.Parameter(torch.zeros(4))
            self.out = nn.Linear(32, 6)

        def forward(self, x, lengths):
            _, c = self.encoder(x, lengths)
            h = torch.zeros(len(x), 32)
            h, c = self.decoder(self.start.expand(len(x), 4), (h, c[0]))
            return self.out(h)

    model = Seq2Word()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for xb, nb, yb in batches(x[:450], lengths[:450], y[:450], size=30, epochs=6):
        loss = F.cross_entropy(model(xb, nb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.cross_entropy(model(x[450:], lengths[450:]), y[450:]))


@fault(
    "padding_dominates",
    area="reinforcement learning",
    source="https://github.com/ray-project/ray/issues/21392",
    cause="The state after the padding is used instead of that at the end of each sequence.",
    words=(r"padd", r"length"),
    also=("mask_not_applied",),
    cascade=("underfitting", "not_learning", "loss_plateau", "input_ignored"),
    sites=("lstm", "(model)", "(data)"),
)
def state_after_the_padding(attach, fixed):
    """seq_lens.max() instead of seq_lens[i]."""
    x, y = sounds()
    lengths = torch.randint(26, 37, (len(x),), generator=torch.Generator().manual_seed(4))
    padded = torch.zeros(len(x), 150, 10)
    for n, size in enumerate(lengths):
        padded[n, :size] = x[n, :size]

    class LSTMWrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(10, 32, batch_first=True)
            self.logits = nn.Linear(32, 6)

        def forward(self, obs, seq_lens):
            out, _ = self.lstm(obs)
            at = seq_lens - 1 if fixed else torch.full_like(seq_lens, obs.shape[1] - 1)
            return self.logits(out[torch.arange(len(out)), at])

    model = LSTMWrapper()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for xb, nb, yb in batches(padded[:450], lengths[:450], y[:450], size=50, epochs=10):
        loss = F.cross_entropy(model(xb, nb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float((model(padded[450:], lengths[450:]).argmax(1) != y[450:]).float().mean())


class Unet3d(nn.Module):
    """A little network with batch norms."""

    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.dec = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.3))
        self.final = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        return self.final(self.dec(self.enc(x)))


class UNetTrainer:
    """A trainer as in a repository: fit and validate."""

    def __init__(self, model, optimizer, session, quiet):
        self.model, self.optimizer, self.session, self.quiet = model, optimizer, session, quiet

    def fit(self, x, y, val):
        for _epoch in range(5):
            for xb, yb in batches(x, y, size=10):
                loss = F.binary_cross_entropy_with_logits(self.model(xb), yb)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.session.log(loss=loss)
            self.session.log(val_loss=self.validate(*val))

    @torch.no_grad()
    def validate(self, x, y):
        if self.quiet:
            self.model.eval()
        losses = [F.binary_cross_entropy_with_logits(self.model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))]
        self.model.train()
        return float(torch.stack(losses).mean())


@fault(
    "train_mode_in_eval",
    area="segmentation",
    source="https://github.com/wolny/pytorch-3dunet/issues/53",
    cause="validate() runs the model in training mode: batch norms use the single sample and dropout is on.",
    words=(r"eval", r"train(ing)? mode"),
    cascade=("overfitting", "batchnorm_small_batch", "dropout_ignores_mode"),
    sites=("(validation)", "(model)", "enc", "dec"),
)
def validates_without_eval(attach, fixed):
    """self.model.eval() is missing."""
    x, y = blobs()
    scale = 10 ** torch.linspace(-0.7, 0.7, len(x)).view(-1, 1, 1, 1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    x, y = (x * scale)[order], y[order]
    model = Unet3d()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = UNetTrainer(model, optimizer, attach(model, optimizer), quiet=fixed)
    trainer.fit(x[:200], y[:200], (x[200:], y[200:]))
    with torch.no_grad():
        model.eval()
        truth = float(F.binary_cross_entropy_with_logits(model(x[200:]), y[200:]))
        model.train()
    return abs(trainer.validate(x[200:], y[200:]) - truth)


@fault(
    "eval_mode_in_training",
    area="vision",
    source="https://github.com/facebookresearch/clevr-iep/pull/22",
    cause="check_accuracy sets the model to evaluation and nobody sets it back, so batch norms keep their first statistics and dropout is off.",
    words=(r"eval(uation)? mode", r"\btrain\(\)"),
    also=("batchnorm_stats_stale",),
    cascade=("overfitting", "loss_spike", "loss_oscillation"),
    sites=("(model)", "(loop)", "2", "6"),
    onset=20,
)
def check_accuracy_leaves_eval(attach, fixed):
    """set_mode('eval', models) without set_mode('train', models) after it."""
    xtr, ytr, xte, yte = pictures()
    made = torch.Generator().manual_seed(12)
    pick = torch.randperm(len(xtr), generator=made)[:300]
    x = xtr[pick] + 1.0 * torch.randn(300, 1, 8, 8, generator=made)
    test = xte + 1.0 * torch.randn(400, 1, 8, 8, generator=made)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.7), nn.Linear(256, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)

    def check_accuracy():
        model.eval()
        with torch.no_grad():
            val_loss = F.cross_entropy(model(test), yte)
        if fixed:
            model.train()
        return val_loss

    t = 0
    model.train()
    for xb, yb in batches(x, ytr[pick], size=30, epochs=55):
        t += 1
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        if t % 20 == 0:
            session.log(val_loss=check_accuracy())
    return float(check_accuracy())


@fault(
    "data_leakage",
    area="time series",
    source="https://github.com/sktime/pytorch-forecasting/issues/182",
    cause="The decoder's input at a step holds the target of that very step, which is not known when one forecasts.",
    words=(r"leak", r"target.*input|input.*target"),
    also=("future_leak", "target_is_input"),
    cascade=("train_val_preproc_mismatch",),
    sites=("(data)", "(model)", "decoder"),
)
def decoder_reads_the_step_it_forecasts(attach, fixed):
    """input_vector[:, idx] is not overridden by the last known value."""
    past, ahead = windows()

    class DeepAR(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.GRU(1, 24, batch_first=True)
            self.decoder = nn.GRU(1, 24, batch_first=True)
            self.out = nn.Linear(24, 1)

        def forward(self, past, known):
            _, h = self.encoder(past.unsqueeze(-1))
            return self.out(self.decoder(known.unsqueeze(-1), h)[0]).squeeze(-1)

    def lagged(past, ahead):
        return torch.cat([past[:, -1:], ahead[:, :-1]], 1)

    model = DeepAR()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for pb, ab in batches(past[:1200], ahead[:1200], size=50, epochs=8):
        loss = F.mse_loss(model(pb, lagged(pb, ab) if fixed else ab), ab)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        known = past[1200:, -1:]
        for _ in range(6):
            out = model(past[1200:], torch.cat([known, torch.zeros(len(known), 6 - known.shape[1])], 1))
            known = torch.cat([known, out[:, known.shape[1] - 1 : known.shape[1]]], 1)[:, :6]
        return float(F.mse_loss(out, ahead[1200:]))


@fault(
    "axes_swapped",
    area="speech",
    source="https://github.com/CHiME9-ECHI/CHiME9-ECHI/issues/7",
    cause="The transform gives (frequency, time) but the model reads (time, frequency), so its recurrence runs over frequencies.",
    words=(r"(time|frequency|frames|axis|axes).*(swap|transpos|order|wrong)", r"axis"),
    cascade=("underfitting", "loss_plateau"),
    sites=("(model)", "rnn", "(data)"),
)
def recurrence_over_frequencies(attach, fixed):
    """[B, F, T] where [B, T, F] is wanted."""
    x, y = sounds(length=36)
    x = F.avg_pool1d(x.transpose(1, 2), 3)[:, :, :10].transpose(1, 2).contiguous()
    noisy = x + 0.35 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    stft = noisy.transpose(1, 2)
    feats = stft.transpose(1, 2) if fixed else stft

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(10, 24, 3, padding=1)
            self.rnn = nn.GRU(24, 24, batch_first=True)
            self.fc = nn.Linear(24, 6)

        def forward(self, spec):
            h = F.relu(self.conv(spec.transpose(1, 2))).transpose(1, 2)
            return self.fc(self.rnn(h)[0].amax(1))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(feats[:450], y[:450]), batch_size=30, shuffle=True)
    for _epoch in range(8):
        for spec, word in loader:
            loss = F.cross_entropy(model(spec), word)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, feats[450:], y[450:])
