"""Fifteenth hold-out: healthy programs as one finds them in tutorials and examples."""

from __future__ import annotations

import copy
import math
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from fault_programs.holdout_15.about import healthy
from fault_programs.holdout_15.material import Tightrope, digits, falls_short, loans, motions, sentences, wrong


@healthy(area="classification", source="in the style of the quickstart tutorial", deceptive=False)
def quickstart_with_train_and_test_loops(attach):
    """Functions train_loop() and test_loop(), SGD with momentum."""
    xtr, ytr, xte, yte = digits()
    train_dataloader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True)
    test_dataloader = DataLoader(TensorDataset(xte, yte), batch_size=128)

    class NeuralNetwork(nn.Module):
        def __init__(self):
            super().__init__()
            self.flatten = nn.Flatten()
            self.linear_relu_stack = nn.Sequential(
                nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)
            )

        def forward(self, x):
            return self.linear_relu_stack(self.flatten(x))

    model = NeuralNetwork()
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session = attach(model, optimizer)

    def train_loop(dataloader):
        model.train()
        for X, y in dataloader:
            loss = loss_fn(model(X), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss.item())

    def test_loop(dataloader):
        model.eval()
        test_loss, correct = 0.0, 0
        with torch.no_grad():
            for X, y in dataloader:
                pred = model(X)
                test_loss += loss_fn(pred, y).item() / len(dataloader)
                correct += (pred.argmax(1) == y).sum().item()
        session.log(test_loss=test_loss)
        return 1 - correct / len(dataloader.dataset)

    for t in range(10):
        train_loop(train_dataloader)
        error = test_loop(test_dataloader)
    return error


@healthy(area="transformer", source="in the style of small GPTs with one training file", deceptive=False)
def small_gpt_learns_to_add(attach):
    """Pre-norm blocks, a causal mask, warm-up and cosine, decay for matrices only, clipping at one."""
    vocab, block_size, n_embd = 12, 16, 48

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
            self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
            self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = (p.view(b, t, 4, c // 4).transpose(1, 2) for p in self.c_attn(self.ln_1(x)).split(c, 2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
            return x + self.mlp(self.ln_2(x))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd)
            self.h = nn.ModuleList(Block() for _ in range(2))
            self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab, bias=False)

        def forward(self, idx):
            x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
            for block in self.h:
                x = block(x)
            return self.lm_head(self.ln_f(x))

    def get_batch(size):
        ids = [torch.randint(0, vocab, (size,)) for _ in range(2)]
        for _ in range(block_size - 1):
            ids.append((ids[-1] + ids[-2]) % vocab)
        ids = torch.stack(ids, 1)
        return ids[:, :-1], ids[:, 1:]

    model = GPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-3, betas=(0.9, 0.95)
    )
    session = attach(model, optimizer)
    total, warmup = 200, 20
    for it in range(total):
        done = (it - warmup) / (total - warmup)
        lr = 3e-3 * (it + 1) / warmup if it < warmup else 3e-4 + 1.35e-3 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = lr
        x, y = get_batch(32)
        loss = F.cross_entropy(model(x).view(-1, vocab), y.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        session.log(loss=loss.item(), lr=lr)
    x, y = get_batch(100)
    model.eval()
    with torch.no_grad():
        return float((model(x)[:, 2:].argmax(2) != y[:, 2:]).float().mean())


@healthy(
    area="residual net", source="in the style of examples that train a small ResNet with OneCycleLR", deceptive=False
)
def residual_digits_in_one_cycle(attach):
    """Residual blocks, small shifts as augmentation, OneCycleLR stepped with every batch."""
    xtr, ytr, xte, yte = digits()

    class BasicBlock(nn.Module):
        def __init__(self, a, b, stride):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
            self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
            self.short = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

        def forward(self, x):
            out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            return F.relu(out + self.short(x))

    net = nn.Sequential(
        BasicBlock(1, 12, 1), BasicBlock(12, 24, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10)
    )
    epochs, steps = 6, 24
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=epochs * steps)
    session = attach(net, optimizer)
    for epoch in range(epochs):
        net.train()
        for i in torch.randperm(1200).split(50):
            x = F.pad(xtr[i], (1, 1, 1, 1))
            r, c = torch.randint(0, 3, (2,)).tolist()
            loss = F.cross_entropy(net(x[:, :, r : r + 8, c : c + 8]), ytr[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            session.log(loss=loss.item(), lr=scheduler.get_last_lr()[0])
        net.eval()
        with torch.no_grad():
            session.log(val_loss=F.cross_entropy(net(xte), yte).item())
    return wrong(net, xte, yte)


@healthy(area="time series", source="in the style of tutorials that forecast a series with an LSTM", deceptive=False)
def passengers_are_forecast_by_an_lstm(attach):
    """Windows of a series with trend and season, a scaler fitted on the training part, a split in time."""
    month = torch.arange(400.0)
    series = 100 + 0.4 * month + 25 * torch.sin(month * 2 * math.pi / 12) + 3 * torch.randn(400)
    mean, std = series[:300].mean(), series[:300].std()

    class Windows(Dataset):
        def __init__(self, part, lookback=24):
            self.part, self.lookback = (part - mean) / std, lookback

        def __len__(self):
            return len(self.part) - self.lookback

        def __getitem__(self, i):
            return self.part[i : i + self.lookback, None], self.part[i + self.lookback]

    class AirModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(1, 32, batch_first=True)
            self.linear = nn.Linear(32, 1)

        def forward(self, x):
            return self.linear(self.lstm(x)[0][:, -1]).squeeze(1) + x[:, -12, 0]

    model = AirModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    loader = DataLoader(Windows(series[:300]), batch_size=16, shuffle=True)
    held = DataLoader(Windows(series[276:]), batch_size=200)
    for epoch in range(15):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            x, y = next(iter(held))
            val_loss = F.mse_loss(model(x), y).item()
        session.log(val_loss=val_loss)
    return val_loss


@healthy(area="autoencoder", source="in the style of tutorials on denoising autoencoders", deceptive=False)
def noisy_digits_are_cleaned(attach):
    """Noise is added to the input and the clean picture is the target."""
    xtr, _, xte, _ = digits()

    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 24), nn.ReLU())
            self.decoder = nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 64), nn.Sigmoid())

        def forward(self, x):
            return self.decoder(self.encoder(x))

    model = Autoencoder()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(16):
        for (x,) in DataLoader(TensorDataset(xtr.flatten(1)), batch_size=50, shuffle=True):
            out = model((x + 0.2 * torch.randn_like(x)).clamp(0, 1))
            loss = criterion(out, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    x = xte.flatten(1)
    with torch.no_grad():
        return float(criterion(model((x + 0.2 * torch.randn_like(x)).clamp(0, 1)), x) / x.var(0).mean())


@healthy(area="dqn", source="in the style of the tutorial on deep Q-learning", deceptive=False)
def walker_learns_by_q_learning(attach):
    """Replay memory, a target network that follows softly, the Huber loss and clipped gradients."""
    env = Tightrope()

    def network():
        return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    policy_net, target_net = network(), network()
    target_net.load_state_dict(policy_net.state_dict())
    optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
    memory, steps = deque(maxlen=3000), 0
    session = attach(policy_net, optimizer)
    for episode in range(70):
        state, done = env.reset(), False
        while not done:
            eps = 0.05 + 0.85 * math.exp(-steps / 300)
            if random.random() < eps:
                action = random.randrange(3)
            else:
                with torch.no_grad():
                    action = int(policy_net(state).argmax())
            next_state, reward, done = env.step(action)
            fell = done and env.t < env.most
            memory.append((state, action, reward, next_state, float(fell)))
            state, steps = next_state, steps + 1
            if len(memory) < 64:
                continue
            s, a, r, s2, d = zip(*random.sample(memory, 48))
            q = policy_net(torch.stack(s)).gather(1, torch.tensor(a)[:, None]).squeeze(1)
            with torch.no_grad():
                following = target_net(torch.stack(s2)).max(1).values
            expected = torch.tensor(r) + 0.9 * (1 - torch.tensor(d)) * following
            loss = F.smooth_l1_loss(q, expected)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(policy_net.parameters(), 100)
            optimizer.step()
            with torch.no_grad():
                for t, p in zip(target_net.parameters(), policy_net.parameters()):
                    t.lerp_(p, 0.02)
            session.log(loss=loss.item())
    return falls_short(lambda s: policy_net(s).argmax())


@healthy(
    area="collaborative filtering", source="in the style of tutorials on dot products of embeddings", deceptive=False
)
def ratings_from_dot_products(attach):
    """User and item embeddings with biases, a scaled sigmoid, weight decay, a random split."""
    users, items = 70, 60
    score = torch.randn(users, 2) @ torch.randn(2, items) + 0.5 * torch.randn(items)
    pairs = torch.cartesian_prod(torch.arange(users), torch.arange(items))
    stars = (3 + 1.2 * score[pairs[:, 0], pairs[:, 1]] + 0.1 * torch.randn(len(pairs))).clamp(1, 5)
    train, valid = random_split(TensorDataset(pairs, stars), [3400, 800])

    class DotProductBias(nn.Module):
        def __init__(self, factors=5, y_range=(0.5, 5.5)):
            super().__init__()
            self.users, self.items = nn.Embedding(users, factors), nn.Embedding(items, factors)
            self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
            for table in self.children():
                nn.init.normal_(table.weight, std=0.2)
            self.y_range = y_range

        def forward(self, x):
            u, i = x[:, 0], x[:, 1]
            res = (self.users(u) * self.items(i)).sum(1) + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)
            low, high = self.y_range
            return torch.sigmoid(res) * (high - low) + low

    model = DotProductBias()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.02)
    session = attach(model, optimizer)
    for epoch in range(12):
        for x, y in DataLoader(train, batch_size=64, shuffle=True):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        x, y = next(iter(DataLoader(valid, batch_size=800)))
        with torch.no_grad():
            val_loss = F.mse_loss(model(x), y)
        session.log(val_loss=val_loss.item())
    return float(val_loss / stars.var())


@healthy(area="text classification", source="in the style of tutorials on packed sequences", deceptive=False)
def packed_sentences_in_a_bidirectional_lstm(attach):
    """Sentences of different length, a collate function that pads, pack_padded_sequence, a plateau scheduler on the loss."""
    ids, topic = sentences(1000, length=20)
    lengths = torch.randint(12, 21, (1000,))
    for row, n in zip(ids, lengths):  # the two words that matter come first
        row[: int(n)] = row.sort().values[: int(n)][torch.randperm(int(n))]
    data = [(row[: int(n)], label) for row, n, label in zip(ids, lengths, topic)]

    def collate(batch):
        rows, labels = zip(*batch)
        return (
            nn.utils.rnn.pad_sequence(rows, batch_first=True),
            torch.tensor([len(r) for r in rows]),
            torch.stack(labels),
        )

    class RNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(60, 24, padding_idx=0)
            self.rnn = nn.LSTM(24, 32, bidirectional=True, batch_first=True)
            self.fc, self.dropout = nn.Linear(64, 6), nn.Dropout(0.3)

        def forward(self, text, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.dropout(self.embedding(text)), lengths, batch_first=True, enforce_sorted=False
            )
            _, (hidden, _) = self.rnn(packed)
            return self.fc(self.dropout(torch.cat([hidden[-2], hidden[-1]], 1)))

    model = RNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    session = attach(model, optimizer)
    loader = DataLoader(data[:800], batch_size=40, shuffle=True, collate_fn=collate)
    text, n, label = collate(data[800:])
    for epoch in range(8):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(*batch[:2]), batch[2])
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            val_loss = F.cross_entropy(model(text, n), label)
        scheduler.step(val_loss)
        session.log(val_loss=val_loss.item())
    return wrong(lambda text: model(text, n), text, label)


@healthy(area="sensors", source="in the style of examples on human activity with early stopping", deceptive=False)
def activity_net_stops_early(attach):
    """A convolutional net over windows, a validation part, patience, the best weights as a deep copy."""
    data = TensorDataset(*motions(900))
    train, val = random_split(data, [700, 200])
    model = nn.Sequential(
        nn.Conv1d(3, 24, 5, padding=2), nn.BatchNorm1d(24), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(24, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveAvgPool1d(4),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, 6),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    session = attach(model, optimizer)
    best, best_state, patience = float("inf"), None, 3
    for epoch in range(14):
        model.train()
        for x, y in DataLoader(train, batch_size=35, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            val_loss = sum(F.cross_entropy(model(x), y).item() for x, y in DataLoader(val, batch_size=100)) / 2
        session.log(val_loss=val_loss)
        if val_loss < best:
            best, best_state, patience = val_loss, copy.deepcopy(model.state_dict()), 3
        else:
            patience -= 1
            if patience == 0:
                break
    model.load_state_dict(best_state)
    return wrong(model, *motions(300))


@healthy(
    area="regression", source="in the style of tabular examples that predict a mean and a variance", deceptive=False
)
def table_net_tells_how_sure_it_is(attach):
    """Two heads, the Gaussian likelihood as the loss, which falls below zero."""
    x, y = loans(1500)
    mean, std = y[:1200].mean(), y[:1200].std()
    target = ((y - mean) / std).unsqueeze(1)

    class ProbabilisticNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
            self.mean_head, self.var_head = nn.Linear(64, 1), nn.Linear(64, 1)

        def forward(self, x):
            h = self.trunk(x)
            return self.mean_head(h), F.softplus(self.var_head(h)) + 1e-3

    model = ProbabilisticNet()
    criterion = nn.GaussianNLLLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(x[:1200], target[:1200]), batch_size=40, shuffle=True)
    for epoch in range(20):
        for xb, yb in loader:
            mu, var = model(xb)
            loss = criterion(mu, yb, var)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            session.log(nll=loss.item())
        scheduler.step()
    with torch.no_grad():
        return float(F.mse_loss(model(x[1200:])[0], target[1200:]))
