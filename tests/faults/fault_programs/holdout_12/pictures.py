"""Twelfth hold-out: pictures and masks."""

from __future__ import annotations

import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fault_programs.holdout_12.about import fault
from fault_programs.holdout_12.material import digits, spots


@fault(
    "missing_zero_grad",
    area="key points",
    source="https://github.com/yastrebksv/TennisCourtDetector/issues/7",
    cause="The training loop never calls zero_grad, so every step uses the sum of all gradients so far.",
    words=(r"zero_grad|accumulat|clear|sum of", r"grad"),
    cascade=("loss_oscillation", "loss_divergence", "lr_too_high", "not_learning", "underfitting", "loss_plateau"),
    sites=("(loop)", "optimizer"),
)
def court_trainer_without_zero_grad(attach, fixed):
    """A function train() for heat maps of key points that goes straight from the loss to backward and step."""

    class BallTracker(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, 2, 1), nn.ReLU())
            self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(16, 12, 3, padding=1), nn.ReLU())
            self.head = nn.Conv2d(12, 2, 1)

        def forward(self, x):
            return self.head(self.up(self.down(x)))

    def scenes(count):
        grid = torch.arange(12.0)
        points = torch.rand(count, 2, 2) * 9 + 1
        maps = torch.exp(
            -((grid[:, None] - points[..., 0, None, None]) ** 2 + (grid - points[..., 1, None, None]) ** 2) / 2
        )
        return maps[:, :1] - 0.7 * maps[:, 1:] + 0.05 * torch.randn(count, 1, 12, 12), maps

    def train(model, loader, optimizer, criterion, session):
        model.train()
        for inputs, heat in loader:
            out = model(inputs)
            loss = criterion(out, heat)
            optimizer.zero_grad() if fixed else None
            loss.backward()
            optimizer.step()
            session.log(train_loss=loss.item())

    @torch.no_grad()
    def validate(model, criterion, x, y):
        model.eval()
        return criterion(model(x), y).item()

    model = BallTracker()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    criterion = nn.MSELoss()
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(*scenes(240)), batch_size=24, shuffle=True)
    x, y = scenes(80)
    for epoch in range(12):
        train(model, loader, optimizer, criterion, session)
        session.log(val_loss=validate(model, criterion, x, y))
    return min(validate(model, criterion, x, y), 1e6)


@fault(
    "lr_schedule_collapse",
    area="classification",
    source="https://github.com/nodefluxio/vortex/issues/58",
    cause="The trainer steps every scheduler once per batch, but this one counts epochs, so the rate is nearly zero after a few batches.",
    words=(
        r"schedul|learning rate|\blr\b",
        r"batch|every step|each step|iteration|too early|too fast|collapse|zero|nothing",
    ),
    cascade=("lr_too_low", "underfitting", "loss_plateau", "not_learning"),
    sites=("(loop)", "scheduler", "optimizer", "lr_scheduler"),
    onset=6,
)
def trainer_steps_a_scheduler_of_epochs_with_every_batch(attach, fixed):
    """StepLR(step_size=6) is meant in epochs; the Trainer calls it in the inner loop."""

    class Trainer:
        def __init__(self, model, loader, epochs):
            self.model, self.loader, self.epochs = model, loader, epochs
            self.criterion = nn.CrossEntropyLoss()
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=6, gamma=0.1)
            self.session = attach(model, self.optimizer)

        def fit(self):
            for epoch in range(self.epochs):
                self.model.train()
                for i, (image, target) in enumerate(self.loader):
                    loss = self.criterion(self.model(image), target)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    self.scheduler.step() if not fixed or i == len(self.loader) - 1 else None
                    self.session.log(loss=loss.item(), lr=self.optimizer.param_groups[0]["lr"])

    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(24 * 16, 10),
    )
    Trainer(model, DataLoader(TensorDataset(xtr, ytr), batch_size=60, shuffle=True), 8).fit()
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(xte), yte).item()


@fault(
    "eval_mode_in_training",
    area="score matching",
    source="https://github.com/ermongroup/ncsn/issues/2",
    cause="The log of the test loss, first made at step 0, puts the network into evaluation mode, and it never goes back to training mode.",
    words=(
        r"eval(uation)?[ _]mode|model\.eval|\.train\(\)|score\.eval",
        r"(after|back|rest|remain|stay|still|never|training|mode)",
    ),
    also=("batchnorm_stats_stale",),
    cascade=("loss_plateau", "underfitting", "not_learning", "lr_too_high", "unnormalised_inputs", "loss_divergence"),
    sites=("(model)", "(loop)", "(validation)"),
)
def score_net_stays_in_eval_after_its_first_log(attach, fixed):
    """Every 20 steps the test loss is logged in eval mode; train() is called once, above the loop."""
    xtr, _, xte, _ = digits()
    xtr, xte = xtr * 16, xte * 16

    class RefineNet(nn.Module):
        def __init__(self, width=12):
            super().__init__()
            layers = [nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            for _ in range(10):
                layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            self.body = nn.Sequential(nn.BatchNorm2d(1), *layers)
            self.out = nn.Conv2d(width, 1, 3, padding=1)

        def forward(self, x):
            return self.out(self.body(x))

    def dsm(score, x, sigma=4.0):
        noise = torch.randn_like(x)
        return (score(x + sigma * noise) + noise).square().mean()

    score = RefineNet()
    optimizer = torch.optim.SGD(score.parameters(), lr=0.03, momentum=0.9)
    session = attach(score, optimizer)
    score.train()
    step = 0
    for epoch in range(7):
        for i in torch.randperm(len(xtr)).split(60):
            if step % 20 == 0:
                score.eval()
                with torch.no_grad():
                    session.log(test_dsm=dsm(score, xte[:200]).item())
                score.train() if fixed else None
            loss = dsm(score, xtr[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            session.log(dsm=loss.item())
    score.eval()
    with torch.no_grad():
        return min(dsm(score, xte).item(), 1e6)


class RandomFlip:
    """Mirrors what it gets, half of the time."""

    def __init__(self, p=0.5):
        self.p = p

    def __call__(self, image):
        return image.flip(-1).flip(-2) if random.random() < self.p else image


class CellDataset(Dataset):
    """Pictures and masks that go through their transforms."""

    def __init__(self, images, masks, transform=None, together=False):
        self.images, self.masks, self.transform, self.together = images, masks, transform, together

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image, mask = self.images[i], self.masks[i]
        if self.transform and self.together:
            image, mask = self.transform(torch.cat([image, mask])).split(1)
        elif self.transform:
            image, mask = self.transform(image), self.transform(mask)
        return image, mask


@fault(
    "augmentation_of_pairs_differs",
    area="segmentation",
    source="https://github.com/fastai/fastai/issues/245",
    cause="The random flip is drawn anew for the mask, so half of the masks do not lie on their pictures.",
    words=(
        r"flip|transform|augment",
        r"mask|target|label",
        r"separate|independent|differ|anew|mismatch|not.*(same|match)|twice|align",
    ),
    also=("label_shuffle_mismatch",),
    cascade=("underfitting", "loss_plateau", "not_learning", "overfitting"),
    sites=("(data)", "loader", "(loss)"),
    exact=False,
)
def flips_are_drawn_for_picture_and_mask(attach, fixed):
    """self.transform(image), self.transform(mask): two draws of one random transform."""
    train_set = CellDataset(*spots(240), transform=RandomFlip(), together=fixed)
    x, y = spots(100)
    loader = DataLoader(train_set, batch_size=16, shuffle=True)

    def block(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.mid, self.dec = block(1, 8), block(8, 16), block(24, 8)
            self.out = nn.Conv2d(8, 1, 1)

        def forward(self, x):
            a = self.enc(x)
            b = F.interpolate(self.mid(F.max_pool2d(a, 2)), scale_factor=2)
            return self.out(self.dec(torch.cat([a, b], 1)))

    net = UNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    for epoch in range(10):
        net.train()
        for image, mask in loader:
            loss = F.binary_cross_entropy_with_logits(net(image), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    net.eval()
    with torch.no_grad():
        found = (net(x) > 0).float()
    return 1 - float((2 * (found * y).sum() + 1) / (found.sum() + y.sum() + 1))


@fault(
    "retained_graph_leak",
    area="medical images",
    source="https://github.com/zoogzog/chexnet/issues/12",
    cause="The mean loss is summed over tensors that still hold their graphs, so all graphs of the run stay in memory.",
    words=(r"graph|memory|detach|item\(\)", r"sum|loss|accumulat|kept|keep|grow|hold"),
    sites=("(loop)", "(loss)"),
    exact=False,
)
def mean_loss_is_a_sum_of_tensors(attach, fixed):
    """loss_mean += loss, for the scheduler that looks at it once per epoch."""
    xtr, _, xte, _ = digits()
    ytr = torch.stack([xtr[:, 0, :4].mean((1, 2)) > 0.31, xtr[:, 0, :, :4].mean((1, 2)) > 0.3], 1).float()

    class DenseNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
            self.classifier = nn.Sequential(nn.Linear(32 * 64, 2), nn.Sigmoid())

        def forward(self, x):
            return self.classifier(F.relu(self.features(x)).flatten(1))

    model = DenseNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=2)
    criterion = nn.BCELoss()
    session = attach(model, optimizer)
    loss_mean, kept, count = 0, 0, 0
    for epoch in range(6):
        for i in torch.randperm(len(xtr)).split(48):
            out = model(xtr[i])
            loss = criterion(out, ytr[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_mean += loss.item() if fixed else loss
            count += 1
            session.log(loss=loss.item())
        scheduler.step(float(loss_mean) / count)
    node = getattr(loss_mean, "grad_fn", None)
    while node is not None:  # how many graphs the sum still holds
        kept += 1
        node = node.next_functions[0][0] if node.next_functions else None
    return kept / count
