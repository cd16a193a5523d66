"""Sixth hold-out: optimisers, the order of the loop, precision and state."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.optim.lr_scheduler import LinearLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_6.about import fault
from fault_programs.holdout_6.materials import batches, digits, papers, table, wrong


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


@fault(
    "scheduler_never_called",
    area="regression",
    source="https://github.com/pytorch/examples/issues/64",
    cause="The learning rate is written into optimizer.state_dict()['param_groups'], which is a copy, so the rate never decays.",
    words=(r"state_dict", r"(learning )?rate.*(never|not|constant|unchanged)", r"copy"),
    also=("lr_too_high",),
    cascade=("loss_oscillation", "loss_plateau", "underfitting"),
    sites=("optimizer", "(loop)"),
)
def adjusts_the_rate_of_a_copy(attach, fixed):
    """for param_group in optimizer.state_dict()['param_groups']."""
    x, _ = table()
    truth = x @ torch.linspace(-1, 1, 8)
    y = truth + torch.randn(len(x))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9)
    session = attach(model, optimizer)

    def adjust_learning_rate(epoch):
        lr = 0.04 * (0.3 ** (epoch // 3))
        for param_group in optimizer.param_groups if fixed else optimizer.state_dict()["param_groups"]:
            param_group["lr"] = lr

    for epoch in range(15):
        adjust_learning_rate(epoch)
        running = 0.0
        for xb, yb in batches(x[:1100], y[:1100], size=8):
            loss = F.mse_loss(model(xb).squeeze(1), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
        session.log(loss=running / 137)
    with torch.no_grad():
        return float(F.mse_loss(model(x[1100:]).squeeze(1), truth[1100:]))


@fault(
    "resume_overrides_lr",
    area="vision",
    source="https://github.com/pytorch/examples/issues/816",
    cause="load_state_dict of the optimizer brings back the decayed rate of the checkpoint and overwrites the new one.",
    words=(r"(learning )?rate.*(tiny|too (low|small)|checkpoint|overwrit|restored)", r"load_state_dict", r"resum"),
    also=("lr_too_low", "resume_incomplete", "lr_schedule_collapse"),
    cascade=("underfitting", "not_learning", "loss_plateau"),
    sites=("optimizer", "(loop)"),
)
def resumes_at_the_rate_of_the_end(attach, fixed):
    """The rate on the command line is lost."""
    xtr, ytr, xte, yte = digits()
    first = ytr < 5
    model = mlp(64, 48, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(5):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.1**epoch
        for x, y in batches(xtr[first].flatten(1), ytr[first], size=32):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    saved = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}

    args_lr = 0.05
    model = mlp(64, 48, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=args_lr, momentum=0.9)
    model.load_state_dict(saved["state_dict"])
    optimizer.load_state_dict(saved["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] = args_lr if fixed else group["lr"]
    session = attach(model, optimizer)
    for x, y in batches(xtr.flatten(1), ytr, size=32, epochs=5):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return wrong(model, xte.flatten(1), yte)


@fault(
    "lr_too_low",
    area="vision",
    source="https://github.com/tensorflow/tensorflow/issues/36785",
    cause="Adadelta is given a learning rate of 0.001, the default of another library; it is meant to run at 1.0.",
    words=(r"(learning )?rate.*(too )?(low|small)", r"adadelta"),
    also=(),
    cascade=("not_learning", "underfitting", "loss_plateau"),
    sites=("optimizer",),
)
def adadelta_with_the_rate_of_keras(attach, fixed):
    """Adadelta(lr=0.001)."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0 if fixed else 0.001, rho=0.95)
    session = attach(model, optimizer)
    for _epoch in range(5):
        model.train()
        for data, target in DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return wrong(model, xte, yte)


@fault(
    "adam_eps_too_small",
    area="vision",
    source="https://github.com/afiaka87/glide-finetune/issues/5",
    cause="The model is in float16 and Adam's eps of 1e-8 rounds to zero there, so a small second moment divides by zero.",
    words=(r"\beps", r"float16|half", r"divi.*zero"),
    also=("nan_in_optimizer",),
    cascade=(
        "nan_in_weights",
        "nan_forward",
        "nan_in_loss",
        "nan_backward",
        "loss_divergence",
        "fp16_overflow",
        "grad_underflow",
    ),
    sites=("optimizer",),
)
def adam_of_half_a_model(attach, fixed):
    """model.half() and the default eps."""
    xtr, ytr, xte, yte = digits()
    model = mlp(64, 64, 10).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4 if fixed else 1e-8)
    session = attach(model, optimizer)
    for x, y in batches(xtr.flatten(1).half(), ytr, size=50, epochs=8):
        loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return wrong(model, xte.flatten(1).half(), yte)


class RatioNet(nn.Module):
    """Predicts a share per shop; some shops had no visitor."""

    def __init__(self, share):
        super().__init__()
        self.body = mlp(8, 32, 1)
        self.share = share

    def forward(self, x, visitors):
        return self.share(self.body(x).squeeze(1), visitors)


def share_then_where(sold, visitors):
    y = sold / visitors
    return torch.where(visitors == 0, torch.zeros_like(y), y)


def where_then_share(sold, visitors):
    y = sold / torch.where(visitors == 0, torch.ones_like(visitors), visitors)
    return torch.where(visitors == 0, torch.zeros_like(y), y)


@fault(
    "nan_backward",
    area="tabular",
    source="https://github.com/pytorch/pytorch/issues/16317",
    cause="torch.where hides the division by zero in the forward pass only: the gradient of the branch not taken is 0 * inf = NaN.",
    words=(r"nan.*(backward|gradient)", r"\bwhere\b", r"divi.*zero", r"gradient.*(nan|not finite)"),
    also=(),
    cascade=("nan_in_weights", "nan_forward", "nan_in_loss", "nan_in_optimizer", "loss_divergence"),
    sites=("body", "(model)"),
)
def where_after_the_division(attach, fixed):
    """y = x / n; torch.where(n == 0, 0, y)."""
    x, y = table()
    visitors = torch.randint(0, 60, (len(x),), generator=torch.Generator().manual_seed(2)).float()
    target = torch.where(visitors == 0, torch.zeros_like(y), (y * 8 + 20) / visitors.clamp(min=1))
    model = RatioNet(where_then_share if fixed else share_then_where)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for xb, nb, tb in batches(x, visitors, target, size=64, epochs=10):
        loss = F.smooth_l1_loss(model(xb, nb), tb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        error = F.smooth_l1_loss(model(x, visitors), target)
    return float(error) if bool(error.isfinite()) else 10.0


class PoseNet(nn.Module):
    """A turn, as a residual on the identity."""

    def __init__(self):
        super().__init__()
        self.body = mlp(6, 48, 6)
        nn.init.zeros_(self.body[-1].weight)
        nn.init.zeros_(self.body[-1].bias)
        self.register_buffer("start", torch.tensor([1.0, 0, 0, 0, 1.0, 0]))

    def forward(self, points):
        raw = self.body(points) + self.start
        a = F.normalize(raw[:, :3], dim=1)
        b = F.normalize(raw[:, 3:] - (a * raw[:, 3:]).sum(1, keepdim=True) * a, dim=1)
        return torch.stack([a, b, torch.linalg.cross(a, b)], 1)


@fault(
    "nan_backward",
    area="pose",
    source="https://github.com/papagina/RotationContinuity/issues/11",
    cause="The geodesic loss takes acos of a cosine clamped to 1, where the slope of acos is infinite.",
    words=(r"acos|arc.?cos", r"nan.*(backward|gradient)", r"gradient.*(nan|inf|not finite)", r"clamp"),
    also=(),
    cascade=(
        "exploding_gradient",
        "nan_in_weights",
        "nan_forward",
        "nan_in_loss",
        "nan_in_optimizer",
        "loss_divergence",
    ),
    sites=("(loss)", "body"),
)
def angle_between_equal_turns(attach, fixed):
    """cos clamped to [-1, 1] and then acos."""
    made = torch.Generator().manual_seed(8)
    points = torch.randn(900, 6, generator=made)
    angle = 0.8 * points[:, 0] * (points[:, 1] > -1.0)
    zero, one = torch.zeros_like(angle), torch.ones_like(angle)
    gt = torch.stack([angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero, zero, zero, one], 1).view(
        -1, 3, 3
    )
    net = PoseNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    limit = 0.9999 if fixed else 1.0

    def compute_geodesic_distance(m1, m2):
        m = torch.bmm(m1, m2.transpose(1, 2))
        cos = (m.diagonal(dim1=1, dim2=2).sum(1) - 1) / 2
        return torch.acos(torch.clamp(cos, -limit, limit))

    for p, r in batches(points, gt, size=60, epochs=25):
        theta = compute_geodesic_distance(net(p), r).mean()
        optimizer.zero_grad()
        theta.backward()
        optimizer.step()
        session.log(theta=theta)
    with torch.no_grad():
        theta = (net(points) - gt).pow(2).sum((1, 2)).mean()
    return float(theta) if bool(theta.isfinite()) else 10.0


class GATLayer(nn.Module):
    """Attention over neighbours with a softmax of its own."""

    def __init__(self, inside, outside, shift):
        super().__init__()
        self.lin = nn.Linear(inside, outside, bias=False)
        self.att = nn.Linear(2 * outside, 1, bias=False)
        nn.init.normal_(self.att.weight, std=4.0)
        self.shift = shift

    def forward(self, x, edges):
        h = self.lin(x)
        src, dst = edges
        score = F.leaky_relu(self.att(torch.cat([h[src], h[dst]], 1)).squeeze(1), 0.2)
        score = score - self.shift(score, dst, len(x))
        weight = score.exp()
        total = torch.zeros(len(x)).index_add(0, dst, weight)
        return torch.zeros_like(h).index_add(0, dst, h[src] * (weight / (total[dst] + 1e-16))[:, None])


def row_max(score, dst, n):
    return torch.full((n,), -1e30).scatter_reduce(0, dst, score.detach(), "amax")[dst]


@fault(
    "nan_forward",
    area="graphs",
    source="https://github.com/pyg-team/pytorch_geometric/issues/53",
    cause="The softmax over neighbours takes exp of raw scores without subtracting the largest one, so it overflows to inf / inf.",
    words=(r"overflow", r"\bexp", r"softmax", r"(nan|inf).*forward", r"subtract.*max"),
    also=("nan_in_loss",),
    cascade=(
        "exploding_activation",
        "nan_backward",
        "nan_in_weights",
        "nan_in_optimizer",
        "unnormalised_inputs",
        "large_initial_loss",
    ),
    sites=("gat1", "gat2", "(model)"),
)
def neighbours_softmax_overflows(attach, fixed):
    """exp of the score, straight."""
    x, edges, y = papers()
    x = x * 2
    shift = row_max if fixed else (lambda score, dst, n: 0.0)
    gat1, gat2 = GATLayer(10, 16, shift), GATLayer(16, 4, shift)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gat1, self.gat2, self.skip = gat1, gat2, nn.Linear(16, 4)

        def forward(self, x):
            h = F.elu(self.gat1(x, edges))
            return self.gat2(h, edges) + self.skip(h)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    session = attach(model, optimizer)
    for _epoch in range(120):
        out = model(x)
        loss = F.cross_entropy(out[:200], y[:200])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        out = model(x)[200:]
    return float((out.argmax(1) != y[200:]).float().mean()) if bool(out.isfinite().all()) else 1.0


@fault(
    "batchnorm_stats_stale",
    area="vision",
    source="https://github.com/mosaicml/composer/issues/624",
    cause="The averaged model is evaluated without a pass to renew its batch-norm statistics, which belong to other weights.",
    words=(r"batch.?norm.*(statistic|running|stale|update)", r"update_bn", r"running (mean|statistics)"),
    also=(),
    cascade=("train_val_preproc_mismatch", "overfitting"),
    sites=("(validation)", "swa_model", "(model)"),
    onset=100,
)
def averaged_weights_without_update_bn(attach, fixed):
    """swa_model.update_parameters, and no update_bn."""
    xtr, ytr, xte, yte = digits()

    def conv(a, b):
        return [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    model = nn.Sequential(
        *conv(1, 12), *conv(12, 16), nn.MaxPool2d(2), *conv(16, 16), *conv(16, 16), nn.Flatten(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    swa_model = AveragedModel(model)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=50, shuffle=True)
    for epoch in range(5):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            if epoch >= 1:
                swa_model.update_parameters(model)
    update_bn(loader, swa_model) if fixed else None
    swa_model.eval()
    with torch.no_grad():
        session.log(val_loss=F.cross_entropy(swa_model(xte), yte))
    return wrong(swa_model, xte, yte)


def waves(n):
    """Return n tasks: ten points of a wave to learn from, ten to be asked."""
    x = torch.rand(n, 20, 1) * 6 - 3
    amp, phase = torch.rand(n, 1, 1) * 2 + 0.5, torch.rand(n, 1, 1) * 3.14
    y = amp * torch.sin(x + phase)
    return x[:, :10], y[:, :10], x[:, 10:], y[:, 10:]


def adapt_by_graph(model, x, y, inner_lr):
    params = dict(model.named_parameters())
    loss = F.mse_loss(functional_call(model, params, (x,)), y)
    grads = torch.autograd.grad(loss, params.values(), create_graph=True)
    fast = {k: p - inner_lr * g for (k, p), g in zip(params.items(), grads)}
    return lambda q: functional_call(model, fast, (q,))


def adapt_a_copy(model, x, y, inner_lr):
    adapted = copy.deepcopy(model)
    grads = torch.autograd.grad(F.mse_loss(adapted(x), y), adapted.parameters(), create_graph=True)
    for param, grad in zip(adapted.parameters(), grads):
        param.data -= inner_lr * grad
    return adapted


@fault(
    "graph_break_detach",
    area="meta-learning",
    source="https://github.com/RobinLu1209/ST-GFSL/issues/3",
    cause="The inner step runs on a deep copy changed through .data, so the query loss has no path to the parameters of the meta-model.",
    words=(r"copy", r"(no|never|without).*gradient", r"graph|detach", r"(unused|not trained|not updated)"),
    also=("unused_parameters", "optimizer_step_noop", "frozen_by_mistake", "stale_params_in_optimizer"),
    cascade=("not_learning", "loss_plateau"),
    sites=("(model)", "(loop)", "optimizer", "model"),
)
def meta_learner_adapts_a_copy(attach, fixed):
    """MAML with deepcopy and param.data -=."""
    model = mlp(1, 32, 32, 1, act=nn.Tanh)
    meta_optim = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, meta_optim)
    inner_update = adapt_by_graph if fixed else adapt_a_copy

    def meta_loss(tasks):
        losses = [F.mse_loss(inner_update(model, sx, sy, 0.05)(qx), qy) for sx, sy, qx, qy in zip(*waves(tasks))]
        return torch.stack(losses).mean()

    for _iteration in range(110):
        loss = meta_loss(4)
        meta_optim.zero_grad()
        loss.backward()
        meta_optim.step()
        session.log(meta_loss=loss)
    return float(meta_loss(60).detach())


@fault(
    "missing_zero_grad",
    area="adversarial",
    source="https://github.com/BorealisAI/advertorch/issues/113",
    cause="The attack's backward leaves its gradients in the model's parameters, and they are added to those of the training loss.",
    words=(r"zero_grad", r"(attack|accumulat|left).*gradient", r"gradient.*(accumulat|attack|left|added)"),
    also=("zero_grad_misplaced",),
    cascade=("not_learning", "loss_plateau", "underfitting", "loss_sign_flipped", "accumulation_not_scaled"),
    sites=("optimizer", "(loop)"),
)
def attack_leaves_gradients_behind(attach, fixed):
    """cost = -loss for the attack, and no zero_grad after it."""
    xtr, ytr, xte, yte = digits()
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = attach(model, optimizer)

    def fgsm(x, y, eps=0.03):
        x_adv = x.clone().requires_grad_(True)
        cost = -F.cross_entropy(model(x_adv), y)
        cost.backward()
        return (x - eps * x_adv.grad.sign()).clamp(0, 1)

    for x, y in batches(xtr.flatten(1), ytr, size=50, epochs=8):
        optimizer.zero_grad()
        x_adv = fgsm(x, y)
        if fixed:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x_adv), y)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return wrong(model, xte.flatten(1), yte)


@fault(
    "lr_too_low",
    area="vision",
    source="https://github.com/pytorch/pytorch/issues/65417",
    cause="OneCycleLR counts batches but is stepped once an epoch, so the rate never leaves the start of its warm-up.",
    words=(
        r"(learning )?rate.*(too )?(low|small)",
        r"(one.?cycle|schedule|warm).*(epoch|step|batch)",
        r"never (leaves|reaches)",
    ),
    also=("scheduler_never_called", "lr_schedule_collapse"),
    cascade=("underfitting", "not_learning", "loss_plateau"),
    sites=("scheduler", "optimizer", "(loop)"),
)
def one_cycle_by_the_epoch(attach, fixed):
    """steps_per_epoch=len(loader), and step() after the loop over it."""
    xtr, ytr, xte, yte = digits()
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=50, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
    )
    n_epochs, every_batch = 6, fixed
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = OneCycleLR(
        optimizer, max_lr=0.1, epochs=n_epochs, steps_per_epoch=len(loader), div_factor=100, cycle_momentum=False
    )
    session = attach(model, optimizer)
    for _epoch in range(n_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            if every_batch:
                scheduler.step()
        if not every_batch:
            scheduler.step()
    return wrong(model, xte, yte)


@fault(
    "missing_zero_grad",
    area="regression",
    source="https://github.com/Lightning-AI/pytorch-lightning/pull/6147",
    cause="zero_grad is called once before step(closure), but LBFGS calls the closure many times, and their gradients add up.",
    words=(r"zero_grad", r"closure", r"gradient.*(accumulat|add|sum)", r"accumulat"),
    also=("zero_grad_misplaced",),
    cascade=("loss_divergence", "loss_oscillation", "exploding_gradient", "not_learning", "loss_spike"),
    sites=("optimizer", "(loop)"),
)
def closure_does_not_clear(attach, fixed):
    """optimizer.zero_grad() outside the closure."""
    x, y = table()
    model = mlp(8, 24, 1, act=nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=8, history_size=10)
    session = attach(model, optimizer)
    for _step in range(40):

        def closure():
            if fixed:
                optimizer.zero_grad()
            loss = F.mse_loss(model(x[:1000]).squeeze(1), y[:1000])
            loss.backward()
            return loss

        optimizer.zero_grad()
        session.log(loss=optimizer.step(closure))
    with torch.no_grad():
        return min(float(F.mse_loss(model(x[1000:]).squeeze(1), y[1000:])), 10.0)


@fault(
    "scheduler_never_called",
    area="vision",
    source="https://github.com/ildoonet/pytorch-gradual-warmup-lr/issues/27",
    cause="After resuming, the scheduler still drives the optimizer of the old run, so the rate stays where the warm-up was interrupted.",
    words=(
        r"schedul.*(other|old|another|not)",
        r"(learning )?rate.*(constant|static|never|stays|low)",
        r"another optimizer",
    ),
    also=("lr_too_low", "resume_incomplete", "stale_params_in_optimizer"),
    cascade=("underfitting", "not_learning", "loss_plateau"),
    sites=("scheduler", "optimizer", "(loop)"),
)
def scheduler_of_the_old_optimizer(attach, fixed):
    """scheduler restored together with the optimizer it points at."""
    xtr, ytr, xte, yte = digits()
    flat = xtr.flatten(1)
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warm_up = LinearLR(optimizer, start_factor=0.002, total_iters=60)
    for _, (x, y) in zip(range(3), batches(flat, ytr, size=40)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        warm_up.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    model = mlp(64, 64, 10)
    model.load_state_dict(saved["model"])
    resumed = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    resumed.load_state_dict(saved["optimizer"])
    warm_up.optimizer = resumed if fixed else warm_up.optimizer
    session = attach(model, resumed)
    for x, y in batches(flat, ytr, size=40, epochs=6):
        loss = F.cross_entropy(model(x), y)
        resumed.zero_grad()
        loss.backward()
        resumed.step()
        warm_up.step()
        session.log(loss=loss)
    return wrong(model, xte.flatten(1), yte)
