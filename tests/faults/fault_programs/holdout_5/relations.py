"""Fifth hold-out: graphs, recommenders, embeddings and pairs."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_5.about import fault
from fault_programs.holdout_5.materials import batches, citations, digits, ratings


class GCN(nn.Module):
    def __init__(self, nin, nhid, nout, layers=2):
        super().__init__()
        dims = [nin] + [nhid] * (layers - 1) + [nout]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims[:-1], dims[1:], strict=True))

    def forward(self, x, adj):
        for k, layer in enumerate(self.layers):
            x = adj @ layer(x)
            if k < len(self.layers) - 1:
                x = F.relu(x)
        return x


def normalised(adj):
    a = adj + torch.eye(len(adj))
    d = a.sum(1).rsqrt()
    return d[:, None] * a * d[None, :]


@fault(
    "aggregation_not_normalised",
    area="gnn",
    source="https://github.com/Emory-Melody/GraphSlim/issues/4",
    cause="The adjacency is not normalised by the degrees, so sums over neighbours grow with every layer.",
    words=(r"adjacen", r"neighbou?r", r"aggregat", r"degrees? of (the )?(node|vert)"),
    cascade=(
        "exploding_activation",
        "large_initial_loss",
        "exploding_gradient",
        "loss_divergence",
        "loss_oscillation",
        "lr_too_high",
        "loss_spike",
        "bad_init_scale",
        "dead_relu",
        "unnormalised_inputs",
    ),
    sites=("layers", "(model)", "(data)"),
    exact=False,
)
def sums_over_neighbours(attach, fixed):
    """A @ X without D^-1/2."""
    x, adj, y = citations(dense=0.15)
    adj_in = normalised(adj) if fixed else adj + torch.eye(len(adj))
    train = torch.arange(len(y)) % 3 != 0
    model = GCN(12, 24, 4, layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = attach(model, optimizer)
    for epoch in range(250):
        model.train()
        optimizer.zero_grad()
        output = model(x, adj_in)
        loss_train = F.cross_entropy(output[train], y[train])
        loss_train.backward()
        optimizer.step()
        session.log(loss_train=loss_train)
    with torch.no_grad():
        return float((model(x, adj_in).argmax(1) != y)[~train].float().mean())


@fault(
    "edges_reversed",
    area="gnn",
    source="from memory: PyTorch Geometric questions about flow='source_to_target' and edge_index rows swapped in directed graphs",
    cause="Messages run against the edges: a node gathers from the nodes it points to instead of those that point to it.",
    words=(r"\bedges?\b", r"adjacen"),
    cascade=("not_learning", "overfitting", "underfitting", "loss_plateau"),
    sites=("(data)", "(model)", "(function)"),
    exact=False,
)
def gathers_against_the_edges(attach, fixed):
    """row and col are swapped."""
    g = torch.Generator().manual_seed(10)
    count = 600
    x = torch.randn(count, 6, generator=g)
    edge_index = torch.randint(0, count, (2, 3000), generator=g)
    sums = torch.zeros(count).index_add_(0, edge_index[1], x[edge_index[0], 0] + 0.5 * x[edge_index[0], 1])
    y = (sums > 0).long()
    train = torch.arange(count) % 4 != 0

    class Conv(nn.Module):
        def __init__(self, cin, cout):
            super().__init__()
            self.lin_self, self.lin_nei = nn.Linear(cin, cout), nn.Linear(cin, cout)

        def forward(self, h, edges):
            row, col = edges if fixed else edges.flip(0)
            out = torch.zeros(len(h), h.size(1)).index_add_(0, col, h[row])
            return self.lin_self(h) + self.lin_nei(out)

    class SAGE(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = Conv(6, 24)
            self.head = nn.Linear(24, 2)

        def forward(self, h, edges):
            return self.head(F.relu(self.conv1(h, edges)))

    net = SAGE()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3, weight_decay=1e-3)
    session = attach(net, opt)
    for _ in range(250):
        opt.zero_grad()
        loss = F.cross_entropy(net(x, edge_index)[train], y[train])
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float((net(x, edge_index).argmax(1) != y)[~train].float().mean())


@fault(
    "batch_axis_mixed",
    area="gnn",
    source="from memory: PyTorch Geometric questions, pooling x.mean(0) over a batch of graphs instead of global_mean_pool(x, batch)",
    cause="Nodes of all graphs in the batch are pooled together, and the mean is added to every graph.",
    words=(r"batch.*(axis|dimension|mixed)", r"pool", r"samples? .*(mix|influence|depend)"),
    cascade=("not_learning", "constant_output", "underfitting", "loss_plateau"),
    sites=("(model)", "(function)", "read"),
)
def pools_all_graphs_together(attach, fixed):
    """mean(0) instead of one mean for each graph."""
    g = torch.Generator().manual_seed(8)
    nodes = torch.randn(600, 10, 5, generator=g)
    kind = torch.randint(0, 2, (600,), generator=g)
    link = (torch.rand(600, 10, 10, generator=g) < 0.3).float()
    nodes[:, :, 0] += (kind * 2 - 1)[:, None] * 0.5

    class GraphNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.msg, self.upd = nn.Linear(5, 16), nn.Linear(5, 16)
            self.read = nn.Linear(16, 2)

        def forward(self, x, a, batch):
            h = F.relu(self.upd(x) + a @ self.msg(x) / 3)
            count = int(batch.max()) + 1
            pooled = torch.zeros(count, 16).index_add_(0, batch, h) / 10 if fixed else h.mean(0).expand(count, 16)
            return self.read(pooled)

    net = GraphNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)

    def collate(x, a):
        return x.flatten(0, 1), torch.block_diag(*a), torch.arange(len(x)).repeat_interleave(10)

    for xb, ab, yb in batches(nodes[100:], link[100:], kind[100:], size=20, epochs=8):
        loss = F.cross_entropy(net(*collate(xb, ab)), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float((net(*collate(nodes[:100], link[:100])).argmax(1) != kind[:100]).float().mean())


@fault(
    "label_shuffle_mismatch",
    area="gnn",
    source="from memory: Cora loading posts, features sorted by paper id while edges and labels use the file's order",
    cause="Feature rows were reordered, but labels and edges were not: nodes carry features of others.",
    words=(r"shuffle.?mismatch", r"(label|target|feature|row).*(not|mis).*(match|align|belong|order)", r"reorder"),
    cascade=("overfitting", "underfitting", "not_learning", "loss_plateau"),
    sites=("(data)", "loader"),
    exact=False,
)
def features_in_another_order(attach, fixed):
    """Rows sorted by id on one side only."""
    x, adj, y = citations()
    paper_id = torch.randperm(len(y), generator=torch.Generator().manual_seed(9))
    rows = torch.arange(len(y)) if fixed else paper_id.argsort()
    x = x[rows]
    a_hat = normalised(adj)
    train = torch.arange(len(y)) % 3 != 0
    net = GCN(12, 32, 4)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    session = attach(net, opt)
    for _ in range(200):
        logp = F.log_softmax(net(x, a_hat), 1)
        loss = F.nll_loss(logp[train], y[train])
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float((net(x, a_hat).argmax(1) != y)[~train].float().mean())


class MF(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.user_emb, self.item_emb = nn.Embedding(80, width), nn.Embedding(60, width)
        nn.init.normal_(self.user_emb.weight, std=0.1)
        nn.init.normal_(self.item_emb.weight, std=0.1)

    def forward(self, u, i):
        return (self.user_emb(u) * self.item_emb(i)).sum(-1)


@torch.no_grad()
def misranked(model, liked):
    """Return the share of pairs of a liked and another item in the wrong order (1 - AUC)."""
    s = model.user_emb.weight @ model.item_emb.weight.t()
    if not s.isfinite().all():
        return 1.0
    bad = []
    for u in range(80):
        pos, neg = s[u][liked[u]], s[u][~liked[u]]
        if len(pos) and len(neg):
            bad.append((pos[:, None] <= neg[None]).float().mean())
    return float(torch.stack(bad).mean())


@fault(
    "nan_in_loss",
    area="recommender",
    source="https://github.com/tanatosuu/GDE/pull/2",
    cause="The BPR loss takes the logarithm of a difference of sigmoids, which is negative for wrong pairs: NaN.",
    words=(r"log(arithm)? of", r"\bnan\b", r"log.*negative"),
    also=("nan_forward", "nan_backward"),
    cascade=("nan_in_weights", "nan_in_optimizer", "nan_forward", "nan_backward"),
    sites=("(loss)", "(function)", "(loop)", "loss_fn"),
)
def logarithm_of_a_difference(attach, fixed):
    """log(sigmoid(a) - sigmoid(b)) instead of log(sigmoid(a - b))."""
    u, i, liked = ratings()
    model = MF()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, opt)
    for users, items in batches(u, i, size=64, epochs=20):
        nega = torch.randint(0, 60, (64,))
        a, b = model(users, items), model(users, nega)
        out = (a - b).sigmoid() if fixed else a.sigmoid() - b.sigmoid()
        loss = -torch.log(out).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(bpr=loss)
    return misranked(model, liked)


@fault(
    "loss_sign_flipped",
    area="recommender",
    source="https://github.com/maciejkula/spotlight/issues/185 (the form of the BPR loss; here its arguments are swapped)",
    cause="The ranking loss gets the negative score where the positive belongs: it pushes liked items down.",
    words=(r"\bsign\b", r"swap", r"wrong (way|direction)", r"revers"),
    cascade=(),
    sites=("(loss)", "loss_fn", "(loop)"),
)
def ranks_the_liked_items_last(attach, fixed):
    """Positive and negative are swapped."""
    u, i, liked = ratings()
    model = MF()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    session = attach(model, optimizer)

    def bpr_loss(positive_predictions, negative_predictions):
        return -F.logsigmoid(positive_predictions - negative_predictions).mean()

    for epoch in range(15):
        epoch_loss = 0.0
        for users, items in batches(u, i, size=64):
            pos, neg = model(users, items), model(users, torch.randint(0, 60, (64,)))
            loss = bpr_loss(pos, neg) if fixed else bpr_loss(neg, pos)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item()
        session.log(epoch_loss=epoch_loss)
    return misranked(model, liked)


def embedder(out=16):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, out))


@torch.no_grad()
def neighbour_errors(net, xtr, ytr, xte, yte):
    net.eval()
    d = torch.cdist(net(xte), net(xtr))
    return float((ytr[d.argmin(1)] != yte).float().mean())


@torch.no_grad()
def pair_errors(net, x, y):
    """Return how often a sample of another class is nearer than one of the same class (ties count half)."""
    net.eval()
    d = torch.cdist(net(x), net(x))
    same, eye = y[:, None] == y[None], torch.eye(len(y), dtype=torch.bool)
    pos, neg = d[same & ~eye], d[~same]
    k = min(len(pos), len(neg))
    pos, neg = pos[torch.randperm(len(pos))[:k]], neg[torch.randperm(len(neg))[:k]]
    return float(((pos > neg).float() + 0.5 * (pos == neg).float()).mean())


def triplets(y):
    order = torch.randperm(len(y))
    pos = torch.stack([((y == c).nonzero()[:, 0])[torch.randint(int((y == c).sum()), (1,))[0]] for c in y])
    neg = torch.stack([((y != c).nonzero()[:, 0])[torch.randint(int((y != c).sum()), (1,))[0]] for c in y])
    return order, pos, neg


@fault(
    "arguments_swapped",
    area="metric learning",
    source="from memory: discuss.pytorch.org, TripletMarginLoss(anchor, negative, positive)",
    cause="Positive and negative are swapped in TripletMarginLoss: unlike samples are drawn together.",
    words=(r"swap", r"\bsign\b", r"wrong (way|direction)"),
    also=("loss_sign_flipped",),
    cascade=("constant_output", "loss_plateau"),
    sites=("(loss)", "loss_fn", "(loop)"),
)
def triplet_with_swapped_arguments(attach, fixed):
    """(anchor, negative, positive)."""
    xtr, ytr, xte, yte = digits()
    net = embedder()
    criterion = nn.TripletMarginLoss(margin=1.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    session = attach(net, optimizer)
    for xb, yb in batches(xtr, ytr, size=60, epochs=6):
        _, p, n = triplets(yb)
        a, p, n = net(xb), net(xb[p]), net(xb[n])
        loss = criterion(a, p, n) if fixed else criterion(a, n, p)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return pair_errors(net, xte, yte)


@fault(
    "targets_of_wrong_convention",
    area="metric learning",
    source="from memory: discuss.pytorch.org, CosineEmbeddingLoss with targets 0 and 1 (it wants -1 and 1)",
    cause="CosineEmbeddingLoss is given targets 0 and 1; it wants -1 and 1, so unlike pairs have no loss and all embeddings collapse.",
    words=(r"(target|label)s?.*(-1|convention|0 and 1|outside)", r"collapse"),
    also=("label_out_of_range",),
    cascade=("constant_output", "loss_plateau", "vanishing_gradient"),
    sites=("(loss)", "loss_fn", "(data)"),
)
def cosine_loss_with_zeros_and_ones(attach, fixed):
    """Targets 0 / 1 instead of -1 / 1."""
    xtr, ytr, xte, yte = digits()
    net = embedder(8)
    loss_fn = nn.CosineEmbeddingLoss(margin=0.2)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    session = attach(net, opt)
    for x1, y1 in batches(xtr, ytr, size=64, epochs=10):
        pick = torch.randint(len(xtr), (64,))
        same = (y1 == ytr[pick]).float()
        half = torch.rand(64) < 0.3
        other = torch.stack([xtr[(ytr == c).nonzero()[torch.randint(80, (1,))[0], 0]] for c in y1])
        x2 = torch.where(half[:, None, None, None], other, xtr[pick])
        same = torch.where(half, torch.ones(64), same)
        target = same * 2 - 1 if fixed else same
        loss = loss_fn(net(x1), net(x2), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        a = F.normalize(net(xte), dim=1)

    class Unit(nn.Module):
        def forward(self, x):
            return a

    return pair_errors(Unit(), xte, yte)


@fault(
    "temperature_multiplied",
    area="contrastive",
    source="from memory: SimCLR re-implementations that multiply similarities by the temperature",
    cause="Similarities are multiplied by the temperature instead of divided, so the softmax stays flat.",
    words=(r"temperature", r"(logit|similarit\w*).*(scale|too small|flat|range)"),
    also=("output_range_mismatch",),
    cascade=("loss_plateau", "not_learning", "underfitting", "lr_too_low", "vanishing_gradient"),
    sites=("(loss)", "loss_fn", "(function)"),
)
def multiplies_by_the_temperature(attach, fixed):
    """sim * 0.1."""
    xtr, ytr, xte, yte = digits()
    encoder, projector = embedder(32), nn.Linear(32, 16)
    model = nn.Sequential(encoder, projector)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    session = attach(model, optimizer)

    def views(x):
        return x + 0.05 * torch.randn_like(x), x.roll(int(torch.randint(-1, 2, (1,))), -1) + 0.05 * torch.randn_like(x)

    tau = 0.1
    for (x,) in batches(xtr, size=64, epochs=25):
        a, b = views(x)
        za, zb = F.normalize(model(a), dim=1), F.normalize(model(b), dim=1)
        sim = za @ zb.t()
        logits = sim / tau if fixed else sim * tau
        loss = F.cross_entropy(logits, torch.arange(64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)

    @torch.no_grad()
    def retrieval():
        a, b = views(xte)
        za, zb = F.normalize(model(a), dim=1), F.normalize(model(b), dim=1)
        return float(((za @ zb.t()).argmax(1) != torch.arange(len(xte))).float().mean())

    return retrieval()


@fault(
    "same_input_twice",
    area="metric learning",
    source="from memory: siamese network questions, forward passes input1 through both branches",
    cause="Both branches of the siamese network get the first picture, so their difference is always zero.",
    words=(r"same (input|picture|tensor)", r"input.*(ignored|unused|not used|no effect)", r"ignored? input"),
    cascade=(
        "constant_output",
        "not_learning",
        "loss_plateau",
        "class_imbalance_collapse",
        "unused_parameters",
        "vanishing_gradient",
        "constant_feature",
    ),
    sites=("(model)", "(function)", "head", "cnn"),
)
def both_branches_get_one_picture(attach, fixed):
    """forward_once(input1) twice."""
    xtr, ytr, xte, yte = digits()

    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32))
            self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward_once(self, x):
            return self.cnn(x)

        def forward(self, input1, input2):
            output1 = self.forward_once(input1)
            output2 = self.forward_once(input2 if fixed else input1)
            return self.head(torch.abs(output1 - output2)).squeeze(1)

    net = Siamese()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)

    def pairs(x, y, size):
        a = torch.randint(len(x), (size,))
        b = torch.randint(len(x), (size,))
        like = torch.stack([(y == c).nonzero()[torch.randint(30, (1,))[0], 0] for c in y[a]])
        b = torch.where(torch.rand(size) < 0.5, like, b)
        return x[a], x[b], (y[a] == y[b]).float()

    for _ in range(300):
        x1, x2, same = pairs(xtr, ytr, 48)
        loss = F.binary_cross_entropy_with_logits(net(x1, x2), same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        x1, x2, same = pairs(xte, yte, 500)
        return float(((net(x1, x2) > 0).float() != same).float().mean())
