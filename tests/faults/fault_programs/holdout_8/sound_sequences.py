"""Eighth hold-out: healthy programs on texts, series, graphs, tastes, equations and rewards."""

from __future__ import annotations

import copy
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, Normal
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR

from fault_programs.holdout_8.about import healthy
from fault_programs.holdout_8.matter import (
    Lift,
    draw,
    houses,
    pages,
    scans,
    sentences,
    shortfall,
    spans,
    tastes,
    utterances,
)


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


@healthy(area="graph", source="https://github.com/pytorch/examples/tree/main/gat")
def graph_attention(attach):
    """Dense attention with a mask over a small web, full batch."""
    x, edges, y = pages()
    n = len(x)
    adj = torch.eye(n, dtype=torch.bool)
    adj[edges[1], edges[0]] = adj[edges[0], edges[1]] = True

    class Layer(nn.Module):
        def __init__(self, a, b, heads):
            super().__init__()
            self.W = nn.Parameter(nn.init.xavier_normal_(torch.empty(a, b * heads)))
            self.left, self.right = (nn.Parameter(nn.init.xavier_normal_(torch.empty(heads, b))) for _ in range(2))
            self.heads = heads

        def forward(self, h):
            h = (h @ self.W).view(n, self.heads, -1)
            score = F.leaky_relu((h * self.left).sum(-1)[:, None] + (h * self.right).sum(-1)[None], 0.2)
            weight = score.masked_fill(~adj[..., None], -9e16).softmax(1)
            return torch.einsum("ijh,jhf->ihf", F.dropout(weight, 0.2, self.training), h)

    class GAT(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Layer(10, 8, 4), Layer(32, 4, 1)

        def forward(self, h):
            h = F.elu(self.first(h).flatten(1))
            return F.log_softmax(self.second(h).mean(1), 1)

    model = GAT()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    criterion = nn.NLLLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for _epoch in range(60):
        model.train()
        optimizer.zero_grad()
        loss = criterion(model(x)[:150], y[:150])
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    model.eval()
    with torch.no_grad():
        return float((model(x)[150:].argmax(1) != y[150:]).float().mean())


@healthy(area="graph", source="https://github.com/pyg-team/pytorch_geometric/blob/master/examples/link_pred.py")
def predicts_links(attach):
    """An encoder of nodes and a dot product for pairs, with new negatives at each epoch."""
    x, edges, _ = pages()
    edges = edges[:, torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(1))]
    train, test = edges[:, :1500], edges[:, 1500:]

    class SAGE(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.own, self.near = nn.Linear(a, b), nn.Linear(a, b, bias=False)

        def forward(self, h, e):
            total = torch.zeros_like(h).index_add(0, e[1], h[e[0]])
            degree = torch.zeros(len(h)).index_add(0, e[1], torch.ones(e.shape[1])).clamp(min=1)
            return self.own(h) + self.near(total / degree[:, None])

    model = nn.ModuleList([SAGE(10, 32), SAGE(32, 16)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = attach(model, optimizer)

    def encode():
        return model[1](F.relu(model[0](x, train)), train)

    def score(z, e):
        return (z[e[0]] * z[e[1]]).sum(1)

    for _epoch in range(100):
        negative = torch.randint(0, 300, (2, 1500))
        z = encode()
        logits = torch.cat([score(z, train), score(z, negative)])
        loss = F.binary_cross_entropy_with_logits(logits, torch.cat([torch.ones(1500), torch.zeros(1500)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        z = encode()
        good, bad = score(z, test), score(z, torch.randint(0, 300, (2, 400)))
        return float((good[:, None] < bad[None]).float().mean())


@healthy(area="recommender", source="https://github.com/hexiangnan/neural_collaborative_filtering")
def neural_collaborative_filtering(attach):
    """Two towers of embeddings and four negatives for each positive."""
    likes = tastes()
    model = nn.Module()
    model.user_gmf, model.item_gmf, model.user_mlp, model.item_mlp = (nn.Embedding(n, 8) for n in (120, 60, 120, 60))
    model.body, model.out = mlp(16, 16, 8), nn.Linear(16, 1)
    for table in (model.user_gmf, model.item_gmf, model.user_mlp, model.item_mlp):
        nn.init.normal_(table.weight, std=0.05)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)

    def rate(u, i):
        wide = model.user_gmf(u) * model.item_gmf(i)
        deep = F.relu(model.body(torch.cat([model.user_mlp(u), model.item_mlp(i)], 1)))
        return model.out(torch.cat([wide, deep], 1))[:, 0]

    liked = likes.nonzero()
    for step in range(250):
        u, i = liked[torch.randint(0, len(liked), (64,))].T
        u, i = torch.cat([u, u.repeat(4)]), torch.cat([i, torch.randint(0, 60, (256,))])
        loss = F.binary_cross_entropy_with_logits(rate(u, i), likes[u, i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        u, i = torch.arange(120).repeat_interleave(60), torch.arange(60).repeat(120)
        scores = rate(u, i).view(120, 60)
        good = scores[likes > 0].mean() - scores[likes == 0].mean()
    return float(torch.exp(-good))


@healthy(area="recommender", source="https://github.com/EthanRosenthal/torchmf")
def sparse_factors(attach):
    """Embeddings with sparse gradients and the optimizer for them."""
    made = torch.Generator().manual_seed(851)
    truth = torch.randn(80, 3, generator=made) @ torch.randn(3, 50, generator=made)
    users, items = nn.Embedding(80, 6, sparse=True), nn.Embedding(50, 6, sparse=True)
    nn.init.normal_(users.weight, std=0.3)
    nn.init.normal_(items.weight, std=0.3)
    model = nn.ModuleDict({"user_factors": users, "item_factors": items})
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=2e-2)
    session = attach(model, optimizer)
    for step in range(300):
        u, i = torch.randint(0, 80, (256,)), torch.randint(0, 50, (256,))
        loss = F.mse_loss((users(u) * items(i)).sum(1), truth[u, i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            session.log(mse=loss)
    with torch.no_grad():
        return float(F.mse_loss(users.weight @ items.weight.T, truth))


@healthy(area="language", source="https://github.com/Andras7/word2vec-pytorch")
def skip_gram(attach):
    """Two tables of vectors, of which the second starts at zero."""
    ids, sizes = sentences()
    left, right = ids[:, :-1].flatten(), ids[:, 1:].flatten()
    real = (left > 0) & (right > 0)
    left, right = left[real], right[real]

    class SkipGram(nn.Module):
        def __init__(self, words=20, width=16):
            super().__init__()
            self.u_embeddings, self.v_embeddings = nn.Embedding(words, width), nn.Embedding(words, width)
            nn.init.uniform_(self.u_embeddings.weight, -1 / width, 1 / width)
            nn.init.constant_(self.v_embeddings.weight, 0)

        def forward(self, u, v, negative):
            u, v, negative = self.u_embeddings(u), self.v_embeddings(v), self.v_embeddings(negative)
            good = -F.logsigmoid((u * v).sum(1).clamp(-10, 10))
            bad = -F.logsigmoid(-torch.einsum("bkd,bd->bk", negative, u).clamp(-10, 10)).sum(1)
            return (good + bad).mean()

    model = SkipGram()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    tail = []
    for step in range(250):
        pick = torch.randint(0, len(left), (128,))
        loss = model(left[pick], right[pick], torch.randint(2, 20, (128, 5)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        tail.append(float(loss.detach()))
    return sum(tail[-20:]) / 20 / tail[0]


@healthy(area="translation", source="https://github.com/spro/practical-pytorch")
def reverses_words_with_a_coin(attach):
    """A coin decides at each word whether the decoder reads its own."""

    class Seq2Seq(nn.Module):
        def __init__(self, words=12, width=64):
            super().__init__()
            self.embed = nn.Embedding(words, 24)
            self.encoder, self.decoder = nn.GRU(24, width, batch_first=True), nn.GRU(24, width, batch_first=True)
            self.out = nn.Linear(width, words)

        def forward(self, src, trg, ratio):
            _, h = self.encoder(self.embed(src))
            word, said = trg[:, :1], []
            for t in range(1, trg.shape[1]):
                out, h = self.decoder(self.embed(word), h)
                said.append(self.out(out[:, 0]))
                word = trg[:, t : t + 1] if random.random() < ratio else said[-1].argmax(1, keepdim=True)
            return torch.stack(said, 1)

    model = Seq2Seq()
    for p in model.parameters():
        nn.init.uniform_(p, -0.15, 0.15)
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    session = attach(model, optimizer)
    for step in range(220):
        src = torch.randint(1, 12, (64, 4))
        trg = torch.cat([torch.zeros(64, 1, dtype=torch.long), src.flip(1)], 1)
        loss = F.cross_entropy(model(src, trg, 0.6).flatten(0, 1), trg[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        session.log(loss=loss)
    src = torch.randint(1, 12, (200, 4))
    with torch.no_grad():
        said = model(src, torch.zeros(200, 5, dtype=torch.long), 0.0).argmax(2)
    return float((said != src.flip(1)).float().mean())


@healthy(area="language", source="https://github.com/codertimo/BERT-pytorch")
def masked_words(attach):
    """Fifteen in a hundred words are hidden; the rest carries no loss."""
    ids, sizes = sentences()
    words = 20

    class Bert(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.embed, self.pos = nn.Embedding(words + 1, width, padding_idx=0), nn.Embedding(12, width)
            self.layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.05, batch_first=True)
            self.bias = nn.Parameter(torch.zeros(words))

        def forward(self, x):
            h = self.layer(self.embed(x) + self.pos.weight, src_key_padding_mask=x == 0)
            return h @ self.embed.weight[:words].T + self.bias

    model = Bert()
    nn.init.normal_(model.embed.weight, std=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    warm = LinearLR(optimizer, 0.1, total_iters=20)
    scheduler = SequentialLR(optimizer, [warm, StepLR(optimizer, 100, 0.5)], [20])
    session = attach(model, optimizer)

    def hide(x, share):
        labels = x.clone()
        chosen = (torch.rand(x.shape) < share) & (x > 0)
        chosen[:, 2] = True
        labels[~chosen] = -100
        return x.masked_fill(chosen & (torch.rand(x.shape) < 0.9), words), labels

    first = None
    for (x,) in draw(ids[:600], size=40, epochs=14):
        masked, labels = hide(x, 0.15)
        loss = F.cross_entropy(model(masked).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        session.log(loss=loss)
        first = first or float(loss.detach())
    model.eval()
    with torch.no_grad():
        masked, labels = hide(ids[600:], 0.15)
        return float(F.cross_entropy(model(masked).flatten(0, 1), labels.flatten())) / first


@healthy(area="speech", source="https://github.com/SeanNaren/deepspeech.pytorch")
def spells_with_ctc(attach):
    """Frames to letters with the blank first, and lengths that differ."""
    made = torch.Generator().manual_seed(852)
    voice = torch.randn(6, 8, generator=made)

    def say(count):
        text = torch.randint(1, 6, (count, 3))
        rows, sizes = torch.zeros(count, 24, 8), torch.zeros(count, dtype=torch.long)
        for n in range(count):
            at = 0
            for letter in text[n].tolist():
                stay = random.randint(3, 6)
                rows[n, at : at + stay] = voice[letter]
                at += stay + 1
            sizes[n] = at
        return rows + 0.3 * torch.randn_like(rows), sizes, text

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.fc = nn.GRU(8, 32, batch_first=True, bidirectional=True), nn.Linear(64, 6)

        def forward(self, x):
            return self.fc(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    session = attach(model, optimizer, loss_fn=criterion)
    for step in range(130):
        x, sizes, text = say(24)
        loss = criterion(model(x), text, sizes, torch.full((24,), 3))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        session.log(loss=loss)
    x, sizes, text = say(100)
    with torch.no_grad():
        best = model(x).argmax(-1).T
    wrong = 0
    for path, size, want in zip(best, sizes.tolist(), text.tolist()):
        path = path[:size].tolist()
        said = [c for k, c in enumerate(path) if c and (k == 0 or c != path[k - 1])]
        wrong += said != want
    return wrong / 100


@healthy(area="speech", source="https://github.com/clovaai/voxceleb_trainer")
def prototypes_of_speakers(attach):
    """Packed utterances, and an angular loss with a learned scale."""
    x, sizes, who = utterances()

    class Speaker(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.fc = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 16)
            self.w, self.b = nn.Parameter(torch.tensor(10.0)), nn.Parameter(torch.tensor(-5.0))

        def forward(self, x, sizes):
            _, (h, _) = self.rnn(pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=False))
            return F.normalize(self.fc(h[-1]), dim=1)

    model = Speaker()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    for step in range(120):
        rows = torch.stack([torch.nonzero(who[:340] == k)[:, 0][torch.randint(0, 40, (6,))] for k in range(6)])
        z = model(x[rows.flatten()], sizes[rows.flatten()]).view(6, 6, 16)
        query, proto = z[:, 0], z[:, 1:].mean(1)
        cosine = F.cosine_similarity(query[:, None], proto[None], dim=2)
        loss = F.cross_entropy(cosine * model.w.clamp(min=1e-6) + model.b, torch.arange(6))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(nloss=loss)
    with torch.no_grad():
        z = model(x, sizes)
        proto = torch.stack([z[:340][who[:340] == k].mean(0) for k in range(6)])
        return float(((z[340:] @ proto.T).argmax(1) != who[340:]).float().mean())


@healthy(area="time series", source="https://github.com/ServiceNow/N-BEATS")
def doubly_residual_blocks(attach):
    """Blocks that explain the past away; the last one's backcast goes nowhere."""
    past, future = spans()
    centre = past.mean(1, keepdim=True)
    past, future = (past - centre) / 22, (future - centre) / 22

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
            self.backcast, self.forecast = nn.Linear(48, 24), nn.Linear(48, 6)

        def forward(self, x):
            h = self.fc(x)
            return self.backcast(h), self.forecast(h)

    class NBeats(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(3)])

        def forward(self, x):
            out = 0.0
            for block in self.blocks:
                back, ahead = block(x)
                x, out = x - back, out + ahead
            return out

    model = NBeats()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for step in range(250):
        pick = torch.randint(0, 1200, (64,))
        loss = F.l1_loss(model(past[pick]), future[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(mae=loss)
    with torch.no_grad():
        return float(F.l1_loss(model(past[1230:]), future[1230:]))


@healthy(area="time series", source="https://github.com/locuslab/TCN")
def dilated_convolutions(attach):
    """The adding problem with causal convolutions and weight norm."""

    class Chomp(nn.Module):
        def __init__(self, a, b, dilation):
            super().__init__()
            self.pad = 2 * dilation
            self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(a, b, 3, padding=self.pad, dilation=dilation))
            self.down = nn.Conv1d(a, b, 1) if a != b else nn.Identity()

        def forward(self, x):
            return F.relu(F.relu(self.conv(x)[:, :, : -self.pad]) + self.down(x))

    model = nn.Sequential(Chomp(2, 24, 1), Chomp(24, 24, 2), Chomp(24, 24, 4))
    head = nn.Linear(24, 1)
    both = nn.ModuleList([model, head])
    optimizer = torch.optim.Adam(both.parameters(), lr=4e-3)
    session = attach(both, optimizer)

    def data(count):
        x = torch.rand(count, 2, 14)
        x[:, 1] = 0
        rows = torch.arange(count)
        a, b = torch.randint(0, 7, (count,)), torch.randint(7, 14, (count,))
        x[rows, 1, a] = x[rows, 1, b] = 1
        return x, x[rows, 0, a] + x[rows, 0, b]

    for step in range(260):
        x, y = data(64)
        loss = F.mse_loss(head(model(x)[:, :, -1])[:, 0], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    x, y = data(300)
    with torch.no_grad():
        return float(F.mse_loss(head(model(x)[:, :, -1])[:, 0], y)) * 6


@healthy(area="meta-learning", source="https://github.com/dragen1860/MAML-Pytorch")
def learns_to_learn_sines(attach):
    """The gradient goes through the gradient."""
    model = mlp(1, 40, 40, 1, act=nn.Tanh)
    outer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, outer)
    names = [name for name, _ in model.named_parameters()]
    late = []
    for step in range(130):
        losses = []
        for task in range(4):
            phase, x = torch.rand(()) * 3.1, torch.rand(20, 1) * 6 - 3
            y = torch.sin(x + phase) + 1.0
            fast = dict(model.named_parameters())
            for inner in range(2):
                loss = F.mse_loss(torch.func.functional_call(model, fast, (x[:10],)), y[:10])
                grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: w - 0.05 * g for name, w, g in zip(names, fast.values(), grads)}
            losses.append(F.mse_loss(torch.func.functional_call(model, fast, (x[10:],)), y[10:]))
        meta_loss = torch.stack(losses).mean()
        outer.zero_grad()
        meta_loss.backward()
        outer.step()
        session.log(meta_loss=meta_loss)
        late.append(float(meta_loss.detach()))
    return sum(late[-20:]) / 20


@healthy(area="physics-informed", source="https://github.com/benmoseley/harmonic-oscillator-pinn")
def damped_oscillator(attach):
    """Boundary and equation with weights of a thousandth, in full batches."""
    pinn = mlp(1, 32, 32, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(pinn.parameters(), lr=5e-3)
    session = attach(pinn, optimizer)
    d, w0 = 1.0, 4.0
    t0 = torch.zeros(1, 1, requires_grad=True)
    t = torch.linspace(0, 1, 30).view(-1, 1).requires_grad_(True)
    for i in range(600):
        optimizer.zero_grad()
        u = pinn(t0)
        start = (u.squeeze() - 1) ** 2
        speed = torch.autograd.grad(u, t0, torch.ones_like(u), create_graph=True)[0].squeeze() ** 2
        u = pinn(t)
        du = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
        ddu = torch.autograd.grad(du, t, torch.ones_like(du), create_graph=True)[0]
        equation = torch.mean((ddu + 2 * d * du + w0**2 * u) ** 2)
        loss = start + 1e-1 * speed + 1e-2 * equation
        loss.backward()
        optimizer.step()
        if i % 20 == 0:
            session.log(loss=loss)
    w = (w0**2 - d**2) ** 0.5
    with torch.no_grad():
        true = torch.exp(-d * t) * (torch.cos(w * t) + d / w * torch.sin(w * t))
        return float((pinn(t) - true).abs().mean())


@healthy(area="reinforcement learning", source="https://github.com/seungeunrho/minimalRL")
def double_deep_q(attach):
    """A replay, a frozen copy that is loaded now and then, and chance that falls."""
    q, q_target = mlp(16, 64, 2), mlp(16, 64, 2)
    q_target.load_state_dict(q.state_dict())
    memory, env = deque(maxlen=3000), Lift()
    optimizer = torch.optim.Adam(q.parameters(), lr=3e-3)
    session = attach(q, optimizer)
    for episode in range(160):
        epsilon = max(0.05, 0.8 - episode / 150)
        s, done, score = env.reset(), False, 0.0
        while not done:
            with torch.no_grad():
                a = random.randint(0, 1) if random.random() < epsilon else int(q(s).argmax())
            s2, r, done = env.step(a)
            memory.append((s, torch.tensor(a), torch.tensor(r), s2, torch.tensor(float(env.at != env.goal))))
            s, score = s2, score + r
        if len(memory) < 150:
            continue
        for _ in range(6):
            s_, a_, r_, n_, go = (torch.stack(c) for c in zip(*random.sample(memory, 64)))
            with torch.no_grad():
                best = q(n_).argmax(1, keepdim=True)
                target = r_ + 0.95 * go * q_target(n_).gather(1, best)[:, 0]
            loss = F.smooth_l1_loss(q(s_).gather(1, a_[:, None])[:, 0], target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        session.log(loss=loss, score=score)
        if episode % 5 == 0:
            q_target.load_state_dict(q.state_dict())
    return shortfall(lambda seen: q(seen).argmax())


@healthy(area="reinforcement learning", source="https://github.com/pranz24/pytorch-soft-actor-critic")
def soft_actor_with_a_learned_temperature(attach):
    """Three optimizers, twin critics, and a temperature that looks for an entropy."""
    actor, critic1, critic2 = mlp(3, 48, 4), mlp(5, 64, 1), mlp(5, 64, 1)
    nets = nn.ModuleDict({"policy": actor, "q1": critic1, "q2": critic2})
    log_alpha = torch.zeros((), requires_grad=True)
    q_opt = torch.optim.Adam([*critic1.parameters(), *critic2.parameters()], lr=4e-3)
    p_opt = torch.optim.Adam(actor.parameters(), lr=3e-3)
    a_opt = torch.optim.Adam([log_alpha], lr=1e-2)
    session = attach(nets, p_opt)

    def act(s):
        mean, log_std = actor(s).chunk(2, 1)
        normal = Normal(mean, log_std.clamp(-4, 1).exp())
        raw = normal.rsample()
        a = torch.tanh(raw)
        return a, (normal.log_prob(raw) - torch.log(1 - a.pow(2) + 1e-6)).sum(1), torch.tanh(mean)

    def wish(s):
        return torch.stack([torch.sin(s[:, 0]), 0.5 * s[:, 1]], 1).clamp(-0.9, 0.9)

    for step in range(260):
        s = torch.randn(64, 3)
        with torch.no_grad():
            a = act(s)[0] if step > 30 else torch.rand(64, 2) * 2 - 1
            r = -(a - wish(s)).pow(2).sum(1)
        sa = torch.cat([s, a], 1)
        q_loss = F.mse_loss(critic1(sa)[:, 0], r) + F.mse_loss(critic2(sa)[:, 0], r)
        q_opt.zero_grad()
        q_loss.backward()
        q_opt.step()
        a, log_pi, _ = act(s)
        sa = torch.cat([s, a], 1)
        policy_loss = (log_alpha.exp().detach() * log_pi - torch.min(critic1(sa), critic2(sa))[:, 0]).mean()
        p_opt.zero_grad()
        policy_loss.backward()
        p_opt.step()
        alpha_loss = -(log_alpha * (log_pi - 2).detach()).mean()
        a_opt.zero_grad()
        alpha_loss.backward()
        a_opt.step()
        session.log(q_loss=q_loss, policy_loss=policy_loss, alpha=log_alpha.exp())
    s = torch.randn(400, 3)
    with torch.no_grad():
        return float((act(s)[2] - wish(s)).pow(2).sum(1).mean())


@healthy(
    area="reinforcement learning",
    source="https://github.com/pytorch/examples/blob/main/reinforcement_learning/reinforce.py",
)
def reinforce_in_a_lift(attach):
    """One episode, one update; returns are standardised."""
    policy = mlp(16, 64, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    session = attach(policy, optimizer)
    env, running = Lift(), 0.0
    for update in range(150):
        policy_loss, total = [], 0.0
        log_probs, returns = [], []
        for _ in range(3):
            seen, done, rewards = env.reset(), False, []
            while not done:
                dist = Categorical(logits=policy(seen))
                action = dist.sample()
                log_probs.append(dist.log_prob(action))
                seen, reward, done = env.step(int(action))
                rewards.append(reward)
            back, G = [], 0.0
            for r in reversed(rewards):
                G = r + 0.9 * G
                back.insert(0, G)
            returns += back
            total += sum(rewards)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        for log_prob, G in zip(log_probs, returns):
            policy_loss.append(-log_prob * G)
        optimizer.zero_grad()
        loss = torch.stack(policy_loss).sum()
        loss.backward()
        optimizer.step()
        running = 0.05 * total / 3 + 0.95 * running
        session.log(running_reward=running)
    return shortfall(lambda seen: policy(seen).argmax())


@healthy(area="federated", source="https://github.com/AshwinRJ/Federated-Learning-PyTorch")
def federated_averaging(attach):
    """Clients with few digits each, started anew from the server's weights in every round."""
    xtr, ytr, xte, yte = scans()
    xtr, xte = xtr.flatten(1), xte.flatten(1)
    order = ytr.argsort()
    shards = [torch.cat([order[k::20], order[k + 10 :: 20]]) for k in range(10)]
    server = mlp(64, 48, 10)
    local = copy.deepcopy(server)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.2)
    session = attach(local, optimizer)
    for _round in range(8):
        weights = []
        for user in random.sample(range(10), 5):
            local.load_state_dict(server.state_dict())
            for x, y in draw(xtr[shards[user]], ytr[shards[user]], size=20):
                optimizer.zero_grad()
                loss = F.cross_entropy(local(x), y)
                loss.backward()
                optimizer.step()
            weights.append(copy.deepcopy(local.state_dict()))
            session.log(loss=loss)
        server.load_state_dict({key: torch.stack([w[key] for w in weights]).mean(0) for key in weights[0]})
    with torch.no_grad():
        return float((server(xte).argmax(1) != yte).float().mean())


@healthy(area="regression", source="https://github.com/hardmaru/pytorch_notebooks")
def mixture_density(attach):
    """Several answers to one question: a likelihood of three normals."""
    x, y = houses()
    sign = torch.where(torch.rand(len(y), generator=torch.Generator().manual_seed(3)) < 0.5, 1.0, -1.0)
    y = sign * (1 + x[:, 0].tanh()) + 0.1 * y

    class MDN(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
            self.pi, self.mu, self.sigma = nn.Linear(32, 3), nn.Linear(32, 3), nn.Linear(32, 3)

        def forward(self, x):
            h = self.h(x)
            return self.pi(h).log_softmax(1), self.mu(h), self.sigma(h).exp()

    def nll(out, y):
        log_pi, mu, sigma = out
        return -torch.logsumexp(log_pi + Normal(mu, sigma).log_prob(y[:, None]), 1).mean()

    model = MDN()
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    session = attach(model, optimizer)
    for xb, yb in draw(x[:1000], y[:1000], size=50, epochs=28):
        loss = nll(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(nll=loss)
    with torch.no_grad():
        return float(nll(model(x[1000:]), y[1000:])) + 1.5
