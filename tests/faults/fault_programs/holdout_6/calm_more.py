"""Sixth hold-out: programs in which nothing is wrong (agents, generative, contrastive, multi-task, physics, preferences)."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

from fault_programs.holdout_6.about import healthy
from fault_programs.holdout_6.materials import Walk, apart, batches, digits, moons, table, wrong


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, s):
        h = self.body(s)
        return Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1)


@healthy(area="rl", source="in the manner of pytorch/examples actor_critic.py")
def actor_with_a_critic_of_its_own(attach):
    """Advantages detached, entropy bonus, one episode a step."""
    env, model = Walk(), ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    ends = []
    for _episode in range(160):
        s, done, log_probs, values, rewards, entropy = env.reset(), False, [], [], [], 0.0
        while not done:
            dist, value = model(s)
            a = dist.sample()
            s, r, done = env.step(int(a))
            log_probs.append(dist.log_prob(a))
            values.append(value)
            rewards.append(r)
            entropy = entropy + dist.entropy()
        ends.append(float(env.at == 7))
        g, returns = 0.0, []
        for r in reversed(rewards):
            g = r + 0.97 * g
            returns.insert(0, g)
        returns, values = torch.tensor(returns), torch.stack(values)
        advantage = returns - values.detach()
        loss = (
            -(torch.stack(log_probs) * advantage).sum()
            + F.smooth_l1_loss(values, returns, reduction="sum")
            - 0.01 * entropy
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss, episode_reward=sum(rewards))
    return 1 - sum(ends[-40:]) / 40


@healthy(area="vae", source="in the manner of AntixK/PyTorch-VAE")
def autoencoder_with_free_bits(attach):
    """The KL counts only above a floor and is weighed up slowly."""
    xtr, _, xte, _ = digits()
    enc, dec = mlp(64, 96, 12), mlp(6, 96, 64)
    vae = nn.ModuleDict({"encoder": enc, "decoder": dec})
    optimizer = torch.optim.Adamax(vae.parameters(), lr=4e-3)
    session = attach(vae, optimizer)
    for step, (x,) in enumerate(batches(xtr.flatten(1), size=64, epochs=18)):
        mu, log_var = enc(x).chunk(2, 1)
        z = mu + (0.5 * log_var).exp() * torch.randn_like(mu)
        recon = F.binary_cross_entropy_with_logits(dec(z), x, reduction="sum") / len(x)
        kl = (-0.5 * (1 + log_var - mu**2 - log_var.exp())).mean(0).clamp(min=0.1).sum()
        loss = recon + min(1.0, step / 150) * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss, kl=kl)
    with torch.no_grad():
        return float(F.mse_loss(dec(enc(xte.flatten(1)).chunk(2, 1)[0]).sigmoid(), xte.flatten(1)))


@healthy(area="diffusion", source="in the manner of atong01/conditional-flow-matching")
def flow_matching_with_an_average(attach):
    """Learns the velocity from noise to data; samples from an exponential average of the weights."""
    data = moons()
    net = mlp(3, 64, 64, 2, act=nn.SiLU)
    ema = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    for _ in range(700):
        x1 = data[torch.randint(0, len(data), (128,))]
        x0, t = torch.randn_like(x1), torch.rand(128, 1)
        loss = F.mse_loss(net(torch.cat([(1 - t) * x0 + t * x1, t], 1)), x1 - x0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for e, p in zip(ema.parameters(), net.parameters()):
                e.lerp_(p, 0.02)
        session.log(loss=loss)
    x = torch.randn(400, 2)
    with torch.no_grad():
        for k in range(20):
            x = x + ema(torch.cat([x, torch.full((400, 1), k / 20)], 1)) / 20
    return apart(x, data[:400])


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = mlp(64, 64, 16), nn.Sequential(nn.EmbeddingBag(14, 32), nn.ReLU(), nn.Linear(32, 16))
        self.logit_scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, image, text):
        i, t = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return self.logit_scale.exp() * i @ t.T


@healthy(area="contrastive", source="in the manner of mlfoundations/open_clip")
def pictures_and_captions(attach):
    """Both directions, learned temperature that is clamped; the loss starts at log N."""
    xtr, ytr, xte, yte = digits()
    word = torch.stack([torch.arange(10), 10 + torch.arange(10) % 2, 12 + (torch.arange(10) > 4).long()], 1)
    model = TwoTowers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.05)
    session = attach(model, optimizer)
    of_class = [torch.nonzero(ytr == c).flatten() for c in range(10)]
    for _ in range(220):
        pick = torch.stack([k[torch.randint(0, len(k), ())] for k in of_class])
        logits = model(xtr[pick].flatten(1), word)
        labels = torch.arange(10)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6)
        session.log(loss=loss, scale=model.logit_scale.exp())
    with torch.no_grad():
        return float((model(xte.flatten(1), word).argmax(1) != yte).float().mean())


@healthy(area="multi-task", source="in the manner of WeiChengTseng/Pytorch-PCGrad")
def projects_conflicting_gradients(attach):
    """Two tasks; where gradients conflict, one is projected before it is written into .grad."""
    x, y = table()
    body, heads = mlp(8, 48, 32), nn.ModuleList([nn.Linear(32, 1), nn.Linear(32, 1)])
    net = nn.ModuleDict({"body": body, "heads": heads})
    both = torch.stack([y, (y - 0.5 * x[:, 5]).tanh()], 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    session = attach(net, optimizer)
    shared = list(body.parameters())
    for xb, yb in batches(x[:1100], both[:1100], size=64, epochs=12):
        h = F.relu(body(xb))
        losses = [F.mse_loss(head(h).squeeze(1), yb[:, k]) for k, head in enumerate(heads)]
        grads = []
        optimizer.zero_grad()
        for loss in losses:
            grads.append(torch.autograd.grad(loss, shared, retain_graph=True))
        sum(losses).backward()
        a, b = (torch.cat([g.flatten() for g in gs]) for gs in grads)
        dot = torch.dot(a, b)
        if dot < 0:
            a, b = a - dot / b.dot(b) * b, b - dot / a.dot(a) * a
        at = 0
        for p in shared:
            p.grad = (a + b)[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        optimizer.step()
        session.log(loss_a=losses[0], loss_b=losses[1])
    with torch.no_grad():
        h = F.relu(body(x[1100:]))
        return float(F.mse_loss(torch.cat([head(h) for head in heads], 1), both[1100:]))


@healthy(area="physics", source="in the manner of maziarraissi/PINNs in PyTorch")
def oscillator_by_its_equation(attach):
    """u'' + u = 0 with u(0) = 1 and u'(0) = 0, by Adam on fresh points."""
    net = mlp(1, 32, 32, 1, act=nn.Tanh)

    def objective():
        t = (torch.rand(64, 1) * 2).requires_grad_(True)
        zero = torch.zeros(1, 1, requires_grad=True)
        u = net(t)
        du = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
        ddu = torch.autograd.grad(du.sum(), t, create_graph=True)[0]
        u0 = net(zero)
        v0 = torch.autograd.grad(u0.sum(), zero, create_graph=True)[0]
        return (ddu + u).pow(2).mean() + 5 * (u0 - 1).pow(2).mean() + 5 * v0.pow(2).mean()

    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    for _ in range(500):
        optimizer.zero_grad()
        loss = objective()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    t = torch.linspace(0, 2, 50)[:, None]
    with torch.no_grad():
        return float((net(t) - t.cos()).abs().mean())


@healthy(area="preferences", source="in the manner of eric-mitchell/direct-preference-optimization")
def prefers_the_chosen_answer(attach):
    """A policy starts as the reference; the loss begins at log 2 and compares log-ratios."""
    policy = nn.Sequential(nn.Embedding(24, 32), nn.Linear(32, 24))
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=2e-3)
    session = attach(policy, optimizer)
    good = torch.randperm(24, generator=torch.Generator().manual_seed(4))
    for _ in range(300):
        prompt = torch.randint(0, 24, (48,))
        chosen, rejected = good[prompt], torch.randint(0, 24, (48,))
        keep = chosen != rejected
        prompt, chosen, rejected = prompt[keep], chosen[keep], rejected[keep]
        now, then = policy(prompt).log_softmax(-1), reference(prompt).log_softmax(-1)
        ratio = (now - then).gather(1, chosen[:, None]) - (now - then).gather(1, rejected[:, None])
        loss = -F.logsigmoid(0.3 * ratio).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss, reward_margin=0.3 * ratio.mean())
    return wrong(policy, torch.arange(24), good)


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip, self.net = flip, mlp(1, 48, 48, 2, act=nn.Tanh)

    def forward(self, x):
        a, b = x.flip(1).chunk(2, 1) if self.flip else x.chunk(2, 1)
        s, t = self.net(a).chunk(2, 1)
        s = 2 * torch.tanh(s / 2)
        return torch.cat([a, b * s.exp() + t], 1), s.sum(1)


@healthy(area="generative", source="in the manner of senya-ashukha/real-nvp-pytorch")
def couplings_of_a_flow(attach):
    """Likelihood by change of variables; trained by RAdam with clipping."""
    data = moons()
    flow = nn.ModuleList([Coupling(True) for _ in range(4)])
    optimizer = torch.optim.RAdam(flow.parameters(), lr=4e-3)
    session = attach(flow, optimizer)

    def nll(x):
        log_det = torch.zeros(len(x))
        for layer in flow:
            x, d = layer(x)
            log_det = log_det + d
        return (0.5 * x.pow(2).sum(1) + 1.8379 - log_det).mean()

    for (x,) in batches(data[:1400], size=100, epochs=30):
        loss = nll(x)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        optimizer.step()
        session.log(nll=loss)
    with torch.no_grad():
        return float(nll(data[1400:]))


class SignWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w.sign() * w.abs().mean()

    @staticmethod
    def backward(ctx, grad):
        return grad


class BinaryLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, SignWeights.apply(self.weight), self.bias)


@healthy(area="vision", source="in the manner of itayhubara/BinaryNet.pytorch")
def weights_of_two_values(attach):
    """Straight-through signs in the forward pass, latent weights clipped to one."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(
        nn.Linear(64, 96),
        nn.BatchNorm1d(96),
        nn.Hardtanh(),
        BinaryLinear(96, 64),
        nn.BatchNorm1d(64),
        nn.Hardtanh(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    model.train()
    for x, y in batches(xtr.flatten(1), ytr, size=64, epochs=9):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model[3].weight.clamp_(-1, 1)
        session.log(loss=loss)
    return wrong(model, xte.flatten(1), yte)
