"""Tenth hold-out: what is carried over from elsewhere - teachers, pretrained weights, checkpoints - and what is kept."""

from __future__ import annotations

import io
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_10.about import fault
from fault_programs.holdout_10.material import digits


def fit(model, x, y, epochs, lr=3e-3):
    """Pretrain, as somebody else did."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(epochs):
        for xb, yb in zip(*(t.split(50) for t in (x, y))):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return optimizer


class FocalLoss(nn.Module):
    """A loss that cares most for what is still wrong."""

    def __init__(self, gamma, eps):
        super().__init__()
        self.gamma, self.eps = gamma, eps

    def forward(self, y_pred, y_true):
        y_pred = torch.clamp(y_pred, self.eps, 1 - self.eps)
        hit = y_true * torch.pow(1 - y_pred, self.gamma) * torch.log(y_pred)
        return -(hit + (1 - y_true) * torch.pow(y_pred, self.gamma) * torch.log(1 - y_pred)).mean()


@fault(
    "nan_in_loss",
    area="imbalanced classification",
    source="https://github.com/NVIDIA/apex/issues/358",
    cause="The probabilities are clamped to 1 - 1e-8, which is 1 in float32, so the loss takes the logarithm of zero and zero times infinity is NaN.",
    words=(r"\blog|logarithm", r"clamp|eps|1e-8|zero|round|precision|float32"),
    also=("nan_backward",),
    cascade=("nan_in_weights", "nan_in_optimizer", "nan_forward", "loss_divergence", "saturated_activation"),
    sites=("(loss)", "loss_fn"),
)
def clamp_is_too_fine_for_float32(attach, fixed):
    """torch.clamp(y_pred, 1e-8, 1 - 1e-8)."""
    xtr, ytr, xte, yte = digits()
    ytr, yte = (ytr == 0).float(), (yte == 0).float()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    criterion = FocalLoss(gamma=0.0, eps=1e-6 if fixed else 1e-8)
    session = attach(model, optimizer)
    for epoch in range(40):
        for data, target in DataLoader(TensorDataset(xtr * 6, ytr), batch_size=40, shuffle=True):
            loss = criterion(model(data).squeeze(1), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        found = (model(xte * 6).squeeze(1) > 0.5).float()
    return 1 - float(2 * (found * yte).sum() / (found.sum() + yte.sum()))


@fault(
    "setting_without_effect",
    area="transfer learning",
    source="from memory: forum questions on frozen layers that change nevertheless, answered with the typing error require_grad",
    cause="require_grad is set instead of requires_grad, so the pretrained layers are not frozen and few samples spoil them.",
    words=(r"require_?s?_grad|fr[eo]ez|frozen|attribute|typo", r"(not|no|never|without|typo|effect|require_grad)"),
    cascade=("overfitting", "loss_spike", "loss_oscillation"),
    sites=("(model)", "features", "backbone", "optimizer"),
)
def pretrained_layers_are_not_frozen(attach, fixed):
    """param.require_grad = False."""
    xtr, ytr, xte, yte = digits()
    seen, new = ytr < 7, torch.nonzero(ytr >= 7).flatten()

    class Net(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(16, 24, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Flatten(),
            )
            self.fc = nn.Linear(24 * 16, classes)

        def forward(self, x):
            return self.fc(self.features(x))

    model = Net(7)
    fit(model, xtr[seen], ytr[seen], 5)
    old_head, features = model.fc, model.features

    for name, param in features.named_parameters():
        setattr(param, "requires_grad" if fixed else "require_grad", False)
    model.fc = nn.Linear(24 * 16, 3)
    optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1, momentum=0.9)
    session = attach(model, optimizer)
    few = TensorDataset(xtr[new[:30]], ytr[new[:30]] - 7)
    for epoch in range(50):
        for xb, yb in DataLoader(few, batch_size=10, shuffle=True):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    old, fresh = yte < 7, yte >= 7
    with torch.no_grad():
        forgotten = (old_head(features(xte[old])).argmax(1) != yte[old]).float().mean()
        missed = (model(xte[fresh]).argmax(1) != yte[fresh] - 7).float().mean()
    return float(forgotten + missed)


@fault(
    "checkpoint_not_loaded",
    area="transfer learning",
    source="https://php.bkmy88.com/faq/2014797.html",
    cause="load_state_dict gets the whole checkpoint instead of its entry 'model', and strict=False hides that no weight fits.",
    words=(
        r"load_state_dict|checkpoint|state_dict|pretrained",
        r"strict|not loaded|no (key|weight)|missing|whole|random|did not|entry",
    ),
    also=("result_discarded",),
    cascade=("underfitting", "overfitting", "loss_plateau"),
    sites=("(model)", "res", "backbone", "layer1", "layer2", "(loop)"),
)
def whole_checkpoint_with_strict_false(attach, fixed):
    """res50.load_state_dict(res50_state, strict=False)."""
    xtr, ytr, xte, yte = digits()

    class ResNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(1, 16, 3, padding=1)
            self.bn = nn.BatchNorm2d(16)
            self.layer1 = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
            self.layer2 = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8), nn.ReLU())
            self.fc = nn.Linear(8, 10)

        def forward(self, x):
            x = F.relu(self.bn(self.stem(x)))
            x = self.layer2(x + self.layer1(x))
            return self.fc(x.mean((2, 3)))

    def save():
        rsp = ResNet()
        optimizer = fit(rsp, xtr[:900], ytr[:900], 7, lr=1e-2)
        file = io.BytesIO()
        torch.save(
            {"model": rsp.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7, "max_accuracy": 0.9}, file
        )
        file.seek(0)
        return file

    res50 = ResNet()
    res50_state = torch.load(save())
    res50.load_state_dict(res50_state["model"] if fixed else res50_state, strict=False)
    optimizer = torch.optim.SGD(res50.parameters(), lr=5e-3, momentum=0.9)
    session = attach(res50, optimizer)
    for epoch in range(5):
        res50.train()
        for images, labels in DataLoader(TensorDataset(xtr[900:], ytr[900:]), batch_size=30, shuffle=True):
            loss = F.cross_entropy(res50(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        res50.eval()
        with torch.no_grad():
            session.log(val_loss=F.cross_entropy(res50(xte), yte).item())
    with torch.no_grad():
        return float((res50(xte).argmax(1) != yte).float().mean())


@fault(
    "resume_incomplete",
    area="physics surrogate",
    source="https://github.com/PolymathicAI/the_well/pull/63",
    cause="The checkpoint holds the optimizer but not the scheduler, so warm-up and decay begin anew when the run is resumed, and the rate is still high at the end.",
    words=(r"schedul|learning rate|warm.?up|decay", r"(not|without|restart|again|anew|missing|lost|begin).*|resum"),
    also=("scheduler_never_called",),
    cascade=("loss_spike", "loss_oscillation", "lr_too_high"),
    sites=("scheduler", "optimizer", "(loop)"),
)
def schedule_begins_again_after_a_resume(attach, fixed):
    """save_model() saves the optimizer, but not the lr_scheduler."""
    x = torch.randn(1200, 6)
    truth = torch.sin(x[:, 0]) + x[:, 1] * 0.5 - 0.4 * x[:, 2]
    y = truth + 1.0 * torch.randn(1200)
    max_epoch = 16

    class Trainer:
        def __init__(self):
            self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.03, momentum=0.9)
            self.lr_scheduler = LambdaLR(self.optimizer, self.warmup_cosine)
            self.epoch = 0
            self.session = attach(self.model, self.optimizer)

        @staticmethod
        def warmup_cosine(epoch):
            return (epoch + 1) / 3 if epoch < 2 else 0.5 + 0.5 * math.cos(math.pi * (epoch - 2) / (max_epoch - 2))

        def save_model(self):
            file = io.BytesIO()
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": self.epoch}
            torch.save(state | ({"lr_scheduler": self.lr_scheduler.state_dict()} if fixed else {}), file)
            file.seek(0)
            return file

        def load_checkpoint(self, file):
            checkpoint = torch.load(file)
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.epoch = checkpoint["epoch"]
            if "lr_scheduler" in checkpoint:
                self.lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])

        def train(self, until):
            while self.epoch < until:
                for xb, yb in DataLoader(TensorDataset(x[:800], y[:800]), batch_size=8, shuffle=True):
                    loss = F.mse_loss(self.model(xb).squeeze(1), yb)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    self.session.log(loss=loss.item())
                self.lr_scheduler.step()
                self.epoch += 1

    first = Trainer()
    first.train(max_epoch // 2 + 2)
    file = first.save_model()
    second = Trainer()
    second.load_checkpoint(file)
    second.train(max_epoch)
    with torch.no_grad():
        return float(F.mse_loss(second.model(x[800:]).squeeze(1), truth[800:]))


@fault(
    "retained_graph_leak",
    area="weak supervision",
    source="https://github.com/BatsResearch/labelmodels/issues/4",
    cause="running_loss sums losses with their graphs, so the graphs of all batches of an epoch stay in memory.",
    words=(r"graph|memory|retain|item\(\)|detach", r"loss|running|sum|grow|keep|kept|held|hold"),
    sites=("(loop)", "(loss)"),
)
def running_loss_keeps_all_graphs(attach, fixed):
    """running_loss += loss."""
    votes_of, classes = 8, 3
    truth = torch.randint(0, classes, (1000,))
    good = torch.linspace(0.4, 0.9, votes_of)
    votes = torch.where(torch.rand(1000, votes_of) < good, truth[:, None], torch.randint(0, classes, (1000, votes_of)))

    class NaiveBayes(nn.Module):
        def __init__(self):
            super().__init__()
            self.accuracy = nn.Parameter(torch.full((votes_of,), 0.5))
            self.class_prior = nn.Parameter(torch.zeros(classes))

        def joint(self, votes):
            right = F.logsigmoid(self.accuracy)
            wrong = F.logsigmoid(-self.accuracy) - torch.log(torch.tensor(classes - 1.0))
            agrees = votes[:, :, None] == torch.arange(classes)
            return torch.where(agrees, right[None, :, None], wrong[None, :, None]).sum(
                1
            ) + self.class_prior.log_softmax(0)

        def forward(self, votes):
            return -self.joint(votes).logsumexp(1).mean()

    model = NaiveBayes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    session = attach(model, optimizer)

    def held(value):
        found, todo = set(), [getattr(value, "grad_fn", None)]
        while todo:
            node = todo.pop()
            if node is not None and node not in found:
                found.add(node)
                todo += [after for after, _ in node.next_functions]
        return len(found)

    nodes = 0
    for epoch in range(8):
        running_loss = 0.0
        for (batch,) in DataLoader(TensorDataset(votes), batch_size=10, shuffle=True):
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            optimizer.step()
            running_loss += loss.item() if fixed else loss
            session.log(loss=loss.item())
        nodes = max(nodes, held(running_loss))
        session.log(epoch_loss=float(running_loss) / 100)
    with torch.no_grad():
        wrong = float((model.joint(votes).argmax(1) != truth).float().mean())
    return wrong + nodes / 1000
