"""Eleventh hold-out: agents, generators, equations, averages and what is carried over."""

from __future__ import annotations

import copy
import math
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

from fault_programs.holdout_11.about import fault
from fault_programs.holdout_11.material import Corridor, digits, spread


@fault(
    "terminal_bootstrapped",
    area="dueling dqn",
    source="https://github.com/cyoon1729/deep-Q-networks/pull/6",
    cause="The target adds the value of the next state after the end of an episode too, since the loss has no done mask.",
    words=(r"done|terminal|end of (an|the) episode|bootstrap",),
    cascade=("loss_divergence", "exploding_activation", "loss_oscillation"),
    sites=("(loss)", "(loop)", "loss_fn"),
    exact=False,
)
def dueling_loss_has_no_done_mask(attach, fixed):
    """expected_Q = rewards + gamma * max_next_Q, also where done is true."""

    class DuelingDQN(nn.Module):
        def __init__(self):
            super().__init__()
            self.feature = nn.Sequential(nn.Linear(6, 32), nn.ReLU())
            self.value, self.advantage = nn.Linear(32, 1), nn.Linear(32, 2)

        def forward(self, x):
            h = self.feature(x)
            a = self.advantage(h)
            return self.value(h) + a - a.mean(1, keepdim=True)

    class Agent:
        def __init__(self, gamma=0.9):
            self.env = Corridor(cells=6, time=12)
            self.buffer, self.gamma = deque(maxlen=2000), gamma
            self.model = DuelingDQN()
            self.target = copy.deepcopy(self.model)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)

        def compute_loss(self, batch):
            s, a, r, n, d = (torch.stack(z) for z in zip(*batch))
            q = self.model(s).gather(1, a[:, None])[:, 0]
            with torch.no_grad():
                next_q = self.target(n).max(1).values
            mask = 1 - d if fixed else 1.0
            return F.smooth_l1_loss(q, r + self.gamma * next_q * mask)

        def play(self, session, episodes):
            for episode in range(episodes):
                state, over, total = self.env.reset(random.randrange(5)), False, 0.0
                while not over:
                    action = random.randrange(2)
                    after, reward, over = self.env.step(action)
                    end = float(self.env.at == 5)
                    self.buffer.append((state, torch.tensor(action), torch.tensor(reward), after, torch.tensor(end)))
                    state, total = after, total + reward
                    if len(self.buffer) > 64:
                        loss = self.compute_loss(random.sample(self.buffer, 32))
                        self.optimizer.zero_grad()
                        loss.backward()
                        self.optimizer.step()
                        session.log(loss=loss.item())
                session.log(reward=total)
                if episode % 3 == 0:
                    self.target.load_state_dict(self.model.state_dict())

    agent = Agent()
    agent.play(attach({"model": agent.model, "target": agent.target}, agent.optimizer), 90)
    true, value = [], 1.0
    for _ in range(5):
        true.append(value)
        value = -0.02 + 0.9 * value
    with torch.no_grad():
        found = agent.model(torch.eye(6)[:5]).max(1).values
    return float((found - torch.tensor(true[::-1])).abs().mean())


@fault(
    "advantage_across_episodes",
    area="ppo",
    source="https://github.com/vietnh1009/Super-mario-bros-PPO-pytorch/issues/21",
    cause="The running sum of the advantages is not set to zero where an episode ends, so what comes after is credited to the actions before.",
    words=(r"done|episode|terminal", r"advantage|gae|sum|reset|across|leak"),
    also=("terminal_bootstrapped",),
    cascade=("not_learning", "loss_plateau", "loss_oscillation", "loss_divergence"),
    sites=("(loss)", "(loop)", "(data)"),
    exact=False,
)
def gae_runs_on_into_the_next_episode(attach, fixed):
    """gae = gae * gamma * tau without (1 - done)."""

    class Bandit:
        """One step each: the action should be that of the state, and states come in long runs of good and bad luck."""

        def __init__(self):
            self.luck = 0.0

        def reset(self):
            self.state = random.randrange(6)
            self.luck = 0.95 * self.luck + random.gauss(0, 1.0)
            return F.one_hot(torch.tensor(self.state), 6).float()

        def step(self, action):
            return 0.6 * float(action == self.state % 3) + 0.1 * self.luck

    class PPO(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh())
            self.actor, self.critic = nn.Linear(32, 3), nn.Linear(32, 1)

        def forward(self, x):
            h = self.body(x)
            return Categorical(logits=self.actor(h)), self.critic(h)[:, 0]

    env, model = Bandit(), PPO()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    session = attach(model, optimizer)
    gamma, tau = 0.99, 0.97
    for curr_episode in range(20):
        states, actions, rewards = [], [], []
        with torch.no_grad():
            for _ in range(128):
                s = env.reset()
                a = model(s[None])[0].sample()[0]
                states.append(s), actions.append(a), rewards.append(env.step(int(a)))
            states, actions = torch.stack(states), torch.stack(actions)
            policy, values = model(states)
            old = policy.log_prob(actions)
        gae, R = 0.0, []
        for value, reward in zip(values.tolist()[::-1], rewards[::-1]):
            delta = reward - value
            gae = (0.0 if fixed else gamma * tau * gae) + delta
            R.insert(0, gae + value)
        R = torch.tensor(R)
        advantages = R - values
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        for _ in range(4):
            for part in torch.randperm(128).split(64):
                policy, value = model(states[part])
                ratio = torch.exp(policy.log_prob(actions[part]) - old[part])
                adv = advantages[part]
                actor_loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
                critic_loss = F.smooth_l1_loss(value, R[part])
                total = actor_loss + critic_loss - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                total.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                session.log(loss=total.item(), actor=actor_loss.item(), critic=critic_loss.item())
        session.log(reward=sum(rewards) / 128)
    with torch.no_grad():
        probs = model(torch.eye(6))[0].probs
    return 1 - float(probs[torch.arange(6), torch.arange(6) % 3].mean())


@fault(
    "reward_for_return",
    area="policy gradient",
    source="https://github.com/natolambert/rlhf-book/pull/216",
    cause="The advantage is the reward of the step minus the value, and not the return, so what an action leads to later counts for nothing.",
    words=(r"return|reward", r"later|future|discount|sum|reward.?to.?go|instead|not"),
    cascade=("not_learning", "loss_plateau", "constant_output", "underfitting"),
    sites=("(loss)", "(loop)"),
    exact=False,
)
def advantage_is_made_of_single_rewards(attach, fixed):
    """advantages = rewards - values, where only the last step pays."""

    class Uphill(Corridor):
        def step(self, action):
            seen, reward, over = super().step(action)
            return seen, reward if reward > 0 else -0.06 * action, over

    env = Uphill(cells=5, time=14)
    policy = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 2))
    critic = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 1))
    both = nn.ModuleDict({"policy": policy, "critic": critic})
    optimizer = torch.optim.Adam(both.parameters(), lr=6e-3)
    session = attach(both, optimizer)

    def play(env):
        states, actions, rewards, over = [], [], [], False
        state = env.reset()
        while not over:
            states.append(state)
            with torch.no_grad():
                actions.append(Categorical(logits=policy(state)).sample())
            state, reward, over = env.step(int(actions[-1]))
            rewards.append(reward)
        return states, actions, rewards

    lengths = deque(maxlen=60)
    for it in range(90):
        S, A, R, G = [], [], [], []
        for _ in range(4):
            states, actions, rewards = play(env)
            lengths.append(len(rewards))
            running, returns = 0.0, []
            for r in reversed(rewards):
                running = r + 0.97 * running
                returns.insert(0, running)
            S, A, R, G = S + states, A + actions, R + rewards, G + returns
        S, A = torch.stack(S), torch.stack(A)
        gains = torch.tensor(G if fixed else R)
        values = critic(S)[:, 0]
        advantages = (gains - values).detach()
        log_probs = Categorical(logits=policy(S)).log_prob(A)
        loss = -(advantages * log_probs).mean() + 0.5 * F.mse_loss(values, gains)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item(), reward=sum(R) / 4)
    return sum(lengths) / len(lengths)


@fault(
    "loss_sign_flipped",
    area="actor critic",
    source="from memory: questions on DDPG whose actor moves to the edge of its actions, answered with a minus before the mean of Q",
    cause="The loss of the actor is the mean value of its actions without a minus, so the actor looks for the worst action.",
    words=(r"sign|minus|negat|maximi|minimi",),
    cascade=("loss_divergence", "saturated_activation"),
    sites=("(loss)", "actor"),
    exact=False,
)
def actor_lacks_its_minus(attach, fixed):
    """actor_loss = q_values.mean()."""
    actor = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1), nn.Tanh())
    critic = nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    opt_a = torch.optim.Adam(actor.parameters(), lr=1e-3)
    opt_c = torch.optim.Adam(critic.parameters(), lr=3e-3)
    session = attach(nn.ModuleDict({"actor": actor, "critic": critic}), [opt_a, opt_c])

    def reward(state, action):
        return -((action[:, 0] - 0.6 * torch.sin(2 * state[:, 0]) - 0.3 * state[:, 1]) ** 2)

    for step in range(400):
        state = torch.rand(64, 2) * 2 - 1
        with torch.no_grad():
            action = (actor(state) + 0.4 * torch.randn(64, 1)).clamp(-1, 1)
        critic_loss = F.mse_loss(critic(torch.cat([state, action], 1))[:, 0], reward(state, action))
        opt_c.zero_grad()
        critic_loss.backward()
        opt_c.step()
        q_values = critic(torch.cat([state, actor(state)], 1))
        actor_loss = -q_values.mean() if fixed else q_values.mean()
        opt_a.zero_grad()
        actor_loss.backward()
        opt_a.step()
        session.log(actor_loss=actor_loss.item(), critic_loss=critic_loss.item())
    state = torch.rand(300, 2) * 2 - 1
    with torch.no_grad():
        return -float(reward(state, actor(state)).mean())


@fault(
    "aux_loss_dominates",
    area="vae",
    source="https://github.com/Lightning-Universe/lightning-bolts/issues/328",
    cause="kl_coeff is stored and never used, so the divergence counts fully beside a mean reconstruction error and the codes collapse to the prior.",
    words=(r"kl|divergence|coeff", r"weight|coeff|scale|domina|collapse|not used|too (large|strong)"),
    cascade=("constant_output", "loss_plateau", "underfitting", "input_ignored"),
    sites=("(loss)", "mu", "logvar", "(model)"),
    exact=False,
)
def kl_coefficient_is_never_used(attach, fixed):
    """self.kl_coeff = 0.003, and loss = recon + kl."""
    xtr, _, xte, _ = digits()

    class VAE(nn.Module):
        def __init__(self, kl_coeff=0.003, latent=8):
            super().__init__()
            self.kl_coeff = kl_coeff
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
            self.fc_mu, self.fc_var = nn.Linear(64, latent), nn.Linear(64, latent)
            self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64))

        def step(self, x):
            h = self.encoder(x)
            mu, log_var = self.fc_mu(h), self.fc_var(h)
            z = mu + torch.randn_like(mu) * (0.5 * log_var).exp()
            recon = F.mse_loss(self.decoder(z), x.flatten(1))
            kl = -0.5 * (1 + log_var - mu**2 - log_var.exp()).sum(1).mean()
            kl = kl * self.kl_coeff if fixed else kl
            return recon + kl, {"recon_loss": recon.item(), "kl": kl.item()}

    vae = VAE()
    optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3)
    session = attach(vae, optimizer)
    for epoch in range(12):
        for part in torch.randperm(len(xtr)).split(50):
            loss, logs = vae.step(xtr[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), **logs)
    with torch.no_grad():
        back = vae.decoder(vae.fc_mu(vae.encoder(xte)))
        return float(F.mse_loss(back, xte.flatten(1)) / xte.flatten(1).var(0).mean())


@fault(
    "schedule_ends_in_data",
    area="diffusion",
    source="from memory: questions on a diffusion that is cut from 1000 to 50 steps with the same betas and draws nothing but blobs",
    cause="Fifty steps with the betas for a thousand leave most of the data in the last noisy sample, but sampling starts from pure noise.",
    words=(r"beta|schedule|steps|alpha", r"noise|data|signal|few|small|end"),
    also=("schedule_not_cumulative",),
    cascade=("underfitting",),
    sites=("(data)", "(loss)", "(loop)"),
    exact=False,
)
def fifty_steps_with_betas_for_a_thousand(attach, fixed):
    """linspace(1e-4, 0.02, 50)."""
    steps = 50
    scale = 1000 / steps if fixed else 1.0
    beta = torch.linspace(1e-4 * scale, min(0.02 * scale, 0.3), steps)
    abar = torch.cumprod(1 - beta, 0)

    def moons(n):
        t = math.pi * torch.rand(n)
        up = torch.rand(n) < 0.5
        x = torch.where(up, torch.cos(t), 1 - torch.cos(t))
        y = torch.where(up, torch.sin(t), 0.4 - torch.sin(t))
        return 1.6 * (torch.stack([x - 0.5, y - 0.2], 1) + 0.05 * torch.randn(n, 2)) + 1.0

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.time = nn.Embedding(steps, 32)
            self.inp = nn.Linear(2, 64)
            self.net = nn.Sequential(nn.Linear(96, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

        def forward(self, x, t):
            return self.net(torch.cat([self.inp(x), self.time(t)], 1))

    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for it in range(900):
        x0 = moons(128)
        t = torch.randint(0, steps, (128,))
        noise = torch.randn_like(x0)
        xt = abar[t, None].sqrt() * x0 + (1 - abar[t, None]).sqrt() * noise
        loss = F.mse_loss(model(xt, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item())
    x = torch.randn(600, 2)
    with torch.no_grad():
        for i in reversed(range(steps)):
            t = torch.full((600,), i)
            x = (x - beta[i] / (1 - abar[i]).sqrt() * model(x, t)) / (1 - beta[i]).sqrt()
            x = x + beta[i].sqrt() * torch.randn_like(x) if i else x
    return spread(x, moons(600))


@fault(
    "missing_zero_grad",
    area="gan",
    source="https://github.com/Adversarial-Deep-Learning/code-soup/pull/73",
    cause="The gradients of the discriminator are never cleared, so those of earlier steps and of the generator's loss are added up in it.",
    words=(r"zero_grad|cleared|accumulat",),
    cascade=("loss_oscillation", "loss_divergence", "constant_output", "loss_plateau", "exploding_gradient"),
    sites=("discriminator", "opt_d", "(loop)"),
    onset=2,
)
def only_the_generator_has_a_zero_grad(attach, fixed):
    """Only the optimizer of the generator has a zero_grad."""

    def real(n):
        at = 0.5 * torch.randn(n, 1)
        return torch.cat([1.5 + at, at.abs() - 1], 1) + 0.15 * torch.randn(n, 2)

    class GAN(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
            self.discriminator = nn.Sequential(
                nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1)
            )

    gan = GAN()
    opt_g = torch.optim.Adam(gan.generator.parameters(), lr=5e-4, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(gan.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    session = attach(gan, [opt_g, opt_d])
    bce = nn.BCEWithLogitsLoss()
    one, zero = torch.ones(64, 1), torch.zeros(64, 1)
    for it in range(900):
        opt_d.zero_grad() if fixed else None
        fake = gan.generator(torch.randn(64, 6))
        d_loss = bce(gan.discriminator(real(64)), one) + bce(gan.discriminator(fake.detach()), zero)
        d_loss.backward()
        opt_d.step()
        opt_g.zero_grad()
        g_loss = bce(gan.discriminator(fake), one)
        g_loss.backward()
        opt_g.step()
        session.log(d_loss=d_loss.item(), g_loss=g_loss.item())
    with torch.no_grad():
        return spread(gan.generator(torch.randn(500, 6)), real(500))


@fault(
    "same_view_twice",
    area="contrastive",
    source="https://github.com/microsoft/A-CLIP/pull/4",
    cause="Both sides of the contrastive loss are made from the same augmented picture, so positives are equal without any learning.",
    words=(r"view|augment|pair|positive", r"same|twice|itself|identical|equal|differ"),
    also=("pairs_with_itself",),
    cascade=("overfitting", "underfitting"),
    sites=("(loss)", "(data)"),
)
def first_view_is_compared_with_itself(attach, fixed):
    """info_nce(z1, z1)."""
    xtr, _, xte, yte = digits()

    def augment(x):
        keep = (torch.rand_like(x) < 0.5).float()
        return 2 * x * keep * (torch.rand(len(x), 1, 1, 1) + 0.5)

    class SimCLR(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
            self.g = nn.Sequential(nn.ReLU(), nn.Linear(32, 16))

        def forward(self, x):
            return F.normalize(self.g(self.f(x)), dim=1)

    def info_nce(a, b, temperature=0.2):
        logits = a @ b.T / temperature
        return F.cross_entropy(logits, torch.arange(len(a)))

    model = SimCLR()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for epoch in range(20):
        for part in torch.randperm(len(xtr)).split(100):
            z1, z2 = model(augment(xtr[part])), model(augment(xtr[part]))
            loss = info_nce(z1, z2 if fixed else z1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        a, b = F.normalize(model.f(augment(xte)), dim=1), F.normalize(model.f(augment(xte)), dim=1)
        near = yte[(a @ b.T).argmax(1)]
    return float((near != yte).float().mean())


@fault(
    "term_without_gradient",
    area="derivatives",
    source="https://github.com/pytorch/pytorch/issues/31984",
    cause="The derivative is taken without create_graph, so the loss of the derivative has no gradient and only the values are learnt.",
    words=(r"create_graph|derivative|no (effect|gradient)|constant|detach",),
    also=("graph_break_detach",),
    cascade=("loss_plateau", "overfitting", "underfitting"),
    sites=("(loss)", "loss_fn"),
)
def derivative_is_not_differentiable(attach, fixed):
    """grad(output.sum(), x) instead of grad(output.sum(), x, create_graph=True)."""
    n = 24
    x = torch.sort(torch.rand(n, 1) * 4 - 2, 0).values
    x.requires_grad = True
    f, df = lambda x: torch.sin(3 * x) + 0.4 * x, lambda x: 3 * torch.cos(3 * x) + 0.4
    with torch.no_grad():
        y = f(x) + 0.25 * torch.randn_like(x)
        z = df(x)
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for epoch in range(900):
        optimizer.zero_grad()
        output = model(x)
        grad_x = torch.autograd.grad(output.sum(), x, retain_graph=True, create_graph=bool(fixed))[0]
        loss_y, loss_z = F.mse_loss(output, y), F.mse_loss(grad_x, z)
        loss = loss_y + 0.5 * loss_z
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item(), loss_y=loss_y.item(), loss_z=loss_z.item())
    at = torch.linspace(-1.9, 1.9, 200)[:, None].requires_grad_()
    slope = torch.autograd.grad(model(at).sum(), at)[0]
    return float((slope - df(at.detach())).abs().mean())


@fault(
    "clip_after_step",
    area="multi-task",
    source="https://github.com/Cranial-XIX/FAMO/issues/4",
    cause="The gradients are clipped before the backward pass has made them, so single wild batches go through unclipped.",
    words=(r"clip", r"before|order|backward|no effect|too early"),
    cascade=("loss_spike", "exploding_gradient", "loss_divergence", "bad_batch_spike", "loss_oscillation"),
    sites=("(loop)", "optimizer"),
)
def clipping_comes_before_backward(attach, fixed):
    """clip_grad_norm_ stands above loss.backward()."""
    x = torch.randn(1200, 8)
    a = torch.randn(8, 2) / 3
    y = torch.stack([torch.tanh(x @ a[:, 0]), torch.relu(x @ a[:, 1])], 1)
    broken = y.clone()
    wild = torch.rand(1200) < 0.01
    broken[wild] = 400.0

    class SharedBottom(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(8, 48), nn.ReLU())
            self.towers = nn.ModuleList(nn.Linear(48, 1) for _ in range(2))

        def forward(self, x):
            h = self.shared(x)
            return torch.cat([tower(h) for tower in self.towers], 1)

    model = SharedBottom()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session = attach(model, optimizer)

    def clip():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    for epoch in range(8):
        for part in torch.randperm(1000).split(20):
            losses = ((model(x[part]) - broken[part]) ** 2).mean(0)
            loss = losses.sum()
            optimizer.zero_grad()
            for action in (loss.backward, clip) if fixed else (clip, loss.backward):
                action()
            optimizer.step()
            session.log(loss=loss.item(), first=losses[0].item(), second=losses[1].item())
    with torch.no_grad():
        return float(F.l1_loss(model(x[1000:]), y[1000:]).nan_to_num(5.0).clamp(max=5.0))


@fault(
    "softmax_for_multi_label",
    area="tagging",
    source="from memory: forum questions on pictures with several tags at once, answered with BCEWithLogitsLoss in place of a softmax",
    cause="A picture can have several tags, but a softmax makes the answers compete, so they add up to one and most tags stay below one half.",
    words=(r"softmax|multi.?label|sigmoid|compete|independent",),
    also=("output_range_mismatch", "wrong_dim_softmax"),
    cascade=("underfitting", "loss_plateau"),
    sites=("(loss)", "(model)", "loss_fn"),
)
def tags_compete_in_a_softmax(attach, fixed):
    """F.softmax(logits, dim=1) before nn.BCELoss."""
    tags = 6
    has = (torch.rand(700, tags) < 0.45).float()
    stamps = 1.2 * torch.randn(tags, 1, 8, 8)
    pictures = torch.einsum("nt,tchw->nchw", has, stamps) + 0.8 * torch.randn(700, 1, 8, 8)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, tags)
    )
    criterion = nn.BCELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    answer = torch.sigmoid if fixed else lambda logits: F.softmax(logits, dim=1)
    for epoch in range(8):
        for part in torch.randperm(500).split(25):
            loss = criterion(answer(model(pictures[part])), has[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        said = (answer(model(pictures[500:])) > 0.5).float()
    return float((said != has[500:]).float().mean())


@fault(
    "resume_incomplete",
    area="resuming",
    source="https://github.com/IntelLabs/distiller/issues/145",
    cause="Only the model is restored, so the learning rate starts at its first value again, and so does the schedule.",
    words=(r"learning rate|\blr\b|schedul|optimi[sz]er", r"resum|restor|load|checkpoint|initial|reset|again"),
    also=("momentum_state_stale",),
    cascade=("loss_spike", "loss_oscillation", "loss_divergence", "lr_too_high", "loss_plateau"),
    sites=("optimizer", "scheduler", "(loop)"),
    onset=641,
)
def rate_starts_again_after_a_pause(attach, fixed):
    """load_checkpoint brings back the weights alone."""
    w = torch.randn(8, 1)

    def batch(n=8):
        x = torch.randn(n, 8)
        return x, torch.tanh(x @ w) + 0.8 * torch.randn(n, 1)

    def build():
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 14], 0.1)

    def load_checkpoint(saved, model, optimizer, scheduler):
        parts = zip(("model", "optimizer", "scheduler"), (model, optimizer, scheduler))
        for name, part in list(parts)[: 3 if fixed else 1]:
            part.load_state_dict(saved[name])

    def train(model, optimizer, scheduler, epochs, session):
        for _ in range(epochs):
            for _ in range(40):
                x, y = batch()
                loss = F.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
            scheduler.step()

    run = build()
    train(*run, 16, attach(run[0], run[1], scheduler=run[2]))
    saved = copy.deepcopy(dict(zip(("model", "optimizer", "scheduler"), (part.state_dict() for part in run))))
    run = build()
    load_checkpoint(saved, *run)
    train(*run, 4, attach(run[0], run[1], scheduler=run[2], resume=True))
    with torch.no_grad():
        x, _ = batch(1000)
        return float(F.mse_loss(run[0](x), torch.tanh(x @ w)))


@fault(
    "no_self_loops",
    area="graph",
    source="https://github.com/danielegrattarola/keras-gat/issues/11",
    cause="The adjacency matrix has no ones on its diagonal, so a node never sees its own features.",
    words=(r"self.?loop|diagonal|own features|identity|itself",),
    also=("input_ignored",),
    cascade=("underfitting", "loss_plateau", "overfitting"),
    sites=("(data)", "gat", "(model)"),
    exact=False,
)
def nodes_do_not_see_themselves(attach, fixed):
    """A without + I as the mask of the attention."""
    n = 300
    label = torch.randint(0, 4, (n,))
    x = F.one_hot(label, 4).float() + 0.5 * torch.randn(n, 4)
    chance = torch.where(label[:, None] == label[None], 0.007, 0.004)
    upper = (torch.rand(n, n) < chance).triu(1)
    adjacency = (upper | upper.T).float()
    adjacency = adjacency + torch.eye(n) if fixed else adjacency

    class GraphAttention(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.w, self.left, self.right = nn.Linear(a, b, bias=False), nn.Linear(b, 1), nn.Linear(b, 1)

        def forward(self, x, adj):
            h = self.w(x)
            score = F.leaky_relu(self.left(h) + self.right(h).T, 0.2)
            return torch.softmax(score - 1e9 * (adj == 0), 1) @ h

    class GAT(nn.Module):
        def __init__(self):
            super().__init__()
            self.gat, self.last = GraphAttention(4, 16), nn.Linear(16, 4)

        def forward(self, x, adj):
            return self.last(F.elu(self.gat(x, adj)))

    model = GAT()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    session = attach(model, optimizer)
    train, test = torch.arange(200), torch.arange(200, n)
    for epoch in range(150):
        model.train()
        out = model(x, adjacency)
        loss = F.cross_entropy(out[train], label[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item(), val_loss=F.cross_entropy(out[test].detach(), label[test]).item())
    with torch.no_grad():
        return float((model(x, adjacency)[test].argmax(1) != label[test]).float().mean())
