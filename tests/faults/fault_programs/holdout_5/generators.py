"""Fifth hold-out: networks that make things."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_5.about import fault
from fault_programs.holdout_5.materials import batches, digits, ring


def mlp(*widths, act=nn.ReLU):
    layers = []
    for a, b in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def off_the_ring(points):
    """Return how far points lie from the ring's radius, and how unevenly they spread."""
    radius = points.norm(dim=1)
    return float((radius - 1.5).abs().mean() + points.mean(0).abs().max())


@fault(
    "graph_break_detach",
    area="gan",
    source="https://github.com/nikhilsinghmus/image2reverb/issues/37",
    cause="In the generator's step the fake is detached before the discriminator, so the adversarial term cannot reach the generator.",
    words=(r"detach", r"no gradient", r"(does not|never) reach"),
    cascade=(
        "params_not_in_optimizer",
        "unused_parameters",
        "vanishing_gradient",
        "not_learning",
        "aux_loss_dominates",
    ),
    sites=("(loop)", "(loss)", "generator", "G", "(function)"),
)
def detaches_for_the_generator_too(attach, fixed):
    """D(fake.detach()) in both steps; only a small regulariser is left."""
    real = torch.tensor([2.0, -1.0]) + 0.4 * torch.randn(2000, 2)
    G, D = mlp(4, 48, 48, 2), mlp(2, 48, 48, 1, act=lambda: nn.LeakyReLU(0.2))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    session = attach({"G": G, "D": D}, [opt_g, opt_d])
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    for (x,) in batches(real, size=64, epochs=16):
        fake = G(torch.randn(64, 4))
        d_loss = F.binary_cross_entropy_with_logits(D(x), ones) + F.binary_cross_entropy_with_logits(
            D(fake.detach()), zeros
        )
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
        shown = fake if fixed else fake.detach()
        g_loss = F.binary_cross_entropy_with_logits(D(shown), ones) + 0.01 * fake.pow(2).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        session.log(d_loss=d_loss, g_loss=g_loss)
    made = G(torch.randn(500, 4)).detach()
    return float((made.mean(0) - real.mean(0)).norm())


@fault(
    "params_not_in_optimizer",
    area="gan",
    source="from memory: copy-paste in GAN scripts, both optimizers built over the discriminator",
    cause="The generator's optimizer was built over the discriminator's parameters.",
    words=(r"(not|missing|no).{0,30}optimizer", r"optimizer.*(wrong|other model|not own)"),
    also=("duplicate_param_in_groups", "stale_params_in_optimizer", "frozen_by_mistake"),
    cascade=("not_learning", "step_not_called"),
    sites=("optimizer", "generator", "(loop)"),
)
def both_optimizers_own_the_discriminator(attach, fixed):
    """optimizer_G = Adam(discriminator.parameters())."""
    x, *_ = digits()
    x = x.flatten(1) * 2 - 1

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(
                nn.Linear(16, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.Tanh()
            )

        def forward(self, z):
            return self.model(z)

    generator = Generator()
    discriminator = mlp(64, 64, 1, act=lambda: nn.LeakyReLU(0.2))
    adversarial_loss = nn.BCEWithLogitsLoss()
    owned = generator if fixed else discriminator
    optimizer_G = torch.optim.Adam(owned.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    attach(nn.ModuleDict({"generator": generator, "discriminator": discriminator}), [optimizer_G, optimizer_D])
    for (imgs,) in batches(x, size=64, epochs=20):
        valid, fake = torch.ones(64, 1), torch.zeros(64, 1)
        optimizer_G.zero_grad()
        gen_imgs = generator(torch.randn(64, 16))
        g_loss = adversarial_loss(discriminator(gen_imgs), valid)
        g_loss.backward()
        optimizer_G.step()
        optimizer_D.zero_grad()
        d_loss = (
            adversarial_loss(discriminator(imgs), valid) + adversarial_loss(discriminator(gen_imgs.detach()), fake)
        ) / 2
        d_loss.backward()
        optimizer_D.step()
    generator.eval()
    with torch.no_grad():
        made = generator(torch.randn(500, 16))
    return float((made.mean(0) - x.mean(0)).abs().mean())


class VAE(nn.Module):
    def __init__(self, latent=6, squash=False):
        super().__init__()
        self.enc = nn.Linear(64, 64)
        self.mu, self.logvar = nn.Linear(64, latent), nn.Linear(64, latent)
        self.dec = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64))
        self.squash = squash

    def forward(self, x):
        h = F.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        out = self.dec(z)
        return (out.sigmoid() if self.squash else out), mu, logvar


@fault(
    "wrong_loss_reduction",
    area="vae",
    source="https://github.com/AppliedDataSciencePartners/WorldModels/issues/12",
    cause="The reconstruction is averaged over all pixels and the KL term summed over the batch, so the KL term wins.",
    words=(r"reduction", r"\bkl\b", r"(term|aux\w*).*(dominat|outweigh)", r"mean.*sum|sum.*mean", r"posterior"),
    also=("aux_loss_dominates",),
    cascade=("constant_output", "underfitting", "loss_plateau", "not_learning", "vanishing_gradient"),
    sites=("(loss)", "loss_fn", "mu", "logvar"),
)
def mean_of_pixels_and_sum_of_kl(attach, fixed):
    """Two reductions in one sum."""
    x, _, test, _ = digits()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    how = "sum" if fixed else "mean"

    def loss_function(recon, x, mu, logvar):
        bce = F.binary_cross_entropy_with_logits(recon, x, reduction=how)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return bce + kld

    for (img,) in batches(x.flatten(1), size=48, epochs=25):
        recon, mu, logvar = model(img)
        loss = loss_function(recon, img, mu, logvar)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        flat = test.flatten(1)
        return float(F.mse_loss(model(flat)[0].sigmoid(), flat) / flat.var(0).mean())


@fault(
    "double_sigmoid",
    area="vae",
    source="from memory: discuss.pytorch.org, 'blurry VAE' (sigmoid in the decoder and BCEWithLogitsLoss)",
    cause="The decoder ends with a sigmoid and BCEWithLogitsLoss applies another one.",
    words=(r"(twice|double|second|already|another).*sigmoid", r"sigmoid.*(twice|again|already)"),
    also=("double_normalised",),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("(loss)", "loss_fn", "dec", "(model)"),
)
def decoder_ends_with_a_sigmoid(attach, fixed):
    """Sigmoid twice."""
    x, _, test, _ = digits()
    vae = VAE(squash=not fixed)
    opt = torch.optim.Adam(vae.parameters(), lr=3e-3)
    run = attach(vae, opt)
    criterion = nn.BCEWithLogitsLoss(reduction="sum")
    for epoch in range(12):
        total = 0.0
        for (img,) in batches(x.flatten(1), size=48):
            recon, mu, logvar = vae(img)
            loss = (criterion(recon, img) - 0.3 * (1 + logvar - mu**2 - logvar.exp()).sum()) / len(img)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        run.log(elbo=total)
    with torch.no_grad():
        flat = test.flatten(1)
        out = vae(flat)[0]
        out = out if vae.squash else out.sigmoid()
        return float(F.mse_loss(out, flat) / flat.var(0).mean())


def schedule(steps=40):
    betas = torch.linspace(1e-3, 0.2, steps)
    alphas = 1 - betas
    return betas, alphas, alphas.cumprod(0)


class Denoiser(nn.Module):
    def __init__(self, timed=True):
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 96))
        self.inp, self.mid, self.out = nn.Linear(2, 96), nn.Linear(96, 96), nn.Linear(96, 2)
        self.timed = timed

    def forward(self, x, t):
        angles = t[:, None].float() / 40 * torch.tensor([1.0, 2.0, 4.0, 8.0]) * 3.14
        emb = self.time_mlp(torch.cat([angles.sin(), angles.cos()], 1))
        h = self.inp(x)
        if self.timed:
            h = h + emb
        return self.out(F.silu(self.mid(F.silu(h))))


@torch.no_grad()
def sample(model, count=400):
    betas, alphas, bars = schedule()
    x = torch.randn(count, 2)
    for t in reversed(range(40)):
        eps = model(x, torch.full((count,), t))
        x = (x - betas[t] / (1 - bars[t]).sqrt() * eps) / alphas[t].sqrt()
        if t:
            x = x + betas[t].sqrt() * torch.randn_like(x)
    return x


@fault(
    "schedule_not_cumulative",
    area="diffusion",
    source="https://github.com/huggingface/diffusers/pull/26 (alphas_cumprod against alphas)",
    cause="The forward process uses alphas instead of their cumulative product, so training sees almost no noise.",
    words=(r"cumul", r"noise (level|schedule)"),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("(data)", "(loop)", "(loss)"),
)
def noise_of_single_alphas(attach, fixed):
    """alphas[t] where alphas_cumprod[t] was meant."""
    data = ring()
    _, alphas, alphas_cumprod = schedule()
    level = alphas_cumprod if fixed else alphas
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)

    def q_sample(x0, t, noise):
        a = level[t][:, None]
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    for (x0,) in batches(data, size=100, epochs=40):
        t = torch.randint(0, 40, (len(x0),))
        noise = torch.randn_like(x0)
        loss = F.mse_loss(model(q_sample(x0, t, noise), t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        t, noise = torch.randint(0, 40, (2000,)), torch.randn(2000, 2)
        a = alphas_cumprod[t][:, None]
        return float(F.mse_loss(model(a.sqrt() * data + (1 - a).sqrt() * noise, t), noise))


@fault(
    "target_unrelated",
    area="diffusion",
    source="from memory: DDPM re-implementations that draw noise inside q_sample and again for the target",
    cause="The noise that is predicted is drawn anew and is not the noise that was added.",
    words=(
        r"target.*(unrelated|independent|not depend|not related|no relation)",
        r"noise.*(not|drawn anew|other|unrelated)",
        r"no information",
        r"shuffle.?mismatch",
    ),
    also=("label_shuffle_mismatch",),
    cascade=("not_learning", "constant_output", "loss_plateau", "underfitting"),
    sites=("(data)", "(loss)", "loss_fn", "(loop)"),
)
def predicts_noise_that_was_not_added(attach, fixed):
    """randn_like twice."""
    data = ring()
    *_, bars = schedule()
    net = Denoiser()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
    attach(net, opt)

    def add_noise(x, t):
        eps = torch.randn_like(x)
        return bars[t, None].sqrt() * x + (1 - bars[t, None]).sqrt() * eps, eps

    for _ in range(50):
        for (x,) in batches(data, size=100):
            t = torch.randint(40, (100,))
            noisy, eps = add_noise(x, t)
            goal = eps if fixed else torch.randn_like(x)
            opt.zero_grad()
            loss = (net(noisy, t) - goal).square().mean()
            loss.backward()
            opt.step()
    return min(off_the_ring(sample(net)), 50.0)


@fault(
    "unused_parameters",
    area="diffusion",
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/19138 (an embedding is computed and not added; here that of time)",
    cause="The time embedding is computed and never added to the hidden state: its layers get no gradient.",
    words=(r"unused|not used|no gradient|ignored|no effect|without effect",),
    also=("graph_break_detach",),
    cascade=("underfitting", "loss_plateau"),
    sites=("time_mlp",),
)
def computes_a_time_embedding_for_nothing(attach, fixed):
    """emb is made and forgotten."""
    data = ring()
    *_, bars = schedule()
    model = Denoiser(timed=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for step, (x,) in enumerate(batches(data, size=100, epochs=60)):
        t = torch.randint(40, (100,))
        eps = torch.randn_like(x)
        a = bars[t].unsqueeze(1)
        loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * eps, t), eps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            session.log(mse=loss)
    return min(off_the_ring(sample(model)), 50.0)


@fault(
    "graph_break_detach",
    area="vae",
    source="https://github.com/Biohub/esm/issues/92 (decoding from indices gives the encoder no gradient)",
    cause="The straight-through step is missing: the decoder gets code vectors by index, so the encoder has no gradient from the reconstruction.",
    words=(r"straight.?through", r"no gradient", r"detach", r"argmin|argmax|by index", r"(does not|never) reach"),
    also=("unused_parameters", "frozen_by_mistake"),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("encoder", "enc", "(model)", "(function)", "(loss)"),
)
def quantises_without_straight_through(attach, fixed):
    """A VQ-VAE whose encoder only hears the commitment term."""
    x, _, test, _ = digits()

    class VQVAE(nn.Module):
        def __init__(self, codes=32, width=8):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4 * width))
            self.codebook = nn.Embedding(codes, width)
            self.decoder = nn.Sequential(nn.Linear(4 * width, 64), nn.ReLU(), nn.Linear(64, 64))
            self.width = width

        def forward(self, img):
            z_e = self.encoder(img).view(-1, self.width)
            index = torch.cdist(z_e, self.codebook.weight).argmin(1)
            z_q = self.codebook(index)
            loss = F.mse_loss(z_q, z_e.detach()) + 0.02 * F.mse_loss(z_e, z_q.detach())
            passed = z_e + (z_q - z_e).detach() if fixed else z_q
            return self.decoder(passed.view(len(img), -1)), loss

    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for (img,) in batches(x.flatten(1), size=48, epochs=18):
        recon, vq_loss = model(img)
        loss = F.mse_loss(recon, img) + vq_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss, vq=vq_loss)
    with torch.no_grad():
        flat = test.flatten(1)
        return float(F.mse_loss(model(flat)[0], flat) / flat.var(0).mean())


@fault(
    "target_is_input",
    area="vae",
    source="from memory: stackoverflow.com, denoising autoencoder that is trained to give back the noisy picture",
    cause="The denoising autoencoder is compared with its noisy input instead of the clean picture.",
    words=(r"target\w* (is|are|equal\w*|cop\w+|repeat\w*).{0,30}input", r"\bclean\b", r"leak", r"identity|copies"),
    also=("data_leakage", "future_leak"),
    cascade=("underfitting", "overfitting", "loss_plateau"),
    sites=("(loss)", "loss_fn", "(data)"),
)
def denoiser_compared_with_noise(attach, fixed):
    """criterion(out, noisy)."""
    x, _, test, _ = digits()
    ae = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = torch.optim.Adam(ae.parameters(), lr=2e-3)
    session = attach(ae, optimizer)
    for epoch in range(20):
        for (clean,) in batches(x, size=48):
            noisy = clean + 0.5 * torch.randn_like(clean)
            goal = clean if fixed else noisy
            loss = F.mse_loss(ae(noisy), goal.flatten(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(
            F.mse_loss(ae(test + 0.5 * torch.randn_like(test)), test.flatten(1)) / test.flatten(1).var(0).mean()
        )
