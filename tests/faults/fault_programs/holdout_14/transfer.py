"""Fourteenth hold-out: fine-tuning, distillation, metric learning and several tasks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_14.about import fault
from fault_programs.holdout_14.material import digits, wrong


@fault(
    "frozen_by_mistake",
    area="fine-tuning",
    source="from memory: questions on a fine-tuned network that stays near chance, in which all but the layers called fc were frozen and the head has another name",
    cause="All parameters are frozen but those with head in their name, and the new layer is called classifier; only a norm is trained.",
    words=(r"frozen|freez|requires_grad", r"classifier|head|name|layer|not"),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("classifier", "optimizer", "(model)"),
)
def everything_but_the_head_is_frozen_and_there_is_none(attach, fixed):
    """p.requires_grad = "head" in name, and the layer is self.classifier."""
    (xtr, ytr), (xte, yte) = digits()

    class ViT(nn.Module):
        def __init__(self, num_labels, dim=32):
            super().__init__()
            self.patches, self.places = nn.Linear(4, dim), nn.Parameter(0.2 * torch.randn(16, dim))
            self.block = nn.TransformerEncoderLayer(dim, 4, 64, 0.0, batch_first=True)
            self.head_norm = nn.LayerNorm(dim)
            self.classifier = nn.Linear(dim, num_labels)

        def forward(self, x):
            x = F.unfold(x, 2, stride=2).transpose(1, 2)
            x = self.block(self.patches(x) + self.places)
            return self.classifier(self.head_norm(x.mean(1)))

    model = ViT(5)
    before, low = torch.optim.Adam(model.parameters(), lr=3e-3), (ytr < 5).nonzero()[:, 0]
    for i in low[torch.randint(0, len(low), (120, 32))]:
        before.zero_grad()
        F.cross_entropy(model(xtr[i]), ytr[i]).backward()
        before.step()

    model.classifier = nn.Linear(32, 10)
    for name, p in model.named_parameters():
        p.requires_grad = name.startswith(("head", "classifier") if fixed else "head")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for epoch in range(8):
        for i in torch.randperm(1200).split(48):
            loss = F.cross_entropy(model(xtr[i]), ytr[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    return wrong(model, xte, yte)


@fault(
    "logits_into_prob_loss",
    area="distillation",
    source="from memory: questions on a negative or NaN nn.KLDivLoss, which got log_softmax of the teacher as its target without log_target=True",
    cause="KLDivLoss gets the log-probabilities of the teacher as its target, and log_target is not set.",
    words=(r"log.?target|log.?softmax|log.?prob|kl", r"target|teacher|prob|log"),
    also=("output_range_mismatch",),
    cascade=("nan_in_loss", "loss_sign_flipped", "loss_plateau", "not_learning", "constant_output", "loss_divergence"),
    sites=("(loss)", "loss_fn", "kd_loss"),
)
def teacher_speaks_in_logarithms(attach, fixed):
    """kd_loss(F.log_softmax(student / T, 1), F.log_softmax(teacher / T, 1))."""
    (xtr, ytr), (xte, yte) = digits()

    def mlp(hidden):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    teacher = mlp(256)
    opt = torch.optim.Adam(teacher.parameters(), lr=4e-3)
    for i in torch.randint(0, 1200, (200, 40)):
        opt.zero_grad()
        F.cross_entropy(teacher(xtr[i]), ytr[i]).backward()
        opt.step()
    teacher.eval().requires_grad_(False)

    student, T, alpha = mlp(24), 3.0, 0.7
    kd_loss = nn.KLDivLoss(reduction="batchmean", log_target=bool(fixed))
    optimizer = torch.optim.Adam(student.parameters(), lr=4e-3)
    session = attach(student, optimizer)
    for epoch in range(10):
        student.train()
        for x, y in DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True):
            out = student(x)
            soft = kd_loss(F.log_softmax(out / T, 1), F.log_softmax(teacher(x) / T, 1)) * T * T
            loss = alpha * soft + (1 - alpha) * F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), soft=soft.item())
    student.eval()
    return wrong(student, xte, yte)


@fault(
    "pair_labels_reversed",
    area="signatures",
    source="https://github.com/VinhLoiIT/signet-pytorch/issues/2",
    cause="Pairs of one writer have the label 1, and the contrastive loss draws together those with the label 0.",
    words=(r"label|pair|\by\b|similar|same|genuine", r"revers|invert|swap|opposite|wrong|\b1\b|\b0\b|apart|sign"),
    also=("loss_sign_flipped", "arguments_swapped"),
    cascade=("loss_plateau", "constant_output", "not_learning"),
    sites=("(loss)", "loss_fn", "(data)", "criterion"),
)
def genuine_pairs_are_driven_apart(attach, fixed):
    """loss = (1 - y) * distance**2 + y * clamp(margin - distance, min=0)**2, with y = 1 for the same writer."""
    (xtr, ytr), (xte, yte) = digits()
    same = 1 - int(bool(fixed))

    class ContrastiveLoss(nn.Module):
        def __init__(self, margin=1.0):
            super().__init__()
            self.margin = margin

        def forward(self, x1, x2, y):
            distance = F.pairwise_distance(x1, x2)
            return ((1 - y) * distance**2 + y * (self.margin - distance).clamp(min=0) ** 2).mean()

    class SigNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
            self.fc = nn.Sequential(nn.Linear(192, 48), nn.ReLU(), nn.Linear(48, 8))

        def forward(self, x1, x2):
            return self.fc(self.features(x1)), self.fc(self.features(x2))

    def pairs(x, y, count):
        a, b = torch.randint(0, len(x), (2, count))
        twin = torch.stack([(y == label).nonzero()[torch.randint(0, 60, ())][0] for label in y[a]])
        b = torch.where(torch.rand(count) < 0.5, twin, b)
        return x[a], x[b], torch.where(y[a] == y[b], same, 1 - same)

    model, criterion = SigNet(), ContrastiveLoss()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    session = attach(model, optimizer)
    for epoch in range(8):
        for x1, x2, y in DataLoader(TensorDataset(*pairs(xtr, ytr, 1200)), batch_size=40):
            loss = criterion(*model(x1, x2), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        known, asked = model(xtr, xte)
        return (ytr[torch.cdist(asked, known).argmin(1)] != yte).float().mean().item()


@fault(
    "lr_too_high",
    area="metric learning",
    source="https://github.com/omoindrot/tensorflow-triplet-loss/issues/51",
    cause="The learning rate is too high for the hardest triplets, so all embeddings fall into one point and the loss stays at the margin.",
    words=(r"learning rate|\blr\b|step size|steps?", r"high|large|big|long|collaps|one point|lower"),
    cascade=(
        "constant_output",
        "loss_plateau",
        "not_learning",
        "dead_relu",
        "vanishing_gradient",
        "loss_spike",
        "exploding_activation",
    ),
    sites=("optimizer", "(loop)"),
    exact=False,
)
def hardest_triplets_with_hasty_steps(attach, fixed):
    """Adam(lr=0.1) for batch_hard_triplet_loss; the loss goes to the margin and stays."""
    (xtr, ytr), (xte, yte) = digits()
    params = {"learning_rate": 1e-3 if fixed else 1e-1, "margin": 0.5, "embedding_size": 16, "num_epochs": 8}

    def batch_hard_triplet_loss(labels, embeddings, margin):
        dist = torch.cdist(embeddings, embeddings)
        same = labels[:, None] == labels
        hardest_positive = (dist * same).max(1)[0]
        hardest_negative = (dist + dist.max().detach() * same).min(1)[0]
        return (hardest_positive - hardest_negative + margin).clamp(min=0).mean()

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
    )
    model.append(nn.Linear(512, params["embedding_size"]))
    optimizer = torch.optim.Adam(model.parameters(), lr=params["learning_rate"])
    session = attach(model, optimizer)
    for epoch in range(params["num_epochs"]):
        for i in torch.randperm(1200).split(60):
            loss = batch_hard_triplet_loss(ytr[i], model(xtr[i]), params["margin"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return (ytr[torch.cdist(model(xte), model(xtr)).argmin(1)] != yte).float().mean().item()


@fault(
    "zero_grad_misplaced",
    area="multi-task",
    source="from memory: questions on two losses with one optimizer, of which only the second falls, because zero_grad() stands before each backward()",
    cause="The gradients of the first task are cleared before the second backward pass, so only the last task is learned.",
    words=(r"zero_grad|clear|erase|reset", r"task|first|second|between|before|last|lost"),
    cascade=("loss_plateau", "underfitting", "unused_parameters", "not_learning"),
    sites=("optimizer", "(loop)", "age", "heads.age"),
)
def first_task_is_cleared_before_the_second(attach, fixed):
    """for task in tasks: optimizer.zero_grad(); losses[task].backward() ... optimizer.step()."""

    def faces(count):
        x = torch.randn(count, 12)
        age = x[:, 0] * x[:, 1] + torch.sin(2 * x[:, 2])
        return x, {"age": age, "smile": (x[:, 3] + x[:, 4] * x[:, 5] > 0).float()}

    class MultiTask(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU())
            self.heads = nn.ModuleDict({"age": nn.Linear(48, 1), "smile": nn.Linear(48, 1)})

        def forward(self, x):
            h = self.trunk(x)
            return {task: head(h).squeeze(1) for task, head in self.heads.items()}

    criteria = {"age": nn.SmoothL1Loss(), "smile": nn.BCEWithLogitsLoss()}
    net = MultiTask()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    x, y = faces(1200)
    for epoch in range(16):
        for i in torch.randperm(1200).split(48):
            out = net(x[i])
            losses = {task: criteria[task](out[task], y[task][i]) for task in criteria}
            for k, task in enumerate(losses):
                optimizer.zero_grad() if k == 0 or not fixed else None
                losses[task].backward(retain_graph=True)
            optimizer.step()
            session.log(**{f"loss_{task}": loss.item() for task, loss in losses.items()})
    x, y = faces(500)
    with torch.no_grad():
        return float(F.mse_loss(net(x)["age"], y["age"]) / y["age"].var())
