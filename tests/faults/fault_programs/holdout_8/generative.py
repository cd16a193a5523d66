"""Eighth hold-out: what makes pictures and points, and adapters on top of what was trained before."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import MultiStepLR

from fault_programs.holdout_8.about import fault
from fault_programs.holdout_8.matter import draw, gap, houses, mistakes, moons, scans


def stack(*sizes, act=nn.ReLU, last=None):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    layers.pop()
    return nn.Sequential(*layers, *([last] if last else []))


class GAN:
    """A class around both nets, as in a collection of papers."""

    def __init__(self, points, clear):
        self.points, self.clear = points, clear
        self.netG, self.netD = stack(4, 48, 48, 2), stack(2, 48, 48, 1)
        self.optimizerG = torch.optim.Adam(self.netG.parameters(), lr=1e-3, betas=(0.5, 0.99))
        self.optimizerD = torch.optim.Adam(self.netD.parameters(), lr=1e-3, betas=(0.5, 0.99))

    def step(self, real):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        self.clear()
        err_real = F.binary_cross_entropy_with_logits(self.netD(real), ones)
        err_real.backward()
        fake = self.netG(torch.randn(len(real), 4))
        err_fake = F.binary_cross_entropy_with_logits(self.netD(fake.detach()), zeros)
        err_fake.backward()
        self.optimizerD.step()
        self.netG.zero_grad()
        err_g = F.binary_cross_entropy_with_logits(self.netD(fake), ones)
        err_g.backward()
        self.optimizerG.step()
        return err_real + err_fake, err_g


@fault(
    "missing_zero_grad",
    area="gan",
    source="https://github.com/Adversarial-Deep-Learning/code-soup/issues/69",
    cause="step() never clears the discriminator's gradients, so those of all steps, the generator's too, add up.",
    words=(r"zero_grad|not cleared|accumulat",),
    cascade=(
        "loss_divergence",
        "loss_oscillation",
        "exploding_gradient",
        "exploding_activation",
        "constant_output",
        "loss_spike",
        "saturated_activation",
    ),
    sites=("optimizer", "netD", "(loop)", "D"),
)
def discriminator_is_never_cleared(attach, fixed):
    """self.discriminator.zero_grad() is missing."""
    data = moons()
    gan = GAN(data, clear=lambda: None)
    both = nn.ModuleDict({"netG": gan.netG, "netD": gan.netD})
    if fixed:
        gan.clear = gan.netD.zero_grad
    session = attach(both, gan.optimizerD)
    for step, (real,) in enumerate(draw(data, size=100, epochs=22)):
        loss_d, loss_g = gan.step(real)
        session.log(errD=loss_d, errG=loss_g)
    with torch.no_grad():
        return min(gap(gan.netG(torch.randn(500, 4)), data[:500]), 10.0)


@fault(
    "schedule_of_another_optimizer",
    area="super-resolution gan",
    source="https://github.com/Lornatang/ESRGAN-PyTorch/issues/39",
    cause="Both schedulers are made from the generator's optimizer, so its rate falls twice as fast and the discriminator's never.",
    words=(r"schedul", r"(discriminator|second|other).*(rate|optimi[sz]er)|twice"),
    also=("scheduler_never_called", "lr_schedule_collapse"),
    cascade=("lr_too_low", "loss_oscillation", "underfitting"),
    sites=("scheduler", "optimizer", "(loop)"),
    onset=10,
)
def both_schedules_turn_down_the_generator(attach, fixed):
    """d_scheduler = MultiStepLR(g_optimizer, ...)."""
    xtr, _, xte, _ = scans()
    up = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(24, 4, 1),
        nn.PixelShuffle(2),
    )
    judge = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    nets = nn.ModuleDict({"g_model": up, "d_model": judge})
    g_optimizer = torch.optim.Adam(up.parameters(), lr=2e-3)
    d_optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3)
    milestones = [20, 40, 60, 80, 100, 120]
    g_scheduler = MultiStepLR(g_optimizer, milestones, gamma=0.6)
    d_scheduler = MultiStepLR(d_optimizer if fixed else g_optimizer, milestones, gamma=0.6)
    session = attach(nets, g_optimizer)
    for step, (hr,) in enumerate(draw(xtr, size=40, epochs=6)):
        sr = up(F.avg_pool2d(hr, 2))
        d_loss = F.softplus(-judge(hr)).mean() + F.softplus(judge(sr.detach())).mean()
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        pixel = F.mse_loss(sr, hr)
        g_loss = pixel + 1e-3 * F.softplus(-judge(sr)).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        g_scheduler.step()
        d_scheduler.step()
        session.log(pixel=pixel, d_loss=d_loss)
    with torch.no_grad():
        error = float(F.mse_loss(up(F.avg_pool2d(xte, 2)), xte))
    spread = d_optimizer.param_groups[0]["lr"] / g_optimizer.param_groups[0]["lr"]
    return 10 * error + min(spread, 10.0) / 10


class EventVAE(nn.Module):
    """An autoencoder of points of which some are padding."""

    def __init__(self, dim):
        super().__init__()
        self.enc, self.dec, self.dim = stack(2, 48, 8), stack(4, 48, 2), dim

    def loss(self, x, real):
        mean, log_var = self.enc(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        rec_loss = (self.dec(z) - x).pow(2).sum(-1) * real
        terms = 1 + log_var - mean.pow(2) - log_var.exp()
        kl_loss = -0.5 * (torch.sum(terms, dim=self.dim) if self.dim else torch.sum(terms)) * real
        return rec_loss.sum() / real.sum(), kl_loss.sum() / real.sum()


@fault(
    "wrong_loss_reduction",
    area="vae",
    source="https://github.com/EDAPINENUT/GNTPP/issues/4",
    cause="torch.sum without dim makes the divergence one number for the whole batch, which is then counted for each event.",
    words=(r"\bdim\b|sum", r"\bkl\b|divergence"),
    also=("aux_loss_dominates", "mixed_reductions", "broadcast_loss"),
    cascade=("loss_plateau", "constant_output", "underfitting", "input_ignored"),
    sites=("(loss)", "loss_fn", "(model)"),
)
def divergence_without_a_dimension(attach, fixed):
    """(-0.5 * torch.sum(...)) * seq_onehots."""
    data = moons()
    model = EventVAE(dim=-1 if fixed else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for step in range(250):
        x = data[torch.randint(0, 1000, (16, 6))]
        real = (torch.arange(6) < torch.randint(2, 7, (16, 1))).float()
        rec_loss, kl_loss = model.loss(x, real)
        loss = rec_loss + 0.05 * kl_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(rec_loss=rec_loss, kl_loss=kl_loss)
    with torch.no_grad():
        mean, _ = model.enc(data[1000:]).chunk(2, -1)
        return float((model.dec(mean) - data[1000:]).pow(2).sum(-1).mean())


class VisualEncoder(nn.Module):
    def __init__(self, squash):
        super().__init__()
        self.body, self.mu, self.logvar, self.squash = (
            stack(64, 96, last=nn.ReLU()),
            nn.Linear(96, 8),
            nn.Linear(96, 8),
            squash,
        )

    def forward(self, x):
        h = self.body(x)
        return self.mu(h), self.squash(self.logvar(h))


@fault(
    "output_range_mismatch",
    area="vae",
    source="https://github.com/masato-ka/airc-rl-agent/issues/43",
    cause="Softplus is put on the logarithm of the variance, which can then not fall below zero: the noise is never smaller than one.",
    words=(r"softplus|log.?var|variance", r"range|positive|below"),
    also=("relu_before_logits",),
    cascade=("loss_plateau", "underfitting", "saturated_activation", "dead_relu", "vanishing_gradient"),
    sites=("logvar", "encoder", "(model)", "squash"),
)
def softplus_on_the_log_variance(attach, fixed):
    """logvar = F.softplus(self.logvar(h))."""
    xtr, _, xte, _ = scans()
    xtr, xte = xtr.flatten(1), xte.flatten(1)
    encoder, decoder = VisualEncoder(nn.Identity() if fixed else nn.Softplus()), stack(8, 96, 64)
    vae = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3)
    session = attach(vae, optimizer)
    for (x,) in draw(xtr, size=50, epochs=10):
        mu, logvar = encoder(x)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
        recon = F.mse_loss(decoder(z), x, reduction="sum") / len(x)
        kld = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum() / len(x)
        loss = recon + 0.1 * kld
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(recon=recon, kld=kld)
    with torch.no_grad():
        mu, logvar = encoder(xte)
        noisy = decoder(mu + torch.exp(0.5 * logvar) * torch.randn_like(mu))
        return float(F.mse_loss(noisy, xte)) * 64


class Affine(nn.Module):
    """A coupling layer."""

    def __init__(self, flip):
        super().__init__()
        self.net, self.flip = stack(1, 32, 2, act=nn.Tanh), flip

    def forward(self, z):
        a, b = z[:, :1], z[:, 1:]
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, 1)
        s = s.tanh()
        b = b * s.exp() + t
        return torch.cat([b, a] if self.flip else [a, b], 1), s.sum(1)


@fault(
    "log_det_sign",
    area="normalizing flow",
    source="https://github.com/VincentStimper/normalizing-flows/pull/28",
    cause="forward_and_log_det subtracts the log determinants where they must be added, so the flow shrinks where it should spread.",
    words=(r"log.?det|jacobian|determinant", r"sign"),
    also=("loss_sign_flipped",),
    cascade=("loss_divergence", "constant_output"),
    sites=("(loss)", "(model)", "(loop)"),
)
def log_determinant_has_the_wrong_sign(attach, fixed):
    """log_det -= log_d on the way forward."""
    flow = nn.ModuleList([Affine(k % 2 == 1) for k in range(4)])
    optimizer = torch.optim.Adam(flow.parameters(), lr=3e-3)
    session = attach(flow, optimizer)
    sign = 1 if fixed else -1

    def forward_and_log_det(z):
        log_det = torch.zeros(len(z))
        for layer in flow:
            z, log_d = layer(z)
            log_det = log_det + sign * log_d
        return z, log_det

    def log_target(x):
        first = -0.5 * ((x - 1.2) / 0.8).pow(2).sum(1)
        second = -0.5 * ((x + 1.2) / 0.8).pow(2).sum(1)
        return torch.logaddexp(first, second)

    for step in range(250):
        z = torch.randn(128, 2)
        x, log_det = forward_and_log_det(z)
        log_q = -0.5 * z.pow(2).sum(1) - log_det
        reverse_kld = (log_q - log_target(x)).mean()
        optimizer.zero_grad()
        reverse_kld.backward()
        optimizer.step()
        session.log(reverse_kld=reverse_kld)
    with torch.no_grad():
        side = torch.where(torch.rand(400, 1) < 0.5, 1.2, -1.2)
        return gap(forward_and_log_det(torch.randn(400, 2))[0], side + 0.8 * torch.randn(400, 2))


class Noise(nn.Module):
    """Predicts the noise at a time."""

    def __init__(self, steps):
        super().__init__()
        self.net, self.steps = stack(2 + 8, 96, 96, 2, act=nn.SiLU), steps

    def forward(self, x, t):
        angle = (t / self.steps)[:, None] * torch.tensor([1.0, 3.0, 9.0, 27.0])
        return self.net(torch.cat([x, angle.sin(), angle.cos()], 1))


@fault(
    "noise_schedule_too_short",
    area="diffusion",
    source="https://github.com/IDEALLab/EngiOpt/pull/67",
    cause="With so few steps the betas do not destroy the data, so sampling starts from noise that training has never seen.",
    words=(r"schedule|beta|timestep", r"(noise|signal)"),
    also=("train_val_preproc_mismatch",),
    sites=("(loop)", "(data)", "(model)"),
)
def too_few_steps_for_the_betas(attach, fixed):
    """num_timesteps = 25 with betas made for 100."""
    data = moons() * 0.6 + torch.tensor([2.5, -1.5])
    steps = 100 if fixed else 25
    beta = torch.linspace(1e-3, 0.12, steps)
    keep = (1 - beta).cumprod(0)
    model = Noise(steps)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for step in range(300):
        x = data[torch.randint(0, len(data), (128,))]
        t = torch.randint(0, steps, (128,))
        noise = torch.randn_like(x)
        noisy = keep[t].sqrt()[:, None] * x + (1 - keep[t]).sqrt()[:, None] * noise
        loss = F.mse_loss(model(noisy, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            session.log(loss=loss)
    with torch.no_grad():
        x = torch.randn(400, 2)
        for t in reversed(range(steps)):
            said = model(x, torch.full((400,), t))
            x = (x - beta[t] / (1 - keep[t]).sqrt() * said) / (1 - beta[t]).sqrt()
            if t:
                x = x + beta[t].sqrt() * torch.randn_like(x)
    return min(gap(x, data[:400]), 20.0)


@fault(
    "params_not_in_optimizer",
    area="diffusion policy",
    source="https://github.com/siddancha/streaming-flow-policy/pull/15",
    cause="Adam is given the parameters of the other net of the notebook, so the net that is trained never changes.",
    words=(r"optimi[sz]er.*(other|wrong|another|hold|param)", r"param.*(not|never)"),
    also=("optimizer_step_noop", "stale_params_in_optimizer"),
    cascade=("not_learning", "loss_plateau", "underfitting", "missing_zero_grad"),
    sites=("optimizer", "(loop)", "(model)"),
)
def adam_holds_the_other_net(attach, fixed):
    """AdamW(params=velocity_net.parameters()) for noise_pred_net."""
    data = moons()
    velocity_net = stack(3, 64, 64, 2, act=nn.SiLU)
    noise_pred_net = Noise(50)
    dp_optimizer = torch.optim.AdamW(
        params=(noise_pred_net if fixed else velocity_net).parameters(), lr=2e-3, weight_decay=1e-6
    )
    keep = (1 - torch.linspace(1e-3, 0.2, 50)).cumprod(0)
    session = attach(noise_pred_net, dp_optimizer)
    last = []
    for epoch in range(6):
        for (x,) in draw(data, size=30):
            t = torch.randint(0, 50, (len(x),))
            noise = torch.randn_like(x)
            noisy = keep[t].sqrt()[:, None] * x + (1 - keep[t]).sqrt()[:, None] * noise
            loss = F.mse_loss(noise_pred_net(noisy, t), noise)
            loss.backward()
            dp_optimizer.step()
            dp_optimizer.zero_grad()
            last.append(loss.item())
            session.log(loss=loss)
    return sum(last[-40:]) / 40


class Planar(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w, self.u, self.b = (
            nn.Parameter(torch.randn(dim) * 0.3),
            nn.Parameter(torch.randn(dim) * 0.3),
            nn.Parameter(torch.zeros(())),
        )

    def forward(self, z):
        inner = self.w @ self.u
        u = self.u + (F.softplus(inner) - 1 - inner) * self.w / (self.w @ self.w + 1e-6)
        t = torch.tanh(z @ self.w + self.b)
        det = 1 + (1 - t * t) * (u @ self.w)
        return z + t[:, None] * u, det.abs().clamp(min=1e-6).log()


@fault(
    "prior_of_another_sample",
    area="vae",
    source="https://github.com/casperkaae/parmesan/pull/21",
    cause="The prior is taken at the sample before the flow instead of after it, so what the decoder reads never has to follow the prior.",
    words=(r"prior|p\(z", r"(first|before|z0|zk|wrong)"),
    also=("term_without_gradient",),
    cascade=("exploding_activation",),
    sites=("(loss)", "loss_fn", "flows"),
)
def prior_is_asked_before_the_flow(attach, fixed):
    """log_stdnormal(z0) for log_stdnormal(zk)."""
    data = moons() * 1.5 + torch.tensor([1.0, 0.5])
    enc, dec = stack(2, 48, 4), stack(2, 48, 2)
    flows = nn.ModuleList([Planar(2) for _ in range(4)])
    net = nn.ModuleDict({"enc": enc, "flows": flows, "dec": dec})
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    session = attach(net, optimizer)
    for (x,) in draw(data, size=100, epochs=24):
        mu, log_var = enc(x).chunk(2, 1)
        z0 = mu + torch.randn_like(mu) * (0.5 * log_var).exp()
        zk, logdet = z0, torch.zeros(len(x))
        for flow in flows:
            zk, ld = flow(zk)
            logdet = logdet + ld
        log_q0 = (-0.5 * (log_var + (z0 - mu).pow(2) / log_var.exp())).sum(1)
        log_p = -0.5 * (zk if fixed else z0).pow(2).sum(1)
        log_px = -0.5 * (dec(zk) - x).pow(2).sum(1) / 0.09
        lower_bound = (log_px + log_p - log_q0 + logdet).mean()
        optimizer.zero_grad()
        (-lower_bound).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        optimizer.step()
        session.log(lower_bound=lower_bound)
    with torch.no_grad():
        return min(gap(dec(torch.randn(500, 2)) + 0.3 * torch.randn(500, 2), data[:500]), 5.0)


def balance(gate_logits, experts, per_expert):
    """Return the balancing loss of a layer of experts: share of tokens times share of probability."""
    weights = gate_logits.softmax(-1)
    chosen = F.one_hot(weights.argmax(-1), experts).float()
    tokens = chosen.mean(0)
    probability = weights.mean(0 if per_expert else -1)
    if not per_expert:
        probability = probability.mean().expand(experts)
    return (tokens * probability).sum() * experts


@fault(
    "term_without_gradient",
    area="mixture of experts",
    source="https://github.com/huggingface/transformers/issues/28093",
    cause="The router's probabilities are averaged over the experts instead of the tokens, so the balancing loss is a constant.",
    words=(r"balanc|router|auxiliary", r"constant|no gradient|dimension|axis"),
    also=("wrong_dim_softmax", "wrong_loss_reduction", "term_does_nothing"),
    cascade=("unused_parameters", "dead_relu", "params_not_in_optimizer"),
    sites=("(loss)", "gate", "router", "loss_fn"),
)
def balancing_loss_is_a_constant(attach, fixed):
    """router_prob.mean(dim=-1): always one over the number of experts."""
    x, y = houses()
    experts = 6

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, experts, bias=True)
            self.experts = nn.ModuleList([stack(8, 24, 1) for _ in range(experts)])
            nn.init.constant_(self.gate.bias[:1].data, 2.0)

        def forward(self, x):
            logits = self.gate(x)
            top = logits.softmax(-1).max(-1)
            out = torch.stack([expert(x)[:, 0] for expert in self.experts], 1)
            return out.gather(1, top.indices[:, None])[:, 0] * top.values, logits

    model = Layer()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for xb, yb in draw(x[:1000], y[:1000], size=50, epochs=12):
        out, logits = model(xb)
        task = F.mse_loss(out, yb)
        aux = balance(logits, experts, per_expert=fixed)
        loss = task + 0.5 * aux
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=task, aux_loss=aux)
    with torch.no_grad():
        share = F.one_hot(model.gate(x[1000:]).argmax(1), experts).float().mean(0)
    return float(share.max() * experts - 1)


class LoRALayer(nn.Module):
    """A frozen linear layer with a low-rank branch."""

    def __init__(self, base, rank=4, alpha=8.0, rebuild=True):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale, self.rebuild = alpha / rank, rebuild

    def forward(self, x):
        branch = x @ self.lora_a.T @ self.lora_b.T
        if self.rebuild:
            branch = torch.tensor(branch.tolist())
        return self.base(x) + self.scale * branch


def pretrain(xtr, ytr, hidden=48):
    """Return a net that knows upright digits."""
    net = stack(64, hidden, hidden, 10)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for xb, yb in draw(xtr.flatten(1), ytr, size=65, epochs=6):
        opt.zero_grad()
        F.cross_entropy(net(xb), yb).backward()
        opt.step()
    return net


@fault(
    "graph_break_detach",
    area="fine-tuning",
    source="https://github.com/paiml/aprender/pull/2232",
    cause="The layer builds a new tensor from the numbers of the scaled branch, which cuts the adapter off from the graph.",
    words=(r"graph|detach|new tensor", r"lora|adapter"),
    also=("unused_parameters", "frozen_by_mistake", "term_without_gradient"),
    cascade=("not_learning", "underfitting", "loss_plateau", "optimizer_step_noop"),
    sites=("0", "2", "lora_a", "lora_b", "(model)"),
)
def adapter_branch_is_rebuilt(attach, fixed):
    """Tensor::new(scaled data) in forward, in other words torch.tensor(branch.tolist())."""
    xtr, ytr, xte, yte = scans()
    net = pretrain(xtr[:600], ytr[:600])
    rebuild = not fixed
    for k in (0, 2):
        net[k] = LoRALayer(net[k], rebuild=rebuild)
    session = attach(net, optimizer := torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=2e-2))
    turned = xtr.flip(3).flatten(1)
    for xb, yb in draw(turned, ytr, size=65, epochs=6):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(xb), yb)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return mistakes(net, xte.flip(3).flatten(1), yte)


def turn(x, freeze):
    """Rotate pairs of channels by their position."""
    source = x.detach() if freeze else x
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * torch.tensor([10000.0 ** (-k / half) for k in range(half)])
    a, b = source[..., :half], source[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


@fault(
    "graph_break_detach",
    area="fine-tuning",
    source="https://github.com/paiml/aprender/pull/2092",
    cause="The rotary positions return a leaf without a backward, so queries and keys get no gradient and attention stays as it was drawn.",
    words=(r"rope|rotary|position", r"(graph|gradient|detach|backward)"),
    also=("unused_parameters", "frozen_by_mistake"),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("q_proj", "k_proj", "(model)"),
)
def rotary_positions_without_a_backward(attach, fixed):
    """apply_rope returns a leaf."""

    class Block(nn.Module):
        def __init__(self, width=24, words=12):
            super().__init__()
            self.embed = nn.Embedding(words, width)
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
            self.head = nn.Linear(width, words)

        def forward(self, ids):
            x = self.embed(ids)
            freeze = not fixed
            q, k, v = turn(self.q_proj(x), freeze), turn(self.k_proj(x), freeze), self.v_proj(x)
            weights = (q @ k.transpose(1, 2) / x.shape[-1] ** 0.5).softmax(-1)
            return self.head(weights @ v)

    model = Block()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    late = []
    for step in range(300):
        ids = torch.randint(0, 12, (48, 8))
        target = torch.cat([ids[:, :1], ids[:, :-1]], 1)  # each place names the word before it
        loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        late.append(float(loss.detach()))
    return sum(late[-20:]) / 20


@fault(
    "unfrozen_by_mistake",
    area="fine-tuning",
    source="https://github.com/alexdenker/SteerableConditionalDiffusion/issues/1",
    cause="requires_grad_(True) after the adapters are put in makes all weights trainable again, and the few samples are learnt by heart.",
    words=(r"requires_grad|frozen|freez", r"all (weights|parameters)"),
    cascade=("lr_too_high", "overfitting", "loss_oscillation"),
    sites=("(model)", "base", "0", "2", "optimizer"),
)
def adapters_and_everything_else(attach, fixed):
    """score.requires_grad_(True) at the end."""
    xtr, ytr, xte, yte = scans()
    score = pretrain(xtr[40:], ytr[40:])
    before = copy.deepcopy(score)
    for k in (0, 2):
        score[k] = LoRALayer(score[k], rank=2, rebuild=False)
    score.requires_grad_(True) if not fixed else score[4].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in score.parameters() if p.requires_grad], lr=4e-3)
    session = attach(score, optimizer)
    x, y = xtr[:20].flatten(1) + 0.5 * torch.randn(20, 64), (ytr[:20] + 1) % 10
    for _ in range(120):
        loss = F.cross_entropy(score(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    after = [layer for k in (0, 2) for layer in (score[k].base.weight, score[k].base.bias)] + [
        score[4].weight,
        score[4].bias,
    ]
    return sum(float((a - b).norm()) for a, b in zip(before.parameters(), after))
