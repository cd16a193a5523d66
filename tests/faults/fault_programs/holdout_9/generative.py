"""Ninth hold-out: adversaries, variational encoders and diffusion."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_9.about import fault
from fault_programs.holdout_9.matter import digits, friends, rings


@fault(
    "wrong_dim_norm",
    area="gan",
    source="https://github.com/Zeleni9/pytorch-wgan/issues/40",
    cause="The norm of the gradient is taken over the channel axis alone, so the penalty drives each pixel's slope to one instead of the whole.",
    words=(r"norm|penalty", r"dim|axis|pixel|flatten|channel|per sample"),
    also=("aux_loss_dominates",),
    cascade=("exploding_gradient", "exploding_activation", "loss_oscillation", "loss_divergence"),
    sites=("(loss)", "(loop)", "loss_fn", "critic", "D"),
)
def penalty_for_each_pixel(attach, fixed):
    """((gradients.norm(2, dim=1) - 1) ** 2).mean() of (batch, 1, 8, 8)."""
    xtr, _, _, _ = digits()
    xtr = 2 * xtr - 1

    class WGAN_GP(nn.Module):
        def __init__(self):
            super().__init__()
            self.G = nn.Sequential(
                nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, 64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8))
            )
            self.D = nn.Sequential(
                nn.Conv2d(1, 16, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
                nn.Linear(128, 1),
            )  # fmt: skip

        def slopes(self, real, fake):
            eta = torch.rand(len(real), 1, 1, 1)
            interpolated = (eta * real + (1 - eta) * fake).requires_grad_(True)
            prob = self.D(interpolated)
            return torch.autograd.grad(prob, interpolated, torch.ones_like(prob), create_graph=True, retain_graph=True)[
                0
            ]

        def gradient_penalty(self, real, fake):
            gradients = self.slopes(real, fake)
            gradients = gradients.flatten(1) if fixed else gradients
            return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * 10

    net = WGAN_GP()
    d_optimizer = torch.optim.Adam(net.D.parameters(), lr=5e-4, betas=(0.5, 0.999))
    g_optimizer = torch.optim.Adam(net.G.parameters(), lr=5e-4, betas=(0.5, 0.999))
    session = attach(net, [d_optimizer, g_optimizer])
    for _g_iter in range(100):
        for _ in range(3):
            real = xtr[torch.randint(0, len(xtr), (32,))]
            with torch.no_grad():
                fake = net.G(torch.randn(32, 16))
            penalty = net.gradient_penalty(real, fake)
            d_loss = net.D(fake).mean() - net.D(real).mean()
            d_optimizer.zero_grad()
            (d_loss + penalty).backward()
            d_optimizer.step()
        g_loss = -net.D(net.G(torch.randn(32, 16))).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        session.log(d_loss=d_loss, g_loss=g_loss, penalty=penalty, wasserstein=-d_loss)
    gradients = net.slopes(xtr[:200], net.G(torch.randn(200, 16)).detach())
    return float((gradients.flatten(1).norm(2, dim=1) - 1).abs().mean())


class Denoiser(nn.Module):
    def __init__(self, steps, size=2, width=96):
        super().__init__()
        self.time = nn.Embedding(steps, 24)
        self.net = nn.Sequential(
            nn.Linear(24 + size, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, size)
        )

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))


@fault(
    "variance_as_deviation",
    area="diffusion",
    source="https://github.com/Ryota-Kawamura/How-Diffusion-Models-Work/issues/1",
    cause="Noise is added with the factor 1 - ab instead of its root, so samples are less noisy than the schedule says.",
    words=(r"sqrt|root|variance|1 ?- ?a", r"noise|schedule"),
    also=("schedule_not_cumulative",),
    cascade=("underfitting", "loss_plateau"),
    sites=("(data)", "(loop)", "(loss)"),
)
def perturbs_without_the_root(attach, fixed):
    """ab_t.sqrt() * x + (1 - ab_t) * noise."""
    timesteps = 40
    b_t = torch.linspace(1e-3, 0.2, timesteps)
    ab_t = torch.cumprod(1 - b_t, 0)

    def perturb_input(x, t, noise):
        return ab_t.sqrt()[t, None] * x + ((1 - ab_t[t, None]).sqrt() if fixed else 1 - ab_t[t, None]) * noise

    lift = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(940)))[0][:2]
    nn_model = Denoiser(timesteps, size=8)
    optim = torch.optim.Adam(nn_model.parameters(), lr=3e-3)
    session = attach(nn_model, optim)
    data = rings(2000, seed=941) @ lift
    nn_model.train()
    for ep in range(30):
        optim.param_groups[0]["lr"] = 3e-3 * (1 - ep / 30)
        for rows in torch.randperm(2000).split(100):
            optim.zero_grad()
            x = data[rows]
            noise = torch.randn_like(x)
            t = torch.randint(0, timesteps, (len(x),))
            pred_noise = nn_model(perturb_input(x, t, noise), t)
            loss = F.mse_loss(pred_noise, noise)
            loss.backward()
            optim.step()
            session.log(loss=loss)
    nn_model.eval()
    with torch.no_grad():
        clean = rings(2000, seed=942) @ lift
        t, noise = torch.randint(5, 40, (2000,)), torch.randn(2000, 8)
        noised = ab_t.sqrt()[t, None] * clean + (1 - ab_t).sqrt()[t, None] * noise
        return float(F.mse_loss(nn_model(noised, t), noise))


@fault(
    "wrong_formula",
    area="graphs",
    source="https://github.com/DaehanKim/vgae_pytorch/issues/2",
    cause="The divergence takes exp(logstd) for the variance where it should be squared, so the prior it pulls to is wider than one.",
    words=(r"kl|divergence|prior", r"logstd|exp|squar|varian|std"),
    also=("variance_as_deviation",),
    cascade=("aux_loss_dominates",),
    sites=("(loss)", "(loop)"),
)
def divergence_of_a_deviation(attach, fixed):
    """1 + 2 * logstd - mean ** 2 - exp(logstd)."""
    x, adjacency, _ = friends()
    labels = (adjacency > 0).float()

    class VGAE(nn.Module):
        def __init__(self, inside, hidden, outside):
            super().__init__()
            self.base_gcn = nn.Linear(inside, hidden, bias=False)
            self.gcn_mean = nn.Linear(hidden, outside, bias=False)
            self.gcn_logstddev = nn.Linear(hidden, outside, bias=False)

        def encode(self, x, adj):
            hidden = F.relu(adj @ self.base_gcn(x))
            self.mean = adj @ self.gcn_mean(hidden)
            self.logstd = adj @ self.gcn_logstddev(hidden)
            return self.mean + torch.exp(self.logstd) * torch.randn_like(self.mean)

        def forward(self, x, adj):
            z = self.encode(x, adj)
            return z @ z.T / 4

    model = VGAE(x.shape[1], 32, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    pos_weight = (labels.numel() - labels.sum()) / labels.sum()
    for epoch in range(150):
        A_pred = model(x, adjacency)
        recon = F.binary_cross_entropy_with_logits(A_pred, labels, pos_weight=pos_weight) * 0.5
        var = torch.exp(model.logstd) ** 2 if fixed else torch.exp(model.logstd)
        kl_divergence = 0.5 * (1 + 2 * model.logstd - model.mean**2 - var).sum(1).mean()
        loss = recon - kl_divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(epoch=epoch, train_loss=loss, kl=kl_divergence)
    with torch.no_grad():
        z = model.encode(x, adjacency)
    return abs(float(z.std(0).mean()) - 1)


@fault(
    "aux_loss_dominates",
    area="vae",
    source="from memory: discuss.pytorch.org, VAE threads where all reconstructions look like the mean picture",
    cause="The reconstruction is a mean over all pixels and the divergence a sum, so the divergence outweighs it and the code says nothing.",
    words=(r"kl|divergence", r"mean|sum|reduction|dominat|weight|scale|collapse"),
    also=("wrong_loss_reduction",),
    cascade=("constant_output", "loss_plateau", "underfitting", "not_learning", "input_ignored"),
    sites=("(loss)", "loss_fn", "(loop)"),
)
def mean_of_pixels_and_sum_of_codes(attach, fixed):
    """F.mse_loss(recon, x) + KLD.sum(1).mean()."""
    xtr, _, xte, _ = digits()

    class VAE(nn.Module):
        def __init__(self, zdim=8):
            super().__init__()
            self.fc1 = nn.Linear(64, 96)
            self.fc21 = nn.Linear(96, zdim)
            self.fc22 = nn.Linear(96, zdim)
            self.fc3 = nn.Linear(zdim, 96)
            self.fc4 = nn.Linear(96, 64)

        def encode(self, x):
            h1 = F.relu(self.fc1(x))
            return self.fc21(h1), self.fc22(h1)

        def reparameterize(self, mu, logvar):
            return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

        def decode(self, z):
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 64))
            return self.decode(self.reparameterize(mu, logvar)), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        recon = (
            F.mse_loss(recon_x, x.view(-1, 64), reduction="sum") * 10 / len(x)
            if fixed
            else F.mse_loss(recon_x, x.view(-1, 64))
        )
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return recon + KLD, recon, KLD

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(20):
        train_loss = 0
        for rows in torch.randperm(1000).split(50):
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(xtr[rows])
            loss, recon, KLD = loss_function(recon_batch, xtr[rows], mu, logvar)
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
            session.log(recon=recon, kld=KLD)
        session.log(epoch=epoch, train_loss=train_loss / 20)
    with torch.no_grad():
        mu, _ = model.encode(xte.view(-1, 64))
        return float(F.mse_loss(model.decode(mu), xte.view(-1, 64)) / xte.var(0).mean())


@fault(
    "wrong_columns_read",
    area="recommender",
    source="https://github.com/kaist-dmlab/TRAP/pull/1",
    cause="The logarithm of the variance is read from the same columns as the mean.",
    words=(r"logvar|variance", r"mu|mean|same|column|slice|index"),
    also=("unused_parameters", "frozen_by_mistake"),
    cascade=("aux_loss_dominates", "underfitting", "loss_plateau"),
    sites=("(model)", "q_layers", "q_layers.1"),
)
def variance_from_the_columns_of_the_mean(attach, fixed):
    """mu_q = h[:, :q]; logvar_q = h[:, :q]."""
    made = torch.Generator().manual_seed(945)
    taste, kinds = torch.randn(700, 4, generator=made), torch.randn(4, 60, generator=made)
    clicks = (torch.rand(700, 60, generator=made) < torch.sigmoid(2.0 * taste @ kinds - 1.5)).float()

    class MultiVAE(nn.Module):
        def __init__(self, items=60, q=8):
            super().__init__()
            self.q = q
            self.q_layers = nn.ModuleList([nn.Linear(items, 64), nn.Linear(64, 2 * q)])
            self.p_layers = nn.ModuleList([nn.Linear(q, 64), nn.Linear(64, items)])

        def forward(self, x):
            h = F.dropout(F.normalize(x), 0.2, self.training)
            h = self.q_layers[1](torch.tanh(self.q_layers[0](h)))
            mu_q = h[:, : self.q]
            logvar_q = h[:, self.q :] if fixed else h[:, : self.q]
            z = mu_q + torch.randn_like(mu_q) * torch.exp(0.5 * logvar_q) * self.training
            kl = 0.5 * (-logvar_q + logvar_q.exp() + mu_q**2 - 1).sum(1).mean()
            return self.p_layers[1](torch.tanh(self.p_layers[0](z))), kl

    model = MultiVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(40):
        model.train()
        for rows in torch.randperm(600).split(50):
            x = clicks[rows]
            logits, kl = model(x)
            neg_ll = -(F.log_softmax(logits, 1) * x).sum(1).mean()
            loss = neg_ll + min(0.5, 0.05 * epoch) * kl
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss, neg_ll=neg_ll, kl=kl)
    model.eval()
    with torch.no_grad():
        x = clicks[600:]
        logits, kl = model(x)
        return float(-(F.log_softmax(logits, 1) * x).sum(1).mean() + 0.5 * kl)
