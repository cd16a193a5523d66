"""Ninth hold-out: pictures, masks and detections."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from fault_programs.holdout_9.about import fault
from fault_programs.holdout_9.matter import digits, spots, wrong_share


class DoubleConv(nn.Sequential):
    def __init__(self, inside, outside):
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, base=8):
        super().__init__()
        self.inc = DoubleConv(1, base)
        self.down = DoubleConv(base, 2 * base)
        self.up = nn.ConvTranspose2d(2 * base, base, 2, stride=2)
        self.conv = DoubleConv(2 * base, base)
        self.outc = nn.Conv2d(base, 1, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down(F.max_pool2d(x1, 2))
        return self.outc(self.conv(torch.cat([x1, self.up(x2)], dim=1)))


@fault(
    "output_range_mismatch",
    area="segmentation",
    source="https://github.com/milesial/Pytorch-UNet/issues/341",
    cause="The masks hold 0 and 255, and binary cross entropy takes them for 0 and 1: everything is pushed to the foreground.",
    words=(r"mask|target|label", r"255|divid|range|scale"),
    also=("target_scale", "label_out_of_range"),
    cascade=("loss_divergence", "constant_output", "exploding_gradient", "exploding_activation", "large_initial_loss",
             "loss_oscillation", "class_imbalance_collapse", "logits_into_prob_loss", "lr_too_high", "loss_sign_flipped"),
    sites=("(data)", "(loss)", "loader", "loss_fn"),
)  # fmt: skip
def masks_as_the_editor_saved_them(attach, fixed):
    """The picture is divided by 255, its mask is not."""
    images, masks = spots()

    class BasicDataset(Dataset):
        def __init__(self, ids):
            self.ids = ids

        def __len__(self):
            return len(self.ids)

        def __getitem__(self, i):
            img = images[self.ids[i]] / 255.0
            mask = masks[self.ids[i]] / 255.0 if fixed else masks[self.ids[i]]
            return {"image": torch.as_tensor(img).float()[None], "mask": torch.as_tensor(mask).float()[None]}

    loader = DataLoader(BasicDataset(range(120)), batch_size=10, shuffle=True)
    net = UNet()
    optimizer = optim.RMSprop(net.parameters(), lr=2e-3, weight_decay=1e-8, momentum=0.5)
    criterion = nn.BCEWithLogitsLoss()
    session = attach(net, optimizer)
    for _epoch in range(6):
        net.train()
        for batch in loader:
            masks_pred = net(batch["image"])
            loss = criterion(masks_pred, batch["mask"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    net.eval()
    with torch.no_grad():
        said = net(torch.as_tensor(images[120:] / 255.0).float()[:, None])[:, 0] > 0
    true = torch.as_tensor(masks[120:]) > 0
    return 1 - float((said & true).sum() / (said | true).sum())


def validate(model, x, y):
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(x), y)


@fault(
    "eval_mode_in_training",
    area="vision",
    source="https://github.com/fartashf/vsepp/issues/4",
    cause="Validation in the course of an epoch leaves the model in evaluation mode, so dropout is off for the rest of the epoch.",
    words=(r"eval|train\(\)|mode", r"validat|dropout"),
    cascade=("overfitting",),
    sites=("(loop)", "(model)", "(validation)"),
    onset=6,
)
def stays_in_eval_after_the_first_validation(attach, fixed):
    """validate() calls eval(), and train() stands before the long loop only."""
    xtr, ytr, xte, yte = digits(200)
    noise = torch.Generator().manual_seed(911)
    ytr = torch.where(torch.rand(200, generator=noise) < 0.3, torch.randint(0, 10, (200,), generator=noise), ytr)
    model = nn.Sequential(
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.6), nn.Linear(256, 10)
    )
    opt = optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, opt)
    model.train()
    for it in range(1, 1401):
        pick = torch.randint(0, 200, (32,))
        opt.zero_grad()
        loss = F.cross_entropy(model(xtr[pick]), ytr[pick])
        loss.backward()
        opt.step()
        session.log(train_loss=loss)
        if it % 5 == 0:
            val = validate(model, xte[:100], yte[:100])
            model.train(fixed)
            session.log(val_loss=val)
    return float(validate(model, xte[100:], yte[100:]))


@fault(
    "dropout_ignores_mode",
    area="vision",
    source="https://github.com/Coderx7/SimpleNet/issues/2",
    cause="F.dropout is called with training=True, so units are dropped in evaluation too and its answers are random.",
    words=(r"dropout", r"eval|mode|training"),
    also=("train_mode_in_eval",),
    cascade=("underfitting",),
    sites=("(model)", "(validation)"),
)
def drops_units_in_evaluation_too(attach, fixed):
    """F.dropout(x, 0.5, training=True) in forward."""

    class ResNetish(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
            self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
            self.conv3 = nn.Conv2d(8, 16, 3, padding=1)
            self.fc = nn.Linear(16, 10)

        def forward(self, x):
            x = F.relu(self.conv1(x))
            x = F.relu(x + self.conv2(x))
            x = F.relu(self.conv3(F.max_pool2d(x, 2)))
            x = x.mean((2, 3))
            x = F.dropout(x, 0.5, training=self.training if fixed else True)
            return self.fc(x)

    xtr, ytr, xte, yte = digits()
    net = ResNetish()
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    train_loader = DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True)
    for _epoch in range(16):
        net.train()
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            outputs = net(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        error = wrong_share(net, xte, yte)
        session.log(val_accuracy=1 - error)
    return wrong_share(net, xte, yte)


@fault(
    "lr_schedule_collapse",
    area="vision",
    source="https://github.com/md-mohaiminul/ViS4mer/issues/4",
    cause="ReduceLROnPlateau is fed with the accuracy but waits for a falling number, so each improvement counts as none and the rate is cut.",
    words=(r"plateau|schedul", r"mode|min|max|accuracy"),
    also=("lr_too_low",),
    cascade=("underfitting", "loss_plateau"),
    sites=("scheduler", "optimizer", "(loop)"),
    onset=61,
)
def plateau_of_an_accuracy(attach, fixed):
    """ReduceLROnPlateau(optimizer) with its default mode, and step(val_acc)."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(24 * 16, 10),
    )  # fmt: skip
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max" if fixed else "min", factor=0.1, patience=1)
    session = attach(model, optimizer)
    for _epoch in range(16):
        model.train()
        for rows in torch.randperm(len(xtr)).split(50):
            loss = F.cross_entropy(model(xtr[rows]), ytr[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        val_acc = 1 - wrong_share(model, xte[:200], yte[:200])
        scheduler.step(val_acc)
        session.log(val_acc=val_acc, lr=optimizer.param_groups[0]["lr"])
    return wrong_share(model, xte[200:], yte[200:])


@fault(
    "wrong_formula",
    area="detection",
    source="https://github.com/yqyao/SSD_Pytorch/issues/32",
    cause="The focal loss weighs negatives by (1 - P) ** gamma instead of P ** gamma, so easy negatives count most and hard ones nothing.",
    words=(r"focal|gamma|negative", r"weight|1 ?- ?p|easy|wrong"),
    also=("class_imbalance_collapse",),
    cascade=("constant_output", "underfitting", "loss_plateau"),
    sites=("(loss)", "loss_fn"),
)
def focal_weight_of_negatives(attach, fixed):
    """loss_neg = -(1 - P) ** gamma * log(1 - P) * (1 - target)."""

    def focal_loss(logits, targets, gamma=2.0, alpha=0.25):
        p = torch.sigmoid(logits).clamp(1e-6, 1 - 1e-6)
        loss_pos = -1.0 * torch.pow(1 - p, gamma) * torch.log(p) * targets * alpha
        loss_neg = -1.0 * torch.pow(p if fixed else 1 - p, gamma) * torch.log(1 - p) * (1 - targets) * (1 - alpha)
        return (loss_pos + loss_neg).sum() / targets.sum().clamp(min=1)

    images, masks = spots(200, seed=98)
    x = torch.as_tensor(images).float()[:, None] / 255 - 0.4
    cells = (F.avg_pool2d(torch.as_tensor(masks).float()[:, None] / 255, 4) > 0.85).float()
    net = nn.Sequential(
        nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 1, 3, padding=1),
    )  # fmt: skip
    optimizer = optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    for _epoch in range(50):
        for rows in torch.randperm(150).split(15):
            loss = focal_loss(net(x[rows]), cells[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(focal=loss)
    with torch.no_grad():
        found = net(x[150:]) > 0
    hit = (found & (cells[150:] > 0)).sum()
    return 1 - float(2 * hit / (found.sum() + cells[150:].sum()).clamp(min=1))


@fault(
    "double_softmax",
    area="vision",
    source="https://discuss.pytorch.org/t/cross-entropy-loss-is-not-decreasing/43814",
    cause="The model ends in a softmax, and CrossEntropyLoss applies another.",
    words=(r"softmax", r"twice|double|second|logits|cross.?entropy"),
    cascade=("underfitting", "loss_plateau", "vanishing_gradient", "not_learning", "lr_too_low"),
    sites=("(model)", "(loss)", "loss_fn", "softmax"),
)
def ends_in_a_softmax(attach, fixed):
    """self.softmax(x) is returned to CrossEntropyLoss."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 6, 3)
            self.conv2 = nn.Conv2d(6, 16, 3)
            self.fc1 = nn.Linear(16 * 4 * 4, 64)
            self.fc2 = nn.Linear(64, 10)
            self.softmax = nn.Softmax(dim=1)

        def forward(self, x):
            x = torch.relu(self.conv1(x))
            x = torch.relu(self.conv2(x))
            x = x.view(-1, 16 * 4 * 4)
            x = self.fc2(torch.relu(self.fc1(x)))
            return x if fixed else self.softmax(x)

    xtr, ytr, xte, yte = digits()
    net = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    session = attach(net, optimizer, loss_fn=criterion)
    for _epoch in range(6):
        running_loss = 0.0
        for i, (inputs, labels) in enumerate(DataLoader(TensorDataset(xtr, ytr), batch_size=25, shuffle=True), 0):
            optimizer.zero_grad()
            outputs = net(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            if i % 10 == 9:
                session.log(loss=running_loss / 10)
                running_loss = 0.0
    return wrong_share(net, xte, yte)


@fault(
    "lr_too_high",
    area="vision",
    source="https://discuss.pytorch.org/t/cross-entropy-loss-is-not-decreasing/43814/16",
    cause="Adam with a rate of 0.1 throws the ReLU units out of reach in the first steps, and the loss stays at 2.30.",
    words=(r"learning rate|\blr\b", r"high|large|big"),
    also=("dead_relu",),
    cascade=("not_learning", "loss_plateau", "constant_output", "loss_spike", "loss_oscillation", "underfitting",
             "vanishing_gradient", "exploding_gradient", "exploding_activation", "loss_divergence", "zero_init_blocked"),
    sites=("optimizer",),
)  # fmt: skip
def stuck_at_two_point_three(attach, fixed):
    """optim.Adam(net.parameters(), lr=0.1)."""
    xtr, ytr, xte, yte = digits()
    net = nn.Sequential()
    net.add_module("conv1", nn.Conv2d(1, 8, 3, padding=1))
    net.add_module("relu1", nn.ReLU())
    net.add_module("pool1", nn.MaxPool2d(2))
    net.add_module("conv2", nn.Conv2d(8, 16, 3, padding=1))
    net.add_module("relu2", nn.ReLU())
    net.add_module("flatten", nn.Flatten())
    net.add_module("fc1", nn.Linear(256, 64))
    net.add_module("relu3", nn.ReLU())
    net.add_module("fc2", nn.Linear(64, 10))
    optimizer = optim.Adam(net.parameters(), lr=1e-3 if fixed else 0.1)
    session = attach(net, optimizer)
    for epoch in range(9):
        total = 0.0
        for rows in torch.randperm(1000).split(40):
            loss = F.cross_entropy(net(xtr[rows]), ytr[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() / 25
            session.log(step_loss=loss)
        session.log(epoch=epoch, loss=total)
    return wrong_share(net, xte, yte)


@fault(
    "sampler_draws_few",
    area="vision",
    source="from memory: discuss.pytorch.org, several threads on WeightedRandomSampler with one weight per class",
    cause="WeightedRandomSampler gets one weight per class where it wants one per sample, so it only ever draws the first ten samples.",
    words=(r"sampler", r"weight|per class|few|same samples"),
    also=("same_batch_every_step", "batches_never_seen"),
    cascade=("overfitting", "samples_left_out"),
    sites=("(data)", "loader"),
)
def one_weight_per_class_for_the_sampler(attach, fixed):
    """WeightedRandomSampler(class_weights, len(dataset))."""
    xtr, ytr, xte, yte = digits()
    keep = (ytr > 4) | (torch.arange(len(ytr)) % 4 == 0)
    dataset = TensorDataset(xtr[keep], ytr[keep])
    targets = ytr[keep]
    class_sample_count = torch.bincount(targets, minlength=10)
    class_weights = 1.0 / class_sample_count.float()
    samples_weight = class_weights[targets]
    sampler = WeightedRandomSampler(samples_weight if fixed else class_weights, len(dataset), replacement=True)
    train_loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for _epoch in range(10):
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return wrong_share(model, xte, yte)
