"""Fourteenth hold-out: healthy programs that look odd and are right."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_14.about import healthy
from fault_programs.holdout_14.material import digits, sentences, squares, wrong


@healthy(area="mixing", source="in the style of mixup")
def pictures_are_mixed_with_their_own_batch(attach):
    """Each picture is blended with another of the batch, and the loss with the labels of both, so it never gets near zero."""
    (xtr, ytr), (xte, yte) = digits()
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    session = attach(net, optimizer)
    beta = torch.distributions.Beta(0.6, 0.6)
    for epoch in range(10):
        net.train()
        for x, y in DataLoader(TensorDataset(xtr, ytr), batch_size=60, shuffle=True):
            lam, index = float(beta.sample()), torch.randperm(len(x))
            outputs = net(lam * x + (1 - lam) * x[index])
            loss = lam * F.cross_entropy(outputs, y) + (1 - lam) * F.cross_entropy(outputs, y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    net.eval()
    return wrong(net, xte, yte)


@healthy(area="accumulation", source="in the style of loops with accumulation_steps for small cards")
def six_small_batches_make_a_step(attach):
    """Steps come at every sixth batch and at the end of an epoch; the loss is divided by the number of batches of its step."""
    (xtr, ytr), (xte, yte) = digits(1180)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 80), nn.LayerNorm(80), nn.GELU(), nn.Linear(80, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    session = attach(model, optimizer)
    accumulation_steps = 6
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=10, shuffle=True)
    last_window = len(loader) // accumulation_steps * accumulation_steps
    for epoch in range(8):
        for k, (x, y) in enumerate(loader):
            window = accumulation_steps if k < last_window else len(loader) - last_window
            loss = F.cross_entropy(model(x), y)
            (loss / window).backward()
            session.log(loss=loss.item())
            if (k + 1) % accumulation_steps == 0 or k + 1 == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
    return wrong(model, xte, yte)


@healthy(area="sparse gradients", source="in the style of models with sparse embeddings and two optimizers")
def embedding_has_an_optimizer_of_its_own(attach):
    """SparseAdam for the embedding, most of whose rows are not touched in a step, and Adam for the rest."""
    vocab = 400
    words, label = sentences(900)
    words = words + 40 * torch.randint(0, 10, words.shape)  # ten words for each meaning

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocab, 16, sparse=True)
            self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 4)

        def forward(self, ids):
            return self.fc2(F.relu(self.fc1(self.embedding(ids).mean(1))))

    model = Model()
    sparse = torch.optim.SparseAdam(model.embedding.parameters(), lr=2e-2)
    dense = torch.optim.Adam(itertools.chain(model.fc1.parameters(), model.fc2.parameters()), lr=5e-3)
    session = attach(model, [sparse, dense])
    for epoch in range(14):
        for i in torch.randperm(700).split(28):
            loss = F.cross_entropy(model(words[i]), label[i])
            for opt in (sparse, dense):
                opt.zero_grad()
            loss.backward()
            for opt in (sparse, dense):
                opt.step()
            session.log(loss=loss.item())
    return wrong(model, words[700:], label[700:])


@healthy(area="novelty", source="in the style of random network distillation")
def predictor_follows_a_random_network(attach):
    """The target is a network with random weights that is never trained; where the predictor fails, something is new."""
    (xtr, ytr), (xte, yte) = digits()
    seen, known = xtr[ytr < 6], yte < 6

    def network(*hidden):
        layers = [nn.Flatten()]
        for a, b in itertools.pairwise((64, *hidden)):
            layers += [nn.Linear(a, b), nn.LeakyReLU()]
        return nn.Sequential(*layers, nn.Linear(hidden[-1], 16))

    class RND(nn.Module):
        def __init__(self):
            super().__init__()
            self.target, self.predictor = network(96, 96), network(96, 64)
            for layer in self.target:
                if isinstance(layer, nn.Linear):
                    nn.init.orthogonal_(layer.weight, 2**0.5)
            self.target.requires_grad_(False)

        def forward(self, x):
            return (self.predictor(x) - self.target(x)).square().mean(1)

    rnd = RND()
    optimizer = torch.optim.Adam(rnd.predictor.parameters(), lr=3e-3)
    session = attach(rnd, optimizer)
    for epoch in range(16):
        for (x,) in DataLoader(TensorDataset(seen), batch_size=30, shuffle=True):
            loss = rnd(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(surprise=loss.item())
    with torch.no_grad():
        surprise = rnd(xte)
    return (surprise[known][:, None] >= surprise[~known]).float().mean().item()


@healthy(area="shared layers", source="in the style of ALBERT, whose layers share their weights")
def one_block_is_run_four_times(attach):
    """The same encoder layer is called four times on purpose, so one backward pass adds four gradients for each weight."""
    x, y = sentences(700, length=8)
    x_val, y_val = sentences(300, length=8)

    class Albert(nn.Module):
        def __init__(self, repeats=4, dim=32):
            super().__init__()
            self.factor, self.embed, self.repeats = nn.Embedding(40, 12), nn.Linear(12, dim), repeats
            self.cls = nn.Parameter(0.02 * torch.randn(1, 1, dim))
            self.block = nn.TransformerEncoderLayer(
                dim, 4, 64, 0.1, activation="gelu", batch_first=True, norm_first=True
            )
            self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4))

        def forward(self, ids):
            h = torch.cat([self.cls.expand(len(ids), -1, -1), self.embed(self.factor(ids))], 1)
            for _ in range(self.repeats):
                h = self.block(h)
            return self.head(h[:, 0])

    model = Albert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for epoch in range(7):
        model.train()
        for i in torch.randperm(700).split(35):
            loss = F.cross_entropy(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    return wrong(model, x_val, y_val)


@healthy(area="self-supervision", source="in the style of SimSiam")
def two_views_and_a_stopped_gradient(attach):
    """The loss is negative and falls towards -1; one side of each pair is detached; labels are used for a probe only."""
    (xtr, ytr), (xte, yte) = digits()

    class SimSiam(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Flatten(),
                nn.Linear(64, 128),
                nn.BatchNorm1d(128),
                nn.ReLU(),
                nn.Linear(128, dim),
                nn.BatchNorm1d(dim),
            )
            self.predictor = nn.Sequential(nn.Linear(dim, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, dim))

        def forward(self, a, b):
            z1, z2 = self.encoder(a), self.encoder(b)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            return -(F.cosine_similarity(p1, z2.detach()).mean() + F.cosine_similarity(p2, z1.detach()).mean()) / 2

    def view(x):
        keep = (torch.rand_like(x) > 0.2).float()
        return x * keep * (0.8 + 0.4 * torch.rand(len(x), 1, 1, 1)) + 0.05 * torch.randn_like(x)

    model = SimSiam()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    session = attach(model, optimizer, scheduler=scheduler)
    for epoch in range(10):
        model.train()
        for (x,) in DataLoader(TensorDataset(xtr), batch_size=60, shuffle=True):
            loss = model(view(x), view(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        scheduler.step()
    model.eval()
    with torch.no_grad():
        bank, asked = F.normalize(model.encoder(xtr)), F.normalize(model.encoder(xte))
    return (ytr[(asked @ bank.t()).argmax(1)] != yte).float().mean().item()


@healthy(area="pruning", source="in the style of pruning by magnitude and rewinding")
def most_weights_are_held_at_zero(attach):
    """Nine in ten weights are set back to zero after each step; the others start again from where they started."""
    (xtr, ytr), (xte, yte) = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    beginning = copy.deepcopy(net.state_dict())

    def fit(epochs, masks, session=None, optimizer=None):
        optimizer = optimizer or torch.optim.Adam(net.parameters(), lr=3e-3)
        for epoch in range(epochs):
            for i in torch.randperm(1200).split(40):
                loss = F.cross_entropy(net(xtr[i]), ytr[i])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for name, mask in masks.items():
                        net.get_parameter(name).mul_(mask)
                session.log(loss=loss.item()) if session else None

    fit(3, {})
    masks = {}
    for name, weight in net.named_parameters():
        if weight.dim() == 2:
            masks[name] = (weight.detach().abs() >= weight.detach().abs().flatten().quantile(0.9)).float()
    net.load_state_dict({name: value * masks.get(name, 1.0) for name, value in beginning.items()})
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    fit(8, masks, attach(net, optimizer), optimizer)
    return wrong(net, xte, yte)


@healthy(area="snapshots", source="in the style of snapshot ensembles with warm restarts")
def rate_jumps_back_and_copies_vote(attach):
    """The rate falls to nothing and jumps up again three times, the loss with it; the copies of the valleys vote on the mask."""
    picture, _, mask = squares(160)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=40)
    session = attach(model, optimizer, scheduler=scheduler)
    snapshots = []
    for step in range(120):
        i = torch.randint(0, 160, (20,))
        loss = F.binary_cross_entropy_with_logits(model(picture[i]), mask[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        session.log(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        if step % 40 == 39:
            snapshots.append(copy.deepcopy(model).eval())
    picture, _, mask = squares(100)
    with torch.no_grad():
        vote = torch.stack([snapshot(picture).sigmoid() for snapshot in snapshots]).mean(0) > 0.5
    return 1 - float((vote & (mask > 0)).sum() / (vote | (mask > 0)).sum())
