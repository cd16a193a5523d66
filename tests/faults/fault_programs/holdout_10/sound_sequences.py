"""Tenth hold-out: nothing is wrong here - text, series, graphs, tables and games."""

from __future__ import annotations

import math
import random
from collections import deque, namedtuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

from fault_programs.holdout_10.about import healthy
from fault_programs.holdout_10.material import Rail, missed


def markov_text(length, vocab=12, sure=0.85):
    rule = torch.randperm(vocab * vocab) % vocab
    text = [0, 1]
    while len(text) < length:
        known = int(rule[text[-2] * vocab + text[-1]])
        text.append(known if random.random() < sure else random.randrange(vocab))
    return torch.tensor(text)


@healthy(area="language", source="pytorch/examples: word_language_model/main.py")
def word_language_model_carries_its_state(attach):
    """The text in columns, a hidden state that goes on from batch to batch, tied weights, and a rate of 5."""
    vocab, bptt, width = 12, 10, 32
    text = markov_text(7000)

    def batchify(data, bsz):
        nbatch = len(data) // bsz
        return data[: nbatch * bsz].view(bsz, -1).t().contiguous()

    train, valid = batchify(text[:6000], 20), batchify(text[6000:], 10)

    class RNNModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.1)
            self.encoder = nn.Embedding(vocab, width)
            self.rnn = nn.LSTM(width, width, 1)
            self.decoder = nn.Linear(width, vocab)
            self.decoder.weight = self.encoder.weight
            nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
            nn.init.zeros_(self.decoder.bias)

        def forward(self, x, hidden):
            output, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
            return F.log_softmax(self.decoder(self.drop(output)).view(-1, vocab), dim=1), hidden

        def init_hidden(self, bsz):
            weight = next(self.parameters())
            return weight.new_zeros(1, bsz, width), weight.new_zeros(1, bsz, width)

    def repackage_hidden(h):
        return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)

    def get_batch(source, i):
        seq_len = min(bptt, len(source) - 1 - i)
        return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)

    model, lr = RNNModel(), 5.0
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    session = attach(model, optimizer)
    best_val_loss = None
    for epoch in range(14):
        model.train()
        hidden = model.init_hidden(20)
        for i in range(0, len(train) - 1, bptt):
            data, targets = get_batch(train, i)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = F.nll_loss(output, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        total, hidden = 0.0, model.init_hidden(10)
        with torch.no_grad():
            for i in range(0, len(valid) - 1, bptt):
                data, targets = get_batch(valid, i)
                output, hidden = model(data, hidden)
                total += len(data) * F.nll_loss(output, targets).item()
        val_loss = total / (len(valid) - 1)
        session.log(val_loss=val_loss)
        if not best_val_loss or val_loss < best_val_loss:
            best_val_loss = val_loss
        else:
            lr /= 4.0
            optimizer.param_groups[0]["lr"] = lr
    return best_val_loss


@healthy(area="time series", source="pytorch/examples: time_sequence_prediction/train.py")
def sines_with_lbfgs_in_double(attach):
    """LBFGS with a closure, everything in float64, and the whole data set in each of few steps."""
    start = np.random.randint(-80, 80, 24).reshape(24, 1)
    data = torch.from_numpy(np.sin((np.arange(90) + start) / 8.0).astype("float64"))
    inputs, target = data[3:, :-1], data[3:, 1:]
    test_input, test_target = data[:3, :-1], data[:3, 1:]

    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm1 = nn.LSTMCell(1, 16)
            self.linear = nn.Linear(16, 1)

        def forward(self, x, future=0):
            outputs = []
            h = torch.zeros(x.size(0), 16, dtype=torch.double)
            c = torch.zeros(x.size(0), 16, dtype=torch.double)
            for x_t in x.split(1, dim=1):
                h, c = self.lstm1(x_t, (h, c))
                output = self.linear(h)
                outputs += [output]
            for _ in range(future):
                h, c = self.lstm1(output, (h, c))
                output = self.linear(h)
                outputs += [output]
            return torch.cat(outputs, dim=1)

    seq = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.5, max_iter=8)
    session = attach(seq, optimizer)
    for step in range(8):

        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(inputs), target)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        session.log(loss=loss.item())
    with torch.no_grad():
        pred = seq(test_input, future=20)
        return criterion(pred[:, :-20], test_target).item()


@healthy(area="language", source="karpathy/nanoGPT: train.py and model.py")
def small_gpt_with_accumulation(attach):
    """Two groups of weight decay, a warm-up and a cosine by hand, four micro-batches, and a scaled start of the projections."""
    vocab, block, width = 12, 16, 32
    text = markov_text(6000)
    train_data, val_data = text[:5000], text[5000:]

    class CausalSelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

        def forward(self, x):
            b, t, c = x.size()
            q, k, v = (part.view(b, t, 4, c // 4).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.attn = nn.LayerNorm(width, bias=False), CausalSelfAttention()
            self.ln_2 = nn.LayerNorm(width, bias=False)
            self.c_fc, self.c_proj = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(block, width)
            self.h = nn.ModuleList(Block() for _ in range(2))
            self.ln_f = nn.LayerNorm(width, bias=False)
            self.lm_head = nn.Linear(width, vocab, bias=False)
            self.wte.weight = self.lm_head.weight
            for name, p in self.named_parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, 0.0, 0.06 / math.sqrt(4) if name.endswith("c_proj.weight") else 0.06)

        def forward(self, idx, targets):
            x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
            for layer in self.h:
                x = layer(x)
            logits = self.lm_head(self.ln_f(x))
            return F.cross_entropy(logits.view(-1, vocab), targets.view(-1))

    def get_batch(data, size=16):
        ix = torch.randint(len(data) - block, (size,))
        return torch.stack([data[i : i + block] for i in ix]), torch.stack([data[i + 1 : i + 1 + block] for i in ix])

    model = GPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-3, betas=(0.9, 0.95))
    session = attach(model, optimizer)
    max_iters, warmup_iters = 110, 10
    for it in range(max_iters):
        ratio = (it - warmup_iters) / (max_iters - warmup_iters)
        lr = (
            6e-3 * (it + 1) / (warmup_iters + 1)
            if it < warmup_iters
            else 6e-4 + 0.5 * (1 + math.cos(math.pi * ratio)) * 5.4e-3
        )
        for group in optimizer.param_groups:
            group["lr"] = lr
        for micro_step in range(4):
            loss = model(*get_batch(train_data)) / 4
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        session.log(loss=loss.item() * 4)
    model.eval()
    with torch.no_grad():
        return float(model(*get_batch(val_data, 200)))


@healthy(area="translation", source="bentrevett/pytorch-seq2seq: sequence to sequence with attention")
def seq2seq_with_attention_and_teacher_forcing(attach):
    """A coin decides for each batch whether the decoder sees the truth, padding is ignored in the loss, and the first step is left out."""
    vocab, width = 10, 32
    PAD, SOS, EOS = 0, 1, 2

    def make(count):
        src, trg = torch.zeros(count, 8, dtype=torch.long), torch.zeros(count, 9, dtype=torch.long)
        lengths = torch.randint(2, 7, (count,))
        for i, n in enumerate(lengths.tolist()):
            words = torch.randint(3, vocab, (n,))
            src[i, :n], src[i, n] = words, EOS
            trg[i, 0], trg[i, 1 : n + 1], trg[i, n + 1] = SOS, (words - 3 + 2) % 7 + 3, EOS
        return src, trg

    class Seq2Seq(nn.Module):
        def __init__(self):
            super().__init__()
            self.src_emb, self.trg_emb = nn.Embedding(vocab, 24), nn.Embedding(vocab, 24)
            self.encoder = nn.GRU(24, width, batch_first=True, bidirectional=True)
            self.bridge = nn.Linear(2 * width, width)
            self.attn, self.v = nn.Linear(3 * width, width), nn.Linear(width, 1, bias=False)
            self.cell = nn.GRUCell(24 + 2 * width, width)
            self.out = nn.Linear(width + 2 * width + 24, vocab)

        def forward(self, src, trg, teacher_forcing_ratio=0.5):
            states, hidden = self.encoder(self.src_emb(src))
            hidden = torch.tanh(self.bridge(torch.cat([hidden[0], hidden[1]], 1)))
            mask = src == PAD
            outputs, word = [], trg[:, 0]
            for t in range(1, trg.size(1)):
                query = hidden.unsqueeze(1).expand(-1, states.size(1), -1)
                energy = self.v(torch.tanh(self.attn(torch.cat([query, states], 2)))).squeeze(2)
                weights = F.softmax(energy.masked_fill(mask, -1e10), 1)
                context = (weights.unsqueeze(1) @ states).squeeze(1)
                emb = self.trg_emb(word)
                hidden = self.cell(torch.cat([emb, context], 1), hidden)
                logits = self.out(torch.cat([hidden, context, emb], 1))
                outputs.append(logits)
                word = trg[:, t] if random.random() < teacher_forcing_ratio else logits.argmax(1)
            return torch.stack(outputs, 1)

    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    session = attach(model, optimizer)
    src, trg = make(900)
    for epoch in range(5):
        model.train()
        for pick in torch.randperm(900).split(45):
            optimizer.zero_grad()
            output = model(src[pick], trg[pick])
            loss = criterion(output.reshape(-1, vocab), trg[pick][:, 1:].reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    src, trg = make(150)
    with torch.no_grad():
        said = model(src, trg, 0.0).argmax(-1)
    real = trg[:, 1:] != PAD
    return float((said != trg[:, 1:])[real].float().mean())


@healthy(area="graph", source="pyg-team/pytorch_geometric: examples/gcn.py")
def gcn_on_few_labelled_nodes(attach):
    """Few labelled nodes, the whole graph in each step, strong decay on the first layer only, and a training error of zero."""
    n, classes = 300, 4
    labels = torch.randint(0, classes, (n,))
    meet = torch.rand(n, n) < torch.where(labels[:, None] == labels[None], 0.08, 0.006)
    adj = (meet | meet.T).float().fill_diagonal_(1.0)
    root = adj.sum(1).rsqrt()
    adj = root[:, None] * adj * root[None]
    words = (torch.rand(n, 60) < 0.04 + 0.1 * F.one_hot(labels, classes).float().repeat_interleave(15, 1)).float()
    x = words / words.sum(1, keepdim=True).clamp(min=1)
    order = torch.randperm(n)
    train_mask, val_mask, test_mask = order[:32], order[32:100], order[100:]

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Linear(60, 16), nn.Linear(16, classes)

        def forward(self, x):
            x = F.dropout(x, p=0.5, training=self.training)
            x = (adj @ self.conv1(x)).relu()
            x = F.dropout(x, p=0.5, training=self.training)
            return adj @ self.conv2(x)

    model = GCN()
    optimizer = torch.optim.Adam(
        [
            {"params": model.conv1.parameters(), "weight_decay": 5e-4},
            {"params": model.conv2.parameters(), "weight_decay": 0},
        ],
        lr=0.01,
    )
    session = attach(model, optimizer)
    best_val_acc = test_acc = 0
    for epoch in range(1, 201):
        model.train()
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out[train_mask], labels[train_mask])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(x).argmax(dim=-1) == labels).float()
        val_acc, tmp_test_acc = float(right[val_mask].mean()), float(right[test_mask].mean())
        if val_acc > best_val_acc:
            best_val_acc, test_acc = val_acc, tmp_test_acc
        session.log(loss=loss.item(), val_acc=val_acc)
    return 1 - test_acc


@healthy(area="dqn", source="PyTorch tutorial: reinforcement learning (DQN), with a soft update of the target net")
def dqn_with_a_soft_target(attach):
    """AMSGrad, gradients cut at 100, a policy loss that grows as the values do, and a target net that follows slowly."""
    Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))
    env, gamma, tau = Rail(), 0.8, 0.02

    class DQN(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer1, self.layer2, self.layer3 = nn.Linear(2, 48), nn.Linear(48, 48), nn.Linear(48, 3)

        def forward(self, x):
            return self.layer3(F.relu(self.layer2(F.relu(self.layer1(x)))))

    policy_net, target_net = DQN(), DQN()
    target_net.load_state_dict(policy_net.state_dict())
    optimizer = torch.optim.AdamW(policy_net.parameters(), lr=2e-3, amsgrad=True)
    session = attach(policy_net, optimizer)
    memory, steps_done = deque(maxlen=2000), 0

    def select_action(state):
        nonlocal steps_done
        eps = 0.05 + 0.85 * math.exp(-steps_done / 200)
        steps_done += 1
        if random.random() > eps:
            with torch.no_grad():
                return policy_net(state).argmax().view(1)
        return torch.tensor([random.randrange(3)])

    def optimize_model():
        if len(memory) < 48:
            return
        batch = Transition(*zip(*random.sample(memory, 48)))
        non_final = torch.tensor([s is not None for s in batch.next_state])
        states, actions = torch.stack(batch.state), torch.stack(batch.action)
        values = policy_net(states).gather(1, actions)
        after = torch.zeros(48)
        with torch.no_grad():
            after[non_final] = target_net(torch.stack([s for s in batch.next_state if s is not None])).max(1).values
        loss = nn.SmoothL1Loss()(values, (after * gamma + torch.tensor(batch.reward)).unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy_net.parameters(), 100)
        optimizer.step()
        session.log(loss=loss.item())

    for i_episode in range(70):
        state, done = env.reset(), False
        while not done:
            action = select_action(state)
            observation, reward, done = env.step(int(action))
            next_state = None if done else observation
            memory.append(Transition(state, action, next_state, reward))
            state = observation
            optimize_model()
            target_state, policy_state = target_net.state_dict(), policy_net.state_dict()
            for key in policy_state:
                target_state[key] = policy_state[key] * tau + target_state[key] * (1 - tau)
            target_net.load_state_dict(target_state)
    return missed(lambda seen: policy_net(seen).argmax())


@healthy(area="actor-critic", source="pytorch/examples: reinforcement_learning/actor_critic.py")
def actor_critic_after_each_episode(attach):
    """Returns that are made to mean 0 and deviation 1, a policy loss around zero, and one step for each episode."""
    env, eps = Rail(), np.finfo(np.float32).eps.item()
    SavedAction = namedtuple("SavedAction", ["log_prob", "value"])

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.affine1 = nn.Linear(2, 64)
            self.action_head = nn.Linear(64, 3)
            self.value_head = nn.Linear(64, 1)
            self.saved_actions, self.rewards = [], []

        def forward(self, x):
            x = F.relu(self.affine1(x))
            return F.softmax(self.action_head(x), dim=-1), self.value_head(x)

    model = Policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)

    def finish_episode():
        R, returns, policy_losses, value_losses = 0, [], [], []
        for r in model.rewards[::-1]:
            R = r + 0.6 * R
            returns.insert(0, R)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + eps)
        for (log_prob, value), R in zip(model.saved_actions, returns):
            advantage = R - value.item()
            policy_losses.append(-log_prob * advantage)
            value_losses.append(F.smooth_l1_loss(value, R.view(1)))
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        del model.rewards[:]
        del model.saved_actions[:]
        return loss.item()

    running_reward = -5.0
    for i_episode in range(350):
        state, done, ep_reward = env.reset(), False, 0.0
        while not done:
            probs, value = model(state)
            m = Categorical(probs)
            action = m.sample()
            model.saved_actions.append(SavedAction(m.log_prob(action), value))
            state, reward, done = env.step(int(action))
            model.rewards.append(reward)
            ep_reward += reward
        running_reward = 0.05 * ep_reward + (1 - 0.05) * running_reward
        session.log(loss=finish_episode(), running_reward=running_reward)
    return missed(lambda seen: model(seen)[0].argmax())


@healthy(area="tabular", source="Kaggle notebooks on house prices with entity embeddings in PyTorch")
def house_prices_on_a_log_scale(attach):
    """Categories as embeddings, numbers through a batch norm, prices as logarithms, and an error counted in the logarithm."""
    n = 1400
    district, kind = torch.randint(0, 12, (n,)), torch.randint(0, 5, (n,))
    size, age = torch.rand(n) * 200 + 30, torch.rand(n) * 100
    worth = torch.linspace(-0.5, 0.6, 12)[torch.randperm(12)]
    log_price = 11 + 0.006 * size - 0.004 * age + worth[district] + 0.15 * kind * (size > 120) + 0.05 * torch.randn(n)
    price = log_price.exp()

    class TabularModel(nn.Module):
        def __init__(self, sizes=((12, 6), (5, 3)), n_cont=2):
            super().__init__()
            self.embeds = nn.ModuleList(nn.Embedding(a, b) for a, b in sizes)
            self.emb_drop, self.bn_cont = nn.Dropout(0.04), nn.BatchNorm1d(n_cont)
            self.layers = nn.Sequential(
                nn.Linear(11, 64), nn.ReLU(inplace=True), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.ReLU(inplace=True), nn.BatchNorm1d(32),
                nn.Linear(32, 1),
            )  # fmt: skip

        def forward(self, x_cat, x_cont):
            x = torch.cat([e(x_cat[:, i]) for i, e in enumerate(self.embeds)], 1)
            return self.layers(torch.cat([self.emb_drop(x), self.bn_cont(x_cont)], 1))

    cats, conts = torch.stack([district, kind], 1), torch.stack([size, age], 1)
    target = torch.log1p(price).unsqueeze(1)
    mean, std = target[:1100].mean(), target[:1100].std()
    model = TabularModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    batch, epochs = 64, 20
    sched = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=epochs * (1100 // batch))
    session = attach(model, optimizer)
    for epoch in range(epochs):
        model.train()
        order = torch.randperm(1100)
        for k in range(1100 // batch):
            pick = order[k * batch : (k + 1) * batch]
            loss = F.mse_loss(model(cats[pick], conts[pick]), (target[pick] - mean) / std)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sched.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            guess = model(cats[1100:], conts[1100:]) * std + mean
            rmsle = F.mse_loss(guess, target[1100:]).sqrt()
        session.log(val_rmsle=rmsle.item())
    return float(rmsle)
