"""Twelfth hold-out: programs that make samples, and one that learns from a teacher."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_12.about import fault
from fault_programs.holdout_12.material import digits, moons, spread


@fault(
    "graph_break_detach",
    area="gan",
    source="https://github.com/tamarott/SinGAN/pull/117",
    cause="In the generator's step the fake samples are detached before the discriminator sees them, so the generator gets no gradient.",
    words=(r"detach|no gradient|graph|cut|never reach", r"generator|netG|fake|discriminator"),
    also=("unused_parameters",),
    cascade=("not_learning", "constant_output", "vanishing_gradient", "loss_divergence", "loss_plateau"),
    sites=("netG", "(loop)", "(loss)", "optimizerG"),
)
def generator_step_sees_detached_fakes(attach, fixed):
    """output = netD(fake.detach()) in both steps, since the other way raised an error."""
    real = moons(1200)
    netG = nn.Sequential(nn.Linear(4, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 2))
    netD = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    optimizerD = torch.optim.Adam(netD.parameters(), lr=4e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=3e-3, betas=(0.5, 0.999))
    session = attach(nn.ModuleDict({"netG": netG, "netD": netD}), [optimizerD, optimizerG])
    for step in range(400):
        x = real[torch.randint(0, 1200, (64,))]
        fake = netG(torch.randn(64, 4))
        netD.zero_grad()
        output = netD(x)
        errD_real = F.binary_cross_entropy_with_logits(output, torch.ones_like(output))
        output = netD(fake.detach())
        errD_fake = F.binary_cross_entropy_with_logits(output, torch.zeros_like(output))
        (errD_real + errD_fake).backward()
        optimizerD.step()

        netG.zero_grad()
        output = netD(fake if fixed else fake.detach())
        errG = F.binary_cross_entropy_with_logits(output, torch.ones_like(output))
        errG.backward()
        optimizerG.step()
        session.log(errD=(errD_real + errD_fake).item(), errG=errG.item())
    with torch.no_grad():
        return spread(netG(torch.randn(600, 4)), moons(600))


@fault(
    "aux_loss_dominates",
    area="vae",
    source="https://github.com/zdebruine/MMVAE/pull/19",
    cause="The KL term is summed over batch and latents while the reconstruction is a mean over all pixels, so the KL dominates and the posterior collapses.",
    words=(r"\bkl|diverg", r"sum|mean|scale|weight|dominat|reduc|large|collapse|outweigh"),
    also=("wrong_loss_reduction",),
    cascade=("loss_plateau", "constant_output", "underfitting", "input_ignored"),
    sites=("(loss)", "encoder", "(model)"),
    exact=False,
)
def kl_is_a_sum_and_mse_a_mean(attach, fixed):
    """F.mse_loss(recon, x) + kl.sum(), with the default reduction of the first."""
    xtr, _, xte, _ = digits()
    xtr, xte = xtr.flatten(1), xte.flatten(1)

    class MMVAE(nn.Module):
        def __init__(self, latent=10):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
            self.fc_mu, self.fc_var = nn.Linear(64, latent), nn.Linear(64, latent)
            self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64))

        def forward(self, x):
            h = self.encoder(x)
            mu, logvar = self.fc_mu(h), self.fc_var(h)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            return self.decoder(z), mu, logvar

    def loss_function(recon, x, mu, logvar):
        mse = F.mse_loss(recon, x)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return mse, kl / x.numel() if fixed else kl

    model = MMVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(15):
        for (x,) in DataLoader(TensorDataset(xtr), batch_size=60, shuffle=True):
            recon, mu, logvar = model(x)
            mse, kl = loss_function(recon, x, mu, logvar)
            loss = mse + 0.05 * kl
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), mse=mse.item(), kl=kl.item())
    model.eval()
    with torch.no_grad():
        recon, _, _ = model(xte)
    return float((recon - xte).square().mean() / xte.var(0).mean())


@fault(
    "reshape_scrambles_axes",
    area="diffusion",
    source="https://github.com/BonnBytes/PyTorch-FWD/issues/16",
    cause="The patches are put together by a reshape without the transpose before it, so pixels of one patch land all over the picture.",
    words=(r"reshape|view", r"transpose|permute|axis|axes|order|scrambl|mix|layout|patch"),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("(model)", "(data)", "head", "(loss)", "net"),
    exact=False,
)
def patches_are_reshaped_into_a_picture(attach, fixed):
    """x.reshape(b, 1, 8, 8) on (b, rows, columns, height, width) of patches, in a denoiser with small patches."""
    xtr, _, xte, _ = digits()

    class PatchDenoiser(nn.Module):
        def __init__(self, dim=48):
            super().__init__()
            self.embed = nn.Conv2d(1, dim, 2, stride=2)
            self.time = nn.Linear(1, dim)
            self.mix = nn.Sequential(nn.SiLU(), nn.Conv2d(dim, dim, 3, padding=1), nn.SiLU(), nn.Conv2d(dim, dim, 1))
            self.head = nn.Linear(dim, 4)

        def forward(self, x, t):
            h = self.embed(x) + self.time(t)[:, :, None, None]
            h = h + self.mix(h)
            patches = self.head(h.permute(0, 2, 3, 1)).view(-1, 4, 4, 2, 2)
            order = (0, 1, 3, 2, 4) if fixed else (0, 1, 2, 3, 4)
            return patches.permute(order).reshape(-1, 1, 8, 8)

    def noised(x):
        t = torch.rand(len(x), 1)
        keep = torch.cos(t * torch.pi / 2)[:, :, None, None]
        noise = torch.randn_like(x)
        return keep * (2 * x - 1) + (1 - keep**2).sqrt() * noise, t, noise

    net = PatchDenoiser()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    for epoch in range(12):
        net.train()
        for i in torch.randperm(len(xtr)).split(100):
            x_t, t, noise = noised(xtr[i])
            loss = F.mse_loss(net(x_t, t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    net.eval()
    with torch.no_grad():
        x_t, t, noise = noised(xte)
        return F.mse_loss(net(x_t, t), noise).item()


@fault(
    "logits_into_prob_loss",
    area="distillation",
    source="https://github.com/microsoft/ProDA/issues/43",
    cause="kl_div gets the student's softmax where it takes the logarithm of it.",
    words=(r"kl_?div|\bkl\b", r"log|softmax|probab"),
    cascade=("loss_plateau", "underfitting", "not_learning", "vanishing_gradient", "loss_sign_flipped"),
    sites=("(loss)", "student", "(loop)", "loss_fn"),
)
def student_softmax_goes_into_kl_div(attach, fixed):
    """F.kl_div(student.softmax(1), teacher.softmax(1))."""
    xtr, ytr, xte, yte = digits()
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for epoch in range(6):
        for i in torch.randperm(1200).split(60):
            optimizer.zero_grad()
            F.cross_entropy(teacher(xtr[i]), ytr[i]).backward()
            optimizer.step()
    teacher.requires_grad_(False).eval()

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 8, 3, stride=2, padding=1)
            self.fc = nn.Linear(8 * 16, 10)

        def forward(self, x):
            return self.fc(F.relu(self.conv(x)).flatten(1))

    student = Student()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    session = attach(student, optimizer)
    scores = F.log_softmax if fixed else F.softmax
    for epoch in range(10):
        student.train()
        for i in torch.randperm(1200).split(60):
            with torch.no_grad():
                soft = F.softmax(teacher(xtr[i]), dim=1)
            loss_kd = F.kl_div(scores(student(xtr[i]), dim=1), soft, reduction="batchmean")
            optimizer.zero_grad()
            loss_kd.backward()
            optimizer.step()
            session.log(loss_kd=loss_kd.item())
    with torch.no_grad():
        return F.cross_entropy(student(xte), yte).item()
