"""Ninth hold-out: pre-trained models, checkpoints, distillation and pairs."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_9.about import fault
from fault_programs.holdout_9.matter import digits, wrong_share


class Backbone(nn.Module):
    def __init__(self, width=48, out=10):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.fc = nn.Linear(width, out)

    def forward(self, x):
        return self.fc(self.backbone(x))


def pretrained(x, y, steps=250, **shape):
    """Train on the source task, as a download would have been."""
    model = Backbone(**shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        rows = torch.randint(0, len(x), (64,))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def few(x, y, each=3):
    """The first few samples of each class."""
    rows = torch.cat([torch.nonzero(y == k)[:each, 0] for k in range(10)])
    return x[rows], y[rows]


@fault(
    "checkpoint_not_loaded",
    area="transfer",
    source="from memory: discuss.pytorch.org, a Lightning or DataParallel checkpoint loaded with strict=False",
    cause="The keys of the checkpoint begin with 'model.', and strict=False lets none of them be loaded without a word.",
    words=(r"strict|load_state_dict|checkpoint|key|prefix", r"not.*load|prefix|missing|mismatch|random"),
    also=("frozen_by_mistake",),
    cascade=("overfitting", "underfitting", "unused_parameters"),
    sites=("(model)", "backbone", "(loop)"),
)
def loads_nothing_of_a_prefixed_checkpoint(attach, fixed):
    """net.load_state_dict(checkpoint['state_dict'], strict=False)."""
    xtr, ytr, xte, yte = digits()

    class LitClassifier(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

    checkpoint = {"epoch": 3, "state_dict": LitClassifier(pretrained(xtr, ytr, width=24)).state_dict()}
    net = Backbone(width=24)
    state_dict = checkpoint["state_dict"]
    net.load_state_dict({k.removeprefix("model.") if fixed else k: v for k, v in state_dict.items()}, strict=False)
    net.fc = nn.Linear(24, 10)
    for p in net.backbone.parameters():
        p.requires_grad = False
    x, y = few(xtr, ytr, 6)
    optimizer = torch.optim.Adam(net.fc.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    for _epoch in range(60):
        for rows in torch.randperm(len(x)).split(20):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return wrong_share(net, xte, yte)


@fault(
    "freezing_undone",
    area="transfer",
    source="https://github.com/ultralytics/yolov5/issues/1213",
    cause="The layers are frozen, and a later loop over all parameters sets requires_grad to True again, so the backbone is trained.",
    words=(r"freez|frozen|requires_grad", r"again|undone|overwrit|later|not frozen|True"),
    also=("setting_without_effect",),
    cascade=("overfitting", "lr_too_high", "loss_spike", "dead_relu"),
    sites=("(model)", "backbone", "optimizer"),
)
def thaws_what_it_has_just_frozen(attach, fixed):
    """v.requires_grad = True in the loop that sorts parameters into groups."""
    xtr, ytr, xte, yte = digits()
    model = pretrained(xtr, ytr)
    freeze = ["backbone."]
    for k, v in model.named_parameters():
        if any(x in k for x in freeze):
            v.requires_grad = False
    nn.init.normal_(model.fc.weight, std=0.01)
    pg0, pg1 = [], []
    for k, v in model.named_parameters():
        v.requires_grad = v.requires_grad if fixed else True
        (pg1 if k.endswith("bias") else pg0).append(v)
    optimizer = torch.optim.SGD(pg0, lr=0.3, momentum=0.937, nesterov=True)
    optimizer.add_param_group({"params": pg1})
    session = attach(model, optimizer)
    x, y = few(xtr, ytr, 2)
    for epoch in range(60):
        loss = F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(epoch=epoch, train_loss=loss)
    return wrong_share(model, xte, yte)


@fault(
    "stale_params_in_optimizer",
    area="transfer",
    source="from memory: discuss.pytorch.org, fine-tuning threads where model.fc is replaced after the optimizer was made",
    cause="The head is replaced after the optimizer was made, so the optimizer holds the old head and the new one is never trained.",
    words=(r"optimi[sz]er", r"fc|head|layer", r"old|replac|before|new|not.*(train|updat)"),
    also=("params_not_in_optimizer",),
    cascade=("not_learning", "loss_plateau", "underfitting", "large_initial_loss"),
    sites=("optimizer", "fc"),
)
def new_head_after_the_optimizer(attach, fixed):
    """optimizer = SGD(model.parameters()); model.fc = nn.Linear(...)."""
    xtr, ytr, xte, yte = digits()
    low = ytr < 5
    model = pretrained(xtr[low], ytr[low])
    for param in model.backbone.parameters():
        param.requires_grad = False
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    num_ftrs = model.fc.in_features
    model.fc = nn.Linear(num_ftrs, 5)
    if fixed:
        optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.02, momentum=0.9)
    session = attach(model, optimizer)
    x, y = xtr[~low], ytr[~low] - 5
    for _epoch in range(12):
        running_loss, running_corrects = 0.0, 0
        for rows in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            outputs = model(x[rows])
            _, preds = torch.max(outputs, 1)
            loss = criterion(outputs, y[rows])
            loss.backward()
            optimizer.step()
            running_loss += loss.item() * len(rows)
            running_corrects += int((preds == y[rows]).sum())
        session.log(loss=running_loss / len(x), acc=running_corrects / len(x))
    return wrong_share(model, xte[yte > 4], yte[yte > 4] - 5)


class LoraLinear(nn.Module):
    def __init__(self, base, rank=8, alpha=16):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, rank))
        self.scaling = alpha / rank
        for p in base.parameters():
            p.requires_grad = False

    def forward(self, x):
        return self.base(x) + self.scaling * (x @ self.lora_A.T @ self.lora_B.T)


@fault(
    "zero_init_blocked",
    area="fine-tuning",
    source="https://github.com/nvidia-cosmos/cosmos-predict2.5/pull/15",
    cause="Both factors of the adapters start at zero, so neither ever gets a gradient.",
    words=(r"lora|adapter", r"zero"),
    also=("symmetric_init",),
    cascade=("not_learning", "loss_plateau", "vanishing_gradient", "optimizer_step_noop", "underfitting"),
    sites=("(model)", "backbone.1", "backbone.3", "backbone.1.lora_A", "backbone.1.lora_B", "backbone.3.lora_A",
           "backbone.3.lora_B", "fc", "fc.lora_A", "fc.lora_B"),
)  # fmt: skip
def both_factors_of_lora_are_zero(attach, fixed):
    """init_weights runs over the model when the adapters are already in it."""
    xtr, ytr, xte, yte = digits()
    model = pretrained(xtr, ytr)
    for name in ("1", "3"):
        setattr(model.backbone, name, LoraLinear(getattr(model.backbone, name)))
    model.fc = LoraLinear(model.fc)

    def init_weights(module):
        if isinstance(module, LoraLinear):
            nn.init.kaiming_uniform_(module.lora_A, a=math.sqrt(5)) if fixed else nn.init.zeros_(module.lora_A)
            nn.init.zeros_(module.lora_B)

    model.apply(init_weights)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3, weight_decay=0.0)
    session = attach(model, optimizer)
    turned, turned_test = torch.rot90(xtr, 1, (2, 3)), torch.rot90(xte, 1, (2, 3))
    for step in range(250):
        rows = torch.randint(0, 1000, (32,))
        loss = F.cross_entropy(model(turned[rows]), ytr[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            session.log(loss=loss)
    return wrong_share(model, turned_test, yte)


@fault(
    "best_state_shares_memory",
    area="tabular",
    source="https://github.com/WenjieDu/PyPOTS/issues/667",
    cause="The best state is kept as a reference to the live weights, so it changes with every further step.",
    words=(r"state_dict|best", r"copy|reference|share"),
    cascade=("overfitting", "loss_divergence", "loss_oscillation", "loss_spike"),
    sites=("(model)", "(loop)"),
    onset=6,
)
def remembers_the_best_by_reference(attach, fixed):
    """self.best_model_dict = self.model.state_dict()."""

    class Trainer:
        def __init__(self, model, lr, epochs):
            self.model, self.epochs = model, epochs
            self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
            self.best_loss = float("inf")
            self.best_model_dict = None

        def fit(self, train, val, session):
            for epoch in range(self.epochs):
                self.model.train()
                for rows in torch.randperm(len(train[0])).split(16):
                    self.optimizer.zero_grad()
                    loss = F.mse_loss(self.model(train[0][rows])[:, 0], train[1][rows])
                    loss.backward()
                    self.optimizer.step()
                mean_val_loss = self.validate(val)
                session.log(epoch=epoch, train_loss=loss, val_loss=mean_val_loss)
                if mean_val_loss < self.best_loss:
                    self.best_loss = mean_val_loss
                    self.best_model_dict = copy.deepcopy(self.model.state_dict()) if fixed else self.model.state_dict()
            self.model.load_state_dict(self.best_model_dict)

        def validate(self, val):
            self.model.eval()
            with torch.no_grad():
                return float(F.mse_loss(self.model(val[0])[:, 0], val[1]))

    made = torch.Generator().manual_seed(981)
    x = torch.randn(300, 12, generator=made)
    y = x[:, 0] + 0.5 * x[:, 1] + torch.randn(300, generator=made)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    trainer = Trainer(model, lr=3e-3, epochs=60)
    val = (x[80:], y[80:])
    trainer.fit((x[:80], y[:80]), val, attach(model, trainer.optimizer))
    return trainer.validate(val) - trainer.best_loss


@fault(
    "resume_incomplete",
    area="physics",
    source="https://github.com/PolymathicAI/the_well/pull/63",
    cause="The checkpoint does not keep the state of the scheduler, so a resumed run warms up and decays from the beginning again.",
    words=(r"schedul|learning rate|warm", r"resum|checkpoint|restart|state"),
    also=("resume_overrides_lr",),
    cascade=("loss_spike", "loss_oscillation", "scheduler_never_called", "lr_schedule_collapse", "lr_too_high"),
    sites=("scheduler", "optimizer", "(loop)"),
    onset=151,
)
def resumes_at_the_start_of_the_schedule(attach, fixed):
    """The trainer saves the optimizer and not lr_scheduler."""
    made = torch.Generator().manual_seed(982)
    x = 4 * torch.rand(400, 2, generator=made) - 2
    y = (torch.sin(2 * x[:, 0]) * torch.cos(x[:, 1]) + 0.3 * torch.randn(400, generator=made))[:, None]
    total = 200

    def build():
        model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=6e-2)
        warm_up = 40

        def factor(step):
            return (
                step / warm_up
                if step < warm_up
                else 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (total - warm_up)))
            )

        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def run(model, optimizer, scheduler, session, steps):
        for _ in range(steps):
            rows = torch.randint(0, 400, (16,))
            loss = F.mse_loss(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            session.log(loss=loss, lr=scheduler.get_last_lr()[0])

    model, optimizer, lr_scheduler = build()
    run(model, optimizer, lr_scheduler, attach(model, optimizer), 150)
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": lr_scheduler.state_dict()}
    checkpoint = copy.deepcopy(kept)
    model, optimizer, lr_scheduler = build()
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if fixed:
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
    run(model, optimizer, lr_scheduler, attach(model, optimizer), 50)
    with torch.no_grad():
        grid = 4 * torch.rand(500, 2, generator=made) - 2
        clean = torch.sin(2 * grid[:, 0]) * torch.cos(grid[:, 1])
        return float(F.mse_loss(model(grid)[:, 0], clean)) ** 0.5


class Encoder(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(32, dim))

    def forward(self, x):
        return F.normalize(self.head(self.body(x)), dim=1)


def neighbour_error(embed, memory, labels, x, y):
    """Return how often the nearest remembered sample is of another class."""
    with torch.no_grad():
        near = torch.cdist(embed(x), embed(memory)).argmin(1)
    return float((labels[near] != y).float().mean())


@fault(
    "same_view_twice",
    area="contrastive",
    source="https://github.com/catalyst-team/catalyst/pull/1278",
    cause="Both embeddings are made of the first augmentation, so a positive pair is a picture and itself and teaches no invariance.",
    words=(r"aug|view", r"same|twice|aug1|first"),
    also=("pairs_with_itself", "input_ignored", "target_is_input"),
    cascade=("underfitting", "overfitting"),
    sites=("(loop)", "(data)", "(loss)"),
)
def second_view_is_the_first(attach, fixed):
    """emb2 = self.model(batch["aug1"])."""
    xtr, ytr, xte, yte = digits()

    def augment(x):
        dropped = (torch.rand(len(x), 1, 8, 8) > 0.3).float()
        return dropped * x + 0.3 * torch.randn_like(x)

    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for _epoch in range(40):
        for rows in torch.randperm(1000).split(50):
            batch = {"aug1": augment(xtr[rows]), "aug2": augment(xtr[rows])}
            emb1 = model(batch["aug1"])
            emb2 = model(batch["aug2" if fixed else "aug1"])
            logits = emb1 @ emb2.T / 0.2
            target = torch.arange(len(rows))
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(contrastive=loss)
    return neighbour_error(model, xtr, ytr, augment(xte), yte)
