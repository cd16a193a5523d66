"""Tenth hold-out: nothing is wrong here - pictures, samples and copies."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fault_programs.holdout_10.about import healthy
from fault_programs.holdout_10.material import digits, spread


def error_rate(model, x, y):
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) != y).float().mean())


@healthy(area="classification", source="pytorch/examples: mnist/main.py")
def mnist_with_log_softmax_and_nll(attach):
    """log_softmax in forward, nll_loss outside, two dropouts, Adadelta and a StepLR."""
    xtr, ytr, xte, yte = digits()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 12, 3, 1, 1)
            self.conv2 = nn.Conv2d(12, 24, 3, 1, 1)
            self.dropout1 = nn.Dropout(0.25)
            self.dropout2 = nn.Dropout(0.5)
            self.fc1 = nn.Linear(24 * 16, 64)
            self.fc2 = nn.Linear(64, 10)

        def forward(self, x):
            x = F.relu(self.conv1(x))
            x = F.max_pool2d(F.relu(self.conv2(x)), 2)
            x = torch.flatten(self.dropout1(x), 1)
            x = self.dropout2(F.relu(self.fc1(x)))
            return F.log_softmax(self.fc2(x), dim=1)

    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    session = attach(model, optimizer)
    for epoch in range(1, 8):
        model.train()
        for data, target in DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        test_loss = 0
        with torch.no_grad():
            for data, target in DataLoader(TensorDataset(xte, yte), batch_size=200):
                test_loss += F.nll_loss(model(data), target, reduction="sum").item()
        session.log(test_loss=test_loss / len(xte))
        scheduler.step()
    return error_rate(model, xte, yte)


@healthy(area="vae", source="pytorch/examples: vae/main.py")
def vae_sums_over_the_batch(attach):
    """The loss is a sum of pixels and of divergences, in the hundreds or thousands from the start."""
    xtr, _, xte, _ = digits()
    xtr, xte = xtr.flatten(1), xte.flatten(1)

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(64, 100)
            self.fc21 = nn.Linear(100, 6)
            self.fc22 = nn.Linear(100, 6)
            self.fc3 = nn.Linear(6, 100)
            self.fc4 = nn.Linear(100, 64)

        def forward(self, x):
            h = F.relu(self.fc1(x))
            mu, logvar = self.fc21(h), self.fc22(h)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar) if self.training else mu
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    session = attach(model, optimizer)
    for epoch in range(20):
        model.train()
        for (data,) in DataLoader(TensorDataset(xtr), batch_size=32, shuffle=True):
            optimizer.zero_grad()
            recon, mu, logvar = model(data)
            bce = F.binary_cross_entropy(recon, data, reduction="sum")
            kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss = bce + kld
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item() / len(data))
    model.eval()
    with torch.no_grad():
        return float(F.mse_loss(model(xte)[0], xte))


@healthy(area="gan", source="pytorch/examples: dcgan/main.py")
def dcgan_steps_in_turn(attach):
    """Small weights from a normal distribution, two backward passes for the discriminator, losses that never settle."""
    xtr, _, xte, _ = digits()
    real_data = xtr.flatten(1) * 2 - 1

    def weights_init(m):
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, 0.0, 0.05)
        elif isinstance(m, nn.BatchNorm1d):
            nn.init.normal_(m.weight, 1.0, 0.02)
            nn.init.zeros_(m.bias)

    netG = nn.Sequential(
        nn.Linear(16, 96, bias=False), nn.BatchNorm1d(96), nn.ReLU(True), nn.Linear(96, 96, bias=False), nn.BatchNorm1d(96), nn.ReLU(True),
        nn.Linear(96, 64), nn.Tanh(),
    )  # fmt: skip
    netD = nn.Sequential(
        nn.Linear(64, 96), nn.LeakyReLU(0.2), nn.Linear(96, 96), nn.LeakyReLU(0.2), nn.Linear(96, 1), nn.Sigmoid()
    )
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    session = attach(nn.ModuleDict({"G": netG, "D": netD}), optimizerD)
    for epoch in range(22):
        for (data,) in DataLoader(TensorDataset(real_data), batch_size=50, shuffle=True):
            netD.zero_grad()
            label = torch.full((len(data),), 1.0)
            errD_real = criterion(netD(data).view(-1), label)
            errD_real.backward()
            fake = netG(torch.randn(len(data), 16))
            label.fill_(0.0)
            errD_fake = criterion(netD(fake.detach()).view(-1), label)
            errD_fake.backward()
            optimizerD.step()
            netG.zero_grad()
            label.fill_(1.0)
            errG = criterion(netD(fake).view(-1), label)
            errG.backward()
            optimizerG.step()
            session.log(loss_d=(errD_real + errD_fake).item(), loss_g=errG.item())
    with torch.no_grad():
        return spread(netG(torch.randn(400, 16)), xte[:400].flatten(1) * 2 - 1)


@healthy(area="diffusion", source="lucidrains/denoising-diffusion-pytorch, as taught in the annotated diffusion model")
def diffusion_with_a_moving_average(attach):
    """A loss that stays noisy because each batch has other times, gradients of two micro-batches, and a slow copy for samples."""
    steps = 60
    xtr, _, xte, _ = digits()
    xtr, xte = xtr.flatten(1) * 2 - 1, xte.flatten(1) * 2 - 1
    t = torch.linspace(0, 1, steps + 1)
    f = torch.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2
    betas = (1 - f[1:] / f[:-1]).clamp(max=0.999)
    bars = torch.cumprod(1 - betas, 0)

    class SinusoidalPosEmb(nn.Module):
        def forward(self, time):
            freq = torch.exp(torch.arange(16) * -(math.log(10000) / 15))
            angle = time[:, None] * freq
            return torch.cat([angle.sin(), angle.cos()], -1)

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.time_mlp = nn.Sequential(SinusoidalPosEmb(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64))
            self.inp, self.mid, self.out = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 64)
            self.scale = nn.Linear(64, 128)
            nn.init.zeros_(self.out.weight)

        def forward(self, x, time):
            h = F.silu(self.inp(x) + self.scale(self.time_mlp(time)))
            return self.out(h + F.silu(self.mid(h)))

    model = Denoiser()
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
    session = attach(model, optimizer)

    def p_losses(x_start, net):
        time = torch.randint(0, steps, (len(x_start),))
        noise = torch.randn_like(x_start)
        noisy = bars[time, None].sqrt() * x_start + (1 - bars[time, None]).sqrt() * noise
        return F.mse_loss(net(noisy, time), noise)

    for step in range(260):
        total = 0.0
        for _ in range(2):
            loss = p_losses(xtr[torch.randint(len(xtr), (32,))], model) / 2
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, quick in zip(ema.parameters(), model.parameters()):
                slow.lerp_(quick, 1 - 0.98)
        session.log(loss=total)
    with torch.no_grad():
        return float(p_losses(xte, ema))


class PairDataset(Dataset):
    """As in the example: half of the pairs match."""

    def __init__(self, x, y):
        self.x, self.y = x, y
        self.groups = [torch.nonzero(y == c).flatten() for c in range(10)]

    def __len__(self):
        return 1400

    def __getitem__(self, index):
        a = int(torch.randint(10, ()))
        first = self.groups[a][torch.randint(len(self.groups[a]), ())]
        if index % 2 == 0:
            second = self.groups[a][torch.randint(len(self.groups[a]), ())]
            return self.x[first], self.x[second], torch.tensor(1.0)
        b = (a + int(torch.randint(1, 10, ()))) % 10
        second = self.groups[b][torch.randint(len(self.groups[b]), ())]
        return self.x[first], self.x[second], torch.tensor(0.0)


@healthy(area="siamese", source="pytorch/examples: siamese_network/main.py")
def siamese_network_that_says_match_or_not(attach):
    """One net for both pictures, a sigmoid at the end and a plain BCELoss."""
    xtr, ytr, xte, yte = digits()

    class SiameseNetwork(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(
                nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 48)
            )
            self.fc = nn.Sequential(nn.Linear(48 * 2, 64), nn.ReLU(inplace=True), nn.Linear(64, 1))
            self.sigmoid = nn.Sigmoid()

        def forward(self, a, b):
            a, b = self.trunk(a), self.trunk(b)
            return self.sigmoid(self.fc(torch.cat(((a - b).abs(), a * b), 1)))

    model = SiameseNetwork()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    criterion = nn.BCELoss()
    session = attach(model, optimizer)
    for epoch in range(7):
        model.train()
        for a, b, targets in DataLoader(PairDataset(xtr, ytr), batch_size=50, shuffle=True):
            optimizer.zero_grad()
            outputs = model(a, b).squeeze()
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    wrong = 0
    with torch.no_grad():
        for a, b, targets in DataLoader(PairDataset(xte, yte), batch_size=200):
            wrong += int(((model(a, b).squeeze() > 0.5).float() != targets).sum())
    return wrong / 1400


@healthy(area="segmentation", source="milesial/Pytorch-UNet: train.py")
def unet_with_rmsprop_and_dice(attach):
    """RMSprop with much momentum and a tiny rate, cross entropy plus Dice, and an autocast that is switched off."""
    images = 0.4 * torch.randn(260, 1, 16, 16)
    masks = torch.zeros(260, 16, 16, dtype=torch.long)
    yy, xx = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    for i in range(260):
        cy, cx = torch.randint(3, 13, (2,)).tolist()
        masks[i][(yy - cy) ** 2 + (xx - cx) ** 2 <= 9] = 1
    images += masks.unsqueeze(1)

    def double_conv(a, b):
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
        )  # fmt: skip

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.inc, self.down = double_conv(1, 8), nn.Sequential(nn.MaxPool2d(2), double_conv(8, 16))
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.conv, self.outc = double_conv(16, 8), nn.Conv2d(8, 2, 1)

        def forward(self, x):
            x1 = self.inc(x)
            x2 = self.up(self.down(x1))
            return self.outc(self.conv(torch.cat([x1, x2], 1)))

    def dice_loss(probs, target):
        inter = 2 * (probs * target).sum((-1, -2))
        sets = probs.sum((-1, -2)) + target.sum((-1, -2))
        return 1 - ((inter + 1e-6) / (sets + 1e-6)).mean()

    model = UNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-5, weight_decay=1e-8, momentum=0.99)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    session = attach(model, optimizer)
    for epoch in range(8):
        model.train()
        for image, true_mask in DataLoader(TensorDataset(images[:200], masks[:200]), batch_size=10, shuffle=True):
            with torch.autocast("cpu", enabled=False):
                pred = model(image)
                loss = F.cross_entropy(pred, true_mask)
                loss = loss + dice_loss(F.softmax(pred, 1), F.one_hot(true_mask, 2).permute(0, 3, 1, 2).float())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            found = model(images[200:]).argmax(1)
            score = 2 * (found * masks[200:]).sum() / (found.sum() + masks[200:].sum() + 1e-6)
        scheduler.step(score)
        session.log(val_dice=score.item())
    return 1 - float(score)


@healthy(area="self-supervised", source="facebookresearch/simsiam: main_simsiam.py")
def simsiam_with_a_stopped_gradient(attach):
    """The loss is negative, the other view is detached on purpose, and the predictor has a rate of its own."""
    xtr, ytr, xte, yte = digits()

    class SimSiam(nn.Module):
        def __init__(self, dim=48, pred_dim=16):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Flatten(), nn.Linear(64, 96, bias=False), nn.BatchNorm1d(96), nn.ReLU(inplace=True),
                nn.Linear(96, dim, bias=False), nn.BatchNorm1d(dim, affine=False),
            )  # fmt: skip
            self.predictor = nn.Sequential(
                nn.Linear(dim, pred_dim, bias=False),
                nn.BatchNorm1d(pred_dim),
                nn.ReLU(inplace=True),
                nn.Linear(pred_dim, dim),
            )

        def forward(self, x1, x2):
            z1, z2 = self.encoder(x1), self.encoder(x2)
            return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()

    def augment(x):
        keep = (torch.rand(len(x), 1, 8, 8) > 0.25).float()
        return x * keep + 0.15 * torch.randn_like(x)

    model = SimSiam()
    criterion = nn.CosineSimilarity(dim=1)
    init_lr = 0.05
    optimizer = torch.optim.SGD(
        [{"params": model.encoder.parameters(), "fix_lr": False}, {"params": model.predictor.parameters(), "fix_lr": True}],
        init_lr, momentum=0.9, weight_decay=1e-4,
    )  # fmt: skip
    session = attach(model, optimizer)
    epochs = 18
    for epoch in range(epochs):
        cur_lr = init_lr * 0.5 * (1.0 + math.cos(math.pi * epoch / epochs))
        for group in optimizer.param_groups:
            group["lr"] = init_lr if group["fix_lr"] else cur_lr
        for (images,) in DataLoader(TensorDataset(xtr), batch_size=60, shuffle=True, drop_last=True):
            p1, p2, z1, z2 = model(augment(images), augment(images))
            loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    with torch.no_grad():
        known, new = F.normalize(model.encoder(xtr)), F.normalize(model.encoder(xte))
        near = (new @ known.T).argmax(1)
    return float((ytr[near] != yte).float().mean())


@healthy(area="audio", source="PyTorch tutorial: speech command classification with torchaudio (M5)")
def m5_hears_waves(attach):
    """Raw waves of a tiny amplitude, large strides, log_softmax with nll_loss, and a step schedule by epoch."""
    time = torch.arange(512) / 512

    def waves(count):
        label = torch.randint(0, 6, (count,))
        pitch = torch.tensor([8.0, 13.0, 21.0, 34.0, 55.0, 89.0])[label] * (1 + 0.05 * torch.randn(count))
        phase = torch.rand(count) * 6.28
        sound = torch.sin(6.283 * pitch[:, None] * time + phase[:, None]) * torch.rand(count, 1).add(0.3)
        return (0.1 * (sound + 1.2 * torch.randn(count, 512))).unsqueeze(1), label

    class M5(nn.Module):
        def __init__(self, n_channel=12):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv1d(1, n_channel, 40, stride=4), nn.BatchNorm1d(n_channel)
            self.conv2, self.bn2 = nn.Conv1d(n_channel, n_channel, 3), nn.BatchNorm1d(n_channel)
            self.conv3, self.bn3 = nn.Conv1d(n_channel, 2 * n_channel, 3), nn.BatchNorm1d(2 * n_channel)
            self.pool = nn.MaxPool1d(4)
            self.fc1 = nn.Linear(2 * n_channel, 6)

        def forward(self, x):
            x = self.pool(F.relu(self.bn1(self.conv1(x))))
            x = self.pool(F.relu(self.bn2(self.conv2(x))))
            x = F.relu(self.bn3(self.conv3(x)))
            x = F.avg_pool1d(x, x.shape[-1]).permute(0, 2, 1)
            return F.log_softmax(self.fc1(x), dim=2)

    model = M5()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.0001)
    scheduler = StepLR(optimizer, step_size=5, gamma=0.1)
    session = attach(model, optimizer)
    x, y = waves(500)
    for epoch in range(8):
        model.train()
        for data, target in DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True):
            loss = F.nll_loss(model(data).squeeze(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        scheduler.step()
    model.eval()
    x, y = waves(300)
    with torch.no_grad():
        return float((model(x).squeeze().argmax(1) != y).float().mean())
