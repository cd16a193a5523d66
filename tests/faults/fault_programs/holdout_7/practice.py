"""Seventh hold-out: the loop around the step, and learning from rewards."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, Normal
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from fault_programs.holdout_7.about import fault
from fault_programs.holdout_7.matter import (
    Corridor,
    batches,
    energy_distance,
    error_rate,
    pictures,
    regret,
    rings,
    sounds,
    table,
)


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


@fault(
    "momentum_state_stale",
    area="regression",
    source="https://github.com/alan-turing-institute/deepsensor/issues/47",
    cause="train_epoch makes a new optimizer at the start of every epoch, so its moments are lost each time.",
    words=(r"(new|re-?created|re-?instantiat).*optimi[sz]er", r"(state|moment).*(lost|reset)"),
    also=("resume_incomplete",),
    cascade=("loss_oscillation", "loss_spike", "underfitting"),
    sites=("optimizer", "(loop)"),
    onset=3,
)
def new_optimizer_every_epoch(attach, fixed):
    """opt = Adam(...) inside train_epoch."""
    x, y = table()
    x, y = x[:48], y[:48]
    model = mlp(7, 48, 48, 1, act=nn.Tanh)
    state = {"opt": torch.optim.Adam(model.parameters(), lr=8e-3)}
    session = attach(model, state["opt"])

    def train_epoch():
        if not fixed:
            state["opt"] = torch.optim.Adam(model.parameters(), lr=8e-3)
        for xb, yb in batches(x, y, size=16):
            state["opt"].zero_grad()
            loss = F.mse_loss(model(xb).squeeze(1), yb)
            loss.backward()
            state["opt"].step()
        return loss

    losses = []
    for _epoch in range(90):
        loss = train_epoch()
        session.log(loss=loss)
        losses.append(float(loss.detach()))
    return sum(losses[-10:]) / 10


class SRNet(nn.Module):
    """Four times as many pixels."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 1)
        )
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x):
        return self.shuffle(self.net(x))


@fault(
    "lr_schedule_collapse",
    area="super-resolution",
    source="https://github.com/Lornatang/SRGAN-PyTorch/issues/1",
    cause="A StepLR that counts epochs is stepped at every batch, so the rate is almost zero after a few batches.",
    words=(r"schedul", r"(learning )?rate.*(zero|small|low|decay)"),
    also=("lr_too_low",),
    cascade=("underfitting", "not_learning", "loss_plateau"),
    sites=("scheduler", "optimizer", "(loop)"),
)
def schedule_of_epochs_at_every_batch(attach, fixed):
    """scheduler.step() one level too deep."""
    xtr, _, xte, _ = pictures()
    epochs = 8
    model = SRNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = StepLR(optimizer, step_size=epochs // 2, gamma=0.1)
    session = attach(model, optimizer)
    for _epoch in range(epochs):
        for i, (hr,) in enumerate(batches(xtr, size=50)):
            lr_image = F.avg_pool2d(hr, 2)
            loss = F.mse_loss(model(lr_image), hr)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            if i == 26 or not fixed:
                scheduler.step()
    with torch.no_grad():
        return float(F.mse_loss(model(F.avg_pool2d(xte, 2)), xte))


class ManualModule(nn.Module):
    """A module with manual optimisation, as after a move to a framework."""

    def __init__(self):
        super().__init__()
        self.net = mlp(7, 1)

    def configure_optimizers(self):
        optim = torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9)
        return optim, ExponentialLR(optim, gamma=0.75)


@fault(
    "scheduler_never_called",
    area="speech",
    source="https://github.com/voicepaw/so-vits-svc-fork/pull/291",
    cause="With manual optimisation nobody steps the schedulers, so the rate never decays.",
    words=(r"schedul.*(never|not)", r"(learning )?rate.*(never|constant)"),
    also=("lr_too_high",),
    cascade=("loss_oscillation", "loss_plateau"),
    sites=("scheduler", "optimizer", "(loop)"),
)
def manual_optimisation_forgets_the_schedule(attach, fixed):
    """on_train_epoch_end steps nothing."""
    x, _ = table()
    truth = x @ torch.linspace(-1, 1, 7)
    y = truth + 1.2 * torch.randn(len(x), generator=torch.Generator().manual_seed(1))
    module = ManualModule()
    optim, sched = module.configure_optimizers()
    session = attach(module, optim)

    def on_train_epoch_end():
        sched.step() if fixed else None

    for _epoch in range(16):
        for xb, yb in batches(x[:1000], y[:1000], size=8):
            loss = F.mse_loss(module.net(xb).squeeze(1), yb)
            optim.zero_grad()
            loss.backward()
            optim.step()
            session.log(loss=loss)
        on_train_epoch_end()
    with torch.no_grad():
        return float(F.mse_loss(module.net(x[1000:]).squeeze(1), truth[1000:]))


@fault(
    "clip_before_unscale",
    area="semi-supervised",
    source="https://github.com/TorchSSL/TorchSSL/pull/59",
    cause="Gradients are clipped while they are still multiplied by the loss scale, so steps become tiny.",
    words=(r"unscale", r"clip"),
    also=("clip_always_active",),
    cascade=("underfitting", "not_learning", "loss_plateau", "lr_too_low", "vanishing_gradient"),
    sites=("optimizer", "scaler", "(loop)"),
)
def ssl_clips_while_scaled(attach, fixed):
    """clip_grad_norm_ without scaler.unscale_(optimizer) first."""
    xtr, ytr, xte, yte = pictures()
    model = mlp(64, 48, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    session = attach(model, optimizer)
    for x, y in batches(xtr.flatten(1), ytr, size=50, epochs=5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        loss = F.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        if fixed:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        session.log(loss=loss)
    return error_rate(model, xte.flatten(1), yte)


@fault(
    "zero_grad_misplaced",
    area="language",
    source="https://github.com/pytorch/torchtitan/pull/3575",
    cause="zero_grad is called at every micro-batch instead of every step, so only the last of sixteen micro-batches counts.",
    words=(r"zero_grad|clear", r"micro.?batch", r"(last|only).*(batch|gradient)"),
    also=("samples_left_out",),
    cascade=("loss_oscillation", "underfitting", "loss_plateau"),
    sites=("optimizer", "(loop)"),
)
def clears_at_every_micro_batch(attach, fixed):
    """forward_backward() clears, optim_step() does not."""
    x, _ = table()
    truth = x @ torch.linspace(-1, 1, 7)
    y = truth + 1.5 * torch.randn(len(x), generator=torch.Generator().manual_seed(2))
    model = mlp(7, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    session = attach(model, optimizer)
    accumulation = 16

    def forward_backward(micro, first):
        if first or not fixed:
            optimizer.zero_grad()
        loss = F.mse_loss(model(micro[0]).squeeze(1), micro[1])
        (loss / accumulation).backward()
        return loss.detach()

    for xb, yb in batches(x[:1000], y[:1000], size=64, epochs=12):
        parts = list(zip(xb.split(4), yb.split(4)))
        total = sum(forward_backward(part, i == 0) for i, part in enumerate(parts))
        optimizer.step()
        session.log(loss=total / accumulation)
    with torch.no_grad():
        return float(F.mse_loss(model(x[1000:]).squeeze(1), truth[1000:]))


@fault(
    "missing_zero_grad",
    area="fine-tuning",
    source="https://github.com/tenstorrent/tt-blacksmith/pull/711",
    cause="The trainer forgets zero_grad after the step, so gradients of all steps add up.",
    words=(r"zero_grad|not cleared|accumulat",),
    cascade=("loss_divergence", "loss_oscillation", "exploding_gradient", "not_learning", "loss_spike", "lr_too_high"),
    sites=("optimizer", "(loop)"),
)
def trainer_leaves_zero_grad_out(attach, fixed):
    """optimizer_step(optimizer, zero_grad=False)."""
    xtr, ytr, xte, yte = pictures()
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = attach(model, optimizer)

    class Trainer:
        def optimizer_step(self, zero_grad):
            optimizer.step()
            if zero_grad:
                optimizer.zero_grad()

        def train(self, data):
            for x, y in data:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                self.optimizer_step(zero_grad=fixed)
                session.log(loss=loss)

    Trainer().train(batches(xtr.flatten(1), ytr, size=50, epochs=6))
    return error_rate(model, xte.flatten(1), yte)


@fault(
    "best_weights_not_restored",
    area="model-based rl",
    source="https://github.com/facebookresearch/mbrl-lib/issues/98",
    cause="state_dict(best) is called where load_state_dict(best) was meant, so the last, overfitted weights stay.",
    words=(r"load_state_dict", r"best.*(not|never)"),
    also=("result_discarded", "overfitting"),
    cascade=("overfitting",),
    sites=("(loop)", "(model)", "(validation)"),
)
def state_dict_instead_of_load(attach, fixed):
    """self.model.state_dict(best_weights)."""
    x, y = table()
    made = torch.Generator().manual_seed(3)
    y = 0.6 * y + torch.randn(len(y), generator=made)
    model = mlp(7, 256, 256, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    best, best_val_loss = None, float("inf")

    @torch.no_grad()
    def evaluate(a, b):
        return float(F.mse_loss(model(x[a:b]).squeeze(1), y[a:b]))

    for _epoch in range(60):
        for xb, yb in batches(x[:60], y[:60], size=20):
            loss = F.mse_loss(model(xb).squeeze(1), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        val_loss = evaluate(120, 500)
        session.log(val_loss=val_loss)
        if val_loss < best_val_loss:
            best, best_val_loss = copy.deepcopy(model.state_dict()), val_loss
    model.load_state_dict(best) if fixed else model.state_dict(destination=dict(best))
    return evaluate(500, 1300) - 1.0


@fault(
    "data_leakage",
    area="cross-validation",
    source="https://github.com/antmarakis/Machine-Learning/issues/3",
    cause="The model is made before the loop over folds and goes on learning, so each fold is judged by a model that has seen it.",
    words=(r"fold", r"leak|seen|trained on"),
    also=("overfitting",),
    cascade=("overfitting",),
    sites=("(validation)", "(data)", "(loop)", "(model)"),
    onset=60,
)
def one_model_for_all_folds(attach, fixed):
    """create_model() outside the loop."""
    x, y = table()
    made = torch.Generator().manual_seed(4)
    x, y = x[:200], y[:200] + 0.7 * torch.randn(200, generator=made)
    folds = torch.randperm(200, generator=made).split(50)

    def create_model():
        net = mlp(7, 128, 128, 1)
        return net, torch.optim.Adam(net.parameters(), lr=3e-3)

    model, optimizer = create_model()
    session = attach(model, optimizer)
    scores = []
    for k, test in enumerate(folds):
        if fixed and k:
            model, optimizer = create_model()
            session = attach(model, optimizer)
        train = torch.cat([fold for j, fold in enumerate(folds) if j != k])
        for xb, yb in batches(x[train], y[train], size=25, epochs=25):
            loss = F.mse_loss(model(xb).squeeze(1), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        with torch.no_grad():
            scores.append(float(F.mse_loss(model(x[test]).squeeze(1), y[test])))
        session.log(val_loss=scores[-1])
    return max(0.0, 1.5 - sum(scores[1:]) / len(scores[1:]) / max(scores[0], 0.4))


class EMAModel:
    """A moving average of weights whose decay warms up."""

    def __init__(self, model, decay, keep):
        self.shadow = copy.deepcopy(model).requires_grad_(False)
        self.decay, self.keep, self.steps = decay, keep, 0

    def step(self, model):
        value = (1 + self.steps) / (10 + self.steps)
        self.steps += 1
        decay = 1 - min(self.decay, value)
        if not self.keep:
            self.decay = decay
        with torch.no_grad():
            for s, p in zip(self.shadow.parameters(), model.parameters()):
                s.sub_(decay * (s - p))


@fault(
    "ema_decay_overwritten",
    area="diffusion",
    source="https://github.com/huggingface/diffusers/issues/1864",
    cause="step() overwrites the decay it was given, which swings between 0.1 and 0.9, so nothing is averaged.",
    words=(r"\bema\b|moving average|decay",),
    also=("ema_not_updated",),
    cascade=("loss_oscillation",),
    sites=("(loop)", "(model)", "shadow"),
)
def decay_of_the_average_is_overwritten(attach, fixed):
    """self.decay = 1 - min(self.decay, value)."""
    x, _ = table()
    truth = x @ torch.linspace(-1, 1, 7)
    y = truth + 2.0 * torch.randn(len(x), generator=torch.Generator().manual_seed(5))
    model = mlp(7, 1)
    ema = EMAModel(model, 0.995, keep=fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = attach(model, optimizer)
    for xb, yb in batches(x[:1000], y[:1000], size=10, epochs=9):
        loss = F.mse_loss(model(xb).squeeze(1), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.step(model)
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(ema.shadow(x[1000:]).squeeze(1), truth[1000:]))


class ContrastiveLoss(nn.Module):
    """Pull like pairs together, push others a margin apart."""

    def __init__(self, margin, eps):
        super().__init__()
        self.margin, self.eps = margin, eps

    def forward(self, a, b, same):
        distances = (a - b).pow(2).sum(1)
        losses = 0.5 * (same * distances + (1 - same) * F.relu(self.margin - (distances + self.eps).sqrt()).pow(2))
        return losses.mean()


@fault(
    "nan_backward",
    area="metric learning",
    source="https://github.com/adambielski/siamese-triplet/issues/18",
    cause="The distance of two equal samples is zero, and the slope of the root is infinite there.",
    words=(r"sqrt|root", r"(nan|inf|not finite).*(gradient|backward)|gradient.*(nan|inf|not finite)", r"zero"),
    cascade=("nan_in_weights", "nan_forward", "nan_in_loss", "nan_in_optimizer", "loss_divergence"),
    sites=("(loss)", "loss_fn", "4", "2", "0", "(model)"),
    onset=1,
)
def root_of_the_distance_of_equals(attach, fixed):
    """distances.sqrt() without an eps; the data have duplicates."""
    xtr, ytr, xte, yte = pictures()
    flat = xtr.flatten(1)
    net = mlp(64, 64, 8)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    criterion = ContrastiveLoss(1.0, eps=1e-9 if fixed else 0.0)
    session = attach(net, optimizer, loss_fn=criterion)
    step = 0
    for x, y in batches(flat, ytr, size=60, epochs=8):
        a, b, same = x[:30], x[30:].clone(), (y[:30] == y[30:]).float()
        if step % 17 == 16:
            b[0], same[0] = a[0], 0.0
        loss = criterion(net(a), net(b), same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        step += 1
    with torch.no_grad():
        z, ref = net(xte.flatten(1)), net(flat)
        guess = ytr[torch.cdist(z, ref).nan_to_num(0.0).argmin(1)]
    return float((guess != yte).float().mean())


@fault(
    "nan_in_loss",
    area="metric learning",
    source="https://github.com/KevinMusgrave/pytorch-metric-learning/issues/107",
    cause="The sum is divided by the number of triplets that still violate the margin, which becomes zero.",
    words=(r"divi.*(zero|by 0|count)", r"0 ?/ ?0", r"empty|no (triplet|valid)"),
    also=("empty_target",),
    cascade=("nan_backward", "nan_in_weights", "nan_forward", "nan_in_optimizer", "loss_divergence"),
    sites=("(loss)", "loss_fn"),
    onset=20,
)
def mean_over_no_triplets(attach, fixed):
    """avg_non_zero_only when none is above zero."""
    xtr, ytr, xte, yte = pictures()
    pick = ytr < 2
    flat, label = xtr[pick].flatten(1), ytr[pick]
    net = mlp(64, 32, 8)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)

    def triplet_loss(z, y):
        d = torch.cdist(z, z)
        ap, an = (y[:, None] == y).float(), (y[:, None] != y).float()
        relued = F.relu(d[:, :, None] - d[:, None, :] + 0.2) * ap[:, :, None] * an[:, None, :]
        num_non_zero_triplets = (relued > 0).sum()
        if fixed and num_non_zero_triplets == 0:
            return relued.mean()
        return relued.sum() / num_non_zero_triplets

    for x, y in batches(flat, label, size=24, epochs=14):
        loss = triplet_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        z, test = net(flat), net(xte[yte < 2].flatten(1))
        guess = label[torch.cdist(test, z).nan_to_num(9.0).argmin(1)]
    broken = float(not bool(z.isfinite().all()))
    return broken + float((guess != yte[yte < 2]).float().mean())


def discounted(rewards, gamma=0.95):
    out, running = [], 0.0
    for r in reversed(rewards):
        running = r + gamma * running
        out.append(running)
    out.reverse()
    return out


def reversed_each_time(rewards, gamma=0.95):
    out, running = [], 0.0
    for r in reversed(rewards):
        running = r + gamma * running
        out.append(running)
        out.reverse()
    return out


def play(policy, env):
    seen, done, trail = env.reset(), False, []
    while not done:
        dist = Categorical(logits=policy(seen))
        action = dist.sample()
        after, reward, done = env.step(int(action))
        trail.append((seen, action, reward))
        seen = after
    return trail


@fault(
    "returns_misordered",
    area="reinforcement learning",
    source="https://github.com/PacktPublishing/Tensorflow-2-Reinforcement-Learning-Cookbook/pull/28",
    cause="The list of returns is reversed inside the loop that fills it, so returns belong to other steps of the episode.",
    words=(r"return|reward", r"order|revers"),
    also=("label_shuffle_mismatch",),
    cascade=("not_learning", "loss_oscillation"),
    sites=("(loop)", "(data)", "(loss)"),
)
def returns_reversed_within_the_loop(attach, fixed):
    """discounted_rewards.reverse() is indented too far."""
    env, policy = Corridor(), mlp(7, 24, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    session = attach(policy, optimizer)
    returns_of = discounted if fixed else reversed_each_time
    for _episode in range(120):
        trail = play(policy, env)
        states = torch.stack([s for s, _, _ in trail])
        actions = torch.stack([a for _, a, _ in trail])
        returns = torch.tensor(returns_of([r for _, _, r in trail]))
        if len(returns) > 1:
            returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        log_probs = Categorical(logits=policy(states)).log_prob(actions)
        loss = -(log_probs * returns).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(policy_loss=loss, length=len(trail))
    states = torch.eye(7)[:6]
    with torch.no_grad():
        return float(1 - F.softmax(policy(states), 1)[:, 1].mean())


@fault(
    "ema_not_updated",
    area="reinforcement learning",
    source="https://github.com/thesouther/MARL/issues/8",
    cause="The target network loads its own state instead of that of the network that learns.",
    words=(r"target.*(never|not|own|itself)", r"load_state_dict"),
    also=("target_network_frozen",),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("(loop)", "(model)", "target_net"),
    onset=10,
)
def target_loads_itself(attach, fixed):
    """target_net.load_state_dict(target_net.state_dict())."""
    env = Corridor()
    eval_net, target_net = mlp(7, 32, 2), mlp(7, 32, 2)
    target_net.load_state_dict(eval_net.state_dict())
    optimizer = torch.optim.Adam(eval_net.parameters(), lr=5e-3)
    session = attach(eval_net, optimizer)
    memory, step = [], 0
    for episode in range(60):
        seen, done = env.reset(), False
        while not done:
            explore = torch.rand(()) < max(0.1, 1 - episode / 30)
            action = int(torch.randint(2, ())) if explore else int(eval_net(seen).argmax())
            after, reward, done = env.step(action)
            memory.append((seen, action, reward, after, float(env.at == 6)))
            seen, step = after, step + 1
            if len(memory) < 32:
                continue
            picks = [memory[int(i)] for i in torch.randint(len(memory), (32,))]
            s, a, r, s2, end = (torch.stack([torch.as_tensor(p[k]) for p in picks]) for k in range(5))
            with torch.no_grad():
                target = r.float() + 0.95 * (1 - end.float()) * target_net(s2).max(1).values
            loss = F.smooth_l1_loss(eval_net(s).gather(1, a[:, None]).squeeze(1), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            if step % 20 == 0:
                source = eval_net if fixed else target_net
                target_net.load_state_dict(source.state_dict())
    with torch.no_grad():
        q = eval_net(torch.eye(7)[:6]).max(1).values
    true = torch.tensor(discounted([-0.05] * 5 + [1.0]))
    return float((q - true).abs().mean())


class ActorCritic(nn.Module):
    """A shared body with two heads."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, s):
        h = self.body(s)
        return self.actor(h), self.critic(h).squeeze(-1)


@fault(
    "term_without_gradient",
    area="reinforcement learning",
    source="https://github.com/jsboige/CoursIA/pull/15256",
    cause="Values are collected with .item(), so the value loss has no graph and the critic never learns.",
    words=(r"(value|critic).*(no gradient|never|not)", r"no gradient|graph|item\(\)|detach"),
    also=("graph_break_detach", "unused_parameters"),
    cascade=("not_learning", "loss_plateau", "loss_oscillation"),
    sites=("critic", "(loss)", "(loop)"),
)
def critic_learns_from_floats(attach, fixed):
    """values.append(value.item())."""
    env, net = Corridor(), ActorCritic()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    for _episode in range(110):
        seen, done, log_probs, values, rewards = env.reset(), False, [], [], []
        while not done:
            logits, value = net(seen)
            dist = Categorical(logits=logits)
            action = dist.sample()
            seen, reward, done = env.step(int(action))
            log_probs.append(dist.log_prob(action))
            values.append(value if fixed else torch.tensor(value.item()))
            rewards.append(reward)
        returns = torch.tensor(discounted(rewards))
        values_t = torch.stack(values)
        advantage = returns - values_t.detach()
        policy_loss = -(torch.stack(log_probs) * advantage).mean()
        v_loss = F.mse_loss(values_t, returns)
        loss = policy_loss + 0.5 * v_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(policy_loss=policy_loss, v_loss=v_loss)
    with torch.no_grad():
        value = net(torch.eye(7)[:6])[1]
    true = torch.tensor(discounted([-0.05] * 5 + [1.0]))
    return float((value - true).abs().mean())


@fault(
    "target_not_detached",
    area="reinforcement learning",
    source="https://github.com/astariul/encode-attend-navigate-pytorch/pull/3",
    cause="The policy loss holds the critic's value with its graph, so it pushes the critic away from the rewards.",
    words=(r"detach", r"(critic|value|baseline).*(policy|gradient)"),
    also=("advantage_not_detached",),
    cascade=("loss_divergence", "loss_oscillation", "not_learning", "exploding_activation"),
    sites=("critic", "(loss)", "(loop)"),
)
def policy_loss_moves_the_critic(attach, fixed):
    """(reward - value) * log_prob without a stop."""
    made = torch.Generator().manual_seed(6)
    centre = torch.randn(4, 6, generator=made)
    actor, critic = mlp(6, 32, 4), mlp(6, 32, 1)
    both = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizer = torch.optim.Adam(both.parameters(), lr=3e-3)
    session = attach(both, optimizer)
    for _ in range(260):
        kind = torch.randint(4, (64,))
        state = centre[kind] + 0.3 * torch.randn(64, 6)
        dist = Categorical(logits=actor(state))
        action = dist.sample()
        reward = 3.0 + (action == kind).float()
        value = critic(state).squeeze(1)
        advantage = reward - (value.detach() if fixed else value)
        policy_loss = -(advantage * dist.log_prob(action)).mean()
        critic_loss = F.mse_loss(value, reward)
        loss = policy_loss + 0.25 * critic_loss - 0.5 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(policy_loss=policy_loss, critic_loss=critic_loss)
    with torch.no_grad():
        kind = torch.arange(400) % 4
        state = centre[kind] + 0.3 * torch.randn(400, 6)
        reward = 3.0 + F.softmax(actor(state), 1)[torch.arange(400), kind]
        return float((critic(state).squeeze(1) - reward).abs().mean())


@fault(
    "broadcast_loss",
    area="reinforcement learning",
    source="https://github.com/sunwuzhou03/reinforcement-learning-lab/issues/1",
    cause="log_prob is not summed over the four dimensions of the action, so the target is (N, 4) and the critic's (N, 1) is spread over it.",
    words=(r"broadcast|shape", r"log_prob"),
    also=("wrong_logprob_sum",),
    cascade=("underfitting", "loss_plateau"),
    sites=("(loss)", "loss_fn", "(loop)"),
)
def entropy_of_each_dimension(attach, fixed):
    """dist.log_prob(normal_sample) keeps its last axis."""
    policy, critic = mlp(5, 32, 8), mlp(9, 48, 1)
    target_critic = copy.deepcopy(critic).requires_grad_(False)
    both = nn.ModuleDict({"policy": policy, "critic": critic})
    critic_opt = torch.optim.Adam(critic.parameters(), lr=3e-3)
    policy_opt = torch.optim.Adam(policy.parameters(), lr=1e-3)
    session = attach(both, critic_opt)
    alpha = 0.3

    def act(s):
        mu, log_std = policy(s).chunk(2, 1)
        dist = Normal(mu, log_std.clamp(-2, 1).exp())
        raw = dist.rsample()
        action = torch.tanh(raw)
        log_prob = dist.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_prob.sum(1, keepdim=True) if fixed else log_prob

    gaps = []
    for step in range(240):
        states = torch.randn(64, 5)
        with torch.no_grad():
            actions, _ = act(states)
            rewards = -(actions - states[:, :4].tanh()).pow(2).sum(1, keepdim=True)
            nxt = torch.randn(64, 5)
            next_actions, log_prob = act(nxt)
            td_target = rewards + 0.7 * (target_critic(torch.cat([nxt, next_actions], 1)) - alpha * log_prob)
        q = critic(torch.cat([states, actions], 1))
        critic_loss = F.mse_loss(q, td_target)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()
        new, log_prob = act(states)
        actor_loss = (alpha * log_prob - critic(torch.cat([states, new], 1))).mean()
        policy_opt.zero_grad()
        actor_loss.backward()
        policy_opt.step()
        with torch.no_grad():
            for t, p in zip(target_critic.parameters(), critic.parameters()):
                t.lerp_(p, 0.02)
        session.log(critic_loss=critic_loss, actor_loss=actor_loss)
        if step >= 200:
            gaps.append(float((log_prob.sum() / 64).detach()))
    return 2.5 + sum(gaps) / len(gaps)


@fault(
    "nan_in_loss",
    area="reinforcement learning",
    source="https://github.com/DLR-RM/stable-baselines3/pull/1028",
    cause="The last mini-batch of a rollout holds one sample, whose standard deviation is NaN, and the advantages are divided by it.",
    words=(r"std|deviation", r"(one|single).*(sample|element)|batch.*(1|one)"),
    cascade=("nan_backward", "nan_in_weights", "nan_forward", "nan_in_optimizer", "loss_divergence"),
    sites=("(loss)", "(loop)", "loss_fn", "(data)"),
    onset=8,
)
def advantage_of_a_batch_of_one(attach, fixed):
    """(advantages - mean) / (std + 1e-8) on a rollout of 8 * 16 + 1."""
    env, net = Corridor(), ActorCritic()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    for _rollout in range(10):
        data = []
        while len(data) < 129:
            trail = play(lambda s: net(s)[0], env)
            gains = discounted([r for _, _, r in trail])
            data += [(s, a, g) for (s, a, _), g in zip(trail, gains)]
        s, a, g = (torch.stack([torch.as_tensor(d[k]) for d in data[:129]]) for k in range(3))
        with torch.no_grad():
            logits, value = net(s)
            old, adv = Categorical(logits=logits).log_prob(a), g - value
        for pick in torch.randperm(129).split(16):
            advantages = adv[pick]
            if len(advantages) > 1 or not fixed:
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            logits, value = net(s[pick])
            ratio = (Categorical(logits=logits.nan_to_num()).log_prob(a[pick]) - old[pick]).exp()
            surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = -surrogate.mean() + 0.5 * F.mse_loss(value, g[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        if not all(bool(p.isfinite().all()) for p in net.parameters()):
            break
    return regret(lambda seen: net(seen)[0].nan_to_num())


class SoftPolicy(nn.Module):
    """A squashed normal whose range is an argument."""

    def __init__(self, scale, plain):
        super().__init__()
        self.net = mlp(4, 32, 4)
        self.scale, self.plain = scale, plain

    def forward(self, s):
        mu, log_std = self.net(s).chunk(2, 1)
        normal = Normal(mu, log_std.clamp(-3, 1).exp())
        raw = normal.rsample()
        action = self.scale * torch.tanh(raw)
        squashed = torch.tanh(raw) if self.plain else action
        log_prob = normal.log_prob(raw) - torch.log(1 - squashed.pow(2) + 1e-6)
        return action, log_prob.sum(1)


@fault(
    "nan_in_loss",
    area="reinforcement learning",
    source="https://github.com/cpnota/autonomous-learning-library/issues/139",
    cause="The correction takes the log of 1 - action**2 with an action scaled to [-2, 2], which is negative.",
    words=(r"\blog\b|log of", r"negative"),
    also=("nan_forward",),
    cascade=("nan_backward", "nan_in_weights", "nan_in_optimizer", "loss_divergence", "exploding_activation"),
    sites=("(model)", "(loss)", "net", "loss_fn"),
)
def log_of_one_minus_a_scaled_action(attach, fixed):
    """torch.log(1 - action.pow(2) + 1e-6) with tanh_scale = 2."""
    policy = SoftPolicy(2.0, plain=fixed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    session = attach(policy, optimizer)
    for _ in range(150):
        s = torch.randn(64, 4)
        action, log_prob = policy(s)
        q = -(action - 1.5 * s[:, :2].tanh()).pow(2).sum(1)
        loss = (0.05 * log_prob - q).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(policy_loss=loss)
    with torch.no_grad():
        s = torch.randn(300, 4)
        mu = policy.net(s)[:, :2]
        error = (2 * mu.tanh() - 1.5 * s[:, :2].tanh()).pow(2).mean()
    return float(error) if bool(error.isfinite()) else 5.0


@fault(
    "ctc_blank",
    area="speech",
    source="https://github.com/castorini/howl/pull/47",
    cause="CTCLoss takes class 0 for the blank, but class 0 is a word and the blank is the last class.",
    words=(r"blank",),
    also=("label_out_of_range",),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("loss_fn", "(loss)"),
)
def blank_is_a_word(attach, fixed):
    """nn.CTCLoss() where the vocabulary puts the blank last."""
    x, y = sounds()
    pairs = torch.cat([x[:-1], x[1:]], 1)
    labels = torch.stack([y[:-1], y[1:]], 1)

    class Wake(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(10, 24, 9, stride=4, padding=4)
            self.rnn = nn.GRU(24, 24, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(48, 7)

        def forward(self, x):
            h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            return F.log_softmax(self.fc(self.rnn(h)[0]), -1)

    model = Wake()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CTCLoss(blank=6 if fixed else 0, zero_infinity=True)
    session = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(pairs[:480], labels[:480], size=40, epochs=25):
        log_probs = model(xb).transpose(0, 1)
        sizes = torch.full((40,), log_probs.shape[0]), torch.full((40,), 2)
        loss = criterion(log_probs, yb, *sizes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        best = model(pairs[480:]).argmax(-1)
    wrong = 0
    for path, want in zip(best, labels[480:]):
        said = [int(c) for i, c in enumerate(path) if (i == 0 or c != path[i - 1]) and c != 6]
        wrong += said != want.tolist()
    return wrong / len(best)


@fault(
    "loss_sign_flipped",
    area="gan",
    source="https://github.com/Zeleni9/pytorch-wgan/pull/53",
    cause="g_loss.backward(one) lowers what the critic says of fakes, though the generator should raise it.",
    words=(r"sign|direction|maximi[sz]|minimi[sz]"),
    cascade=("loss_divergence", "exploding_activation", "constant_output", "not_learning"),
    sites=("(loss)", "(loop)", "G"),
)
def generator_goes_the_other_way(attach, fixed):
    """backward(one) for backward(mone)."""
    data = rings()
    G, D = mlp(4, 48, 48, 2), mlp(2, 48, 48, 1)
    both = nn.ModuleDict({"G": G, "D": D})
    g_opt = torch.optim.RMSprop(G.parameters(), lr=1e-3)
    d_opt = torch.optim.RMSprop(D.parameters(), lr=1e-3)
    session = attach(both, g_opt)
    one = torch.tensor(1.0)
    mone = -one
    stream = batches(data, size=64, epochs=60)
    for _ in range(200):
        for _critic in range(3):
            for p in D.parameters():
                p.data.clamp_(-0.1, 0.1)
            (real,) = next(stream)
            d_opt.zero_grad()
            d_real, d_fake = D(real).mean(), D(G(torch.randn(64, 4)).detach()).mean()
            d_real.backward(mone)
            d_fake.backward(one)
            d_opt.step()
        g_opt.zero_grad()
        g_loss = D(G(torch.randn(64, 4))).mean()
        g_loss.backward(mone if fixed else one)
        g_opt.step()
        session.log(g_cost=-g_loss, wasserstein_d=d_real - d_fake)
    with torch.no_grad():
        return min(energy_distance(G(torch.randn(500, 4)), data[:500]), 20.0)
