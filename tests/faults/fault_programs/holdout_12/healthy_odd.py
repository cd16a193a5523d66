"""Twelfth hold-out: healthy programs that look odd and are right."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_12.about import healthy
from fault_programs.holdout_12.material import Corridor, digits, houses, moons, shortfall, spread


@healthy(area="accumulation", source="in the style of trainers with gradient_accumulation_steps")
def four_small_batches_make_one_step(attach):
    """zero_grad and step come with every fourth batch only; the loss is divided by four."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=15, shuffle=True)
    accumulate = 4
    for epoch in range(6):
        model.train()
        for i, (image, label) in enumerate(loader):
            loss = F.cross_entropy(model(image), label)
            (loss / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            session.log(loss=loss.item())
    model.eval()
    with torch.no_grad():
        return float((model(xte).argmax(1) != yte).float().mean())


@healthy(area="fine-tuning", source="in the style of transfer learning with a frozen backbone that thaws later")
def backbone_is_frozen_first_and_thawed_later(attach):
    """The body, in evaluation mode, is frozen for half of the run and then joins the optimizer with a small rate."""
    xtr, ytr, xte, yte = digits()
    body = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
    old_head = nn.Linear(256, 2)
    pre = torch.optim.Adam([*body.parameters(), *old_head.parameters()], lr=5e-3)
    for i in torch.randperm(1200).split(40):  # what was learned before: odd or even
        pre.zero_grad()
        F.cross_entropy(old_head(body(xtr[i])), ytr[i] % 2).backward()
        pre.step()

    model = nn.Sequential(body, nn.Linear(256, 10))
    body.requires_grad_(False)
    optimizer = torch.optim.Adam(model[1].parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(8):
        if epoch == 4:
            body.requires_grad_(True)
            optimizer.add_param_group({"params": list(body.parameters()), "lr": 3e-4})
        model.train()
        body.eval()
        for i in torch.randperm(1200).split(40):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xtr[i]), ytr[i])
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    with torch.no_grad():
        return float((model(xte).argmax(1) != yte).float().mean())


@healthy(area="mixup", source="in the style of mixup with smoothed labels")
def mixup_keeps_the_loss_high(attach):
    """Mixed pictures and smoothed labels: the training loss stays near one while the answers are right."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    session = attach(model, optimizer)
    for epoch in range(8):
        model.train()
        for i in torch.randperm(1200).split(50):
            lam = float(torch.distributions.Beta(1.0, 1.0).sample())
            other = i[torch.randperm(len(i))]
            out = model(lam * xtr[i] + (1 - lam) * xtr[other])
            loss = lam * criterion(out, ytr[i]) + (1 - lam) * criterion(out, ytr[other])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            session.log(val_loss=F.cross_entropy(model(xte[:300]), yte[:300]).item())
    with torch.no_grad():
        return float((model(xte).argmax(1) != yte).float().mean())


@healthy(area="gan", source="in the style of the first WGAN: weights are clipped by hand")
def critic_is_clipped_by_hand(attach):
    """Losses below zero, RMSprop, weights clamped in place after each step, five critic steps for one of the generator."""
    real = moons(1000)
    netG = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    netD = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optD = torch.optim.RMSprop(netD.parameters(), lr=2e-3)
    optG = torch.optim.RMSprop(netG.parameters(), lr=1e-3)
    session = attach(nn.ModuleDict({"G": netG, "D": netD}), [optD, optG])
    for step in range(160):
        for _ in range(5):
            x = real[torch.randint(0, 1000, (64,))]
            with torch.no_grad():
                fake = netG(torch.randn(64, 4))
            optD.zero_grad()
            errD = netD(fake).mean() - netD(x).mean()
            errD.backward()
            optD.step()
            with torch.no_grad():
                for p in netD.parameters():
                    p.clamp_(-0.15, 0.15)
        optG.zero_grad()
        errG = -netD(netG(torch.randn(64, 4))).mean()
        errG.backward()
        optG.step()
        session.log(errD=errD.item(), errG=errG.item())
    with torch.no_grad():
        return spread(netG(torch.randn(500, 4)), moons(500))


@healthy(area="bf16", source="in the style of mixed precision on a CPU, with one large dropout")
def bfloat_with_half_of_the_units_dropped(attach):
    """autocast in bfloat16 and Dropout(0.5): the validation loss lies below the training loss."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 192), nn.ReLU(), nn.Dropout(0.5), nn.Linear(192, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(7):
        model.train()
        for i in torch.randperm(1200).split(40):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(xtr[i])
            loss = F.cross_entropy(out.float(), ytr[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(xte)
        session.log(val_loss=F.cross_entropy(out.float(), yte).item())
    return float((out.argmax(1) != yte).float().mean())


@healthy(area="contrastive", source="in the style of SimSiam, with a stop-gradient and a loss near minus one")
def siamese_halves_with_a_stop_gradient(attach):
    """Two noisy views, one side detached; no labels, and a loss that only goes from 0 to -1."""
    xtr, ytr, xte, yte = digits()
    encoder = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 96),
        nn.BatchNorm1d(96),
        nn.ReLU(),
        nn.Linear(96, 32),
        nn.BatchNorm1d(32, affine=False),
    )
    predictor = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 32))
    model = nn.ModuleDict({"encoder": encoder, "predictor": predictor})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    session = attach(model, optimizer)

    def view(x):
        shifted = x.roll(int(torch.randint(-1, 2, ())), -1)
        return shifted * (torch.rand_like(x) > 0.15) + 0.1 * torch.randn_like(x)

    for epoch in range(10):
        for i in torch.randperm(1200).split(80):
            z1, z2 = encoder(view(xtr[i])), encoder(view(xtr[i]))
            p1, p2 = predictor(z1), predictor(z2)
            loss = -(F.cosine_similarity(p1, z2.detach()).mean() + F.cosine_similarity(p2, z1.detach()).mean()) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    with torch.no_grad():
        known, asked = F.normalize(encoder(xtr)), F.normalize(encoder(xte))
    return float((ytr[(asked @ known.t()).argmax(1)] != yte).float().mean())


@healthy(area="policy gradient", source="in the style of actor-critic examples with a loss that says little")
def actor_critic_with_a_wild_loss(attach):
    """The loss swings about zero and does not fall, while the walker learns."""

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.common, self.actor, self.critic = nn.Linear(9, 32), nn.Linear(32, 2), nn.Linear(32, 1)

        def forward(self, s):
            h = torch.tanh(self.common(s))
            return self.actor(h), self.critic(h).squeeze(-1)

    net, env = ActorCritic(), Corridor()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    session = attach(net, optimizer)
    for episode in range(150):
        seen, over, chances, values, rewards, entropies = env.reset(), False, [], [], [], []
        while not over:
            logits, value = net(seen)
            dist = torch.distributions.Categorical(logits=logits)
            action = dist.sample()
            seen, reward, over = env.step(int(action))
            chances.append(dist.log_prob(action))
            entropies.append(dist.entropy())
            values.append(value)
            rewards.append(reward)
        total, returns = 0.0, []
        for reward in reversed(rewards):
            total = reward + 0.98 * total
            returns.insert(0, total)
        returns, values = torch.tensor(returns), torch.stack(values)
        advantage = returns - values.detach()
        loss = (
            -(torch.stack(chances) * advantage).mean()
            + F.mse_loss(values, returns)
            - 0.02 * torch.stack(entropies).mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item(), reward=sum(rewards))
    return shortfall(lambda s: net(s)[0].argmax())


@healthy(
    area="rare classes", source="in the style of detectors of rare events, which start from a bias for the rare class"
)
def rare_events_with_a_bias_at_the_start(attach):
    """Two of 100 are positive; the last bias starts at the log odds, and pos_weight makes the loss large."""
    x, y = houses(3000)
    x, y = x, (y > y.quantile(0.97)).float()
    net = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    nn.init.constant_(net[-1].bias, -3.5)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(15.0))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)
    loader = DataLoader(TensorDataset(x[:2400], y[:2400]), batch_size=100, shuffle=True)
    for epoch in range(14):
        for xb, yb in loader:
            loss = criterion(net(xb).squeeze(1), yb)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        score = net(x[2400:]).squeeze(1)
    rare, common = score[y[2400:] == 1], score[y[2400:] == 0]
    return 1 - float((rare[:, None] > common).float().mean())
