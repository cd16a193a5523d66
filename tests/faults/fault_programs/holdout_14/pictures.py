"""Fourteenth hold-out: pictures."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fault_programs.holdout_14.about import fault
from fault_programs.holdout_14.material import digits, overlap, squares, wrong


@fault(
    "train_val_preproc_mismatch",
    area="classification",
    source="https://github.com/JeasunLok/ResNet-pytorch/issues/1",
    cause="Normalize is only in the transform of the training set, so the network is tested on pictures of another scale.",
    words=(r"normali|transform|preprocess|scal", r"test|val|train|differ|mismatch|missing"),
    cascade=("overfitting", "unnormalised_inputs"),
    sites=("(validation)", "(data)", "loader"),
)
def pictures_are_normalised_for_training_only(attach, fixed):
    """transform_train ends in Normalize, transform_test in ToTensor."""
    (xtr, ytr), (xte, yte) = digits(scale=1.0)

    class Normalize:
        def __init__(self, mean, std):
            self.mean, self.std = mean, std

        def __call__(self, img):
            return (img - self.mean) / self.std

    class Pictures(Dataset):
        def __init__(self, x, y, transform):
            self.x, self.y, self.transform = x, y, transform

        def __len__(self):
            return len(self.y)

        def __getitem__(self, index):
            img = self.x[index]
            for step in self.transform:
                img = step(img)
            return img, self.y[index]

    class BasicBlock(nn.Module):
        def __init__(self, planes):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1), nn.Conv2d(planes, planes, 3, 1, 1)
            self.bn1, self.bn2 = nn.BatchNorm2d(planes), nn.BatchNorm2d(planes)

        def forward(self, x):
            out = F.relu(self.bn1(self.conv1(x)))
            return F.relu(self.bn2(self.conv2(out)) + x)

    model = nn.Sequential(nn.Conv2d(1, 10, 3, 2, 1), nn.ReLU(), BasicBlock(10), nn.Flatten(), nn.Linear(160, 10))
    norm = Normalize(4.9, 6.0)
    transform_train, transform_test = [norm], [norm] if fixed else []
    trainloader = DataLoader(Pictures(xtr, ytr, transform_train), batch_size=50, shuffle=True)
    testloader = DataLoader(Pictures(xte, yte, transform_test), batch_size=200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
    session = attach(model, optimizer)
    for epoch in range(6):
        model.train()
        for inputs, targets in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            session.log(train_loss=loss.item())
        model.eval()
        test_loss, missed, total = 0.0, 0, 0
        with torch.no_grad():
            for inputs, targets in testloader:
                outputs = model(inputs)
                test_loss += F.cross_entropy(outputs, targets, reduction="sum").item()
                missed += (outputs.argmax(1) != targets).sum().item()
                total += len(targets)
        session.log(test_loss=test_loss / total, test_acc=1 - missed / total)
    return missed / total


@fault(
    "double_softmax",
    area="classification",
    source="from memory: forum questions on an accuracy that creeps upwards, with nn.Softmax as the last layer before nn.CrossEntropyLoss",
    cause="The network ends in a softmax, and CrossEntropyLoss applies another one.",
    words=(r"softmax", r"twice|double|second|logit|already|CrossEntropy"),
    cascade=("loss_plateau", "underfitting", "vanishing_gradient", "not_learning"),
    sites=("(loss)", "(model)", "classifier", "loss_fn", "classifier.4"),
)
def vgg_ends_in_a_softmax(attach, fixed):
    """self.classifier = nn.Sequential(..., nn.Linear(64, 10), nn.Softmax(dim=1))."""
    (xtr, ytr), (xte, yte) = digits()

    class TinyVGG(nn.Module):
        def __init__(self):
            super().__init__()
            self.block_1 = nn.Sequential(
                nn.Conv2d(1, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, 10, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
            )
            layers = [nn.Flatten(), nn.Linear(160, 64), nn.ReLU(), nn.Linear(64, 10)]
            self.classifier = nn.Sequential(*layers, nn.Identity() if fixed else nn.Softmax(dim=1))

        def forward(self, x):
            return self.classifier(self.block_1(x))

    def train_step(model, dataloader, loss_fn, optimizer, session):
        model.train()
        for X, y in dataloader:
            loss = loss_fn(model(X), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())

    model_0, loss_fn = TinyVGG(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model_0.parameters(), lr=0.1)
    session = attach(model_0, optimizer)
    train_dataloader = DataLoader(TensorDataset(xtr, ytr), batch_size=24, shuffle=True)
    for epoch in range(8):
        train_step(model_0, train_dataloader, loss_fn, optimizer, session)
    model_0.eval()
    return wrong(model_0, xte, yte)


@fault(
    "params_not_in_optimizer",
    area="super-resolution",
    source="https://github.com/LianpoWang/SLIIF/issues/13",
    cause="The branches stand in a plain Python list, so they are no submodules, and model.parameters() does not hold them.",
    words=(r"list|ModuleList|regist|submodule|parameters\(\)|optimi[sz]er", r"branch|mlps|list|module|not"),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("mlps", "optimizer", "(model)"),
)
def branches_of_the_upsampler_stand_in_a_list(attach, fixed):
    """self.mlps = [RES_MLP(...) for _ in range(4)]."""

    class RES_MLP(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.a, self.b = nn.Linear(width, 32), nn.Linear(32, width)
            self.out = nn.Linear(width, 1)

        def forward(self, x):
            return self.out(x + self.b(F.relu(self.a(x))))

    class Upsampler(nn.Module):
        def __init__(self, width=8):
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
            mlps = [RES_MLP(width) for _ in range(4)]
            self.mlps = nn.ModuleList(mlps) if fixed else mlps

        def forward(self, small):
            h = self.encoder(small).permute(0, 2, 3, 1)
            parts = torch.cat([mlp(h) for mlp in self.mlps], -1)
            return F.pixel_shuffle(parts.permute(0, 3, 1, 2), 2)

    (xtr, _), (xte, _) = digits()
    model = Upsampler()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    for epoch in range(10):
        for (hr,) in DataLoader(TensorDataset(xtr), batch_size=40, shuffle=True):
            loss = F.l1_loss(model(F.avg_pool2d(hr, 2)), hr)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(l1=loss.item())
    with torch.no_grad():
        return F.l1_loss(model(F.avg_pool2d(xte, 2)), xte).item()


@fault(
    "zero_init_blocked",
    area="referring segmentation",
    source="https://github.com/yz93/LAVT-RIS/issues/25",
    cause="Both layers of the language gate are set to zero, so neither ever gets a gradient and the sentence has no effect.",
    words=(r"zero", r"init|gate|gradient|block|both|never"),
    also=("input_ignored",),
    cascade=("loss_plateau", "underfitting", "symmetric_init", "dead_relu", "vanishing_gradient"),
    sites=("gate", "gate.0", "gate.2", "(model)"),
)
def language_gate_starts_with_two_zero_layers(attach, fixed):
    """nn.init.zeros_(self.gate[0].weight); nn.init.zeros_(self.gate[2].weight)."""

    class LanguageGuided(nn.Module):
        def __init__(self, words=2, dim=16):
            super().__init__()
            self.word = nn.Embedding(words, dim)
            self.stem = nn.Sequential(nn.Conv2d(2, dim, 3, padding=1), nn.ReLU())
            self.gate = nn.Sequential(nn.Linear(2 * dim, dim, bias=False), nn.ReLU(), nn.Linear(dim, dim, bias=False))
            for layer in [self.gate[2]] if fixed else [self.gate[0], self.gate[2]]:
                nn.init.zeros_(layer.weight)
            self.head = nn.Sequential(nn.Conv2d(dim, dim, 3, padding=1), nn.ReLU(), nn.Conv2d(dim, 1, 1))

        def forward(self, picture, word):
            x = self.stem(picture)
            said = self.word(word)[:, None, None].expand(-1, *x.shape[2:], -1)
            seen = x.permute(0, 2, 3, 1)
            x = seen + self.gate(torch.cat([seen, said], -1))
            return self.head(x.permute(0, 3, 1, 2))

    def scenes(count):
        (a, _, mask_a), (b, _, mask_b) = squares(count), squares(count)
        word = torch.randint(0, 2, (count,))
        return torch.cat([a, b], 1), word, torch.where(word[:, None, None, None] == 0, mask_a, mask_b)

    model = LanguageGuided()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    session = attach(model, optimizer)
    picture, word, mask = scenes(300)
    for epoch in range(14):
        for i in torch.randperm(300).split(25):
            loss = F.binary_cross_entropy_with_logits(model(picture[i], word[i]), mask[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    picture, word, mask = scenes(100)
    with torch.no_grad():
        found = model(picture, word) > 0
    return 1 - float((found & (mask > 0)).sum() / (found | (mask > 0)).sum())


@fault(
    "lr_too_low",
    area="detection",
    source="https://github.com/facebookresearch/maskrcnn-benchmark/issues/335",
    cause="The progress of the warmup is an integer division, so the rate stays at a thousandth until the warmup is over.",
    words=(r"warm.?up|learning rate|\blr\b|rate", r"integer|division|//|low|small|constant|thousandth|stay"),
    also=("scheduler_never_called", "lr_schedule_collapse"),
    cascade=("underfitting", "loss_plateau", "not_learning", "constant_output"),
    sites=("scheduler", "optimizer", "(loop)"),
    exact=False,
)
def warmup_divides_integers(attach, fixed):
    """alpha = self.last_epoch // self.warmup_iters."""

    class WarmupMultiStepLR(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer, milestones, warmup_factor=0.001, warmup_iters=220):
            self.milestones, self.warmup_factor, self.warmup_iters = milestones, warmup_factor, warmup_iters
            super().__init__(optimizer)

        def get_lr(self):
            factor = 1.0
            if self.last_epoch < self.warmup_iters:
                alpha = self.last_epoch / self.warmup_iters if fixed else self.last_epoch // self.warmup_iters
                factor = self.warmup_factor * (1 - alpha) + alpha
            return [lr * factor * 0.1 ** sum(self.last_epoch >= m for m in self.milestones) for lr in self.base_lrs]

    class BoxHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 12, 3, 1, 1), nn.ReLU(), nn.Conv2d(12, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()
            )
            self.bbox_pred = nn.Linear(16 * 36, 4)

        def forward(self, x):
            return self.bbox_pred(self.backbone(x))

    picture, box, _ = squares(400)
    model = BoxHead()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = WarmupMultiStepLR(optimizer, milestones=(1000,))
    session = attach(model, optimizer, scheduler=scheduler)
    for iteration in range(210):
        i = torch.randint(0, 400, (20,))
        loss = F.smooth_l1_loss(model(picture[i]), box[i] / 12, beta=1 / 9)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        session.log(loss_box_reg=loss.item(), lr=optimizer.param_groups[0]["lr"])
    picture, box, _ = squares(200)
    with torch.no_grad():
        return 1 - overlap(model(picture) * 12, box).mean().item()


@fault(
    "ema_too_slow",
    area="moving average",
    source="https://github.com/roboflow/rf-detr/pull/59",
    cause="tau is never used, so the average decays by 0.999 from the first step on and is still close to the initial weights.",
    words=(r"ema|average|decay|tau", r"slow|lag|warm|tau|initial|stale|behind|0\.999|long|untrained"),
    also=("ema_not_updated",),
    cascade=("underfitting", "train_val_preproc_mismatch"),
    sites=("ema", "(model)", "(loop)", "(validation)"),
    exact=False,
)
def average_lags_behind_the_whole_run(attach, fixed):
    """ModelEma(model, decay=0.999, tau=40), whose get_decay() returns self.decay."""
    (xtr, ytr), (xte, yte) = digits()

    class ModelEma:
        def __init__(self, model, decay, tau):
            self.module = copy.deepcopy(model).eval().requires_grad_(False)
            self.decay, self.tau, self.updates = decay, tau, 0

        def get_decay(self):
            return self.decay * (1 - math.exp(-self.updates / self.tau)) if fixed else self.decay

        @torch.no_grad()
        def update(self, model):
            self.updates += 1
            decay = self.get_decay()
            for mean, new in zip(self.module.parameters(), model.parameters()):
                mean.mul_(decay).add_(new, alpha=1 - decay)

    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 64), nn.ReLU()
    )
    model.append(nn.Linear(64, 10))
    ema_m = ModelEma(model, decay=0.999, tau=150)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for epoch in range(8):
        model.train()
        for samples, targets in DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True):
            loss = F.cross_entropy(model(samples), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema_m.update(model)
            session.log(loss=loss.item())
        with torch.no_grad():
            session.log(ema_val_loss=F.cross_entropy(ema_m.module(xte), yte).item())
    return wrong(ema_m.module, xte, yte)
