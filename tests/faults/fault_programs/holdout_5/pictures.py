"""Fifth hold-out: pictures, masks and boxes."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fault_programs.holdout_5.about import fault
from fault_programs.holdout_5.materials import batches, colours, digits, scans, wrong


class ClientMLP(nn.Module):
    """The network of a well-known federated learning example."""

    def __init__(self, dim_in, dim_hidden, dim_out, last):
        super().__init__()
        self.layer_input = nn.Linear(dim_in, dim_hidden)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(0.2)
        self.layer_hidden = nn.Linear(dim_hidden, dim_out)
        self.softmax = last

    def forward(self, x):
        x = x.view(-1, x.shape[1] * x.shape[-2] * x.shape[-1])
        x = self.relu(self.dropout(self.layer_input(x)))
        return self.softmax(self.layer_hidden(x))


@fault(
    "double_softmax",
    area="vision",
    source="https://github.com/shaoxiongji/federated-learning/issues/9",
    cause="The model ends with a softmax and CrossEntropyLoss applies another one.",
    words=(r"double.?softmax", r"softmax.*(twice|again|already|cross.?entropy)", r"already.*softmax"),
    also=("double_normalised",),
    cascade=("underfitting", "not_learning", "loss_plateau", "lr_too_low"),
    sites=("softmax", "loss_fn", "(loss)", "(model)"),
)
def client_with_softmax(attach, fixed):
    """Softmax in the network, CrossEntropyLoss outside."""
    xtr, ytr, xte, yte = digits()
    net = ClientMLP(64, 64, 10, nn.Identity() if fixed else nn.Softmax(dim=1))
    loss_func = nn.CrossEntropyLoss()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    session = attach(net, opt)
    ldr_train = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True)
    for _ep in range(7):
        net.train()
        for images, labels in ldr_train:
            net.zero_grad()
            log_probs = net(images)
            loss = loss_func(log_probs, labels)
            loss.backward()
            opt.step()
            session.log(loss=loss)
    return wrong(net, xte, yte)


class Recogniser(nn.Module):
    """Columns of the picture read by an LSTM, as in a CRNN."""

    def __init__(self, batch_first):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d((2, 1)))
        self.rnn = nn.LSTM(16 * 4, 48, batch_first=batch_first)
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        f = self.cnn(x)
        b, c, h, w = f.size()
        f = f.permute(0, 3, 1, 2).reshape(b, w, c * h)
        out, _ = self.rnn(f)
        return self.head(out[:, -1])


@fault(
    "batch_axis_mixed",
    area="vision",
    source="https://discuss.pytorch.org/t/lstm-change-batch-first-true-loss-does-not-decrease/62364",
    cause="The LSTM is given (batch, time, feature) without batch_first=True, so it runs over the batch.",
    words=(r"batch.?first", r"batch.*(axis|dimension).*(time|mixed|sequence)", r"samples? .*(mix|influence|depend)"),
    cascade=("underfitting", "not_learning", "loss_plateau", "overfitting"),
    sites=("rnn", "(model)"),
)
def crnn_reads_across_the_batch(attach, fixed):
    """The recurrent layer takes the batch for time."""
    xtr, ytr, xte, yte = digits()
    model = Recogniser(batch_first=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    sess = attach(model, optimizer)
    for epoch in range(6):
        running = 0.0
        for xb, yb in batches(xtr, ytr, size=32):
            optimizer.zero_grad()
            cost = F.cross_entropy(model(xb), yb)
            cost.backward()
            optimizer.step()
            running += cost.item()
        sess.log(epoch_cost=running)
    return wrong(model, xte, yte)


class StripeSet(Dataset):
    """Colour pictures as a camera gives them."""

    def __init__(self, to_tensor):
        self.x, self.y = colours()
        self.to_tensor = to_tensor

    def __len__(self):
        return len(self.x)

    def __getitem__(self, k):
        return self.to_tensor(self.x[k]), int(self.y[k])


def small_cnn(channels=3, classes=6, width=16):
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, classes),
    )


@fault(
    "layout_scrambled",
    area="vision",
    source="from memory: discuss.pytorch.org, 'view / reshape instead of permute for HWC images' (asked many times)",
    cause="Pictures of (height, width, channel) are reshaped to (channel, height, width) instead of permuted.",
    words=(r"permute", r"(reshape|view).*(mix|scrambl|transpose|axes|instead)", r"channel.*(last|order|layout)"),
    cascade=("underfitting", "not_learning", "overfitting", "loss_plateau"),
    sites=("(data)", "loader"),
)
def reshapes_height_width_channel(attach, fixed):
    """`reshape(3, 8, 8)` where `permute(2, 0, 1)` was needed."""

    def to_tensor(img):
        t = torch.from_numpy(img).float() / 255
        return t.permute(2, 0, 1) if fixed else t.reshape(3, 8, 8)

    data = StripeSet(to_tensor)
    train, test = torch.utils.data.random_split(data, [700, 200])
    model = small_cnn()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, opt)
    for _ in range(5):
        for img, target in DataLoader(train, batch_size=50, shuffle=True):
            loss = F.cross_entropy(model(img), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            session.log(loss=loss)
    xs, ys = next(iter(DataLoader(test, batch_size=200)))
    return wrong(model, xs, ys)


@fault(
    "uint8_overflow",
    area="vision",
    source="from memory: stackoverflow.com, 'subtracting mean from uint8 image wraps around'",
    cause="The mean is subtracted from bytes (uint8), which wraps around below zero, before the cast to float.",
    words=(r"uint8|\bbytes\b", r"wraps? around", r"integer overflow"),
    cascade=("underfitting", "not_learning", "overfitting", "unnormalised_inputs"),
    sites=("(data)", "loader"),
)
def subtracts_the_mean_from_bytes(attach, fixed):
    """uint8 arithmetic wraps around."""
    x, y = colours()
    mean = torch.from_numpy(x).float().mean().to(torch.uint8)

    def load(k):
        img = torch.from_numpy(x[k]).permute(0, 3, 1, 2)
        centred = (img.float() - mean.float()) if fixed else (img - mean)
        return centred.float() / 128.0

    net = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 16, 6)
    )
    optimiser = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
    attach(net, optimiser)
    labels = torch.from_numpy(y)
    for _ in range(6):
        order = torch.randperm(700)
        for i in range(0, 700, 35):
            idx = order[i : i + 35] + 200
            optimiser.zero_grad()
            F.cross_entropy(net(load(idx.numpy())), labels[idx]).backward()
            optimiser.step()
    return wrong(net, load(slice(0, 200)), labels[:200])


class TinyUNet(nn.Module):
    """Down once, up once, one skip."""

    def __init__(self, classes=1):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(24, 12, 2, stride=2)
        self.last = nn.Conv2d(24, classes, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(self.pool(a))
        return self.last(torch.cat([a, self.up(b)], 1))


def dice_coefficient(probability, mask, smooth=1.0):
    probability, mask = probability.flatten(1), mask.flatten(1)
    both = (probability * mask).sum(1)
    return ((2 * both + smooth) / (probability.sum(1) + mask.sum(1) + smooth)).mean()


@torch.no_grad()
def missed_dice(net, x, y):
    net.eval()
    return 1 - float(dice_coefficient((net(x).sigmoid() > 0.5).float(), y))


@fault(
    "loss_sign_flipped",
    area="segmentation",
    source="https://github.com/sraashis/easytorch/pull/38",
    cause="The Dice coefficient itself is minimised; the loss should be one minus it.",
    words=(r"\bsign\b", r"maximi[sz]", r"wrong (way|direction)"),
    cascade=("constant_output", "dead_relu", "vanishing_gradient", "saturated_activation"),
    sites=("(loss)", "loss_fn", "(loop)"),
)
def minimises_the_dice_coefficient(attach, fixed):
    """Returns dice where 1 - dice was meant."""
    x, y = scans()
    net = TinyUNet()
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    session = attach(net, opt)

    def criterion(logits, mask):
        dice = dice_coefficient(logits.sigmoid(), mask)
        return 1 - dice if fixed else dice

    for xb, yb in batches(x[60:], y[60:], size=16, epochs=5):
        opt.zero_grad()
        loss = criterion(net(xb), yb)
        loss.backward()
        opt.step()
        session.log(loss=loss.item())
    return missed_dice(net, x[:60], y[:60])


@fault(
    "graph_break_detach",
    area="segmentation",
    source="https://github.com/tensorlayer/TensorLayer/issues/891",
    cause="The Dice term is computed on thresholded predictions, so it has no gradient and does nothing.",
    words=(
        r"no gradient",
        r"not differentiable",
        r"threshold|argmax|rounded|comparison",
        r"detach",
        r"does nothing|no effect",
    ),
    cascade=("class_imbalance_collapse", "constant_output", "underfitting"),
    sites=("(loss)", "loss_fn", "(loop)", "(function)"),
)
def dice_of_thresholded_masks(attach, fixed):
    """`(p > 0.5).float()` cuts the term that matters off."""
    x, y = scans(rare=True)
    net = TinyUNet()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, opt)
    for xb, yb in batches(x[60:], y[60:], size=16, epochs=4):
        logits = net(xb)
        prob = torch.sigmoid(logits)
        pred = prob if fixed else (prob > 0.5).float()
        dice_loss = 1 - dice_coefficient(pred, yb)
        bce = F.binary_cross_entropy_with_logits(logits, yb, pos_weight=torch.tensor(0.2))
        total = dice_loss + 0.3 * bce
        opt.zero_grad()
        total.backward()
        opt.step()
        session.log(total=total, dice=dice_loss, bce=bce)
    return missed_dice(net, x[:60], y[:60])


@fault(
    "augmentation_mismatch",
    area="segmentation",
    source="https://github.com/mdbloice/Augmentor/issues/205",
    cause="The random flip is drawn separately for picture and mask, so masks do not fit their pictures.",
    words=(r"augment", r"(mask|target|label).*(not|mis).*(match|align|fit|belong)", r"shuffle.?mismatch"),
    also=("label_shuffle_mismatch",),
    cascade=("underfitting", "not_learning", "loss_plateau", "class_imbalance_collapse"),
    sites=("(data)", "loader"),
)
def flips_picture_and_mask_apart(attach, fixed):
    """Two coins for one flip."""
    x, y = scans()

    class Scans(Dataset):
        def __len__(self):
            return 240

        def __getitem__(self, k):
            img, msk = x[k + 60], y[k + 60]
            coin = torch.rand(1).item()
            other = coin if fixed else torch.rand(1).item()
            if coin < 0.5:
                img = img.flip(-1)
            if other < 0.5:
                msk = msk.flip(-1)
            return img, msk

    net = TinyUNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    attach(net, optimizer)
    loader = DataLoader(Scans(), batch_size=16, shuffle=True)
    for _epoch in range(6):
        net.train()
        for img, msk in loader:
            loss = F.binary_cross_entropy_with_logits(net(img), msk)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    return missed_dice(net, x[:60], y[:60])


@fault(
    "class_imbalance_collapse",
    area="vision",
    source="from memory: discuss.pytorch.org, 'class weights for CrossEntropyLoss' (counts instead of their inverse)",
    cause="The class weights are the class counts instead of their inverse, so the rare class weighs nothing.",
    words=(r"class.?(weight|imbalance)", r"weight.*(class|inverse|rare)", r"imbalanc", r"majority"),
    cascade=("constant_output", "underfitting", "loss_plateau"),
    sites=("loss_fn", "(loss)", "(data)"),
    exact=False,
)
def weighs_classes_by_their_count(attach, fixed):
    """weight=counts where 1 / counts was meant."""
    xtr, ytr, xte, yte = digits()
    rare = (ytr >= 8) & (torch.arange(len(ytr)) % 8 != 0)
    xtr, ytr = xtr[~rare], ytr[~rare]
    y2, t2 = (ytr >= 8).long(), (yte >= 8).long()
    counts = torch.bincount(y2).float()
    weight = counts.sum() / counts if fixed else counts / counts.sum()
    criterion = nn.CrossEntropyLoss(weight=weight)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = attach(model, opt)
    for images, labels in batches(xtr, y2, size=50, epochs=16):
        opt.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        opt.step()
        session.log(train_loss=loss)
    with torch.no_grad():
        pred = model(xte).argmax(1)
    return 0.5 * float((pred[t2 == 1] != 1).float().mean() + (pred[t2 == 0] != 0).float().mean())


@fault(
    "box_format_mixed",
    area="detection",
    source="from memory: GIoU / IoU loss fed (cx, cy, w, h) boxes where corners are expected, several detection repositories",
    cause="The IoU loss expects corners but is given centre and size for the prediction only.",
    words=(r"box", r"corner|xyxy|cxcywh"),
    cascade=("loss_plateau", "not_learning", "underfitting", "vanishing_gradient", "graph_break_detach"),
    sites=("(loss)", "loss_fn", "(loop)"),
)
def iou_of_centres_and_corners(attach, fixed):
    """Boxes of two formats meet in one loss."""
    x, y = scans()
    where = y[:, 0] > 0
    grid = torch.arange(16.0) / 16
    rows, cols = where.any(2).float(), where.any(1).float()
    big = 9.0
    y1 = torch.where(rows > 0, grid, big).min(1).values
    x1 = torch.where(cols > 0, grid, big).min(1).values
    y2 = torch.where(rows > 0, grid, -big).max(1).values + 1 / 16
    x2 = torch.where(cols > 0, grid, -big).max(1).values + 1 / 16
    boxes = torch.stack([x1, y1, x2, y2], 1)

    def iou(a, b):
        low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
        inter = (high - low).clamp(min=0).prod(1)
        area = lambda t: (t[:, 2:] - t[:, :2]).clamp(min=0).prod(1)  # noqa: E731
        return inter / (area(a) + area(b) - inter + 1e-6)

    def corners(t):
        return torch.cat([t[:, :2] - t[:, 2:] / 2, t[:, :2] + t[:, 2:] / 2], 1)

    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24 * 16, 64), nn.ReLU(), nn.Linear(64, 4), nn.Sigmoid(),
    )  # fmt: skip
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, opt)
    for img, box in batches(x[60:], boxes[60:], size=20, epochs=12):
        out = net(img)
        pred = corners(out) if fixed else out
        loss = (1 - iou(pred, box)).mean() + 0.2 * F.l1_loss(pred, box)
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return 1 - float(iou(corners(net(x[:60])), boxes[:60]).mean())


@fault(
    "batchnorm_stats_stale",
    area="vision",
    source="from memory: ports from Keras that keep its BatchNorm momentum convention (PyTorch's is one minus it)",
    cause="BatchNorm momentum is taken from Keras's convention, so running statistics hardly move and evaluation is off.",
    words=(r"running (stat|mean|var)", r"batch.?norm.*(stat|stale|running)"),
    cascade=("train_mode_in_eval", "overfitting"),
    sites=("1", "4", "bn", "(model)"),
    exact=False,
)
def keras_momentum_in_batchnorm(attach, fixed):
    """momentum=0.001 leaves running statistics near their start."""
    xtr, ytr, xte, yte = digits()
    xtr, xte = xtr * 5 + 3, xte * 5 + 3
    model = small_cnn(1, 10, 12)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = 0.1 if fixed else 0.001
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, opt)
    for epoch in range(5):
        model.train()
        for a, b in batches(xtr, ytr, size=48):
            loss = F.cross_entropy(model(a), b)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            val = F.cross_entropy(model(xte), yte)
        session.log(train_loss=loss, val_loss=val)
    return wrong(model, xte, yte)


class NTSHead(nn.Module):
    """A head that makes its dropout on the way."""

    def __init__(self, always):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 48), nn.Linear(48, 10)
        self.always = always

    def forward(self, x):
        h = F.relu(self.fc1(x.flatten(1)))
        h = nn.Dropout(p=0.7)(h) if self.always else F.dropout(h, 0.7, self.training)
        return self.fc2(h)


@fault(
    "dropout_ignores_mode",
    area="vision",
    source="https://github.com/yangze0930/NTS-Net/issues/14",
    cause="nn.Dropout is created inside forward, so eval() does not switch it off.",
    words=(r"dropout",),
    cascade=("train_mode_in_eval", "underfitting", "dropout_too_high"),
    sites=("(function)", "(model)", "fc1", "fc2"),
)
def makes_its_dropout_in_forward(attach, fixed):
    """Dropout that knows no evaluation."""
    xtr, ytr, xte, yte = digits()
    model = NTSHead(always=not fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run = attach(model, optimizer)
    for epoch in range(8):
        model.train()
        for xb, yb in batches(xtr, ytr, size=64):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            run.log(loss=loss, val_acc=(model(xte).argmax(1) == yte).float().mean())
    return wrong(model, xte, yte)


@fault(
    "eval_mode_in_training",
    area="vision",
    source="https://github.com/wkentaro/pytorch-fcn/issues/57",
    cause="After the validation inside the epoch the model stays in eval mode, and training goes on in it.",
    words=(r"eval.?mode", r"train\(\)", r"evaluation mode"),
    cascade=("overfitting", "loss_divergence", "exploding_activation", "loss_spike", "batchnorm_stats_stale"),
    sites=("(model)", "(loop)"),
    onset=1,
)
def stays_in_eval_after_validating(attach, fixed):
    """validate() calls eval(), nobody calls train()."""
    xtr, ytr, xte, yte = digits()
    xtr, ytr, xte = 16 * xtr[:400], ytr[:400], 16 * xte
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 256),
        nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10),
    )  # fmt: skip
    optim = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    session = attach(net, optim)

    def validate():
        net.eval()
        with torch.no_grad():
            score = F.cross_entropy(net(xte), yte)
        if fixed:
            net.train()
        return score

    net.train()
    step = 0
    for img, lab in batches(xtr, ytr, size=25, epochs=30):
        if step % 50 == 0:
            session.log(validation=validate())
        optim.zero_grad()
        loss = F.cross_entropy(net(img), lab)
        loss.backward()
        optim.step()
        session.log(loss=loss)
        step += 1
    return wrong(net, xte, yte)
