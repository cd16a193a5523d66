"""Thirteenth hold-out: fine-tuning, teachers, several tasks and runs that go on."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_13.about import fault
from fault_programs.holdout_13.material import digits


@fault(
    "frozen_by_mistake",
    area="slides",
    source="https://github.com/mahmoodlab/TRIDENT/issues/122",
    cause="The constructor of the slide encoder freezes all its weights by default, so only the classifier learns, on random features.",
    words=(r"frozen|freez|requires_grad|trainable", r"encoder|feature|attention|weights|default|layer"),
    also=("unused_parameters",),
    cascade=("underfitting", "loss_plateau", "not_learning", "constant_output"),
    sites=("feature_encoder", "(model)", "optimizer"),
)
def slide_encoder_is_born_frozen(attach, fixed):
    """ABMILSlideEncoder(freeze=True) is what the loader makes unless told otherwise."""
    patches, features = 16, 24

    class ABMILSlideEncoder(nn.Module):
        def __init__(self, input_feature_dim, head_dim=32, freeze=True):
            super().__init__()
            self.pre = nn.Sequential(nn.Linear(input_feature_dim, head_dim), nn.ReLU())
            self.gate, self.score = nn.Linear(head_dim, 16), nn.Linear(16, 1)
            if freeze:
                for param in self.parameters():
                    param.requires_grad = False

        def forward(self, bag):
            h = self.pre(bag)
            return (self.score(torch.tanh(self.gate(h))).softmax(1) * h).sum(1)

    class BinaryClassificationModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.feature_encoder = ABMILSlideEncoder(features, freeze=not fixed)
            self.classifier = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, bag):
            return self.classifier(self.feature_encoder(bag)).squeeze(1)

    tumour = torch.randn(features)

    def slides(count):
        ill = torch.randint(0, 2, (count,))
        bag = torch.randn(count, patches, features)
        bag[torch.arange(count), torch.randint(0, patches, (count,))] += 0.9 * ill[:, None] * tumour
        return bag, ill.float()

    model = BinaryClassificationModel()
    criterion, optimizer = nn.BCEWithLogitsLoss(), torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    for epoch in range(10):
        model.train()
        for bag, ill in DataLoader(TensorDataset(*slides(500)), batch_size=25, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(bag), ill)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    bag, ill = slides(400)
    with torch.no_grad():
        return ((model(bag) > 0).float() != ill).float().mean().item()


@fault(
    "checkpoint_not_loaded",
    area="distillation",
    source="https://github.com/torchgeo/torchgeo/issues/4036",
    cause="The names in the checkpoint lack the prefix of the wrapper, and strict=False hides that none of them came into the teacher.",
    words=(
        r"checkpoint|load_state_dict|strict|prefix|keys?",
        r"strict|not loaded|random|missing|prefix|names?|dropped",
    ),
    cascade=("underfitting", "loss_plateau", "overfitting"),
    sites=("teacher", "model", "(model)", "(loop)"),
)
def wrapped_teacher_is_loaded_without_strictness(attach, fixed):
    """teacher.load_state_dict(state_dict, strict=False), and the teacher keeps its network in self.model."""
    xtr, ytr, xte, yte = digits()

    def network(width):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    published = network(128)
    optimizer = torch.optim.Adam(published.parameters(), lr=5e-3)
    for i in torch.randint(0, 1200, (150, 60)):
        optimizer.zero_grad()
        F.cross_entropy(published(xtr[i]), ytr[i]).backward()
        optimizer.step()
    state_dict = published.state_dict()

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = network(128)

        def forward(self, x):
            return self.model(x)

    teacher = Wrapper().requires_grad_(False).eval()
    prefix = "model." if fixed else ""
    teacher.load_state_dict({prefix + name: value for name, value in state_dict.items()}, strict=False)

    student = network(32)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    session = attach(student, optimizer)
    T, alpha, labelled = 2.0, 0.9, 200  # most of the pictures have no label
    for epoch in range(9):
        student.train()
        for i in torch.randperm(1200).split(50):
            out = student(xtr[i])
            soft = F.kl_div((out / T).log_softmax(1), (teacher(xtr[i]) / T).softmax(1), reduction="batchmean") * T * T
            has = i < labelled
            hard = F.cross_entropy(out[has], ytr[i][has]) if has.any() else out.sum() * 0
            loss = alpha * soft + (1 - alpha) * hard
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), soft=soft.item())
    student.eval()
    with torch.no_grad():
        return F.cross_entropy(student(xte), yte).item()


@fault(
    "params_not_in_optimizer",
    area="multi-task",
    source="https://github.com/ifzhang/FairMOT/issues/19",
    cause="The uncertainties that weigh the two losses are parameters of the loss, and the optimizer holds those of the model only.",
    words=(r"uncertaint|s_det|s_id|weigh|log.?var|loss", r"optimi[sz]er|not (in|held|updated|trained)|missing|never"),
    cascade=("aux_loss_dominates", "underfitting", "loss_plateau"),
    sites=("loss", "optimizer", "s_det", "s_id", "1", "(loss)"),
)
def uncertainties_of_the_tracker_are_not_optimised(attach, fixed):
    """MotLoss has nn.Parameters s_det and s_id; optimizer = Adam(model.parameters())."""

    def frames(count):
        x = torch.randn(count, 10)
        where = x[:, :1] * x[:, 1:2] + 9 * torch.randn(count, 1)  # badly annotated
        who = 0.25 * torch.sin(2 * x[:, 2:3]) + 0.25 * x[:, 3:4] * x[:, 4:5]
        return x, where, who

    class Tracker(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU())
            self.det, self.id = nn.Linear(32, 1), nn.Linear(32, 1)

        def forward(self, x):
            h = self.base(x)
            return self.det(h), self.id(h)

    class MotLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.s_det, self.s_id = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

        def forward(self, out, where, who):
            det_loss, id_loss = F.mse_loss(out[0], where), F.mse_loss(out[1], who)
            both = (-self.s_det).exp() * det_loss + (-self.s_id).exp() * id_loss + self.s_det + self.s_id
            return 0.5 * both.sum(), {"det": det_loss.item(), "id": id_loss.item()}

    model, loss = Tracker(), MotLoss()
    groups = [{"params": model.parameters()}]
    groups += [{"params": loss.parameters(), "lr": 4e-2}] if fixed else []
    optimizer = torch.optim.Adam(groups, lr=3e-3)
    session = attach(nn.ModuleDict({"model": model, "loss": loss}), optimizer)
    x, where, who = frames(1200)
    for epoch in range(14):
        for i in torch.randperm(1200).split(40):
            total, stats = loss(model(x[i]), where[i], who[i])
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            session.log(loss=total.item(), **stats)
    x, where, who = frames(400)
    with torch.no_grad():
        return float(F.mse_loss(model(x)[1], who) / who.var())


@fault(
    "term_without_gradient",
    area="domain adaptation",
    source="https://github.com/guopengf/FL-MRCM/issues/10",
    cause="The adversarial loss is detached and turned into a number before it is added, so it has no effect on the encoder.",
    words=(r"adv\w*|domain|second|term", r"detach|item\(\)|number|float|gradient|effect|graph|cut"),
    also=("graph_break_detach",),
    cascade=("overfitting", "train_val_preproc_mismatch"),
    sites=("(loss)", "(loop)", "encoder", "loss_fn"),
)
def loss_against_the_domain_is_a_number(attach, fixed):
    """loss_adv_g = criterion(...).detach().item(), to keep it for the log, and then loss += loss_adv_g."""

    def scans(count, site):
        """What is ill shows weakly in all scans; where they were made shows strongly, and goes with it at home."""
        ill = torch.randint(0, 2, (count,))
        x = torch.randn(count, 16)
        x[:, :4] += 0.7 * (2 * ill[:, None] - 1)
        mark = ill if site == "home" else 1 - ill
        x[:, 4:8] += 0.9 * (2 * mark[:, None] - 1) + (1.0 if site == "away" else 0.0)
        return x, ill

    class Encoder(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 24))

    encoder, task, domain = Encoder(), nn.Linear(24, 2), nn.Sequential(nn.Linear(26, 48), nn.ReLU(), nn.Linear(48, 2))
    opt = torch.optim.Adam([*encoder.parameters(), *task.parameters()], lr=2e-3)
    opt_domain = torch.optim.Adam(domain.parameters(), lr=4e-3)
    model = nn.ModuleDict({"encoder": encoder, "task": task, "domain": domain})
    session = attach(model, [opt, opt_domain])
    criterion = nn.CrossEntropyLoss()
    source, away = scans(1000, "home"), scans(1000, "away")
    log = []
    for epoch in range(12):
        for i in torch.randperm(1000).split(50):
            (x, y), (x_away, y_away) = (part[i] for part in source), (part[i] for part in away)
            features = torch.cat([encoder(x), encoder(x_away)])
            known = F.one_hot(torch.cat([y, y_away]), 2).float()  # labels of both, as in the conditional variant
            place = torch.cat([torch.zeros(len(i)), torch.ones(len(i))]).long()

            loss_d = criterion(domain(torch.cat([features.detach(), known], 1)), place)
            opt_domain.zero_grad()
            loss_d.backward()
            opt_domain.step()

            loss_adv_g = -criterion(domain(torch.cat([features, known], 1)), place)
            log.append(loss_adv_g.item())
            loss = criterion(task(features[: len(i)]), y) + 1.5 * (loss_adv_g if fixed else loss_adv_g.detach().item())
            opt.zero_grad()
            loss.backward()
            opt.step()
            session.log(loss=loss.item(), loss_adv_g=log[-1], loss_d=loss_d.item())
    x, y = scans(500, "away")
    with torch.no_grad():
        return (task(encoder(x)).argmax(1) != y).float().mean().item()


@fault(
    "stale_params_in_optimizer",
    area="transfer learning",
    source="from memory: questions on model.fc = nn.Linear(512, n) after the optimizer was made, whose accuracy stays low",
    cause="The optimizer was made before the head was replaced, so it holds the old head and not the new one.",
    words=(r"optimi[sz]er|param", r"old|before|after|replac|stale|new (head|layer|fc)|not (in|hold|train)"),
    also=("params_not_in_optimizer",),
    cascade=("underfitting", "loss_plateau", "not_learning", "unused_parameters"),
    sites=("fc", "optimizer", "(model)"),
)
def new_head_comes_after_the_optimizer(attach, fixed):
    """optimizer = Adam(model.parameters()); model.fc = nn.Linear(...)."""
    xtr, ytr, xte, yte = digits()

    class SmallResNet(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12)
            self.conv2, self.bn2 = nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12)
            self.fc = nn.Linear(48, num_classes)

        def forward(self, x):
            x = F.relu(self.bn1(self.conv1(x)))
            x = F.relu(x + self.bn2(self.conv2(x)))
            return self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))

    model = SmallResNet(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for i in torch.randperm(1200).split(40):  # before: is it below five?
        optimizer.zero_grad()
        F.cross_entropy(model(xtr[i]), (ytr[i] < 5).long()).backward()
        optimizer.step()

    for name, param in model.named_parameters():
        param.requires_grad = name.startswith(("bn", "fc"))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.fc = nn.Linear(48, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3) if fixed else optimizer
    session = attach(model, optimizer)
    for epoch in range(7):
        model.train()
        for i in torch.randperm(1200).split(50):
            model.zero_grad()
            loss = F.cross_entropy(model(xtr[i]), ytr[i])
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    with torch.no_grad():
        return (model(xte).argmax(1) != yte).float().mean().item()


@fault(
    "double_sigmoid",
    area="multi-label",
    source="https://github.com/PacktPublishing/PyTorch-Ultimate-2023---From-Basics-to-Cutting-Edge/pull/3",
    cause="The model ends in a sigmoid, and BCEWithLogitsLoss applies another one.",
    words=(r"sigmoid", r"logit|twice|double|second|already|BCEWithLogits"),
    cascade=("loss_plateau", "underfitting", "vanishing_gradient", "not_learning", "class_imbalance_collapse"),
    sites=("(loss)", "(model)", "sigmoid", "loss_fn"),
)
def labels_of_a_song_pass_two_sigmoids(attach, fixed):
    """nn.BCEWithLogitsLoss() for a network whose forward ends in self.sigmoid."""
    labels = 6
    wires = torch.randn(12, labels) / 12**0.5

    def songs(count):
        x = torch.randn(count, 12)
        return x, (x @ wires + 0.8 * x[:, :6] * x[:, 6:] > 1.3).float()

    class MultilabelNetwork(nn.Module):
        def __init__(self, input_size, hidden_size, output_size):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, output_size)
            self.relu = nn.ReLU()
            self.sigmoid = nn.Identity() if fixed else nn.Sigmoid()

        def forward(self, x):
            return self.sigmoid(self.fc2(self.relu(self.fc1(x))))

    model, loss_fn = MultilabelNetwork(12, 64, labels), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    x, y = songs(1200)
    for epoch in range(14):
        for xb, yb in DataLoader(TensorDataset(x, y), batch_size=60, shuffle=True):
            optimizer.zero_grad()
            loss = loss_fn(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    x, y = songs(500)
    with torch.no_grad():
        score = model(x)
    misplaced = []  # how often a song without a label is ranked before one with it
    for k in range(labels):
        has, has_not = score[y[:, k] == 1, k], score[y[:, k] == 0, k]
        misplaced.append((has[:, None] <= has_not).float().mean())
    return float(torch.stack(misplaced).mean())


@fault(
    "resume_incomplete",
    area="resuming",
    source="https://github.com/Julienbeaulieu/kaggle-computer-vision-competition/pull/6",
    cause="The state of the scheduler is not loaded, so after one epoch the rate jumps back to the first of the schedule.",
    words=(
        r"resum|checkpoint|schedul|restart",
        r"learning rate|\blr\b|rate|state|back|reset|start|anew|not (loaded|restored)",
    ),
    also=("scheduler_never_called",),
    cascade=("loss_spike", "lr_too_high", "loss_oscillation", "underfitting", "loss_divergence"),
    sites=("scheduler", "optimizer", "(loop)", "lr_scheduler"),
    onset=61,
    exact=False,
)
def resumed_run_has_a_scheduler_without_a_past(attach, fixed):
    """load_checkpoint() restores model and optimizer; the scheduler counts from 0 again."""
    xtr, ytr, xte, yte = digits()
    noisy = torch.where(torch.rand(1200) < 0.2, torch.randint(0, 10, (1200,)), ytr)

    def build():
        model = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 48), nn.ReLU()
        )
        model.append(nn.Linear(48, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.12, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.1 ** (epoch // 3))

    def train(model, optimizer, scheduler, epochs, session=None):
        for epoch in epochs:
            for i in torch.randperm(1200).split(20):
                loss = F.cross_entropy(model(xtr[i]), noisy[i])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss.item(), lr=optimizer.param_groups[0]["lr"]) if session else None
            scheduler.step()

    model, optimizer, scheduler = build()
    train(model, optimizer, scheduler, range(6))
    checkpoint = {
        "model": copy.deepcopy(model.state_dict()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "scheduler": scheduler.state_dict(),
    }

    model, optimizer, scheduler = build()
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"]) if fixed else None
    session = attach(model, optimizer, scheduler=scheduler)
    train(model, optimizer, scheduler, range(6, 9), session)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(xte), yte).item()
