"""Tenth hold-out: pictures, boxes and masks."""

from __future__ import annotations

import copy
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fault_programs.holdout_10.about import fault
from fault_programs.holdout_10.material import boxes, digits, overlap


@fault(
    "eval_mode_in_training",
    area="multimodal dialogue",
    source="https://github.com/shubhamagarwal92/mmd/issues/14",
    cause="evaluate() puts the model into evaluation mode and nothing puts it back, so dropout and batch norm are off for the rest of the training.",
    words=(r"eval(uation)?[ _]mode|model\.eval|\.train\(\)", r"(after|back|rest|remain|stay|still|never)"),
    cascade=("overfitting", "batchnorm_stats_stale"),
    sites=("(model)", "(loop)", "(validation)"),
    onset=6,
)
def evaluates_in_the_middle_and_goes_on(attach, fixed):
    """evaluate() calls model.eval(), and train() is called only once."""
    xtr, ytr, xte, yte = digits()
    xtr, ytr = xtr[:240], ytr[:240].clone()
    made = torch.Generator().manual_seed(1)
    wrong = torch.rand(240, generator=made) < 0.4
    ytr[wrong] = torch.randint(0, 10, (int(wrong.sum()),), generator=made)
    words = torch.randint(0, 30, (len(xtr), 5))
    words_te = torch.randint(0, 30, (len(xte), 5))

    class Fusion(nn.Module):
        def __init__(self):
            super().__init__()
            self.text = nn.EmbeddingBag(30, 16)
            self.image = nn.Sequential(
                nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.6)
            )
            self.out = nn.Sequential(nn.Linear(144, 96), nn.ReLU(), nn.Dropout(0.6), nn.Linear(96, 10))

        def forward(self, image, text):
            return self.out(torch.cat([self.image(image), self.text(text)], 1))

    model = Fusion()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)

    def evaluate():
        model.eval()
        with torch.no_grad():
            logits = model(xte[:300], words_te[:300])
        return F.cross_entropy(logits, yte[:300])

    model.train()
    loader = DataLoader(TensorDataset(xtr, words, ytr), batch_size=40, shuffle=True)
    for epoch in range(60):
        for image, text, label in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(image, text), label)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        session.log(val_loss=evaluate().item())
        model.train() if fixed else None
    model.eval()
    with torch.no_grad():
        return float((model(xte[300:], words_te[300:]).argmax(1) != yte[300:]).float().mean())


class ShotsDataset(Dataset):
    """Pictures by file name, and the labels of the files that belong to them."""

    def __init__(self, images, labels, img_paths, label_paths):
        self.images, self.labels = images, labels
        self.img_paths, self.label_paths = img_paths, label_paths

    def __len__(self):
        return len(self.img_paths)

    def __getitem__(self, i):
        return self.images[self.img_paths[i]], self.labels[self.label_paths[i]]


@fault(
    "label_shuffle_mismatch",
    area="detection",
    source="https://github.com/meituan/YOLOv6/issues/735",
    cause="The label files are sorted by their own names, which puts a.tag.txt before a.txt, so labels and pictures are paired wrongly.",
    words=(r"label|target", r"mismatch|wrong|belong|order|sort|pair|unrelated"),
    cascade=("not_learning", "underfitting", "loss_plateau", "constant_output", "overfitting"),
    sites=("(data)", "loader", "(loss)"),
    exact=False,
)
def label_files_are_sorted_by_their_own_names(attach, fixed):
    """sorted(label_paths) beside a list of pictures that is in another order."""
    pictures, targets = boxes(500)
    names = [f"{i:03d}{tag}" for i in range(250) for tag in ("", ".tag")]
    images = {name + ".jpg": pictures[i] for i, name in enumerate(names)}
    labels = {name + ".txt": targets[i] for i, name in enumerate(names)}
    img_paths = sorted(images)
    label_paths = [p.replace(".jpg", ".txt") for p in img_paths]
    label_paths = label_paths if fixed else sorted(label_paths)
    loader = DataLoader(ShotsDataset(images, labels, img_paths, label_paths), batch_size=25, shuffle=True)

    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(12, 16, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(16 * 36, 48),
        nn.SiLU(),
        nn.Linear(48, 4),
        nn.Sigmoid(),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    for epoch in range(14):
        for image, box in loader:
            loss = F.smooth_l1_loss(net(image), box, beta=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(box_loss=loss.item())
    seen, truth = boxes(200)
    with torch.no_grad():
        return 1 - float(overlap(net(seen), truth).mean())


@fault(
    "relu_before_logits",
    area="segmentation",
    source="http://www.dtcms.com/a/394596.html",
    cause="The last block of the net ends in a ReLU, so the logits are never negative and no pixel can be called background.",
    words=(r"relu", r"logit|output|last|negative|background"),
    cascade=("dead_relu", "loss_plateau", "not_learning", "underfitting", "constant_output"),
    sites=("outc", "last", "(model)", "(loss)"),
)
def last_block_of_the_unet_ends_in_a_relu(attach, fixed):
    """The output goes through the same conv, norm and ReLU as all others."""

    class ConvBNReLU(nn.Sequential):
        def __init__(self, a, b, kernel=3, activation=True):
            super().__init__(nn.Conv2d(a, b, kernel, padding=kernel // 2), nn.BatchNorm2d(b))
            if activation:
                self.append(nn.ReLU(inplace=True))

    class UCTransNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.inc = ConvBNReLU(1, 8)
            self.down1 = nn.Sequential(nn.MaxPool2d(2), ConvBNReLU(8, 16))
            self.up1 = nn.Upsample(scale_factor=2)
            self.fuse = ConvBNReLU(24, 8)
            self.outc = ConvBNReLU(8, 1, kernel=1, activation=not fixed)

        def forward(self, x):
            x1 = self.inc(x)
            x2 = self.up1(self.down1(x1))
            return self.outc(self.fuse(torch.cat([x1, x2], 1)))

    def slices(count):
        masks = torch.zeros(count, 1, 12, 12)
        for mask in masks:
            i, j = random.randrange(8), random.randrange(8)
            mask[0, i : i + random.randint(3, 5), j : j + random.randint(3, 5)] = 1
        return 0.5 * torch.randn(count, 1, 12, 12) + masks, masks

    train, (xval, yval) = slices(240), slices(80)
    model = UCTransNet()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)

    def dice(logits, masks):
        found = (torch.sigmoid(logits) > 0.5).float()
        return float((2 * (found * masks).sum() + 1e-5) / (found.sum() + masks.sum() + 1e-5))

    for epoch in range(12):
        model.train()
        for image, label in DataLoader(TensorDataset(*train), batch_size=16, shuffle=True):
            loss = criterion(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            logits = model(xval)
        session.log(val_loss=criterion(logits, yval).item(), val_dice=dice(logits, yval))
    return float(criterion(logits, yval))


class PairsDataset(Dataset):
    """Random pairs of pictures, half of them of one class."""

    def __init__(self, x, y, mark):
        self.x, self.y, self.mark = x, y, mark
        self.by_class = [torch.nonzero(y == c).flatten().tolist() for c in range(10)]

    def __len__(self):
        return 1500

    def __getitem__(self, _):
        i = random.randrange(len(self.x))
        same = random.random() < 0.5
        c = int(self.y[i]) if same else random.choice([c for c in range(10) if c != int(self.y[i])])
        j = random.choice(self.by_class[c])
        return self.x[i], self.x[j], torch.tensor(self.mark(int(self.y[i]), int(self.y[j])), dtype=torch.float32)


@fault(
    "pair_label_inverted",
    area="siamese",
    source="from memory: forum questions on siamese networks whose contrastive loss falls while verification is no better than chance",
    cause="The dataset marks equal classes with 1, but the contrastive loss takes 1 for different, so equal pairs are pushed apart.",
    words=(r"pair|contrastive|label|same|similar", r"invert|flip|swap|opposite|revers|apart|wrong way|convention"),
    also=("loss_sign_flipped",),
    cascade=("loss_plateau", "underfitting", "not_learning", "constant_output"),
    sites=("(data)", "(loss)", "loss_fn", "loader"),
    exact=False,
)
def one_stands_for_the_same(attach, fixed):
    """label = int(class_1 == class_2) for a loss in which 1 means different."""
    xtr, ytr, xte, yte = digits()

    class SiameseNetwork(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            self.fc = nn.Sequential(nn.Linear(8 * 16, 64), nn.ReLU(), nn.Linear(64, 8))

        def forward_once(self, x):
            return self.fc(self.cnn(x).flatten(1))

        def forward(self, a, b):
            return self.forward_once(a), self.forward_once(b)

    class ContrastiveLoss(nn.Module):
        def __init__(self, margin=1.5):
            super().__init__()
            self.margin = margin

        def forward(self, a, b, label):
            d = F.pairwise_distance(a, b)
            return torch.mean((1 - label) * d.pow(2) + label * torch.clamp(self.margin - d, min=0.0).pow(2))

    net, criterion = SiameseNetwork(), ContrastiveLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)
    train = PairsDataset(xtr, ytr, lambda a, b: int(a != b) if fixed else int(a == b))
    for epoch in range(6):
        for a, b, label in DataLoader(train, batch_size=50):
            optimizer.zero_grad()
            loss = criterion(*net(a, b), label)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        z = net.forward_once(xte)
    d = torch.cdist(z, z)
    same = yte[:, None] == yte[None]
    near = d[same & ~torch.eye(len(z), dtype=torch.bool)]
    return float(
        (near[torch.randint(len(near), (2000,))] > d[~same][torch.randint(int((~same).sum()), (2000,))]).float().mean()
    )


@fault(
    "output_range_mismatch",
    area="detection",
    source="https://github.com/ultralytics/yolov3/issues/202",
    cause="In training the predicted width and height pass through a sigmoid, but the logarithms they should meet are often negative, and prediction uses no sigmoid.",
    words=(r"sigmoid", r"width|height|\bwh\b|range|negative|target"),
    cascade=("underfitting", "loss_plateau", "saturated_activation"),
    sites=("(loss)", "(model)", "yolo", "loss_fn"),
)
def width_and_height_pass_through_a_sigmoid(attach, fixed):
    """sigmoid on tx, ty and on tw, th."""
    anchor = 0.33
    images, truth = boxes(400)
    loader = DataLoader(TensorDataset(images, truth), batch_size=25, shuffle=True)

    class YOLO(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 12, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(12, 16, 3, 2, 1), nn.LeakyReLU(0.1)
            )
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 36, 48), nn.LeakyReLU(0.1), nn.Linear(48, 4))

        def forward(self, x):
            p = self.head(self.backbone(x))
            if self.training:
                return p
            return torch.cat([torch.sigmoid(p[:, :2]), torch.exp(p[:, 2:]) * anchor], 1)

    def compute_loss(p, target):
        pxy = torch.sigmoid(p[:, :2])
        pwh = p[:, 2:] if fixed else torch.sigmoid(p[:, 2:])
        lxy = F.mse_loss(pxy, target[:, :2])
        lwh = F.mse_loss(pwh, torch.log(target[:, 2:] / anchor))
        return lxy, lwh

    model = YOLO()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for epoch in range(14):
        model.train()
        for imgs, targets in loader:
            lxy, lwh = compute_loss(model(imgs), targets)
            loss = 4 * lxy + lwh
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), lxy=lxy.item(), lwh=lwh.item())
    model.eval()
    seen, where = boxes(200)
    with torch.no_grad():
        return 1 - float(overlap(model(seen), where).mean())


@fault(
    "graph_break_detach",
    area="3d detection",
    source="https://github.com/tom-roddick/oft/issues/6",
    cause="A line left from an experiment keeps only the score loss, so the heads for position and size are never trained.",
    words=(r"(only|left|drop|never|not).*(loss|head|train|gradient)", r"posit|dim|head|score|term"),
    also=("term_without_gradient", "unused_parameters", "result_discarded"),
    cascade=("underfitting", "loss_plateau"),
    sites=("(loss)", "(loop)", "position", "dimension"),
)
def only_the_score_is_optimised(attach, fixed):
    """total_loss = score_loss, left over from a test run."""

    class Oft(nn.Module):
        def __init__(self):
            super().__init__()
            self.frontend = nn.Sequential(
                nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, 2, 1), nn.ReLU()
            )
            self.top = nn.Sequential(nn.Flatten(), nn.Linear(16 * 36, 48), nn.ReLU())
            self.score = nn.Linear(48, 2)
            self.position = nn.Linear(48, 2)
            self.dimension = nn.Linear(48, 2)

        def forward(self, image):
            h = self.top(self.frontend(image))
            return self.score(h), self.position(h), self.dimension(h)

    def compute_loss(pred, target):
        scores, pos, dim = pred
        big = (target[:, 2] * target[:, 3] > 0.11).long()
        loss_dict = {
            "score": F.cross_entropy(scores, big),
            "position": 5 * F.l1_loss(pos, target[:, :2]),
            "dimension": 5 * F.l1_loss(dim, target[:, 2:]),
        }
        total = sum(loss_dict.values()) if fixed else loss_dict["score"]
        return total, loss_dict

    model = Oft()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    images, targets = boxes(400)
    for epoch in range(10):
        for xb, yb in DataLoader(TensorDataset(images, targets), batch_size=20, shuffle=True):
            optimizer.zero_grad()
            total, parts = compute_loss(model(xb), yb)
            total.backward()
            optimizer.step()
            session.log(total=total.item(), **{name: float(part.detach()) for name, part in parts.items()})
    seen, truth = boxes(200)
    with torch.no_grad():
        _, pos, dim = model(seen)
    return float((pos - truth[:, :2]).abs().mean() + (dim - truth[:, 2:]).abs().mean())


class RCAN(nn.Module):
    """Twice the pixels in each direction."""

    def __init__(self, width=24):
        super().__init__()
        self.head = nn.Conv2d(1, width, 3, padding=1)
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )
        self.tail = nn.Sequential(nn.Conv2d(width, 4, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x):
        h = self.head(x)
        return self.tail(h + self.body(h))


@fault(
    "latest_saved_as_best",
    area="super-resolution",
    source="https://github.com/zudi-lin/rcan-it/pull/8",
    cause="The best score so far is compared with itself instead of the new score, so each epoch counts as the best and the last weights are kept.",
    words=(r"best", r"(last|latest|every|each|always|itself|not.*(new|current))"),
    also=("best_selected_backwards",),
    cascade=("overfitting", "loss_oscillation"),
    sites=("(loop)", "(validation)", "(model)"),
    onset=4,
    exact=False,
)
def every_epoch_is_the_best(attach, fixed):
    """is_best = best >= best_val_score, with the best and not the new score."""
    xtr, _, xte, _ = digits()
    hr = xtr[:16]
    hr_seen = (hr + 0.35 * torch.randn_like(hr)).clamp(0, 1.2)
    model = RCAN()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    best, best_val_score, kept = -math.inf, -math.inf, None

    def psnr(images):
        with torch.no_grad():
            return -10 * math.log10(float(F.mse_loss(model(F.avg_pool2d(images, 2)), images)))

    for epoch in range(90):
        for lr_image, target in zip(F.avg_pool2d(hr, 2).split(8), hr_seen.split(8)):
            loss = F.mse_loss(model(lr_image), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        score = psnr(xte[:200])
        session.log(val_psnr=score)
        best = max(best, score)
        is_best = (score if fixed else best) >= best_val_score
        if is_best:
            kept = copy.deepcopy(model.state_dict())
        best_val_score = max(best_val_score, best)
    model.load_state_dict(kept)
    return 20 - psnr(xte[200:])
