"""Seventh hold-out: healthy programs after public examples, second half."""

from __future__ import annotations

import copy
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fault_programs.holdout_7.about import healthy
from fault_programs.holdout_7.matter import (
    Corridor,
    batches,
    blobs,
    error_rate,
    pictures,
    regret,
    sales,
    sounds,
    table,
    windows,
)


class Clips(Dataset):
    """Sounds of different lengths."""

    def __init__(self, low, high):
        self.x, self.y = sounds()
        made = torch.Generator().manual_seed(1)
        self.size = torch.randint(28, 37, (len(self.x),), generator=made)
        self.low, self.high = low, high

    def __len__(self):
        return self.high - self.low

    def __getitem__(self, i):
        i += self.low
        return self.x[i, : self.size[i]], int(self.y[i])


def collate(samples):
    samples.sort(key=lambda s: -len(s[0]))
    sizes = torch.tensor([len(x) for x, _ in samples])
    padded = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    return padded, sizes, torch.tensor([y for _, y in samples])


@healthy(area="speech", source="https://pytorch.org/docs/stable/generated/torch.nn.utils.rnn.pack_padded_sequence.html")
def packed_words(attach):
    """A bidirectional LSTM over packed clips, sorted in collate."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(10, 24, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(48, 6)

        def forward(self, x, sizes):
            _, (h, _) = self.lstm(pack_padded_sequence(x, sizes, batch_first=True))
            return self.fc(torch.cat([h[-2], h[-1]], 1))

    model = Words()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    loader = DataLoader(Clips(0, 450), batch_size=30, shuffle=True, collate_fn=collate)
    for epoch in range(9):
        for x, sizes, y in loader:
            loss = F.cross_entropy(model(x, sizes), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            session.log(loss=loss)
        session.epoch(epoch)
    with torch.no_grad():
        x, sizes, y = collate([Clips(450, 600)[i] for i in range(150)])
        return float((model(x, sizes).argmax(1) != y).float().mean())


class Seq2Seq(nn.Module):
    """Encoder, attention, decoder that is fed the truth half of the time."""

    def __init__(self, vocab=13, dim=40):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.decoder = nn.GRUCell(2 * dim, dim)
        self.out = nn.Linear(2 * dim, vocab)

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        memory, h = self.encoder(self.embed(src))
        h, token, outputs = h[0], trg[:, 0], []
        for t in range(1, trg.shape[1]):
            weight = F.softmax((memory @ h.unsqueeze(2)).squeeze(2), dim=1)
            context = (weight.unsqueeze(1) @ memory).squeeze(1)
            h = self.decoder(torch.cat([self.embed(token), context], 1), h)
            logits = self.out(torch.cat([h, context], 1))
            outputs.append(logits)
            token = trg[:, t] if random.random() < teacher_forcing_ratio else logits.argmax(1)
        return torch.stack(outputs, 1)


@healthy(area="language", source="https://github.com/bentrevett/pytorch-seq2seq")
def reverses_with_attention(attach):
    """Reverse a string; padding is ignored in the loss."""
    made = torch.Generator().manual_seed(2)
    n, width = 1200, 7
    size = torch.randint(4, width + 1, (n,), generator=made)
    src = torch.randint(3, 13, (n, width), generator=made)
    trg = torch.zeros(n, width + 2, dtype=torch.long)
    trg[:, 0] = 1
    for i, k in enumerate(size):
        src[i, k:] = 0
        trg[i, 1 : k + 1] = src[i, :k].flip(0)
        trg[i, k + 1] = 2
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    session = attach(model, optimizer, loss_fn=criterion)
    for s, t in batches(src[:1000], trg[:1000], size=50, epochs=14):
        out = model(s, t)
        loss = criterion(out.reshape(-1, 13), t[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        guess = model(src[1000:], trg[1000:], 0.0).argmax(-1)
    real = trg[1000:, 1:] != 0
    return float((guess != trg[1000:, 1:])[real].float().mean())


class LoRA(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base, self.scaling = base, alpha / r
        self.lora_A, self.lora_B = (
            nn.Linear(base.in_features, r, bias=False),
            nn.Linear(r, base.out_features, bias=False),
        )
        nn.init.zeros_(self.lora_B.weight)
        base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.scaling * self.lora_B(self.lora_A(x))


@healthy(area="fine-tuning", source="https://github.com/microsoft/LoRA")
def lora_on_a_pretrained_net(attach):
    """Adapters that start at zero beside frozen layers; only they and the head are given to the optimizer."""
    xtr, ytr, xte, yte = pictures()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    pre = torch.optim.Adam(net.parameters(), lr=2e-3)
    low = ytr < 6
    for x, y in batches(xtr[low], ytr[low], size=50, epochs=4):
        pre.zero_grad()
        F.cross_entropy(net(x), y).backward()
        pre.step()
    net[1], net[3] = LoRA(net[1]), LoRA(net[3])
    trainable = [p for n, p in net.named_parameters() if "lora_" in n or n.startswith("5.")]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3)
    session = attach(net, optimizer)
    for x, y in batches(xtr, ytr, size=50, epochs=5):
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return error_rate(net, xte, yte)


@healthy(area="time series", source="https://github.com/pytorch/examples/blob/main/time_sequence_prediction/train.py")
def sine_waves_with_lbfgs(attach):
    """LSTM cells in double precision, LBFGS with a closure."""
    t = torch.arange(60, dtype=torch.float64)
    shift = torch.linspace(0, 12, 24, dtype=torch.float64)[:, None]
    data = torch.sin((t + shift) / 5)
    train, test = data[4:], data[:4]

    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 16), nn.LSTMCell(16, 16), nn.Linear(16, 1)

        def forward(self, x):
            h1 = c1 = h2 = c2 = torch.zeros(len(x), 16, dtype=torch.float64)
            outputs = []
            for step in x.split(1, dim=1):
                h1, c1 = self.lstm1(step, (h1, c1))
                h2, c2 = self.lstm2(h1, (h2, c2))
                outputs.append(self.linear(h2))
            return torch.cat(outputs, 1)

    seq = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.8, max_iter=8)
    session = attach(seq, optimizer)
    for _step in range(6):

        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(train[:, :-1]), train[:, 1:])
            loss.backward()
            return loss

        session.log(loss=optimizer.step(closure))
    with torch.no_grad():
        return float(criterion(seq(test[:, :-1]), test[:, 1:]))


@healthy(area="vision", source="https://pytorch.org/tutorials/recipes/recipes/amp_recipe.html")
def amp_recipe_in_bfloat16(attach):
    """autocast, a GradScaler, unscale before clipping, accumulation over two batches."""
    xtr, ytr, xte, yte = pictures()
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(192, 48),
        nn.ReLU(),
        nn.Linear(48, 10),
    )
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    session = attach(net, opt)
    for i, (x, y) in enumerate(batches(xtr, ytr, size=32, epochs=6)):
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), y) / 2
        scaler.scale(loss).backward()
        if i % 2 == 1:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        session.log(loss=2 * loss)
    return error_rate(net, xte, yte)


@healthy(area="multi-task", source="https://github.com/median-research-group/LibMTL")
def two_tasks_with_learned_weights(attach):
    """A shared trunk, a class and a number, weighted by learned log-variances in a group of their own."""
    xtr, ytr, xte, yte = pictures()
    mass = lambda x: x.mean((1, 2, 3)) * 3

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
            self.digit, self.mass = nn.Linear(64, 10), nn.Linear(64, 1)
            self.log_vars = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            h = self.trunk(x)
            return self.digit(h), self.mass(h).squeeze(1)

    model = Both()
    slow = [p for n, p in model.named_parameters() if n != "log_vars"]
    optimizer = torch.optim.Adam([{"params": slow}, {"params": [model.log_vars], "lr": 1e-2}], lr=2e-3)
    session = attach(model, optimizer)
    for x, y in batches(xtr, ytr, size=50, epochs=8):
        digit, weight = model(x)
        losses = torch.stack([F.cross_entropy(digit, y), F.mse_loss(weight, mass(x))])
        total = ((-model.log_vars).exp() * losses + model.log_vars).sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        session.log(total=total, digit_loss=losses[0], mass_loss=losses[1])
    with torch.no_grad():
        return float((model(xte)[0].argmax(1) != yte).float().mean())


@healthy(area="vision", source="https://github.com/GeneralAI/curriculum-learning-examples")
def from_easy_to_hard(attach):
    """The noise of the training pictures grows from epoch to epoch."""
    xtr, ytr, xte, yte = pictures()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for epoch in range(9):
        noise = 0.12 * epoch
        for x, y in batches(xtr, ytr, size=50):
            loss = F.cross_entropy(model(x + noise * torch.randn_like(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss, noise=noise)
        session.epoch(epoch)
    return error_rate(model, xte, yte)


@healthy(
    area="cross-validation",
    source="https://github.com/christianversloot/machine-learning-articles/blob/main/how-to-use-k-fold-cross-validation-with-pytorch.md",
)
def k_folds_with_fresh_models(attach):
    """reset_parameters before each fold, a new optimizer and a new session for each."""
    x, y = table()
    x, y = x[:400], y[:400]
    folds = torch.randperm(400, generator=torch.Generator().manual_seed(1)).split(100)

    def reset_weights(m):
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()

    network = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 1))
    scores = []
    for k, test in enumerate(folds):
        network.apply(reset_weights)
        optimizer = torch.optim.Adam(network.parameters(), lr=8e-3)
        session = attach(network, optimizer)
        train = torch.cat([fold for j, fold in enumerate(folds) if j != k])
        for xb, yb in batches(x[train], y[train], size=30, epochs=18):
            loss = F.mse_loss(network(xb).squeeze(1), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        with torch.no_grad():
            scores.append(float(F.mse_loss(network(x[test]).squeeze(1), y[test])))
    return sum(scores) / len(scores)


@healthy(area="vision", source="https://pytorch.org/blog/pytorch-1.6-now-includes-stochastic-weight-averaging/")
def stochastic_weight_averaging(attach):
    """SWALR in the last epochs, update_bn before the test."""
    xtr, ytr, xte, yte = pictures()
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=50, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    swa_model, swa_start = AveragedModel(model), 4
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
    session = attach(model, optimizer)
    for epoch in range(8):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        if epoch > swa_start:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
    update_bn(loader, swa_model)
    return error_rate(swa_model, xte, yte)


@healthy(area="segmentation", source="https://github.com/milesial/Pytorch-UNet/blob/master/train.py")
def little_unet(attach):
    """Skip connections, BCE plus Dice, RMSprop, a scheduler on the Dice score."""
    x, y = blobs()

    def double(a, b):
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1, bias=False),
            nn.BatchNorm2d(b),
            nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, padding=1, bias=False),
            nn.BatchNorm2d(b),
            nn.ReLU(inplace=True),
        )

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.inc, self.down = double(1, 6), double(6, 12)
            self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
            self.conv, self.outc = double(12, 6), nn.Conv2d(6, 1, 1)

        def forward(self, x):
            x1 = self.inc(x)
            x2 = self.down(F.max_pool2d(x1, 2))
            return self.outc(self.conv(torch.cat([x1, self.up(x2)], 1)))

    def dice_loss(logits, target):
        p = torch.sigmoid(logits).flatten(1)
        t = target.flatten(1)
        return 1 - ((2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()

    model = UNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=3)
    session = attach(model, optimizer)
    for _epoch in range(6):
        model.train()
        for images, masks in batches(x[:200], y[:200], size=10):
            pred = model(images)
            loss = F.binary_cross_entropy_with_logits(pred, masks) + dice_loss(pred, masks)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        model.eval()
        with torch.no_grad():
            score = 1 - float(dice_loss(model(x[200:]), y[200:]))
        session.log(val_dice=score)
        scheduler.step(score)
    return 1 - score


@healthy(
    area="reinforcement learning",
    source="https://github.com/pytorch/examples/blob/main/reinforcement_learning/actor_critic.py",
)
def actor_critic_example(attach):
    """One episode a step, normalised returns, smooth_l1 of values; the policy loss takes values as numbers."""
    env = Corridor()

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.affine1 = nn.Linear(7, 48)
            self.action_head, self.value_head = nn.Linear(48, 2), nn.Linear(48, 1)

        def forward(self, x):
            x = F.relu(self.affine1(x))
            return F.softmax(self.action_head(x), dim=-1), self.value_head(x)

    model = Policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    eps = 1e-6
    for _episode in range(120):
        state, done, saved, rewards = env.reset(), False, [], []
        while not done:
            probs, value = model(state)
            m = Categorical(probs)
            action = m.sample()
            saved.append((m.log_prob(action), value))
            state, reward, done = env.step(action.item())
            rewards.append(reward)
        R, returns = 0.0, []
        for r in rewards[::-1]:
            R = r + 0.95 * R
            returns.insert(0, R)
        returns = torch.tensor(returns)
        if len(returns) > 1:
            returns = (returns - returns.mean()) / (returns.std() + eps)
        policy_losses = [-log_prob * (R - value.item()) for (log_prob, value), R in zip(saved, returns)]
        value_losses = [F.smooth_l1_loss(value, torch.tensor([R])) for (_, value), R in zip(saved, returns)]
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return regret(lambda s: model(s)[0])


@healthy(area="self-supervised", source="https://github.com/lucidrains/byol-pytorch")
def byol_with_a_predictor(attach):
    """An online and a target network, a predictor on one side, no negatives."""
    xtr, ytr, xte, yte = pictures()

    def net():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 24))

    online = net()
    target = copy.deepcopy(online)
    for p in target.parameters():
        p.requires_grad = False
    predictor = nn.Sequential(nn.Linear(24, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 24))
    learner = nn.ModuleDict({"online": online, "predictor": predictor})
    opt = torch.optim.Adam(learner.parameters(), lr=2e-3)
    session = attach(learner, opt)

    def loss_fn(x, y):
        return 2 - 2 * (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(-1)

    for (x,) in batches(xtr, size=64, epochs=8):
        one, two = x + 0.4 * torch.randn_like(x), x + 0.4 * torch.randn_like(x)
        with torch.no_grad():
            goal_one, goal_two = target(one), target(two)
        loss = (loss_fn(predictor(online(one)), goal_two) + loss_fn(predictor(online(two)), goal_one)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for t, o in zip(target.parameters(), online.parameters()):
                t.mul_(0.98).add_(o, alpha=0.02)
        session.log(loss=loss)
    online.eval()
    with torch.no_grad():
        near = torch.cdist(online(xte), online(xtr)).argmin(1)
    return float((ytr[near] != yte).float().mean())


@healthy(area="time series", source="https://github.com/sktime/pytorch-forecasting")
def quantile_forecast(attach):
    """Three quantiles with the pinball loss, an MLP over windows, RAdam."""
    past, ahead = windows()
    q = torch.tensor([0.1, 0.5, 0.9])
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 18))
    optimizer = torch.optim.RAdam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)

    def pinball(out, y):
        error = y.unsqueeze(-1) - out
        return torch.maximum(q * error, (q - 1) * error).mean()

    for pb, ab in batches(past[:1200], ahead[:1200], size=50, epochs=8):
        loss = pinball(model(pb).view(-1, 6, 3), ab)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(pinball(model(past[1200:]).view(-1, 6, 3), ahead[1200:]))


@healthy(area="anomaly", source="https://github.com/pytorch/examples")
def denoising_autoencoder(attach):
    """A convolutional autoencoder that is fed noisy windows of a series and asked for clean ones."""
    cut = sales().unfold(0, 32, 4).unsqueeze(1)
    model = nn.Sequential(
        nn.Conv1d(1, 8, 5, stride=2, padding=2),
        nn.ELU(),
        nn.Conv1d(8, 8, 5, stride=2, padding=2),
        nn.ELU(),
        nn.ConvTranspose1d(8, 8, 4, stride=2, padding=1),
        nn.ELU(),
        nn.ConvTranspose1d(8, 1, 4, stride=2, padding=1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for (clean,) in batches(cut[:320], size=20, epochs=14):
        noisy = clean + 0.3 * torch.randn_like(clean)
        loss = F.mse_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(model(cut[320:]), cut[320:]))
