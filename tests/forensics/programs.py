"""Training programs that go non-finite, written as people write them. The guilty line ends in `# BAD <program>`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Program:
    """A program and what a finding about it must say."""

    name: str
    run: Callable[[Callable[..., Any]], None]
    kind: str
    site: str
    call: str = ""
    reason: str = ""
    samples: list[int] | None = None
    op: str = ""

    @property
    def line(self) -> int:
        """The number of the line marked for this program, or 0."""
        lines = Path(__file__).read_text().splitlines()
        return next((n for n, line in enumerate(lines, 1) if line.endswith(f"# BAD {self.name}")), 0)


PROGRAMS: dict[str, Program] = {}
STEPS = 3
BAD_STEP = 2


def program(kind, site, call="", reason="", samples=None, op=""):
    def keep(run):
        PROGRAMS[run.__name__] = Program(run.__name__, run, kind, site, call, reason, samples, op)
        return run

    return keep


def train(watch, model, batches, loss_fn=F.mse_loss, lr=0.01, optimizer=None, **options):
    """The loop most of these programs share."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    with watch(model, optimizer, **options):
        for x, y in batches:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def batches(*shape, targets=(1,), size=4):
    """Batches of random numbers; the second one is for the program to spoil."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.rand(size, *shape, generator=generator) + 0.1 for _ in range(STEPS)]
    return [(x, torch.rand(size, *targets, generator=generator)) for x in made]


# ---------------------------------------------------------------------- forward


@program("nan_forward", "head", "log", "log_of_zero", [2], "aten.log.default")
def log_of_zero(watch):
    class Head(nn.Module):
        def forward(self, x):
            return torch.log(x)  # BAD log_of_zero

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 1, bias=False)
            nn.init.ones_(self.fc.weight)
            self.head = Head()

        def forward(self, x):
            return self.head(F.relu(self.fc(x)))

    data = batches(3)
    data[1][0][2] = -1.0
    train(watch, Net(), data)


@program("nan_forward", "(model)", "div", "division_by_zero", [1])
def division_by_zero(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 1)

        def forward(self, x):
            share = x / x.sum(1, keepdim=True)  # BAD division_by_zero
            return self.fc(share)

    data = batches(3)
    data[1][0][1] = 0.0
    train(watch, Net(), data)


@program("nan_forward", "(model)", "sqrt", "sqrt_of_negative", [0, 3])
def sqrt_of_negative(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 1)

        def forward(self, x):
            spread = torch.sqrt(x)  # BAD sqrt_of_negative
            return self.fc(spread)

    data = batches(3)
    data[1][0][0, 1] = data[1][0][3, 2] = -0.5
    train(watch, Net(), data)


@program("nan_forward", "(model)", "exp", "exp_overflow", [3])
def exp_overflow(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            weights = x.exp()  # BAD exp_overflow
            weights = weights / weights.sum(1, keepdim=True)
            return self.fc(weights)[:, :1]

    data = batches(3)
    data[1][0][3, 0] = 100.0
    train(watch, Net(), data)


@program("fully_masked_attention", "attention", "softmax", "fully_masked_row", [2])
def fully_masked_by_hand(watch):
    class Attention(nn.Module):
        def forward(self, x, mask):
            scores = x @ x.transpose(1, 2)
            scores = scores.masked_fill(mask[:, None, :], float("-inf"))
            return F.softmax(scores, dim=-1) @ x  # BAD fully_masked_by_hand

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()
            self.fc = nn.Linear(8, 1)

        def forward(self, x):
            mask = x[..., 0] < 0
            return self.fc(self.attention(x, mask)).mean(1)

    data = batches(5, 8)
    data[0][0][0, 1, 0] = -1.0  # a healthy mask
    data[1][0][2, :, 0] = -1.0
    train(watch, Net(), data)


@program("fully_masked_attention", "attention", "", "fully_masked_row", [1])
def fully_masked_multihead(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.fc = nn.Linear(8, 1)

        def forward(self, x):
            padding = x[..., 0] < 0
            out, _ = self.attention(x, x, x, key_padding_mask=padding)  # BAD fully_masked_multihead
            return self.fc(out).mean(1)

    data = batches(5, 8)
    data[1][0][1, :, 0] = -1.0
    train(watch, Net(), data)


@program("fully_masked_attention", "attention", "", "fully_masked_row", [1])
def masked_row_that_is_hidden_later(watch):
    """The model's output is finite again; the NaN shows in gradients, and comes by a norm's second result."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 1)

        def forward(self, x):
            padding = x[..., 0] < 0
            h, _ = self.attention(x, x, x, key_padding_mask=padding)  # BAD masked_row_that_is_hidden_later
            return self.fc(self.norm(h).masked_fill(padding[..., None], 0)).mean(1)

    data = batches(5, 8)
    data[1][0][1, :, 0] = -1.0
    train(watch, Net(), data)


@program("fp16_overflow", "big", "linear", "fp16_overflow", [0])
def fp16_matmul(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.big = nn.Linear(64, 4)
            self.fc = nn.Linear(4, 1)

        def forward(self, x):
            return self.fc(self.big(x))  # BAD fp16_matmul

    torch.manual_seed(0)
    model = Net()
    nn.init.constant_(model.big.weight, 1.0)
    data = [(x.half(), y.half()) for x, y in batches(64)]
    data[1][0][0] = 2000.0
    train(watch, model.half(), data, lr=1e-6)


@program("fp16_overflow", "(model)", "sum", "fp16_overflow", [1])
def fp16_sum(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, x):
            total = x.sum(1, keepdim=True)  # BAD fp16_sum
            return self.fc(total / 1000)

    data = [(x.half(), y.half()) for x, y in batches(64)]
    data[1][0][1] = 2000.0
    train(watch, Net().half(), data, lr=1e-4)


@program("nan_forward", "norm", "layer_norm", "normalising_a_constant", [3])
def layer_norm_without_eps(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4, eps=0.0)
            self.fc = nn.Linear(4, 1)

        def forward(self, x):
            return self.fc(self.norm(x))  # BAD layer_norm_without_eps

    data = batches(4)
    data[1][0][3] = 0.5
    train(watch, Net(), data)


@program("nan_forward", "(model)", "std", "std_of_one_element")
def std_of_one(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 1)

        def forward(self, x):
            warnings.simplefilter("ignore")  # torch itself warns here, once
            scale = x.std(0)  # BAD std_of_one
            return self.fc(x / (scale + 1e-3))

    data = batches(3)
    data[1] = (data[1][0][:1], data[1][1][:1])
    train(watch, Net(), data)


@program("nan_forward", "(model)", "div_", "division_by_zero", [0])
def in_place_division(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3, bias=False)

        def forward(self, x):
            h = self.fc(x)
            h = h.clone()
            h.div_(h.detach().norm(dim=1, keepdim=True))  # BAD in_place_division
            return h

    data = batches(3, targets=(3,))
    data[1][0][0] = 0.0
    train(watch, Net(), data)


@program("nan_forward", "(model)", "acos", "outside_domain", [2])
def acos_outside(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, x):
            angle = torch.acos(x)  # BAD acos_outside
            return self.fc(angle)

    data = batches(1)
    for x, _ in data:
        x.clamp_(max=0.9)
    data[1][0][2] = 1.0001
    train(watch, Net(), data)


@program("nan_forward", "(model)", "pow", "power_of_negative", [1])
def power_of_negative(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x):
            gamma = x**0.45  # BAD power_of_negative
            return self.fc(gamma)

    data = batches(2)
    data[1][0][1, 0] = -0.01
    train(watch, Net(), data)


@program("nan_forward", "(model)", "log", "log_of_zero", None)
def lstm_then_log(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)
            self.fc = nn.Linear(4, 1)

        def forward(self, x):
            states, _ = self.lstm(x)
            energy = F.relu(states[:, -1] - x[:, -1, :1] * 100)
            return self.fc(torch.log(energy))  # BAD lstm_then_log

    data = batches(5, 3)
    for index in (0, 2):
        data[index][0][:, -1, 0] = -1.0
    train(watch, Net(), data)


@program("nan_forward", "(model)", "div", "division_by_zero", [3])
def conv_of_a_flat_image(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3)
            self.fc = nn.Linear(2, 1)

        def forward(self, x):
            x = x - x.mean((1, 2, 3), keepdim=True)
            x = x / x.abs().amax((1, 2, 3), keepdim=True)  # BAD conv_of_a_flat_image
            return self.fc(F.relu(self.conv(x)).mean((2, 3)))

    data = batches(1, 6, 6)
    data[1][0][3] = 0.5
    train(watch, Net(), data)


@program("nan_forward", "(model)", "log", "log_of_zero", None)
def dropout_then_log(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.05)
            self.fc = nn.Linear(6, 1)

        def forward(self, x):
            return self.fc(torch.log(self.drop(x)))  # BAD dropout_then_log

    torch.manual_seed(3)
    train(watch, Net(), batches(6))


@program("nan_forward", "(model)", "log", "log_of_negative", [1])
def functional_model(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 1))

        def forward(self, x):
            return torch.log(x @ self.w)  # BAD functional_model

    data = batches(3)
    data[1][0][1] = -1.0
    train(watch, Net(), data)


@program("nan_forward", "1", "log1p", "log_of_negative", [0])
def sequential_of_layers(watch):
    class Log(nn.Module):
        def forward(self, x):
            return torch.log1p(x)  # BAD sequential_of_layers

    model = nn.Sequential(nn.Linear(3, 3, bias=False), Log(), nn.Linear(3, 1))
    nn.init.eye_(model[0].weight)
    data = batches(3)
    data[1][0][0, 2] = -7.0
    train(watch, model, data)


@program("nan_forward", "(model)", "sub", "inf_minus_inf", [2])
def inf_minus_inf(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            scores = self.fc(x).masked_fill(x < 0, float("-inf"))
            centred = scores - scores.amax(1, keepdim=True)  # BAD inf_minus_inf
            return centred.clamp_min(-10).mean(1, keepdim=True)

    data = batches(3)
    data[0][0][1, 1] = -1.0  # one entry masked is fine
    data[1][0][2] = -1.0
    train(watch, Net(), data)


@program("nan_forward", "decoder", "div", "division_by_zero", [1])
def dict_batch_and_keywords(watch):
    class Decoder(nn.Module):
        def forward(self, h, lengths):
            return h.sum(1) / lengths[:, None]  # BAD dict_batch_and_keywords

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.decoder = Decoder()
            self.fc = nn.Linear(4, 1)

        def forward(self, tokens, lengths):
            h = self.embed(tokens) * (torch.arange(5) < lengths[:, None])[..., None]
            return {"logits": self.fc(self.decoder(h, lengths))}

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, optimizer):
        for step in range(STEPS):
            batch = {"tokens": torch.randint(10, (3, 5)), "lengths": torch.tensor([3.0, 5.0, 2.0])}
            if step == 1:
                batch["lengths"][1] = 0
            optimizer.zero_grad()
            out = model(**batch)
            loss = F.mse_loss(out["logits"], torch.ones(3, 1))
            loss.backward()
            optimizer.step()


@program("nan_forward", "(model)", "log", "log_of_zero", [3])
def the_loop_skips_bad_losses(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x):
            return self.fc(x * torch.log(x))  # BAD the_loop_skips_bad_losses

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = batches(2)
    data[1][0][3] = 0.0
    with watch(model, optimizer):
        for x, y in data:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            if not torch.isfinite(loss):
                continue
            loss.backward()
            optimizer.step()


# ---------------------------------------------------------------------- loss


@program("nan_in_loss", "loss_fn", "log", "log_of_zero", [1])
def cross_entropy_by_hand(watch):
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = batches(3)
    data[1][0][1] = torch.tensor([1e4, -1e4, 1e4])
    with watch(model, optimizer):
        for x, _ in data:
            probabilities = model(x)
            picked = probabilities[torch.arange(4), torch.tensor([0, 1, 2, 3])]
            loss = -torch.log(picked * (x[:, 1] > 0)).mean()  # BAD cross_entropy_by_hand
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def binary_loss(logits, y):
    p = torch.sigmoid(logits)
    positive = y * torch.log(p + 1e-8)
    negative = (1 - y) * torch.log(1 - p)  # BAD bce_by_hand_in_a_function
    return -(positive + negative).mean()


@program("nan_in_loss", "loss_fn", "log", "log_of_zero", [0])
def bce_by_hand_in_a_function(watch):
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = batches(2)
    data[1][0][0] = 100.0
    with watch(model, optimizer):
        for x, y in data:
            logits = model(x)
            loss = binary_loss(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class Bound(nn.Module):
    """A loss with constants: the graph does not hold the results of adding them."""

    def forward(self, rebuilt, x, mean, variance):
        apart = 1 + torch.log(variance) - mean**2 - variance  # BAD loss_module_with_constants
        return F.mse_loss(rebuilt, x) - 0.5 * apart.mean()


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 4), nn.Linear(2, 3)

    def forward(self, x):
        mean, variance = self.encode(x).chunk(2, 1)
        return self.decode(mean), mean, variance.abs() + 0.1 - 10 * (x[:, :1] > 50)


@program("nan_in_loss", "loss_fn", "log", "log_of_negative", [3])
def loss_module_with_constants(watch):
    model, bound = Coder(), Bound()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = batches(3)
    data[1][0][3] = torch.tensor([51.0, 0.0, 0.0])
    with torch.no_grad():
        model.encode.weight.mul_(0.01)
    with watch(model, optimizer):
        for x, _ in data:
            loss = bound(model(x)[0], x, *model(x)[1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class Focal(nn.Module):
    def forward(self, p, y):
        weight = (1 - p) ** 2
        return (-weight * y * p.log()).sum()  # BAD loss_class


@program("nan_in_loss", "loss_fn", "log", "log_of_zero", [2])
def loss_class(watch):
    model = nn.Sequential(nn.Linear(3, 1), nn.ReLU())
    nn.init.ones_(model[0].weight)
    data = batches(3)
    data[1][0][2] = -5.0
    criterion = Focal()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, loss_fn=criterion):
        for x, y in data:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program("empty_target", "loss_fn", "nll_loss", "no_valid_target")
def every_target_ignored(watch):
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for step, (x, _) in enumerate(batches(3)):
            labels = torch.full((4,), -100) if step == 1 else torch.arange(4)
            logits = model(x)
            loss = F.cross_entropy(logits, labels)  # BAD every_target_ignored
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program("nan_in_loss", "loss_fn", "mean", "mean_of_nothing")
def masked_mean_of_nothing(watch):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = batches(3)
    data[1][0].neg_()
    with watch(model, optimizer):
        for x, y in data:
            error = (model(x) - y).abs()
            loss = error[x[:, 0] > 0].mean()  # BAD masked_mean_of_nothing
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program("nan_in_loss", "loss_fn", "std", "std_of_one_element")
def weights_scaled_by_the_spread_of_one(watch):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = batches(3)
    data[1] = (data[1][0][:1], data[1][1][:1])  # the last batch of an epoch
    with watch(model, optimizer), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of it
        for x, gain in data:
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)  # BAD weights_scaled_by_the_spread_of_one
            loss = -(model(x) * gain).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# ---------------------------------------------------------------------- data and weights


@program("nan_in_data", "loader")
def all_weights_of_a_batch_are_nan(watch):
    data = batches(3)
    data[1][1].fill_(float("nan"))
    train(watch, nn.Linear(3, 1), data, loss_fn=lambda score, weight: (score * weight.float()).mean())


@program("nan_in_data", "loader", samples=[3])
def nan_in_one_sample(watch):
    data = batches(3)
    data[1][0][3, 1] = float("nan")
    train(watch, nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)), data)


@program("nan_in_data", "loader", samples=[2])
def infinite_input(watch):
    data = batches(3)
    data[1][0][2, 0] = float("inf")
    train(watch, nn.Linear(3, 1), data)


@program("nan_in_data", "loader", samples=[1])
def infinite_target(watch):
    data = batches(3)
    data[1][1][1] = float("inf")
    train(watch, nn.Linear(3, 1), data)


@program("nan_in_data", "loader", samples=[0])
def nan_target_in_a_loss_by_hand(watch):
    data = batches(3)
    data[1][1][0] = float("nan")
    train(watch, nn.Linear(3, 1), data, loss_fn=lambda p, y: ((p - y) ** 2).mean())


@program("nan_in_weights", "embed.weight")
def nan_in_an_embedding(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(6, 3)
            self.fc = nn.Linear(3, 1)

        def forward(self, tokens):
            return self.fc(self.embed(tokens)).mean(1)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for step in range(STEPS):
            if step == 1:
                with torch.no_grad():
                    model.embed.weight[4] = float("nan")
            loss = model(torch.tensor([[1, 2], [3, 4]])).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# ---------------------------------------------------------------------- backward


@program("nan_backward", "(model)", "sqrt", "sqrt_backward_at_zero", [2])
def sqrt_backward(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3, bias=False)

        def forward(self, x):
            h = self.fc(x)
            return torch.sqrt(h.pow(2).sum(1, keepdim=True))  # BAD sqrt_backward

    data = batches(3)
    data[1][0][2] = 0.0
    train(watch, Net(), data)


@program("nan_backward", "loss_fn", "sqrt", "sqrt_backward_at_zero", [1])
def distance_loss(watch):
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = batches(3, targets=(2,))
    data[1][0][1] = 0.0
    data[1][1][1] = 0.0
    with watch(model, optimizer):
        for x, y in data:
            optimizer.zero_grad()
            difference = model(x) - y
            loss = torch.sqrt((difference**2).sum(1)).mean()  # BAD distance_loss
            loss.backward()
            optimizer.step()


@program("nan_backward", "(model)", "log", "log_backward_at_zero", [0])
def where_does_not_help(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2, bias=False)
            nn.init.eye_(self.fc.weight)

        def forward(self, x):
            h = self.fc(x)
            logs = torch.log(h)  # BAD where_does_not_help
            return torch.where(h > 0, logs, torch.zeros_like(h))

    data = batches(2, targets=(2,))
    data[1][0][0] = 0.0
    train(watch, Net(), data)


@program("nan_backward", "(model)", "div", "division_backward_at_zero", [3])
def selected_after_dividing(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4, bias=False)

        def forward(self, x):
            h = self.fc(x)
            total = h.sum(1, keepdim=True)
            share = h / total  # BAD selected_after_dividing
            return torch.where(total != 0, share, h).mean(1, keepdim=True)

    data = batches(3)
    data[1][0][3] = 0.0
    train(watch, Net(), data)


@program("nan_backward", "(model)", "pow", "power_backward_at_zero", [1])
def pow_backward(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1, bias=False)

        def forward(self, x):
            return self.fc(x).abs().pow(0.5)  # BAD pow_backward

    data = batches(2)
    data[1][0][1] = 0.0
    train(watch, Net(), data)


class Reciprocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign() * x.abs().clamp_min(1e-6).reciprocal()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return -grad / x**2  # BAD custom_function


@program("nan_backward", "(model)", reason="custom_backward", samples=[2])
def custom_function(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 1, bias=False)

        def forward(self, x):
            return Reciprocal.apply(self.fc(x))

    data = batches(3)
    data[1][0][2] = 0.0
    train(watch, Net(), data, lr=1e-6)


@program("nan_backward", "block", "sqrt", "sqrt_backward_at_zero", [0])
def checkpointed_block(watch):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3, bias=False)

        def forward(self, x):
            return torch.sqrt(self.fc(x).pow(2))  # BAD checkpointed_block

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()
            nn.init.eye_(self.block.fc.weight)
            self.head = nn.Linear(3, 1)

        def forward(self, x):
            return self.head(checkpoint(self.block, x, use_reentrant=False))

    data = batches(3)
    data[1][0][0] = 0.0
    train(watch, Net(), data)


@program("nan_backward", "(model)", "sqrt", "sqrt_backward_at_zero", [1])
def accumulated_micro_batches(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 1, bias=False)

        def forward(self, x):
            return self.fc(x).abs().sqrt()  # BAD accumulated_micro_batches

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro, (x, y) in enumerate(batches(3)):
                if (step, micro) == (1, 1):
                    x[1] = 0.0
                loss = F.mse_loss(model(x), y) / 3
                loss.backward()
            optimizer.step()


# ---------------------------------------------------------------------- optimizer and others


@program("nan_in_optimizer", "optimizer")
def exploding_rate(watch):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for step, (x, y) in enumerate(batches(3)):
            optimizer.param_groups[0]["lr"] = 1e38 if step == 1 else 0.01
            loss = F.mse_loss(model(x), y * 100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program("nan_in_optimizer", "optimizer")
def adam_without_eps(watch):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    nn.init.zeros_(model[2].weight)  # so that no gradient reaches the first layer
    data = batches(3)[:1]
    train(watch, model, data, optimizer=torch.optim.Adam(model.parameters(), eps=0.0))


@program("nan_forward", "generator", "log", "log_of_negative", None)
def generator_of_a_gan(watch):
    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 3)

        def forward(self, z):
            return self.fc(torch.log(z))  # BAD generator_of_a_gan

    generator, discriminator = Generator(), nn.Linear(3, 1)
    first = torch.optim.Adam(generator.parameters())
    second = torch.optim.Adam(discriminator.parameters())
    torch.manual_seed(0)
    with watch({"generator": generator, "discriminator": discriminator}, [first, second]):
        for step in range(STEPS):
            z = torch.rand(4, 2) - (0.0 if step == 0 else 0.3)
            fake = generator(z)
            second.zero_grad()
            F.softplus(discriminator(fake.detach())).mean().backward()
            second.step()
            first.zero_grad()
            F.softplus(-discriminator(fake)).mean().backward()
            first.step()


@program("nan_forward", "(model)", "div", "division_by_zero", [2])
def under_autocast(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3, bias=False)

        def forward(self, x):
            h = self.fc(x)
            return h / h.norm(dim=1, keepdim=True)  # BAD under_autocast

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = batches(3, targets=(3,))
    data[1][0][2] = 0.0
    with watch(model, optimizer):
        for x, y in data:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program("nan_in_loss", "loss_fn", "mul", "bad_number")
def weight_of_the_loss_is_nan(watch):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for step, (x, y) in enumerate(batches(3), 1):
            weight = float("nan") if step == BAD_STEP else 1.0
            loss = F.mse_loss(model(x), y)
            loss = loss * weight  # BAD weight_of_the_loss_is_nan
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
