"""Fifth hold-out: fine-tuning, precision, schedules, checkpoints and the loop itself."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_5.about import fault
from fault_programs.holdout_5.materials import batches, digits, plant, wrong


def backbone():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten()
    )


def pretrained(classes, epochs=6):
    """Return features trained on the digits below five."""
    x, y, *_ = digits()
    body = backbone()
    net = nn.Sequential(body, nn.Linear(128, 5))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for xb, yb in batches(x[y < 5], y[y < 5], size=50, epochs=epochs):
        opt.zero_grad()
        F.cross_entropy(net(xb), yb).backward()
        opt.step()
    return body


@fault(
    "attribute_misspelt",
    area="fine-tuning",
    source="https://github.com/udacity/deep-learning-v2-pytorch/issues/12",
    cause="`require_grad = False` is misspelt, so the pretrained features are not frozen and a high rate destroys them.",
    words=(r"requires?_grad", r"misspel", r"attribute", r"froz|freez"),
    cascade=(
        "lr_too_high",
        "loss_divergence",
        "loss_spike",
        "loss_oscillation",
        "dead_relu",
        "constant_output",
        "exploding_gradient",
        "large_initial_loss",
        "not_learning",
    ),
    sites=("features", "(model)", "0", "features.0", "features.3"),
)
def freezes_with_a_typo(attach, fixed):
    """param.require_grad."""
    x, y, tx, ty = digits()
    net = nn.ModuleDict({"features": pretrained(5), "classifier": nn.Linear(128, 5)})
    for param in net["features"].parameters():
        setattr(param, "requires_grad" if fixed else "require_grad", False)
    few = (y >= 5).nonzero()[:100, 0]
    x, y = x[few], y[few] - 5
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1.0, momentum=0.9)
    session = attach(net, optimizer)

    def forward(images):
        return net["classifier"](net["features"](images))

    for images, labels in batches(x, y, size=20, epochs=40):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    keep = ty >= 5
    with torch.no_grad():
        return float((forward(tx[keep]).argmax(1) != ty[keep] - 5).float().mean())


@fault(
    "stale_params_in_optimizer",
    area="fine-tuning",
    source="from memory: discuss.pytorch.org, head replaced after the optimizer was built",
    cause="The optimizer was built before the head was replaced and holds the old head's parameters.",
    words=(r"not.*optimizer", r"stale", r"replaced", r"old (head|param)"),
    also=("params_not_in_optimizer",),
    cascade=("underfitting", "not_learning", "loss_plateau"),
    sites=("optimizer", "fc"),
)
def replaces_the_head_too_late(attach, fixed):
    """model.fc = nn.Linear(...) after Adam(model.parameters())."""
    x, y, tx, ty = digits()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc = pretrained(5), nn.Linear(128, 5)
            for p in self.body.parameters():
                p.requires_grad_(False)

        def forward(self, images):
            return self.fc(self.body(images))

    model = Net()
    head = nn.Linear(128, 10)
    if fixed:
        model.fc = head
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.fc = head
    session = attach(model, optimizer)
    for epoch in range(8):
        for xb, yb in batches(x, y, size=50):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        session.log(loss=loss)
    return wrong(model, tx, ty)


@fault(
    "best_state_shares_memory",
    area="checkpoints",
    source="https://github.com/pytorch/tutorials/pull/188",
    cause="best_model_wts = model.state_dict() without a deep copy: it follows the weights and restores the last ones.",
    words=(r"state_dict", r"deep.?copy", r"share.*memory|same memory", r"best.*(state|weights|copy)"),
    cascade=("overfitting", "lr_too_high", "loss_divergence", "loss_spike", "loss_oscillation"),
    sites=("(loop)", "(model)"),
    onset=100,
)
def keeps_a_reference_to_the_best(attach, fixed):
    """The best weights are not copied."""
    x, y, tx, ty = digits()
    noisy = y[:300].clone()
    noisy[::3] = torch.randint(10, (100,))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    best_acc, best_model_wts = 0.0, None
    for epoch in range(60):
        model.train()
        for xb, yb in batches(x[:300], noisy, size=30):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            acc = (model(tx[:250]).argmax(1) == ty[:250]).float().mean().item()
        if acc > best_acc:
            best_acc = acc
            best_model_wts = copy.deepcopy(model.state_dict()) if fixed else model.state_dict()
        session.log(loss=loss, val_acc=acc)
    model.load_state_dict(best_model_wts)
    return wrong(model, tx[250:], ty[250:])


@fault(
    "resume_incomplete",
    area="checkpoints",
    source="https://github.com/huggingface/transformers/issues/33336 and https://github.com/r9y9/wavenet_vocoder/issues/132 (state of optimizer and rate not restored)",
    cause="After a resume the schedule starts anew, so the rate jumps from small to its first high value and training ends there.",
    words=(r"resum", r"schedul\w*.*(restor|restart|anew)", r"checkpoint"),
    also=("momentum_state_stale",),
    cascade=("loss_spike", "lr_too_high", "loss_oscillation", "loss_divergence"),
    sites=("scheduler", "optimizer", "(loop)"),
    onset=150,
    exact=False,
)
def resumes_without_the_schedule(attach, fixed):
    """load_state_dict for the model only."""
    x, y = plant()

    def build():
        net = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 1))
        opt = torch.optim.SGD(net.parameters(), lr=0.15, momentum=0.9)
        return net, opt, torch.optim.lr_scheduler.StepLR(opt, 40, 0.25)

    def train(net, opt, sched, session, steps):
        for _, (xb, yb) in zip(range(steps), batches(x[300:], y[300:], size=30, epochs=20), strict=False):
            opt.zero_grad()
            loss = F.mse_loss(net(xb).squeeze(1), yb)
            loss.backward()
            opt.step()
            sched.step()
            session.log(loss=loss)

    net, opt, sched = build()
    session = attach(net, opt, scheduler=sched)
    train(net, opt, sched, session, 240)
    ckpt = {
        "model": copy.deepcopy(net.state_dict()),
        "opt": copy.deepcopy(opt.state_dict()),
        "sched": sched.state_dict(),
    }
    net, opt, sched = build()
    net.load_state_dict(ckpt["model"])
    if fixed:
        opt.load_state_dict(ckpt["opt"]), sched.load_state_dict(ckpt["sched"])
    session = attach(net, opt, scheduler=sched, resume=True)
    train(net, opt, sched, session, 25)
    with torch.no_grad():
        return float(F.mse_loss(net(x[:300]).squeeze(1), y[:300]))


@fault(
    "lr_schedule_collapse",
    area="scheduling",
    source="https://github.com/ivadomed/ivadomed/pull/55",
    cause="scheduler.step() is called for every batch instead of every epoch: the rate is gone after a few batches.",
    words=(r"(rate|lr).*(collapse|vanish|decay|zero|gone)", r"schedul"),
    also=("lr_too_low",),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("scheduler", "optimizer"),
)
def steps_the_schedule_each_batch(attach, fixed):
    """The indentation of scheduler.step()."""
    x, y, tx, ty = digits()
    model = nn.Sequential(backbone(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    session = attach(model, optimizer)
    for epoch in range(8):
        for xb, yb in batches(x, y, size=32):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            if not fixed:
                scheduler.step()
            session.log(loss=loss)
        if scheduler.last_epoch <= epoch:
            scheduler.step()
    return wrong(model, tx, ty)


@fault(
    "lr_schedule_collapse",
    area="scheduling",
    source="from memory: discuss.pytorch.org, ReduceLROnPlateau(mode='max') fed the loss",
    cause="ReduceLROnPlateau with mode='max' is given a loss, so every improvement counts as a plateau and cuts the rate.",
    words=(r"(rate|lr).*(collapse|vanish|decay|zero|gone|cut)", r"schedul", r"plateau.*(mode|max)"),
    also=("lr_too_low",),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("scheduler", "optimizer"),
)
def plateau_of_the_wrong_kind(attach, fixed):
    """mode='max' for a loss."""
    x, y = plant()
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="min" if fixed else "max", patience=1, factor=0.1
    )
    session = attach(net, optimizer)
    for epoch in range(20):
        total = 0.0
        for xb, yb in batches(x[300:], y[300:], size=40):
            optimizer.zero_grad()
            loss = F.mse_loss(net(xb)[:, 0], yb)
            loss.backward()
            optimizer.step()
            total += loss.item()
            session.log(loss=loss)
        scheduler.step(total)
    with torch.no_grad():
        return float(F.mse_loss(net(x[:300])[:, 0], y[:300]))


@fault(
    "lr_too_low",
    area="scheduling",
    source="https://github.com/lhoyer/MIC/issues/60",
    cause="LambdaLR's function returns the rate itself; it is multiplied by the base rate again, which makes it tiny.",
    words=(r"(rate|lr).*(low|small|tiny|squared|twice)", r"factor"),
    also=("lr_schedule_collapse",),
    cascade=("underfitting", "loss_plateau", "not_learning", "optimizer_step_noop"),
    sites=("optimizer", "scheduler"),
    exact=False,
)
def multiplies_the_rate_twice(attach, fixed):
    """lambda x: args.lr * (...)."""
    x, y, tx, ty = digits()
    lr = 0.02
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    base = 1.0 if fixed else lr
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: base * (1.0 + 0.001 * float(step)) ** (-0.75)
    )
    session = attach(model, optimizer)
    for xb, yb in batches(x, y, size=32, epochs=8):
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        session.log(loss=loss)
    return wrong(model, tx, ty)


@fault(
    "params_not_in_optimizer",
    area="fine-tuning",
    source="https://github.com/pytorch/pytorch/issues/1053",
    cause="Convolutions kept in a Python list are not registered, so the optimizer does not hold them.",
    words=(r"not.{0,20}(optimizer|regist|train)", r"python list|modulelist"),
    also=("unused_parameters", "frozen_by_mistake"),
    cascade=("underfitting",),
    sites=("(model)", "optimizer", "convs"),
)
def filters_in_a_python_list(attach, fixed):
    """[nn.Conv1d(...), ...] instead of nn.ModuleList."""
    x, y, tx, ty = digits()

    class TextCNN(nn.Module):
        def __init__(self):
            super().__init__()
            convs = [nn.Conv1d(8, 3, k) for k in (2, 3, 4)]
            self.convs = nn.ModuleList(convs) if fixed else convs
            self.fc = nn.Linear(9, 10)

        def forward(self, rows):
            pooled = [F.relu(conv(rows)).max(-1).values for conv in self.convs]
            return self.fc(torch.cat(pooled, 1))

    net = TextCNN()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    session = attach(net, opt)
    for rows, label in batches(x[:, 0], y, size=32, epochs=8):
        opt.zero_grad()
        loss = F.cross_entropy(net(rows), label)
        loss.backward()
        opt.step()
        session.log(loss=loss)
    return wrong(net, tx[:, 0], ty)


@fault(
    "clip_before_unscale",
    area="mixed precision",
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/9599",
    cause="Gradients are clipped while still multiplied by the loss scale, so nearly nothing is left after unscaling.",
    words=(r"unscale", r"clip.*scal", r"loss.?scale"),
    also=("clip_always_active",),
    cascade=("underfitting", "loss_plateau", "not_learning", "lr_too_low", "optimizer_step_noop"),
    sites=("scaler", "optimizer", "(loop)"),
)
def clips_scaled_gradients(attach, fixed):
    """No scaler.unscale_ before clip_grad_norm_."""
    x, y, tx, ty = digits()
    model = nn.Sequential(backbone(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    session = attach(model, optimizer)
    for xb, yb in batches(x, y, size=32, epochs=6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad(set_to_none=True)
        grad_scaler.scale(loss).backward()
        if fixed:
            grad_scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        session.log(loss=loss.item())
    return wrong(model, tx, ty)


@fault(
    "low_precision_stall",
    area="mixed precision",
    source="from memory: pure bfloat16 training posts (weights kept in bf16, small updates round away)",
    cause="Weights are kept in bfloat16, and updates smaller than its resolution are rounded away.",
    words=(r"precision|bf16|bfloat16", r"round(ed|ing)? away|rounding"),
    also=("optimizer_step_noop",),
    cascade=("lr_too_low", "underfitting", "loss_plateau", "not_learning"),
    sites=("optimizer", "(model)"),
)
def weights_in_bfloat16(attach, fixed):
    """model.to(torch.bfloat16) with a small rate."""
    x, y = plant()
    kind = torch.float32 if fixed else torch.bfloat16
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(kind)
    opt = torch.optim.Adam(model.parameters(), lr=3e-4)
    session = attach(model, opt)
    for xb, yb in batches(x[300:], y[300:], size=30, epochs=40):
        loss = F.mse_loss(model(xb.to(kind)).float().squeeze(1), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(model(x[:300].to(kind)).float().squeeze(1), y[:300]))


@fault(
    "ema_not_updated",
    area="semi-supervised",
    source="https://github.com/YU1ut/MixMatch-pytorch/pull/23",
    cause="The average is assigned to a loop variable and never copied, so the EMA model stays at its start.",
    words=(r"(ema|average|teacher).*(not|never)", r"never (updated|changes)"),
    cascade=("train_mode_in_eval",),
    sites=("(loop)", "ema", "ema_model"),
)
def averages_into_a_local_name(attach, fixed):
    """ema_param = ... inside a for loop."""
    x, y, tx, ty = digits()

    def create_model(ema=False):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
        if ema:
            for param in model.parameters():
                param.detach_()
        return model

    class WeightEMA:
        def __init__(self, model, ema_model, alpha=0.97):
            self.params = list(model.state_dict().values())
            self.ema_params = list(ema_model.state_dict().values())
            self.alpha = alpha

        def step(self):
            for param, ema_param in zip(self.params, self.ema_params, strict=True):
                fresh = ema_param * self.alpha + param * (1 - self.alpha)
                if fixed:
                    ema_param.copy_(fresh)
                else:
                    ema_param = fresh

    model, ema_model = create_model(), create_model(ema=True)
    ema_optimizer = WeightEMA(model, ema_model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach({"model": model, "ema": ema_model}, optimizer)
    for xb, yb in batches(x, y, size=40, epochs=8):
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema_optimizer.step()
        session.log(loss=loss)
    return wrong(ema_model, tx, ty)


@fault(
    "batchnorm_stats_stale",
    area="semi-supervised",
    source="https://github.com/lucidrains/ema-pytorch/issues/8",
    cause="The EMA copies parameters but not buffers, so its BatchNorm statistics are those of the start.",
    words=(r"buffer", r"running (stat|mean|var)", r"batch.?norm"),
    also=("ema_not_updated",),
    cascade=("train_mode_in_eval",),
    sites=("(loop)", "ema", "1", "bn", "average"),
)
def averages_parameters_but_no_buffers(attach, fixed):
    """named_parameters only."""
    x, y, tx, ty = digits()
    x, tx = x * 6 + 2, tx * 6 + 2
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    average = copy.deepcopy(net)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    session = attach({"net": net, "average": average}, opt)

    @torch.no_grad()
    def update():
        for slow, fast in zip(average.parameters(), net.parameters(), strict=True):
            slow.lerp_(fast, 0.05)
        for slow, fast in zip(average.buffers(), net.buffers(), strict=True):
            slow.copy_(fast if fixed else slow)

    for epoch in range(7):
        net.train()
        for xb, yb in batches(x, y, size=40):
            loss = F.cross_entropy(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            update()
        average.eval()
        with torch.no_grad():
            session.log(loss=loss, ema_val=F.cross_entropy(average(tx), ty))
    return wrong(average, tx, ty)


@fault(
    "term_does_nothing",
    area="distillation",
    source="https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/66",
    cause="The distillation term compares the teacher with itself; the student's outputs are not in it.",
    words=(
        r"(term|loss).*(nothing|no gradient|constant|no effect|does not depend)",
        r"teacher.*(itself|no gradient)",
        r"distill",
    ),
    also=("graph_break_detach", "unused_parameters"),
    cascade=("overfitting", "underfitting"),
    sites=("(loss)", "loss_fn", "(loop)"),
)
def distils_the_teacher_into_itself(attach, fixed):
    """large_logits where output was meant."""
    x, y, tx, ty = digits()
    large = nn.Sequential(backbone(), nn.Linear(128, 10))
    school = torch.optim.Adam(large.parameters(), lr=3e-3)
    for xb, yb in batches(x, y, size=50, epochs=8):
        school.zero_grad()
        F.cross_entropy(large(xb), yb).backward()
        school.step()
    large.requires_grad_(False).eval()
    small = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(small.parameters(), lr=3e-3)
    session = attach(small, optimizer)
    for (xb,) in batches(x, size=48, epochs=12):
        few = torch.randint(0, 20, (8,))
        with torch.no_grad():
            large_logits = large(xb)
        output = small(xb)
        used = output if fixed else large_logits
        soft = F.kl_div(F.log_softmax(used / 3, -1), F.softmax(large_logits / 3, -1), reduction="batchmean")
        label = F.cross_entropy(small(x[few]), y[few])
        loss = 9 * soft + 0.3 * label
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(soft_loss=soft, label_loss=label)
    return wrong(small, tx, ty)


@fault(
    "loss_overwritten",
    area="multi-task",
    source="from memory: multi-head training posts, `loss = criterion(...)` inside the loop over heads instead of `loss +=`",
    cause="The loss is overwritten in the loop over heads, so only the last head is trained.",
    words=(r"overwrit", r"only.*(last|one) (head|term)", r"no gradient|unused|not used"),
    also=("unused_parameters", "graph_break_detach"),
    cascade=("underfitting", "frozen_by_mistake"),
    sites=("heads", "(loop)", "(loss)"),
)
def only_the_last_head_counts(attach, fixed):
    """= where += was meant."""
    x, y, tx, ty = digits()
    goals, truth = [(y % 2), (y >= 5).long(), (y % 3)], [(ty % 2), (ty >= 5).long(), (ty % 3)]
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
    heads = nn.ModuleList([nn.Linear(64, 2), nn.Linear(64, 2), nn.Linear(64, 3)])
    net = nn.ModuleDict({"trunk": trunk, "heads": heads})
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, opt)
    for xb, *yb in batches(x, *goals, size=40, epochs=8):
        h = trunk(xb)
        loss = 0
        for head, goal in zip(heads, yb, strict=True):
            term = F.cross_entropy(head(h), goal)
            loss = loss + term if fixed else term
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        h = trunk(tx)
        return sum(float((head(h).argmax(1) != t).float().mean()) for head, t in zip(heads, truth, strict=True)) / 3


@fault(
    "graph_break_detach",
    area="regression",
    source="from memory: stackoverflow.com, 'element 0 of tensors does not require grad' answered by Variable(loss, requires_grad=True)",
    cause="The loss is wrapped into a new tensor with requires_grad=True, which cuts it off from the model.",
    words=(r"detach", r"(cut|leav|break)\w*.*graph|graph.*(cut|broken|break)", r"no gradient", r"new tensor"),
    also=("unused_parameters", "optimizer_step_noop"),
    cascade=("not_learning", "loss_plateau", "frozen_by_mistake", "lr_too_low", "step_not_called"),
    sites=("(loss)", "(loop)", "(model)", "(function)"),
)
def wraps_the_loss_anew_again(attach, fixed):
    """torch.tensor(loss.item(), requires_grad=True)."""
    x, y = plant()
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    for epoch in range(10):
        for xb, yb in batches(x[300:], y[300:], size=40):
            optimizer.zero_grad()
            loss = F.l1_loss(net(xb).squeeze(-1), yb)
            if not fixed:
                loss = torch.tensor(loss.item(), requires_grad=True)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(net(x[:300]).squeeze(-1), y[:300]))


@fault(
    "zero_grad_misplaced",
    area="regression",
    source="from memory: stackoverflow.com, zero_grad() between backward() and step()",
    cause="zero_grad() is called after backward() and before step(): every step sees zero gradients.",
    words=(r"zero_grad", r"cleared"),
    cascade=(
        "not_learning",
        "optimizer_step_noop",
        "loss_plateau",
        "vanishing_gradient",
        "step_not_called",
        "frozen_by_mistake",
    ),
    sites=("optimizer", "(loop)"),
)
def clears_gradients_before_the_step_again(attach, fixed):
    """backward, zero_grad, step."""
    x, y, tx, ty = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def train_step(xb, yb):
        model.train()
        loss = F.cross_entropy(model(xb), yb)
        if fixed:
            optimizer.zero_grad()
            loss.backward()
        else:
            loss.backward()
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        return loss.item()

    session = attach(model, optimizer)
    for xb, yb in batches(x, y, size=40, epochs=7):
        session.log(loss=train_step(xb, yb))
    return wrong(model, tx, ty)


@fault(
    "copies_share_memory",
    area="distributed",
    source="https://github.com/alibaba/FederatedScope/issues/664",
    cause="Clients' weights are kept as references to one state_dict, so the average is just the last client's model.",
    words=(r"deep.?copy", r"share.*memory|same memory", r"reference"),
    also=("best_state_shares_memory",),
    cascade=("loss_oscillation", "loss_spike", "lr_too_high", "class_imbalance_collapse"),
    sites=("(loop)", "(model)"),
    exact=False,
)
def federated_average_of_references(attach, fixed):
    """w_locals.append(net.state_dict())."""
    x, y, tx, ty = digits()
    shards = [(y // 2 == k).nonzero()[:, 0] for k in range(5)]
    net_glob = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net_glob.parameters(), lr=0.1)
    session = attach(net_glob, optimizer)
    for _round in range(15):
        w_glob = copy.deepcopy(net_glob.state_dict())
        w_locals = []
        for idx in shards:
            net_glob.load_state_dict(w_glob)
            for xb, yb in batches(x[idx], y[idx], size=50):
                optimizer.zero_grad()
                loss = F.cross_entropy(net_glob(xb), yb)
                loss.backward()
                optimizer.step()
            w = net_glob.state_dict()
            w_locals.append(copy.deepcopy(w) if fixed else w)
        session.log(loss=loss)
        w_glob = {k: torch.stack([w[k] for w in w_locals]).mean(0) for k in w_locals[0]}
        net_glob.load_state_dict(w_glob)
    return wrong(net_glob, tx, ty)


@fault(
    "single_class_output",
    area="classification",
    source="from memory: stackoverflow.com, 'CrossEntropyLoss is always 0' (binary classifier with one output)",
    cause="A classifier with one output under CrossEntropyLoss: softmax over one class is always 1, the loss always 0.",
    words=(r"(one|single) (output|class|logit)", r"softmax.*\bone\b"),
    also=("constant_target",),
    cascade=(
        "not_learning",
        "loss_plateau",
        "vanishing_gradient",
        "optimizer_step_noop",
        "frozen_by_mistake",
        "constant_output",
    ),
    sites=("(loss)", "loss_fn", "2", "(model)"),
)
def cross_entropy_of_one_output(attach, fixed):
    """nn.Linear(32, 1) with CrossEntropyLoss."""
    x, y = plant()
    label = (y > 0).long()
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    criterion = nn.BCEWithLogitsLoss() if fixed else nn.CrossEntropyLoss()
    for xb, yb in batches(x[300:], label[300:], size=40, epochs=12):
        loss = criterion(model(xb), yb.float().unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(((model(x[:300])[:, 0] > 0).long() != label[:300]).float().mean())


@fault(
    "softmax_for_many_labels",
    area="classification",
    source="from memory: stackoverflow.com, multi-label classification with softmax and BCELoss",
    cause="Labels are not exclusive, but the outputs go through a softmax, so they cannot be high together.",
    words=(r"softmax.*(label|independent|exclusive|sum|bce|binary)", r"multi.?label", r"(sum|add) to (1|one)"),
    also=("output_range_mismatch", "double_normalised"),
    cascade=("underfitting", "loss_plateau", "wrong_dim_softmax"),
    sites=("(loss)", "loss_fn", "(model)", "act"),
)
def softmax_over_independent_labels(attach, fixed):
    """Softmax where sigmoid was needed."""
    x, y = plant()
    labels = torch.stack(
        [(x[:, 0] + x[:, 1] > -0.5), (x[:, 2] > -0.8), (x[:, 3] * x[:, 4] > -0.3), (x[:, 5] > -0.5)], 1
    ).float()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = nn.Linear(6, 64), nn.Linear(64, 4)
            self.act = nn.Sigmoid() if fixed else nn.Softmax(dim=1)

        def forward(self, t):
            return self.act(self.out(F.relu(self.hidden(t))))

    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    run = attach(net, opt)
    loss_fn = nn.BCELoss()
    for epoch in range(15):
        for xb, yb in batches(x[300:], labels[300:], size=40):
            loss = loss_fn(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            run.log(bce=loss)
    with torch.no_grad():
        return float(((net(x[:300]) > 0.5).float() != labels[:300]).float().mean())


@fault(
    "step_not_called",
    area="multi-task",
    source="from memory: encoder and decoder with an optimizer each (seq2seq tutorials); encoder_optimizer.step() forgotten",
    cause="The encoder's optimizer is never stepped.",
    words=(r"step.*(not|never)", r"never.*step"),
    also=("frozen_by_mistake", "params_not_in_optimizer"),
    cascade=("underfitting",),
    sites=("optimizer", "encoder"),
)
def steps_only_the_decoder(attach, fixed):
    """Two optimizers, one step."""
    x, _, tx, _ = digits()
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 6))
    decoder = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64))
    encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=3e-3)
    session = attach({"encoder": encoder, "decoder": decoder}, [encoder_optimizer, decoder_optimizer])
    for (img,) in batches(x, size=40, epochs=12):
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        loss = F.mse_loss(decoder(encoder(img)), img.flatten(1))
        loss.backward()
        if fixed:
            encoder_optimizer.step()
        decoder_optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(decoder(encoder(tx)), tx.flatten(1)) / tx.flatten(1).var(0).mean())


@fault(
    "not_shuffled",
    area="classification",
    source="from memory: discuss.pytorch.org, DataLoader(shuffle=False) on a data set sorted by class",
    cause="The data set is sorted by class and the loader does not shuffle.",
    words=(r"shuffl", r"sorted"),
    cascade=("loss_oscillation", "loss_spike", "overfitting", "class_imbalance_collapse"),
    sites=("loader", "(data)"),
)
def sorted_by_class(attach, fixed):
    """shuffle=False."""
    from torch.utils.data import DataLoader, TensorDataset

    x, y, tx, ty = digits()
    order = y.argsort()
    loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=32, shuffle=fixed)
    model = nn.Sequential(backbone(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = attach(model, optimizer)
    for epoch in range(7):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return wrong(model, tx, ty)
