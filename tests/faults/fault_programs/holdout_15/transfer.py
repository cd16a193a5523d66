"""Fifteenth hold-out: networks that start from others, learn from others, or learn distances."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_15.about import fault
from fault_programs.holdout_15.material import digits, wrong


def pretrained(x, y, epochs=6):
    """Return a convolutional body that has learned to tell odd from even digits and high from low ones."""
    body = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU(), nn.Flatten())
    old = nn.Linear(96, 4)
    optimizer = torch.optim.Adam([*body.parameters(), *old.parameters()], lr=4e-3)
    for _ in range(epochs):
        for i in torch.randperm(len(x)).split(40):
            optimizer.zero_grad()
            F.cross_entropy(old(body(x[i])), y[i] % 2 + 2 * (y[i] > 4)).backward()
            optimizer.step()
    return body


@fault(
    "frozen_by_mistake",
    area="fine-tuning",
    source="https://github.com/harvitronix/five-video-classification-methods/pull/26",
    cause="All parameters but the last tensor are frozen, so of the new head only the bias is trained and its weight stays random.",
    words=(r"froz|freez|requires_grad|:-1", r"head|fc|last|weight|classif|bias|layer|too (much|many)"),
    cascade=("underfitting", "loss_plateau", "not_learning", "constant_output"),
    sites=("fc", "(model)", "optimizer", "(loop)"),
)
def new_head_is_frozen_with_the_rest(attach, fixed):
    """for param in list(model.parameters())[:-1]: param.requires_grad = False."""
    xtr, ytr, xte, yte = digits()

    class VideoNet(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body, self.fc = body, nn.Linear(96, 10)

        def forward(self, x):
            return self.fc(self.body(x))

    model = VideoNet(pretrained(xtr, ytr))
    for param in list(model.parameters())[: -2 if fixed else -1]:
        param.requires_grad = False
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True)
    for epoch in range(10):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        session.log(val_error=wrong(model, xte, yte))
    return wrong(model, xte, yte)


@fault(
    "label_shuffle_mismatch",
    area="distillation",
    source="https://github.com/haitongli/knowledge-distillation-pytorch/pull/17",
    cause="The teacher's outputs are gathered batch by batch before, in another order of the shuffled loader, so they belong to other pictures.",
    words=(r"order|shuffl|mismatch|belong|align|other (picture|image|batch)|match", r"teacher|soft|output|batch"),
    cascade=("underfitting", "loss_plateau", "not_learning", "constant_output", "overfitting"),
    sites=("(data)", "(loss)", "loader", "dataloader", "teacher"),
    exact=False,
)
def teacher_outputs_come_from_another_order(attach, fixed):
    """output_teacher_batch = teacher_outputs[i], from fetch_teacher_outputs(teacher, dataloader) with shuffle=True."""
    xtr, ytr, xte, yte = digits()
    teacher = nn.Sequential(pretrained(xtr, ytr, 2), nn.Linear(96, 10))
    tuning = torch.optim.Adam(teacher.parameters(), lr=4e-3)
    for _ in range(6):
        for i in torch.randperm(1200).split(40):
            tuning.zero_grad()
            F.cross_entropy(teacher(xtr[i]), ytr[i]).backward()
            tuning.step()
    teacher.eval()
    dataloader = DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True)

    def fetch_teacher_outputs(loader):
        with torch.no_grad():
            return [teacher(x) for x, _ in loader]

    def loss_fn_kd(outputs, labels, teacher_outputs, alpha=0.9, T=3.0):
        soft = F.kl_div(F.log_softmax(outputs / T, 1), F.softmax(teacher_outputs / T, 1), reduction="batchmean")
        return soft * alpha * T * T + F.cross_entropy(outputs, labels) * (1 - alpha)

    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    session = attach(student, optimizer)
    teacher_outputs = fetch_teacher_outputs(dataloader)
    for epoch in range(10):
        student.train()
        for k, (x, y) in enumerate(dataloader):
            with torch.no_grad():
                output_teacher_batch = teacher(x) if fixed else teacher_outputs[k]
            loss = loss_fn_kd(student(x), y, output_teacher_batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    student.eval()
    with torch.no_grad():
        return F.cross_entropy(student(xte), yte).item()


@fault(
    "nan_backward",
    area="metric learning",
    source="https://github.com/tilman151/rul-adapt/pull/22",
    cause="The pairwise distances are square roots, and the gradient of the root is infinite for the zero distance of a sample to itself.",
    words=(r"sqrt|root|distance|norm", r"zero|\b0\b|eps|clamp|inf|nan|diagonal|itself"),
    also=("nan_in_weights", "pairs_with_itself"),
    cascade=("nan_forward", "nan_in_loss", "nan_in_optimizer", "not_learning"),
    sites=("(loss)", "(model)", "(loop)", "criterion"),
)
def hardest_pairs_under_a_square_root(attach, fixed):
    """dist = (a.unsqueeze(0) - a.unsqueeze(1)).pow(2).sum(2).sqrt(), with zeros on its diagonal."""
    xtr, ytr, xte, yte = digits()

    class BatchHard(nn.Module):
        def __init__(self, margin=0.5, eps=0.0):
            super().__init__()
            self.margin, self.eps = margin, eps

        def forward(self, emb, label):
            dist = ((emb.unsqueeze(0) - emb.unsqueeze(1)).pow(2).sum(2) + self.eps).sqrt()
            same = label[:, None] == label[None]
            hardest_positive = (dist * same).max(1)[0]
            hardest_negative = (dist + 1e3 * same).min(1)[0]
            return F.relu(hardest_positive - hardest_negative + self.margin).mean()

    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 12))
    criterion = BatchHard(eps=1e-8 if fixed else 0.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)
    for epoch in range(10):
        for i in torch.randperm(1200).split(50):
            loss = criterion(F.normalize(net(xtr[i])), ytr[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        known, asked = net(xtr).nan_to_num(0.0), net(xte).nan_to_num(0.0)
    return float((ytr[torch.cdist(F.normalize(asked), F.normalize(known)).argmin(1)] != yte).float().mean())


@fault(
    "checkpoint_not_loaded",
    area="fine-tuning",
    source="https://github.com/XuJiacong/PIDNet/issues/30",
    cause="The keys of the checkpoint begin with another prefix, and with strict=False nothing is loaded, so the frozen body is random.",
    words=(r"strict|prefix|key|load|module\.", r"load|match|missing|prefix|random|nothing|silent|pretrain"),
    cascade=("underfitting", "loss_plateau", "frozen_by_mistake", "not_learning"),
    sites=("body", "(checkpoint)", "(model)", "(loop)", "backbone"),
    exact=False,
)
def checkpoint_of_a_parallel_model(attach, fixed):
    """model.load_state_dict(torch.load(path), strict=False), with keys that begin with module."""
    xtr, ytr, xte, yte = digits()
    trained = nn.DataParallel(pretrained(xtr, ytr, 10))
    checkpoint = {"state_dict": trained.state_dict(), "epoch": 10}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU(), nn.Flatten()
            )
            self.reduce, self.head = nn.Linear(96, 6), nn.Linear(6, 4)

        def forward(self, x):
            return self.head(torch.tanh(self.reduce(self.body(x))))

    model = Net()
    prefix = "module." if fixed else ""
    state = {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items()}
    model.body.load_state_dict(state, strict=False)
    model.body.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    session = attach(model, optimizer)
    few = torch.arange(160)
    label, label_te = ytr % 2 + 2 * (ytr > 4), yte % 2 + 2 * (yte > 4)
    for epoch in range(40):
        for i in few[torch.randperm(160)].split(20):
            loss = F.cross_entropy(model(xtr[i]), label[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    return wrong(model, xte, label_te)


@fault(
    "zero_init_blocked",
    area="lora",
    source="from memory: a question on a LoRA layer of one's own in which both factors start from zero and nothing is learned",
    cause="Both factors of the low-rank update start from zero, so each gives the other no gradient.",
    words=(r"zero|init", r"lora|factor|both|product|low.?rank|gradient|blocked|saddle"),
    also=("symmetric_init",),
    cascade=("not_learning", "loss_plateau", "vanishing_gradient", "underfitting", "unused_parameters"),
    sites=("lora_A", "lora_B", "(model)", "fc1", "fc2"),
)
def both_lora_factors_start_from_zero(attach, fixed):
    """self.lora_A = nn.Parameter(torch.zeros(r, n)); self.lora_B = nn.Parameter(torch.zeros(m, r))."""
    xtr, ytr, xte, yte = digits()

    class LoRALinear(nn.Module):
        def __init__(self, base, r=6, alpha=12):
            super().__init__()
            self.base, self.scaling = base.requires_grad_(False), alpha / r
            self.lora_A = nn.Parameter(torch.zeros(r, base.in_features))
            self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))

        def forward(self, x):
            return self.base(x) + (x @ self.lora_A.t() @ self.lora_B.t()) * self.scaling

    base = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    first = torch.optim.Adam(base.parameters(), lr=3e-3)
    for _ in range(6):  # what was learned before: the digits as they are
        for i in torch.randperm(1200).split(40):
            first.zero_grad()
            F.cross_entropy(base(xtr[i]), ytr[i]).backward()
            first.step()
    model = nn.Sequential(nn.Flatten(), LoRALinear(base[1]), nn.ReLU(), LoRALinear(base[3]))
    for layer in (model[1], model[3]):
        nn.init.kaiming_uniform_(layer.lora_A, a=5**0.5) if fixed else nn.init.zeros_(layer.lora_A)
    xtr, xte = xtr.transpose(2, 3), xte.transpose(2, 3)  # and now they lie on their side
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(10):
        for i in torch.randperm(1200).split(40):
            loss = F.cross_entropy(model(xtr[i]), ytr[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    return wrong(model, xte, yte)
