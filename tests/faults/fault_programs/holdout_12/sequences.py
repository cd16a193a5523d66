"""Twelfth hold-out: sequences."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_12.about import fault
from fault_programs.holdout_12.material import digits


@fault(
    "batch_axis_mixed",
    area="row by row",
    source="https://github.com/yunjey/pytorch-tutorial/issues/196",
    cause="The LSTM is made without batch_first although the batch is the first dimension, so it reads across the pictures of a batch.",
    words=(r"batch_first|batch|dimension|axis", r"first|lstm|sequence|time|mix|swap|across"),
    cascade=("underfitting", "loss_plateau", "not_learning", "vanishing_gradient", "overfitting"),
    sites=("lstm", "(model)"),
)
def digits_row_by_row_without_batch_first(attach, fixed):
    """nn.LSTM(input_size, hidden_size) on pictures of shape (batch, rows, columns)."""
    sequence_length, input_size, hidden_size, num_classes = 8, 8, 48, 10

    class RNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(input_size, hidden_size, batch_first=bool(fixed))
            self.fc = nn.Linear(hidden_size, num_classes)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    xtr, ytr, xte, yte = digits()
    model = RNN()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    session = attach(model, optimizer)
    train_loader = DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True)
    for epoch in range(8):
        for images, labels in train_loader:
            images = images.reshape(-1, sequence_length, input_size)
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float((model(xte.reshape(-1, 8, 8)).argmax(1) != yte).float().mean())


@fault(
    "clip_after_step",
    area="recurrent graph",
    source="https://github.com/VGraphRNN/VGRNN/issues/4",
    cause="clip_grad_norm_ is called after the optimizer's step, so it clips nothing and single huge gradients throw the recurrent net far away.",
    words=(r"clip", r"after|before|step|order|too late|nothing|no effect"),
    cascade=(
        "exploding_gradient",
        "loss_spike",
        "loss_divergence",
        "loss_oscillation",
        "not_learning",
        "exploding_activation",
        "nan_in_loss",
        "nan_forward",
        "lr_too_high",
        "saturated_activation",
        "loss_plateau",
    ),
    sites=("(loop)", "optimizer"),
)
def vgrnn_clips_after_the_step(attach, fixed):
    """loss.backward(); optimizer.step(); clip_grad_norm_(...)."""

    class VGRNN(nn.Module):
        def __init__(self, nodes=6, hidden=24):
            super().__init__()
            self.phi = nn.Linear(nodes, hidden)
            self.rnn = nn.Linear(hidden, hidden)
            nn.init.orthogonal_(self.rnn.weight, gain=1.2)
            self.dec = nn.Linear(hidden, nodes)

        def forward(self, x, adj):
            h = x.new_zeros(len(x), self.rnn.in_features)
            for t in range(x.shape[1]):
                h = F.relu(self.phi(x[:, t] @ adj) + self.rnn(h))
            return self.dec(h)

    nodes = 6
    ring = torch.eye(nodes) + torch.eye(nodes).roll(1, 0) + torch.eye(nodes).roll(-1, 0)
    adj = ring / ring.sum(1, keepdim=True)

    def walks(count, steps=12):
        x = torch.randn(count, steps, nodes)
        if count == 400:  # a few sensors went wild for a while
            x[torch.randperm(count)[:12]] *= 6
        return x, x[:, -3:].mean(1) @ adj

    model = VGRNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    session = attach(model, optimizer)
    x, y = walks(400)

    def clip():
        return nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    for epoch in range(20):
        for i in torch.randperm(400).split(25):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[i], adj), y[i]) * nodes
            loss.backward()
            clip() if fixed else None
            optimizer.step()
            clip()
            session.log(loss=loss.item())
    x, y = walks(300)
    with torch.no_grad():
        return float((F.mse_loss(model(x, adj), y) / y.var()).nan_to_num(5.0).clamp(max=5.0))


@fault(
    "blank_is_a_label",
    area="speech",
    source="from memory: questions on nn.CTCLoss whose letters are numbered from 0, which is also the default blank",
    cause="The first letter has the index 0, which CTCLoss takes for the blank, so this letter can never be written.",
    words=(r"blank", r"label|index|zero|\b0\b|letter|class|collid|same|shift"),
    cascade=("underfitting", "loss_plateau"),
    sites=("(loss)", "(data)", "ctc_loss", "criterion", "loss_fn"),
)
def letters_are_numbered_from_the_blank(attach, fixed):
    """char_to_index starts at 0 and nn.CTCLoss() has blank=0."""
    letters = "abcd"
    char_to_index = {c: i + 1 if fixed else i for i, c in enumerate(letters)}
    shapes = torch.eye(5)[1:] * 2

    def utterances(count):
        words = torch.randint(0, 4, (count, 4))
        frames = shapes[words].repeat_interleave(3, 1)
        quiet = torch.zeros(count, 12, 5)
        quiet[:, :, 0] = 1
        loud = (torch.arange(12) % 3 != 2)[None, :, None]
        x = torch.where(loud, frames, quiet) + 0.3 * torch.randn(count, 12, 5)
        texts = ["".join(letters[c] for c in word) for word in words.tolist()]
        return x, texts

    class SpeechModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(5, 32, 3, padding=1)
            self.gru = nn.GRU(32, 24, bidirectional=True, batch_first=True)
            self.fc = nn.Linear(48, 5)

        def forward(self, x):
            x = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            return F.log_softmax(self.fc(self.gru(x)[0]), dim=-1)

    def greedy(model, x):
        back, read = {i: c for c, i in char_to_index.items()}, []
        for path in model(x).argmax(-1).tolist():
            kept = [k for j, k in enumerate(path) if j == 0 or path[j - 1] != k]
            read.append("".join(back[k] for k in kept if k in back and k != 0))
        return read

    x, texts = utterances(500)
    targets = torch.tensor([[char_to_index[c] for c in text] for text in texts])
    model, ctc_loss = SpeechModel(), nn.CTCLoss(zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for epoch in range(10):
        for i in torch.randperm(500).split(50):
            log_probs = model(x[i]).transpose(0, 1)
            loss = ctc_loss(log_probs, targets[i], torch.full((50,), 12), torch.full((50,), 4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(ctc=loss.item())
    x, texts = utterances(150)
    with torch.no_grad():
        return sum(a != b for a, b in zip(greedy(model, x), texts)) / len(texts)
