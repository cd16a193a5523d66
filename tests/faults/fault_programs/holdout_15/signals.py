"""Fifteenth hold-out: sensors, speech and time series."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_15.about import fault
from fault_programs.holdout_15.material import motions, wrong


@fault(
    "missing_zero_grad",
    area="fine-tuning of a series encoder",
    source="https://github.com/thuml/SimMTM/issues/2",
    cause="The fine-tuning loop never clears the gradients of the encoder and the classifier, so every step uses the sum of all so far.",
    words=(r"zero_grad|accumulat|clear|sum of|add up", r"grad"),
    cascade=("loss_oscillation", "loss_divergence", "lr_too_high", "not_learning", "underfitting", "loss_plateau"),
    sites=("(loop)", "optimizer", "model_optimizer", "classifier_optimizer"),
)
def series_classifier_is_tuned_with_two_optimizers(attach, fixed):
    """loss.backward(); model_optimizer.step(); classifier_optimizer.step()."""

    class TFEncoder(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.conv1 = nn.Conv1d(3, width, 7, padding=3)
            self.conv2 = nn.Conv1d(width, 2 * width, 5, stride=2, padding=2)

        def forward(self, x):
            return F.relu(self.conv2(F.relu(self.conv1(x)))).mean(2)

    def model_finetune(model, classifier, loader, model_optimizer, classifier_optimizer, session):
        model.train()
        classifier.train()
        for data, labels in loader:
            loss = F.cross_entropy(classifier(model(data)), labels)
            if fixed:
                model_optimizer.zero_grad()
                classifier_optimizer.zero_grad()
            loss.backward()
            model_optimizer.step()
            classifier_optimizer.step()
            session.log(loss=loss.item())

    model, classifier = TFEncoder(), nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 6))
    model_optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    classifier_optimizer = torch.optim.SGD(classifier.parameters(), lr=0.05, momentum=0.9)
    both = nn.ModuleDict({"model": model, "classifier": classifier})
    session = attach(both, [model_optimizer, classifier_optimizer])
    loader = DataLoader(TensorDataset(*motions(900)), batch_size=45, shuffle=True)
    for epoch in range(12):
        model_finetune(model, classifier, loader, model_optimizer, classifier_optimizer, session)
    x, y = motions(300)
    both.eval()
    return wrong(lambda x: classifier(model(x)), x, y)


@fault(
    "padding_dominates",
    area="clips of different length",
    source="https://github.com/georgepar/slp/pull/7",
    cause="The classifier reads the output of the last position, which for short clips lies far behind their end, in the padding.",
    words=(r"pad|length|last (step|position|output|frame)|-1", r"pad|length|end|valid|short|real"),
    also=("mask_not_applied",),
    cascade=("underfitting", "loss_plateau", "vanishing_gradient", "not_learning", "overfitting"),
    sites=("(model)", "rnn", "lstm", "(data)"),
    exact=False,
)
def clip_classifier_reads_its_last_position(attach, fixed):
    """last_hidden = out[:, -1, :] after an LSTM over padded clips."""
    frames = 40

    def clips(count):
        label = torch.randint(0, 5, (count,))
        lengths = torch.randint(6, 16, (count,))
        lengths[torch.rand(count) < 0.05] = frames
        tone = torch.eye(5)[label][:, None] * 1.2 + 0.6 * torch.randn(count, frames, 5)
        tone = tone * (torch.arange(frames)[None, :, None] < lengths[:, None, None])
        return tone, lengths, label

    class RNN(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.rnn = nn.LSTM(5, hidden, batch_first=True)
            self.drop = nn.Dropout(0.1)
            self.clf = nn.Linear(hidden, 5)

        def forward(self, x, lengths):
            out, _ = self.rnn(x)
            out = self.drop(out)
            last = lengths - 1 if fixed else torch.full_like(lengths, -1)
            return self.clf(out[torch.arange(len(x)), last])

    model = RNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(*clips(500)), batch_size=32, shuffle=True)
    for epoch in range(6):
        model.train()
        for x, lengths, label in loader:
            optimizer.zero_grad()
            loss = criterion(model(x, lengths), label)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    x, lengths, label = clips(300)
    return wrong(lambda x: model(x, lengths), x, label)


@fault(
    "relu_before_logits",
    area="peptides",
    source="https://github.com/ProteomicsML/ProteomicsML/pull/203",
    cause="A ReLU stands behind the last layer of the regression, so values below zero cannot be answered and many units give no gradient.",
    words=(r"relu", r"last|final|output|head|negative|zero"),
    also=("output_range_mismatch", "dead_relu"),
    cascade=("underfitting", "loss_plateau", "constant_output", "not_learning", "vanishing_gradient"),
    sites=("(model)", "fc2", "act", "(loss)"),
    exact=False,
)
def retention_times_pass_a_last_relu(attach, fixed):
    """out = F.relu(self.fc2(...)) for standardised retention times."""
    weight = torch.linspace(-1.5, 1.5, 12)

    def peptides(count):
        ids = torch.randint(1, 13, (count, 10))
        time = weight[ids - 1].sum(1) / 3 + 0.4 * (ids[:, 0] == ids[:, -1])
        return ids, time

    class LSTMModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(13, 12, padding_idx=0)
            self.lstm = nn.LSTM(12, 32, batch_first=True, bidirectional=True)
            self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 1)
            self.act = nn.Identity() if fixed else nn.ReLU()

        def forward(self, ids):
            _, (h, _) = self.lstm(self.embedding(ids))
            return self.act(self.fc2(F.relu(self.fc1(torch.cat([h[0], h[1]], 1))))).squeeze(1)

    model = LSTMModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    ids, time = peptides(800)
    for epoch in range(12):
        for i in torch.randperm(800).split(40):
            loss = F.l1_loss(model(ids[i]), time[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(mae=loss.item())
    ids, time = peptides(300)
    with torch.no_grad():
        return float((model(ids) - time).square().mean() / time.var())


@fault(
    "rnn_state_not_reset",
    area="counting",
    source="from memory: forum questions on self.hidden, which is detached with each batch but never set back to zero, with shuffled sequences",
    cause="The hidden state is carried from one batch of unrelated sequences into the next.",
    words=(r"hidden|state", r"reset|carr|zero|init|previous|kept|left over|next"),
    cascade=("underfitting", "loss_plateau", "not_learning", "loss_oscillation"),
    sites=("(model)", "rnn", "(loop)"),
    exact=False,
)
def hidden_state_wanders_through_shuffled_batches(attach, fixed):
    """self.hidden = tuple(h.detach() for h in self.hidden) and nothing else between batches."""

    def turnstile(count, steps=14):
        x = (torch.rand(count, steps, 1) < 0.4).float()
        return x, x.cumsum(1).squeeze(2) % 3

    class Counter(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.rnn, self.out = nn.LSTM(1, hidden, batch_first=True), nn.Linear(hidden, 3)
            self.hidden = None

        def repackage(self):
            self.hidden = None if fixed else tuple(h.detach() for h in self.hidden)

        def forward(self, x):
            y, self.hidden = self.rnn(x, self.hidden)
            return self.out(y)

    model = Counter()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    x, y = turnstile(900)
    for epoch in range(16):
        for i in torch.randperm(900).split(50):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[i]).flatten(0, 1), y[i].flatten().long())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.repackage()
            session.log(loss=loss.item())
    x, y = turnstile(50)
    with torch.no_grad():
        return float((model(x).argmax(2) != y).float().mean())


@fault(
    "data_leakage",
    area="forecasting",
    source="from memory: questions on pandas' rolling(window, center=True) as a feature for a forecast that is good until it is used",
    cause="The rolling mean is centred, so the features of a day contain the value that is to be forecast; it is not known when the model is used.",
    words=(
        r"leak|future|cent(er|re)|target|look.?ahead|not known|rolling",
        r"rolling|mean|feature|window|target|value",
    ),
    also=("future_leak", "train_val_preproc_mismatch"),
    cascade=("overfitting",),
    sites=("(data)", "loader"),
    exact=False,
)
def rolling_mean_looks_both_ways(attach, fixed):
    """series.rolling(3, center=True).mean() among the features of the same day's sales."""
    days = 1100
    season = np.sin(np.arange(days) * 2 * np.pi / 7) + 0.5 * np.sin(np.arange(days) * 2 * np.pi / 30)
    noise = np.zeros(days)
    for t in range(1, days):
        noise[t] = 0.7 * noise[t - 1] + 0.5 * np.random.randn()
    sales = season + noise

    def features(t, centred):
        lags = [sales[t - k] for k in (1, 2, 7)]
        mean = sales[t - 1 : t + 2].mean() if centred else sales[t - 3 : t].mean()
        return [*lags, mean, np.sin(t * 2 * np.pi / 7), np.cos(t * 2 * np.pi / 7)]

    def table(start, end, centred):
        x = [features(t, centred) for t in range(start, end)]
        return torch.tensor(np.array(x), dtype=torch.float32), torch.tensor(sales[start:end], dtype=torch.float32)

    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    x, y = table(10, 900, not fixed)
    x_val, y_val, x, y = x[-150:], y[-150:], x[:-150], y[:-150]
    for epoch in range(25):
        for i in torch.randperm(len(x)).split(32):
            loss = F.mse_loss(model(x[i]).squeeze(1), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        with torch.no_grad():
            session.log(val_loss=F.mse_loss(model(x_val).squeeze(1), y_val).item())
    x, y = table(900, 1090, False)  # a forecast knows the past only
    with torch.no_grad():
        return float(F.mse_loss(model(x).squeeze(1), y) / y.var())
