"""Fourth hold-out: loops, optimizers and parameters that are not wired as meant."""

from __future__ import annotations

import copy
from itertools import chain

import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_4.datasets import batches, late, melodies, pictures, power, reviews, windows, wines
from fault_programs.holdout_4.datasets import text as words_of
from fault_programs.registry import fault


class Routes(nn.Module):
    """A trunk, and a tower for each of two tasks, found by the task's name."""

    def __init__(self, keep):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 24), nn.Tanh())
        towers = {}
        for task in ("level", "sign"):
            towers[task] = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))
        self.towers = keep(towers)

    def forward(self, x):
        seen = self.trunk(x)
        return {task: self.towers[task](seen).squeeze(-1) for task in ("level", "sign")}


@fault(
    "params_not_in_optimizer",
    group="A",
    arch="mlp",
    task="regression",
    sites=("towers", "(model)", "optimizer"),
    cascade=("unused_parameters", "underfitting", "not_learning"),
    well=0.72,
    ill=0.8,
)
def towers_in_a_dict(attach, fixed):
    """The towers stand in a plain dict, which registers nothing."""
    x, y = power()
    net = Routes(keep=nn.ModuleDict if fixed else dict)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    losses = []
    for xb, yb in batches(x, y, size=40, epochs=6):
        out = net(xb)
        loss = F.mse_loss(out["level"], yb) + F.binary_cross_entropy_with_logits(out["sign"], (yb > 0).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        session.log(loss=losses[-1])
    return late(losses)


def redraw(layer):
    """Give a layer new weights."""
    layer.weight = nn.Parameter(nn.init.kaiming_normal_(torch.empty_like(layer.weight)))


@fault(
    "stale_params_in_optimizer",
    group="A",
    arch="cnn",
    task="classification",
    sites=("optimizer", "body", "out"),
    also=("params_not_in_optimizer",),
    cascade=("underfitting", "unused_parameters"),
    well=0.6,
    ill=0.8,
)
def draws_weights_after_the_optimizer(attach, fixed):
    """An initialisation that makes new parameters runs when the optimizer already holds the old ones."""
    x, y = pictures()
    net = nn.ModuleDict(
        {"body": nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten()), "out": nn.Linear(432, 10)}
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for layer in (net["body"][0], net["out"]):
        (nn.init.kaiming_normal_(layer.weight), None) if fixed else redraw(layer)
    session = attach(net, optimizer)
    losses = []
    for epoch in range(2):
        session.epoch(epoch)
        for xb, yb in batches(x, y, size=24, epochs=1):
            loss = F.cross_entropy(net["out"](net["body"](xb)), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            losses.append(loss.item())
    return late(losses)


@fault(
    "target_not_detached",
    group="A",
    arch="mlp",
    task="rl",
    sites=("(loss)", "loss_fn", "(model)", "(loop)"),
    cascade=("not_learning", "constant_output", "loss_plateau", "underfitting"),
    well=0.45,
    ill=0.6,
)
def value_pulls_its_own_target(attach, fixed):
    """The bootstrapped target of temporal differences takes part in the gradient, so that it is pulled as well."""
    states = torch.eye(12)
    critic = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
    session = attach(critic, optimizer)
    gamma, position = 0.9, torch.randint(12, (32,))
    for _ in range(400):
        move = torch.where(torch.rand(32) < 0.7, 1, -1)
        following = (position + move) % 12
        reward = (following == 11).float() + torch.randn(32)
        value = critic(states[position]).squeeze(-1)
        later = reward + gamma * critic(states[following]).squeeze(-1)
        loss = F.mse_loss(value, later.detach() if fixed else later)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        position = torch.randint(12, (32,))
    change = torch.zeros(12, 12)
    for here in range(12):
        change[here, (here + 1) % 12], change[here, (here - 1) % 12] = 0.7, 0.3
    truth = torch.linalg.solve(torch.eye(12) - gamma * change, change[:, 11])
    with torch.no_grad():
        found = critic(states).squeeze(-1)
    return float((found - truth).std() / truth.std())


@fault(
    "graph_break_detach",
    group="A",
    arch="mlp",
    task="classification",
    sites=("(model)", "(loss)", "loss_fn", "(loop)", "0", "2"),
    also=("unused_parameters",),
    cascade=("optimizer_step_noop", "not_learning", "loss_plateau"),
    well=0.3,
    ill=0.9,
)
def wraps_the_loss_anew(attach, fixed):
    """The loss was wrapped in a new tensor to silence an error about `requires_grad`; learning is gone as well."""
    x, y = wines()
    net = nn.Sequential(nn.Linear(13, 24), nn.ReLU(), nn.Linear(24, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    session = attach(net, optimizer)
    losses = []
    for xb, yb in batches(x, y, size=16, epochs=15):
        loss = criterion(net(xb), yb)
        loss = loss if fixed else torch.tensor(loss.item(), requires_grad=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


class BagOfWords(nn.Module):
    """The mean of the embeddings of a review's words, and a layer on it."""

    def __init__(self, table, look):
        super().__init__()
        self.table, self.look = table, look
        self.hidden = nn.Linear(table.embedding_dim, 16)
        self.out = nn.Linear(16, 2)

    def forward(self, words):
        seen = self.look(self.table, words) * (words > 0).unsqueeze(-1)
        mean = seen.sum(1) / (words > 0).sum(1, keepdim=True)
        return self.out(torch.relu(self.hidden(mean)))


@fault(
    "graph_break_detach",
    group="A",
    arch="embedding",
    task="classification",
    sites=("table", "(model)"),
    also=("unused_parameters",),
    cascade=("underfitting",),
    well=0.35,
    ill=0.42,
)
def looks_words_up_in_data(attach, fixed):
    """Words are looked up in `weight.data`, which no gradient flows through."""
    x, y = reviews()
    look = (lambda table, words: table(words)) if fixed else (lambda table, words: table.weight.data[words])
    net = BagOfWords(nn.Embedding(30, 2), look)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    session = attach(net, optimizer)
    losses = []
    for words, praise in batches(x, y, size=50, epochs=10):
        loss = F.cross_entropy(net(words), praise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(train_loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "missing_zero_grad",
    group="A",
    arch="mlp",
    task="regression",
    sites=("optimizer", "(loop)"),
    cascade=("loss_oscillation", "loss_divergence", "lr_too_high", "not_learning"),
    well=0.4,
    ill=0.5,
)
def zero_grad_without_brackets(attach, fixed):
    """`optimizer.zero_grad` is named but not called."""
    x, y = power()
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.8)
    session = attach(net, optimizer)
    losses = []
    for xb, yb in batches(x, y, size=30, epochs=8):
        optimizer.zero_grad() if fixed else optimizer.zero_grad
        loss = F.mse_loss(net(xb).squeeze(1), yb)
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item())
        losses.append(loss.item())
    return late(losses)


@fault(
    "step_not_called",
    group="A",
    arch="mlp",
    task="classification",
    sites=("optimizer", "optimizer2", "(loop)"),
    also=("optimizer_step_noop",),
    cascade=("missing_zero_grad", "underfitting", "params_not_in_optimizer"),
    well=0.25,
    ill=0.28,
)
def second_step_without_brackets(attach, fixed):
    """Of two optimizers the one of the encoder is named but never called."""
    x, y = pictures()
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh())
    head = nn.Linear(16, 10)
    net = nn.Sequential(encoder, head)
    first, second = torch.optim.Adam(head.parameters(), lr=0.01), torch.optim.Adam(encoder.parameters(), lr=0.01)
    session = attach(net, [first, second])
    losses = []
    for image, label in batches(x, y, size=32, epochs=5):
        first.zero_grad()
        second.zero_grad()
        loss = F.cross_entropy(net(image), label)
        loss.backward()
        first.step()
        second.step() if fixed else second.step
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "duplicate_param_in_groups",
    group="A",
    arch="autoencoder",
    task="reconstruction",
    sites=("optimizer", "optimizer2", "encoder", "decoder"),
    also=("double_step",),
    well=1.0,
    ill=1.9,
)
def both_optimizers_hold_the_encoder(attach, fixed):
    """The second optimizer was meant for the decoder and was given the whole model: the encoder steps twice."""
    x, _ = pictures()
    net = nn.ModuleDict({"encoder": nn.Linear(64, 12), "decoder": nn.Linear(12, 64)})
    one = torch.optim.SGD(net["encoder"].parameters(), lr=0.05)
    two = torch.optim.SGD((net["decoder"] if fixed else net).parameters(), lr=0.05)
    session = attach(net, [one, two])
    owners = sum(
        any(p is q for g in o.param_groups for q in g["params"]) for o in (one, two) for p in [net["encoder"].weight]
    )
    for (image,) in batches(x.flatten(1), size=32, epochs=3):
        loss = F.mse_loss(net["decoder"](torch.tanh(net["encoder"](image))), image)
        one.zero_grad()
        two.zero_grad()
        loss.backward()
        one.step()
        two.step()
        session.log(loss=loss)
    return float(owners)


@fault(
    "zero_grad_misplaced",
    group="A",
    arch="lstm",
    task="classification",
    sites=("optimizer", "(loop)"),
    well=0.1,
    ill=0.7,
)
def clears_within_the_accumulation(attach, fixed):
    """Gradients of four small batches are to be gathered, but each of them clears those before."""
    x, y = melodies()
    net = nn.ModuleDict({"rnn": nn.LSTM(3, 16, batch_first=True), "out": nn.Linear(16, 2)})
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    session = attach(net, optimizer)
    lost = whole = 0
    for number, (xb, yb) in enumerate(batches(x, y, size=8, epochs=3)):
        if number % 4 == 0 if fixed else True:
            lost += number % 4 != 0
            optimizer.zero_grad()
        loss = F.cross_entropy(net["out"](net["rnn"](xb)[0][:, -1]), yb) / 4
        loss.backward()
        whole += 1
        if number % 4 == 3:
            optimizer.step()
            session.log(loss=loss * 4)
    return lost / whole


class Scaled(nn.Module):
    """A network whose inputs are stretched by learned factors and moved by learned offsets."""

    def __init__(self, make):
        super().__init__()
        self.stretch, self.move = make(torch.ones(6)), make(torch.zeros(6))
        self.layers = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1))

    def forward(self, x):
        return self.layers(torch.sin(2 * self.stretch * x + self.move) + x)


@fault(
    "params_not_in_optimizer",
    group="A",
    arch="mlp",
    task="regression",
    sites=("stretch", "move", "(model)", "optimizer"),
    well=0.1,
    ill=0.9,
)
def factors_that_are_no_parameters(attach, fixed):
    """The learned factors are plain tensors with `requires_grad`, so nobody trains them."""
    x, y = power()
    net = Scaled(nn.Parameter if fixed else lambda value: value.requires_grad_())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    session = attach(net, optimizer)
    for xb, yb in batches(x, y, size=40, epochs=6):
        loss = F.mse_loss(net(xb).squeeze(-1), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return float(torch.equal(net.stretch.detach(), torch.ones(6)))


@fault(
    "clip_after_step",
    group="D",
    arch="rnn",
    task="classification",
    sites=("optimizer", "(loop)"),
    also=("clip_before_backward",),
    cascade=("exploding_gradient", "loss_divergence", "loss_spike", "lr_too_high", "loss_oscillation"),
    well=1.05,
    ill=2.0,
)
def clips_before_backward(attach, fixed):
    """Gradients are clipped before the backward pass has made them: there is nothing to clip."""
    x, y = melodies()
    rnn, out = nn.RNN(3, 24, nonlinearity="relu", batch_first=True), nn.Linear(24, 2)
    nn.init.eye_(rnn.weight_hh_l0).data.mul_(1.15)
    net = nn.ModuleList([rnn, out])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    session = attach(net, optimizer)
    largest = 0.0
    for xb, yb in batches(x, y, size=40, epochs=6):
        optimizer.zero_grad()
        loss = F.cross_entropy(out(rnn(xb)[0][:, -1]), yb)
        if fixed:
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        else:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            loss.backward()
        largest = max(largest, float(torch.stack([p.grad.norm() for p in net.parameters()]).norm()))
        optimizer.step()
        session.log(loss=loss)
    return largest


class Copied(nn.Module):
    """Three convolutions, of which a copied line may call the second again instead of the third."""

    def __init__(self, last):
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        self.out = nn.Linear(32, 10)
        self.last = last

    def forward(self, image):
        image = torch.relu(self.one(image))
        image = torch.relu(self.two(image))
        image = torch.relu(getattr(self, self.last)(image))
        return self.out(image.flatten(1))


@fault("unused_parameters", group="A", arch="cnn", task="classification", sites=("three", "(model)"), well=0.1, ill=0.9)
def copied_a_line_of_forward(attach, fixed):
    """A line of `forward` was copied without changing the layer's name: the third convolution never runs."""
    x, y = pictures()
    net = Copied("three" if fixed else "two")
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    before = net.three.weight.detach().clone()
    session = attach(net, optimizer)
    for image, label in batches(x, y, size=32, epochs=2):
        loss = F.cross_entropy(net(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return float(torch.equal(before, net.three.weight))


@fault(
    "frozen_by_mistake",
    group="A",
    arch="embedding",
    task="classification",
    sites=("table", "optimizer"),
    cascade=("underfitting",),
    well=0.35,
    ill=0.42,
)
def pretrained_words_stay_frozen(attach, fixed):
    """`from_pretrained` freezes unless told otherwise, and the table was to be tuned."""
    x, y = reviews()
    vectors = torch.randn(30, 2)
    net = BagOfWords(nn.Embedding.from_pretrained(vectors, freeze=not fixed), lambda table, words: table(words))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    session = attach(net, optimizer)
    losses = []
    for words, praise in batches(x, y, size=50, epochs=10):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(words), praise)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "retained_graph_leak",
    group="G",
    arch="mlp",
    task="classification",
    sites=("(loop)", "(loss)", "(model)"),
    well=1.0,
    ill=100.0,
)
def adds_losses_with_their_graphs(attach, fixed):
    """The epoch's loss is added up as tensors, so that the graph of every step stays in memory."""
    x, y = pictures()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    session = attach(net, optimizer)
    total = 0.0
    for image, label in batches(x, y, size=128, epochs=16):
        loss = F.cross_entropy(net(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = total + (loss.item() if fixed else loss)
        session.log(loss=loss.item())
    kept, here = 0, getattr(total, "grad_fn", None)
    while here is not None and here.name() == "AddBackward0":
        kept, here = kept + 1, here.next_functions[0][0]
    return float(kept)


@fault(
    "ema_not_updated",
    group="A",
    arch="mlp",
    task="classification",
    sites=("(model)", "(loop)", "teacher"),
    well=0.6,
    ill=0.8,
)
def averages_parameters_of_the_copy(attach, fixed):
    """The moving average is taken of the teacher's own copy of the weights instead of the student's."""
    x, y = pictures()
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    session = attach(nn.ModuleDict({"student": student, "teacher": teacher}), optimizer)
    for image, label in batches(x, y, size=32, epochs=4):
        with torch.no_grad():
            soft = teacher(image).softmax(1)
        logits = student(image + 0.1 * torch.randn_like(image))
        loss = F.cross_entropy(logits, label) + 0.1 * F.mse_loss(logits.softmax(1), soft)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        source = student if fixed else teacher
        with torch.no_grad():
            for kept, new in zip(teacher.parameters(), source.parameters(), strict=True):
                kept.lerp_(new, 0.05)
        session.log(loss=loss)
    with torch.no_grad():
        return float((teacher(x).argmax(1) != y).float().mean())


@fault("double_step", group="A", arch="gru", task="lm", sites=("optimizer", "(loop)"), well=1.0, ill=1.9)
def closure_and_loop_both_step(attach, fixed):
    """The clipping helper of a library also steps, and the loop steps after it."""
    series = words_of()
    table, gru, out = nn.Embedding(20, 16), nn.GRU(16, 24, batch_first=True), nn.Linear(24, 20)
    net = nn.ModuleList([table, gru, out])
    optimizer = torch.optim.RMSprop(chain(*(part.parameters() for part in net)), lr=2e-3)
    session = attach(net, optimizer)
    steps = passes = 0

    def finish(loss):
        nonlocal passes
        optimizer.zero_grad()
        loss.backward()
        passes += 1
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        return optimizer.step()

    optimizer.register_step_post_hook(lambda *_: counted.append(1))
    counted: list[int] = []
    for now, following in windows(series, 12, 16, 120):
        loss = F.cross_entropy(out(gru(table(now))[0]).flatten(0, 1), following.flatten())
        finish(loss)
        None if fixed else optimizer.step()
        session.log(loss=loss)
    steps = len(counted)
    return steps / passes
