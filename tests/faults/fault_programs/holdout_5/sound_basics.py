"""Fifth hold-out: programs in which nothing is wrong: supervised ones in many styles."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_5.about import healthy
from fault_programs.holdout_5.materials import batches, demand, digits, markov, plant, scans, tagged, windows, wrong


@healthy(area="vision", source="github.com/pytorch/examples mnist")
def official_mnist_example(attach):
    """Log-softmax in the network, nll_loss outside, Adadelta and StepLR."""
    x, y, tx, ty = digits()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 16, 3, 1, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, 1)
            self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
            self.fc1, self.fc2 = nn.Linear(288, 64), nn.Linear(64, 10)

        def forward(self, x):
            x = F.relu(self.conv1(x))
            x = F.relu(self.conv2(x))
            x = F.max_pool2d(x, 2)
            x = self.dropout1(x)
            x = F.relu(self.fc1(torch.flatten(x, 1)))
            return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)

    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    for epoch in range(6):
        model.train()
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        model.eval()
        with torch.no_grad():
            test_loss = F.nll_loss(model(tx), ty)
        session.log(test_loss=test_loss)
        scheduler.step()
    return wrong(model, tx, ty)


@healthy(area="language", source="github.com/karpathy/nanoGPT")
def nano_gpt(attach):
    """Weight tying, decay for matrices only, warm-up and cosine, accumulation, clipping."""
    text = markov(seed=65)

    class Block(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = (u.view(b, t, 4, c // 4).transpose(1, 2) for u in self.c_attn(self.ln1(x)).split(c, 2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
            return x + self.mlp(self.ln2(x))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(24, 32), nn.Embedding(16, 32)
            self.h = nn.ModuleList([Block(32), Block(32)])
            self.ln_f = nn.LayerNorm(32)
            self.lm_head = nn.Linear(32, 24, bias=False)
            self.wte.weight = self.lm_head.weight
            self.apply(
                lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, nn.Linear | nn.Embedding) else None
            )

        def forward(self, idx, targets=None):
            x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
            for block in self.h:
                x = block(x)
            logits = self.lm_head(self.ln_f(x))
            return logits, None if targets is None else F.cross_entropy(logits.view(-1, 24), targets.reshape(-1))

    model = GPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95))
    session = attach(model, optimizer)
    losses = []
    for it in range(160):
        lr = 4e-3 * min(1.0, (it + 1) / 15) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * it / 160)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        for _ in range(2):
            ix = torch.randint(len(text) - 17, (12, 1)) + torch.arange(16)
            _, loss = model(text[ix], text[ix + 1])
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        session.log(loss=loss)
    return sum(losses[-10:]) / 10


@healthy(area="vision", source="style of a Keras port: Trainer class with compile / fit")
def keras_like_trainer(attach):
    """A class hides the loop; MSE on one-hot targets after a softmax is meant."""
    x, y, tx, ty = digits()

    class Model:
        def __init__(self, layers):
            self.net = nn.Sequential(*layers)

        def compile(self, optimizer, loss):
            self.optimizer, self.loss = optimizer(self.net.parameters(), lr=3e-3), loss

        def fit(self, x, y, epochs, batch_size, callback):
            for _ in range(epochs):
                for xb, yb in batches(x, y, size=batch_size):
                    self.optimizer.zero_grad()
                    value = self.loss(self.net(xb), yb)
                    value.backward()
                    self.optimizer.step()
                callback(value)

    model = Model([nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10), nn.Softmax(-1)])
    model.compile(torch.optim.Adam, lambda p, t: ((p - F.one_hot(t, 10)) ** 2).sum(1).mean())
    session = attach(model.net, model.optimizer)
    model.fit(x, y, 12, 40, lambda value: session.log(brier=value))
    return wrong(model.net, tx, ty)


@healthy(area="time series", source="github.com/pytorch/examples time_sequence_prediction")
def lbfgs_on_sines(attach):
    """LBFGS with a closure on the whole set, in float64."""
    x, y = windows(demand()[:400].double(), 12)
    net = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=10)
    session = attach(net, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(net(x).squeeze(1), y)
        loss.backward()
        return loss

    for _ in range(25):
        session.log(loss=optimizer.step(closure))
    with torch.no_grad():
        return float(F.mse_loss(net(x).squeeze(1), y))


@healthy(area="vision", source="github.com/davda54/sam example")
def sharpness_aware(attach):
    """SAM: two forward and backward passes for one step, weights moved and put back."""
    x, y, tx, ty = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    session = attach(net, base)
    for xb, yb in batches(x, y, size=50, epochs=7):
        loss = F.cross_entropy(net(xb), yb)
        loss.backward()
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm() for p in net.parameters()]))
            moved = [p.grad * (0.05 / (norm + 1e-12)) for p in net.parameters()]
            for p, e in zip(net.parameters(), moved, strict=True):
                p.add_(e)
        base.zero_grad()
        F.cross_entropy(net(xb), yb).backward()
        with torch.no_grad():
            for p, e in zip(net.parameters(), moved, strict=True):
                p.sub_(e)
        base.step()
        base.zero_grad()
        session.log(loss=loss)
    return wrong(net, tx, ty)


@healthy(area="mixed precision", source="pytorch.org AMP recipe, bfloat16 on CPU")
def autocast_in_bfloat16(attach):
    """Autocast for the forward pass, float32 weights, no scaler."""
    x, y, tx, ty = digits()
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    session = attach(net, opt)
    for xb, yb in batches(x, y, size=32, epochs=6):
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            out = net(xb)
            loss = F.cross_entropy(out.float(), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    return wrong(net, tx, ty)


@healthy(area="vision", source="common practice: overfit ten samples before a long run")
def overfits_ten_samples_on_purpose(attach):
    """Ten pictures again and again until they are known by heart."""
    x, y, *_ = digits()
    x, y = x[:10], y[:10]
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, opt)
    for _ in range(300):
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    return float(loss)


@healthy(area="segmentation", source="style of milesial/Pytorch-UNet: BCE plus Dice")
def unet_with_two_terms(attach):
    """BCE and Dice together, RMSprop with momentum and clipping."""
    x, y = scans()
    enc = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
    mid = nn.Sequential(
        nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Upsample(scale_factor=2)
    )
    out = nn.Conv2d(36, 1, 1)
    net = nn.ModuleDict({"enc": enc, "mid": mid, "out": out})

    def forward(img):
        a = enc(img)
        return out(torch.cat([a, mid(a)], 1))

    def dice(p, t):
        return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)

    opt = torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-8)
    session = attach(net, opt)
    for img, mask in batches(x[60:], y[60:], size=16, epochs=6):
        logits = forward(img)
        loss = F.binary_cross_entropy_with_logits(logits, mask) + dice(logits.sigmoid(), mask)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        session.log(loss=loss)
    net.eval()
    with torch.no_grad():
        return float(dice((forward(x[:60]) > 0).float(), y[:60]))


@healthy(area="classification", source="style of entity embedding tutorials: one-hot inputs only")
def sparse_one_hot_inputs(attach):
    """Inputs are one-hot rows, most columns of which are zero in any batch."""
    g = torch.Generator().manual_seed(11)
    city, day = torch.randint(0, 60, (1500,), generator=g), torch.randint(0, 7, (1500,), generator=g)
    effect = torch.randn(60, generator=g)
    y = effect[city] + 0.3 * (day >= 5).float() + 0.1 * torch.randn(1500, generator=g)
    x = torch.cat([F.one_hot(city, 60), F.one_hot(day, 7)], 1).float()
    net = nn.Sequential(nn.Linear(67, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, opt)
    for xb, yb in batches(x[300:], y[300:], size=32, epochs=15):
        loss = F.mse_loss(net(xb).squeeze(1), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(net(x[:300]).squeeze(1), y[:300]))


@healthy(area="multi-task", source="Kendall et al. uncertainty weights, several repositories")
def learned_task_weights(attach):
    """Log-variances weigh two tasks; the total becomes negative in the end."""
    x, y = plant()
    second = (x[:, 5] * 0.5 + 0.02 * torch.randn(len(x))).unsqueeze(1)
    trunk = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    a, b = nn.Linear(64, 1), nn.Linear(64, 1)
    log_vars = nn.Parameter(torch.zeros(2))
    net = nn.ModuleDict({"trunk": trunk, "a": a, "b": b})
    opt = torch.optim.Adam([*net.parameters(), log_vars], lr=4e-3)
    session = attach(net, opt)
    for xb, ya, yb in batches(x[300:], y[300:, None], second[300:], size=40, epochs=25):
        h = trunk(xb)
        terms = torch.stack([F.mse_loss(a(h), ya), F.mse_loss(b(h), yb)])
        loss = (terms * torch.exp(-log_vars) + log_vars).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss, first=terms[0], second=terms[1])
    with torch.no_grad():
        return float(F.mse_loss(a(trunk(x[:300])), y[:300, None]))


@healthy(area="distillation", source="born-again networks / self-distillation examples")
def learns_from_its_own_past(attach):
    """A frozen copy of the network from the last epoch gives soft targets."""
    x, y, tx, ty = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    session = attach(net, opt)
    past = None
    for epoch in range(8):
        for xb, yb in batches(x, y, size=50):
            out = net(xb)
            loss = F.cross_entropy(out, yb, label_smoothing=0.05)
            if past is not None:
                with torch.no_grad():
                    soft = F.softmax(past(xb) / 2, 1)
                loss = 0.5 * loss + 0.5 * 4 * F.kl_div(F.log_softmax(out / 2, 1), soft, reduction="batchmean")
            opt.zero_grad()
            loss.backward()
            opt.step()
            session.log(loss=loss)
        past = copy.deepcopy(net).eval().requires_grad_(False)
    return wrong(net, tx, ty)


@healthy(area="semi-supervised", source="mean teacher (CuriousAI) in small")
def mean_teacher(attach):
    """An EMA teacher with copied buffers; few labels, consistency ramps up."""
    x, y, tx, ty = digits()
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    teacher = copy.deepcopy(student).requires_grad_(False)
    opt = torch.optim.Adam(student.parameters(), lr=3e-3)
    session = attach({"student": student, "teacher": teacher}, opt)
    for step, (xu,) in enumerate(batches(x, size=64, epochs=15)):
        pick = torch.randint(0, 200, (32,))
        supervised = F.cross_entropy(student(x[pick]), y[pick])
        noisy = lambda t: t + 0.1 * torch.randn_like(t)  # noqa: E731
        with torch.no_grad():
            goal = teacher(noisy(xu)).softmax(1)
        consistency = F.mse_loss(student(noisy(xu)).softmax(1), goal)
        loss = supervised + min(1.0, step / 100) * 5 * consistency
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.mul_(0.98).add_(fast, alpha=0.02)
            for slow, fast in zip(teacher.buffers(), student.buffers(), strict=True):
                slow.copy_(fast)
        session.log(supervised=supervised, consistency=consistency)
    return wrong(teacher, tx, ty)


@healthy(area="classification", source="curriculum learning examples: easy samples first, then all")
def easy_ones_first(attach):
    """A curriculum of classes: the loss jumps up each time new classes come in."""
    x, y, tx, ty = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, opt)
    for stage in (3, 6, 10):
        keep = y < stage
        for xb, yb in batches(x[keep], y[keep], size=32, epochs=4):
            loss = F.cross_entropy(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            session.log(loss=loss)
    return wrong(net, tx, ty)


@healthy(area="classification", source="gradient accumulation as in the Hugging Face examples")
def accumulates_four_batches_again(attach):
    """Loss divided by four, step and clear every fourth batch; ReduceLROnPlateau on validation loss."""
    x, y, tx, ty = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 10))
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=0.01)
    plan = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=2)
    session = attach(net, opt)
    for epoch in range(10):
        net.train()
        for k, (xb, yb) in enumerate(batches(x, y, size=16)):
            loss = F.cross_entropy(net(xb), yb) / 4
            loss.backward()
            if (k + 1) % 4 == 0:
                opt.step()
                opt.zero_grad()
        opt.zero_grad()
        net.eval()
        with torch.no_grad():
            val = F.cross_entropy(net(tx), ty)
        plan.step(val)
        session.log(val_loss=val)
    return wrong(net, tx, ty)


@healthy(area="language", source="pytorch.org sequence tagging tutorial: one sentence at a time, SGD")
def tags_one_sentence_at_a_time(attach):
    """Batch size one, the whole way; zero_grad on the model."""
    x, tags = tagged()
    emb, lstm, out = nn.Embedding(20, 16), nn.LSTM(16, 24), nn.Linear(24, 4)
    model = nn.ModuleDict({"emb": emb, "lstm": lstm, "out": out})
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    session = attach(model, opt)

    def scores(sentence):
        return F.log_softmax(out(lstm(emb(sentence).view(len(sentence), 1, -1))[0].view(len(sentence), -1)), dim=1)

    for k in torch.randperm(800)[:600]:
        model.zero_grad()
        loss = F.nll_loss(scores(x[k]), tags[k])
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return sum(float((scores(x[k]).argmax(1) != tags[k]).float().mean()) for k in range(60)) / 60
