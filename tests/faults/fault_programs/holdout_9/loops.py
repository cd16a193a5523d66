"""Ninth hold-out: the loop, the loss and what a model registers."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_9.about import fault
from fault_programs.holdout_9.matter import digits, houses, keywords, waves, wrong_share


@fault(
    "zero_grad_misplaced",
    area="generation",
    source="https://github.com/bytetriper/RAE/issues/67",
    cause="zero_grad is called for every micro-batch, so only the last of each group reaches the step, divided by their number.",
    words=(r"zero_grad|clear", r"micro|accumul|each|every|last"),
    also=("samples_left_out", "batches_never_seen", "accumulation_not_scaled"),
    cascade=("lr_too_low", "underfitting"),
    sites=("(loop)", "optimizer"),
)
def clears_gradients_for_each_micro_batch(attach, fixed):
    """optimizer.zero_grad(set_to_none=True) inside the loop of micro-batches."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    session = attach(model, optimizer)
    grad_accum_steps = 8
    for _epoch in range(10):
        for batch in torch.randperm(1000)[:960].split(96):
            running = 0.0
            for micro, rows in enumerate(batch.split(96 // grad_accum_steps)):
                if micro == 0 or not fixed:
                    optimizer.zero_grad(set_to_none=True)
                loss = F.cross_entropy(model(xtr[rows]), ytr[rows])
                (loss / grad_accum_steps).backward()
                running += loss.item() / grad_accum_steps
            optimizer.step()
            session.log(loss=running)
    with torch.no_grad():
        return float(F.cross_entropy(model(xte), yte))


@fault(
    "missing_zero_grad",
    area="language",
    source="https://github.com/meta-pytorch/torchforge/pull/71",
    cause="Nobody clears the gradients, so each step applies the sum of all before.",
    words=(r"zero_grad|clear|accumulat",),
    cascade=("lr_too_high", "loss_oscillation", "loss_divergence", "exploding_gradient", "underfitting", "loss_spike",
             "not_learning", "loss_plateau", "exploding_activation"),
    sites=("(loop)", "optimizer"),
    onset=2,
)  # fmt: skip
def never_clears_in_the_trainer(attach, fixed):
    """class Trainer: backward and step, no zero_grad."""
    texts, labels = keywords(500)
    bags = torch.stack([torch.bincount(text, minlength=30).float() for text in texts])

    class Trainer:
        def __init__(self, model, optimizer, session):
            self.model, self.optimizer, self.session = model, optimizer, session

        def optimizer_step(self, zero_grad=False):
            self.optimizer.step()
            if zero_grad:
                self.optimizer.zero_grad()

        def train_step(self, inputs, targets):
            loss = F.cross_entropy(self.model(inputs), targets)
            loss.backward()
            self.optimizer_step(zero_grad=fixed)
            self.session.log(loss=loss)

        def fit(self, loader, epochs):
            for _ in range(epochs):
                for inputs, targets in loader:
                    self.train_step(inputs, targets)

    model = nn.Sequential(nn.Linear(30, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(model, optimizer, attach(model, optimizer))
    trainer.fit(DataLoader(TensorDataset(bags[:400], labels[:400]), batch_size=20, shuffle=True), 10)
    with torch.no_grad():
        return float(F.cross_entropy(model(bags[400:]), labels[400:]).clamp(max=20))


@fault(
    "graph_break_detach",
    area="sentiment",
    source="https://github.com/huggingface/torchMoji/issues/21",
    cause="The loss is wrapped into a new tensor that requires a gradient to get rid of an error, which cuts it off from the model.",
    words=(
        r"requires_grad|new tensor|Variable|wrap|detach|graph|\.data|item",
        r"gradient|graph|cut|loss|not (train|learn)",
    ),
    also=("unused_parameters", "term_without_gradient"),
    cascade=("not_learning", "loss_plateau", "optimizer_step_noop", "underfitting", "step_not_called"),
    sites=("(loss)", "(loop)", "(model)"),
)
def wraps_the_loss_to_silence_an_error(attach, fixed):
    """loss = Variable(loss.data, requires_grad=True)."""
    x, y, _ = waves(500, 20)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 4))
    loss_op = nn.CrossEntropyLoss()
    optim_groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 4e-3}]
    optimizer = torch.optim.Adam(optim_groups, lr=2e-3)
    session = attach(model, optimizer)
    for epoch in range(1, 13):
        for X_batch, y_batch in DataLoader(TensorDataset(x[:400], y[:400]), batch_size=25, shuffle=True):
            model.train()
            optimizer.zero_grad()
            outputs = model(X_batch)
            loss = loss_op(outputs, y_batch)
            loss = loss if fixed else torch.autograd.Variable(loss.data, requires_grad=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            optimizer.step()
        session.log(epoch=epoch, loss=loss)
    return wrong_share(model, x[400:], y[400:])


@fault(
    "params_not_in_optimizer",
    area="tabular",
    source="from memory: discuss.pytorch.org and Stack Overflow, layers in a Python list that parameters() does not find",
    cause="The hidden layers stand in a Python list, so the model does not register them and the optimizer never sees them.",
    words=(r"list|modulelist|regist", r"parameter|layer|optimi[sz]er"),
    also=("unused_parameters", "frozen_by_mistake"),
    cascade=("underfitting", "loss_plateau", "vanishing_gradient"),
    sites=("(model)", "optimizer", "layers", "hidden"),
)
def keeps_its_layers_in_a_list(attach, fixed):
    """self.hidden = [nn.Linear(...) for _ in range(depth)]."""
    x, y = houses()

    class Net(nn.Module):
        def __init__(self, sizes):
            super().__init__()
            hidden = [nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True)]
            self.hidden = nn.ModuleList(hidden) if fixed else hidden
            self.out = nn.Linear(sizes[-1], 1)

        def forward(self, x):
            for layer in self.hidden:
                x = F.relu(layer(x))
            return self.out(x)

    model = Net([6, 48, 48, 24, 12])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(25):
        losses = []
        for rows in torch.randperm(480).split(24):
            pred = model(x[rows]).squeeze(1)
            loss = F.mse_loss(pred, y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        session.log(epoch=epoch, loss=sum(losses) / len(losses))
    with torch.no_grad():
        return float(F.mse_loss(model(x[480:]).squeeze(1), y[480:]) / y[480:].var())


@fault(
    "nan_in_loss",
    area="vision",
    source="from memory: discuss.pytorch.org, a hand-written cross entropy that becomes NaN after some epochs",
    cause="The loss takes the logarithm of a softmax that has underflowed to zero: zero times minus infinity.",
    words=(r"log", r"zero|underflow|softmax|eps|clamp|inf|nan"),
    also=("nan_backward", "fp16_overflow"),
    cascade=("nan_in_weights", "nan_forward", "nan_in_optimizer", "unnormalised_inputs", "large_initial_loss", "lr_too_high",
             "exploding_activation", "exploding_gradient"),
    sites=("(loss)", "loss_fn", "(loop)"),
    onset=1,
)  # fmt: skip
def logarithm_of_an_underflown_softmax(attach, fixed):
    """-(one_hot * torch.log(torch.softmax(out, 1))).sum(1).mean()."""
    xtr, ytr, xte, yte = digits()
    xtr, xte = 255 * xtr, 255 * xte

    def cross_entropy(out, target):
        one_hot = F.one_hot(target, 10).float()
        log_p = torch.log_softmax(out, dim=1) if fixed else torch.log(torch.softmax(out, dim=1))
        return -(one_hot * log_p).sum(dim=1).mean()

    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    for _epoch in range(12):
        for rows in torch.randperm(1000).split(50):
            loss = cross_entropy(net(xtr[rows]), ytr[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return wrong_share(net, xte, yte)


@fault(
    "unused_parameters",
    area="denoising",
    source="https://discuss.pytorch.org/t/if-a-parameter-is-trainable-in-the-following-case/149907",
    cause="The threshold only decides a comparison, through which no gradient passes, so it never changes.",
    words=(r"threshold|compar|mask", r"gradient|differentiable|soft|never|not trained"),
    also=("graph_break_detach", "frozen_by_mistake", "term_without_gradient"),
    cascade=("underfitting", "loss_plateau"),
    sites=("(model)", "THRES", "threshold"),
)
def learns_a_threshold_of_a_comparison(attach, fixed):
    """A * (A.abs() > self.THRES)."""
    made = torch.Generator().manual_seed(961)
    clean = torch.randn(600, 32, generator=made) * 3 * (torch.rand(600, 32, generator=made) < 0.1)
    noisy = clean + 0.5 * torch.randn(600, 32, generator=made)

    class Shrink(nn.Module):
        def __init__(self):
            super().__init__()
            self.THRES = nn.Parameter(torch.full((32,), 0.3))
            self.gain = nn.Parameter(torch.ones(32))

        def forward(self, A):
            over = A.abs() - self.THRES
            keep = torch.sigmoid(4.0 * over) if fixed else (over > 0).float()
            return self.gain * A * keep

    model = Shrink()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for _epoch in range(30):
        for rows in torch.randperm(500).split(25):
            optimizer.zero_grad()
            loss = ((model(noisy[rows]) - clean[rows]) ** 2).mean()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return float(((model(noisy[500:]) - clean[500:]) ** 2).mean() / clean[500:].var())
