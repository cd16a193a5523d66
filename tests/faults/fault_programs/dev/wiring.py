"""Group A: mistakes in the wiring of loop, parameters and optimizer."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from fault_programs.dev.datasets import batches, digits, error_rate, houses, images, language, waves, windows
from fault_programs.dev.models import AutoEncoder, Perceptron, Recurrent, SmallCNN, TinyLM, TinyResNet
from fault_programs.registry import fault

LOOP = ("optimizer", "(loop)")


@fault(
    "missing_zero_grad",
    group="A",
    arch="mlp",
    task="classification",
    sites=LOOP,
    cascade=("lr_too_high", "exploding_gradient"),
    well=0.12,
    ill=0.2,
)
def never_clears_gradients(attach, fixed):
    """Gradients are never cleared, so each step takes the sum of all before."""
    x, y, test_x, test_y = digits()
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=loss_fn)
    for _ in range(4):
        for xb, yb in batches(x, y):
            loss = loss_fn(model(xb), yb)
            optimizer.zero_grad() if fixed else None
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


@fault(
    "missing_zero_grad",
    group="A",
    arch="lstm",
    task="classification",
    sites=LOOP,
    cascade=("lr_too_high", "exploding_gradient"),
    onset=2,
    well=0.25,
    ill=0.3,
)
def clears_gradients_once_an_epoch(attach, fixed):
    """zero_grad stands in the outer loop."""
    x, y = waves()
    net = Recurrent(nn.LSTM)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    session = attach(net, opt)
    for epoch in range(8):
        opt.zero_grad()
        for xb, yb in batches(x, y):
            if fixed:
                net.zero_grad()
            loss = F.cross_entropy(net(xb), yb)
            loss.backward()
            opt.step()
            session.log(loss=loss.item(), epoch=epoch)
    return error_rate(net, x, y)


@fault(
    "zero_grad_misplaced",
    group="A",
    arch="cnn",
    task="classification",
    sites=LOOP,
    cascade=("lr_too_low", "not_learning"),
    well=0.3,
    ill=0.7,
)
def clears_gradients_before_the_step(attach, fixed):
    """zero_grad stands between backward and step."""
    x, y, test_x, test_y = images()
    model = SmallCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for _ in range(3):
        for inputs, labels in batches(x, y):
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            None if fixed else optimizer.zero_grad()
            optimizer.step()
            session.log(loss=loss.item())
    return error_rate(model, test_x, test_y)


@fault(
    "params_not_in_optimizer",
    also=("stale_params_in_optimizer",),
    group="A",
    arch="resnet",
    task="classification",
    sites=("fc",),
    well=0.15,
    ill=0.16,
)
def swaps_the_head_after_the_optimizer(attach, fixed):
    """The head is replaced after the optimizer was made, which holds the old one."""
    x, y, test_x, test_y = images()
    model = TinyResNet(classes=100)
    head = nn.Linear(model.fc.in_features, 10)
    model.fc = head if fixed else model.fc
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.fc = head
    session = attach(model, optimizer)
    for _ in range(3):
        model.train()
        for xb, yb in batches(x, y):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        session.log(val_error=error_rate(model, test_x, test_y))
    return max(error_rate(model, test_x, test_y), 0.0 if optimizer_has(optimizer, head) else 0.2)


def optimizer_has(optimizer, module):
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return all(id(p) in held for p in module.parameters())


@fault(
    "stale_params_in_optimizer",
    also=("params_not_in_optimizer",),
    group="A",
    arch="mlp",
    task="regression",
    sites=("fc", "optimizer"),
    cascade=("optimizer_step_noop", "not_learning"),
    well=0.4,
    ill=0.8,
)
def trains_a_copy_of_the_model(attach, fixed):
    """The model is copied after the optimizer was made: the optimizer holds the original's parameters."""
    x, y = houses()
    model = Perceptron(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model = model if fixed else copy.deepcopy(model)
    session = attach(model, optimizer)
    for step in range(120):
        rows = torch.randint(0, len(x), (64,))
        loss = F.mse_loss(model(x[rows]).squeeze(1), y[rows])
        model.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            session.log(loss=loss.item())
    return F.mse_loss(model(x).squeeze(1), y).item()


@fault(
    "params_not_in_optimizer",
    group="A",
    arch="autoencoder",
    task="reconstruction",
    sites=("decoder",),
    well=0.33,
    ill=0.36,
)
def forgets_the_decoder(attach, fixed):
    """Only the encoder's parameters are given to the optimizer."""
    x, _, test, _ = digits()
    model = AutoEncoder()
    optimizer = torch.optim.Adam((model if fixed else model.encoder).parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for _ in range(5):
        for (xb,) in batches(x):
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb), xb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return F.mse_loss(model(test), test).item()


@fault("frozen_by_mistake", group="A", arch="cnn", task="classification", sites=("classifier.3",), well=0.2, ill=0.21)
def leaves_the_head_frozen(attach, fixed):
    """The last layer was frozen for an earlier experiment and is given to the optimizer all the same."""
    x, y, test_x, test_y = images()
    model = SmallCNN(width=4)
    nn.init.zeros_(model.classifier[3].weight)
    model.classifier[3].weight.data[:5, :5] = torch.eye(5)
    for parameter in model.classifier[3].parameters():
        parameter.requires_grad = fixed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    session = attach(model, optimizer)
    for _ in range(4):
        for batch in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


class TwoTower(nn.Module):
    """A sequence tower and a head, joined in the forward."""

    def __init__(self, keep_graph):
        super().__init__()
        self.keep_graph = keep_graph
        self.encoder = nn.GRU(1, 24, batch_first=True)
        self.project = nn.Linear(24, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        state = self.encoder(x)[1][-1]
        state = state if self.keep_graph else state.detach()
        return self.head(torch.tanh(self.project(state)))


@fault("graph_break_detach", group="A", arch="gru", task="classification", sites=("encoder",), well=0.3, ill=0.35)
def detaches_the_encoder(attach, fixed):
    """A detach() left over from debugging cuts the encoder off."""
    x, y = waves()
    model = TwoTower(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for _ in range(8):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            out = model(xb)
            loss = criterion(out, yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss, accuracy=(out.argmax(1) == yb).float().mean())
    return error_rate(model, x, y)


class Typo(nn.Module):
    def __init__(self, right):
        super().__init__()
        self.right = right
        self.fc1, self.fc2, self.fc3 = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        x = F.relu((self.fc3 if self.right else self.fc2)(x))
        return self.out(x)


@fault("unused_parameters", group="A", arch="mlp", task="classification", sites=("fc3",), well=0.5, ill=1.0)
def calls_one_layer_twice(attach, fixed):
    """The forward calls fc2 twice and fc3 never."""
    x, y, *_ = digits()
    model = Typo(fixed)
    before = model.fc3.weight.detach().clone()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    session = attach(model, optimizer)
    for _ in range(4):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    return 1.0 if torch.equal(before, model.fc3.weight) else error_rate(model, x, y)


class OwnSGD(torch.optim.Optimizer):
    """Somebody's own optimizer."""

    def __init__(self, params, lr, in_place):
        super().__init__(params, {"lr": lr})
        self.subtract = torch.Tensor.sub_ if in_place else torch.Tensor.sub

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.subtract(p, p.grad, alpha=group["lr"])


@fault(
    "optimizer_step_noop",
    group="A",
    arch="mlp",
    task="regression",
    sites=("optimizer", "fc"),
    cascade=("not_learning", "lr_too_low"),
    well=0.5,
    ill=0.8,
)
def steps_on_a_copy(attach, fixed):
    """A home-made optimizer subtracts out of place and drops the result."""
    x, y = houses()
    model = Perceptron(8, 32, 1)
    optimizer = OwnSGD(model.parameters(), lr=0.1, in_place=fixed)
    session = attach(model, optimizer)
    for _ in range(8):
        for xb, yb in batches(x, y):
            model.zero_grad()
            loss = ((model(xb).view(-1) - yb) ** 2).mean()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return F.mse_loss(model(x).view(-1), y).item()


@fault("double_step", group="A", arch="cnn", task="classification", sites=LOOP, well=1.0, ill=1.9)
def steps_twice(attach, fixed):
    """The helper steps, and so does the loop."""
    x, y, *_ = images()
    model = SmallCNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)

    def update(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    count = 0
    for _ in range(3):
        for xb, yb in batches(x, y):
            loss = F.cross_entropy(model(xb), yb)
            update(loss)
            None if fixed else optimizer.step()
            session.log(loss=loss)
            count += 1
    taken = optimizer.state[model.classifier[1].weight]["step"].item() / count
    return taken + (0 if error_rate(model, x, y) < 0.3 else 10)


class TiedLM(TinyLM):
    """The output layer is meant to be the embedding."""

    def __init__(self, share):
        super().__init__()
        nn.init.normal_(self.embed.weight, std=0.1)
        self.head.weight = self.embed.weight if share else nn.Parameter(self.embed.weight.clone())


@fault("tied_weights_broken", group="A", arch="transformer", task="lm", sites=("head", "embed"), well=2.2, ill=10.0)
def copies_the_weight_it_should_tie(attach, fixed):
    """The output layer gets a clone of the embedding instead of the embedding itself."""
    x, y = windows(language())
    model = TiedLM(fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    loss = None
    for _ in range(4):
        for xb, yb in batches(x, y, size=32):
            logits = model(xb)
            loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), yb.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            session.log(loss=loss.item())
    drift = (model.head.weight - model.embed.weight).norm() / model.embed.weight.norm()
    return loss.item() + (10 if drift > 0.1 else 0)
