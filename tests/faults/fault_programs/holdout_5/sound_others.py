"""Fifth hold-out: programs in which nothing is wrong: agents, makers, graphs, pairs and odd loops."""

from __future__ import annotations

import copy
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

from fault_programs.holdout_5.about import healthy
from fault_programs.holdout_5.materials import (
    Corridor,
    batches,
    citations,
    demand,
    digits,
    plant,
    ratings,
    ring,
    utterances,
    wrong,
)


@healthy(area="rl", source="github.com/pytorch/examples reinforcement_learning/reinforce.py")
def official_reinforce(attach):
    """One episode for each step; returns standardised; the loss tells nothing."""
    env = Corridor()

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.affine1, self.dropout, self.affine2 = nn.Linear(7, 64), nn.Dropout(0.2), nn.Linear(64, 2)

        def forward(self, x):
            return F.softmax(self.affine2(F.relu(self.dropout(self.affine1(x)))), dim=-1)

    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    session = attach(policy, optimizer)
    seen = []
    for _ in range(150):
        state, log_probs, rewards = env.reset(), [], []
        for _t in range(30):
            m = Categorical(policy(state))
            action = m.sample()
            log_probs.append(m.log_prob(action))
            state, reward, done = env.step(action.item())
            rewards.append(reward)
            if done:
                break
        returns, R = [], 0
        for r in rewards[::-1]:
            R = r + 0.99 * R
            returns.insert(0, R)
        returns = torch.tensor(returns)
        loss = -(torch.stack(log_probs) * returns).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(sum(rewards))
        session.log(reward=sum(rewards))
    return 0.9 - sum(seen[-30:]) / 30


def random_walk(steps, seed):
    walk, env = random.Random(seed), Corridor()
    state, rows = env.reset(), []
    for _ in range(steps):
        a = walk.randrange(2)
        after, r, _ = env.step(a)
        over = env.at in (0, 6)
        rows.append((state, a, r, after, float(over)))
        state = env.reset() if over or env.time >= 30 else after
    return rows


@healthy(area="rl", source="pytorch.org DQN tutorial: replay, soft target updates, clipped values of gradients")
def dqn_of_the_tutorial(attach):
    """Huber loss against a soft target network; gradients clipped by value."""
    memory = random_walk(1500, 4)
    make = lambda: nn.Sequential(nn.Linear(7, 48), nn.ReLU(), nn.Linear(48, 2))  # noqa: E731
    policy_net, target_net = make(), make()
    target_net.load_state_dict(policy_net.state_dict())
    optimizer = torch.optim.AdamW(policy_net.parameters(), lr=3e-3, amsgrad=True)
    session = attach({"policy": policy_net, "target": target_net}, optimizer)
    for _ in range(500):
        s, a, r, n, d = zip(*random.sample(memory, 32), strict=True)
        s, n, a = torch.stack(s), torch.stack(n), torch.tensor(a)
        with torch.no_grad():
            goal = torch.tensor(r) + 0.95 * (1 - torch.tensor(d)) * target_net(n).max(1).values
        loss = F.smooth_l1_loss(policy_net(s).gather(1, a[:, None])[:, 0], goal)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
        optimizer.step()
        mixed = {k: 0.05 * v + 0.95 * target_net.state_dict()[k] for k, v in policy_net.state_dict().items()}
        target_net.load_state_dict(mixed)
        session.log(loss=loss)
    with torch.no_grad():
        return float((policy_net(torch.eye(7)[1:6]).argmax(1) != 1).float().mean())


@healthy(area="rl", source="CleanRL-like PPO")
def ppo_in_small(attach):
    """Clipped surrogate, several epochs on the same rollouts, annealed rate, entropy bonus."""
    env = Corridor()
    body, actor, critic = nn.Sequential(nn.Linear(7, 32), nn.Tanh()), nn.Linear(32, 2), nn.Linear(32, 1)
    nn.init.orthogonal_(actor.weight, 0.01)
    agent = nn.ModuleDict({"body": body, "actor": actor, "critic": critic})
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3, eps=1e-5)
    session = attach(agent, optimizer)
    for update in range(30):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - update / 30)
        rows, rets, gained = [], [], []
        for _ in range(6):
            state, done, ep = env.reset(), False, []
            while not done:
                with torch.no_grad():
                    dist = Categorical(logits=actor(body(state)))
                a = dist.sample()
                after, r, done = env.step(int(a))
                ep.append((state, a, dist.log_prob(a), r))
                state = after
            total = 0.0
            back = []
            for *_, r in reversed(ep):
                total = r + 0.95 * total
                back.append(total)
            rets += back[::-1]
            rows += ep
            gained.append(sum(r for *_, r in ep))
        s, a, old = (
            torch.stack([t[0] for t in rows]),
            torch.stack([t[1] for t in rows]),
            torch.stack([t[2] for t in rows]),
        )
        rets = torch.tensor(rets)
        with torch.no_grad():
            adv = rets - critic(body(s))[:, 0]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        for _ in range(4):
            h = body(s)
            dist = Categorical(logits=actor(h))
            ratio = (dist.log_prob(a) - old).exp()
            policy = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            value = 0.5 * (critic(h)[:, 0] - rets).pow(2).mean()
            loss = policy + 0.5 * value - 0.01 * dist.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            session.log(policy_loss=policy, value_loss=value)
    return 0.9 - sum(gained) / 6


@healthy(area="gan", source="github.com/pytorch/examples dcgan, in small")
def gan_of_one_hill(attach):
    """Alternating steps, two optimizers; the losses oscillate and do not fall."""
    real = torch.tensor([1.0, -0.5]) + 0.5 * torch.randn(2000, 2)
    G = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())
    bce = nn.BCELoss()
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    session = attach({"netG": G, "netD": D}, [opt_g, opt_d])
    for (x,) in batches(real, size=64, epochs=20):
        D.zero_grad()
        err_real = bce(D(x), torch.ones(64, 1))
        err_real.backward()
        fake = G(torch.randn(64, 4))
        err_fake = bce(D(fake.detach()), torch.zeros(64, 1))
        err_fake.backward()
        opt_d.step()
        G.zero_grad()
        err_g = bce(D(fake), torch.ones(64, 1))
        err_g.backward()
        opt_g.step()
        session.log(loss_d=err_real + err_fake, loss_g=err_g)
    made = G(torch.randn(500, 4)).detach()
    return float((made.mean(0) - real.mean(0)).norm())


@healthy(area="gan", source="WGAN-GP reference code, in small")
def wasserstein_with_penalty(attach):
    """Three critic steps for one of the generator, gradient penalty through create_graph; losses are negative."""
    data = torch.tensor([0.5, 1.0]) + 0.4 * torch.randn(2000, 2)
    G = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    C = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    opt_g, opt_c = (torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.9)) for m in (G, C))
    session = attach({"G": G, "C": C}, [opt_g, opt_c])
    for k, (x,) in enumerate(batches(data, size=64, epochs=20)):
        fake = G(torch.randn(64, 2)).detach()
        eps = torch.rand(64, 1)
        mix = (eps * x + (1 - eps) * fake).requires_grad_(True)
        (grad,) = torch.autograd.grad(C(mix).sum(), mix, create_graph=True)
        loss_c = C(fake).mean() - C(x).mean() + ((grad.norm(2, 1) - 1) ** 2).mean()
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        if k % 3 == 0:
            loss_g = -C(G(torch.randn(64, 2))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            session.log(critic=loss_c, generator=loss_g)
    made = G(torch.randn(500, 2)).detach()
    return float((made.mean(0) - data.mean(0)).norm())


@healthy(area="vae", source="github.com/pytorch/examples vae")
def official_vae(attach):
    """Summed BCE and KL: a large loss by construction."""
    x, _, test, _ = digits()

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc21, self.fc22 = nn.Linear(64, 64), nn.Linear(64, 6), nn.Linear(64, 6)
            self.fc3, self.fc4 = nn.Linear(6, 64), nn.Linear(64, 64)

        def forward(self, x):
            h = F.relu(self.fc1(x.view(-1, 64)))
            mu, logvar = self.fc21(h), self.fc22(h)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for epoch in range(12):
        train_loss = 0
        for (data,) in batches(x, size=48):
            optimizer.zero_grad()
            recon, mu, logvar = model(data)
            loss = F.binary_cross_entropy(recon, data.view(-1, 64), reduction="sum")
            loss = loss - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
        session.log(train_loss=train_loss / len(x))
    with torch.no_grad():
        return float(F.mse_loss(model(test)[0], test.view(-1, 64)) / test.view(-1, 64).var(0).mean())


@healthy(area="diffusion", source="DDPM tutorials, in two dimensions")
def ddpm_of_a_ring(attach):
    """Noise prediction with an EMA of the weights for sampling."""
    data = ring()
    bars = (1 - torch.linspace(1e-3, 0.2, 40)).cumprod(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.t = nn.Embedding(40, 64)
            self.a, self.b, self.c = nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 2)

        def forward(self, x, t):
            return self.c(F.silu(self.b(F.silu(self.a(x) + self.t(t)))))

    net = Net()
    shadow = copy.deepcopy(net).requires_grad_(False)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    session = attach(net, opt)
    for (x,) in batches(data, size=100, epochs=25):
        t, eps = torch.randint(40, (100,)), torch.randn(100, 2)
        a = bars[t, None]
        loss = F.mse_loss(net(a.sqrt() * x + (1 - a).sqrt() * eps, t), eps)
        opt.zero_grad()
        loss.backward()
        opt.step()
        for s, p in zip(shadow.parameters(), net.parameters(), strict=True):
            s.lerp_(p.detach(), 0.02)
        session.log(loss=loss)
    with torch.no_grad():
        t, eps = torch.randint(40, (2000,)), torch.randn(2000, 2)
        a = bars[t, None]
        return float(F.mse_loss(shadow(a.sqrt() * data + (1 - a).sqrt() * eps, t), eps))


@healthy(area="gnn", source="github.com/tkipf/pygcn")
def kipf_gcn(attach):
    """Full-batch training on a graph, loss on a few labelled nodes, weight decay and dropout."""
    x, adj, y = citations()
    a = adj + torch.eye(len(adj))
    d = a.sum(1).rsqrt()
    a = d[:, None] * a * d[None]
    train = torch.arange(len(y)) % 5 == 0

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.gc1, self.gc2 = nn.Linear(12, 16), nn.Linear(16, 4)

        def forward(self, h):
            h = F.dropout(F.relu(a @ self.gc1(h)), 0.5, training=self.training)
            return F.log_softmax(a @ self.gc2(h), dim=1)

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    session = attach(model, optimizer)
    for _ in range(150):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(x)[train], y[train])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            val = F.nll_loss(model(x)[~train], y[~train])
        session.log(loss_train=loss, loss_val=val)
    with torch.no_grad():
        return float((model(x).argmax(1) != y)[~train].float().mean())


@healthy(area="language", source="pytorch.org seq2seq translation tutorial")
def seq2seq_with_teacher_forcing(attach):
    """Encoder and decoder with an optimizer each; teacher forcing by a coin."""
    g = torch.Generator().manual_seed(12)
    src = torch.randint(2, 12, (1000, 5), generator=g)
    tgt = src.flip(1)
    embed, enc = nn.Embedding(12, 24), nn.GRU(24, 48, batch_first=True)
    cell, out = nn.GRUCell(24, 48), nn.Linear(48, 12)
    encoder, decoder = nn.ModuleDict({"embed": embed, "enc": enc}), nn.ModuleDict({"cell": cell, "out": out})
    opts = [torch.optim.Adam(m.parameters(), lr=5e-3) for m in (encoder, decoder)]
    session = attach({"encoder": encoder, "decoder": decoder}, opts)

    def decode(s, truth=None):
        _, h = enc(embed(s))
        h, word, scores = h[0], torch.ones(len(s), dtype=torch.long), []
        for t in range(5):
            h = cell(embed(word), h)
            scores.append(out(h))
            word = scores[-1].argmax(1) if truth is None else truth[:, t]
        return torch.stack(scores, 1)

    for s, t in batches(src[200:], tgt[200:], size=40, epochs=20):
        for opt in opts:
            opt.zero_grad()
        scores = decode(s, t if random.random() < 0.7 else None)
        loss = F.cross_entropy(scores.flatten(0, 1), t.flatten())
        loss.backward()
        for opt in opts:
            opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float((decode(src[:200]).argmax(-1) != tgt[:200]).float().mean())


@healthy(area="contrastive", source="SimCLR (NT-Xent), in small")
def nt_xent(attach):
    """Two views, the diagonal masked with a large negative number, no labels."""
    x, *_ = digits()
    f, g = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)), nn.Linear(32, 16)
    model = nn.Sequential(f, nn.ReLU(), g)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, opt)

    def view(t):
        return t + 0.1 * torch.randn_like(t)

    def loss_of(xb):
        z = F.normalize(model(torch.cat([view(xb), view(xb)])), dim=1)
        n = len(xb)
        sim = (z @ z.t() / 0.2).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
        return F.cross_entropy(sim, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))

    for (xb,) in batches(x, size=64, epochs=15):
        loss = loss_of(xb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(loss_of(x[:64]))


@healthy(area="metric learning", source="triplet loss with in-batch hard mining, several repositories")
def hard_triplets(attach):
    """Batch-hard mining: the loss hovers near the margin while the embedding gets better."""
    x, y, tx, ty = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 16))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, opt)
    for xb, yb in batches(x, y, size=80, epochs=15):
        d = torch.cdist(net(xb), net(xb))
        same = yb[:, None] == yb[None]
        far = d.masked_fill(~same, 0).max(1).values
        near = d.masked_fill(same, 1e6).min(1).values
        loss = F.relu(far - near + 0.5).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float((y[torch.cdist(net(tx), net(x)).argmin(1)] != ty).float().mean())


@healthy(area="recommender", source="implicit matrix factorisation with BPR and sparse embeddings")
def bpr_with_sparse_gradients(attach):
    """Sparse embeddings and SparseAdam; most rows have no gradient in any one step."""
    u, i, liked = ratings()
    users, items = nn.Embedding(80, 12, sparse=True), nn.Embedding(60, 12, sparse=True)
    for e in (users, items):
        nn.init.normal_(e.weight, std=0.1)
    model = nn.ModuleDict({"user_table": users, "item_table": items})
    opt = torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)
    session = attach(model, opt)
    for a, b in batches(u, i, size=64, epochs=15):
        c = torch.randint(0, 60, (64,))
        gap = (users(a) * (items(b) - items(c))).sum(1)
        loss = -F.logsigmoid(gap).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        s = users.weight @ items.weight.t()
        return (
            1
            - float((s[liked].mean() > s[~liked].mean()).float())
            + float((s[liked] < s[~liked].mean()).float().mean())
        )


@healthy(area="speech", source="pytorch.org CTC documentation, in small")
def ctc_of_letters(attach):
    """CTC with log-probabilities; the network says only blanks for a while before it learns."""
    frames, letters = utterances()
    rnn, fc = nn.LSTM(10, 48, batch_first=True, bidirectional=True), nn.Linear(96, 7)
    net = nn.ModuleDict({"rnn": rnn, "fc": fc})
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, opt)

    def logp(x):
        return fc(rnn(x)[0]).log_softmax(-1).transpose(0, 1)

    for x, y in batches(frames[100:], letters[100:], size=25, epochs=12):
        loss = F.ctc_loss(logp(x), y, torch.full((25,), 24), torch.full((25,), 4))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.ctc_loss(logp(frames[:100]), letters[:100], torch.full((100,), 24), torch.full((100,), 4)))


@healthy(area="time series", source="stateful truncated backpropagation, as in the word language model example")
def carries_its_state_on(attach):
    """The series is cut in order and the state is carried over and detached, as it should be."""
    series = demand()[:1920].view(16, 120)
    rnn, fc = nn.LSTM(1, 32, batch_first=True), nn.Linear(32, 1)
    net = nn.ModuleDict({"rnn": rnn, "fc": fc})
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, opt)
    for epoch in range(25):
        state, last = None, []
        for k in range(0, 119, 17):
            x, y = series[:, k : k + 17], series[:, k + 1 : k + 18]
            state = None if state is None else tuple(s.detach() for s in state)
            seen, state = rnn(x.unsqueeze(-1), state)
            loss = F.mse_loss(fc(seen).squeeze(-1), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.25)
            opt.step()
            last.append(loss.item())
            session.log(loss=loss)
    return sum(last) / len(last)


@healthy(
    area="fine-tuning",
    source="pytorch.org transfer learning tutorial: frozen features, new head, then all at a low rate",
)
def head_first_then_all(attach):
    """Features frozen on purpose; after some epochs they are freed with a lower rate."""
    x, y, tx, ty = digits()
    body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    head = nn.Linear(256, 10)
    for p in body.parameters():
        p.requires_grad = False
    model = nn.Sequential(body, head)
    opt = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    session = attach(model, opt)
    for epoch in range(8):
        if epoch == 4:
            for p in body.parameters():
                p.requires_grad = True
            opt.add_param_group({"params": body.parameters(), "lr": 0.01})
        for xb, yb in batches(x, y, size=40):
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            session.log(loss=loss)
    return wrong(model, tx, ty)


@healthy(area="regression", source="quantile regression (pinball loss) examples")
def pinball_of_three_quantiles(attach):
    """Three outputs against one target, broadcast on purpose."""
    x, y = plant()
    q = torch.tensor([0.1, 0.5, 0.9])
    net = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 3))
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    session = attach(net, opt)
    for xb, yb in batches(x[300:], y[300:], size=40, epochs=15):
        err = yb.unsqueeze(1) - net(xb)
        loss = torch.max(q * err, (q - 1) * err).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(pinball=loss)
    with torch.no_grad():
        return float(F.mse_loss(net(x[:300])[:, 1], y[:300]))
