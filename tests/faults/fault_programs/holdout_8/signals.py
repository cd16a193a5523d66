"""Eighth hold-out: speech, series, graphs, tastes, equations, rewards and many clients."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

from fault_programs.holdout_8.about import fault
from fault_programs.holdout_8.matter import Lift, clinic, draw, pages, scans, spans, utterances


def net_of(*sizes, act=nn.ReLU):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


@fault(
    "nan_in_loss",
    area="text to speech",
    source="https://github.com/wenet-e2e/wetts/pull/26",
    cause="Durations of zero frames are taken through a plain logarithm, so their target is minus infinity.",
    words=(r"\blog\b|logarithm", r"zero|inf"),
    also=("nan_in_data", "nan_forward"),
    cascade=("nan_backward", "nan_in_weights", "nan_in_optimizer", "loss_divergence"),
    sites=("(data)", "(loss)", "loss_fn", "(loop)"),
)
def duration_of_zero_in_the_log_domain(attach, fixed):
    """log_duration_target = torch.log(duration)."""
    made = torch.Generator().manual_seed(841)
    phone = torch.randint(0, 15, (300, 8), generator=made)
    usual = torch.randint(0, 9, (15,), generator=made)
    duration = (usual[phone] + torch.randint(-1, 2, phone.shape, generator=made)).clamp(min=0)
    encoder, predictor = (
        nn.Embedding(15, 24),
        nn.Sequential(nn.Conv1d(24, 24, 3, padding=1), nn.ReLU(), nn.Conv1d(24, 1, 1)),
    )
    model = nn.ModuleDict({"encoder": encoder, "duration_predictor": predictor})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for ids, d in draw(phone[:240], duration[:240], size=24, epochs=15):
        log_duration = predictor(encoder(ids).transpose(1, 2))[:, 0]
        log_duration_target = torch.log(d.float() + 1) if fixed else torch.log(d.float())
        duration_loss = F.mse_loss(log_duration, log_duration_target)
        optimizer.zero_grad()
        duration_loss.backward()
        optimizer.step()
        session.log(duration_loss=duration_loss)
    with torch.no_grad():
        said = predictor(encoder(phone[240:]).transpose(1, 2))[:, 0].exp() - 1
        return float((said - duration[240:]).abs().mean())


class SpeakerNet(nn.Module):
    """The mean over frames, then a vector for the speaker."""

    def __init__(self, speakers=6):
        super().__init__()
        self.frames = nn.Sequential(nn.Linear(8, 24), nn.ReLU())
        self.out = nn.Linear(24, speakers)

    def forward(self, x, keep):
        h = self.frames(x)
        return self.out((h * keep[..., None]).sum(1) / keep.sum(1, keepdim=True))


@fault(
    "mask_not_applied",
    area="speech",
    source="https://github.com/janhq/WhisperSpeech/pull/19",
    cause="The mask is made from the length after padding, so it is all ones and padded frames count like real ones.",
    words=(r"mask", r"padd"),
    also=("padding_dominates",),
    cascade=("underfitting", "loss_plateau"),
    sites=("(data)", "(model)", "(loop)"),
)
def mask_from_the_padded_length(attach, fixed):
    """mask[: len(padded) // hop] = 1."""
    x, sizes, who = utterances()
    x = torch.cat([x, torch.zeros(len(x), 170, 8)], 1) + 0.0
    x[torch.arange(x.shape[1]) >= sizes[:, None]] = 2.0  # the silence of this recorder is not zero
    model = SpeakerNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    session = attach(model, optimizer)

    def masks(sizes, padded):
        frames = sizes if fixed else torch.full_like(sizes, padded)
        return torch.arange(padded) < frames[:, None]

    for xb, sb, yb in draw(x[:340], sizes[:340], who[:340], size=34, epochs=9):
        loss = F.cross_entropy(model(xb, masks(sb, xb.shape[1])), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        said = model(x[340:], masks(sizes[340:], x.shape[1])).argmax(1)
    return float((said != who[340:]).float().mean())


class SpeakerDecoder(nn.Module):
    """Cosines to the speakers."""

    def __init__(self, width, speakers, really):
        super().__init__()
        self.final, self.really = nn.Linear(width, speakers, bias=False), really

    def forward(self, x):
        if self.really:
            return F.linear(F.normalize(x), F.normalize(self.final.weight))
        for W in self.final.parameters():
            W = F.normalize(W, p=2, dim=1)
        return self.final(F.normalize(x))


@fault(
    "result_discarded",
    area="speaker verification",
    source="https://github.com/NVIDIA-NeMo/Speech/pull/12246",
    cause="The loop normalises a local name, so the weights stay as they are, their lengths grow and the 'cosines' exceed one.",
    words=(r"normali[sz]", r"(discard|no effect|local|not (used|applied))"),
    also=("setting_without_effect",),
    cascade=("exploding_activation", "overfitting"),
    sites=("decoder", "final", "(model)"),
)
def normalises_the_loop_variable(attach, fixed):
    """for W in self.final.parameters(): W = F.normalize(W)."""
    x, sizes, who = utterances()
    keep = torch.arange(x.shape[1]) < sizes[:, None]
    pooled = x.sum(1) / keep.sum(1, keepdim=True)
    net = nn.Module()
    net.encoder = net_of(8, 32, 16)
    net.decoder = SpeakerDecoder(16, 6, really=fixed)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    session = attach(net, optimizer)
    margin = 0.2
    for xb, yb in draw(pooled[:340], who[:340], size=34, epochs=20):
        cosine = net.decoder(net.encoder(xb))
        logits = 4 * (cosine - margin * F.one_hot(yb, 6))
        loss = F.cross_entropy(logits, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(net.decoder(net.encoder(pooled[340:])).abs().max()) - 1


def forecaster(past=24, ahead=6):
    return net_of(past, 48, ahead)


@fault(
    "target_scale",
    area="time series",
    source="https://github.com/sktime/pytorch-forecasting/pull/2393",
    cause="The past is normalised by its own mean and deviation, but the target is left in megawatt.",
    words=(r"target|y\b", r"(scale|normali[sz])"),
    also=("train_val_preproc_mismatch",),
    cascade=(
        "lr_too_low",
        "large_initial_loss",
        "underfitting",
        "exploding_gradient",
        "loss_plateau",
        "input_ignored",
        "constant_output",
    ),
    sites=("(data)", "(loss)", "(loop)", "loss_fn"),
)
def past_is_normalised_but_not_the_target(attach, fixed):
    """target_past goes through the normaliser, y does not."""
    past, future = spans()

    class EncoderNormalizer:
        def fit(self, x):
            self.centre, self.spread = x.mean(1, keepdim=True), x.std(1, keepdim=True)
            return self

        def transform(self, x):
            return (x - self.centre) / self.spread

    def item(rows):
        normalizer = EncoderNormalizer().fit(past[rows])
        y = normalizer.transform(future[rows]) if fixed else future[rows]
        return normalizer.transform(past[rows]), y, normalizer

    model = forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for step in range(260):
        x, y, _ = item(torch.randint(0, 1200, (32,)))
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        x, y, normalizer = item(torch.arange(1230, 1471))
        return float((model(x) - y).abs().mean() / y.std())


@fault(
    "future_leak",
    area="time series",
    source="https://github.com/shiyu-coder/Kronos/issues/228",
    cause="Mean and deviation are taken over the window together with the future, so the normalised past tells where the future goes.",
    words=(r"future|leak|look.?ahead", r"normali[sz]|mean|window"),
    also=("data_leakage", "train_val_preproc_mismatch"),
    sites=("(data)", "loader", "(loop)"),
)
def window_is_normalised_with_its_future(attach, fixed):
    """x_mean = x.mean() over lookback plus predict."""
    walk = torch.cumsum(torch.randn(1500, generator=torch.Generator().manual_seed(842)), 0)
    cut = walk.unfold(0, 20 + 20, 1)

    def windows(rows, honest):
        x = cut[rows]
        base = x[:, :20] if honest else x
        x = (x - base.mean(1, keepdim=True)) / (base.std(1, keepdim=True) + 1e-5)
        return x[:, :20], x[:, 20:]

    model = net_of(20, 64, 20)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for step in range(280):
        past, future = windows(torch.randint(0, 1200, (48,)), honest=fixed)
        loss = F.smooth_l1_loss(model(past), future)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 14 == 0:
            session.log(train_loss=loss)
    with torch.no_grad():
        past, future = windows(torch.arange(1260, 1461), honest=True)
        # against the forecast that nothing changes
        return float(F.l1_loss(model(past), future) / F.l1_loss(past[:, -1:].expand(-1, 20), future))


class GCNConv(nn.Module):
    """A layer of a graph network; loops are only added while normalising."""

    def __init__(self, a, b, normalize=True, add_self_loops=True, separate=False):
        super().__init__()
        self.lin, self.normalize, self.add_self_loops, self.separate = (
            nn.Linear(a, b),
            normalize,
            add_self_loops,
            separate,
        )

    def forward(self, x, edges):
        n = len(x)
        if self.add_self_loops and (self.normalize or self.separate):
            edges = torch.cat([edges, torch.arange(n).repeat(2, 1)], 1)
        h = self.lin(x)
        weight = torch.ones(edges.shape[1])
        if self.normalize:
            degree = torch.zeros(n).index_add(0, edges[1], weight).clamp(min=1)
            weight = (degree[edges[0]] * degree[edges[1]]).rsqrt()
        return torch.zeros(n, h.shape[1]).index_add(0, edges[1], weight[:, None] * h[edges[0]])


@fault(
    "setting_without_effect",
    area="graph",
    source="https://github.com/pyg-team/pytorch_geometric/issues/6251",
    cause="add_self_loops=True is only looked at while normalising, so without normalisation a node never sees its own features.",
    words=(r"self.?loop", r"(ignored|without effect|own features)"),
    also=("input_ignored",),
    cascade=("underfitting", "overfitting"),
    sites=("conv", "(model)"),
)
def loops_are_only_added_when_normalising(attach, fixed):
    """GCNConv(normalize=False, add_self_loops=True)."""
    made = torch.Generator().manual_seed(843)
    _, edges, _ = pages()
    edges = edges[:, torch.randperm(edges.shape[1], generator=made)[:500]]
    x = torch.randn(300, 10, generator=made)
    y = (x[:, 0] + 0.8 * x[:, 1] > 0).long()  # only a node's own features tell
    model = nn.Module()
    model.conv = GCNConv(10, 16, normalize=False, separate=fixed)
    model.head = nn.Linear(16, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    train = torch.arange(300) < 200
    for epoch in range(150):
        out = model.head(F.relu(model.conv(x, edges)))
        loss = F.cross_entropy(out[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        out = model.head(F.relu(model.conv(x, edges)))
    return float((out[~train].argmax(1) != y[~train]).float().mean())


def edge_softmax(score, index, nodes):
    """Return a softmax over all edges that share an index."""
    score = (score - score.max()).exp()
    total = torch.zeros(nodes, score.shape[1]).index_add(0, index, score)
    return score / (total[index] + 1e-16)


class GAT(nn.Module):
    def __init__(self, a, b, by):
        super().__init__()
        self.lin, self.att, self.by = nn.Linear(a, b), nn.Linear(2 * b, 1), by

    def forward(self, x, edges):
        h = self.lin(x)
        alpha = F.leaky_relu(self.att(torch.cat([h[edges[0]], h[edges[1]]], 1)), 0.2)
        alpha = edge_softmax(alpha, edges[self.by], len(x))
        return torch.zeros_like(h).index_add(0, edges[1], alpha * h[edges[0]])


@fault(
    "wrong_dim_softmax",
    area="graph",
    source="https://github.com/pyg-team/pytorch_geometric/issues/224",
    cause="Attention is normalised over the edges that leave a node instead of those that arrive, so what a node receives does not sum to one.",
    words=(r"softmax|attention|normali[sz]", r"(source|target|index|wrong|incoming|outgoing)"),
    also=("edges_reversed", "aggregation_not_normalised"),
    cascade=("underfitting", "exploding_activation", "overfitting"),
    sites=("conv", "(model)", "0", "1", "layers"),
)
def attention_sums_over_the_sources(attach, fixed):
    """softmax(alpha, edge_index[0]) while messages flow to edge_index[1]."""
    made = torch.Generator().manual_seed(844)
    nodes = 240
    value = torch.randn(nodes, 4, generator=made)
    # few pages are linked by very many, most by a few; the answer is the mean of what links here
    popular = torch.arange(nodes) < 24
    chance = torch.where(popular, 0.5, 0.015)[None, :].expand(nodes, nodes)
    link = torch.rand(nodes, nodes, generator=made) < chance
    link |= torch.eye(nodes, dtype=torch.bool)
    edges = link.nonzero().T
    mean = (link.float().T @ value) / link.sum(0)[:, None]
    y = mean @ torch.tensor([1.0, -1.0, 0.5, 0.8]) * 2
    model = nn.ModuleDict({"conv": GAT(4, 16, by=1 if fixed else 0), "out": nn.Linear(16, 1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for epoch in range(200):
        said = model["out"](model["conv"](value, edges))[:, 0]
        loss = F.mse_loss(said[:180], y[:180])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        said = model["out"](model["conv"](value, edges))[:, 0]
        return float(F.mse_loss(said[180:], y[180:]) / y[180:].var())


@fault(
    "false_negatives",
    area="recommender",
    source="https://github.com/benfred/implicit/pull/103",
    cause="Negative items are drawn without looking whether the user likes them, so liked items are pushed down as well.",
    words=(r"negative", r"(like|positive|verify|sampl)"),
    also=("pairs_with_itself",),
    cascade=("label_shuffle_mismatch", "loss_plateau", "underfitting", "loss_oscillation"),
    sites=("(data)", "(loop)", "(loss)"),
)
def negatives_may_be_liked(attach, fixed):
    """j = randint(items), unchecked."""
    made = torch.Generator().manual_seed(845)
    likes = (torch.rand(120, 30, generator=made) < 0.15).float()
    likes[:, :3] = 1.0
    group = torch.arange(120) % 4
    for g in range(4):
        likes[group == g, 3 + 6 * g : 9 + 6 * g] = (torch.rand(30, 6, generator=made) < 0.9).float()
    users, items = nn.Embedding(120, 8), nn.Embedding(30, 8)
    bpr = nn.ModuleDict({"user_factors": users, "item_factors": items})
    optimizer = torch.optim.Adam(bpr.parameters(), lr=1e-2)
    session = attach(bpr, optimizer)
    pairs = likes.nonzero()
    late = []
    for step in range(300):
        u, i = pairs[torch.randint(0, len(pairs), (256,))].T
        j = torch.randint(0, 30, (256,))
        if fixed:
            new = likes[u, j] == 0
            u, i, j = u[new], i[new], j[new]
        score = (users(u) * (items(i) - items(j))).sum(1)
        loss = -F.logsigmoid(score).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        late.append(loss.item())
    with torch.no_grad():
        scores = users.weight @ items.weight.T
        wrong = (scores[:, :, None] < scores[:, None, :]).float() * likes[:, :, None] * (1 - likes[:, None, :])
        auc_error = float(wrong.sum() / (likes.sum(1) * (1 - likes).sum(1)).sum())
    return auc_error + sum(late[-20:]) / 20


class Cloze(nn.Module):
    """Fills gaps in a history of items."""

    def __init__(self, items=12, width=32, length=9):
        super().__init__()
        self.item, self.pos = nn.Embedding(items + 1, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, items)

    def forward(self, ids):
        return self.out(self.block(self.item(ids) + self.pos[: ids.shape[1]]))


@fault(
    "train_val_preproc_mismatch",
    area="recommender",
    source="https://github.com/RUCAIBox/RecBole/issues/1530",
    cause="Training never puts the mask at the end of a history, but recommending always does.",
    words=(r"mask", r"(last|end)", r"(train|test|valid).*(differ|mismatch|never)"),
    also=("augmentation_mismatch",),
    cascade=("overfitting",),
    sites=("(data)", "(validation)", "(loop)"),
)
def last_item_is_never_hidden(attach, fixed):
    """mask positions from range(len - 1)."""
    made = torch.Generator().manual_seed(846)
    start, stride = torch.randint(0, 12, (600, 1), generator=made), torch.randint(1, 4, (600, 1), generator=made)
    history = (start + stride * torch.arange(9)) % 12
    model = Cloze()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    mask_token = 12
    places = 9 if fixed else 8
    for (ids,) in draw(history[:500], size=50, epochs=28):
        at = torch.randint(0, places, (len(ids),))
        rows = torch.arange(len(ids))
        masked = ids.clone()
        masked[rows, at] = mask_token
        loss = F.cross_entropy(model(masked)[rows, at], ids[rows, at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    test = history[500:].clone()
    test[:, -1] = mask_token
    with torch.no_grad():
        said = model(test)[:, -1]
    session.log(hit_at_1=(said.argmax(1) == history[500:, -1]).float().mean())
    return float((said.argmax(1) != history[500:, -1]).float().mean())


@fault(
    "wrong_derivative",
    area="physics-informed",
    source="https://github.com/prateekbhustali/Physics-Informed-Neural-Networks/issues/4",
    cause="The second derivatives are taken of both first ones at once, so mixed derivatives get into the Laplacian.",
    words=(r"derivative|gradient|laplac", r"(mix|both|sum|cross)"),
    sites=("(loss)", "(loop)", "loss_fn"),
)
def laplacian_with_mixed_derivatives(attach, fixed):
    """autograd.grad(u_x, g, ones) and then columns 0 and 1."""
    k = 2.0
    model = net_of(2, 40, 40, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)

    def truth(g):
        return torch.sin(k * g[:, :1] + 0.7 * g[:, 1:])

    def loss_pde(g):
        g = g.requires_grad_(True)
        u = model(g)
        u_g = torch.autograd.grad(u, g, torch.ones_like(u), create_graph=True)[0]
        if fixed:
            u_xx = torch.autograd.grad(u_g[:, [0]], g, torch.ones_like(u), create_graph=True)[0][:, [0]]
            u_yy = torch.autograd.grad(u_g[:, [1]], g, torch.ones_like(u), create_graph=True)[0][:, [1]]
        else:
            both = torch.autograd.grad(u_g, g, torch.ones_like(u_g), create_graph=True)[0]
            u_xx, u_yy = both[:, [0]], both[:, [1]]
        return (u_xx + u_yy + (k * k + 0.49) * truth(g.detach())).pow(2).mean()

    for step in range(280):
        inside = torch.rand(128, 2) * 2 - 1
        edge = torch.rand(64, 2) * 2 - 1
        edge[torch.arange(64), torch.randint(0, 2, (64,))] = torch.where(torch.rand(64) < 0.5, 1.0, -1.0)
        pde, boundary = loss_pde(inside), (model(edge) - truth(edge)).pow(2).mean()
        loss = pde + 10 * boundary
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(pde=pde, boundary=boundary)
    g = torch.rand(500, 2) * 2 - 1
    with torch.no_grad():
        return float((model(g) - truth(g)).pow(2).mean().sqrt())


class PhysicsNet:
    """A net with its optimizer, as in a notebook on Burgers' equation."""

    def __init__(self):
        self.model = net_of(1, 32, 32, 1, act=nn.Tanh)
        self.adam = torch.optim.Adam(self.model.parameters(), lr=4e-3)
        self.criterion = nn.MSELoss()

    def loss_func(self):
        t = torch.rand(64, 1, requires_grad=True) * 2
        u = self.model(t)
        du = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
        ode = self.criterion(du, -1.5 * u)
        start = self.criterion(self.model(torch.zeros(1, 1)), torch.ones(1, 1))
        loss = ode + start
        loss.backward()
        return loss


@fault(
    "missing_zero_grad",
    area="physics-informed",
    source="https://github.com/jayroxis/PINNs/issues/6",
    cause="loss_func was written for LBFGS and clears the wrong optimizer, so Adam sees the sum of all gradients so far.",
    words=(r"zero_grad|not cleared|accumulat",),
    cascade=("loss_oscillation", "loss_divergence", "exploding_gradient", "loss_spike", "loss_plateau", "not_learning"),
    sites=("optimizer", "(loop)"),
)
def adam_is_never_cleared(attach, fixed):
    """self.adam.zero_grad() is missing in loss_func."""
    net = PhysicsNet()
    session = attach(net.model, net.adam)
    net.model.train()
    tail = []
    for step in range(250):
        if fixed:
            net.adam.zero_grad()
        loss = net.loss_func()
        net.adam.step()
        tail.append(float(loss.detach()))
        if step % 50 == 0:
            session.log(loss=loss)
    t = torch.linspace(0, 2, 50)[:, None]
    with torch.no_grad():
        return float((net.model(t) - torch.exp(-1.5 * t)).abs().mean())


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = net_of(16, 48, 2, act=nn.Tanh), net_of(16, 48, 1, act=nn.Tanh)

    def value(self, s):
        return self.critic(s)[..., 0]


def rollout(agent, env, seen, length):
    """Play on from what is seen; return tensors and the next sight."""
    rows = []
    for _ in range(length):
        with torch.no_grad():
            dist = Categorical(logits=agent.actor(seen))
            action = dist.sample()
            nxt, reward, done = env.step(int(action))
            rows.append(
                (
                    seen,
                    action,
                    dist.log_prob(action),
                    agent.value(seen),
                    torch.tensor(reward),
                    torch.tensor(float(done)),
                )
            )
            seen = env.reset() if done else nxt
    return [torch.stack(column) for column in zip(*rows)], seen


@fault(
    "target_from_output",
    area="reinforcement learning",
    source="https://github.com/vwxyzjn/cleanrl/pull/337",
    cause="Returns are made from the stored advantages, which are still zero, so the critic is asked for what it already says.",
    words=(r"return|target|advantage", r"(zero|own|itself|output|empty)"),
    also=("term_does_nothing",),
    cascade=("loss_plateau", "underfitting", "vanishing_gradient", "not_learning"),
    sites=("(loss)", "(loop)", "critic"),
)
def returns_from_advantages_not_yet_stored(attach, fixed):
    """storage.replace(advantages=advantages, returns=storage.advantages + storage.values)."""
    env, agent = Lift(), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    session = attach(agent, optimizer)
    seen = env.reset()
    for update in range(24):
        (s, a, logp, values, rewards, dones), seen = rollout(agent, env, seen, 160)
        storage = {"advantages": torch.zeros(160), "values": values}
        advantages, last, nxt = torch.zeros(160), 0.0, agent.value(seen).detach()
        for t in reversed(range(160)):
            after = nxt if t == 159 else values[t + 1]
            delta = rewards[t] + 0.97 * after * (1 - dones[t]) - values[t]
            advantages[t] = last = delta + 0.97 * 0.95 * (1 - dones[t]) * last
        returns = (advantages if fixed else storage["advantages"]) + storage["values"]
        for epoch in range(3):
            for pick in torch.randperm(160).split(40):
                dist = Categorical(logits=agent.actor(s[pick]))
                ratio = (dist.log_prob(a[pick]) - logp[pick]).exp()
                adv = advantages[pick]
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
                v_loss = 0.5 * (agent.value(s[pick]) - returns[pick]).pow(2).mean()
                loss = pg_loss + v_loss - 0.01 * dist.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        session.log(value_loss=v_loss, policy_loss=pg_loss, reward=rewards.mean())
    with torch.no_grad():  # how far the critic is from what the greedy lift earns on the way
        errors = []
        for at in range(8):
            for goal in range(8):
                if at != goal:
                    way = abs(at - goal)
                    worth = 0.97 ** (way - 1) - 0.05 * sum(0.97**n for n in range(way - 1))
                    errors.append(abs(float(agent.value(torch.cat([torch.eye(8)[at], torch.eye(8)[goal]]))) - worth))
    return sum(errors) / len(errors)


@fault(
    "mask_not_applied",
    area="reinforcement learning",
    source="https://github.com/areal-project/AReaL/pull/1346",
    cause="The advantage of a sequence is the mean over all its places, padding too, so what stands in the padding decides.",
    words=(r"mask|padd", r"advantage|sequence"),
    also=("padding_dominates",),
    cascade=("wrong_loss_reduction", "loss_oscillation", "not_learning", "loss_plateau", "underfitting"),
    sites=("(loss)", "(loop)", "loss_fn"),
)
def advantage_of_the_padding(attach, fixed):
    """advantages.mean(-1) before the loss mask."""
    policy = nn.Sequential(nn.Embedding(10, 32), nn.Linear(32, 10))
    opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
    session = attach(policy, opt)
    for step in range(150):
        sizes = torch.randint(2, 9, (64, 1))
        prompt = torch.randint(0, 10, (64,))
        tokens, logps, last = [], [], prompt
        for _ in range(8):
            dist = Categorical(logits=policy(last))
            last = dist.sample()
            tokens.append(last)
            logps.append(dist.log_prob(last))
        tokens, logps = torch.stack(tokens, 1), torch.stack(logps, 1)
        mask = (torch.arange(8) < sizes).float()
        before = torch.cat([prompt[:, None], tokens[:, :-1]], 1)
        gain = (tokens == (before + 1) % 10).float()  # counting up is what is wanted
        token_adv = torch.where(mask > 0, gain, 4.0 * torch.randn(64, 8))  # stale buffer contents behind the end
        seq_adv = (token_adv * mask).sum(1) / mask.sum(1) if fixed else token_adv.mean(1)
        seq_adv = (seq_adv - seq_adv.mean()) / (seq_adv.std() + 1e-6)
        loss = -(seq_adv[:, None] * logps * mask).sum() / mask.sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss, reward=(gain * mask).sum() / mask.sum())
    with torch.no_grad():
        chance = policy(torch.arange(10)).softmax(-1)
        return 1 - float(chance[torch.arange(10), (torch.arange(10) + 1) % 10].mean())


@fault(
    "terminal_bootstrapped",
    area="reinforcement learning",
    source="https://github.com/DLR-RM/stable-baselines3/issues/76",
    cause="The entropy bonus of the next state is added outside of (1 - done), so the end of an episode earns a bonus for ever after.",
    words=(r"entropy|bonus", r"done|terminal|end"),
    cascade=("target_scale", "loss_plateau", "underfitting"),
    sites=("(loss)", "(loop)", "critic"),
)
def entropy_after_the_end(attach, fixed):
    """q_backup = r + (1 - d) * gamma * target_q - ent_coef * next_log_prob."""
    actor, critic = net_of(16, 48, 2), net_of(16, 48, 2)
    target = copy.deepcopy(critic).requires_grad_(False)
    nets = nn.ModuleDict({"actor": actor, "critic": critic})
    opt = torch.optim.Adam(nets.parameters(), lr=3e-3)
    session = attach(nets, opt)
    env, buffer = Lift(), []
    seen = env.reset()
    for step in range(1200):
        with torch.no_grad():
            action = int(Categorical(logits=actor(seen)).sample())
        nxt, reward, done = env.step(action)
        there = env.at == env.goal
        buffer.append((seen, torch.tensor(action), torch.tensor(reward), nxt, torch.tensor(float(there))))
        seen = env.reset() if done else nxt
        if step < 200 or step % 4:
            continue
        rows = [buffer[k] for k in torch.randint(0, len(buffer), (64,)).tolist()]
        s, a, r, s2, d = (torch.stack(column) for column in zip(*rows))
        with torch.no_grad():
            logp = actor(s2).log_softmax(1)
            soft = (logp.exp() * target(s2)).sum(1)
            bonus = -0.3 * (logp.exp() * logp).sum(1)
            backup = r + 0.9 * (1 - d) * (soft + bonus) if fixed else r + 0.9 * (1 - d) * soft + 0.9 * bonus
        critic_loss = F.mse_loss(critic(s).gather(1, a[:, None])[:, 0], backup)
        logp = actor(s).log_softmax(1)
        actor_loss = (logp.exp() * (0.3 * logp - critic(s).detach())).sum(1).mean()
        opt.zero_grad()
        (critic_loss + actor_loss).backward()
        opt.step()
        with torch.no_grad():
            for t, p in zip(target.parameters(), critic.parameters()):
                t.lerp_(p, 0.05)
        session.log(critic_loss=critic_loss, actor_loss=actor_loss)
    with torch.no_grad():  # one floor below the goal, going up ends the episode with a reward of one
        states = torch.stack([torch.cat([torch.eye(8)[k], torch.eye(8)[k + 1]]) for k in range(7)])
        return float((critic(states)[:, 1] - 1.0).clamp(min=0).mean())


class MetaLearner:
    """Learns a start from which a few steps fit a sine."""

    def __init__(self, model, inner_lr, through_data):
        self.model, self.inner_lr, self.through_data = model, inner_lr, through_data

    def inner_update(self, x, y):
        if self.through_data:
            adapted = copy.deepcopy(self.model)
            grads = torch.autograd.grad(F.mse_loss(adapted(x), y), adapted.parameters(), create_graph=True)
            for p, g in zip(adapted.parameters(), grads):
                p.data -= self.inner_lr * g
            return adapted
        params = dict(self.model.named_parameters())
        grads = torch.autograd.grad(F.mse_loss(self.model(x), y), params.values(), create_graph=True)
        fast = {name: p - self.inner_lr * g for (name, p), g in zip(params.items(), grads)}
        return lambda inputs: torch.func.functional_call(self.model, fast, (inputs,))


@fault(
    "graph_break_detach",
    area="meta-learning",
    source="https://github.com/KanishJebaMathewM/Truxify/issues/13118",
    cause="The inner step writes through .data into a copy, so the loss of the query has no way back to the meta-weights.",
    words=(r"\.data|detach|graph|cop(y|ies)", r"(meta|gradient|never)"),
    also=("optimizer_step_noop", "stale_params_in_optimizer", "params_not_in_optimizer", "unused_parameters"),
    cascade=("not_learning", "loss_plateau", "underfitting"),
    sites=("optimizer", "(model)", "(loop)"),
)
def inner_step_through_data(attach, fixed):
    """param.data -= inner_lr * grad in a deep copy."""
    model = net_of(1, 40, 40, 1, act=nn.Tanh)
    outer = torch.optim.Adam(model.parameters(), lr=3e-3)
    learner = MetaLearner(model, inner_lr=0.05, through_data=not fixed)
    session = attach(model, outer)
    late = []
    for step in range(200):
        meta_loss = 0.0
        for task in range(4):
            phase = torch.rand(()) * 3.1
            x = torch.rand(20, 1) * 6 - 3
            y = torch.sin(x + phase) + 2.0
            adapted = learner.inner_update(x[:10], y[:10])
            meta_loss = meta_loss + F.mse_loss(adapted(x[10:]), y[10:])
        outer.zero_grad()
        (meta_loss / 4).backward()
        outer.step()
        session.log(meta_loss=meta_loss / 4)
        late.append(float(meta_loss.detach()) / 4)
    return sum(late[-30:]) / 30


class Aggregator:
    """Adds what clients send, weighted by how much data they have."""

    def __init__(self, model, reset):
        self.model, self.reset = model, reset

    def aggregate(self, updates, total):
        state = self.model.state_dict()
        summed = {key: torch.zeros_like(value) if self.reset else value.clone() for key, value in state.items()}
        for weights, count in updates:
            for key, value in weights.items():
                summed[key] += value * (count / total)
        self.model.load_state_dict(summed)


@fault(
    "aggregate_not_reset",
    area="federated",
    source="https://github.com/cisco-open/flame/pull/95",
    cause="The global weights of the last round are not cleared before those of the clients are added, so weights double every round.",
    words=(r"reset|clear|accumulat|add", r"(weights|round|global|average)"),
    cascade=(
        "loss_divergence",
        "exploding_activation",
        "loss_spike",
        "exploding_gradient",
        "loss_oscillation",
        "not_learning",
        "saturated_activation",
        "large_initial_loss",
    ),
    sites=("(model)", "(loop)"),
    onset=13,
)
def rounds_add_up(attach, fixed):
    """global weights += weighted client weights."""
    xtr, ytr, xte, yte = scans()
    xtr, xte = xtr.flatten(1), xte.flatten(1)
    shards = torch.arange(1300).chunk(4)
    server = net_of(64, 32, 10)
    agg = Aggregator(server, reset=fixed)
    client = net_of(64, 32, 10)
    optimizer = torch.optim.SGD(client.parameters(), lr=0.4)
    session = attach(client, optimizer)
    for round_number in range(10):
        updates = []
        for shard in shards:
            client.load_state_dict(server.state_dict())
            for xb, yb in draw(xtr[shard], ytr[shard], size=50):
                loss = F.cross_entropy(client(xb), yb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss)
            updates.append((copy.deepcopy(client.state_dict()), len(shard)))
        agg.aggregate(updates, total=1300)
    with torch.no_grad():
        return min(float(F.cross_entropy(server(xte), yte)), 50.0)


@fault(
    "average_starts_from_noise",
    area="federated",
    source="https://github.com/OpenMined/PySyft/pull/4595",
    cause="The average is summed onto a new model, whose random weights stay in the sum.",
    words=(r"average|sum|aggregat", r"(random|initial|zero|noise)"),
    also=("weights_reset_in_loop",),
    cascade=(
        "bad_init_scale",
        "loss_spike",
        "loss_oscillation",
        "underfitting",
        "loss_divergence",
        "exploding_activation",
    ),
    sites=("(model)", "(loop)"),
    onset=10,
)
def average_is_added_to_a_new_model(attach, fixed):
    """model = type(models[0])(); p += mean of the clients."""
    xtr, ytr, xte, yte = clinic()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(30, 24), nn.Linear(24, 2)

        def forward(self, x):
            return self.fc2(torch.tanh(self.fc1(x)))

    def federated_avg(models):
        result = type(models[0])()
        for name, p in result.named_parameters():
            if fixed:
                nn.init.zeros_(p)
            p.data += sum(dict(m.named_parameters())[name].data for m in models) / len(models)
        return result

    model = Net()
    for turn in range(10):
        clients = []
        for shard in torch.randperm(400).chunk(2):
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.05)
            session = attach(local, optimizer)
            for xb, yb in draw(xtr[shard], ytr[shard], size=20):
                optimizer.zero_grad()
                loss = F.cross_entropy(local(xb), yb)
                loss.backward()
                optimizer.step()
                session.log(loss=loss)
            clients.append(local)
        model = federated_avg(clients)
    with torch.no_grad():
        return float(F.cross_entropy(model(xte), yte))
