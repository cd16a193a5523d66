"""Eleventh hold-out: gradients that are cut off, cleared too early or rounded away."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_11.about import fault
from fault_programs.holdout_11.material import digits


@fault(
    "graph_break_detach",
    area="pose regression",
    source="from memory: forum questions on an encoder that never improves, because its features are taken under no_grad as in the evaluation",
    cause="The features are computed under torch.no_grad, so no gradient reaches the encoder and it stays as it was drawn.",
    words=(r"no_grad|detach|graph|gradient.*(encoder|never|reach|none)",),
    also=("unused_parameters", "frozen_by_mistake"),
    cascade=("underfitting", "loss_plateau"),
    sites=("encoder", "(model)"),
)
def features_are_taken_under_no_grad(attach, fixed):
    """with torch.no_grad(): features = self.encoder(x)."""

    class Poses(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4), nn.Tanh())
            self.regressor = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 3))

        def forward(self, x):
            with torch.set_grad_enabled(bool(fixed) and self.training):
                features = self.encoder(x)
            return self.regressor(features)

    a = torch.randn(12, 3) / 2
    x = torch.randn(900, 12)
    y = torch.sin(x @ a)
    model = Poses()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for epoch in range(12):
        model.train()
        for xb, yb in DataLoader(TensorDataset(x[:700], y[:700]), batch_size=35, shuffle=True):
            loss = F.mse_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            session.log(val_loss=F.mse_loss(model(x[700:]), y[700:]).item())
    with torch.no_grad():
        return float(F.mse_loss(model(x[700:]), y[700:]))


@fault(
    "graph_break_detach",
    area="ranking",
    source="from memory: forum questions in which a loss is made anew by torch.tensor(loss, requires_grad=True) to silence an error",
    cause="The loss is computed in numpy and wrapped into a new tensor with requires_grad=True, so backward reaches no weight.",
    words=(r"requires_grad|new tensor|numpy|detach|graph|item",),
    also=("unused_parameters", "term_without_gradient"),
    cascade=("not_learning", "loss_plateau", "constant_output", "underfitting", "step_not_called"),
    sites=("(loss)", "loss_fn"),
)
def loss_is_wrapped_into_a_new_tensor(attach, fixed):
    """torch.tensor(value, requires_grad=True)."""
    w = torch.randn(10)
    docs = torch.randn(600, 2, 10)
    better = (docs @ w).argmax(1)
    scorer = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

    class MarginRanking:
        def __init__(self, margin=0.5):
            self.margin = margin

        def __call__(self, scores, better):
            good = scores.gather(1, better[:, None])
            bad = scores.gather(1, 1 - better[:, None])
            value = (self.margin - good + bad).clamp(min=0).mean()
            return value if fixed else torch.tensor(value.item(), requires_grad=True)

    criterion = MarginRanking()
    optimizer = torch.optim.RMSprop(scorer.parameters(), lr=1e-3)
    session = attach(scorer, optimizer)
    for epoch in range(10):
        for i in range(0, 500, 25):
            loss = criterion(scorer(docs[i : i + 25])[..., 0], better[i : i + 25])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float((scorer(docs[500:])[..., 0].argmax(1) != better[500:]).float().mean())


@fault(
    "zero_grad_misplaced",
    area="image classification",
    source="https://velog.io/@rhss10/기본-optimizer.zerograd는-어디에-넣어주어야-할까",
    cause="zero_grad stands between backward and step, so the step always finds empty gradients.",
    words=(r"zero_grad", r"order|between|after|before|misplaced|cleared|empty"),
    also=("optimizer_step_noop",),
    cascade=("not_learning", "loss_plateau", "step_not_called", "underfitting"),
    sites=("optimizer", "(loop)"),
)
def gradients_are_cleared_before_the_step(attach, fixed):
    """backward, zero_grad, step."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(72, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = attach(model, optimizer)
    for epoch in range(5):
        model.train()
        for x, y in DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for action in (optimizer.step, optimizer.zero_grad) if fixed else (optimizer.zero_grad, optimizer.step):
                action()
            session.log(loss=loss.item())
    model.eval()
    with torch.no_grad():
        return float((model(xte).argmax(1) != yte).float().mean())


@fault(
    "low_precision_stall",
    area="fine-tuning in bfloat16",
    source="from memory: issues on fine-tuning with weights in pure bfloat16, whose small steps are rounded away",
    cause="The weights themselves are bfloat16, so steps at this rate are shorter than the distance of neighbouring numbers and are lost.",
    words=(r"bf16|bfloat16|precision|round", r"."),
    cascade=("lr_too_low", "loss_plateau", "not_learning", "underfitting", "optimizer_step_noop"),
    sites=("(model)", "optimizer"),
    exact=False,
)
def weights_are_bfloat16_too(attach, fixed):
    """model.to(torch.bfloat16) where autocast would do."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    first = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        pick = torch.randint(0, len(xtr), (64,))
        loss = F.cross_entropy(model(xtr[pick]), ytr[pick])
        first.zero_grad()
        loss.backward()
        first.step()
    turned, turned_test = xtr.rot90(1, (2, 3)), xte.rot90(1, (2, 3))
    dtype = torch.float32 if fixed else torch.bfloat16
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.2e-4, weight_decay=0.0)
    session = attach(model, optimizer)
    for epoch in range(40):
        for x, y in DataLoader(TensorDataset(turned, ytr), batch_size=24, shuffle=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x.to(dtype)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float((model(turned_test.to(dtype)).argmax(1) != yte).float().mean())
