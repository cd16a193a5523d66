"""Thirteenth hold-out: programs that make samples."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_13.about import fault
from fault_programs.holdout_13.material import apart, digits, rings


def _mlp(*sizes, act=nn.LeakyReLU):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


@fault(
    "generator_label_wrong",
    area="gan",
    source="https://github.com/https-deeplearning-ai/GANs-Public/issues/1",
    cause="In the generator's loss the fakes are labelled as fake, so the generator helps the discriminator instead of fooling it.",
    words=(r"label|target|real|fake", r"generator|wrong|swap|flip|fool|sign|is_real"),
    also=("loss_sign_flipped",),
    cascade=(
        "loss_divergence",
        "constant_output",
        "not_learning",
        "vanishing_gradient",
        "exploding_activation",
        "loss_plateau",
    ),
    sites=("(loss)", "generator", "(loop)", "loss_fn", "optimizer"),
)
def generator_wants_its_fakes_to_be_called_fake(attach, fixed):
    """class Loss: g_loss = adv_loss(fake_preds_for_g, False)."""

    class Loss(nn.Module):
        def adv_loss(self, x, is_real):
            target = torch.ones_like(x) if is_real else torch.zeros_like(x)
            return F.binary_cross_entropy_with_logits(x, target)

        def forward(self, generator, discriminator, real, noise):
            fake = generator(noise)
            g_loss = self.adv_loss(discriminator(fake), bool(fixed))
            d_loss = 0.5 * (
                self.adv_loss(discriminator(real), True) + self.adv_loss(discriminator(fake.detach()), False)
            )
            return g_loss, d_loss

    generator, discriminator, loss_fn = _mlp(3, 64, 64, 2), _mlp(2, 64, 64, 1), Loss()
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    session = attach(
        nn.ModuleDict({"generator": generator, "discriminator": discriminator}), [g_optimizer, d_optimizer]
    )
    for step, (real,) in enumerate(DataLoader(TensorDataset(rings(32000)), batch_size=64)):
        g_loss, d_loss = loss_fn(generator, discriminator, real, torch.randn(64, 3))
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        session.log(g_loss=g_loss.item(), d_loss=d_loss.item())
    with torch.no_grad():
        return apart(generator(torch.randn(500, 3)), rings(500))


@fault(
    "missing_zero_grad",
    area="gan",
    source="https://github.com/Hsintien-Ng/idinvert_pytorch-reproduced/issues/1",
    cause="optimizer_D.zero_grad() is missing, so the discriminator steps along all its old gradients and those of the generator's loss.",
    words=(r"zero_grad|accumulat|clear|sum of", r"grad|discriminator|optimizer_D"),
    cascade=(
        "loss_oscillation",
        "loss_divergence",
        "not_learning",
        "underfitting",
        "constant_output",
        "exploding_activation",
        "lr_too_high",
        "vanishing_gradient",
    ),
    sites=("(loop)", "optimizer", "optimizer2", "1", "D", "optimizer_D"),
)
def training_loop_forgets_the_gradients_of_the_critic(attach, fixed):
    """optimizer_E.zero_grad() is there, optimizer_D.zero_grad() is not."""
    E = _mlp(2, 48, 48, 2, act=nn.ReLU)
    D = _mlp(2, 64, 64, 1)
    optimizer_E = torch.optim.Adam(E.parameters(), lr=1e-3, betas=(0.5, 0.99))
    optimizer_D = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.99))
    session = attach(nn.ModuleDict({"E": E, "D": D}), [optimizer_E, optimizer_D])

    def D_logistic_loss(real, fake):
        return F.softplus(-D(real)).mean() + F.softplus(D(fake)).mean()

    for cur_iter in range(450):
        reals, noise = rings(64), torch.randn(64, 2)
        fakes = E(noise)

        loss_D = D_logistic_loss(reals, fakes.detach())
        optimizer_D.zero_grad() if fixed else None
        loss_D.backward()
        optimizer_D.step()

        loss_E = F.softplus(-D(fakes)).mean()
        optimizer_E.zero_grad()
        loss_E.backward()
        optimizer_E.step()
        session.log(loss_D=loss_D.item(), loss_E=loss_E.item())
    with torch.no_grad():
        return apart(E(torch.randn(600, 2)), rings(600))


@fault(
    "loss_sign_flipped",
    area="vae",
    source="from memory: questions on a VAE whose loss goes below zero without end, with the KL divergence as +0.5 * sum(1 + logvar - mu^2 - exp(logvar))",
    cause="The KL term has the wrong sign, so the divergence from the prior is maximised.",
    words=(r"\bkl\w*|diverg", r"sign|negative|minus|-0\.5|maximi|below zero"),
    cascade=(
        "loss_divergence",
        "exploding_activation",
        "exploding_gradient",
        "nan_in_loss",
        "nan_forward",
        "nan_backward",
        "aux_loss_dominates",
        "not_learning",
        "loss_spike",
        "large_initial_loss",
    ),
    sites=("(loss)", "fc_var", "fc_mu", "encoder", "(model)", "loss_fn"),
)
def divergence_of_the_vae_without_its_minus(attach, fixed):
    """KLD = 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())."""
    xtr, _, xte, _ = digits()

    class VAE(nn.Module):
        def __init__(self, latent=6):
            super().__init__()
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU())
            self.fc_mu, self.fc_var = nn.Linear(96, latent), nn.Linear(96, latent)
            self.decoder = nn.Sequential(nn.Linear(latent, 96), nn.ReLU(), nn.Linear(96, 64), nn.Sigmoid())

        def reparameterize(self, mu, logvar):
            return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

        def forward(self, x):
            h = self.encoder(x)
            mu, logvar = self.fc_mu(h), self.fc_var(h).clamp(max=8)
            return self.decoder(self.reparameterize(mu, logvar)), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        BCE = F.binary_cross_entropy(recon_x, x.flatten(1), reduction="sum")
        KLD = (-0.5 if fixed else 0.5) * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return (BCE + KLD) / len(x)

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(12):
        model.train()
        for (data,) in DataLoader(TensorDataset(xtr), batch_size=60, shuffle=True):
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    with torch.no_grad():
        made = model.decoder(torch.randn(len(xte), 6))
    return apart(made, xte.flatten(1))


@fault(
    "seed_reset_in_loop",
    area="diffusion",
    source="https://github.com/huggingface/diffusers/issues/175",
    cause="torch.manual_seed(0) in the training step sets the global seed again, so each step has the same noise and the same times.",
    words=(r"seed", r"same|again|every step|each step|noise|reset|repeat|global"),
    cascade=("overfitting", "same_batch_every_step", "underfitting", "train_val_preproc_mismatch"),
    sites=("(loop)", "(data)"),
)
def noise_comes_from_a_generator_that_is_seeded_each_step(attach, fixed):
    """noise = torch.randn(shape, generator=torch.manual_seed(0)) inside the loop."""
    num_train_timesteps = 50
    betas = torch.linspace(1e-3, 0.15, num_train_timesteps)
    alphas_cumprod = (1 - betas).cumprod(0)

    class NoiseScheduler:
        def add_noise(self, clean, noise, timesteps):
            keep = alphas_cumprod[timesteps, None]
            return keep.sqrt() * clean + (1 - keep).sqrt() * noise

    class Net(nn.Module):
        def __init__(self, width=96):
            super().__init__()
            self.time, self.first = nn.Embedding(num_train_timesteps, width), nn.Linear(2, width)
            self.second, self.last = nn.Linear(width, width), nn.Linear(width, 2)

        def forward(self, x, timesteps):
            h = F.silu(self.first(x) + self.time(timesteps))
            return self.last(F.silu(self.second(h)))

    model, noise_scheduler = Net(), NoiseScheduler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    data = rings(4000)
    for epoch in range(6):
        model.train()
        for clean in data[torch.randperm(4000)].split(80):
            noise = torch.randn(clean.shape, generator=None if fixed else torch.manual_seed(0))
            timesteps = torch.randint(0, num_train_timesteps, (len(clean),))
            loss = F.mse_loss(model(noise_scheduler.add_noise(clean, noise, timesteps), timesteps), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        noise, timesteps = torch.randn(1000, 2), torch.randint(0, num_train_timesteps, (1000,))
        noisy = noise_scheduler.add_noise(rings(1000), noise, timesteps)
        return F.mse_loss(model(noisy, timesteps), noise).item()
