"""Seventh hold-out: healthy programs after public examples, first half."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_7.about import healthy
from fault_programs.holdout_7.matter import (
    Corridor,
    batches,
    chunks,
    citations,
    energy_distance,
    error_rate,
    normal_adjacency,
    pictures,
    prose,
    regret,
    rings,
    table,
)


class Net(nn.Module):
    """The network of the MNIST example, smaller."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, 1)
        self.conv2 = nn.Conv2d(16, 32, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


@healthy(area="vision", source="https://github.com/pytorch/examples/tree/main/mnist")
def mnist_example(attach):
    """Adadelta, StepLR and nll_loss, with a test after every epoch."""
    xtr, ytr, xte, yte = pictures()
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    session = attach(model, optimizer)
    train_loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True)
    test_loader = DataLoader(TensorDataset(xte, yte), batch_size=200)
    for epoch in range(1, 6):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        model.eval()
        test_loss = 0.0
        with torch.no_grad():
            for data, target in test_loader:
                test_loss += F.nll_loss(model(data), target, reduction="sum").item()
        session.log(val_loss=test_loss / len(xte))
        session.epoch(epoch)
        scheduler.step()
    return error_rate(model, xte, yte)


class CausalSelfAttention(nn.Module):
    """Heads in one projection, as nanoGPT has them."""

    def __init__(self, dim, heads):
        super().__init__()
        self.c_attn, self.c_proj, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (m.view(b, t, self.heads, d // self.heads).transpose(1, 2) for m in self.c_attn(x).split(d, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, d))


class GPTBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(dim), CausalSelfAttention(dim, heads)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Tied embeddings, scaled residual projections."""

    def __init__(self, vocab=24, dim=32, layers=2, block_size=24):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(block_size, dim)
        self.h = nn.ModuleList([GPTBlock(dim, 4) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss

    def configure_optimizers(self, weight_decay, lr):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


@healthy(area="language", source="https://github.com/karpathy/nanoGPT/blob/master/train.py")
def nano_gpt_with_tied_words(attach):
    """Warm-up, cosine by hand, accumulation, clipping, evaluation every so often."""
    text = prose()
    model = GPT()
    optimizer = model.configure_optimizers(0.1, 6e-3)
    session = attach(model, optimizer)
    max_iters, warmup = 120, 10

    def get_lr(it):
        if it < warmup:
            return 6e-3 * (it + 1) / warmup
        ratio = (it - warmup) / (max_iters - warmup)
        return 6e-4 + 0.5 * (1 + math.cos(math.pi * ratio)) * (6e-3 - 6e-4)

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        ids = torch.stack([text[a : a + 21] for a in range(5000, 5900, 15)])
        loss = model(ids[:, :-1], ids[:, 1:])[1]
        model.train()
        return loss.item()

    stream = chunks(text[:5000], 20, 12, 2 * max_iters)
    for it in range(max_iters):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it)
        for _micro in range(2):
            ids = next(stream)
            _, loss = model(ids[:, :-1], ids[:, 1:])
            (loss / 2).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        session.log(loss=loss)
        if it % 40 == 39:
            session.log(val_loss=estimate_loss())
    return estimate_loss()


@healthy(
    area="reinforcement learning", source="https://pytorch.org/tutorials/intermediate/reinforcement_q_learning.html"
)
def dqn_tutorial(attach):
    """A replay memory, a soft target and value clipping of gradients."""
    env = Corridor()
    make = lambda: nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 2))
    policy_net, target_net = make(), make()
    target_net.load_state_dict(policy_net.state_dict())
    optimizer = torch.optim.AdamW(policy_net.parameters(), lr=3e-3, amsgrad=True)
    session = attach(policy_net, optimizer)
    memory, steps = [], 0

    def select_action(state):
        eps = 0.05 + 0.85 * math.exp(-steps / 150)
        if torch.rand(()) < eps:
            return int(torch.randint(2, ()))
        with torch.no_grad():
            return int(policy_net(state).argmax())

    def optimize_model():
        if len(memory) < 32:
            return
        picks = [memory[int(i)] for i in torch.randint(len(memory), (32,))]
        state = torch.stack([p[0] for p in picks])
        action = torch.tensor([p[1] for p in picks])
        reward = torch.tensor([p[2] for p in picks])
        alive = torch.tensor([p[3] is not None for p in picks])
        following = torch.stack([p[3] for p in picks if p[3] is not None])
        values = policy_net(state).gather(1, action[:, None])
        next_values = torch.zeros(32)
        with torch.no_grad():
            next_values[alive] = target_net(following).max(1).values
        loss = nn.SmoothL1Loss()(values, (reward + 0.95 * next_values).unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
        optimizer.step()
        session.log(loss=loss)

    for _episode in range(50):
        state, done = env.reset(), False
        while not done:
            action = select_action(state)
            after, reward, done = env.step(action)
            steps += 1
            memory.append((state, action, reward, None if env.at == 6 else after))
            state = after
            optimize_model()
            target, source = target_net.state_dict(), policy_net.state_dict()
            for key in source:
                target[key] = source[key] * 0.02 + target[key] * 0.98
            target_net.load_state_dict(target)
    return regret(policy_net)


class Agent(nn.Module):
    """Two networks with orthogonal starts, as in CleanRL."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(self.layer(7, 32), nn.Tanh(), self.layer(32, 1, 1.0))
        self.actor = nn.Sequential(self.layer(7, 32), nn.Tanh(), self.layer(32, 2, 0.01))

    @staticmethod
    def layer(inside, outside, std=2**0.5):
        layer = nn.Linear(inside, outside)
        nn.init.orthogonal_(layer.weight, std)
        nn.init.constant_(layer.bias, 0.0)
        return layer

    def get_action_and_value(self, x, action=None):
        dist = Categorical(logits=self.actor(x))
        action = dist.sample() if action is None else action
        return action, dist.log_prob(action), dist.entropy(), self.critic(x).squeeze(-1)


@healthy(area="reinforcement learning", source="https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/ppo.py")
def ppo_in_one_file(attach):
    """GAE, clipped objective and values, annealed rate, eps of 1e-5."""
    env, agent = Corridor(), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=4e-3, eps=1e-5)
    session = attach(agent, optimizer)
    obs, updates = env.reset(), 14
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = (1 - update / updates) * 4e-3
        rows, done = [], False
        for _step in range(96):
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(obs)
            after, reward, done = env.step(int(action))
            rows.append((obs, action, logprob, torch.tensor(reward), torch.tensor(float(done)), value))
            obs = env.reset() if done else after
        s, a, old, r, d, v = (torch.stack([row[k] for row in rows]) for k in range(6))
        with torch.no_grad():
            following, last = agent.get_action_and_value(obs)[3], 0.0
            advantages = torch.zeros(96)
            for t in reversed(range(96)):
                delta = r[t] + 0.95 * following * (1 - d[t]) - v[t]
                last = delta + 0.95 * 0.95 * (1 - d[t]) * last
                advantages[t], following = last, v[t]
            returns = advantages + v
        for _epoch in range(3):
            for pick in torch.randperm(96).split(24):
                _, new, entropy, value = agent.get_action_and_value(s[pick], a[pick])
                ratio = (new - old[pick]).exp()
                adv = (advantages[pick] - advantages[pick].mean()) / (advantages[pick].std() + 1e-8)
                pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
                clipped = v[pick] + (value - v[pick]).clamp(-0.2, 0.2)
                v_loss = 0.5 * torch.max((value - returns[pick]) ** 2, (clipped - returns[pick]) ** 2).mean()
                loss = pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss
                optimizer.zero_grad()
                loss.backward()
                clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                session.log(pg_loss=pg_loss, v_loss=v_loss)
    return regret(agent.actor)


@healthy(area="gan", source="https://github.com/pytorch/examples/blob/main/dcgan/main.py")
def dcgan_example(attach):
    """Two optimizers, labels of ones and zeros, betas of 0.5."""
    data = rings()
    netG = nn.Sequential(
        nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    netD = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    session = attach(nn.ModuleDict({"netG": netG, "netD": netD}), [optimizerD, optimizerG])
    for (real,) in batches(data, size=100, epochs=25):
        netD.zero_grad()
        label = torch.full((100,), 1.0)
        errD_real = criterion(netD(real).view(-1), label)
        errD_real.backward()
        fake = netG(torch.randn(100, 6))
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()).view(-1), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake).view(-1), label)
        errG.backward()
        optimizerG.step()
        session.log(loss_d=errD_real + errD_fake, loss_g=errG)
    netG.eval()
    with torch.no_grad():
        return energy_distance(netG(torch.randn(500, 6)), data[:500])


class ExampleVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.fc3, self.fc4 = nn.Linear(8, 64), nn.Linear(64, 64)

    def forward(self, x):
        h1 = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


@healthy(area="vae", source="https://github.com/pytorch/examples/blob/main/vae/main.py")
def vae_example(attach):
    """BCE summed over pixels and samples, and KLD, with Adam at 1e-3."""
    xtr, _, xte, _ = pictures()
    xtr, xte = ((t.flatten(1) * 0.376 + 0.305).clamp(0, 1) for t in (xtr, xte))
    model = ExampleVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    session = attach(model, optimizer)

    def loss_function(recon_x, x, mu, logvar):
        BCE = F.binary_cross_entropy(recon_x, x, reduction="sum")
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return BCE + KLD

    for epoch in range(1, 13):
        model.train()
        train_loss = 0.0
        for (data,) in batches(xtr, size=64):
            optimizer.zero_grad()
            loss = loss_function(*((out := model(data))[:1]), data, *out[1:])
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
            session.log(loss=loss / len(data))
        session.epoch(epoch)
    model.eval()
    with torch.no_grad():
        return float(F.mse_loss(model(xte)[0], xte))


@healthy(area="diffusion", source="https://github.com/lucidrains/denoising-diffusion-pytorch")
def ddpm_with_a_moving_average(attach):
    """Noise prediction, sinusoidal times, a moving average of the weights to sample from."""
    data, steps = rings(), 40

    class Eps(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(18, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 2))

        def forward(self, x, t):
            angle = t[:, None].float() * torch.exp(-torch.arange(8) * 0.6)
            return self.mlp(torch.cat([x, angle.sin(), angle.cos()], 1))

    model = Eps()
    ema = copy.deepcopy(model).requires_grad_(False)
    betas = torch.linspace(1e-3, 0.25, steps)
    bar = (1 - betas).cumprod(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for (x,) in batches(data, size=100, epochs=40):
        t = torch.randint(0, steps, (len(x),))
        noise = torch.randn_like(x)
        x_t = bar[t, None].sqrt() * x + (1 - bar[t, None]).sqrt() * noise
        loss = F.mse_loss(model(x_t, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for e, p in zip(ema.parameters(), model.parameters()):
                e.lerp_(p, 0.02)
        session.log(loss=loss)
    with torch.no_grad():
        x = torch.randn(500, 2)
        for i in reversed(range(steps)):
            eps = ema(x, torch.full((500,), i))
            x = (x - betas[i] / (1 - bar[i]).sqrt() * eps) / (1 - betas[i]).sqrt()
            x = x + betas[i].sqrt() * torch.randn_like(x) * (i > 0)
    return energy_distance(x, data[:500])


@healthy(area="contrastive", source="https://github.com/sthalles/SimCLR/blob/master/simclr.py")
def simclr_example(attach):
    """Two views, the diagonal masked away, labels of zeros, a cosine schedule."""
    xtr, ytr, xte, yte = pictures()
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU())
    projector = nn.Sequential(nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 16))
    model = nn.Sequential(encoder, projector)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    scheduler = CosineAnnealingLR(optimizer, T_max=8)
    session = attach(model, optimizer)

    def view(x):
        return torch.roll(
            x, (int(torch.randint(-1, 2, ())), int(torch.randint(-1, 2, ()))), (2, 3)
        ) + 0.3 * torch.randn_like(x)

    def info_nce_loss(features):
        n = len(features) // 2
        labels = torch.cat([torch.arange(n)] * 2)
        labels = (labels[:, None] == labels[None, :]).float()
        features = F.normalize(features, dim=1)
        sim = features @ features.T
        off = ~torch.eye(2 * n, dtype=torch.bool)
        labels, sim = labels[off].view(2 * n, -1), sim[off].view(2 * n, -1)
        positives = sim[labels.bool()].view(2 * n, -1)
        negatives = sim[~labels.bool()].view(2 * n, -1)
        logits = torch.cat([positives, negatives], 1) / 0.2
        return logits, torch.zeros(2 * n, dtype=torch.long)

    for _epoch in range(8):
        for (x,) in batches(xtr, size=64):
            logits, labels = info_nce_loss(model(torch.cat([view(x), view(x)])))
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        scheduler.step()
    with torch.no_grad():
        near = torch.cdist(encoder(xte), encoder(xtr)).argmin(1)
    return float((ytr[near] != yte).float().mean())


@healthy(area="distillation", source="https://pytorch.org/tutorials/beginner/knowledge_distillation_tutorial.html")
def distillation_tutorial(attach):
    """A teacher in eval mode under no_grad, a soft and a hard term."""
    xtr, ytr, xte, yte = pictures()
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    opt = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for x, y in batches(xtr, ytr, size=64, epochs=6):
        opt.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        opt.step()
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(student.parameters(), lr=4e-3)
    session = attach(student, optimizer)
    T = 2.0
    teacher.eval()
    student.train()
    for inputs, labels in batches(xtr, ytr, size=64, epochs=10):
        optimizer.zero_grad()
        with torch.no_grad():
            teacher_logits = teacher(inputs)
        student_logits = student(inputs)
        soft_targets = F.softmax(teacher_logits / T, dim=-1)
        soft_prob = F.log_softmax(student_logits / T, dim=-1)
        soft_loss = torch.sum(soft_targets * (soft_targets.log() - soft_prob)) / len(inputs) * T**2
        loss = 0.25 * soft_loss + 0.75 * F.cross_entropy(student_logits, labels)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return error_rate(student, xte, yte)


@healthy(area="graphs", source="https://github.com/tkipf/pygcn/blob/master/pygcn/train.py")
def pygcn_train(attach):
    """The whole graph in each step, a mask of labelled nodes, weight decay and dropout."""
    x, adj, y = citations()
    adj = normal_adjacency(adj)
    idx_train, idx_val = torch.arange(120), torch.arange(160, 360)

    class GraphConvolution(nn.Module):
        def __init__(self, inside, outside):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(inside, outside))
            self.bias = nn.Parameter(torch.empty(outside))
            bound = 1.0 / math.sqrt(outside)
            nn.init.uniform_(self.weight, -bound, bound)
            nn.init.uniform_(self.bias, -bound, bound)

        def forward(self, x, adj):
            return adj @ (x @ self.weight) + self.bias

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.gc1, self.gc2 = GraphConvolution(12, 16), GraphConvolution(16, 5)

        def forward(self, x, adj):
            x = F.dropout(F.relu(self.gc1(x, adj)), 0.5, training=self.training)
            return F.log_softmax(self.gc2(x, adj), dim=1)

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    session = attach(model, optimizer)
    for epoch in range(90):
        model.train()
        optimizer.zero_grad()
        output = model(x, adj)
        loss = F.nll_loss(output[idx_train], y[idx_train])
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        if epoch % 10 == 9:
            model.eval()
            with torch.no_grad():
                session.log(val_loss=F.nll_loss(model(x, adj)[idx_val], y[idx_val]))
    model.eval()
    with torch.no_grad():
        return float((model(x, adj)[idx_val].argmax(1) != y[idx_val]).float().mean())


@healthy(area="language", source="https://github.com/pytorch/examples/blob/main/word_language_model/main.py")
def word_language_model(attach):
    """A hidden state carried over and detached, bptt, a hand-written SGD that anneals."""
    text = prose()
    batch, bptt = 20, 12

    class RNNModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.1)
            self.encoder = nn.Embedding(24, 48)
            self.rnn = nn.LSTM(48, 48)
            self.decoder = nn.Linear(48, 24)
            nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
            nn.init.zeros_(self.decoder.bias)

        def forward(self, x, hidden):
            out, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
            return F.log_softmax(self.decoder(self.drop(out)).view(-1, 24), dim=1), hidden

    def batchify(data, size):
        n = len(data) // size
        return data[: n * size].view(size, n).t().contiguous()

    train_data, val_data = batchify(text[:5000], batch), batchify(text[5000:], 10)
    model = RNNModel()
    criterion = nn.NLLLoss()
    session = attach(model, None)
    lr, best_val = 8.0, None

    def evaluate():
        model.eval()
        total, hidden = 0.0, None
        with torch.no_grad():
            for i in range(0, len(val_data) - 1, bptt):
                n = min(bptt, len(val_data) - 1 - i)
                out, hidden = model(val_data[i : i + n], hidden)
                total += n * criterion(out, val_data[i + 1 : i + 1 + n].view(-1)).item()
        return total / (len(val_data) - 1)

    for _epoch in range(9):
        model.train()
        hidden = None
        for i in range(0, len(train_data) - 1, bptt):
            n = min(bptt, len(train_data) - 1 - i)
            model.zero_grad()
            if hidden is not None:
                hidden = tuple(h.detach() for h in hidden)
            out, hidden = model(train_data[i : i + n], hidden)
            loss = criterion(out, train_data[i + 1 : i + 1 + n].view(-1))
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
            session.log(loss=loss)
        val_loss = evaluate()
        session.log(val_loss=val_loss)
        if best_val is None or val_loss < best_val:
            best_val = val_loss
        else:
            lr /= 4.0
    return best_val


@healthy(area="vision", source="https://pytorch.org/tutorials/beginner/transfer_learning_tutorial.html")
def transfer_learning_as_feature_extractor(attach):
    """A frozen body, a new head, the best weights kept by deepcopy."""
    xtr, ytr, xte, yte = pictures()
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 5))
    pre = torch.optim.Adam(body.parameters(), lr=2e-3)
    low = ytr < 5
    for x, y in batches(xtr[low], ytr[low], size=50, epochs=4):
        pre.zero_grad()
        F.cross_entropy(body(x), y).backward()
        pre.step()
    for param in body.parameters():
        param.requires_grad = False
    body[4] = nn.Linear(96, 10)
    optimizer = torch.optim.SGD(body[4].parameters(), lr=0.05, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=4, gamma=0.1)
    session = attach(body, optimizer)
    best, best_acc = copy.deepcopy(body.state_dict()), 0.0
    for _epoch in range(7):
        for phase in ("train", "val"):
            body.train(phase == "train")
            right, data = 0, batches(xtr, ytr, size=50) if phase == "train" else [(xte, yte)]
            for inputs, labels in data:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = body(inputs)
                    loss = F.cross_entropy(outputs, labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                        session.log(loss=loss)
                right += int((outputs.argmax(1) == labels).sum())
            if phase == "train":
                scheduler.step()
            elif right / len(yte) > best_acc:
                best_acc, best = right / len(yte), copy.deepcopy(body.state_dict())
    body.load_state_dict(best)
    return error_rate(body, xte, yte)


@healthy(
    area="regression",
    source="https://pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html",
)
def plateau_and_early_stopping(attach):
    """ReduceLROnPlateau on the validation loss, and a stop when it has not fallen for long."""
    x, y = table()
    model = nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=3)
    session = attach(model, optimizer)
    best, patience = float("inf"), 0
    for epoch in range(40):
        model.train()
        for xb, yb in batches(x[:800], y[:800], size=50):
            loss = F.mse_loss(model(xb).squeeze(1), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        model.eval()
        with torch.no_grad():
            val = F.mse_loss(model(x[800:1050]).squeeze(1), y[800:1050]).item()
        session.log(val_loss=val)
        session.epoch(epoch)
        scheduler.step(val)
        best, patience = (val, 0) if val < best - 1e-4 else (best, patience + 1)
        if patience >= 7:
            break
    with torch.no_grad():
        return float(F.mse_loss(model(x[1050:]).squeeze(1), y[1050:]))


@healthy(area="vision", source="https://github.com/kuangliu/pytorch-cifar/blob/master/main.py")
def small_resnet_with_one_cycle(attach):
    """Residual blocks, OneCycleLR by the batch, nesterov, label smoothing."""
    xtr, ytr, xte, yte = pictures()

    class BasicBlock(nn.Module):
        def __init__(self, inside, outside, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(outside)
            self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(outside)
            self.shortcut = nn.Sequential()
            if stride != 1 or inside != outside:
                self.shortcut = nn.Sequential(
                    nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
                )

        def forward(self, x):
            out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            return F.relu(out + self.shortcut(x))

    net = nn.Sequential(
        BasicBlock(1, 8, 1), BasicBlock(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=5 * 27)
    session = attach(net, optimizer, loss_fn=criterion)
    for x, y in batches(xtr, ytr, size=51, epochs=5):
        loss = criterion(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        session.log(loss=loss)
    return error_rate(net, xte, yte)


@healthy(
    area="language",
    source="https://github.com/huggingface/transformers/blob/main/examples/pytorch/language-modeling/run_clm_no_trainer.py",
)
def fine_tuning_with_linear_warm_up(attach):
    """Two groups of decay, a LambdaLR that warms up and falls to zero, labels shifted in the model."""
    text = prose()

    class CausalLM(nn.Module):
        def __init__(self):
            super().__init__()
            self.gpt = GPT()

        def forward(self, input_ids, labels):
            logits, _ = self.gpt(input_ids)
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    model = CausalLM()
    no_decay = ["bias", "ln"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(k in n for k in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(k in n for k in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-3)
    total, warm = 130, 13
    schedule = LambdaLR(optimizer, lambda s: s / warm if s < warm else max(0.0, (total - s) / (total - warm)))
    session = attach(model, optimizer)
    for ids in chunks(text[:5000], 20, 24, total):
        loss = model(ids, labels=ids)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        session.log(loss=loss)
    with torch.no_grad():
        ids = torch.stack([text[a : a + 21] for a in range(5000, 5900, 10)])
        return float(model(ids, ids))
