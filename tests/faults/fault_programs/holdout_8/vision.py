"""Eighth hold-out: pictures, boxes, masks, rays and faces."""

from __future__ import annotations

import copy
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fault_programs.holdout_8.about import fault
from fault_programs.holdout_8.matter import clinic, draw, mistakes, scans, shapes


def conv_net(channels=16, classes=10):
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * channels, classes),
    )


def fcn(out=3, width=16):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, out, 1),
    )


class DiceLoss:
    """One minus the overlap, for `classes` classes."""

    def __init__(self, dims, smooth=1e-6):
        self.dims, self.smooth = dims, smooth

    def __call__(self, pred, targ):
        targ = F.one_hot(targ, pred.shape[1]).permute(0, 3, 1, 2).float()
        pred = pred.softmax(1)
        inter = (pred * targ).sum(self.dims)
        union = (pred + targ).sum(self.dims)
        return (1 - (2 * inter + self.smooth) / (union + self.smooth)).mean()


@fault(
    "wrong_loss_reduction",
    area="segmentation",
    source="https://github.com/fastai/fastai/pull/3439",
    cause="Dice is summed over the classes together with the pixels, so the large background alone decides and the small class is never found.",
    words=(r"dice|overlap", r"class(es)?.*(sum|dimension|background)|background|imbalance"),
    also=("class_imbalance_collapse", "single_class_output"),
    cascade=("loss_plateau", "underfitting"),
    sites=("(loss)", "loss_fn"),
)
def dice_sums_over_classes_too(attach, fixed):
    """sum over batch, class, height and width at once."""
    x, y = shapes()
    model = fcn()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = DiceLoss(dims=(2, 3) if fixed else (0, 1, 2, 3))
    session = attach(model, opt, loss_fn=criterion)
    for epoch in range(20):
        for xb, yb in draw(x[:200], y[:200], size=20):
            opt.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            opt.step()
        session.log(epoch_loss=loss)
    with torch.no_grad():
        said = model(x[200:]).argmax(1)
    hit = ((said == 2) & (y[200:] == 2)).sum() / ((said == 2) | (y[200:] == 2)).sum()
    return 1 - float(hit)


def segments(count=400, length=48):
    """Signals with one bump, its centre and width in cells of eight samples, as (x, cell, offset, log width)."""
    made = torch.Generator().manual_seed(821)
    centre = torch.rand(count, generator=made) * (length - 10) + 5
    width = 3 + 9 * torch.rand(count, generator=made)
    t = torch.arange(length)
    x = torch.exp(-(((t - centre[:, None]) / width[:, None] * 2) ** 2)) + 0.05 * torch.randn(
        count, length, generator=made
    )
    cell = (centre // 8).long()
    return x[:, None], cell, centre / 8 - cell, width / 8, centre, width


def overlap(c1, w1, c2, w2):
    """Return the intersection over the union of intervals."""
    low = torch.maximum(c1 - w1 / 2, c2 - w2 / 2)
    high = torch.minimum(c1 + w1 / 2, c2 + w2 / 2)
    inter = (high - low).clamp(min=0)
    return inter / (w1 + w2 - inter + 1e-6)


@fault(
    "wrong_columns_read",
    area="detection",
    source="https://github.com/ljbkusters/YOLOv3-1D/issues/42",
    cause="The overlap that weighs the target of objectness reads the wrong columns of the prediction, so targets are near zero and objects are not found.",
    words=(r"iou|overlap", r"index|column|slice", r"objectness"),
    also=("target_unrelated",),
    cascade=("target_scale", "loss_plateau", "underfitting", "constant_output", "class_imbalance_collapse"),
    sites=("(loss)", "(loop)"),
)
def objectness_from_the_wrong_columns(attach, fixed):
    """box_preds = pred[..., 0:2] where the columns are objectness, offset, width."""
    x, cell, offset, width, _, _ = segments()
    net = nn.Sequential(
        nn.Conv1d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(16, 24, 5, padding=2), nn.ReLU(),
        nn.MaxPool1d(2), nn.Conv1d(24, 3, 1),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    session = attach(net, optimizer)
    mse, bce = nn.MSELoss(), nn.BCEWithLogitsLoss()
    for xb, cb, ob, wb in draw(x[:320], cell[:320], offset[:320], width[:320], size=32, epochs=22):
        pred = net(xb).transpose(1, 2)
        rows = torch.arange(len(xb))
        here = pred[rows, cb]
        box_loss = mse(here[:, 1].sigmoid(), ob) + mse(here[:, 2].exp(), wb)
        box = here[:, 1:] if fixed else here[:, :2]
        with torch.no_grad():
            iou = overlap(box[:, 0].sigmoid(), box[:, 1].exp(), ob, wb)
        target = torch.zeros(pred.shape[:2])
        target[rows, cb] = iou
        object_loss = bce(pred[..., 0], target)
        loss = box_loss + object_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(box_loss=box_loss, object_loss=object_loss)
    with torch.no_grad():
        sure = net(x[320:]).transpose(1, 2)[torch.arange(80), cell[320:], 0].sigmoid()
    return 1 - float(sure.mean())


def rotation(image, mask):
    """Turn both by the same random quarter."""
    turns = random.randint(0, 3)
    return torch.rot90(image, turns, (1, 2)), torch.rot90(mask, turns, (0, 1))


def h_flip(image, mask):
    return image.flip(2), mask.flip(1)


@fault(
    "seed_reset_in_loop",
    area="segmentation",
    source="https://github.com/bnsreenu/python_for_microscopists/issues/42",
    cause="The seed is set before each transformation so that picture and mask agree, and so the same pictures are drawn again and again.",
    words=(r"seed", r"(same|few|two) (image|picture|sample|draw)"),
    also=("sampler_draws_few", "same_batch_every_step", "batches_never_seen"),
    cascade=("overfitting", "samples_left_out", "same_order_every_epoch"),
    sites=("(data)", "(loop)"),
)
def seeds_before_each_transformation(attach, fixed):
    """random.seed(seed_for_random) inside the loop that draws pictures."""
    x, y = shapes()
    seed_for_random = random.randrange(1000)
    images, masks = [], []
    transforms = [rotation, h_flip]
    for _ in range(240):
        number = random.randint(0, 199)
        transform = random.choice(transforms)
        if not fixed:
            random.seed(seed_for_random)
        image, mask = transform(x[number], y[number])
        images.append(image)
        masks.append(mask)
    loader = DataLoader(TensorDataset(torch.stack(images), torch.stack(masks)), batch_size=16, shuffle=True)
    model = fcn(width=12)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for _epoch in range(12):
        for image, mask in loader:
            loss = F.cross_entropy(model(image), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(train_loss=loss)
    with torch.no_grad():
        return float((model(x[200:]).argmax(1) != y[200:]).float().mean())


class Pairs(Dataset):
    """Pictures and masks, each through its own generator of augmentations."""

    def __init__(self, x, y, together):
        self.x, self.y = x, y
        self.image_gen, self.mask_gen = random.Random(5), random.Random(5 if together else 6)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, n):
        image, mask = self.x[n], self.y[n]
        for axis in (0, 1):
            if self.image_gen.random() < 0.5:
                image = image.flip(axis + 1)
            if self.mask_gen.random() < 0.5:
                mask = mask.flip(axis)
        return image, mask


@fault(
    "augmentation_mismatch",
    area="segmentation",
    source="https://github.com/wassname/pipe-segmentation/issues/1",
    cause="Picture and mask are flipped by two generators that do not share a seed, so masks lie elsewhere than what they mark.",
    words=(r"augment|flip|transform", r"mask.*(differ|mismatch|agree|align)"),
    also=("label_shuffle_mismatch", "target_unrelated"),
    cascade=("underfitting", "loss_plateau", "not_learning", "class_imbalance_collapse", "single_class_output"),
    sites=("(data)", "loader"),
)
def two_generators_with_two_seeds(attach, fixed):
    """Two generators, two seeds."""
    x, y = shapes()
    data = Pairs(x[:200], y[:200], together=fixed)
    net = fcn(width=12)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, opt)
    step = 0
    while step < 180:
        for image, mask in DataLoader(data, batch_size=20, shuffle=True):
            opt.zero_grad()
            out = net(image)
            loss = F.cross_entropy(out, mask)
            loss.backward()
            opt.step()
            step += 1
            if step % 10 == 0:
                session.log(loss=loss, pixel_accuracy=(out.argmax(1) == mask).float().mean())
    with torch.no_grad():
        said = net(x[200:]).argmax(1)
    found = ((said == y[200:]) & (y[200:] > 0)).sum() / (y[200:] > 0).sum()
    return 1 - float(found)


class MixDataset:
    """Pictures with the heights of their lines; now and then a second picture is laid over the first."""

    def __init__(self, x, y, careful):
        self.x, self.y, self.careful = x, y, careful

    def pull_item(self, n):
        return self.x[n], self.y[n]

    def __getitem__(self, n):
        image, label = self.pull_item(n)
        if random.random() < 0.5:
            return image, label
        other = random.randrange(len(self.x))
        image2, label2 = self.pull_item(other)
        shift = random.randint(1, 3)
        image2 = torch.roll(image2, shift, 1)
        label2 = label2.clone() if self.careful else label2
        label2 += shift / 8
        return 0.5 * image + 0.5 * image2, 0.5 * (label + label2)


@fault(
    "data_overwritten",
    area="detection",
    source="https://github.com/Megvii-BaseDetection/YOLOX/pull/275",
    cause="Mix-up shifts the labels it was handed in place, so the labels kept by the data set drift at every use.",
    words=(r"in.?place", r"label.*(chang|overwrit|modif|drift)|data.*(overwrit|chang)"),
    also=("target_unrelated",),
    cascade=(
        "label_shuffle_mismatch",
        "loss_divergence",
        "underfitting",
        "loss_oscillation",
        "target_scale",
        "loss_plateau",
    ),
    sites=("(data)", "loader"),
)
def mix_up_moves_the_kept_labels(attach, fixed):
    """label2 += shift, on the tensor the data set keeps."""
    made = torch.Generator().manual_seed(822)
    row = torch.randint(0, 5, (300,), generator=made)
    x = 0.2 * torch.randn(300, 8, 8, generator=made)
    x[torch.arange(300), row] += 1.0
    y = (row.float() / 8)[:, None].clone()
    data = MixDataset(x[:240].clone(), y[:240].clone(), careful=fixed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for _epoch in range(14):
        order = torch.randperm(240).tolist()
        for start in range(0, 240, 20):
            batch = [data[n] for n in order[start : start + 20]]
            image, label = (torch.stack(column) for column in zip(*batch))
            loss = F.mse_loss(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return float((model(x[240:]) - y[240:]).abs().mean())


class MaskedModel(nn.Module):
    """Fills in hidden patches: True in a mask is a patch that is kept."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))
        self.rec_loss_masked_only = True

    def forward(self, x, keep):
        return self.body((x * keep).flatten(1)).view_as(x)

    def rec_loss(self, pred, y, mask):
        return F.mse_loss(pred[mask], y[mask])


@fault(
    "mask_inverted",
    area="self-supervised",
    source="https://github.com/Sllambias/asparagus/pull/12",
    cause="The mask is True for kept pixels, and the loss is taken there: hidden pixels are never asked for.",
    words=(r"mask.*(invert|wrong way|visible|kept)", r"(visible|kept).*(patch|pixel)"),
    also=("target_is_input",),
    cascade=("unused_parameters",),
    sites=("(loss)", "loss_fn", "(model)", "(loop)"),
)
def reconstructs_what_it_sees(attach, fixed):
    """Loss on pred[mask] where mask means kept."""
    xtr, _, xte, _ = scans()
    model = MaskedModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for (xb,) in draw(xtr, size=50, epochs=10):
        mask = torch.rand(len(xb), 1, 8, 8) > 0.4
        pred = model(xb, mask)
        loss = model.rec_loss(pred, xb, ~mask if fixed else mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(rec_loss=loss)
    keep = torch.rand(len(xte), 1, 8, 8, generator=torch.Generator().manual_seed(1)) > 0.4
    with torch.no_grad():
        return float(F.mse_loss(model(xte, keep)[~keep], xte[~keep]))


class PatchEncoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x):
        return F.normalize(self.net(x.flatten(1)), dim=1)


def neighbour_error(embed, x, y, memory, labels):
    """Return how often the nearest neighbour is of another class."""
    with torch.no_grad():
        near = torch.cdist(embed(x), embed(memory)).argmin(1)
    return float((labels[near] != y).float().mean())


@fault(
    "mask_inverted",
    area="anomaly detection",
    source="https://github.com/jinnnju/PaAno/issues/1",
    cause="The diagonal is filled with -inf as a similarity, which is the largest distance, so it is always the negative and the loss is zero.",
    words=(r"inf", r"diagonal|itself", r"loss.*(zero|0)|zero.*gradient"),
    also=("pairs_with_itself", "term_without_gradient"),
    cascade=("vanishing_gradient", "not_learning", "loss_plateau", "optimizer_step_noop", "dead_relu", "underfitting"),
    sites=("(loss)", "loss_fn", "(loop)"),
)
def hardest_negative_is_itself(attach, fixed):
    """fill_(-inf) before 1 - sim and max."""
    xtr, ytr, xte, yte = scans()
    model = PatchEncoder(dim=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    fill = float("inf") if fixed else -float("inf")
    for step in range(200):
        digit = torch.randperm(10)
        rows = torch.stack([torch.nonzero(ytr == d)[:, 0][torch.randint(0, 100, (2,))] for d in digit])
        anchor, positive = model(xtr[rows[:, 0]]), model(xtr[rows[:, 1]])
        sim = anchor @ positive.T
        pos_dists = 1 - sim.diagonal()
        sim_f = sim.clone()
        sim_f.diagonal().fill_(fill)
        neg_dists = 1 - sim_f
        hard = neg_dists.max(1).values
        loss = F.relu(pos_dists - hard + 0.5).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(triplet_loss=loss)
    return neighbour_error(model, xte, yte, xtr[:300], ytr[:300])


@fault(
    "term_without_gradient",
    area="face recognition",
    source="https://github.com/liorshk/facenet_pytorch/issues/6",
    cause="The hard triplets are picked through numpy, so the triplet loss has no graph and only the other loss trains.",
    words=(r"numpy|detach", r"(no|without).*(gradient|graph)"),
    also=("graph_break_detach",),
    cascade=("underfitting", "loss_plateau", "unused_parameters"),
    sites=("(loss)", "(loop)", "loss_fn"),
)
def triplets_through_numpy(attach, fixed):
    """torch.from_numpy(out_a.cpu().data.numpy()[hard_triplets])."""
    xtr, ytr, xte, yte = scans()
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 12))
    head = nn.Linear(12, 2)  # the second loss only tells low digits from high ones
    net = nn.ModuleDict({"body": body, "head": head})
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    session = attach(net, opt)
    triplet = nn.TripletMarginLoss(margin=1.0)
    take = (
        (lambda out, rows: out[rows])
        if fixed
        else (lambda out, rows: torch.from_numpy(out.cpu().data.numpy()[rows.numpy()]))
    )
    for step in range(240):
        digits = torch.randint(0, 10, (48,))
        others = (digits + torch.randint(1, 10, (48,))) % 10

        def some(d):
            return torch.stack([torch.nonzero(ytr == int(k))[:, 0][torch.randint(0, 110, ())] for k in d])

        a, p, n = some(digits), some(digits), some(others)
        out_a, out_p, out_n = body(xtr[a]), body(xtr[p]), body(xtr[n])
        d_p, d_n = (out_a - out_p).norm(dim=1), (out_a - out_n).norm(dim=1)
        hard = torch.nonzero((d_n - d_p < 1.0).detach())[:, 0]
        if len(hard) == 0:
            continue
        triplet_loss = triplet(take(out_a, hard), take(out_p, hard), take(out_n, hard))
        cross_entropy = F.cross_entropy(head(out_a), (digits > 4).long())
        loss = cross_entropy + triplet_loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0:
            session.log(triplet=triplet_loss, cross_entropy=cross_entropy)
    return neighbour_error(body, xte, yte, xtr[:300], ytr[:300])


class ArcMarginProduct(nn.Module):
    """Cosines of embeddings to classes, with an angle added for the true one."""

    def __init__(self, width, classes, s=16.0, m=0.3, eps=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, width))
        self.s, self.m, self.eps = s, m, eps

    def forward(self, x, label):
        cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(self.eps, 1))
        phi = cosine * math.cos(self.m) - sine * math.sin(self.m)
        hot = F.one_hot(label, cosine.shape[1]).bool()
        return torch.where(hot, phi, cosine) * self.s


@fault(
    "nan_backward",
    area="face recognition",
    source="https://github.com/d3-ai/face-verification-demo/pull/5",
    cause="A cosine reaches 1 in a space of two dimensions, the sine is the root of 0, and its slope is infinite.",
    words=(r"sqrt|root", r"(nan|inf|not finite)"),
    cascade=("nan_in_weights", "nan_forward", "nan_in_loss", "nan_in_optimizer", "exploding_gradient"),
    sites=("(loss)", "margin", "loss_fn", "(model)"),
    onset=3,
)
def sine_of_a_cosine_of_one(attach, fixed):
    """torch.sqrt(1 - cosine.pow(2)) in few dimensions."""
    xtr, ytr, xte, yte = scans()
    xtr, ytr = xtr[ytr < 4], ytr[ytr < 4]
    xte, yte = xte[yte < 4], yte[yte < 4]
    net = nn.Module()
    net.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    net.margin = ArcMarginProduct(2, 4, m=0.1, eps=1e-4 if fixed else 0.0)
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    session = attach(net, opt)
    for xb, yb in draw(xtr, ytr, size=32, epochs=14):
        loss = F.cross_entropy(net.margin(net.body(xb), yb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        said = F.linear(F.normalize(net.body(xte)), F.normalize(net.margin.weight)).argmax(1)
    return float((said != yte).float().mean())


class ShadowWeights:
    """A moving average whose copy is put into the model when a checkpoint is written."""

    def __init__(self, model, decay=0.9):
        self.model, self.decay = model, decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self):
        for name, p in self.model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 1 - self.decay)

    def apply_shadow(self):
        for name, p in self.model.named_parameters():
            p.data.copy_(self.shadow[name])


@fault(
    "ema_not_updated",
    area="detection",
    source="https://github.com/MultimediaTechLab/YOLO/issues/97",
    cause="Nobody calls update() of the moving average, and each checkpoint copies the first weights back into the model.",
    words=(r"\bema\b|moving average|shadow", r"update.*(never|not)|(reset|overwrit).*weights"),
    also=("weights_reset_in_loop",),
    cascade=("not_learning", "loss_spike", "loss_oscillation", "underfitting", "loss_plateau"),
    sites=("(model)", "(loop)", "optimizer"),
)
def average_is_never_updated_but_copied_back(attach, fixed):
    """ema.apply_shadow() at each checkpoint; ema.update() nowhere."""
    xtr, ytr, xte, yte = scans()
    cfg = {"epochs": 6, "ema": {"decay": 0.8}, "lr": 2e-3, "batch": 50}
    model = conv_net(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    ema = ShadowWeights(model, **cfg["ema"])
    session = attach(model, optimizer)
    after_step = ema.update if fixed else (lambda: None)
    checkpoints = []
    for epoch in range(cfg["epochs"]):
        for x, y in draw(xtr, ytr, size=cfg["batch"]):
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            after_step()
        session.log(train_loss=loss, epoch=epoch)
        ema.apply_shadow()
        checkpoints.append(copy.deepcopy(model.state_dict()))
    model.load_state_dict(checkpoints[-1])
    return mistakes(model, xte, yte)


@fault(
    "metric_of_one_column",
    area="vision",
    source="https://whosebug.com/question/6339715/Why-does-the-loss-decreases-and-the-accuracy-dosen-t-increases-PyTorch",
    cause="The net has one output, so the argmax over it is always 0 and the accuracy is the share of zeros.",
    words=(r"argmax|max", r"(one|single).*(output|column|unit)", r"accuracy.*(constant|same|never)"),
    also=("index_for_value",),
    cascade=("single_class_output",),
    sites=("(validation)", "(loop)"),
    onset=10,
)
def accuracy_of_a_single_output(attach, fixed):
    """_, yhat = torch.max(z.data, 1) with z of one column."""
    xtr, ytr, xte, yte = scans()
    ytr, yte = (ytr > 4).float(), (yte > 4).float()
    model = conv_net(8, classes=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.BCEWithLogitsLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for epoch in range(8):
        cost = 0.0
        for x, y in draw(xtr, ytr, size=50):
            model.train()
            optimizer.zero_grad()
            z = model(x)
            loss = criterion(z, y[:, None])
            loss.backward()
            optimizer.step()
            cost += loss.item()
        correct = 0
        model.eval()
        with torch.no_grad():
            for x, y in DataLoader(TensorDataset(xte, yte), batch_size=100):
                z = model(x)
                yhat = (z.data[:, 0] > 0).float() if fixed else torch.max(z.data, 1)[1].float()
                correct += (yhat == y).sum().item()
        accuracy = correct / len(xte)
        session.log(loss=cost, accuracy_val=accuracy)
    return 1 - accuracy


def render(density, colour, depth, far):
    """Return the colour along rays from densities and colours at depths."""
    width = torch.cat([depth[:, 1:] - depth[:, :-1], torch.full_like(depth[:, :1], far)], 1)
    alpha = 1 - torch.exp(-density * width)
    through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    return (alpha * through * colour).sum(1)


@fault(
    "nan_forward",
    area="nerf",
    source="https://github.com/apple/ml-neuman/pull/12",
    cause="Two neighbouring samples of a ray fall together, and the direction between them is divided by an interval of zero.",
    words=(r"divi|zero", r"nan|not finite"),
    also=("nan_in_loss", "nan_in_data"),
    cascade=("nan_in_weights", "nan_backward", "nan_in_optimizer", "loss_divergence"),
    sites=("(model)", "(data)", "(loop)", "(loss)", "field"),
    onset=2,
)
def samples_of_a_ray_fall_together(attach, fixed):
    """(p[1:] - p[:-1]) / norm after a perturbation that may clamp."""
    eps = 1e-4 if fixed else 0.0
    made = torch.Generator().manual_seed(823)
    rays = torch.rand(400, 2, generator=made)
    truth = torch.sin(5 * rays[:, 0]) * 0.4 + 0.5 * rays[:, 1]
    field = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    optimizer = torch.optim.Adam(field.parameters(), lr=3e-3)
    session = attach(field, optimizer)

    def look(batch, jitter):
        depth = torch.linspace(0, 1, 8).repeat(len(batch), 1)
        depth = (depth + jitter * (torch.rand(len(batch), 8) - 0.5)).clamp(0, 1).sort(1).values
        depth = depth + eps * torch.arange(8)
        points = torch.stack([batch[:, :1] + depth, batch[:, 1:] - depth * depth], -1)
        hop = points[:, 1:] - points[:, :-1]
        along = hop / hop.norm(dim=-1, keepdim=True)
        along = torch.cat([along, along[:, -1:]], 1)
        density, colour = field(torch.cat([points, along], -1)).unbind(-1)
        return render(F.softplus(density), colour, depth, 1.0)

    for step in range(200):
        pick = torch.randint(0, 320, (32,))
        loss = F.mse_loss(look(rays[pick], jitter=0.4), truth[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(rgb_loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(look(rays[320:], jitter=0.0), truth[320:])) ** 0.5


@fault(
    "setting_without_effect",
    area="self-supervised",
    source="https://github.com/deepinsight/insightface/issues/2219",
    cause="random_masking is called without the configured ratio, so its default of 0.1 is used whatever the configuration says.",
    words=(r"mask_ratio|ratio", r"default|(ignored|without effect|not passed)"),
    cascade=("overfitting",),
    sites=("(model)", "(loop)"),
)
def mask_ratio_is_not_handed_on(attach, fixed):
    """self.random_masking(x) instead of self.random_masking(x, self.mask_ratio)."""
    xtr, _, xte, _ = scans()

    class Vit(nn.Module):
        def __init__(self, mask_ratio):
            super().__init__()
            self.mask_ratio = mask_ratio
            self.embed = nn.Linear(4, 32)
            self.pos = nn.Parameter(0.02 * torch.randn(16, 32))
            self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
            self.hidden = nn.Parameter(torch.zeros(32))
            self.out = nn.Linear(32, 4)

        def random_masking(self, x, mask_ratio=0.1):
            drop = torch.rand(x.shape[:2]) < mask_ratio
            return torch.where(drop[..., None], self.hidden, x), drop

        def forward(self, patches):
            x = self.embed(patches)
            x, drop = self.random_masking(x, self.mask_ratio) if fixed else self.random_masking(x)
            return self.out(self.layer(x + self.pos)), drop

        def fill(self, patches, drop):
            x = torch.where(drop[..., None], self.hidden, self.embed(patches))
            return self.out(self.layer(x + self.pos))

    def patches(x):
        return F.unfold(x, 2, stride=2).transpose(1, 2)

    model = Vit(mask_ratio=0.7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for (xb,) in draw(xtr, size=50, epochs=10):
        target = patches(xb)
        pred, drop = model(target)
        if not drop.any():
            continue
        loss = F.mse_loss(pred[drop], target[drop])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    target = patches(xte)
    drop = torch.rand(target.shape[:2], generator=torch.Generator().manual_seed(2)) < 0.7
    with torch.no_grad():
        return float(F.mse_loss(model.fill(target, drop)[drop], target[drop]))


@fault(
    "resume_incomplete",
    area="medical",
    source="https://github.com/EvolvingLMMs-Lab/OneVision-Encoder/pull/65",
    cause="The checkpoint holds weights and schedule but no state of the optimizer, so after resuming the first steps are far too large.",
    words=(r"optimi[sz]er.*(state|moment)", r"resum|checkpoint"),
    also=("momentum_state_stale",),
    cascade=("loss_spike", "loss_oscillation"),
    sites=("optimizer", "(loop)"),
    onset=121,
)
def resumes_without_moments(attach, fixed):
    """torch.save({'backbone': ..., 'scheduler': ...})."""
    xtr, ytr, xte, yte = clinic()

    def build():
        net = nn.Sequential(nn.Linear(30, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
        return net, torch.optim.Adam(net.parameters(), lr=2e-2, betas=(0.9, 0.9999))

    def losses_after(net):
        with torch.no_grad():
            return float(F.cross_entropy(net(xtr), ytr))

    def train(net, optimizer, session, steps):
        worst = 0.0
        for step in range(steps):
            pick = torch.randint(0, 400, (200,))
            loss = F.cross_entropy(net(xtr[pick]), ytr[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            worst = max(worst, losses_after(net))
        return worst

    net, optimizer = build()
    train(net, optimizer, attach(net, optimizer), 120)
    saved = copy.deepcopy({"backbone": net.state_dict(), "optimizer": optimizer.state_dict()})
    before = losses_after(net)
    net, optimizer = build()
    net.load_state_dict(saved["backbone"])
    if fixed:
        optimizer.load_state_dict(saved["optimizer"])
    worst = train(net, optimizer, attach(net, optimizer), 60)
    return worst - before
