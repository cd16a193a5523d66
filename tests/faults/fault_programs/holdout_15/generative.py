"""Fifteenth hold-out: programs that make samples."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_15.about import fault
from fault_programs.holdout_15.material import digits, rings, spread


@fault(
    "output_range_mismatch",
    area="gan",
    source="https://github.com/carpedm20/DCGAN-tensorflow/issues/163",
    cause="The generator ends in a sigmoid, while the real pictures lie between -1 and 1, so half of their range cannot be made.",
    words=(r"sigmoid|tanh|range|negative|activation", r"-1|generator|output|range|real|scale"),
    cascade=(
        "not_learning",
        "saturated_activation",
        "train_val_preproc_mismatch",
        "loss_divergence",
        "vanishing_gradient",
        "constant_output",
        "loss_plateau",
    ),
    sites=("netG", "(model)", "(data)", "(loss)"),
    exact=False,
)
def generator_ends_in_a_sigmoid(attach, fixed):
    """nn.Sigmoid() as the last layer of the generator; Normalize((0.5,), (0.5,)) for the pictures."""
    xtr, ytr, xte, _ = digits()
    ones = (xtr[ytr < 2] - 0.5) / 0.5

    netG = nn.Sequential(
        nn.Linear(12, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.Tanh() if fixed else nn.Sigmoid(),
    )
    netD = nn.Sequential(
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(64, 1),
    )
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    session = attach(nn.ModuleDict({"netG": netG, "netD": netD}), [optimizerD, optimizerG])
    real, fake = torch.full((40, 1), 0.9), torch.zeros(40, 1)
    for step in range(1000):
        x = ones[torch.randint(0, len(ones), (40,))].flatten(1)
        made = netG(torch.randn(40, 12))
        errD = criterion(netD(x), real) + criterion(netD(made.detach()), fake)
        optimizerD.zero_grad()
        errD.backward()
        optimizerD.step()
        errG = criterion(netD(made), real)
        optimizerG.zero_grad()
        errG.backward()
        optimizerG.step()
        session.log(errD=errD.item(), errG=errG.item())
    netG.eval()
    with torch.no_grad():
        return spread(netG(torch.randn(240, 12)), ones.flatten(1))


@fault(
    "loss_sign_flipped",
    area="vae",
    source="from memory: questions on a VAE whose KL term falls below zero without end, since the -0.5 in front of it lost its minus",
    cause="The KL divergence has the wrong sign, so training makes it larger without end instead of smaller.",
    words=(r"\bkl|diverg", r"sign|minus|negat|flip|-0\.5|wrong"),
    cascade=(
        "loss_divergence",
        "exploding_activation",
        "nan_in_loss",
        "nan_forward",
        "nan_in_weights",
        "aux_loss_dominates",
        "not_learning",
        "exploding_gradient",
    ),
    sites=("(loss)", "encoder", "(model)", "fc_logvar", "fc_mu"),
    exact=False,
)
def divergence_lost_its_minus(attach, fixed):
    """kld = 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1)."""
    xtr, _, xte, _ = digits()

    class VAE(nn.Module):
        def __init__(self, latent=8):
            super().__init__()
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU())
            self.fc_mu, self.fc_logvar = nn.Linear(96, latent), nn.Linear(96, latent)
            self.decoder = nn.Sequential(nn.Linear(latent, 96), nn.ReLU(), nn.Linear(96, 64))

        def forward(self, x):
            h = self.encoder(x)
            mu, logvar = self.fc_mu(h), self.fc_logvar(h)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            return self.decoder(z), mu, logvar

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    sign = -0.5 if fixed else 0.5
    for epoch in range(14):
        model.train()
        for i in torch.randperm(len(xtr)).split(48):
            recon, mu, logvar = model(xtr[i])
            rec = F.binary_cross_entropy_with_logits(recon, xtr[i].flatten(1), reduction="none").sum(1)
            kld = sign * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1)
            loss = (rec + kld).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), rec=rec.mean().item(), kld=kld.mean().item())
    model.eval()
    with torch.no_grad():
        made = torch.sigmoid(model.decoder(torch.randn(400, 8)))
        return min(spread(made.nan_to_num(0.0), xte.flatten(1)), 100.0)


@fault(
    "noise_is_uniform",
    area="diffusion",
    source="from memory: a question on a small DDPM whose loss is fine and whose samples drift away, with torch.rand_like where torch.randn_like belongs",
    cause="The noise in training is uniform from 0 to 1 and not normal, while the sampler starts from normal noise and adds normal noise.",
    words=(r"rand|uniform|normal|gauss|noise", r"uniform|rand_like|randn|mean|0\.5|distribution|mismatch"),
    also=("train_val_preproc_mismatch",),
    cascade=("train_val_preproc_mismatch", "underfitting", "loss_plateau"),
    sites=("(data)", "(loop)", "(model)", "(loss)"),
    exact=False,
)
def noise_is_drawn_without_the_n(attach, fixed):
    """noise = torch.rand_like(x_0) in the training step."""
    data = rings(2000)
    steps = 40
    betas = torch.linspace(1e-3, 0.25, steps)
    alphas = 1 - betas
    alphas_cumprod = alphas.cumprod(0)
    draw = torch.randn_like if fixed else torch.rand_like

    def q_sample(x_0, t, noise):
        a = alphas_cumprod[t][:, None]
        return a.sqrt() * x_0 + (1 - a).sqrt() * noise

    class Denoiser(nn.Module):
        def __init__(self, width=96):
            super().__init__()
            self.time_mlp = nn.Sequential(nn.Embedding(steps, 32), nn.Linear(32, width))
            self.inp, self.act = nn.Linear(2, width), nn.SiLU()
            self.mid, self.out = nn.Linear(width, width), nn.Linear(width, 2)

        def forward(self, x, t):
            h = self.act(self.inp(x) + self.time_mlp(t))
            return self.out(self.act(self.mid(h)))

    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(40):
        for i in torch.randperm(2000).split(100):
            t = torch.randint(0, steps, (len(i),))
            noise = draw(data[i])
            loss = F.mse_loss(model(q_sample(data[i], t, noise), t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        x = torch.randn(600, 2)
        for t in reversed(range(steps)):
            eps = model(x, torch.full((600,), t))
            x = (x - betas[t] / (1 - alphas_cumprod[t]).sqrt() * eps) / alphas[t].sqrt()
            if t:
                x = x + betas[t].sqrt() * torch.randn_like(x)
    return min(spread(x, rings(600)), 100.0)
