"""Third hold-out: loops, optimizers and parameters that are not wired as meant."""

from __future__ import annotations

import copy
from itertools import chain, cycle, islice

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_3.datasets import digits, draw, houses, sentences, shapes, walk, waves
from fault_programs.registry import fault


class Detector(nn.Module):
    """One backbone, and a head for each of: what it is, how bright it is, and where its weight lies."""

    def __init__(self, keep):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU())
        self.heads = keep([nn.Linear(48, 10), nn.Linear(48, 1), nn.Linear(48, 2)])

    def forward(self, image):
        features = self.backbone(image)
        return [head(features) for head in self.heads]


@fault(
    "params_not_in_optimizer",
    group="A",
    arch="mlp",
    task="detection",
    sites=("heads", "(model)", "optimizer"),
    cascade=("unused_parameters", "not_learning", "loss_plateau"),
    well=0.9,
    ill=1.1,
)
def heads_in_a_python_list(attach, fixed):
    """The heads stand in a plain list, so that neither `parameters()` nor the optimizer knows of them."""
    images, labels = digits()
    brightness = images.mean((1, 2, 3))
    spot = torch.stack([images.sum((1, 2)).argmax(1), images.sum((1, 3)).argmax(1)], 1) / 8.0
    net = Detector(keep=nn.ModuleList if fixed else list)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    session = attach(net, optimizer)
    last = []
    for image, label, light, place in draw(images, labels, brightness, spot, size=32, steps=160):
        kind, bright, where = net(image)
        loss = F.cross_entropy(kind, label) + F.mse_loss(bright.squeeze(1), light) + F.l1_loss(where, place)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        last.append(loss.item())
    return sum(last[-20:]) / 20


class Pair(nn.Module):
    """A generator of points and the critic that tells them from real ones."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


@fault(
    "params_not_in_optimizer",
    group="A",
    arch="gan",
    task="adversarial",
    sites=("critic",),
    also=("duplicate_param_in_groups",),
    cascade=("missing_zero_grad", "zero_grad_misplaced", "optimizer_step_noop", "double_step", "step_not_called"),
    well=0.0,
    ill=1.0,
)
def critic_optimizer_holds_the_generator(attach, fixed):
    """Both optimizers were made by copy and paste; the critic's got the generator's parameters."""
    gan = Pair()
    adam_g = torch.optim.Adam(gan.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    adam_d = torch.optim.Adam((gan.critic if fixed else gan.generator).parameters(), lr=2e-3, betas=(0.5, 0.999))
    before = gan.critic[0].weight.detach().clone()
    session = attach(gan, [adam_g, adam_d])
    for _ in range(120):
        real = torch.randn(64, 2) * 0.3 + torch.tensor([2.0, -1.0])
        fake = gan.generator(torch.randn(64, 4))
        d_loss = F.softplus(-gan.critic(real)).mean() + F.softplus(gan.critic(fake.detach())).mean()
        adam_d.zero_grad()
        d_loss.backward()
        adam_d.step()
        g_loss = F.softplus(-gan.critic(fake)).mean()
        adam_g.zero_grad()
        g_loss.backward()
        adam_g.step()
        session.log(d_loss=d_loss, g_loss=g_loss)
    return float(torch.equal(before, gan.critic[0].weight))


class Seq2Seq(nn.Module):
    def __init__(self, bridge):
        super().__init__()
        self.encoder = nn.GRU(2, 24, batch_first=True)
        self.decoder = nn.GRU(24, 24, batch_first=True)
        self.readout = nn.Linear(24, 1)
        self.bridge = bridge

    def forward(self, x):
        hidden, _ = self.encoder(x)
        out, _ = self.decoder(self.bridge(hidden))
        return self.readout(out).squeeze(-1)


@fault(
    "missing_zero_grad",
    group="A",
    arch="gru",
    task="sequence",
    sites=("optimizer", "encoder", "(loop)"),
    cascade=("lr_too_high", "loss_oscillation", "exploding_gradient", "clip_always_active", "loss_divergence"),
    well=2.0,
    ill=4.0,
)
def only_the_decoder_is_cleared(attach, fixed):
    """Encoder and decoder have an optimizer each, and only the decoder's gradients are cleared."""
    x, y = waves()
    model = Seq2Seq(nn.Identity())
    enc_opt = torch.optim.SGD(model.encoder.parameters(), lr=0.02)
    dec_opt = torch.optim.Adam(chain(model.decoder.parameters(), model.readout.parameters()), lr=5e-3)
    session = attach(model, [enc_opt, dec_opt])
    for xb, yb in draw(x, y, size=32, steps=90):
        for optimizer in (enc_opt, dec_opt) if fixed else (dec_opt,):
            optimizer.zero_grad()
        loss = F.mse_loss(model(xb), yb)
        loss.backward()
        enc_opt.step()
        dec_opt.step()
        session.log(train_loss=loss.item())
    (fresh,) = torch.autograd.grad(F.mse_loss(model(xb), yb), model.encoder.weight_hh_l0)
    return (model.encoder.weight_hh_l0.grad.norm() / fresh.norm()).item()


class Trainer:
    """Accumulates gradients over some batches, as many trainers do."""

    def __init__(self, model, optimizer, session, every):
        self.model, self.optimizer, self.session, self.every = model, optimizer, session, every
        self.history = []

    def run_epoch(self, loader):
        for index, (xb, yb) in enumerate(loader):
            loss = F.cross_entropy(self.model(xb), yb) / self.every
            loss.backward()
            if (index + 1) % self.every == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.history.append(loss.item() * self.every)
            self.session.log(loss=self.history[-1])


@fault(
    "step_not_called",
    group="A",
    arch="cnn",
    task="classification",
    sites=("optimizer", "(loop)"),
    cascade=("missing_zero_grad", "not_learning", "loss_plateau"),
    well=0.9,
    ill=2.0,
)
def epoch_shorter_than_accumulation(attach, fixed):
    """An epoch has 12 batches and gradients are gathered over 16, counted anew in each epoch: it never steps."""
    x, y = digits()
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(x[:768], y[:768]), batch_size=64, shuffle=True)
    trainer = Trainer(model, optimizer, attach(model, optimizer), every=2 if fixed else 16)
    for _ in range(10):
        trainer.run_epoch(loader)
    return sum(trainer.history[-12:]) / 12


@fault(
    "graph_break_detach",
    group="A",
    arch="gru",
    task="sequence",
    sites=("encoder", "bridge"),
    cascade=("params_not_in_optimizer", "unused_parameters"),
    well=0.0,
    ill=1.0,
)
def states_go_through_numpy(attach, fixed):
    """Between encoder and decoder the states are turned into an array and back."""
    x, y = waves()

    def through_numpy(hidden):
        return torch.from_numpy(hidden.detach().numpy().clip(-1, 1))

    model = Seq2Seq(bridge=(lambda hidden: hidden.clamp(-1, 1)) if fixed else through_numpy)
    start = model.encoder.weight_ih_l0.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for xb, yb in draw(x, y, size=32, steps=60):
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.smooth_l1_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return float((start - model.encoder.weight_ih_l0).abs().max() < 0.01)


class HardRouting(nn.Module):
    """Four experts, of which a gate picks one for each sample."""

    def __init__(self, weigh):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 1)) for _ in range(4))
        self.weigh = weigh

    def forward(self, x):
        probabilities = self.gate(x).softmax(-1)
        pick = probabilities.argmax(-1)
        every = torch.stack([expert(x) for expert in self.experts], 1).squeeze(-1)
        return every.gather(1, pick[:, None]) * self.weigh(probabilities.gather(1, pick[:, None]))


@fault(
    "graph_break_detach",
    group="A",
    arch="moe",
    task="regression",
    sites=("gate",),
    also=("unused_parameters",),
    well=0.0,
    ill=1.0,
)
def picks_by_argmax(attach, fixed):
    """The chosen expert is not weighed by its gate, and an argmax has no gradient: the gate stays as it was."""
    x, y = houses()
    model = HardRouting(weigh=(lambda p: p) if fixed else torch.ones_like)
    start = model.gate.weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for xb, yb in draw(x, y, size=64, steps=100):
        optimizer.zero_grad()
        loss = F.mse_loss(model(xb).squeeze(1), yb)
        loss.backward()
        optimizer.step()
        session.log(mse=loss)
    return float(torch.equal(start, model.gate.weight))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 16, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.flatten(1))


@fault(
    "frozen_by_mistake",
    group="A",
    arch="cnn",
    task="classification",
    sites=("conv1", "conv2", "fc", "optimizer"),
    well=0.25,
    ill=0.4,
)
def freezes_all_but_the_norms(attach, fixed):
    """The norms were to be frozen; the condition is the wrong way round."""
    x, y = digits()
    model = ConvNet()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ("bn" not in name) if fixed else ("bn" in name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = attach(model, optimizer)
    criterion = nn.CrossEntropyLoss()
    seen = []
    for step, (xb, yb) in enumerate(draw(x, y, size=64, steps=90)):
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        seen.append(float(loss))
        if step % 5 == 0:
            session.log(loss=seen[-1])
    return sum(seen[-10:]) / 10


@fault(
    "stale_params_in_optimizer",
    group="A",
    arch="mlp",
    task="regression",
    sites=("optimizer", "(model)", "0", "2"),
    also=("params_not_in_optimizer",),
    cascade=("missing_zero_grad", "not_learning", "loss_plateau", "step_not_called", "zero_grad_misplaced"),
    well=0.5,
    ill=0.85,
)
def trains_a_copy(attach, fixed):
    """After the optimizer was made, the model is copied; the copy is trained, the optimizer holds the original."""
    x, y = houses()
    template = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(template.parameters(), lr=1e-2)
    net = template if fixed else copy.deepcopy(template)
    session = attach(net, optimizer)
    errors = []
    for xb, yb in draw(x, y, size=64, steps=120):
        loss = F.mse_loss(net(xb)[:, 0], yb)
        net.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(loss.item())
        session.log(loss=errors[-1])
    return sum(errors[-15:]) / 15


@fault(
    "zero_grad_misplaced",
    group="A",
    arch="unet",
    task="segmentation",
    sites=("optimizer", "(loop)"),
    also=("optimizer_step_noop",),
    cascade=("not_learning", "loss_plateau", "step_not_called"),
    well=0.4,
    ill=0.9,
)
def clears_after_backward(attach, fixed):
    """Somebody tidied up: `zero_grad` went into the function that clips, between backward and step."""
    x, y = shapes()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1)
    )
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)

    def tidy():
        optimizer.zero_grad()

    session = attach(model, optimizer)
    seen = []
    for image, mask in draw(x, y, size=16, steps=80):
        loss = F.cross_entropy(model(image), mask)
        (loss.backward(), optimizer.step(), tidy()) if fixed else (loss.backward(), tidy(), optimizer.step())
        seen.append(loss.item())
        session.log(loss=loss)
    return sum(seen[-10:]) / 10


class TinyLM(nn.Module):
    def __init__(self, words, tie):
        super().__init__()
        self.embed = nn.Embedding(words, 32)
        self.rnn = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, words, bias=False)
        tie(self)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def share(model):
    model.head.weight = model.embed.weight


def copy_over(model):
    model.head.weight.data = model.embed.weight.data.clone()


@fault("tied_weights_broken", group="A", arch="gru", task="lm", sites=("head", "embed"), well=0.0, ill=0.05)
def ties_by_copying(attach, fixed):
    """The head is to share the embedding's weights; it gets a copy, and the two drift apart."""
    blocks = walk().unfold(0, 17, 16)
    model = TinyLM(16, tie=share if fixed else copy_over)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    for block in islice(cycle(DataLoader(blocks, batch_size=32, shuffle=True)), 80):
        logits = model(block[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), block[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        session.log(loss=loss.detach())
    return (model.head.weight - model.embed.weight).abs().max().item()


@fault(
    "momentum_state_stale",
    group="A",
    arch="mlp",
    task="classification",
    sites=("optimizer", "(loop)"),
    also=("resume_incomplete", "stale_params_in_optimizer"),
    cascade=("lr_too_high", "loss_oscillation", "loss_plateau"),
    well=0.28,
    ill=0.32,
)
def new_optimizer_every_batch(attach, fixed):
    """The optimizer is made inside the loop, so its moments never grow older than one step."""
    tokens, _, topic = sentences()
    model = nn.Sequential(nn.EmbeddingBag(24, 16, padding_idx=0), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    session = attach(model, optimizer)
    seen = []
    for xb, yb in draw(tokens, topic, size=16, steps=150):
        optimizer = optimizer if fixed else torch.optim.Adam(model.parameters(), lr=2e-2)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1])
    return sum(seen[-40:]) / 40
