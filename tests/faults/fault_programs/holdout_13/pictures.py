"""Thirteenth hold-out: pictures, boxes and masks."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from fault_programs.holdout_13.about import fault
from fault_programs.holdout_13.material import blots, digits, tissue


@fault(
    "not_shuffled",
    area="recipes",
    source="https://github.com/Deci-AI/super-gradients/issues/416",
    cause="The default parameters of the loader do not shuffle, and the data lie class by class, so a batch holds one class.",
    words=(r"shuffl|order|sorted|class by class|one class|sequential",),
    cascade=("loss_oscillation", "constant_output", "underfitting", "overfitting", "loss_spike", "not_learning"),
    sites=("(data)", "loader"),
    exact=False,
)
def recipe_with_a_loader_that_keeps_the_folders_in_order(attach, fixed):
    """DataLoader(trainset, **dataloader_params), where the parameters say nothing of shuffling."""
    xtr, ytr, xte, yte = digits()
    folders = ytr.argsort()
    trainset, testset = TensorDataset(xtr[folders], ytr[folders]), TensorDataset(xte, yte)
    dataloader_params = {"batch_size": 40, "shuffle": bool(fixed), "drop_last": False}
    training_params = {"max_epochs": 6, "lr": 0.03, "momentum": 0.9, "weight_decay": 1e-4}

    class Net(nn.Module):
        def __init__(self, num_classes=10):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            self.stage = nn.Sequential(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            self.head = nn.Linear(24 * 4, num_classes)

        def forward(self, x):
            return self.head(self.stage(self.stem(x)).flatten(1))

    class Recipe:
        def __init__(self, net, params):
            self.net, self.epochs = net, params["max_epochs"]
            self.optimizer = torch.optim.SGD(
                net.parameters(), params["lr"], momentum=params["momentum"], weight_decay=params["weight_decay"]
            )
            self.session = attach(net, self.optimizer)

        def train(self, loader, test):
            for epoch in range(self.epochs):
                self.net.train()
                for images, labels in loader:
                    self.optimizer.zero_grad()
                    loss = F.cross_entropy(self.net(images), labels)
                    loss.backward()
                    self.optimizer.step()
                    self.session.log(loss=loss.item())
                self.session.log(accuracy=1 - self.test(test))

        @torch.no_grad()
        def test(self, loader):
            self.net.eval()
            return float(np.mean([(self.net(x).argmax(1) != y).float().mean().item() for x, y in loader]))

    recipe = Recipe(Net(), training_params)
    test = DataLoader(testset, batch_size=199)
    recipe.train(DataLoader(trainset, **dataloader_params), test)
    return recipe.test(test)


@fault(
    "augmentation_lost",
    area="augmentation",
    source="https://github.com/growingnet/gromo/pull/58",
    cause="Both subsets share one data set, so taking the transform from the validation set takes it from training too.",
    words=(r"transform|augment", r"shar|same (data ?set|object)|also|both|train|lost|overwrit|no (longer|augment)"),
    cascade=("overfitting", "train_val_preproc_mismatch"),
    sites=("(data)", "loader", "(validation)"),
    exact=False,
)
def validation_subset_takes_the_transform_away(attach, fixed):
    """val_dataset.dataset.transform = None, after random_split."""
    xtr, ytr, xte, yte = digits(560)

    class Digits(Dataset):
        def __init__(self, images, labels, transform=None):
            self.images, self.labels, self.transform = images, labels, transform

        def __len__(self):
            return len(self.images)

        def __getitem__(self, i):
            image = self.images[i]
            return (self.transform(image) if self.transform else image), self.labels[i]

    def move(image):
        image = F.pad(image, (2, 2, 2, 2))
        i, j = torch.randint(0, 5, (2,)).tolist()
        return image[:, i : i + 8, j : j + 8]

    whole = Digits(xtr, ytr, transform=move)
    train_dataset, val_dataset = random_split(whole, [500, 60])
    val_dataset.dataset = copy.copy(whole) if fixed else whole
    val_dataset.dataset.transform = None

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 16, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    loader, val_loader = DataLoader(train_dataset, batch_size=40, shuffle=True), DataLoader(val_dataset, batch_size=60)
    for epoch in range(30):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            for x, y in val_loader:
                session.log(val_loss=F.cross_entropy(model(x), y).item())
    moved = torch.stack([move(image) for image in xte[:500]])  # in the wild, digits stand anywhere
    with torch.no_grad():
        return (model(moved).argmax(1) != yte[:500]).float().mean().item()


@fault(
    "logits_into_prob_loss",
    area="segmentation",
    source="https://github.com/ScrollPrize/villa/pull/1771",
    cause="The soft Dice loss is given raw logits where it takes probabilities, since no sigmoid is passed to it.",
    words=(r"dice|loss", r"logit|sigmoid|probab|activation|nonlin"),
    cascade=(
        "loss_divergence",
        "loss_sign_flipped",
        "exploding_activation",
        "not_learning",
        "exploding_gradient",
        "constant_output",
        "output_range_mismatch",
        "loss_plateau",
        "loss_oscillation",
        "underfitting",
        "loss_spike",
    ),
    sites=("(loss)", "loss_fn", "criterion", "(model)"),
)
def soft_dice_is_built_without_its_nonlinearity(attach, fixed):
    """MemoryEfficientSoftDiceLoss(apply_nonlin=None), from a config that says activation: none."""

    class SoftDiceLoss(nn.Module):
        def __init__(self, apply_nonlin=None, smooth=1.0):
            super().__init__()
            self.apply_nonlin, self.smooth = apply_nonlin, smooth

        def forward(self, x, y):
            x = x if self.apply_nonlin is None else self.apply_nonlin(x)
            both, total = (x * y).sum((1, 2, 3)), (x + y).sum((1, 2, 3))
            return -((2 * both + self.smooth) / (total + self.smooth)).mean()

    class SegNet(nn.Module):
        def __init__(self, width=10):
            super().__init__()
            self.enc1 = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            self.enc2 = nn.Sequential(nn.Conv2d(width, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
            self.dec = nn.ConvTranspose2d(16, width, 2, 2)
            self.logits = nn.Conv2d(2 * width, 1, 1)

        def forward(self, x):
            a = self.enc1(x)
            return self.logits(torch.cat([a, F.relu(self.dec(self.enc2(a)))], 1))

    model = SegNet()
    criterion = SoftDiceLoss(apply_nonlin=torch.sigmoid if fixed else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(*tissue(240)), batch_size=24, shuffle=True)
    for epoch in range(12):
        model.train()
        for picture, mask in loader:
            loss = criterion(model(picture), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    picture, mask = tissue(120)
    with torch.no_grad():
        found = (model(picture) > 0).float()
    return 1 - float(2 * (found * mask).sum() / (found.sum() + mask.sum() + 1e-6))


@fault(
    "batchnorm_stats_stale",
    area="moving average",
    source="https://github.com/FlyreelAI/sesemi/issues/36",
    cause="The moving average follows the parameters only, so its batch norms keep the statistics of the first step.",
    words=(
        r"batch ?norm|running|statistic|buffer",
        r"ema|average|copy|not (updated|copied|followed)|stale|initial|unchanged",
    ),
    also=("ema_not_updated",),
    cascade=("train_val_preproc_mismatch", "constant_output", "unnormalised_inputs"),
    sites=("ema", "(model)", "(loop)", "1", "module", "(validation)"),
)
def average_of_the_weights_without_the_buffers(attach, fixed):
    """update() goes over model.named_parameters(), and a batch norm has buffers too."""

    class ModelEMA:
        def __init__(self, model, decay=0.95):
            self.module, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

        @torch.no_grad()
        def update(self, model):
            mine = self.module.state_dict()
            for name, value in (model.state_dict() if fixed else dict(model.named_parameters())).items():
                if value.is_floating_point():
                    mine[name].mul_(self.decay).add_(value.detach(), alpha=1 - self.decay)

    xtr, ytr, xte, yte = digits(top=16)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, 2, 1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(96, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ema = ModelEMA(model)
    session = attach(model, optimizer)
    for epoch in range(6):
        model.train()
        for i in torch.randperm(1200).split(48):
            loss = F.cross_entropy(model(xtr[i]), ytr[i])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            ema.update(model)
            session.log(loss=loss.item())
        with torch.no_grad():
            out = ema.module(xte)
        session.log(val_loss=F.cross_entropy(out, yte).item())
    return (out.argmax(1) != yte).float().mean().item()


@fault(
    "box_format",
    area="detection",
    source="https://github.com/stevebottos/owl-vit-object-detection/issues/14",
    cause="The boxes are centre, width and height, and the generalised IoU takes them for two corners.",
    words=(r"box|cxcywh|xyxy|corner|centre|center", r"format|corner|convert|xyxy|giou|iou|expect"),
    cascade=("not_learning", "loss_plateau", "underfitting", "constant_output", "saturated_activation", "dead_relu"),
    sites=("(loss)", "loss_fn", "(data)", "(loop)"),
)
def centres_go_into_the_generalised_iou(attach, fixed):
    """1 - generalized_box_iou(pred, target) on boxes as (cx, cy, w, h)."""

    def corners(box):
        return torch.cat([box[:, :2] - box[:, 2:] / 2, box[:, :2] + box[:, 2:] / 2], 1)

    def generalized_box_iou(a, b):
        area_a, area_b = ((c[:, 2] - c[:, 0]) * (c[:, 3] - c[:, 1]) for c in (a, b))
        inner = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
        outer = (torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
        union = area_a + area_b - inner
        return inner / (union + 1e-6) - (outer - union) / (outer + 1e-6)

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()
            )
            self.box_head = nn.Sequential(nn.Linear(16 * 36, 64), nn.ReLU(), nn.Linear(64, 4), nn.Sigmoid())

        def forward(self, picture):
            return self.box_head(self.backbone(picture))

    picture, box = blots(480)
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = attach(model, optimizer)
    to_loss = corners if fixed else torch.Tensor.contiguous
    for epoch in range(16):
        for i in torch.randperm(480).split(32):
            found = model(picture[i])
            loss_giou = (1 - generalized_box_iou(to_loss(found), to_loss(box[i]))).mean()
            loss_bbox = F.l1_loss(found, box[i])
            optimizer.zero_grad()
            (0.2 * loss_bbox + loss_giou).backward()
            optimizer.step()
            session.log(loss_bbox=loss_bbox.item(), loss_giou=loss_giou.item())
    picture, box = blots(200)
    with torch.no_grad():
        return 1 - generalized_box_iou(corners(model(picture)), corners(box)).clamp(min=0).mean().item()


@fault(
    "train_mode_in_eval",
    area="hyperspectral pictures",
    source="https://github.com/nshaud/DeepHyperX/issues/51",
    cause="val() never calls net.eval(), so dropout and batch norm run in training mode while the scene is classified.",
    words=(r"eval\(\)|eval(uation)? mode|train(ing)? mode|\.eval", r"val|test|dropout|batch ?norm|missing|never|not"),
    cascade=("batchnorm_stats_stale", "train_val_preproc_mismatch"),
    sites=("(model)", "(validation)", "(loop)", "bn", "dropout"),
)
def scene_is_classified_in_training_mode(attach, fixed):
    """A function val() with torch.no_grad() only, which goes through the scene line by line."""
    bands, classes = 24, 5
    curves = torch.cumsum(torch.randn(classes, bands), 1) * 0.4

    def pixels(label):
        return curves[label] + 0.9 * torch.randn(len(label), bands)

    class SpectralNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.bn = nn.Linear(bands, 64), nn.BatchNorm1d(64)
            self.fc2, self.out = nn.Linear(64, 64), nn.Linear(64, classes)
            self.dropout = nn.Dropout(0.4)

        def forward(self, x):
            x = self.dropout(F.relu(self.bn(self.fc1(x))))
            return self.out(self.dropout(F.relu(self.fc2(x))))

    def val(net, lines):
        net.eval() if fixed else None
        wrong = []
        with torch.no_grad():
            for data, target in lines:
                wrong.append((net(data).argmax(1) != target).float().mean().item())
        return float(np.mean(wrong))

    label = torch.randint(0, classes, (900,))
    train_loader = DataLoader(TensorDataset(pixels(label), label), batch_size=45, shuffle=True)
    scene = torch.arange(classes).repeat_interleave(100)  # a line of the scene is mostly one crop
    val_loader = DataLoader(TensorDataset(pixels(scene), scene), batch_size=20)
    net = SpectralNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)
    for e in range(10):
        net.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(data), target)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        wrong = val(net, val_loader)
        session.log(val_accuracy=1 - wrong)
    return wrong
