"""Eleventh hold-out: healthy programs that look odd."""

from __future__ import annotations

import copy
import math
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_11.about import healthy
from fault_programs.holdout_11.material import Aim, Corridor, digits, distance, spread, standard, table


@healthy(area="noisy regression", source="after the diabetes table, half of whose variance no model explains")
def half_of_the_variance_is_noise(attach):
    """The loss stops at one half, since there is no more to learn."""
    xtr, ytr, xte, yte = table("diabetes", 340)
    xtr, xte = standard(xtr, xte)
    ytr, yte = standard(ytr[:, None], yte[:, None])
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    session = attach(model, optimizer)
    for epoch in range(25):
        model.train()
        for x, y in DataLoader(TensorDataset(xtr, ytr), batch_size=34, shuffle=True):
            loss = F.huber_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            session.log(val_loss=F.huber_loss(model(xte), yte).item())
    with torch.no_grad():
        return float(F.mse_loss(model(xte), yte))


@healthy(area="wgan", source="after examples of WGAN with a gradient penalty and several critic steps")
def critic_with_a_gradient_penalty(attach):
    """Losses below zero, five critic steps to one of the generator."""

    def real(n):
        return torch.randn(n, 2) @ torch.tensor([[0.8, 0.3], [0.0, 0.3]]) + torch.tensor([1.0, -1.0])

    generator = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 2))
    critic = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    session = attach(nn.ModuleDict({"generator": generator, "critic": critic}), [opt_g, opt_c])
    for it in range(220):
        for _ in range(5):
            x, fake = real(64), generator(torch.randn(64, 4)).detach()
            mix = (x + torch.rand(64, 1) * (fake - x)).requires_grad_()
            slope = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)[0]
            penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
            c_loss = critic(fake).mean() - critic(x).mean() + 2 * penalty
            opt_c.zero_grad()
            c_loss.backward()
            opt_c.step()
            session.log(c_loss=c_loss.item())
        g_loss = -critic(generator(torch.randn(64, 4))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        session.log(g_loss=g_loss.item())
    with torch.no_grad():
        return spread(generator(torch.randn(500, 4)), real(500)) + 0.05


@healthy(area="vae", source="after the basic VAE example, which sums its loss over pixels and batch")
def vae_with_a_large_summed_loss(attach):
    """A loss in the thousands, by design."""
    xtr, _, xte, _ = digits()

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc21, self.fc22 = nn.Linear(64, 64), nn.Linear(64, 6), nn.Linear(64, 6)
            self.fc3, self.fc4 = nn.Linear(6, 64), nn.Linear(64, 64)

        def decode(self, z):
            return self.fc4(F.relu(self.fc3(z)))

        def forward(self, x):
            h = F.relu(self.fc1(x))
            mu, logvar = self.fc21(h), self.fc22(h)
            return self.decode(mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)), mu, logvar

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for epoch in range(20):
        for part in torch.randperm(len(xtr)).split(60):
            x = xtr[part].flatten(1)
            back, mu, logvar = model(x)
            bce = F.binary_cross_entropy_with_logits(back, x, reduction="sum")
            kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss = bce + kld
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), bce=bce.item(), kld=kld.item())
    x = xte.flatten(1)
    with torch.no_grad():
        return float(F.mse_loss(torch.sigmoid(model(x)[0]), x) / x.var(0).mean())


@healthy(area="dqn", source="after DQN examples with replay, a target network and a done mask")
def dqn_walks_down_the_corridor(attach):
    """The loss does not fall steadily while the agent gets better."""
    env = Corridor(cells=6, time=16)
    q = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.AdamW(q.parameters(), lr=2e-3, amsgrad=True)
    session = attach({"q": q, "target": target}, optimizer)
    memory, step = deque(maxlen=1500), 0
    for episode in range(45):
        state, over, total = env.reset(), False, 0.0
        while not over:
            epsilon = 0.05 + 0.9 * math.exp(-step / 150)
            with torch.no_grad():
                action = int(q(state).argmax()) if random.random() > epsilon else random.randrange(2)
            after, reward, over = env.step(action)
            memory.append((state, torch.tensor(action), torch.tensor(reward), after, torch.tensor(float(env.at == 5))))
            state, step, total = after, step + 1, total + reward
            if len(memory) < 48:
                continue
            s, a, r, n, d = (torch.stack(z) for z in zip(*random.sample(memory, 48)))
            with torch.no_grad():
                aim = r + 0.95 * (1 - d) * target(n).max(1).values
            loss = F.smooth_l1_loss(q(s).gather(1, a[:, None])[:, 0], aim)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(q.parameters(), 100)
            optimizer.step()
            with torch.no_grad():
                for t, p in zip(target.parameters(), q.parameters()):
                    t.lerp_(p, 0.05)
            session.log(loss=loss.item())
        session.log(reward=total)
    with torch.no_grad():
        return float((q(torch.eye(6)[:5]).argmax(1) != 1).float().mean()) + 0.01


@healthy(area="policy gradient", source="after the REINFORCE example with returns to go and a baseline")
def reinforce_aims_at_the_mark(attach):
    """A loss around zero, whose value says little."""
    env = Aim()
    policy = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    session = attach(policy, optimizer)
    for episode in range(80):
        log_probs, all_returns, entropies = [], [], []
        for _ in range(5):
            state, over, rewards = env.reset(), False, []
            while not over:
                chosen = Categorical(logits=policy(state))
                action = chosen.sample()
                log_probs.append(chosen.log_prob(action))
                entropies.append(chosen.entropy())
                state, reward, over = env.step(int(action))
                rewards.append(reward)
            running, returns = 0.0, []
            for r in reversed(rewards):
                running = r + 0.7 * running
                returns.insert(0, running)
            all_returns += returns
        R = torch.tensor(all_returns)
        R = (R - R.mean()) / (R.std() + 1e-8)
        loss = -(torch.stack(log_probs) * R).mean() - 0.01 * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(policy_loss=loss.item(), ret=sum(all_returns) / len(all_returns))
    return distance(lambda seen: policy(seen).argmax())


@healthy(area="language model", source="after language models that share the embedding with the output layer")
def gpt_with_tied_weights(attach):
    """lm_head.weight is wte.weight; one tensor in two places."""
    follows = torch.randint(0, 10, (10, 10))

    def text(n, t=17):
        x = torch.randint(0, 10, (n, t))
        for i in range(2, t):
            x[:, i] = follows[x[:, i - 1], x[:, i - 2]]
        return x

    class Tied(nn.Module):
        def __init__(self, c=32):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(10, c), nn.Embedding(16, c)
            self.layer = nn.TransformerEncoderLayer(c, 2, 64, 0.0, "gelu", batch_first=True, norm_first=True)
            self.ln_f = nn.LayerNorm(c)
            self.lm_head = nn.Linear(c, 10, bias=False)
            self.lm_head.weight = self.wte.weight
            nn.init.normal_(self.wte.weight, std=0.2)

        def forward(self, idx):
            mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
            x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
            return self.lm_head(self.ln_f(self.layer(x, src_mask=mask, is_causal=True)))

    model = Tied()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=5e-3
    )
    session = attach(model, optimizer)
    data = text(800)
    for it in range(300):
        x = data[torch.randint(0, 800, (32,))]
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        session.log(loss=loss.item())
    x = text(100)
    with torch.no_grad():
        out = model(x[:, :-1])[:, 1:].argmax(-1)
    return float((out != x[:, 2:]).float().mean()) + 0.02


class Reverse(torch.autograd.Function):
    """The identity, with the gradient turned around."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.1 * grad


@healthy(area="domain adaptation", source="after examples of DANN with a gradient reversal layer")
def domains_are_confused_by_reversal(attach):
    """The loss of the domain classifier is meant to stay high."""
    xtr, ytr, xte, yte = digits()
    target = 0.7 * xtr + 0.3
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
    model = nn.ModuleDict({"body": body, "classes": nn.Linear(64, 10), "domains": nn.Linear(64, 2)})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for epoch in range(10):
        for part in torch.randperm(1200).split(50):
            other = torch.randint(0, 1200, (len(part),))
            h = model["body"](torch.cat([xtr[part], target[other]]))
            classes = F.cross_entropy(model["classes"](h[: len(part)]), ytr[part])
            where = torch.cat([torch.zeros(len(part)), torch.ones(len(part))]).long()
            domains = F.cross_entropy(model["domains"](Reverse.apply(h)), where)
            loss = classes + domains
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), class_loss=classes.item(), domain_loss=domains.item())
    with torch.no_grad():
        found = model["classes"](model["body"](0.7 * xte + 0.3)).argmax(1)
    return float((found != yte).float().mean())


@healthy(area="uncertainty", source="after examples of MC dropout, which keeps dropout on while it predicts")
def dropout_stays_on_to_predict(attach):
    """model.eval(), then the dropout layers are set to train() on purpose."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.4), nn.Linear(128, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)

    def predict(x, times=12):
        model.eval()
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.train()
        with torch.no_grad():
            return torch.stack([F.softmax(model(x), 1) for _ in range(times)]).mean(0)

    for epoch in range(8):
        model.train()
        for x, y in DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        session.log(val_nll=float(F.nll_loss(predict(xte).log(), yte)))
    return float((predict(xte).argmax(1) != yte).float().mean()) + 0.01


@healthy(area="warm restarts", source="after examples of CosineAnnealingWarmRestarts, stepped with fractions of epochs")
def rate_restarts_every_few_epochs(attach):
    """The loss jumps up at each restart."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(108, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)
    session = attach(model, optimizer, scheduler=scheduler)
    iters = 24
    for epoch in range(14):
        for i, part in enumerate(torch.randperm(1200).split(50)):
            loss = F.cross_entropy(model(xtr[part]), ytr[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step(epoch + i / iters)
            session.log(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
    with torch.no_grad():
        return float((model(xte).argmax(1) != yte).float().mean()) + 0.01


@healthy(
    area="transfer",
    source="after examples of fine-tuning in which the backbone is frozen and its batch norms stay in eval",
)
def backbone_is_frozen_and_in_eval(attach):
    """train() is overridden so that the backbone keeps its statistics."""
    xtr, ytr, xte, yte = digits()

    class Finetuned(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
            )
            self.head = nn.Linear(256, 10)

        def train(self, mode=True):
            super().train(mode)
            self.backbone.eval()
            return self

        def forward(self, x):
            return self.head(self.backbone(x))

    model = Finetuned()
    nn.Module.train(model.backbone)
    first = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(80):
        pick = torch.randint(0, 1200, (50,))
        loss = F.cross_entropy(model(xtr[pick].rot90(2, (2, 3))), ytr[pick] // 2)
        first.zero_grad()
        loss.backward()
        first.step()
    model.head = nn.Linear(256, 10)
    model.backbone.requires_grad_(False)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(8):
        model.train()
        for x, y in DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    with torch.no_grad():
        return float((model(xte).argmax(1) != yte).float().mean()) + 0.01


class Lion(torch.optim.Optimizer):
    """Steps of one length in the direction of a sign."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((b1 * m + (1 - b1) * p.grad).sign(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - b2)


@healthy(area="custom optimizer", source="after small implementations of the Lion optimizer")
def signs_move_the_weights(attach):
    """An optimizer of one's own, with a decoupled weight decay."""
    xtr, ytr, xte, yte = table("cancer", 440)
    xtr, xte = standard(xtr, xte)
    ytr, yte = torch.tensor(ytr).float(), torch.tensor(yte).float()
    model = nn.Sequential(nn.Linear(30, 24), nn.SiLU(), nn.Linear(24, 1), nn.Flatten(0))
    optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=0.1)
    session = attach(model, optimizer)
    for epoch in range(20):
        for x, y in DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True):
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float(((model(xte) > 0).float() != yte).float().mean()) + 0.02


@healthy(area="diffusion", source="after small diffusion examples that sample from an average of the weights")
def diffusion_samples_from_an_average(attach):
    """A loss that stays near one quarter, because noise cannot be known."""
    steps = 40
    s = torch.arange(steps + 1) / steps
    f = torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
    beta = (1 - f[1:] / f[:-1]).clamp(max=0.95)
    abar = torch.cumprod(1 - beta, 0)

    def rings(n):
        angle = 2 * math.pi * torch.rand(n)
        return torch.stack([torch.cos(angle), torch.sin(angle)], 1) + 0.08 * torch.randn(n, 2)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

        def forward(self, x, t):
            t = t[:, None] / steps
            return self.mlp(torch.cat([x, t, t**2, torch.sin(6 * t), torch.cos(6 * t)], 1))

    net = Net()
    ema = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach({"net": net, "ema": ema}, optimizer)
    for it in range(700):
        x0, t = rings(128), torch.randint(0, steps, (128,))
        noise = torch.randn_like(x0)
        xt = abar[t, None].sqrt() * x0 + (1 - abar[t, None]).sqrt() * noise
        loss = F.mse_loss(net(xt, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(ema.parameters(), net.parameters()):
                a.lerp_(p, 1 - min(0.99, (it + 1) / (it + 10)))
        session.log(loss=loss.item())
    x = torch.randn(500, 2)
    with torch.no_grad():
        for i in reversed(range(steps)):
            t = torch.full((500,), i)
            x = (x - beta[i] / (1 - abar[i]).sqrt() * ema(x, t)) / (1 - beta[i]).sqrt()
            x = x + beta[i].sqrt() * torch.randn_like(x) * 0.9 if i else x
    return spread(x, rings(500)) + 0.05


@healthy(area="curriculum", source="after examples of a curriculum that begins with short sequences")
def sums_grow_longer(attach):
    """The loss rises whenever longer sequences come."""

    def batch(length, n=32):
        x = torch.randint(0, 2, (n, length))
        return x, x.cumsum(1) % 3

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru, self.out = nn.Embedding(2, 8), nn.GRU(8, 32, batch_first=True), nn.Linear(32, 3)

        def forward(self, x):
            return self.out(self.gru(self.embed(x))[0])

    model = Counter()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for stage, length in enumerate((3, 6, 10, 15)):
        for it in range(120):
            x, y = batch(length)
            loss = F.cross_entropy(model(x).transpose(1, 2), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss.item(), length=length)
        session.epoch(stage)
    x, y = batch(15, 200)
    with torch.no_grad():
        return float((model(x).argmax(2) != y).float().mean()) + 0.03


@healthy(area="multi-task", source="after examples of learnt weights of several losses by their uncertainty")
def loss_with_learnt_weights_falls_below_zero(attach):
    """exp(-s) * loss + s for each task: the sum becomes negative."""
    x = torch.randn(1000, 6)
    a = torch.randn(6, 2) / 2
    y = torch.tanh(x @ a) * torch.tensor([1.0, 0.1]) + torch.tensor([0.1, 0.01]) * torch.randn(1000, 2)

    class TwoTasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 48), nn.Tanh())
            self.heads = nn.Linear(48, 2)
            self.log_vars = nn.Parameter(torch.zeros(2))

        def forward(self, x, y):
            losses = ((self.heads(self.body(x)) - y) ** 2).mean(0)
            return (torch.exp(-self.log_vars) * losses + self.log_vars).sum(), losses

    model = TwoTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for epoch in range(15):
        for part in torch.randperm(800).split(40):
            loss, each = model(x[part], y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), first=each[0].item(), second=each[1].item())
    with torch.no_grad():
        each = model(x[800:], y[800:])[1]
    return float((each / y[800:].var(0)).mean())


@healthy(area="physics", source="after examples of PINNs for an oscillator, with losses for the start and the equation")
def pinn_of_a_damped_oscillator(attach):
    """Second derivatives by autograd, and no data at all."""
    mu, k = 1.0, 9.0
    w = math.sqrt(k - mu**2 / 4)

    def truth(t):
        return torch.exp(-mu * t / 2) * (torch.cos(w * t) + mu / (2 * w) * torch.sin(w * t))

    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    t0 = torch.zeros(1, 1, requires_grad=True)
    t = torch.linspace(0, 2, 40)[:, None].requires_grad_()
    for it in range(1200):
        u0 = net(t0)
        v0 = torch.autograd.grad(u0, t0, create_graph=True)[0]
        u = net(t)
        du = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
        ddu = torch.autograd.grad(du.sum(), t, create_graph=True)[0]
        start = (u0 - 1).pow(2).mean() + 0.1 * v0.pow(2).mean()
        equation = (ddu + mu * du + k * u).pow(2).mean()
        loss = start + 5e-3 * equation
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item(), start=start.item(), equation=equation.item())
    at = torch.linspace(0, 2, 100)[:, None]
    with torch.no_grad():
        return float((net(at) - truth(at)).abs().mean()) + 0.01


@healthy(area="adapters", source="after LoRA, whose second matrix starts at zero and whose base is frozen")
def adapters_start_at_zero(attach):
    """Half of the trainable matrices are zero at first, and most weights are frozen."""
    xtr, ytr, xte, yte = digits()
    base = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))
    first = torch.optim.Adam(base.parameters(), lr=2e-3)
    for _ in range(150):
        pick = torch.randint(0, 1200, (50,))
        loss = F.cross_entropy(base(xtr[pick].flip(3)), ytr[pick])
        first.zero_grad()
        loss.backward()
        first.step()
    base.requires_grad_(False)

    class Adapter(nn.Module):
        def __init__(self, linear, r=6, alpha=12):
            super().__init__()
            self.linear, self.scale = linear, alpha / r
            self.down = nn.Linear(linear.in_features, r, bias=False)
            self.up = nn.Linear(r, linear.out_features, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.linear(x) + self.scale * self.up(self.down(x))

    model = nn.Sequential(*(Adapter(m) if isinstance(m, nn.Linear) else m for m in base))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3)
    session = attach(model, optimizer)
    for epoch in range(10):
        for x, y in DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float((model(xte).argmax(1) != yte).float().mean())


@healthy(area="mixed precision", source="after examples of autocast with bfloat16 on a processor")
def digits_under_bfloat16_autocast(attach):
    """The layers run in bfloat16, the loss and the weights stay float32."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = attach(model, optimizer)
    for epoch in range(6):
        model.train()
        for x, y in DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    with torch.no_grad():
        return float((model(xte).argmax(1) != yte).float().mean()) + 0.01


@healthy(area="stateful rnn", source="after the word language model, which carries its state on and detaches it")
def state_is_carried_and_detached(attach):
    """Batches come in order, and the state of one is the start of the next."""
    n, t = 12, 700
    follows = torch.randint(0, 6, (6, 6))
    stream = torch.randint(0, 6, (n, t))
    for i in range(2, t):
        keep = torch.rand(n) < 0.8
        stream[keep, i] = follows[stream[keep, i - 1], stream[keep, i - 2]]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.rnn, self.decoder = (
                nn.Embedding(6, 12),
                nn.LSTM(12, 48, batch_first=True),
                nn.Linear(48, 6),
            )

        def forward(self, x, state):
            h, state = self.rnn(self.encoder(x), state)
            return self.decoder(h), state

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    session = attach(model, optimizer)
    last = 1.8
    for epoch in range(12):
        state = None
        for i in range(0, stream.shape[1] - 36, 35):
            x, y = stream[:, i : i + 35], stream[:, i + 1 : i + 36]
            logits, state = model(x, state)
            state = tuple(s.detach() for s in state)
            loss = F.cross_entropy(logits.transpose(1, 2), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            session.log(loss=loss.item())
            last = 0.9 * last + 0.1 * loss.item()
    return last
