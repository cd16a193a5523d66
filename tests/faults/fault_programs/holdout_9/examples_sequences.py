"""Ninth hold-out: healthy programs after public examples, with sequences, agents, graphs and tables."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_9.about import healthy
from fault_programs.holdout_9.matter import (
    Corridor,
    digits,
    friends,
    heard,
    houses,
    keywords,
    lost,
    slips,
    speech,
    sums,
    waves,
    wrong_share,
)


@healthy(area="rl", source="in the style of pytorch/examples reinforce", well=0.1)
def reinforce_on_a_corridor(attach):
    """Returns are normalised per batch of episodes; the loss says nothing, the reward does."""
    cells = 6
    policy = nn.Sequential(nn.Linear(cells, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    eps = np.finfo(np.float32).eps.item()
    session = attach(policy, optimizer)
    env = Corridor(cells, limit=20)
    for episode in range(80):
        log_probs, returns, paid = [], [], 0.0
        for _ in range(3):
            state, done, late, rewards = env.reset(0), False, False, []
            while not (done or late):
                m = torch.distributions.Categorical(logits=policy(torch.from_numpy(state.copy())))
                action = m.sample()
                log_probs.append(m.log_prob(action))
                state, reward, done, late = env.step(action.item())
                rewards.append(reward - 0.05)
            R, these = 0.0, []
            for r in rewards[::-1]:
                R = r + 0.95 * R
                these.insert(0, R)
            returns += these
            paid += sum(rewards)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + eps)
        optimizer.zero_grad()
        policy_loss = torch.stack([-p * R for p, R in zip(log_probs, returns, strict=True)]).sum()
        policy_loss.backward()
        optimizer.step()
        session.log(episode=episode, reward=paid / 3, policy_loss=policy_loss)
    policy.eval()
    with torch.no_grad():
        return lost(lambda s: int(policy(torch.from_numpy(s.copy())).argmax()), cells)


@healthy(area="rl", source="in the style of the DQN tutorial, with double Q and soft updates", well=0.05)
def double_dqn_with_a_soft_target(attach):
    """A replay of copies, epsilon that decays, and a target that follows slowly."""
    cells = 8
    policy_net = nn.Sequential(nn.Linear(cells, 64), nn.ReLU(), nn.Linear(64, 2))
    target_net = copy.deepcopy(policy_net)
    optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
    session = attach({"policy_net": policy_net, "target_net": target_net}, optimizer)
    env, memory, steps_done = Corridor(cells), [], 0
    state = env.reset().copy()
    for steps_done in range(1200):
        threshold = 0.1 + 0.9 * math.exp(-steps_done / 300)
        with torch.no_grad():
            action = (
                random.randint(0, 1) if random.random() < threshold else int(policy_net(torch.tensor(state)).argmax())
            )
        after, reward, done, late = env.step(action)
        memory.append((state, action, reward, after.copy(), float(done)))
        state = env.reset().copy() if done or late else after.copy()
        if len(memory) < 64 or steps_done % 2:
            continue
        s, a, r, s2, d = zip(*random.sample(memory, 48), strict=True)
        s, s2 = torch.tensor(np.stack(s)), torch.tensor(np.stack(s2))
        a, r, d = torch.tensor(a)[:, None], torch.tensor(r), torch.tensor(d)
        q = policy_net(s).gather(1, a)[:, 0]
        with torch.no_grad():
            best = policy_net(s2).argmax(1, keepdim=True)
            wanted = r + 0.9 * (1 - d) * target_net(s2).gather(1, best)[:, 0]
        loss = F.smooth_l1_loss(q, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy_net.parameters(), 100)
        optimizer.step()
        slow, fast = target_net.state_dict(), policy_net.state_dict()
        target_net.load_state_dict({k: 0.03 * fast[k] + 0.97 * slow[k] for k in fast})
        session.log(td=loss, q=q.mean())
    with torch.no_grad():
        true = 0.9 ** torch.arange(6, -1, -1).float()
        return float((policy_net(torch.eye(8)[:7]).max(1)[0] - true).abs().mean())


@healthy(area="translation", source="in the style of bentrevett/pytorch-seq2seq with packed sequences", well=0.3)
def says_it_backwards(attach):
    """Encoder and decoder with padding, ignore_index, teacher forcing half of the time and clipping."""
    made = torch.Generator().manual_seed(111)
    pad, sos, eos, vocab = 0, 1, 2, 12
    pairs = []
    for _ in range(700):
        text = torch.randint(3, vocab, (int(torch.randint(2, 6, (), generator=made)),), generator=made)
        pairs.append((text, torch.cat([torch.tensor([sos]), text.flip(0), torch.tensor([eos])])))

    def collate(batch):
        src, trg = zip(*batch, strict=True)
        lengths = torch.tensor([len(s) for s in src])
        return pad_sequence(src, padding_value=pad), lengths, pad_sequence(trg, padding_value=pad)

    class Seq2Seq(nn.Module):
        def __init__(self, width=64):
            super().__init__()
            self.emb = nn.Embedding(vocab, width, padding_idx=pad)
            self.encoder = nn.GRU(width, width)
            self.cell = nn.GRU(width, width)
            self.fc_out = nn.Linear(width, vocab)

        def forward(self, src, lengths, trg, teacher_forcing_ratio=0.5):
            packed = pack_padded_sequence(self.emb(src), lengths, enforce_sorted=False)
            _, hidden = self.encoder(packed)
            token, outputs = trg[0], []
            for t in range(1, len(trg)):
                out, hidden = self.cell(self.emb(token)[None], hidden)
                logits = self.fc_out(out[0])
                outputs.append(logits)
                token = trg[t] if random.random() < teacher_forcing_ratio else logits.argmax(1)
            return torch.stack(outputs)

    model = Seq2Seq()
    for name, param in model.named_parameters():
        if "encoder" in name or "cell" in name:
            nn.init.uniform_(param, -0.15, 0.15)
    criterion = nn.CrossEntropyLoss(ignore_index=pad)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for _epoch in range(14):
        model.train()
        for src, lengths, trg in DataLoader(pairs[:600], batch_size=40, shuffle=True, collate_fn=collate):
            optimizer.zero_grad()
            output = model(src, lengths, trg)
            loss = criterion(output.reshape(-1, vocab), trg[1:].reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1)
            optimizer.step()
            session.log(loss=loss, ppl=min(float(loss.exp()), 1e4))
    model.eval()
    src, lengths, trg = collate(pairs[600:])
    with torch.no_grad():
        said = model(src, lengths, trg, teacher_forcing_ratio=0).argmax(2)
    counts = trg[1:] != pad
    return float((said != trg[1:])[counts].float().mean())


@healthy(
    area="language",
    source="in the style of nanoGPT: tied weights, warm-up and cosine, decay for matrices only",
    well=0.3,
)
def tiny_gpt_with_tied_weights(attach):
    """A causal transformer on sums of the last two tokens; the first token of each line cannot be guessed."""
    ids, vocab = sums(400), 7

    class Block(nn.Module):
        def __init__(self, width, heads=4):
            super().__init__()
            self.heads = heads
            self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            B, T, C = x.shape
            q, k, v = (p.view(B, T, self.heads, -1).transpose(1, 2) for p in self.c_attn(self.ln1(x)).chunk(3, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
            return x + self.mlp(self.ln2(x))

    class GPT(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(16, width)
            self.h = nn.Sequential(Block(width), Block(width))
            self.ln_f = nn.LayerNorm(width)
            self.lm_head = nn.Linear(width, vocab, bias=False)
            self.lm_head.weight = self.wte.weight

        def forward(self, idx):
            return self.lm_head(self.ln_f(self.h(self.wte(idx) + self.wpe(torch.arange(idx.shape[1])))))

    model = GPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-3, betas=(0.9, 0.95))
    max_iters, warmup = 300, 20
    session = attach(model, optimizer)
    for it in range(max_iters):
        ratio = (
            (it + 1) / warmup
            if it < warmup
            else 0.1 + 0.45 * (1 + math.cos(math.pi * (it - warmup) / (max_iters - warmup)))
        )
        for group in optimizer.param_groups:
            group["lr"] = 6e-3 * ratio
        batch = ids[torch.randint(0, 320, (16,))]
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, vocab), batch[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        session.log(loss=loss, lr=6e-3 * ratio)
    with torch.no_grad():
        return float((model(ids[320:, :-1])[:, 1:].argmax(2) != ids[320:, 2:]).float().mean())


@healthy(
    area="language", source="in the style of text classification with packed LSTM and gradient accumulation", well=0.05
)
def accumulates_over_small_batches(attach):
    """Four small batches a step, the loss divided by four, and a step for the rest at the end."""
    texts, labels = keywords(600)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(30, 24, padding_idx=0)
            self.lstm = nn.LSTM(24, 24, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(48, 4)

        def forward(self, text, lengths):
            packed = pack_padded_sequence(self.emb(text), lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, padding_value=-1e9)
            return self.fc(out.max(1).values)

    def collate(batch):
        t, y = zip(*batch, strict=True)
        return pad_sequence(t, batch_first=True), torch.tensor([len(one) for one in t]), torch.stack(y)

    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    accumulation_steps = 4
    session = attach(model, optimizer)
    loader = DataLoader(
        list(zip(texts[:500], labels[:500], strict=True)), batch_size=10, shuffle=True, collate_fn=collate
    )
    for _epoch in range(5):
        optimizer.zero_grad()
        for i, (text, lengths, y) in enumerate(loader):
            loss = F.cross_entropy(model(text, lengths), y) / accumulation_steps
            loss.backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                session.log(loss=loss * accumulation_steps)
    text, lengths, y = collate(list(zip(texts[500:], labels[500:], strict=True)))
    with torch.no_grad():
        return float((model(text, lengths).argmax(1) != y).float().mean())


@healthy(area="speech", source="in the style of small CTC recognisers", well=0.1)
def ctc_on_short_tracks(attach):
    """Log-probabilities with time first, a blank, OneCycleLR and clipping."""
    x, y = speech(260, seed=112)

    class Recogniser(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(nn.Conv1d(8, 32, 3, padding=1), nn.BatchNorm1d(32), nn.ReLU())
            self.gru = nn.GRU(32, 24, batch_first=True, bidirectional=True)
            self.out = nn.Linear(48, 6)

        def forward(self, x):
            h = self.conv(x.transpose(1, 2)).transpose(1, 2)
            return self.out(self.gru(h)[0]).log_softmax(2).transpose(0, 1)

    model = Recogniser()
    ctc_loss = nn.CTCLoss(blank=0, zero_infinity=True)
    epochs = 10
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, steps_per_epoch=10, epochs=epochs)
    session = attach(model, optimizer)
    for _epoch in range(epochs):
        model.train()
        for rows in torch.randperm(200).split(20):
            log_probs = model(x[rows])
            full, said = torch.full((len(rows),), 16), torch.full((len(rows),), 4)
            loss = ctc_loss(log_probs, y[rows], full, said)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            session.log(ctc=loss, lr=scheduler.get_last_lr()[0])
    model.eval()
    with torch.no_grad():
        return slips(heard(model(x[200:])), y[200:])


@healthy(area="graphs", source="in the style of tkipf/pygcn", well=0.35)
def few_labels_on_a_graph(attach):
    """Every step sees the whole graph; only the nodes of the training mask reach the loss."""
    features, adj, labels = friends(signal=3.5, seed=113)
    order = torch.randperm(240, generator=torch.Generator().manual_seed(1))
    idx_train, idx_test = order[:100], order[100:]

    class GCN(nn.Module):
        def __init__(self, nhid=16):
            super().__init__()
            self.gc1, self.gc2 = nn.Linear(40, nhid), nn.Linear(nhid, 4)

        def forward(self, x, adj):
            x = F.dropout(F.relu(adj @ self.gc1(x)), 0.5, training=self.training)
            return F.log_softmax(adj @ self.gc2(x), dim=1)

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    session = attach(model, optimizer)
    for epoch in range(120):
        model.train()
        optimizer.zero_grad()
        output = model(features, adj)
        loss_train = F.nll_loss(output[idx_train], labels[idx_train])
        loss_train.backward()
        optimizer.step()
        session.log(epoch=epoch, loss_train=loss_train)
    model.eval()
    with torch.no_grad():
        return float((model(features, adj)[idx_test].argmax(1) != labels[idx_test]).float().mean())


@healthy(
    area="multitask", source="in the style of multi-task uncertainty weighting (Kendall) re-implementations", well=0.05
)
def weighs_two_tasks_by_their_uncertainty(attach):
    """Learned log variances weigh the tasks; the total may become negative."""
    x, kind, following = waves(600, 20, seed=114)

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
            self.kind, self.following = nn.Linear(32, 4), nn.Linear(32, 1)
            self.log_vars = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            h = self.trunk(x)
            return self.kind(h), self.following(h)[:, 0]

    model = Wrapper()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for _epoch in range(25):
        for rows in torch.randperm(480).split(24):
            logits, value = model(x[rows])
            first, second = F.cross_entropy(logits, kind[rows]), F.mse_loss(value, following[rows])
            precision = torch.exp(-model.log_vars)
            loss = precision[0] * first + precision[1] * second + model.log_vars.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss, kind=first, following=second)
    with torch.no_grad():
        logits, value = model(x[480:])
        wrong = (logits.argmax(1) != kind[480:]).float().mean()
        return float(wrong + F.mse_loss(value, following[480:]))


@healthy(area="physics", source="in the style of physics-informed nets trained with LBFGS", well=0.01)
def lbfgs_on_a_differential_equation(attach):
    """u' = -u + sin(x) with u(0) = 1; each step evaluates its closure many times."""
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    x = torch.linspace(0, 4, 40)[:, None].requires_grad_(True)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=10, history_size=20, line_search_fn="strong_wolfe")
    session = attach(net, optimizer)

    def closure():
        optimizer.zero_grad()
        u = net(x)
        slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        loss = ((slope + u - torch.sin(x)) ** 2).mean() + (net(torch.zeros(1, 1)) - 1).pow(2).mean()
        loss.backward()
        return loss

    for step in range(25):
        loss = optimizer.step(closure)
        session.log(step=step, loss=loss)
    with torch.no_grad():
        t = torch.linspace(0, 4, 100)[:, None]
        true = 0.5 * (torch.sin(t) - torch.cos(t)) + 1.5 * torch.exp(-t)
        return float((net(t) - true).abs().mean())


@healthy(area="tabular", source="in the style of curriculum learning examples", well=0.05)
def easy_samples_first(attach):
    """The training set grows from easy to hard, so the loss rises whenever harder samples join."""
    x, y = houses(800, seed=115)
    mean, std = x[:640].mean(0), x[:640].std(0)
    x = (x - mean) / std
    hard = (x[:640, 1] * x[:640, 2]).abs().argsort()
    model = nn.Sequential(nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(30):
        count = int(640 * min(1.0, 0.3 + 0.05 * epoch))
        pool = hard[:count]
        for rows in pool[torch.randperm(count)].split(32):
            loss = F.mse_loss(model(x[rows]).squeeze(-1), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        session.log(epoch=epoch, samples=count)
    with torch.no_grad():
        return float(F.mse_loss(model(x[640:]).squeeze(-1), y[640:]) / y[640:].var())


@healthy(area="time series", source="in the style of stateful recurrent nets with truncated backpropagation", well=0.03)
def carries_its_state_along_one_long_series(attach):
    """The hidden state goes on from chunk to chunk and is detached; chunks are in order on purpose."""
    made = torch.Generator().manual_seed(116)
    t = torch.arange(1601) * 0.15
    rows = torch.stack([torch.sin(t * f) + 0.4 * torch.sin(2.7 * t * f) for f in (0.7, 1.0, 1.3, 1.6)])
    rows = rows + 0.03 * torch.randn(4, 1601, generator=made)

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(1, 24, batch_first=True), nn.Linear(24, 1)

        def forward(self, x, state):
            out, state = self.rnn(x, state)
            return self.head(out), state

    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    session = attach(model, optimizer)
    for _epoch in range(5):
        state = None
        for start in range(0, 1200, 25):
            part = rows[:, start : start + 26, None]
            if state is not None:
                state = tuple(s.detach() for s in state)
            pred, state = model(part[:, :-1], state)
            loss = F.mse_loss(pred, part[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        pred, _ = model(rows[:, 1200:1600, None], None)
        return float(F.mse_loss(pred[:, 20:, 0], rows[:, 1221:1601]) / rows.var())


@healthy(area="recommender", source="in the style of matrix factorisation with sparse embeddings", well=0.05)
def factors_with_sparse_embeddings(attach):
    """SparseAdam for two tables; each step touches a few rows only."""
    made = torch.Generator().manual_seed(117)
    users, items = torch.randn(120, 3, generator=made), torch.randn(80, 3, generator=made)
    u, i = torch.randint(0, 120, (6000,), generator=made), torch.randint(0, 80, (6000,), generator=made)
    rating = (users[u] * items[i]).sum(1) + 0.1 * torch.randn(6000, generator=made)

    class MatrixFactorization(nn.Module):
        def __init__(self, factors=6):
            super().__init__()
            self.user, self.item = nn.Embedding(120, factors, sparse=True), nn.Embedding(80, factors, sparse=True)
            nn.init.normal_(self.user.weight, std=0.3)
            nn.init.normal_(self.item.weight, std=0.3)

        def forward(self, u, i):
            return (self.user(u) * self.item(i)).sum(1)

    model = MatrixFactorization()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=2e-2)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(u[:5000], i[:5000], rating[:5000]), batch_size=100, shuffle=True)
    for _epoch in range(8):
        for a, b, r in loader:
            loss = F.mse_loss(model(a, b), r)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(model(u[5000:], i[5000:]), rating[5000:]) / rating.var())


@healthy(area="vision", source="in the style of the SWA tutorial with a pass that renews the batch norms", well=0.05)
def averages_the_last_weights(attach):
    """A constant rate at the end, AveragedModel and update_bn."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64, bias=False),
        nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    swa_model = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    swa_scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=50, shuffle=True)
    for epoch in range(12):
        model.train()
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        if epoch >= 8:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
    torch.optim.swa_utils.update_bn(loader, swa_model)
    return wrong_share(swa_model, xte, yte)
