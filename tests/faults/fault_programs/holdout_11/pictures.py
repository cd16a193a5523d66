"""Eleventh hold-out: pictures, their labels, masks and points."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fault_programs.holdout_11.about import fault
from fault_programs.holdout_11.material import digits, discs


class LeNet(nn.Module):
    """Two convolutions and two dense layers."""

    def __init__(self, classes=10, norm=False, head=None):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16) if norm else nn.Identity()
        self.fc1 = nn.Linear(64, 48)
        self.fc2 = nn.Linear(48, classes)
        self.head = head or nn.Identity()

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.norm(self.conv2(x))), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.head(self.fc2(x))


def wrong_share(model, x, y):
    """Return the share of wrong answers in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) != y).float().mean())


@fault(
    "lr_too_high",
    area="text recognition",
    source="https://github.com/PaddlePaddle/PaddleOCR/issues/3254",
    cause="The learning rate was made for many machines and is far too high for this one, so accuracy drops to that of guessing.",
    words=(r"learning rate|\blr\b", r"high|large|big|reduce|lower"),
    cascade=(
        "dead_relu",
        "loss_plateau",
        "not_learning",
        "constant_output",
        "loss_spike",
        "loss_divergence",
        "exploding_activation",
        "exploding_gradient",
        "loss_oscillation",
        "saturated_activation",
    ),
    sites=("optimizer",),
    exact=False,
)
def rate_of_eight_cards_on_one(attach, fixed):
    """Adam with lr=0.12 for a small recogniser."""
    xtr, ytr, xte, yte = digits()
    config = {"epochs": 6, "batch": 40, "lr": 0.0015 if fixed else 0.12, "betas": (0.9, 0.999)}
    model = LeNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"], betas=config["betas"])
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=config["batch"], shuffle=True)
    for epoch in range(config["epochs"]):
        model.train()
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        session.log(acc=1 - wrong_share(model, xte, yte))
    return wrong_share(model, xte, yte)


@fault(
    "lr_too_low",
    area="image classification",
    source="from memory: forum questions on a loss that stays near 2.30 with SGD at 1e-5, answered with a higher rate",
    cause="The learning rate of SGD is so low that the weights have hardly moved in the whole run.",
    words=(r"learning rate|\blr\b", r"low|small|higher|increase|raise"),
    cascade=("not_learning", "loss_plateau", "underfitting", "constant_output"),
    sites=("optimizer",),
    exact=False,
)
def loss_stays_at_two_point_three(attach, fixed):
    """SGD with a rate that suits Adam's fine tuning."""
    xtr, ytr, xte, yte = digits()
    net = LeNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05 if fixed else 1e-4, momentum=0.9)
    session = attach(net, optimizer)
    for epoch in range(8):
        net.train()
        running_loss = 0.0
        for i, (inputs, labels) in enumerate(DataLoader(TensorDataset(xtr, ytr), batch_size=48, shuffle=True)):
            optimizer.zero_grad()
            outputs = net(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            if i % 5 == 4:
                session.log(loss=running_loss / 5)
                running_loss = 0.0
    return wrong_share(net, xte, yte)


@fault(
    "double_softmax",
    area="image classification",
    source="from memory: forum questions on a model that ends in nn.Softmax and is trained with nn.CrossEntropyLoss",
    cause="The model ends in a softmax and CrossEntropyLoss takes another, so the loss is flat and cannot fall below 1.46.",
    words=(r"softmax",),
    cascade=("underfitting", "loss_plateau", "not_learning", "vanishing_gradient", "lr_too_low"),
    sites=("head", "(loss)", "loss_fn", "criterion"),
)
def model_ends_in_a_softmax(attach, fixed):
    """nn.Softmax(dim=1) before nn.CrossEntropyLoss."""
    xtr, ytr, xte, yte = digits()
    model = LeNet(head=nn.Identity() if fixed else nn.Softmax(dim=1))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    session = attach(model, optimizer)
    for epoch in range(12):
        for images, labels in DataLoader(TensorDataset(xtr, ytr), batch_size=50, shuffle=True):
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    return wrong_share(model, xte, yte)


@fault(
    "eval_mode_in_training",
    area="segmentation",
    source="https://github.com/wkentaro/pytorch-fcn/pull/56",
    cause="Validation comes in the middle of an epoch and leaves the model in evaluation mode, so batch norm uses its first, unfinished averages for the rest of the training.",
    words=(r"eval|\.train\(\)|train(ing)? mode",),
    also=("batchnorm_stats_stale",),
    cascade=(
        "overfitting",
        "loss_spike",
        "loss_oscillation",
        "exploding_activation",
        "exploding_gradient",
        "loss_divergence",
    ),
    sites=("(model)", "(loop)", "(validation)"),
    onset=5,
)
def validation_comes_in_the_middle(attach, fixed):
    """validate() calls model.eval() after four iterations and train() is called once before the loop."""
    x, mask, _ = discs(240)
    xval, mval, _ = discs(80)
    x, xval = 6 + 4 * x, 6 + 4 * xval

    class Trainer:
        def __init__(self):
            block = lambda a, b: [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b, momentum=0.02), nn.ReLU()]
            self.model = nn.Sequential(*block(1, 8), *block(8, 8), *block(8, 8), nn.Conv2d(8, 1, 1))
            self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            self.iteration, self.interval_validate = 0, 4

        def validate(self):
            training = self.model.training
            self.model.eval()
            with torch.no_grad():
                loss = F.binary_cross_entropy_with_logits(self.model(xval), mval)
            self.model.train() if fixed and training else None
            return loss.item()

        def train(self, session, epochs):
            self.model.train()
            for _ in range(epochs):
                order = torch.randperm(len(x))
                for part in order.split(16):
                    if self.iteration % self.interval_validate == self.interval_validate - 1:
                        session.log(val_loss=self.validate())
                    self.iteration += 1
                    loss = F.binary_cross_entropy_with_logits(self.model(x[part]), mask[part])
                    self.optim.zero_grad()
                    loss.backward()
                    self.optim.step()
                    session.log(loss=loss.item())

    trainer = Trainer()
    trainer.train(attach(trainer.model, trainer.optim), 8)
    return trainer.validate()


@fault(
    "train_mode_in_eval",
    area="multimodal classification",
    source="https://github.com/pliang279/MultiBench/issues/26",
    cause="The validation sets evaluation mode and then calls train() again before it runs, so dropout and batch statistics are those of training.",
    words=(r"train(ing)? mode|\.train\(\)|eval",),
    also=("dropout_ignores_mode",),
    sites=("(model)", "(loop)", "(validation)", "model"),
    exact=False,
)
def validation_calls_train_again(attach, fixed):
    """model.eval() in the loop and model.train() in the helper that validates."""
    xtr, ytr, xte, yte = digits(900)
    left, right = xtr[..., :4].flatten(1), xtr[..., 4:].flatten(1)
    left_te, right_te = xte[..., :4].flatten(1), xte[..., 4:].flatten(1)

    class LateFusion(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoders = nn.ModuleList([nn.Sequential(nn.Linear(32, 64), nn.ReLU()) for _ in range(2)])
            self.head = nn.Sequential(nn.Dropout(0.75), nn.Linear(128, 10))

        def forward(self, parts):
            return self.head(torch.cat([f(p) for f, p in zip(self.encoders, parts)], 1))

    model = LateFusion()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)

    def process(loader):
        model.eval() if fixed else model.train()
        right_ones = total = 0
        losses = []
        with torch.no_grad():
            for *parts, y in loader:
                out = model(parts)
                losses.append(F.cross_entropy(out, y).item())
                right_ones += int((out.argmax(1) == y).sum())
                total += len(y)
        return sum(losses) / len(losses), right_ones / total

    train = DataLoader(TensorDataset(left, right, ytr), batch_size=45, shuffle=True)
    valid = DataLoader(TensorDataset(left_te, right_te, yte), batch_size=64)
    accuracy = 0.0
    for epoch in range(12):
        model.train()
        for *parts, y in train:
            loss = F.cross_entropy(model(parts), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        val_loss, accuracy = process(valid)
        session.log(val_loss=val_loss, val_acc=accuracy)
    return 1 - accuracy


class FlippedPairs(Dataset):
    """Pictures and masks that are turned over at random."""

    def __init__(self, x, mask, together):
        self.x, self.mask, self.together = x, mask, together

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        image, truth = self.x[i], self.mask[i]
        first = (random.random() < 0.5, random.random() < 0.5)
        second = first if self.together else (random.random() < 0.5, random.random() < 0.5)
        for axis in (0, 1):
            image = image.flip(axis + 1) if first[axis] else image
            truth = truth.flip(axis + 1) if second[axis] else truth
        return image, truth


@fault(
    "augmentation_not_shared",
    area="segmentation",
    source="https://github.com/mdbloice/Augmentor/issues/209",
    cause="The random flip is drawn once for the picture and once more for its mask, so most masks do not lie over their pictures.",
    words=(r"flip|augment|transform", r"mask|target|label|same|both|differ|separate"),
    also=("label_shuffle_mismatch",),
    cascade=("underfitting", "loss_plateau", "not_learning", "constant_output", "class_imbalance_collapse"),
    sites=("(data)", "loader"),
    exact=False,
)
def mask_is_flipped_by_another_draw(attach, fixed):
    """RandomFlip for the picture and RandomFlip for the mask."""
    x, mask, _ = discs(300)
    xte, mte, _ = discs(100)
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 1)
    )
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, opt)
    loader = DataLoader(FlippedPairs(x, mask, together=fixed), batch_size=20, shuffle=True)
    for epoch in range(9):
        for image, truth in loader:
            loss = F.binary_cross_entropy_with_logits(net(image), truth)
            opt.zero_grad()
            loss.backward()
            opt.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        found = (net(xte) > 0).float()
    return 1 - float((2 * (found * mte).sum()) / (found.sum() + mte.sum() + 1))


@fault(
    "result_discarded",
    area="keypoints",
    source="https://github.com/Eaphan/NCLR/issues/10",
    cause="np.fliplr returns a flipped picture that nobody keeps, while the coordinate of the target is flipped, so half of the targets are wrong.",
    words=(r"flip", r"discard|not (used|kept|assigned|applied)|result|return|target|in place"),
    also=("label_shuffle_mismatch", "augmentation_not_shared"),
    cascade=("underfitting", "loss_plateau", "not_learning", "constant_output"),
    sites=("(data)", "loader"),
    exact=False,
)
def flipped_picture_is_thrown_away(attach, fixed):
    """np.fliplr(img) without img = before it."""
    pictures, _, points = discs(400, noise=0.15)
    pictures, points = pictures[:, 0].numpy(), points.numpy()

    class Keypoints(Dataset):
        flip_image_prob = 0.5

        def __len__(self):
            return len(pictures)

        def __getitem__(self, i):
            img, at = pictures[i], points[i].copy()
            if np.random.random() < self.flip_image_prob:
                flipped = np.fliplr(img)
                img = flipped if fixed else img
                at[0] = 15 / 16 - at[0]
            return torch.from_numpy(img.copy())[None], torch.from_numpy(at)

    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.ReLU(),
        nn.Linear(32, 2),
    )
    optim = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optim)
    for epoch in range(14):
        for img, at in DataLoader(Keypoints(), batch_size=25, shuffle=True):
            optim.zero_grad()
            loss = F.mse_loss(net(img), at)
            loss.backward()
            optim.step()
            session.log(loss=loss.item())
    seen, _, where = discs(200, noise=0.15)
    with torch.no_grad():
        return float((net(seen) - where).abs().mean() * 16)


@fault(
    "class_index_mismatch",
    area="image folders",
    source="https://github.com/oripress/CCC/issues/3",
    cause="The number of a class is its place in os.listdir, which has another order in the folder of the validation, so validation labels mean other classes.",
    words=(r"(class|label|order|sort|listdir|index)", r"valid|evaluation|differ|order|mismatch"),
    also=("label_shuffle_mismatch", "train_val_preproc_mismatch"),
    cascade=("overfitting",),
    sites=("(data)", "(validation)", "loader"),
    exact=False,
)
def class_numbers_come_from_listdir(attach, fixed):
    """all_classes = os.listdir(root), unsorted, once for each folder."""
    xtr, ytr, xte, yte = digits()
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

    def listdir(folder):
        found = names.copy()
        random.Random(folder).shuffle(found)
        return found

    class ImageFolder(Dataset):
        def __init__(self, folder, images, labels):
            self.classes = sorted(listdir(folder)) if fixed else listdir(folder)
            self.images = images
            self.targets = [self.classes.index(names[int(label)]) for label in labels]

        def __len__(self):
            return len(self.images)

        def __getitem__(self, i):
            return self.images[i], self.targets[i]

    train, val = ImageFolder("data/train", xtr, ytr), ImageFolder("data/val", xte, yte)
    model = LeNet(norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    loss = None
    for epoch in range(6):
        model.train()
        for images, labels in DataLoader(train, batch_size=60, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        wrong, val_loss = 0, 0.0
        with torch.no_grad():
            for images, labels in DataLoader(val, batch_size=100):
                out = model(images)
                val_loss += F.cross_entropy(out, labels, reduction="sum").item() / len(val)
                wrong += int((out.argmax(1) != labels).sum())
        session.log(val_loss=val_loss, val_error=wrong / len(val))
    return wrong / len(val)


@fault(
    "lr_schedule_collapse",
    area="super-resolution",
    source="https://github.com/pytorch/tutorials/pull/640",
    cause="The scheduler counts epochs but is stepped with each batch, so the rate is divided by ten every few steps and soon is nothing.",
    words=(r"schedul", r"batch|step|epoch|iteration|too (fast|early|often)"),
    cascade=("lr_too_low", "loss_plateau", "underfitting", "not_learning"),
    sites=("scheduler", "optimizer", "(loop)"),
    onset=10,
)
def rate_falls_with_every_batch(attach, fixed):
    """StepLR(step_size=epochs // 2) is stepped in the inner loop."""
    epochs = 16
    sharp = digits()[0][:320]
    small = F.avg_pool2d(sharp, 2)
    net = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1),
        nn.PReLU(),
        nn.Conv2d(24, 24, 3, padding=1),
        nn.PReLU(),
        nn.Conv2d(24, 4, 3, padding=1),
        nn.PixelShuffle(2),
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=epochs // 2, gamma=0.1)
    session = attach(net, optimizer, scheduler=scheduler)
    for epoch in range(epochs):
        order = torch.randperm(len(sharp)).split(20)
        for i, part in enumerate(order, 1):
            loss = F.l1_loss(net(small[part]), sharp[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step() if i == len(order) or not fixed else None
            session.log(pixel_loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
    test = digits()[2][:200]
    with torch.no_grad():
        return float(F.l1_loss(net(F.avg_pool2d(test, 2)), test))


@fault(
    "unnormalised_inputs",
    area="image classification",
    source="from memory: forum questions on pictures that are read with cv2 and given to the network as values up to 255",
    cause="The pictures have values from 0 to 255, since no transform has brought them to about one.",
    words=(r"normali[sz]|255|scal|range",),
    cascade=(
        "dead_relu",
        "large_initial_loss",
        "loss_plateau",
        "not_learning",
        "exploding_gradient",
        "lr_too_high",
        "constant_output",
        "loss_spike",
        "exploding_activation",
        "nan_in_loss",
        "nan_forward",
    ),
    sites=("(data)", "conv1", "(inputs)"),
    exact=False,
)
def pictures_have_values_up_to_255(attach, fixed):
    """torch.from_numpy(img).float() and no division."""
    x, y, xt, yt = digits()
    raw, raw_test = (255 * x).byte().numpy(), (255 * xt).byte().numpy()

    def to_tensor(img):
        out = torch.from_numpy(img).float()
        return out / 255.0 if fixed else out

    class Scans(Dataset):
        def __init__(self, images, labels):
            self.images, self.labels = images, labels

        def __len__(self):
            return len(self.images)

        def __getitem__(self, i):
            return to_tensor(self.images[i]), self.labels[i]

    model = LeNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = attach(model, optimizer)
    for epoch in range(6):
        model.train()
        for data, target in DataLoader(Scans(raw, y), batch_size=40, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    return wrong_share(model, to_tensor(raw_test), yt)


@fault(
    "train_val_preproc_mismatch",
    area="transfer",
    source="https://theneuralbase.com/torchvision/learn/beginner/normalization-mismatch/",
    cause="Training normalises the pictures with mean and deviation, and the transform of the validation leaves this out.",
    words=(r"normali[sz]|preprocess|transform", r"valid|eval|test|differ|mismatch"),
    cascade=("overfitting",),
    sites=("(data)", "(validation)", "(inputs)"),
)
def validation_lacks_the_normalisation(attach, fixed):
    """Two transforms, of which one ends after ToTensor."""
    xtr, ytr, xte, yte = digits()

    def normalise(x):
        return (x - 0.3) / 0.12

    train_tf = [normalise]
    val_tf = [normalise] if fixed else []

    def loader(x, y, transforms, **kwargs):
        for transform in transforms:
            x = transform(x)
        return DataLoader(TensorDataset(x, y), batch_size=64, **kwargs)

    loaders = {"train": loader(xtr, ytr, train_tf, shuffle=True), "val": loader(xte, yte, val_tf)}
    model = LeNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    worst = 0.0
    for epoch in range(9):
        for phase in ("train", "val"):
            model.train(phase == "train")
            loss_sum, wrong = 0.0, 0
            for inputs, labels in loaders[phase]:
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    loss = F.cross_entropy(outputs, labels)
                if phase == "train":
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    session.log(loss=loss.item())
                loss_sum += loss.item() / len(loaders[phase])
                wrong += int((outputs.argmax(1) != labels).sum())
            if phase == "val":
                session.log(val_loss=loss_sum)
                worst = wrong / len(xte)
    return worst


@fault(
    "stale_params_in_optimizer",
    area="transfer",
    source="from memory: forum questions on transfer learning in which model.fc is replaced after the optimizer was made",
    cause="The last layer is replaced after the optimizer was made, so the optimizer holds the old layer and the new one never changes.",
    words=(r"optimi[sz]er", r"replac|old|after|new|not (in|part)|stale|before"),
    also=("params_not_in_optimizer",),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("fc2", "optimizer"),
)
def last_layer_is_replaced_too_late(attach, fixed):
    """optimizer = Adam(model.fc2.parameters()), and then model.fc2 = nn.Linear(48, 5)."""
    xtr, ytr, xte, yte = digits()
    model = LeNet(classes=10)
    before = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(120):
        pick = torch.randint(0, len(xtr), (64,))
        loss = F.cross_entropy(model(xtr[pick].rot90(2, (2, 3))), ytr[pick])
        before.zero_grad()
        loss.backward()
        before.step()
    for p in model.parameters():
        p.requires_grad = False

    def new_head():
        model.fc2 = nn.Linear(48, 10)

    def new_optimizer():
        model.fc2.requires_grad_(True)
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    optimizer = None
    for action in (new_head, new_optimizer) if fixed else (new_optimizer, new_head):
        optimizer = action() or optimizer
    session = attach(model, optimizer)
    for epoch in range(6):
        for images, labels in DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    return wrong_share(model, xte, yte)


@fault(
    "nan_backward",
    area="face recognition",
    source="https://github.com/ronghuaiyang/arcface-pytorch/issues/91",
    cause="The sine of the angle is the root of 1 - cos**2, whose slope is infinite once a cosine is exactly one.",
    words=(r"sqrt|root|sine?\b|cos", r"zero|0|eps|clamp|inf|nan|slope|gradient"),
    cascade=("nan_in_optimizer", "nan_in_loss", "nan_forward", "nan_in_weights", "constant_output", "lr_too_high"),
    sites=("arc", "(loss)", "(model)"),
    onset=1,
)
def root_of_one_minus_a_square(attach, fixed):
    """torch.sqrt((1 - cosine**2).clamp(0, 1))."""
    xtr, ytr, xte, yte = digits()
    xtr, ytr, xte, yte = xtr[ytr < 5], ytr[ytr < 5], xte[yte < 5], yte[yte < 5]

    class ArcMarginProduct(nn.Module):
        def __init__(self, s=8.0, m=0.1):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 2))
            self.s, self.cos_m, self.sin_m = s, np.cos(m), np.sin(m)

        def forward(self, x, label):
            cosine = F.linear(F.normalize(x), F.normalize(self.weight))
            sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(1e-6 if fixed else 0.0, 1))
            phi = cosine * self.cos_m - sine * self.sin_m
            one_hot = F.one_hot(label, 5).float()
            return self.s * (one_hot * phi + (1 - one_hot) * cosine)

    class FaceNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.PReLU(), nn.Linear(64, 2))
            self.arc = ArcMarginProduct()

        def forward(self, x, label):
            return self.arc(self.body(x), label)

    net = FaceNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)
    for epoch in range(20):
        for data, label in DataLoader(TensorDataset(xtr, ytr), batch_size=30, shuffle=True):
            loss = F.cross_entropy(net(data, label), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        cosine = F.linear(F.normalize(net.body(xte)), F.normalize(net.arc.weight))
    return float((cosine.argmax(1) != yte).float().mean())


@fault(
    "best_state_shares_memory",
    area="image classification",
    source="from memory: forum questions in which best_model = model.state_dict() turns out to be the last model",
    cause="state_dict returns the live tensors, so the weights kept as the best go on changing with every step.",
    words=(r"copy|state_dict|reference|same (tensor|memory)|alias|live",),
    cascade=("overfitting", "loss_divergence", "loss_oscillation"),
    sites=("(loop)", "(model)", "(validation)"),
    onset=2,
)
def best_weights_are_not_copied(attach, fixed):
    """best = model.state_dict() without deepcopy, in a run that overfits."""
    xtr, ytr, xte, yte = digits()
    xtr, ytr = xtr[:200], ytr[:200].clone()
    made = torch.Generator().manual_seed(3)
    wrong = torch.rand(200, generator=made) < 0.45
    ytr[wrong] = torch.randint(0, 10, (int(wrong.sum()),), generator=made)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    keep = copy.deepcopy if fixed else dict
    best_loss, best = float("inf"), None
    for epoch in range(60):
        model.train()
        for part in torch.randperm(200).split(25):
            loss = F.cross_entropy(model(xtr[part]), ytr[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            val_loss = F.cross_entropy(model(xte[:300]), yte[:300]).item()
        session.log(val_loss=val_loss)
        if val_loss < best_loss:
            best_loss, best = val_loss, keep(model.state_dict())
    model.load_state_dict(best)
    return wrong_share(model, xte[300:], yte[300:])
