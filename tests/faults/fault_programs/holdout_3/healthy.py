"""Third hold-out: programs in which nothing is wrong, most of which look as if there were."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_3.datasets import digits, draw, houses, sentences, shapes, spirals, walk, waves
from fault_programs.registry import healthy


@healthy(deceptive=True, arch="mlp", task="classification", well=0.45)
def harder_samples_come_later(attach):
    """A curriculum: noise on the pictures grows as training goes on, and the loss with it."""
    x, y = digits()
    x = x.flatten(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for step, (xb, yb) in enumerate(draw(x, y, size=64, steps=180)):
        noise = 0.6 * min(1.0, step / 150)
        loss = F.cross_entropy(model(xb + noise * torch.randn_like(xb)), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss, noise=noise)
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()


@healthy(deceptive=True, arch="vae", task="reconstruction", well=0.75)
def weight_of_the_kl_grows(attach):
    """The KL is weighed in slowly, so the total loss rises by design while the reconstruction falls."""
    x = digits()[0].flatten(1)
    x = (x - x.mean(0)) * 2
    encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    rest = []
    for step, (xb,) in enumerate(draw(x, size=64, steps=220)):
        mu, log_var = encoder(xb).chunk(2, 1)
        out = decoder(mu + torch.randn_like(mu) * (0.5 * log_var).exp())
        error = (out - xb).square().sum(1).mean()
        kl = 0.5 * (mu.square() + log_var.exp() - 1 - log_var).sum(1).mean()
        beta = min(1.0, step / 200)
        loss = error + beta * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rest.append((error / xb.square().sum(1).mean()).item())
        session.log(loss=loss, reconstruction=error, kl=kl, beta=beta)
    return sum(rest[-20:]) / 20


@healthy(deceptive=True, arch="mlp", task="lm", well=2.2)
def rare_words_get_few_gradients(attach):
    """A large table of words with sparse gradients, most rows of which see none for a long while."""
    words = 600
    text = (torch.rand(8000) ** 4 * words).long()
    follow = torch.randperm(words)
    table = nn.Embedding(words, 24, sparse=True)
    head = nn.Linear(24, words)
    model = nn.ModuleDict({"table": table, "head": head})
    rare, dense = torch.optim.SparseAdam(table.parameters(), lr=2e-2), torch.optim.Adam(head.parameters(), lr=2e-2)
    session = attach(model, [rare, dense])
    last = []
    for (ids,) in draw(text, size=128, steps=150):
        loss = F.cross_entropy(head(table(ids)), follow[ids])
        for optimizer in (rare, dense):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (rare, dense):
            optimizer.step()
        last.append(loss.item())
        session.log(loss=last[-1])
    return sum(last[-10:]) / 10


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1))
        self.head = nn.Linear(16 * 36, 10)

    def forward(self, x):
        return self.head(self.stem(x))


@healthy(deceptive=True, arch="cnn", task="classification", well=0.4)
def probes_a_frozen_backbone(attach):
    """Only a new head is trained; the backbone is frozen, in eval mode and given to no optimizer, all on purpose."""
    x, y = digits()
    model = Backbone()
    warm = torch.optim.Adam(model.parameters(), lr=3e-3)
    for xb, yb in draw(x, y, size=64, steps=20):
        warm.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        warm.step()
    model.head = nn.Linear(16 * 36, 10)
    model.stem.requires_grad_(False)
    model.stem.eval()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)
    session = attach(model, optimizer)
    seen = []
    for xb, yb in draw(x, y, size=64, steps=100):
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1])
    return sum(seen[-10:]) / 10


@healthy(deceptive=True, arch="mlp", task="reinforcement", well=0.4)
def actor_and_critic(attach):
    """Rewards are noisy, the policy's loss wanders around nought, and the value's loss grows before it falls."""

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 48), nn.Tanh())
            self.actor, self.critic = nn.Linear(48, 4), nn.Linear(48, 1)

        def forward(self, state):
            h = self.body(state)
            return torch.distributions.Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1)

    model = ActorCritic()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    rewards = []
    for _ in range(200):
        state = torch.randn(48, 4)
        policy, value = model(state)
        action = policy.sample()
        reward = (action == state.argmax(1)).float() + torch.randn(48) * 0.5
        advantage = reward - value.detach()
        actor_loss = -(policy.log_prob(action) * advantage).mean() - 0.005 * policy.entropy().mean()
        critic_loss = F.mse_loss(value, reward)
        optimizer.zero_grad()
        (actor_loss + 0.5 * critic_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        rewards.append(reward.mean().item())
        session.log(actor_loss=actor_loss, critic_loss=critic_loss, reward=rewards[-1])
    return 1 - sum(rewards[-30:]) / 30


@healthy(deceptive=True, arch="mlp", task="classification", well=0.25)
def restarts_warmly(attach):
    """The rate falls to nearly nothing and jumps up again, three times; so does the loss."""
    x, y = spirals()
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=60, eta_min=1e-5)
    session = attach(model, optimizer, scheduler=scheduler)
    seen = []
    for xb, yb in draw(x, y, size=64, steps=238):
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        seen.append(loss.item())
        session.log(loss=seen[-1], lr=scheduler.get_last_lr()[0])
    return sum(seen[-10:]) / 10


@healthy(deceptive=True, arch="gan", task="adversarial", well=1.0)
def both_sides_in_balance(attach):
    """Hinge losses of a GAN hover about two and nought, and neither falls."""

    class Toy(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 2))
            self.d = nn.Sequential(
                nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1)
            )

    model = Toy()
    opt_g = torch.optim.Adam(model.g.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(model.d.parameters(), lr=2e-3, betas=(0.0, 0.9))
    session = attach(model, [opt_g, opt_d])
    centre = torch.tensor([0.8, 0.4])
    for _ in range(200):
        real = centre + 0.5 * torch.randn(64, 2)
        with torch.no_grad():
            fake = model.g(torch.randn(64, 6))
        d_loss = F.relu(1 - model.d(real)).mean() + F.relu(1 + model.d(fake)).mean()
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
        g_loss = -model.d(model.g(torch.randn(64, 6))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        session.log(d_loss=d_loss, g_loss=g_loss)
    with torch.no_grad():
        return (model.g(torch.randn(500, 6)).mean(0) - centre).norm().item()


@healthy(deceptive=True, arch="cnn", task="overfit", well=0.05)
def learns_one_batch_by_heart(attach):
    """The first check of everybody: eight pictures, the same in every step, until the loss is nought."""
    x, y = digits()
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    image, label = x[:8], y[:8]
    for _ in range(80):
        loss = F.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return loss.item()


@healthy(deceptive=True, arch="transformer", task="classification", well=0.75)
def smooth_labels_and_mixed_words(attach):
    """Label smoothing and word dropout hold the loss well above nought, with a cosine to the end and a clip at one."""
    tokens, _, topic = sentences()
    layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.2, batch_first=True)
    embed, encoder, out = nn.Embedding(24, 24, padding_idx=0), nn.TransformerEncoder(layer, 2), nn.Linear(24, 2)
    model = nn.ModuleDict({"embed": embed, "encoder": encoder, "out": out})
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.2)
    session = attach(model, optimizer)
    seen = []
    for step, (ids, label) in enumerate(draw(tokens, topic, size=32, steps=120)):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / 120))
        ids = torch.where(torch.rand(ids.shape) < 0.2, 0, ids)
        ids[:, 0] = 1
        padding = ids == 0
        hidden = encoder(embed(ids), src_key_padding_mask=padding)
        logits = out(hidden.masked_fill(padding[..., None], 0).sum(1) / (~padding).sum(1, keepdim=True))
        loss = criterion(logits, label)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1])
    return sum(seen[-10:]) / 10


@healthy(deceptive=True, arch="mlp", task="regression", well=0.45)
def noise_on_the_gradients(attach):
    """Gradients are clipped hard and noise is added to them, as for private training; the loss jitters downwards."""
    x, price = houses()
    model = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    session = attach(model, optimizer)
    seen = []
    for xb, yb in draw(x, price, size=64, steps=200):
        loss = F.mse_loss(model(xb).squeeze(1), yb)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter in model.parameters():
            parameter.grad.add_(0.01 * torch.randn_like(parameter.grad))
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1])
    return sum(seen[-20:]) / 20


@healthy(arch="gru", task="sequence", well=0.05)
def carries_its_state_by_design(attach):
    """A long series is read in order, piece by piece; the state is handed on, detached."""
    x, _ = waves(16, 1200)
    y = torch.tanh(x[..., 0] * 0.6 + x[..., 1].roll(1, 1) * 0.6)
    rnn, head = nn.GRU(2, 24, batch_first=True), nn.Linear(24, 1)
    model = nn.ModuleList([rnn, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    state, seen = None, []
    for start in range(1, 1200 - 12, 12):
        out, state = rnn(x[:, start : start + 12], state)
        state = state.detach()
        loss = F.mse_loss(head(out).squeeze(-1), y[:, start : start + 12])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1])
    return sum(seen[-10:]) / 10


@healthy(arch="unet", task="segmentation", well=0.4)
def gathers_in_bfloat16(attach):
    """Autocast to bfloat16, four batches to a step, each divided by four, with a norm and a skip."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.norm, self.mid, self.out = (
                nn.Conv2d(1, 12, 3, padding=1),
                nn.GroupNorm(3, 12),
                nn.Conv2d(12, 12, 3, padding=1),
                nn.Conv2d(12, 3, 1),
            )

        def forward(self, image):
            h = F.silu(self.norm(self.inp(image)))
            return self.out(h + F.silu(self.mid(h)))

    images, masks = shapes()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(images, masks), batch_size=8, shuffle=True)
    session = attach(model, optimizer, loader=loader)
    seen = []
    for epoch in range(5):
        session.epoch(epoch)
        for index, (image, mask) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(image), mask) / 4
            loss.backward()
            seen.append(4 * loss.item())
            if index % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
                session.log(loss=sum(seen[-4:]) / 4)
    return sum(seen[-20:]) / 20


@healthy(arch="moe", task="lm", well=2.0)
def experts_with_a_balancing_loss(attach):
    """Two of four experts are mixed for each word, with the usual small loss that spreads the load."""

    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 24)
            self.gate = nn.Linear(48, 4, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 24)) for _ in range(4)
            )
            self.head = nn.Linear(24, 16)

        def forward(self, ids):
            pair = torch.cat([self.embed(ids[:, :-1]), self.embed(ids[:, 1:])], -1)
            weight = self.gate(pair).softmax(-1)
            top, pick = weight.topk(2, -1)
            sparse = torch.zeros_like(weight).scatter(-1, pick, top / top.sum(-1, keepdim=True))
            mixed = sum(sparse[..., n, None] * expert(pair) for n, expert in enumerate(self.experts))
            return self.head(mixed), 4 * (weight.mean((0, 1)) * (sparse > 0).float().mean((0, 1))).sum()

    blocks = walk().unfold(0, 18, 16)
    model = MoE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    seen = []
    for (block,) in draw(blocks, size=32, steps=150):
        logits, balance = model(block[:, :-1])
        words = F.cross_entropy(logits.flatten(0, 1), block[:, 2:].flatten())
        loss = words + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(words.item())
        session.log(loss=loss, words=words, balance=balance)
    return sum(seen[-10:]) / 10
