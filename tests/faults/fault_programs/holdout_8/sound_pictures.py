"""Eighth hold-out: healthy programs on pictures, points and what makes them."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, OneCycleLR

from fault_programs.holdout_8.about import healthy
from fault_programs.holdout_8.matter import clinic, draw, gap, mistakes, moons, scans, shapes


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class ViT(nn.Module):
    """Patches of two by two pixels, a class token, one layer."""

    def __init__(self, width=32):
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, stride=2)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 64, dropout=0.05, batch_first=True, norm_first=True, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.encoder(x)[:, 0])


@healthy(area="vision", source="https://github.com/lucidrains/vit-pytorch")
def small_vision_transformer(attach):
    """AdamW and one cycle."""
    xtr, ytr, xte, yte = scans()
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.03)
    scheduler = OneCycleLR(optimizer, max_lr=5e-3, total_steps=182)
    session = attach(model, optimizer)
    for x, y in draw(xtr, ytr, size=50, epochs=7):
        loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        session.log(loss=loss)
    return mistakes(model, xte, yte)


@healthy(area="vision", source="https://github.com/facebookresearch/mixup-cifar10")
def mixes_pictures_and_labels(attach):
    """Mix-up with one permutation for both."""
    xtr, ytr, xte, yte = scans()
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    session = attach(net, opt)
    blend = torch.distributions.Beta(1.0, 1.0)
    for epoch in range(8):
        net.train()
        train_loss = 0.0
        for x, y in draw(xtr, ytr, size=65):
            lam = float(blend.sample())
            index = torch.randperm(len(x))
            out = net(lam * x + (1 - lam) * x[index])
            loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[index])
            train_loss += loss.item()
            opt.zero_grad()
            loss.backward()
            opt.step()
        session.log(train_loss=train_loss / 20, test_error=mistakes(net, xte, yte))
    return mistakes(net, xte, yte)


@healthy(area="metric learning", source="https://github.com/pytorch/examples/tree/main/siamese_network")
def siamese_digits(attach):
    """Two branches with one body, a sigmoid and binary cross-entropy on pairs."""
    xtr, ytr, xte, yte = scans()

    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
            self.fc = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, a, b):
            h, k = self.body(a), self.body(b)
            return torch.sigmoid(self.fc(torch.cat([(h - k).abs(), h * k], 1))).squeeze(1)

    def pairs(x, y, count):
        a, b = torch.randint(0, len(x), (2, count))
        same = torch.arange(count) % 2 == 0
        for n in torch.nonzero(same)[:, 0].tolist():
            rows = torch.nonzero(y == y[a[n]])[:, 0]
            b[n] = rows[torch.randint(0, len(rows), ())]
        return x[a], x[b], (y[a] == y[b]).float()

    model = Siamese()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    criterion = nn.BCELoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for step in range(220):
        a, b, same = pairs(xtr, ytr, 64)
        optimizer.zero_grad()
        loss = criterion(model(a, b), same)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            session.log(loss=loss.item())
    a, b, same = pairs(xte, yte, 400)
    with torch.no_grad():
        return float(((model(a, b) > 0.5).float() != same).float().mean())


@healthy(area="vision", source="https://github.com/pytorch/examples/tree/main/mnist_forward_forward")
def forward_forward(attach):
    """Layers that each have a loss and an optimizer of their own; nothing goes backward between them."""
    xtr, ytr, xte, yte = scans()
    xtr, xte = xtr.flatten(1), xte.flatten(1)

    def overlay(x, y):
        return torch.cat([x, 2.0 * F.one_hot(y, 10).float()], 1)

    class Layer(nn.Linear):
        def forward(self, x):
            return torch.relu(super().forward(x / (x.norm(2, 1, keepdim=True) + 1e-4)))

    layers = nn.ModuleList([Layer(74, 200), Layer(200, 200)])
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.03) for layer in layers]
    session = attach(layers, optimizers[0])
    for step in range(420):
        pick = torch.randint(0, len(xtr), (64,))
        x, y = xtr[pick], ytr[pick]
        pos, neg = overlay(x, y), overlay(x, (y + torch.randint(1, 10, y.shape)) % 10)
        for layer, optimizer in zip(layers, optimizers):
            g_pos, g_neg = layer(pos).pow(2).mean(1), layer(neg).pow(2).mean(1)
            loss = F.softplus(torch.cat([-g_pos + 1.5, g_neg - 1.5])).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pos, neg = layer(pos).detach(), layer(neg).detach()
        session.log(loss=loss)
    with torch.no_grad():
        goodness = []
        for digit in range(10):
            h, total = overlay(xte, torch.full_like(yte, digit)), 0.0
            for layer in layers:
                h = layer(h)
                total = total + h.pow(2).mean(1)
            goodness.append(total)
    return float((torch.stack(goodness, 1).argmax(1) != yte).float().mean())


@healthy(area="gan", source="https://github.com/caogang/wgan-gp")
def wasserstein_with_a_penalty(attach):
    """Three steps of the critic for one of the generator, and a penalty on its gradient."""
    data = moons()
    G, D = mlp(4, 64, 64, 2), mlp(2, 64, 64, 1)
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.9))
    session = attach(nn.ModuleDict({"G": G, "D": D}), opt_g)
    for step in range(150):
        D.requires_grad_(True)
        for _ in range(3):
            real = data[torch.randint(0, len(data), (96,))]
            fake = G(torch.randn(96, 4)).detach()
            mix = (real + torch.rand(96, 1) * (fake - real)).requires_grad_(True)
            slope = torch.autograd.grad(D(mix).sum(), mix, create_graph=True)[0]
            penalty = (slope.norm(2, 1) - 1).pow(2).mean()
            d_cost = D(fake).mean() - D(real).mean() + 2.0 * penalty
            opt_d.zero_grad()
            d_cost.backward()
            opt_d.step()
        D.requires_grad_(False)
        g_cost = -D(G(torch.randn(96, 4))).mean()
        opt_g.zero_grad()
        g_cost.backward()
        opt_g.step()
        session.log(d_cost=d_cost, g_cost=g_cost)
    with torch.no_grad():
        return gap(G(torch.randn(500, 4)), data[:500])


@healthy(area="vq-vae", source="https://github.com/zalandoresearch/pytorch-vq-vae")
def codes_by_moving_average(attach):
    """The codebook is a buffer that follows the encoder; no gradient ever reaches it."""
    xtr, _, xte, _ = scans()
    xtr, xte = xtr.flatten(1), xte.flatten(1)

    class VectorQuantizerEMA(nn.Module):
        def __init__(self, codes=48, width=8, decay=0.95):
            super().__init__()
            self.register_buffer("book", torch.randn(codes, width))
            self.register_buffer("count", torch.ones(codes))
            self.register_buffer("total", self.book.clone())
            self.decay = decay

        def forward(self, z):
            index = torch.cdist(z, self.book).argmin(1)
            if self.training:
                with torch.no_grad():
                    hot = F.one_hot(index, len(self.book)).float()
                    self.count.lerp_(hot.sum(0), 1 - self.decay)
                    self.total.lerp_(hot.T @ z, 1 - self.decay)
                    n = self.count.sum()
                    count = (self.count + 1e-5) / (n + len(self.book) * 1e-5) * n
                    self.book.copy_(self.total / count[:, None])
            q = self.book[index]
            return z + (q - z).detach(), 0.25 * F.mse_loss(z, q.detach())

    model = nn.ModuleDict({"enc": mlp(64, 96, 8), "vq": VectorQuantizerEMA(), "dec": mlp(8, 96, 64)})
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, amsgrad=False)
    session = attach(model, opt)
    for (x,) in draw(xtr, size=50, epochs=10):
        z, vq_loss = model["vq"](model["enc"](x))
        recon_error = F.mse_loss(model["dec"](z), x) / 0.14
        opt.zero_grad()
        (recon_error + vq_loss).backward()
        opt.step()
        session.log(recon_error=recon_error, vq_loss=vq_loss)
    model.eval()
    with torch.no_grad():
        return float(F.mse_loss(model["dec"](model["vq"](model["enc"](xte))[0]), xte)) * 10


@healthy(area="normalizing flow", source="https://github.com/chrischute/real-nvp")
def coupling_layers_by_likelihood(attach):
    """The negative log-likelihood of a flow, which may become negative."""
    data = moons()

    class Coupling(nn.Module):
        def __init__(self, flip):
            super().__init__()
            self.st, self.flip = mlp(1, 48, 2, act=nn.Tanh), flip
            self.scale = nn.Parameter(torch.zeros(1))

        def forward(self, x, back=False):
            a, b = (x[:, 1:], x[:, :1]) if self.flip else (x[:, :1], x[:, 1:])
            s, t = self.st(a).chunk(2, 1)
            s = torch.tanh(s) * self.scale.exp()
            b = (b - t) * (-s).exp() if back else b * s.exp() + t
            return torch.cat([b, a] if self.flip else [a, b], 1), s[:, 0]

    flow = nn.ModuleList([Coupling(k % 2 == 1) for k in range(6)])
    optimizer = torch.optim.Adam(flow.parameters(), lr=4e-3)
    session = attach(flow, optimizer)
    for (x,) in draw(data, size=120, epochs=25):
        z, log_det = x, 0.0
        for layer in flow:
            z, s = layer(z)
            log_det = log_det + s
        nll = (0.5 * z.pow(2).sum(1) + 1.8379 - log_det).mean()
        optimizer.zero_grad()
        nll.backward()
        optimizer.step()
        session.log(bits=nll / 1.386)
    with torch.no_grad():
        z = torch.randn(500, 2)
        for layer in reversed(flow):
            z, _ = layer(z, back=True)
        return gap(z, data[:500])


@healthy(area="flow matching", source="https://github.com/atong01/conditional-flow-matching")
def conditional_flow_matching(attach):
    """The velocity from noise to data along straight lines: a loss that cannot fall to zero."""
    data = moons()
    field = mlp(3, 96, 96, 2, act=nn.SELU)
    opt = torch.optim.Adam(field.parameters(), 2e-3)
    session = attach(field, opt)
    for k in range(300):
        opt.zero_grad()
        x0, x1 = torch.randn(128, 2), data[torch.randint(0, len(data), (128,))]
        t = torch.rand(128, 1)
        vt = field(torch.cat([(1 - t) * x0 + t * x1, t], 1))
        loss = torch.mean((vt - (x1 - x0)) ** 2)
        loss.backward()
        opt.step()
        if (k + 1) % 50 == 0:
            session.log(step=k + 1, loss=loss)
    with torch.no_grad():
        x = torch.randn(500, 2)
        for k in range(30):
            x = x + field(torch.cat([x, torch.full((500, 1), k / 30)], 1)) / 30
        return gap(x, data[:500])


@healthy(area="self-supervised", source="https://github.com/facebookresearch/moco")
def momentum_contrast(attach):
    """A queue of keys, and a second encoder that no optimizer holds."""
    xtr, ytr, xte, yte = scans()
    xtr, xte = xtr.flatten(1), xte.flatten(1)
    encoder_q = mlp(64, 96, 24)
    encoder_k = copy.deepcopy(encoder_q)
    for p in encoder_k.parameters():
        p.requires_grad = False
    queue, ptr = F.normalize(torch.randn(512, 24), dim=1), 0
    opt = torch.optim.SGD(encoder_q.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    session = attach(encoder_q, opt)

    def augment(x):
        return (x + 0.1 * torch.randn_like(x)) * (torch.rand_like(x) > 0.1)

    for (x,) in draw(xtr, size=64, epochs=10):
        q = F.normalize(encoder_q(augment(x)), dim=1)
        with torch.no_grad():
            for k, w in zip(encoder_k.parameters(), encoder_q.parameters()):
                k.data = k.data * 0.98 + w.data * 0.02
            key = F.normalize(encoder_k(augment(x)), dim=1)
        logits = torch.cat([(q * key).sum(1, keepdim=True), q @ queue.clone().T], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        opt.zero_grad()
        loss.backward()
        opt.step()
        queue[ptr : ptr + 64] = key
        ptr = (ptr + 64) % 512
        session.log(loss=loss)
    with torch.no_grad():
        near = torch.cdist(encoder_q(xte), encoder_q(xtr)).argmin(1)
    return float((ytr[near] != yte).float().mean())


@healthy(area="self-supervised", source="https://github.com/facebookresearch/barlowtwins")
def twins_without_redundancy(attach):
    """A cross-correlation over the batch that should be the identity."""
    xtr, ytr, xte, yte = scans()
    xtr, xte = xtr.flatten(1), xte.flatten(1)
    backbone, projector = mlp(64, 96, 48), nn.Sequential(nn.ReLU(), nn.Linear(48, 32, bias=False))
    bn = nn.BatchNorm1d(32, affine=False)
    model = nn.ModuleDict({"backbone": backbone, "projector": projector, "bn": bn})
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    session = attach(model, opt)
    for (x,) in draw(xtr, size=100, epochs=14):
        z1, z2 = (bn(projector(backbone(x + 0.2 * torch.randn_like(x)))) for _ in range(2))
        c = z1.T @ z2 / len(x)
        on = (c.diagonal() - 1).pow(2).sum()
        off = c.pow(2).sum() - c.diagonal().pow(2).sum()
        loss = on + 0.02 * off
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(on_diag=on, off_diag=off)
    with torch.no_grad():
        near = torch.cdist(backbone(xte), backbone(xtr)).argmin(1)
    return float((ytr[near] != yte).float().mean())


@healthy(area="self-supervised", source="https://github.com/facebookresearch/simsiam")
def stop_gradient_on_one_side(attach):
    """A predictor on one branch, a detach on the other; a negative loss."""
    xtr, ytr, xte, yte = scans()
    xtr, xte = xtr.flatten(1), xte.flatten(1)

    class SimSiam(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 48), nn.BatchNorm1d(48, affine=False)
            )
            self.predictor = nn.Sequential(nn.Linear(48, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 48))

        def forward(self, a, b):
            z1, z2 = self.encoder(a), self.encoder(b)
            return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()

    model = SimSiam()
    criterion = nn.CosineSimilarity(dim=1)
    optimizer = torch.optim.SGD(
        [{"params": model.encoder.parameters()}, {"params": model.predictor.parameters(), "fix_lr": True}],
        0.05,
        momentum=0.9,
        weight_decay=1e-4,
    )
    session = attach(model, optimizer)
    for (x,) in draw(xtr, size=100, epochs=12):
        p1, p2, z1, z2 = model(x + 0.15 * torch.randn_like(x), x + 0.15 * torch.randn_like(x))
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    model.eval()
    with torch.no_grad():
        near = torch.cdist(model.encoder(xte), model.encoder(xtr)).argmin(1)
    return float((ytr[near] != yte).float().mean())


@healthy(area="segmentation", source="https://github.com/milesial/Pytorch-UNet")
def unet_with_dice_and_cross_entropy(attach):
    """Two losses for one output, RMSprop, and clipping."""
    x, y = shapes()

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.inc, self.down = self.double(1, 12), self.double(12, 24)
            self.up, self.conv, self.outc = (
                nn.ConvTranspose2d(24, 12, 2, stride=2),
                self.double(24, 12),
                nn.Conv2d(12, 3, 1),
            )

        def double(self, a, b):
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))

        def forward(self, x):
            a = self.inc(x)
            b = self.down(F.max_pool2d(a, 2))
            return self.outc(self.conv(torch.cat([a, self.up(b)], 1)))

    model = UNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer)
    for epoch in range(8):
        model.train()
        for xb, yb in draw(x[:200], y[:200], size=20):
            pred = model(xb)
            hot, soft = F.one_hot(yb, 3).permute(0, 3, 1, 2).float(), pred.softmax(1)
            inter, both = (hot * soft).sum((0, 2, 3)), (hot + soft).sum((0, 2, 3))
            loss = criterion(pred, yb) + 1 - ((2 * inter + 1e-6) / (both + 1e-6)).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            error = float((model(x[200:]).argmax(1) != y[200:]).float().mean())
        session.log(loss=loss, val_error=error)
    return error * 10


@healthy(area="optimization", source="https://github.com/davda54/sam")
def climbs_before_it_steps(attach):
    """Climbs first, then steps from where it was: two backward passes for one step."""
    xtr, ytr, xte, yte = scans()
    model = mlp(64, 64, 10)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = attach(model, base)
    for x, y in draw(xtr.flatten(1), ytr, size=65, epochs=8):
        base.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
            for p, e in zip(model.parameters(), moves):
                p.add_(e)
        base.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moves):
                p.sub_(e)
        base.step()
        session.log(loss=loss)
    return mistakes(model, xte.flatten(1), yte)


@healthy(area="semi-supervised", source="https://github.com/CuriousAI/mean-teacher")
def teacher_follows_the_student(attach):
    """Few labels, a consistency term that ramps up from zero, and a teacher that follows the student."""
    xtr, ytr, xte, yte = scans()
    xtr, xte = xtr.flatten(1), xte.flatten(1)
    student, teacher = mlp(64, 64, 10), mlp(64, 64, 10)
    teacher.load_state_dict(student.state_dict())
    for p in teacher.parameters():
        p.detach_()
    opt = torch.optim.Adam(student.parameters(), lr=3e-3)
    session = attach(student, opt)
    for step in range(250):
        label, rest = torch.randint(0, 100, (24,)), torch.randint(0, 1300, (64,))
        x = torch.cat([xtr[label], xtr[rest]])
        out = student(x + 0.05 * torch.randn_like(x))
        with torch.no_grad():
            guide = teacher(x + 0.05 * torch.randn_like(x)).softmax(1)
        class_loss = F.cross_entropy(out[:24], ytr[label])
        consistency = F.mse_loss(out.softmax(1), guide)
        weight = 10 * min(1.0, step / 120)
        loss = class_loss + weight * consistency
        opt.zero_grad()
        loss.backward()
        opt.step()
        alpha = min(1 - 1 / (step + 1), 0.97)
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters()):
                t.mul_(alpha).add_(s, alpha=1 - alpha)
        session.log(class_loss=class_loss, consistency=consistency, weight=weight)
    return mistakes(teacher, xte, yte)


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.weight * grad, None


@healthy(area="domain adaptation", source="https://github.com/fungtion/DANN")
def gradient_reversal(attach):
    """A discriminator of domains that does not get better, on purpose."""
    xtr, ytr, xte, yte = scans()
    source, target = xtr[:700].flatten(1), 0.85 * xtr[700:].flatten(1) + 0.1
    feature, classify, domain = mlp(64, 64, 32), nn.Linear(32, 10), mlp(32, 32, 2)
    model = nn.ModuleDict({"feature": feature, "class_classifier": classify, "domain_classifier": domain})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for step in range(220):
        a, b = torch.randint(0, 700, (48,)), torch.randint(0, 600, (48,))
        fs, ft = F.relu(feature(source[a])), F.relu(feature(target[b]))
        weight = 2 / (1 + torch.exp(torch.tensor(-10.0 * step / 220)).item()) - 1
        err_label = F.cross_entropy(classify(fs), ytr[:700][a])
        both = domain(Reverse.apply(torch.cat([fs, ft]), 0.3 * weight))
        err_domain = F.cross_entropy(both, torch.cat([torch.zeros(48), torch.ones(48)]).long())
        optimizer.zero_grad()
        (err_label + err_domain).backward()
        optimizer.step()
        session.log(err_label=err_label, err_domain=err_domain)
    net = nn.Sequential(feature, nn.ReLU(), classify)
    return mistakes(net, 0.85 * xte.flatten(1) + 0.1, yte)


@healthy(
    area="fine-tuning",
    source="https://github.com/pytorch/tutorials/blob/main/beginner_source/transfer_learning_tutorial.py",
)
def thaws_layer_by_layer(attach):
    """First the head alone, then everything, with smaller rates below."""
    xtr, ytr, xte, yte = scans()
    xtr, xte = xtr.flatten(1), xte.flatten(1)
    low = ytr < 5
    body, old = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU()), nn.Linear(48, 5)
    pre = torch.optim.Adam([*body.parameters(), *old.parameters()], lr=3e-3)
    for x, y in draw(xtr[low], ytr[low], size=50, epochs=4):
        pre.zero_grad()
        F.cross_entropy(old(body(x)), y).backward()
        pre.step()
    model = nn.Sequential(body, nn.Linear(48, 10))
    body.requires_grad_(False)
    optimizer = torch.optim.Adam(
        [{"params": model[1].parameters(), "lr": 5e-3}, {"params": body.parameters(), "lr": 1e-3}]
    )
    session = attach(model, optimizer)
    for epoch in range(8):
        if epoch == 3:
            body.requires_grad_(True)
        for x, y in draw(xtr, ytr, size=65):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        session.log(epoch=epoch, loss=loss)
    return mistakes(model, xte, yte)


@healthy(
    area="medical",
    source="https://pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.CosineAnnealingWarmRestarts.html",
)
def restarts_and_dropout(attach):
    """Cosine restarts, dropout and a class weight."""
    xtr, ytr, xte, yte = clinic()
    model = nn.Sequential(nn.Linear(30, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 1))
    optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=40, T_mult=2)
    criterion = nn.BCEWithLogitsLoss(pos_weight=(ytr == 0).sum() / (ytr == 1).sum())
    session = attach(model, optimizer, loss_fn=criterion)
    for x, y in draw(xtr, ytr.float(), size=20, epochs=10):
        model.train()
        optimizer.zero_grad()
        loss = criterion(model(x)[:, 0], y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        session.log(loss=loss, lr=scheduler.get_last_lr()[0])
    model.eval()
    with torch.no_grad():
        return float(((model(xte)[:, 0] > 0).long() != yte).float().mean())
