"""Eleventh hold-out: language, translation, speech and attention."""

from __future__ import annotations

import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_11.about import fault
from fault_programs.holdout_11.material import digits


def reversals(count, symbols=9, low=3, high=7, pad=0):
    """Return sequences (2 and up) and their reversals that end with 1, both padded with 0."""
    pairs = []
    for _ in range(count):
        s = [random.randint(2, symbols + 1) for _ in range(random.randint(low, high))]
        pairs.append((torch.tensor(s), torch.tensor([*s[::-1], 1])))
    sources, targets = zip(*pairs)
    return pad_sequence(sources, True, pad), pad_sequence(targets, True, pad)


@fault(
    "params_not_in_optimizer",
    area="transformer",
    source="https://github.com/LiamMaclean216/Pytorch-Transfomer/pull/7",
    cause="The blocks stand in a plain Python list, so parameters() does not find them and the optimizer never trains them.",
    words=(r"ModuleList|python list|plain list|regist|not in the optimi[sz]er|parameters\(\)",),
    also=("unused_parameters",),
    cascade=("underfitting", "loss_plateau"),
    sites=("encoders", "optimizer", "(model)"),
)
def blocks_stand_in_a_plain_list(attach, fixed):
    """self.encoders = [Block(), Block()] instead of nn.ModuleList."""

    class Block(nn.Module):
        def __init__(self, d=24):
            super().__init__()
            self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
            self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.mlp = nn.Sequential(nn.Linear(d, 48), nn.ReLU(), nn.Linear(48, d))

        def forward(self, x):
            x = self.norm1(x + self.attention(x, x, x, need_weights=False)[0])
            return self.norm2(x + self.mlp(x))

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 24)
            self.position = nn.Parameter(0.1 * torch.randn(8, 24))
            encoders = [Block() for _ in range(2)]
            self.encoders = nn.ModuleList(encoders) if fixed else encoders
            self.head = nn.Linear(24, 10)

        def forward(self, x):
            x = self.embedding(x) + self.position
            for encoder in self.encoders:
                x = encoder(x)
            return self.head(x)

    model = Transformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for step in range(300):
        x = torch.randint(0, 10, (32, 8))
        loss = F.cross_entropy(model(x).transpose(1, 2), x.sort(1).values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item())
    x = torch.randint(0, 10, (200, 8))
    with torch.no_grad():
        return float((model(x).argmax(-1) != x.sort(1).values).float().mean())


@fault(
    "reshape_scrambles",
    area="transformer",
    source="https://github.com/jsbaan/transformer-from-scratch/pull/6",
    cause="After attention the heads are joined by a reshape without the permute before it, so a token receives pieces of other tokens.",
    words=(r"permute|transpose|reshape|view",),
    cascade=("underfitting", "loss_plateau"),
    sites=("attention", "(model)"),
)
def heads_are_joined_without_a_permute(attach, fixed):
    """values.reshape(batch, time, dim) of a tensor that is batch, heads, time, part."""

    class MultiHeadAttention(nn.Module):
        def __init__(self, dim=24, heads=4):
            super().__init__()
            self.heads, self.part = heads, dim // heads
            self.qkv = nn.Linear(dim, 3 * dim)
            self.out = nn.Linear(dim, dim)

        def forward(self, x):
            b, t, d = x.shape
            q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, self.part).permute(2, 0, 3, 1, 4)
            weights = (q @ k.transpose(-2, -1) / math.sqrt(self.part)).softmax(-1)
            values = weights @ v
            values = values.permute(0, 2, 1, 3) if fixed else values
            return self.out(values.reshape(b, t, d))

    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(40, 24)
            self.attention, self.norm = MultiHeadAttention(), nn.LayerNorm(24)
            self.head = nn.Linear(24, 4)

        def forward(self, x):
            h = self.embedding(x)
            return self.head(self.norm(h + self.attention(h)))[:, 8:]

    def tables(n):
        keys, values = torch.rand(n, 8).argsort(1), torch.randint(0, 4, (n, 8))
        asked = torch.randint(0, 8, (n, 8))
        at = (keys[:, None] == asked[..., None]).int().argmax(2)
        return torch.cat([keys * 4 + values, 32 + asked], 1), values.gather(1, at)

    model = Lookup()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for step in range(400):
        x, y = tables(32)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item())
    x, y = tables(200)
    with torch.no_grad():
        return float((model(x).argmax(-1) != y).float().mean())


@fault(
    "wrong_dim_softmax",
    area="question answering",
    source="https://github.com/DEEP-PolyU/KEQA_WSDM19/issues/2",
    cause="The softmax of the attention runs over an axis of length one, so each weight is one and attention only adds everything up.",
    words=(r"softmax", r"dim|axis|length|one\b|1"),
    also=("single_class_output",),
    cascade=("underfitting", "loss_plateau", "unused_parameters", "overfitting", "vanishing_gradient"),
    sites=("attn", "(model)"),
)
def attention_weights_are_all_one(attach, fixed):
    """softmax(dim=-1) of scores with one column."""

    class EmbedVector(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(30, 16)
            self.gru = nn.GRU(16, 12, bidirectional=True, batch_first=True)
            self.attn = nn.Sequential(nn.Linear(40, 16), nn.Tanh(), nn.Linear(16, 1))
            self.out = nn.Linear(16, 8)

        def forward(self, text):
            x = self.embed(text)
            outputs, _ = self.gru(x)
            score = self.attn(torch.cat([x, outputs], 2))
            weight = torch.softmax(score, dim=1 if fixed else -1)
            return self.out((weight * x).sum(1))

    def questions(n):
        text = torch.randint(8, 30, (n, 14))
        at = torch.randint(1, 14, (n,))
        rows = torch.arange(n)
        answer = torch.randint(0, 8, (n,))
        for _ in range(5):
            text[rows, torch.randint(0, 14, (n,))] = torch.randint(0, 8, (n,))
        text[rows, at], text[rows, at - 1] = answer, 29
        text[(text == 29) & (torch.arange(14)[None] != at[:, None] - 1)] = 28
        return text, answer

    model = EmbedVector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for it in range(250):
        text, answer = questions(40)
        loss = F.cross_entropy(model(text), answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item())
    text, answer = questions(400)
    with torch.no_grad():
        return float((model(text).argmax(1) != answer).float().mean())


@fault(
    "padding_dominates",
    area="formula recognition",
    source="https://github.com/lukas-blecher/LaTeX-OCR/pull/443",
    cause="The loss counts the padding, since ignore_index is not set to its number, and most positions are padding.",
    words=(r"pad", r"ignore_index|loss|mask|count"),
    also=("mask_not_applied",),
    cascade=("underfitting", "class_imbalance_collapse", "loss_plateau", "constant_output"),
    sites=("(loss)", "loss_fn", "(data)"),
)
def formulas_are_mostly_padding(attach, fixed):
    """cross_entropy with ignore_index left at -100 where the padding is 0."""
    length = 48

    def formulas(n):
        seen, out = torch.zeros(n, 4, 8), torch.zeros(n, length, dtype=torch.long)
        for i in range(n):
            symbols = [random.randint(2, 9) for _ in range(random.randint(2, 4))]
            for k, symbol in enumerate(symbols):
                seen[i, k, symbol - 2] = 1
            out[i, : len(symbols) + 1] = torch.tensor([*symbols, 1])
        return seen.flatten(1) + 0.3 * torch.randn(n, 32), out

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(32, 48)
            self.embed = nn.Embedding(10, 16)
            self.gru = nn.GRU(16, 48, batch_first=True)
            self.to_logits = nn.Linear(48, 10)

        def forward(self, seen, tokens):
            h = torch.tanh(self.encoder(seen))[None]
            return self.to_logits(self.gru(self.embed(tokens), h)[0])

    model = Decoder()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    ignore_index = 0 if fixed else -100
    session = attach(model, opt)
    seen, out = formulas(600)
    for epoch in range(9):
        for part in torch.randperm(600).split(25):
            tokens = F.pad(out[part, :-1], (1, 0), value=1)
            logits = model(seen[part], tokens)
            loss = F.cross_entropy(logits.transpose(1, 2), out[part], ignore_index=ignore_index)
            opt.zero_grad()
            loss.backward()
            opt.step()
            session.log(loss=loss.item())
    seen, out = formulas(200)
    with torch.no_grad():
        logits = model(seen, F.pad(out[:, :-1], (1, 0), value=1))
    return float(F.cross_entropy(logits[out > 0], out[out > 0]))


@fault(
    "future_leak",
    area="language model",
    source="from memory: questions on a small GPT whose loss falls to nothing while it writes nonsense, since the mask was left out",
    cause="No causal mask is applied, so each position can look at the token it should predict.",
    words=(r"mask|causal|future|next token|look ahead|leak",),
    cascade=("overfitting",),
    sites=("blocks", "(model)", "attn"),
)
def gpt_has_no_causal_mask(attach, fixed):
    """scaled_dot_product_attention with is_causal left out."""
    table = torch.randint(0, 12, (12, 12))

    def text(n, t=24):
        x = torch.randint(0, 12, (n, t))
        for i in range(2, t):
            keep = torch.rand(n) < 0.9
            x[keep, i] = table[x[keep, i - 1], x[keep, i - 2]]
        return x

    class CausalSelfAttention(nn.Module):
        def __init__(self, c, heads):
            super().__init__()
            self.c_attn, self.c_proj, self.heads = nn.Linear(c, 3 * c), nn.Linear(c, c), heads

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.c_attn(x).split(c, 2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=bool(fixed))
            return self.c_proj(y.transpose(1, 2).reshape(b, t, c))

    class GPT(nn.Module):
        def __init__(self, c=32):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(12, c), nn.Embedding(24, c)
            self.attn = nn.ModuleList(CausalSelfAttention(c, 2) for _ in range(2))
            self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(c, 64), nn.GELU(), nn.Linear(64, c)) for _ in range(2))
            self.ln = nn.ModuleList(nn.LayerNorm(c) for _ in range(5))
            self.lm_head = nn.Linear(c, 12, bias=False)

        def forward(self, idx):
            x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
            for i in range(2):
                x = x + self.attn[i](self.ln[2 * i](x))
                x = x + self.mlp[i](self.ln[2 * i + 1](x))
            return self.lm_head(self.ln[4](x))

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    data = text(600)
    for it in range(250):
        x = data[torch.randint(0, 600, (24,))]
        logits = model(x[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item())
    x = text(100)
    with torch.no_grad():
        for _ in range(6):
            x = torch.cat([x[:, 1:], model(x[:, 1:])[:, -1:].argmax(-1)], 1)
    return float((x[:, -6:] != table[x[:, -7:-1], x[:, -8:-2]]).float().mean())


@fault(
    "logits_into_prob_loss",
    area="speech",
    source="from memory: forum questions on nn.CTCLoss that becomes negative, answered with log_softmax",
    cause="CTC takes log-probabilities, but it gets the raw scores of the last layer, which it can raise without end.",
    words=(r"log_?softmax|log.?prob|raw|logits|negative",),
    cascade=(
        "loss_divergence",
        "not_learning",
        "exploding_activation",
        "exploding_gradient",
        "constant_output",
        "nan_in_loss",
        "nan_forward",
    ),
    sites=("(loss)", "loss_fn", "fc", "criterion"),
)
def ctc_gets_raw_scores(attach, fixed):
    """nn.CTCLoss on the output of nn.Linear."""

    def utterances(n):
        labels, frames = torch.randint(1, 6, (n, 4)), []
        for row in labels:
            parts = []
            for label in row:
                parts += [torch.zeros(1, 8), F.one_hot(label, 8).float().repeat(random.randint(1, 3), 1)]
            frames.append(torch.cat(parts))
        x = pad_sequence([F.pad(f, (0, 0, 0, 16 - len(f))) for f in frames], True)
        return 1.5 * x + 0.3 * torch.randn(x.shape), labels

    class AcousticModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(8, 24, 3, padding=1)
            self.rnn = nn.GRU(24, 24, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(48, 6)

        def forward(self, x):
            h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            return self.fc(self.rnn(h)[0])

    model = AcousticModel()
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    x, labels = utterances(400)
    for epoch in range(10):
        for part in torch.randperm(400).split(20):
            output = model(x[part])
            output = F.log_softmax(output, 2) if fixed else output
            lengths = torch.full((len(part),), 16)
            loss = criterion(output.transpose(0, 1), labels[part], lengths, torch.full((len(part),), 4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    x, labels = utterances(150)
    with torch.no_grad():
        best = model(x).argmax(2)
    wrong = 0
    for row, label in zip(best, labels):
        found = [int(k) for k in torch.unique_consecutive(row) if k != 0]
        wrong += found != label.tolist()
    return wrong / len(labels)


@fault(
    "exploding_gradient",
    area="running sum",
    source="from memory: forum questions on plain RNNs over long sequences whose loss jumps until gradients are clipped",
    cause="The recurrent weights stretch each step, so gradients grow exponentially over the many steps of a sequence and nothing clips them.",
    words=(r"explod|clip|gradient.*(large|grow|huge)",),
    cascade=(
        "bad_init_scale",
        "loss_spike",
        "loss_divergence",
        "loss_oscillation",
        "exploding_activation",
        "lr_too_high",
        "nan_in_loss",
        "nan_forward",
        "nan_backward",
        "loss_plateau",
        "large_initial_loss",
    ),
    sites=("rnn", "(loop)", "optimizer"),
    exact=False,
)
def rnn_of_sixty_steps_is_not_clipped(attach, fixed):
    """A ReLU RNN with SGD and no clip_grad_norm_."""

    def batch(n=32, t=60):
        x = torch.rand(n, t, 2) - 0.5
        return x, x[..., 0].sum(1) / 2

    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(2, 32, nonlinearity="relu", batch_first=True)
            nn.init.eye_(self.rnn.weight_hh_l0)
            self.rnn.weight_hh_l0.data.mul_(1.03)
            self.linear = nn.Linear(32, 1)

        def forward(self, x):
            return self.linear(self.rnn(x)[0][:, -1])[:, 0]

    net = Adding()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    session = attach(net, optimizer)
    for it in range(300):
        x, y = batch()
        loss = F.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5) if fixed else None
        optimizer.step()
        session.log(loss=loss.item())
    x, y = batch(500)
    with torch.no_grad():
        return float(F.mse_loss(net(x), y).nan_to_num(5.0).clamp(max=5.0))


@fault(
    "vanishing_gradient",
    area="deep network",
    source="from memory: Stack Overflow questions on a deep network of sigmoids that does not learn until they become ReLUs",
    cause="Eight layers with sigmoids multiply the gradient by at most a quarter each, so nothing of it arrives at the first layers.",
    words=(r"sigmoid|vanish",),
    cascade=("not_learning", "loss_plateau", "constant_output", "underfitting", "saturated_activation"),
    sites=("layers", "(model)"),
    exact=False,
)
def eight_sigmoids_in_a_row(attach, fixed):
    """nn.Sigmoid between all of the layers."""
    xtr, ytr, xte, yte = digits()
    activation = nn.ReLU if fixed else nn.Sigmoid

    class Deep(nn.Module):
        def __init__(self, depth=8, width=40):
            super().__init__()
            sizes = [64] + [width] * depth
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
            self.act = activation()
            self.last = nn.Linear(width, 10)

        def forward(self, x):
            x = x.flatten(1)
            for layer in self.layers:
                x = self.act(layer(x))
            return self.last(x)

    model = Deep()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    session = attach(model, optimizer)
    for epoch in range(14):
        for x, y in DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float((model(xte).argmax(1) != yte).float().mean())


@fault(
    "schedule_in_wrong_unit",
    area="world model",
    source="https://github.com/galilai-group/stable-worldmodel/issues/280",
    cause="The warm-up is counted in steps but the scheduler is stepped once per epoch, so the whole run stays at the very start of the warm-up.",
    words=(r"warm.?up|schedul", r"epoch|step|interval|unit"),
    also=("lr_too_low", "scheduler_never_called"),
    cascade=("underfitting", "not_learning", "loss_plateau"),
    sites=("scheduler", "optimizer", "(loop)"),
    exact=False,
)
def warmup_of_steps_is_stepped_per_epoch(attach, fixed):
    """LambdaLR with total_steps = epochs * batches, stepped after each epoch."""
    epochs, batches = 10, 25
    total_steps = epochs * batches
    warmup = int(0.2 * total_steps)

    def rate(step):
        if step < warmup:
            return 0.001 + step / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total_steps - warmup)))

    a = 0.9 * torch.linalg.qr(torch.randn(6, 6))[0]
    world = lambda s: torch.tanh(1.5 * s @ a) + 0.3 * s.roll(1, 1)
    model = nn.Sequential(nn.Linear(6, 48), nn.GELU(), nn.Linear(48, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    session = attach(model, optimizer, scheduler=scheduler)
    states = torch.randn(1000, 6)
    interval = "step" if fixed else "epoch"
    for epoch in range(epochs):
        for part in torch.randperm(1000).split(1000 // batches):
            loss = F.mse_loss(model(states[part]), world(states[part]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step() if interval == "step" else None
            session.log(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        scheduler.step() if interval == "epoch" else None
    s = torch.randn(300, 6)
    with torch.no_grad():
        return float(F.mse_loss(model(s), world(s)))


@fault(
    "frozen_by_mistake",
    area="adapters",
    source="https://github.com/LLaVA-VL/LLaVA-NeXT/pull/510",
    cause="requires_grad_(False) for the whole model comes after the adapters were put in, so they are frozen too and only the norm learns.",
    words=(r"requires_grad|frozen|freez",),
    also=("unused_parameters", "graph_break_detach", "params_not_in_optimizer"),
    cascade=("underfitting", "loss_plateau"),
    sites=("lora", "(model)", "optimizer", "blocks"),
)
def adapters_are_frozen_with_the_rest(attach, fixed):
    """model.requires_grad_(False) and only the norm is set free again."""

    class LoRALinear(nn.Module):
        def __init__(self, base, r=8):
            super().__init__()
            self.base = base
            self.lora_A = nn.Parameter(torch.randn(base.in_features, r) / 4)
            self.lora_B = nn.Parameter(torch.zeros(r, base.out_features))

        def forward(self, x):
            return self.base(x) + x @ self.lora_A @ self.lora_B

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.projector = nn.Linear(8, 24)
            self.norm = nn.LayerNorm(24)
            self.blocks = nn.ModuleList([nn.Linear(24, 24) for _ in range(3)])
            self.head = nn.Linear(24, 4)

        def forward(self, x):
            h = self.norm(self.projector(x))
            for block in self.blocks:
                h = h + torch.tanh(block(h))
            return self.head(h)

    made = torch.Generator().manual_seed(5)
    true = [torch.randn(8, 16, generator=made), torch.randn(16, 4, generator=made)]
    model = Model()
    model.blocks = nn.ModuleList(LoRALinear(b) for b in model.blocks)
    model.requires_grad_(False)
    tunable = ("norm", "lora_") if fixed else ("norm",)
    for name, param in model.named_parameters():
        if any(part in name for part in tunable):
            param.requires_grad = True
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    session = attach(model, optimizer)
    x = torch.randn(800, 8)
    y = (torch.tanh(x @ true[0] / 3) @ true[1]).argmax(1)
    for epoch in range(12):
        for part in torch.randperm(600).split(30):
            loss = F.cross_entropy(model(x[part]), y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float(F.cross_entropy(model(x[:600]), y[:600]))
