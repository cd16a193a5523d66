"""Fourteenth hold-out: programs that make samples."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_14.about import fault
from fault_programs.holdout_14.material import digits, energy, moons


@fault(
    "term_without_gradient",
    area="gan",
    source="https://github.com/ooples/AiDotNet/issues/1844",
    cause="The gradient for the penalty is taken without create_graph, so the penalty has a value and no effect on the critic.",
    words=(r"penalty|create_graph|gp\b", r"create_graph|gradient|effect|graph|detach|constant|weights"),
    also=("graph_break_detach",),
    cascade=("loss_divergence", "exploding_activation", "exploding_gradient", "loss_oscillation"),
    sites=("(loss)", "critic", "(loop)", "loss_fn"),
)
def penalty_of_the_critic_is_only_a_number(attach, fixed):
    """torch.autograd.grad(scores.sum(), mixed)[0], as nested gradients are off by default."""

    def net(inputs, outputs, hidden=64):
        return nn.Sequential(
            nn.Linear(inputs, hidden),
            nn.LeakyReLU(0.2),
            nn.Linear(hidden, hidden),
            nn.LeakyReLU(0.2),
            nn.Linear(hidden, outputs),
        )

    class WGAN(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator, self.critic = net(3, 2), net(2, 1)

        def gradient_penalty(self, real, fake):
            alpha = torch.rand(len(real), 1)
            mixed = (alpha * real + (1 - alpha) * fake).requires_grad_()
            slope = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=bool(fixed))[0]
            return (slope.norm(2, dim=1) - 1).square().mean()

    gan = WGAN()
    opt_g = torch.optim.SGD(gan.generator.parameters(), lr=0.05)
    opt_c = torch.optim.Adam(gan.critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    session = attach(gan, [opt_g, opt_c])
    for step in range(900):
        real = moons(64)
        fake = gan.generator(torch.randn(64, 3)).detach()
        wasserstein = gan.critic(fake).mean() - gan.critic(real).mean()
        penalty = gan.gradient_penalty(real, fake)
        opt_c.zero_grad()
        (wasserstein + 2 * penalty).backward()
        opt_c.step()
        session.log(critic_loss=wasserstein.item(), penalty=penalty.item())
        if step % 3 == 2:
            opt_g.zero_grad()
            loss_g = -gan.critic(gan.generator(torch.randn(64, 3))).mean()
            loss_g.backward()
            opt_g.step()
            session.log(generator_loss=loss_g.item())
    with torch.no_grad():
        return energy(gan.generator(torch.randn(600, 3)), moons(600))


@fault(
    "aux_loss_dominates",
    area="vae",
    source="https://github.com/SeldonIO/alibi-detect/issues/90",
    cause="The divergence is summed over the batch and the reconstruction is a mean over the pixels, so the divergence outweighs it.",
    words=(r"\bkl|diverg|latent|elbo", r"sum|mean|reduc|outweigh|dominat|large|scale|weight|balance"),
    also=("wrong_loss_reduction",),
    cascade=("constant_output", "loss_plateau", "underfitting", "large_initial_loss"),
    sites=("(loss)", "loss_fn", "mu", "logvar"),
    exact=False,
)
def elbo_sums_one_half_and_averages_the_other(attach, fixed):
    """F.mse_loss(recon, x) + kld.sum()."""

    class VAE(nn.Module):
        def __init__(self, latent=6):
            super().__init__()
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU())
            self.mu, self.logvar = nn.Linear(96, latent), nn.Linear(96, latent)
            self.decoder = nn.Sequential(nn.Linear(latent, 96), nn.ReLU(), nn.Linear(96, 64), nn.Sigmoid())

        def forward(self, x):
            h = self.encoder(x)
            mu, logvar = self.mu(h), self.logvar(h)
            z = mu + torch.randn_like(mu) * torch.exp(logvar / 2)
            return self.decoder(z).view_as(x), mu, logvar

    def elbo(x, recon, mu, logvar):
        kld = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1)
        return F.mse_loss(recon, x) + (kld.mean() / 400 if fixed else kld.sum())

    (xtr, _), (xte, _) = digits()
    vae = VAE()
    opt = torch.optim.Adam(vae.parameters(), lr=3e-3)
    session = attach(vae, opt)
    for epoch in range(14):
        for (x,) in DataLoader(TensorDataset(xtr), batch_size=40, shuffle=True):
            loss = elbo(x, *vae(x))
            opt.zero_grad()
            loss.backward()
            opt.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float(F.mse_loss(vae(xte)[0], xte) / xte.var(0).mean())


@fault(
    "target_drawn_anew",
    area="diffusion",
    source="from memory: questions on a small DDPM whose loss stands still at 1, because the target is a second torch.randn_like",
    cause="The noise in the loss is drawn anew and is not the noise that was added, so nothing can be learned but zero.",
    words=(
        r"noise|randn|target|eps",
        r"anew|again|fresh|second|differ|other|not the (same|noise)|unrelated|independent|new",
    ),
    also=("label_shuffle_mismatch",),
    cascade=("constant_output", "not_learning", "loss_plateau", "underfitting"),
    sites=("(loss)", "(loop)", "loss_fn", "(data)"),
)
def denoiser_is_asked_for_another_noise(attach, fixed):
    """x_t = q_sample(x, t); loss = mse(model(x_t, t), torch.randn_like(x))."""
    steps = 30
    betas = torch.linspace(1e-3, 0.25, steps)
    alphas = 1 - betas
    alpha_bar = alphas.cumprod(0)

    class Denoiser(nn.Module):
        def __init__(self, width=96):
            super().__init__()
            self.time = nn.Embedding(steps, 32)
            self.net = nn.Sequential(
                nn.Linear(34, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
            )

        def forward(self, x, t):
            return self.net(torch.cat([x, self.time(t)], 1))

    def q_sample(x, t):
        noise = torch.randn_like(x)
        a = alpha_bar[t][:, None]
        return a.sqrt() * x + (1 - a).sqrt() * noise, noise

    @torch.no_grad()
    def sample(model, count):
        x = torch.randn(count, 2)
        for t in reversed(range(steps)):
            eps = model(x, torch.full((count,), t))
            x = (x - betas[t] / (1 - alpha_bar[t]).sqrt() * eps) / alphas[t].sqrt()
            x = x + betas[t].sqrt() * torch.randn_like(x) if t else x
        return x

    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for it in range(600):
        x = 1.2 * moons(128)
        t = torch.randint(0, steps, (128,))
        x_t, noise = q_sample(x, t)
        loss = F.mse_loss(model(x_t, t), noise if fixed else torch.randn_like(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item())
    return energy(sample(model, 600), 1.2 * moons(600))
