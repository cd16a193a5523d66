"""Fourteenth hold-out: sounds and time series."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_14.about import fault


@fault(
    "axes_scrambled",
    area="forecasting",
    source="https://github.com/zhouhaoyi/Informer2020/issues/59",
    cause="view(B, H, L, -1) is used where the axes of length and heads should change places, so heads hold pieces of other steps.",
    words=(r"view|reshape|permut|transpos|axes|axis", r"permut|transpos|scrambl|mix|order|wrong|swap|head"),
    also=("batch_axis_mixed",),
    cascade=("underfitting", "loss_plateau", "overfitting"),
    sites=("attention", "(model)", "query", "key", "value"),
)
def heads_are_made_with_view(attach, fixed):
    """queries.view(B, H, L_Q, -1) for queries of shape [B, L, H, D]."""
    length, dim, heads = 8, 32, 4

    class ProbAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
            self.out = nn.Linear(dim, dim)

        def split(self, x):
            B, L, _ = x.shape
            x = x.view(B, L, heads, -1)
            return x.transpose(1, 2) if fixed else x.view(B, heads, L, -1)

        def forward(self, x):
            q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
            scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
            context = scores.softmax(-1) @ v
            return self.out(context.transpose(1, 2).flatten(2))

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.place = nn.Linear(length, dim), nn.Parameter(0.3 * torch.randn(length, dim))
            self.attention = ProbAttention()
            self.norm, self.head = nn.LayerNorm(dim), nn.Sequential(nn.Linear(dim, 48), nn.GELU(), nn.Linear(48, 1))

        def forward(self, x):
            x = self.embed(x) + self.place
            return self.head(self.norm(x + self.attention(x)))[:, -1, 0]

    def loads(count):
        """A load that repeats what it was on the last day of the kind that comes next, plus half of what it is now."""
        x = torch.randn(count, length)
        kind = torch.rand(count, length - 1).argsort(1)
        asked = torch.randint(0, length - 1, (count, 1))
        days = F.one_hot(torch.cat([kind, asked], 1), length - 1).float()
        past = x[:, :-1].gather(1, (kind == asked).float().argmax(1, keepdim=True))[:, 0]
        return torch.cat([x[..., None], 2 * days], -1), past + 0.5 * x[:, -1]

    x, y = loads(1600)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    for epoch in range(12):
        for i in torch.randperm(1600).split(40):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[i]), y[i])
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    x, y = loads(400)
    with torch.no_grad():
        return float(F.mse_loss(model(x), y) / y.var())


@fault(
    "clip_after_step",
    area="music transcription",
    source="https://github.com/jongwook/onsets-and-frames/issues/24",
    cause="The gradients are clipped after optimizer.step(), when they have been used already.",
    words=(r"clip", r"after|step|order|before|too late|no effect|already"),
    cascade=(
        "loss_spike",
        "loss_divergence",
        "exploding_gradient",
        "loss_oscillation",
        "lr_too_high",
        "saturated_activation",
    ),
    sites=("optimizer", "(loop)", "rnn", "(model)"),
)
def notes_are_clipped_after_the_step(attach, fixed):
    """losses.backward(); optimizer.step(); clip_grad_norm_(model.parameters(), 0.5)."""
    pitches, bands, frames = 6, 12, 40
    timbre = torch.rand(pitches, bands) * 2

    def pieces(count):
        roll = (torch.rand(count, frames // 8, pitches) < 0.25).float().repeat_interleave(8, 1)
        loud = 8.0 ** torch.randn(count, 1, 1).clamp(-1.5, 1.5)  # recordings differ in loudness
        return (roll @ timbre + 0.3 * torch.randn(count, frames, bands)) * loud, roll

    class Transcriber(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(bands, 48, batch_first=True, nonlinearity="relu")
            self.onsets = nn.Linear(48, pitches)

        def forward(self, mel):
            return self.onsets(self.rnn(mel)[0])

    model = Transcriber()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    session = attach(model, optimizer)
    mel, roll = pieces(400)
    for epoch in range(8):
        for i in torch.randperm(400).split(20):
            loss = F.binary_cross_entropy_with_logits(model(mel[i]), roll[i])
            optimizer.zero_grad()
            loss.backward()
            for action in ("clip", "step") if fixed else ("step", "clip"):
                if action == "step":
                    optimizer.step()
                else:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            session.log(loss=loss.item())
    mel, roll = pieces(150)
    with torch.no_grad():
        loss = F.binary_cross_entropy_with_logits(model(mel), roll)
    return min(float(loss.nan_to_num(10.0)), 10.0)


@fault(
    "data_leakage",
    area="sales",
    source="from memory: questions on forecasts that are excellent in the back test and useless in use, after a centred rolling mean",
    cause="The series is smoothed with a centred window before it is cut up, so the inputs hold part of the value to be predicted.",
    words=(r"smooth|rolling|centred|centered|window|average", r"future|leak|target|ahead|next|hold"),
    also=("train_val_preproc_mismatch",),
    cascade=("overfitting",),
    sites=("(data)", "loader", "(input)"),
    exact=False,
)
def rolling_mean_looks_ahead(attach, fixed):
    """df["smooth"] = df["sales"].rolling(5, center=True).mean()."""
    days, look_back = 900, 10
    sales = np.zeros(days)
    for t in range(2, days):
        sales[t] = 0.5 * sales[t - 1] - 0.3 * sales[t - 2] + np.sin(t / 7 * 2 * np.pi) + np.random.randn()
    sales = (sales - sales[:600].mean()) / sales[:600].std()

    def rolling(series, center):
        padded = np.pad(series, (2, 2) if center else (4, 0), mode="edge")
        return np.lib.stride_tricks.sliding_window_view(padded, 5).mean(1)

    def create_dataset(smooth):
        both = np.stack([sales, smooth], 1)
        X = np.stack([both[t - look_back : t] for t in range(look_back, days)])
        return torch.tensor(X, dtype=torch.float32), torch.tensor(sales[look_back:], dtype=torch.float32)

    class SalesLSTM(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.linear = nn.LSTM(2, 32, batch_first=True), nn.Linear(32, 1)

        def forward(self, x):
            return self.linear(self.lstm(x)[0][:, -1])[:, 0]

    X, y = create_dataset(rolling(sales, center=not fixed))
    model = SalesLSTM()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    for epoch in range(15):
        model.train()
        for xb, yb in DataLoader(TensorDataset(X[:600], y[:600]), batch_size=30, shuffle=True):
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            session.log(val_loss=F.mse_loss(model(X[600:740]), y[600:740]).item())
    live, y = create_dataset(rolling(sales, center=False))  # in use, tomorrow is not known yet
    with torch.no_grad():
        return float(F.mse_loss(model(live[740:]), y[740:]) / y[740:].var())
