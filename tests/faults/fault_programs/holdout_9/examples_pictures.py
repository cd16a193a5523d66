"""Ninth hold-out: healthy programs after public examples, with pictures, pairs, adversaries and diffusion."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_9.about import healthy
from fault_programs.holdout_9.matter import digits, energy, rings, spots, wrong_share


@healthy(area="vision", source="in the style of pytorch/examples mnist", well=0.1)
def digits_as_in_the_first_example(attach):
    """A small convolutional net with NLLLoss, Adadelta and StepLR."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 16, 3, 1)
            self.conv2 = nn.Conv2d(16, 32, 3, 1)
            self.dropout1 = nn.Dropout(0.25)
            self.dropout2 = nn.Dropout(0.5)
            self.fc1 = nn.Linear(128, 64)
            self.fc2 = nn.Linear(64, 10)

        def forward(self, x):
            x = F.relu(self.conv2(F.relu(self.conv1(x))))
            x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
            x = self.dropout2(F.relu(self.fc1(x)))
            return F.log_softmax(self.fc2(x), dim=1)

    xtr, ytr, xte, yte = digits()
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
    session = attach(model, optimizer)
    for epoch in range(6):
        model.train()
        for data, target in DataLoader(TensorDataset(xtr, ytr), batch_size=50, shuffle=True):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        session.log(epoch=epoch, test_error=wrong_share(model, xte, yte))
        scheduler.step()
    return wrong_share(model, xte, yte)


@healthy(area="vision", source="in the style of facebookresearch/mixup-cifar10 with label smoothing", well=0.08)
def mixup_and_smooth_labels(attach):
    """The training loss stays high, and that is right."""
    xtr, ytr, xte, yte = digits()
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    epochs = 10
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    session = attach(net, optimizer)
    for _epoch in range(epochs):
        net.train()
        for rows in torch.randperm(1000).split(50):
            lam = np.random.beta(1.0, 1.0)
            index = torch.randperm(len(rows))
            mixed = lam * xtr[rows] + (1 - lam) * xtr[rows][index]
            y_a, y_b = ytr[rows], ytr[rows][index]
            outputs = net(mixed)
            loss = lam * criterion(outputs, y_a) + (1 - lam) * criterion(outputs, y_b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss, lr=scheduler.get_last_lr()[0])
        scheduler.step()
    return wrong_share(net, xte, yte)


@healthy(
    area="transfer",
    source="in the style of the transfer learning tutorial: the convolutional net as a fixed feature extractor",
    well=0.08,
)
def head_on_a_frozen_backbone(attach):
    """Only the new head is trained; the batch norms of the backbone stay in evaluation mode."""
    xtr, ytr, xte, yte = digits()
    backbone = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    odd = nn.Linear(128, 2)
    before = torch.optim.Adam([*backbone.parameters(), *odd.parameters()], lr=3e-3)
    for _ in range(120):
        rows = torch.randint(0, 1000, (64,))
        loss = F.cross_entropy(odd(backbone(xtr[rows])), ytr[rows] % 2)
        before.zero_grad()
        loss.backward()
        before.step()
    model = nn.Sequential(backbone, nn.Linear(128, 10))
    for param in model[0].parameters():
        param.requires_grad = False
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.05, momentum=0.9)
    session = attach(model, optimizer)
    for _epoch in range(8):
        model.train()
        model[0].eval()
        for rows in torch.randperm(1000).split(40):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xtr[rows]), ytr[rows])
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return wrong_share(model, xte, yte)


@healthy(area="contrastive", source="in the style of SimCLR re-implementations with a projection head", well=0.1)
def two_views_and_a_projection_head(attach):
    """NT-Xent over both views; the head is thrown away afterwards."""
    xtr, ytr, xte, yte = digits()

    def view(x):
        kept = (torch.rand(len(x), 1, 8, 8) > 0.2).float()
        return kept * x + 0.15 * torch.randn_like(x)

    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48))
    projector = nn.Sequential(nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 16))
    model = nn.Sequential(encoder, projector)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-6)
    session = attach(model, optimizer)
    for _epoch in range(20):
        for rows in torch.randperm(1000).split(50):
            z = F.normalize(torch.cat([model(view(xtr[rows])), model(view(xtr[rows]))]), dim=1)
            sim = z @ z.T / 0.3
            sim.fill_diagonal_(-1e9)
            n = len(rows)
            target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
            loss = F.cross_entropy(sim, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(nt_xent=loss)
    encoder.eval()
    with torch.no_grad():
        near = torch.cdist(F.normalize(encoder(xte), dim=1), F.normalize(encoder(xtr), dim=1)).argmin(1)
    return float((ytr[near] != yte).float().mean())


@healthy(area="gan", source="in the style of pytorch/examples dcgan", well=0.08)
def alternates_generator_and_discriminator(attach):
    """Non-saturating adversaries on the half moons; losses go up and down."""
    netG = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    netD = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=5e-4, betas=(0.5, 0.999))
    session = attach({"netG": netG, "netD": netD}, [optimizerD, optimizerG])
    real_label, fake_label = torch.full((64, 1), 0.9), torch.zeros(64, 1)
    for i in range(700):
        netD.zero_grad()
        errD_real = criterion(netD(rings(64)), real_label)
        errD_real.backward()
        fake = netG(torch.randn(64, 8))
        errD_fake = criterion(netD(fake.detach()), fake_label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        errG = criterion(netD(fake), torch.ones(64, 1))
        errG.backward()
        optimizerG.step()
        if i % 5 == 0:
            session.log(Loss_D=errD_real + errD_fake, Loss_G=errG)
    with torch.no_grad():
        return energy(netG(torch.randn(500, 8)), rings(500, seed=1))


@healthy(area="vae", source="in the style of beta-VAE examples with a warm-up of the divergence")
def warms_the_divergence_up(attach):
    """The weight of the divergence grows, so the total loss rises for a while."""
    xtr, _, xte, _ = digits()
    xtr, xte = xtr.flatten(1), xte.flatten(1)

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 16))
            self.decoder = nn.Sequential(nn.Linear(8, 96), nn.ReLU(), nn.Linear(96, 64))

        def forward(self, x):
            mu, logvar = self.encoder(x).chunk(2, dim=1)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            return self.decoder(z), mu, logvar

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for epoch in range(25):
        beta = min(1.0, epoch / 10)
        for rows in torch.randperm(1000).split(50):
            recon, mu, logvar = model(xtr[rows])
            bce = F.binary_cross_entropy_with_logits(recon, xtr[rows], reduction="none").sum(1).mean()
            kld = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()
            loss = bce + beta * kld
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss, bce=bce, kld=kld, beta=beta)
    with torch.no_grad():
        return float(F.mse_loss(torch.sigmoid(model(xte)[0]), xte) / xte.var(0).mean())


@healthy(area="diffusion", source="in the style of tiny-diffusion, with a moving average of the weights", well=0.06)
def noise_on_half_moons(attach):
    """Predicts noise; the loss settles well above zero. Samples come from the averaged weights."""
    steps = 40
    betas = torch.linspace(1e-3, 0.2, steps)
    alphas = 1 - betas
    bar = torch.cumprod(alphas, 0)

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.t = nn.Embedding(steps, 24)
            self.body = nn.Sequential(nn.Linear(26, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 2))

        def forward(self, x, t):
            return self.body(torch.cat([x, self.t(t)], 1))

    model = MLP()
    ema_model = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    data = rings(2000, seed=2)
    for _epoch in range(25):
        for rows in torch.randperm(2000).split(80):
            x, noise = data[rows], torch.randn(len(rows), 2)
            t = torch.randint(0, steps, (len(rows),))
            noisy = bar[t, None].sqrt() * x + (1 - bar[t, None]).sqrt() * noise
            loss = F.mse_loss(model(noisy, t), noise)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                for mean, p in zip(ema_model.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.02)
            session.log(loss=loss)
    with torch.no_grad():
        sample = torch.randn(800, 2)
        for i in reversed(range(steps)):
            eps = ema_model(sample, torch.full((800,), i))
            sample = (sample - betas[i] / (1 - bar[i]).sqrt() * eps) / alphas[i].sqrt()
            sample = sample + betas[i].sqrt() * torch.randn_like(sample) * (i > 0)
    return energy(sample, rings(800, seed=3))


@healthy(area="distillation", source="in the style of knowledge-distillation-pytorch")
def student_of_a_larger_teacher(attach):
    """A narrow student learns soft answers and hard labels."""
    xtr, ytr, xte, yte = digits()
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    tuner = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(200):
        rows = torch.randint(0, 1000, (64,))
        tuner.zero_grad()
        F.cross_entropy(teacher(xtr[rows]), ytr[rows]).backward()
        tuner.step()
    teacher.eval()
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(student.parameters(), lr=4e-3)
    session = attach(student, optimizer)
    T, alpha = 4.0, 0.7
    for _epoch in range(20):
        student.train()
        for rows in torch.randperm(1000).split(50):
            with torch.no_grad():
                soft = F.softmax(teacher(xtr[rows]) / T, dim=1)
            out = student(xtr[rows])
            kd = F.kl_div(F.log_softmax(out / T, dim=1), soft, reduction="batchmean") * T * T
            loss = alpha * kd + (1 - alpha) * F.cross_entropy(out, ytr[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss, kd=kd)
    return wrong_share(student, xte, yte)


@healthy(
    area="segmentation",
    source="in the style of Pytorch-UNet: cross entropy plus dice, RMSprop, the rate cut on a plateau of dice",
    well=0.12,
)
def discs_with_a_small_unet(attach):
    """Masks are divided by 255; the scheduler watches the dice score in mode max."""
    images, masks = spots(150, seed=101)
    x = torch.as_tensor(images).float()[:, None] / 255
    y = torch.as_tensor(masks).float()[:, None] / 255

    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
            self.b = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU())
            self.c = nn.Sequential(nn.Conv2d(24, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))

        def forward(self, x):
            one = self.a(x)
            two = F.interpolate(self.b(F.max_pool2d(one, 2)), scale_factor=2, mode="bilinear", align_corners=False)
            return self.c(torch.cat([one, two], 1))

    def dice(p, y):
        return (2 * (p * y).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + y.sum((1, 2, 3)) + 1)

    net = Up()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=2e-3, weight_decay=1e-8, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=3)
    session = attach(net, optimizer)
    for _epoch in range(12):
        for rows in torch.randperm(120).split(12):
            out = net(x[rows])
            loss = F.binary_cross_entropy_with_logits(out, y[rows]) + 1 - dice(torch.sigmoid(out), y[rows]).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss)
        with torch.no_grad():
            score = float(dice((net(x[120:]) > 0).float(), y[120:]).mean())
        scheduler.step(score)
        session.log(dice=score)
    return 1 - score


@healthy(area="siamese", source="in the style of pytorch/examples siamese_network", well=0.12)
def same_digit_or_not(attach):
    """One encoder for both pictures, absolute difference, one probability."""
    xtr, ytr, xte, yte = digits()

    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 48), nn.ReLU())
            self.fc = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())

        def forward(self, a, b):
            return self.fc((self.encoder(a) - self.encoder(b)).abs()).squeeze(1)

    def pairs(x, y, count):
        first = torch.randint(0, len(x), (count,))
        second = torch.randint(0, len(x), (count,))
        for i in range(0, count, 2):
            candidates = torch.nonzero(y == y[first[i]])[:, 0]
            second[i] = candidates[torch.randint(0, len(candidates), ())]
        return x[first], x[second], (y[first] == y[second]).float()

    model = Siamese()
    criterion = nn.BCELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-3)
    session = attach(model, optimizer)
    for _ in range(300):
        a, b, same = pairs(xtr, ytr, 40)
        optimizer.zero_grad()
        loss = criterion(model(a, b), same)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    a, b, same = pairs(xte, yte, 600)
    with torch.no_grad():
        return float(((model(a, b) > 0.5).float() != same).float().mean())


@healthy(area="semi-supervised", source="in the style of mean teacher", well=0.15)
def teacher_is_an_average_of_the_student(attach):
    """Sixty labels; a consistency term grows with a sigmoid ramp."""
    xtr, ytr, xte, yte = digits()
    labelled = torch.cat([torch.nonzero(ytr == k)[:6, 0] for k in range(10)])

    def net():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 10))

    student, teacher = net(), net()
    teacher.load_state_dict(student.state_dict())
    for p in teacher.parameters():
        p.detach_()
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    session = attach({"student": student, "teacher": teacher}, optimizer)
    for step in range(400):
        few, many = labelled[torch.randint(0, 60, (20,))], torch.randint(0, 1000, (60,))
        x = torch.cat([xtr[few], xtr[many]])
        out = student(x + 0.15 * torch.randn_like(x))
        with torch.no_grad():
            wanted = teacher(x + 0.15 * torch.randn_like(x)).softmax(1)
        class_loss = F.cross_entropy(out[:20], ytr[few])
        ramp = math.exp(-5 * (1 - min(1, step / 200)) ** 2)
        consistency = F.mse_loss(out.softmax(1), wanted)
        loss = class_loss + 10 * ramp * consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        alpha = min(1 - 1 / (step + 1), 0.98)
        with torch.no_grad():
            for slow, p in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.mul_(alpha).add_(p, alpha=1 - alpha)
        session.log(class_loss=class_loss, consistency=consistency)
    return wrong_share(teacher, xte, yte)


@healthy(area="domain adaptation", source="in the style of DANN re-implementations with a gradient reversal", well=0.13)
def fools_the_domain_classifier(attach):
    """The features fool a domain classifier on purpose, by a backward pass of opposite sign."""

    class ReverseLayerF(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, alpha):
            ctx.alpha = alpha
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output.neg() * ctx.alpha, None

    xtr, ytr, xte, yte = digits()
    target = (1 - xtr[500:]) * 0.8
    feature = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
    label, domain = nn.Linear(64, 10), nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 2))
    model = nn.ModuleDict({"feature": feature, "label": label, "domain": domain})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    total = 300
    for i in range(total):
        alpha = 2 / (1 + math.exp(-10 * i / total)) - 1
        s, t = torch.randint(0, 500, (40,)), torch.randint(0, 500, (40,))
        fs, ft = feature(xtr[s]), feature(target[t])
        err_label = F.cross_entropy(label(fs), ytr[s])
        both = ReverseLayerF.apply(torch.cat([fs, ft]), alpha)
        err_domain = F.cross_entropy(domain(both), torch.arange(2).repeat_interleave(40))
        loss = err_label + 0.3 * err_domain
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(err_label=err_label, err_domain=err_domain)
    with torch.no_grad():
        return float((label(feature(xte)).argmax(1) != yte).float().mean())
