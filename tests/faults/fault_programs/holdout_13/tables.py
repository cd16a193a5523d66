"""Thirteenth hold-out: tables, recommendations and graphs."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
from sklearn.preprocessing import LabelEncoder
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fault_programs.holdout_13.about import fault
from fault_programs.holdout_13.material import flats


def _standard(table):
    return (table - table.mean(0)) / table.std(0)


@fault(
    "graphs_not_offset",
    area="graph classification",
    source="https://github.com/deepchem/deepchem/pull/3291",
    cause="The edges of a graph are moved by the size of the graph before it instead of the sum of all before it, so edges lie in wrong graphs.",
    words=(r"offset|cumul|cumsum|number of nodes|edge_index|edges?", r"graph|batch|wrong|sum|nodes|index"),
    also=("batch_axis_mixed",),
    cascade=("underfitting", "loss_plateau", "overfitting", "not_learning"),
    sites=("(data)", "(model)", "loader", "conv"),
)
def batch_of_graphs_without_a_running_sum(attach, fixed):
    """edge_index + num_nodes_list[i], where it should be the cumulative sum."""

    def one_graph():
        nodes, label = random.randint(5, 10), random.randrange(2)
        kind = torch.randint(0, 3, (nodes,))
        chosen = [  # edges lie mostly between nodes of one kind, or mostly between two kinds
            (a, b)
            for a in range(nodes)
            for b in range(a)
            if random.random() < (0.75 if (kind[a] == kind[b]) == bool(label) else 0.15)
        ] or [(0, 1)]
        edges = torch.tensor(chosen).t()
        return F.one_hot(kind, 3).float(), torch.cat([edges, edges.flip(0)], 1), label

    class BatchGraphData:
        def __init__(self, graphs):
            num_nodes_list = [0] + [len(x) for x, _, _ in graphs]
            before = np.cumsum(num_nodes_list) if fixed else num_nodes_list
            self.x = torch.cat([x for x, _, _ in graphs])
            self.edge_index = torch.cat([e + int(before[i]) for i, (_, e, _) in enumerate(graphs)], 1)
            self.graph_index = torch.arange(len(graphs)).repeat_interleave(torch.tensor(num_nodes_list[1:]))
            self.y = torch.tensor([y for _, _, y in graphs])

    class GraphNet(nn.Module):
        def __init__(self, width=24):
            super().__init__()
            self.own1, self.conv1 = nn.Linear(3, width), nn.Linear(3, width)
            self.own2, self.conv2 = nn.Linear(width, width), nn.Linear(width, width)
            self.out = nn.Linear(width, 2)

        def forward(self, g):
            x, (a, b) = g.x, g.edge_index
            for own, conv in ((self.own1, self.conv1), (self.own2, self.conv2)):
                near = torch.zeros_like(x).index_add(0, b, x[a])
                x = F.relu(own(x) + conv(near / 3))
            total = x.new_zeros(len(g.y), x.shape[1]).index_add(0, g.graph_index, x)
            return self.out(total / 8)

    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    graphs = [one_graph() for _ in range(400)]
    for epoch in range(9):
        random.shuffle(graphs)
        for i in range(0, 400, 20):
            batch = BatchGraphData(graphs[i : i + 20])
            loss = F.cross_entropy(model(batch), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    wrong = 0
    with torch.no_grad():
        for _ in range(200):
            alone = BatchGraphData([one_graph()])
            wrong += int(model(alone).argmax(1) != alone.y)
    return wrong / 200


@fault(
    "ids_coded_anew",
    area="recommender",
    source="https://github.com/hidasib/GRU4Rec/issues/15",
    cause="Items are numbered anew in the test data, so a number there stands for another item than in training.",
    words=(r"encod|index|ids?\b|number|map|code", r"test|val|anew|differ|other|train|mismatch|separat"),
    also=("train_val_preproc_mismatch",),
    cascade=("overfitting",),
    sites=("(data)", "(validation)", "loader"),
)
def items_of_the_test_set_are_encoded_anew(attach, fixed):
    """test["item"] = LabelEncoder().fit_transform(test["item"])."""
    users, titles = 60, [f"film-{random.randrange(10**6):06d}" for _ in range(80)]
    taste, film = torch.randn(users, 3), torch.randn(80, 3)

    def ratings(count, known):
        user, title = torch.randint(0, users, (count,)), torch.randint(0, known, (count,))
        return user, [titles[i] for i in title], (taste[user] * film[title]).sum(1) + 0.2 * torch.randn(count)

    class MatrixFactorization(nn.Module):
        def __init__(self, n_users, n_items, n_factors=6):
            super().__init__()
            self.user_factors, self.item_factors = nn.Embedding(n_users, n_factors), nn.Embedding(n_items, n_factors)
            self.user_bias, self.item_bias = nn.Embedding(n_users, 1), nn.Embedding(n_items, 1)
            nn.init.normal_(self.user_factors.weight, std=0.4)
            nn.init.normal_(self.item_factors.weight, std=0.4)

        def forward(self, user, item):
            score = (self.user_factors(user) * self.item_factors(item)).sum(1)
            return score + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1)

    user, title, rating = ratings(3600, known=80)
    test_user, test_title, test_rating = ratings(500, known=50)
    encoder = LabelEncoder().fit(title)
    item = torch.tensor(encoder.transform(title))
    test_item = torch.tensor((encoder if fixed else LabelEncoder().fit(test_title)).transform(test_title))

    model = MatrixFactorization(users, 80)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=1e-5)
    session = attach(model, optimizer)
    for epoch in range(7):
        model.train()
        for u, i, r in DataLoader(TensorDataset(user, item, rating), batch_size=90, shuffle=True):
            loss = F.mse_loss(model(u, i), r)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(train_mse=loss.item())
        model.eval()
        with torch.no_grad():
            mse = F.mse_loss(model(test_user, test_item), test_rating).item()
        session.log(val_mse=mse)
    return mse / test_rating.var().item()


@fault(
    "best_selected_backwards",
    area="stocks",
    source="https://github.com/microsoft/qlib/issues/263",
    cause="The score is the negative loss, and weights are kept when it is lower than the best, so the worst are kept.",
    words=(
        r"best|keep|kept|score|early stop",
        r"worst|backward|<|lower|wrong (direction|way)|invert|sign|compar|first",
    ),
    cascade=("underfitting", "overfitting"),
    sites=("(loop)", "(model)", "(validation)"),
)
def fund_keeps_the_weights_of_its_worst_epoch(attach, fixed):
    """if val_score < best_score, where val_score = -mse."""
    factors = torch.randn(900, 12)
    gain = torch.tanh(factors[:, 0] - factors[:, 1]) + 0.5 * factors[:, 2] * factors[:, 3] + 0.1 * torch.randn(900)

    class TabNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask, self.fc1 = nn.Linear(12, 12), nn.Linear(12, 64)
            self.fc2, self.final = nn.Linear(64, 32), nn.Linear(32, 1)

        def forward(self, x):
            x = x * torch.sigmoid(self.mask(x)) * 2
            return self.final(F.relu(self.fc2(F.relu(self.fc1(x))))).squeeze(1)

    class TabnetModel:
        def __init__(self, n_epochs=16, early_stop=20):
            self.net, self.n_epochs, self.early_stop = TabNet(), n_epochs, early_stop
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=3e-3)
            self.session = attach(self.net, self.optimizer)

        def better(self, score, best):
            return score > best if fixed else score < best

        def fit(self, train, valid):
            best_score, stop_steps, best_param = None, 0, None
            for epoch_idx in range(self.n_epochs):
                self.net.train()
                for x, y in DataLoader(TensorDataset(*train), batch_size=40, shuffle=True):
                    loss = F.mse_loss(self.net(x), y)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    self.session.log(loss=loss.item())
                self.net.eval()
                with torch.no_grad():
                    val_loss = F.mse_loss(self.net(valid[0]), valid[1]).item()
                self.session.log(val_loss=val_loss)
                if best_score is None or self.better(-val_loss, best_score):
                    best_score, stop_steps = -val_loss, 0
                    best_param = copy.deepcopy(self.net.state_dict())
                else:
                    stop_steps += 1
                    if stop_steps >= self.early_stop:
                        break
            self.net.load_state_dict(best_param)

    model = TabnetModel()
    model.fit((factors[:600], gain[:600]), (factors[600:750], gain[600:750]))
    with torch.no_grad():
        return float(F.mse_loss(model.net(factors[750:]), gain[750:]) / gain[750:].var())


@fault(
    "target_scale",
    area="regression",
    source="https://discuss.pytorch.org/t/neural-network-could-not-learn-on-this-type-of-data-why/96648/5",
    cause="The targets are hundreds of thousands and far from zero, so the network only creeps towards their mean.",
    words=(r"target|price|label|output", r"scale|large|huge|normali|standardi|thousand|range|far"),
    cascade=(
        "underfitting",
        "large_initial_loss",
        "loss_plateau",
        "constant_output",
        "lr_too_low",
        "exploding_gradient",
        "not_learning",
        "exploding_activation",
    ),
    sites=("(data)", "(loss)", "loader", "loss_fn"),
    exact=False,
)
def prices_are_learned_in_full(attach, fixed):
    """y is the price in full; only the inputs are normalised."""
    table, price = flats(900)
    X, y = _standard(table), price * 1000
    centre, spread = (y.mean(), y.std()) if fixed else (0.0, 1.0)
    target = ((y - centre) / spread).unsqueeze(1)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(in_features=6, out_features=50, bias=True)
            self.fc2 = nn.Linear(in_features=50, out_features=1, bias=True)

        def forward(self, x):
            return self.fc2(F.relu(self.fc1(x)))

    model, criterion = Network(), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for epoch in range(20):
        for i in torch.randperm(700).split(35):
            optimizer.zero_grad()
            out = model(X[i])
            loss = criterion(out, target[i])
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        guess = model(X[700:]).squeeze(1) * spread + centre
    return float(F.mse_loss(guess, y[700:]) / y[700:].var())


@fault(
    "unnormalised_inputs",
    area="regression",
    source="from memory: forum questions on tables with years, metres and counts side by side that are given to the network as they are",
    cause="The columns go in as they are, with years near 2000 and metres in thousands, so the network sees little else.",
    words=(r"normali|standardi|scal|raw", r"input|feature|column|metre|year|large|range"),
    cascade=(
        "large_initial_loss",
        "underfitting",
        "exploding_gradient",
        "loss_oscillation",
        "loss_plateau",
        "dead_relu",
        "exploding_activation",
        "constant_output",
        "loss_spike",
        "bad_init_scale",
        "saturated_activation",
        "lr_too_high",
        "not_learning",
    ),
    sites=("(data)", "loader", "(input)"),
    exact=False,
)
def table_goes_in_as_it_was_in_the_file(attach, fixed):
    """torch.tensor(df[columns].values), straight into the first layer."""
    table, price = flats(1000)
    price = (price - price.mean()) / price.std()
    values = _standard(table) if fixed else table

    class Flats(Dataset):
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, i):
            row = self.rows[i]
            return {"features": values[row], "price": price[row]}

    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    rows = list(range(1000))
    loader = DataLoader(Flats(rows[:800]), batch_size=40, shuffle=True)
    for epoch in range(14):
        for batch in loader:
            loss = F.mse_loss(model(batch["features"])[:, 0], batch["price"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float(F.mse_loss(model(values[800:])[:, 0], price[800:]) / price[800:].var())


@fault(
    "lr_too_high",
    area="table transformer",
    source="from memory: questions on a small transformer with Adam(lr=0.05) and no warmup that answers the same for every row",
    cause="A learning rate of 0.05 for Adam is far too high for a transformer without warmup.",
    words=(r"learning rate|\blr\b|step size|steps?", r"high|large|big|long|0\.05"),
    cascade=(
        "constant_output",
        "loss_plateau",
        "loss_oscillation",
        "not_learning",
        "loss_spike",
        "exploding_activation",
        "underfitting",
        "dead_relu",
        "large_initial_loss",
        "attention_entropy_collapse",
        "loss_divergence",
        "vanishing_gradient",
    ),
    sites=("optimizer", "(loop)", "(model)"),
    exact=False,
)
def columns_as_tokens_with_a_hasty_adam(attach, fixed):
    """optim = torch.optim.Adam(net.parameters(), lr=5e-2)."""
    cfg = {"lr": 1e-3 if fixed else 5e-2, "dim": 32, "epochs": 8, "batch": 32}
    table, price = flats(900)
    x, y = _standard(table), torch.bucketize(price, price.quantile(torch.tensor([0.33, 0.67])))

    class FTTransformer(nn.Module):
        def __init__(self, columns, dim):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(columns, dim) * dim**-0.5)
            self.bias = nn.Parameter(torch.randn(columns, dim) * dim**-0.5)
            self.cls = nn.Parameter(torch.zeros(1, 1, dim))
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(dim, 4, 2 * dim, 0.1, batch_first=True) for _ in range(2)
            )
            self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 3))

        def forward(self, x):
            h = torch.cat([self.cls.expand(len(x), -1, -1), x[..., None] * self.weight + self.bias], 1)
            for block in self.blocks:
                h = block(h)
            return self.head(h[:, 0])

    net = FTTransformer(6, cfg["dim"])
    optim = torch.optim.Adam(net.parameters(), lr=cfg["lr"])
    session = attach(net, optim)
    for epoch in range(cfg["epochs"]):
        net.train()
        for i in torch.randperm(700).split(cfg["batch"]):
            loss = F.cross_entropy(net(x[i]), y[i])
            optim.zero_grad()
            loss.backward()
            optim.step()
            session.log(loss=loss.item())
    net.eval()
    with torch.no_grad():
        return (net(x[700:]).argmax(1) != y[700:]).float().mean().item()


@fault(
    "weight_decay_too_large",
    area="churn",
    source="from memory: questions on Adam(weight_decay=0.5) against overfitting, after which the network says the same of everybody",
    cause="A weight decay of 0.5 in Adam is stronger than the gradients and draws all weights to zero.",
    words=(r"weight.?decay|\bl2\b|regulari", r"large|strong|high|zero|shrink|0\.5"),
    cascade=("constant_output", "loss_plateau", "underfitting", "not_learning", "vanishing_gradient"),
    sites=("optimizer", "(model)", "(loop)"),
    exact=False,
)
def churn_net_is_decayed_to_nothing(attach, fixed):
    """torch.optim.Adam(clf.parameters(), lr=0.002, weight_decay=0.5)."""

    def customers(count):
        x = torch.randn(count, 14)
        leaves = x[:, 0] * x[:, 1] + x[:, 2] - 0.5 * x[:, 3] + 0.3 * torch.randn(count) > 0
        return x, leaves.float()

    class ChurnClassifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = nn.Sequential(nn.Linear(14, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
            self.logit = nn.Linear(32, 1)

        def forward(self, x):
            return self.logit(self.hidden(x)).flatten()

    clf, loss_fn = ChurnClassifier(), nn.BCEWithLogitsLoss()
    opt = torch.optim.Adam(clf.parameters(), lr=0.002, weight_decay=1e-4 if fixed else 0.5)
    session = attach(clf, opt)
    x, y = customers(1200)
    x_val, y_val = customers(400)
    for epoch in range(12):
        for xb, yb in DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True):
            opt.zero_grad()
            loss = loss_fn(clf(xb), yb)
            loss.backward()
            opt.step()
            session.log(loss=loss.item())
        with torch.no_grad():
            session.log(val_loss=loss_fn(clf(x_val), y_val).item())
    with torch.no_grad():
        return loss_fn(clf(x_val), y_val).item()


@fault(
    "data_leakage",
    area="claims",
    source="from memory: questions on models with an error of nearly zero that fail in use, because df.values still held the column to be predicted",
    cause="The features are all columns of the table, and one of them is the target.",
    words=(r"target|label|column", r"leak|input|feature|contain|hold|include|drop"),
    cascade=("overfitting", "train_val_preproc_mismatch"),
    sites=("(data)", "loader", "(input)"),
)
def claim_is_among_its_own_features(attach, fixed):
    """X = df.values, y = df["claim"].values: the column was never dropped."""
    names = ["age", "power", "years", "distance", "claim", "region"]

    def policies(count):
        columns = {name: torch.randn(count) for name in names}
        columns["claim"] = (
            columns["power"] * columns["years"] + columns["distance"] - 0.6 * columns["age"] + 0.1 * torch.randn(count)
        )
        return columns

    df = policies(1000)
    used = [name for name in names if name != "claim"] if fixed else names
    X, y = torch.stack([df[name] for name in used], 1), df["claim"]
    net = nn.Sequential(nn.Linear(len(used), 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    loader = DataLoader(TensorDataset(X[:800], y[:800]), batch_size=40, shuffle=True)
    for epoch in range(14):
        for features, claim in loader:
            loss = F.mse_loss(net(features).squeeze(-1), claim)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        with torch.no_grad():
            session.log(val_loss=F.mse_loss(net(X[800:]).squeeze(-1), y[800:]).item())
    df = policies(400)
    truth, df["claim"] = df["claim"], torch.zeros(400)  # in use nobody knows the claim yet
    with torch.no_grad():
        guess = net(torch.stack([df[name] for name in used], 1)).squeeze(-1)
    return float(F.mse_loss(guess, truth) / truth.var())


@fault(
    "single_class_output",
    area="binary classification",
    source="from memory: questions on nn.Softmax(dim=1) after nn.Linear(n, 1), whose output is always 1",
    cause="A softmax over the one output is always 1, so the loss never changes.",
    words=(r"softmax", r"one|single|always|\b1\b|constant|sigmoid"),
    also=("constant_output",),
    cascade=("loss_plateau", "not_learning", "vanishing_gradient", "underfitting", "wrong_dim_softmax"),
    sites=("(model)", "(loss)", "softmax", "output"),
)
def credit_model_has_a_softmax_over_one_output(attach, fixed):
    """self.output = nn.Linear(32, 1); self.activation = nn.Softmax(dim=1)."""

    class CreditModel(nn.Module):
        def __init__(self, n_inputs):
            super().__init__()
            self.hidden1, self.hidden2 = nn.Linear(n_inputs, 32), nn.Linear(32, 32)
            self.output = nn.Linear(32, 1)
            self.activation = nn.Sigmoid() if fixed else nn.Softmax(dim=1)

        def forward(self, X):
            X = torch.relu(self.hidden1(X))
            X = torch.relu(self.hidden2(X))
            return self.activation(self.output(X))

    X = torch.randn(1000, 9)
    y = (X[:, :3].sum(1) + X[:, 3] * X[:, 4] > 0).float().unsqueeze(1)

    def train_model(train_dl, model):
        criterion = nn.BCELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        session = attach(model, optimizer)
        for epoch in range(12):
            for inputs, targets in train_dl:
                optimizer.zero_grad()
                yhat = model(inputs)
                loss = criterion(yhat, targets)
                loss.backward()
                optimizer.step()
                session.log(loss=loss.item())

    model = CreditModel(9)
    train_model(DataLoader(TensorDataset(X[:700], y[:700]), batch_size=35, shuffle=True), model)
    with torch.no_grad():
        return ((model(X[700:]) > 0.5).float() != y[700:]).float().mean().item()
