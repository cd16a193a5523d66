"""Second hold-out: programs in which nothing is wrong, and four of which look as if something were."""

from __future__ import annotations

import copy
from itertools import islice

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from fault_programs.holdout_2.datasets import WORDS, Records, forever, moons, pixels, series, story_blocks, tumours
from fault_programs.registry import healthy


class Seq2One(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 24, num_layers=2, batch_first=True, dropout=0.1)
        self.fc = nn.Linear(24, 1)

    def forward(self, x):
        out, (h, _) = self.lstm(x)
        return {"prediction": self.fc(h[-1]), "states": out}


@healthy(arch="lstm", task="regression", well=0.1)
def forecaster_with_validation(attach):
    """A class that trains on dicts, validates after each epoch and lowers its rate on a plateau."""
    past, target = series()

    class Runner:
        def __init__(self):
            self.model = Seq2One()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
            self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=2)
            self.train_set = DataLoader(Records(x=past[:700], y=target[:700]), batch_size=35, shuffle=True)
            self.val_set = DataLoader(Records(x=past[700:], y=target[700:]), batch_size=100)
            self.session = attach(self.model, self.optimizer)

        def epoch(self):
            self.model.train()
            for batch in self.train_set:
                loss = mse_loss(self.model(batch["x"])["prediction"], batch["y"])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.session.log(loss=loss)

        @torch.no_grad()
        def validate(self):
            self.model.eval()
            losses = [mse_loss(self.model(batch["x"])["prediction"], batch["y"]).item() for batch in self.val_set]
            return sum(losses) / len(losses)

    runner = Runner()
    for number in range(5):
        runner.session.epoch(number)
        runner.epoch()
        val = runner.validate()
        runner.scheduler.step(val)
        runner.session.log(val_loss=val)
    return val


@healthy(arch="cnn", task="classification", well=0.12)
def cnn_with_mixup(attach):
    """Batch norm, mixup, one cycle per run and a clip that seldom acts."""
    x, y, x_test, y_test = pixels()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    steps = 110
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.15, total_steps=steps)
    session = attach(model, optimizer, scheduler=scheduler)
    for images, labels in islice(forever(DataLoader(TensorDataset(x, y), 64, shuffle=True, drop_last=True)), steps):
        share, other = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(len(images))
        logits = model(share * images + (1 - share) * images[other])
        loss = share * cross_entropy(logits, labels) + (1 - share) * cross_entropy(logits, labels[other])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        scheduler.step()
        session.log(loss=loss, lr=scheduler.get_last_lr()[0])
    model.eval()
    with torch.no_grad():
        return (model(x_test).argmax(1) != y_test).float().mean().item()


@healthy(arch="cnn", task="classification", well=0.25)
def new_head_on_a_frozen_backbone(attach):
    """A backbone learns the first five digits; then it is frozen, in eval mode, and a new head learns the others."""
    x, y, x_test, y_test = pixels()
    backbone = nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(), nn.Linear(432, 48), nn.ReLU()
    )

    def fit(network, optimizer, images, labels, steps, session=None):
        for xb, yb in islice(forever(DataLoader(TensorDataset(images, labels), 50, shuffle=True)), steps):
            loss = cross_entropy(network(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if session is not None:
                session.log(loss=loss)

    early = y < 5
    before = nn.Sequential(backbone, nn.Linear(48, 5))
    fit(before, torch.optim.Adam(before.parameters(), lr=3e-3), x[early], y[early], 40)

    backbone.eval().requires_grad_(False)
    head = nn.Linear(48, 5)
    model = nn.Sequential(backbone, head)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    fit(model, optimizer, x[~early], y[~early] - 5, 90, attach(model, optimizer))
    late = y_test >= 5
    with torch.no_grad():
        return (model(x_test[late]).argmax(1) != y_test[late] - 5).float().mean().item()


class Words(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(len(WORDS), dim)
        self.position = nn.Embedding(12, dim)
        self.layer = nn.TransformerEncoderLayer(dim, 4, 64, 0.1, "gelu", batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, len(WORDS), bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.05)
        nn.init.normal_(self.position.weight, std=0.05)

    def forward(self, ids):
        size = ids.shape[1]
        x = self.embed(ids) + self.position.weight[:size]
        return self.head(self.norm(self.layer(x, nn.Transformer.generate_square_subsequent_mask(size), is_causal=True)))


@healthy(arch="transformer", task="lm", well=1.5)
def language_model_in_bfloat16(attach):
    """Two small batches a step, autocast to bfloat16, a gradient scaler, unscaling, clipping, warm-up."""
    rows = story_blocks()
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10) * (1 - n / 100))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    session = attach(model, optimizer, scheduler=scheduler, scaler=scaler)
    stream = iter(forever(DataLoader(TensorDataset(rows), batch_size=20, shuffle=True, drop_last=True)))
    for _ in range(80):
        total = 0.0
        for _ in range(2):
            (ids,) = next(stream)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(ids[:, :-1])
                loss = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()) / 2
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        session.log(loss=total)
    model.eval()
    with torch.no_grad():
        return cross_entropy(model(rows[:200, :-1]).flatten(0, 1), rows[:200, 1:].flatten()).item()


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.mean, self.log_var = nn.Linear(64, 8), nn.Linear(64, 8)
        self.decode = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        h = self.encode(x)
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decode(z), mean, log_var


@healthy(arch="vae", task="reconstruction", well=29.0)
def vae_summed_over_pixels(attach):
    """Bernoulli pixels: the loss is summed over them and averaged over the batch, as in the paper."""
    x = pixels()[0].flatten(1)
    vae = Variational()
    optimizer = torch.optim.Adam(vae.parameters(), lr=2e-3)
    session = attach(vae, optimizer)
    losses = []
    for (images,) in islice(forever(DataLoader(TensorDataset(x), batch_size=64, shuffle=True)), 150):
        logits, mean, log_var = vae(images)
        likelihood = F.binary_cross_entropy_with_logits(logits, images, reduction="sum") / len(images)
        kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()
        loss = likelihood + kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        session.log(loss=loss, kl=kl)
    return sum(losses[-10:]) / 10


@healthy(arch="mlp", task="classification", well=0.1)
def tabular_multi_task_with_a_sampler(attach):
    """Two heads on one trunk, a sampler that balances classes, parameter groups with rates of their own."""
    raw, benign = tumours()
    table = torch.tensor((raw - raw.mean(0)) / raw.std(0), dtype=torch.float32)
    y = torch.tensor(benign)
    inputs, size = torch.cat([table[:, :3], table[:, 4:]], 1), table[:, 3:4]
    sampler = WeightedRandomSampler((1.0 / torch.bincount(y).float())[y], len(y))
    loader = DataLoader(TensorDataset(inputs, y, size), batch_size=32, sampler=sampler)

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(29, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
            self.heads = nn.ModuleDict({"kind": nn.Linear(16, 2), "size": nn.Linear(16, 1)})

        def forward(self, x):
            h = self.trunk(x)
            return tuple(head(h) for head in self.heads.values())

    model = TwoHeads()
    optimizer = torch.optim.AdamW(
        [{"params": model.trunk.parameters(), "lr": 2e-3}, {"params": model.heads.parameters(), "lr": 5e-3}]
    )
    session = attach(model, optimizer, loader=loader)
    for _ in range(6):
        for features, kind, area in loader:
            kind_logits, area_guess = model(features)
            kind_loss, area_loss = cross_entropy(kind_logits, kind), F.huber_loss(area_guess, area)
            loss = kind_loss + 0.5 * area_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss, kind_loss=kind_loss, area_loss=area_loss)
    with torch.no_grad():
        return (model(inputs)[0].argmax(1) != y).float().mean().item()


# ------------------------------------------------------------------ these only look ill


@healthy(deceptive=True, arch="gan", task="adversarial", well=0.6)
def critic_whose_loss_is_negative(attach):
    """A Wasserstein critic with a gradient penalty: its loss is negative; three steps to one of the generator."""
    real, _ = moons()
    real = (real - real.mean(0)) / real.std(0)
    generator = nn.Sequential(
        nn.Linear(4, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 2)
    )
    critic = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.9))
    session = attach({"generator": generator, "critic": critic}, [opt_g, opt_c])
    for _ in range(130):
        for _ in range(3):
            data = real[torch.randint(0, len(real), (64,))]
            fake = generator(torch.randn(64, 4)).detach()
            mixed = (data + torch.rand(64, 1) * (fake - data)).requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            critic_loss = critic(fake).mean() - critic(data).mean() + 5 * (slope.norm(dim=1) - 1).square().mean()
            opt_c.zero_grad()
            critic_loss.backward()
            opt_c.step()
        generator_loss = -critic(generator(torch.randn(64, 4))).mean()
        opt_g.zero_grad()
        generator_loss.backward()
        opt_g.step()
        session.log(critic_loss=critic_loss, generator_loss=generator_loss)
    with torch.no_grad():
        fake = generator(torch.randn(1000, 4))
        return max((fake.mean(0)).abs().max().item(), (fake.std(0) - 1).abs().max().item())


@healthy(deceptive=True, arch="siamese", task="contrastive", well=0.35)
def target_network_that_never_learns(attach):
    """Self-supervision with a moving average: half of the weights get no gradient, and targets are detached."""
    x, y, x_test, y_test = pixels()
    x, x_test = x.flatten(1), x_test.flatten(1)

    class SelfTaught(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
            self.target = copy.deepcopy(self.online).requires_grad_(False)
            self.predictor = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32))

        def forward(self, one, two):
            guess = self.predictor(self.online(one))
            with torch.no_grad():
                truth = self.target(two)
            return 2 - 2 * F.cosine_similarity(guess, truth, dim=-1)

        @torch.no_grad()
        def follow(self, momentum=0.97):
            for ours, theirs in zip(self.online.parameters(), self.target.parameters(), strict=True):
                theirs.mul_(momentum).add_(ours, alpha=1 - momentum)

    model = SelfTaught()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    session = attach(model, optimizer)
    for (images,) in islice(forever(DataLoader(TensorDataset(x), 100, shuffle=True)), 100):
        one, two = (images + 0.2 * torch.randn_like(images) for _ in range(2))
        loss = (model(one, two) + model(two, one)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.follow()
        session.log(loss=loss)
    model.eval()
    with torch.no_grad():
        known, asked = (F.normalize(model.online(rows), dim=1) for rows in (x, x_test))
        return (y[(asked @ known.t()).argmax(1)] != y_test).float().mean().item()


@healthy(deceptive=True, arch="mlp", task="classification", well=0.25)
def almost_half_of_the_labels_are_noise(attach):
    """Crowd workers guessed 45 % of the labels: the loss stays high, and the classes are learnt all the same."""
    x, y, x_test, y_test = pixels()
    noisy = torch.where(torch.rand(len(y)) < 0.45, torch.randint(0, 10, y.shape), y)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    session = attach(model, optimizer)
    model.train()
    for images, labels in islice(forever(DataLoader(TensorDataset(x, noisy), 64, shuffle=True)), 150):
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    model.eval()
    with torch.no_grad():
        return (model(x_test).argmax(1) != y_test).float().mean().item()


@healthy(deceptive=True, arch="mlp", task="reinforcement", well=0.35)
def policy_whose_loss_means_nothing(attach):
    """REINFORCE with a running baseline: the loss wanders around zero while the reward grows."""
    x, y, x_test, y_test = pixels()
    policy = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    session = attach(policy, optimizer)
    baseline = 0.1
    for _ in range(200):
        rows = torch.randint(0, len(x), (128,))
        choice = torch.distributions.Categorical(logits=policy(x[rows]))
        action = choice.sample()
        reward = (action == y[rows]).float()
        loss = -(choice.log_prob(action) * (reward - baseline)).mean() - 0.01 * choice.entropy().mean()
        baseline += 0.05 * (reward.mean().item() - baseline)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss, reward=reward.mean())
    with torch.no_grad():
        return (policy(x_test).argmax(1) != y_test).float().mean().item()
