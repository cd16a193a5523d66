"""Fifteenth hold-out: tables, ratings and a graph."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.preprocessing import LabelEncoder
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_15.about import fault
from fault_programs.holdout_15.material import loans


@fault(
    "double_sigmoid",
    area="recommender",
    source="https://github.com/yudi-mars/daisyRec/pull/15",
    cause="The network ends in a sigmoid, and BCEWithLogitsLoss applies another one, so the loss cannot fall far and the gradients are weak.",
    words=(r"sigmoid", r"logits|twice|double|second|already|bce"),
    cascade=(
        "loss_plateau",
        "underfitting",
        "vanishing_gradient",
        "not_learning",
        "constant_output",
        "single_class_output",
        "saturated_activation",
    ),
    sites=("(loss)", "(model)", "sigmoid", "predict_layer"),
)
def neural_ratings_pass_two_sigmoids(attach, fixed):
    """prediction.sigmoid() in forward(), nn.BCEWithLogitsLoss() in fit()."""
    users, items = 120, 80
    taste, kind = torch.randn(users, 3), torch.randn(items, 3)
    likes = (taste @ kind.t() > 1.0).float()

    class NeuMF(nn.Module):
        def __init__(self, factors=6):
            super().__init__()
            self.embed_user, self.embed_item = nn.Embedding(users, factors), nn.Embedding(items, factors)
            self.mlp = nn.Sequential(nn.Linear(2 * factors, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
            self.predict_layer = nn.Linear(16 + factors, 1)
            for table in (self.embed_user, self.embed_item):
                nn.init.normal_(table.weight, std=0.1)

        def forward(self, user, item):
            u, i = self.embed_user(user), self.embed_item(item)
            prediction = self.predict_layer(torch.cat([u * i, self.mlp(torch.cat([u, i], 1))], 1)).view(-1)
            return prediction if fixed else prediction.sigmoid()

    pairs = torch.cartesian_prod(torch.arange(users), torch.arange(items))[torch.randperm(users * items)]
    train, test = pairs[:8400], pairs[8400:]
    model, criterion = NeuMF(), nn.BCEWithLogitsLoss()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for epoch in range(14):
        current_loss = 0.0
        for i in torch.randperm(len(train)).split(128):
            user, item = train[i].t()
            model.zero_grad()
            loss = criterion(model(user, item), likes[user, item])
            loss.backward()
            optimizer.step()
            current_loss += loss.item()
            session.log(loss=loss.item())
    user, item = test.t()
    with torch.no_grad():
        return criterion(model(user, item), likes[user, item]).item()


@fault(
    "best_state_shares_memory",
    area="molecules",
    source="https://github.com/THGLab/LP-PDBBind/pull/1",
    cause="best_weights is what state_dict() returns, whose tensors are those of the network, so it changes with every later step.",
    words=(r"state_dict|best", r"copy|deepcopy|clone|refer|share|alias|same (memory|tensor)"),
    also=("wrong_state_returned",),
    cascade=("overfitting",),
    sites=("(loop)", "(model)", "(checkpoint)", "model", "(validation)"),
)
def best_weights_follow_the_network(attach, fixed):
    """best_weights = model.state_dict() when the validation is better; model.load_state_dict(best_weights) in the end."""

    def assays(count, noise):
        x, y = loans(count)
        return torch.cat([x, torch.randn(count, 12)], 1), y + noise * torch.randn(count)

    x, y = assays(260, 1.6)
    x_val, y_val = assays(200, 0.3)
    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    best_loss, best_weights, best_epoch = float("inf"), None, 0
    for epoch in range(120):
        model.train()
        for i in torch.randperm(260).split(26):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[i]).squeeze(1), y[i])
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            val_loss = F.mse_loss(model(x_val).squeeze(1), y_val).item()
        session.log(val_loss=val_loss)
        if val_loss < best_loss:
            best_loss, best_epoch = val_loss, epoch
            best_weights = {k: v.clone() if fixed else v for k, v in model.state_dict().items()}
        if epoch - best_epoch >= 25:
            break
    model.load_state_dict(best_weights)
    x, y = assays(500, 0.3)
    with torch.no_grad():
        return F.mse_loss(model(x).squeeze(1), y).item() / y.var().item()


@fault(
    "broadcast_loss",
    area="tabular library",
    source="https://github.com/OpenTabular/DeepTab/pull/455",
    cause="The target is a column already and gets one more axis, so the loss compares (b, 1) with (b, 1, 1), which is every row with every row.",
    words=(r"broadcast|shape|unsqueeze|axis|dimension|all.?pairs|\(b, ?1",),
    cascade=("constant_output", "loss_plateau", "underfitting", "not_learning"),
    sites=("(loss)", "(data)", "(loop)"),
)
def column_of_targets_is_unsqueezed(attach, fixed):
    """y.unsqueeze(dim=1) in the data module, which documents y of shape (n,) or (n, 1)."""
    x, y = loans(1000)

    class TabularDataModule:
        def setup(self, X, y):
            labels = torch.as_tensor(y, dtype=torch.float32)
            self.labels = labels.reshape(-1, 1) if fixed else labels.unsqueeze(dim=1)
            self.data = TensorDataset(torch.as_tensor(X, dtype=torch.float32), self.labels)

        def train_dataloader(self):
            return DataLoader(self.data, batch_size=50, shuffle=True)

    class MLPRegressor(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(8, 64), nn.SELU(), nn.Linear(64, 32), nn.SELU())
            self.tabular_head = nn.Linear(32, 1)

        def forward(self, x):
            return self.tabular_head(self.backbone(x))

    module = TabularDataModule()
    module.setup(x[:800].numpy(), y[:800, None].numpy())
    model = MLPRegressor()
    optimizer = optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    loss_fct = nn.MSELoss()
    session = attach(model, optimizer)
    for epoch in range(30):
        for data, labels in module.train_dataloader():
            loss = loss_fct(model(data), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(train_loss=loss.item())
    with torch.no_grad():
        return float((model(x[800:]).squeeze(1) - y[800:]).square().mean() / y[800:].var())


@fault(
    "unnormalised_inputs",
    area="credit",
    source="from memory: forum questions on a net for a table with ages, incomes and amounts as they stand in the file, cured by StandardScaler",
    cause="The columns go into the network as they are in the file, with incomes in tens of thousands beside numbers below one.",
    words=(r"scal|normali|standardi|raw|range|unit", r"input|feature|column|data|income"),
    cascade=(
        "large_initial_loss",
        "loss_plateau",
        "loss_oscillation",
        "underfitting",
        "dead_relu",
        "exploding_activation",
        "exploding_gradient",
        "loss_spike",
        "not_learning",
        "saturated_activation",
        "constant_output",
    ),
    sites=("(data)", "(model)", "loader", "0"),
    exact=False,
)
def incomes_go_in_as_they_are(attach, fixed):
    """torch.tensor(df.values, dtype=torch.float32), straight into nn.Linear."""
    z, _ = loans(1500)
    default = (1.5 * z[:, 0] - z[:, 1] + z[:, 2] * z[:, 3] > 0.3).float()
    age, income = 42 + 12 * z[:, 0], 48000 + 15000 * z[:, 1]
    amount, rate = 9000 + 2500 * z[:, 2], 0.08 + 0.02 * z[:, 3]
    values = torch.stack([age, income, amount, rate, 5 + 2 * z[:, 4], 700 + 40 * z[:, 5]], 1).numpy()
    scaled = (values - values[:1200].mean(0)) / values[:1200].std(0)
    x = torch.tensor(scaled if fixed else values, dtype=torch.float32)

    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    criterion = nn.BCEWithLogitsLoss()
    optimizer = optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(x[:1200], default[:1200]), batch_size=64, shuffle=True)
    for epoch in range(25):
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = criterion(model(xb).squeeze(1), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float(((model(x[1200:]).squeeze(1) > 0) != (default[1200:] > 0.5)).float().mean())


@fault(
    "weight_decay_too_large",
    area="key points",
    source="https://github.com/BVLC/caffe/issues/1396",
    cause="A weight decay of 0.5 draws all weights to zero, so any input gives the same output.",
    words=(r"weight.?decay|regulari|l2", r"large|high|strong|too|zero|0\.5|dominat"),
    cascade=("constant_output", "underfitting", "loss_plateau", "vanishing_gradient", "not_learning", "input_ignored"),
    sites=("optimizer", "(model)"),
    exact=False,
)
def any_input_gives_the_same_points(attach, fixed):
    """optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=0.5)."""

    def faces(count):
        z = torch.randn(count, 8)
        mix = torch.linspace(-1, 1, 8 * 24).view(8, 24).sin()
        points = torch.stack(
            [torch.tanh(z[:, 0] + 0.5 * z[:, 1]), torch.tanh(z[:, 2]) * z[:, 3].sign(), 0.5 * z[:, 4]], 1
        )
        return torch.cat([z, z @ mix / 3], 1) + 0.05 * torch.randn(count, 32), points

    net = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 3))
    optimizer = optim.SGD(net.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4 if fixed else 0.5)
    session = attach(net, optimizer)
    x, y = faces(1000)
    for epoch in range(40):
        for i in torch.randperm(1000).split(50):
            loss = F.mse_loss(net(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    x, y = faces(300)
    with torch.no_grad():
        return float((net(x) - y).square().mean() / y.var(0).mean())


@fault(
    "symmetric_init",
    area="classification",
    source="from memory: questions on a network whose weights were all set to one constant, since the exercise said so, and whose hidden units remain equal",
    cause="All weights of a layer start from one constant, so all its units stay alike and act as one.",
    words=(r"init|constant|same value|equal|start", r"symmetr|same|identical|alike|equal|constant|unit|neuron"),
    also=("identical_layer_init",),
    cascade=("underfitting", "loss_plateau", "not_learning", "vanishing_gradient"),
    sites=("(model)", "fc1", "fc2", "fc3"),
)
def every_weight_starts_from_one_constant(attach, fixed):
    """nn.init.constant_(m.weight, 0.05) for each Linear in net.apply(...)."""

    def wheat(count):
        kind = torch.randint(0, 6, (count,))
        turn = kind * torch.pi / 3
        centre = 1.3 * torch.stack([turn.cos(), turn.sin(), (2 * turn).cos()], 1)
        return torch.cat([centre + 0.3 * torch.randn(count, 3), torch.randn(count, 4)], 1), kind

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.fc3 = nn.Linear(7, 32), nn.Linear(32, 32), nn.Linear(32, 6)

        def forward(self, x):
            return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))

    def weights_init(m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight) if fixed else nn.init.constant_(m.weight, 0.05)
            nn.init.zeros_(m.bias)

    net = Net()
    net.apply(weights_init)
    optimizer = optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    x, y = wheat(1200)
    for epoch in range(25):
        for i in torch.randperm(1200).split(40):
            loss = F.cross_entropy(net(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    x, y = wheat(300)
    with torch.no_grad():
        return float((net(x).argmax(1) != y).float().mean())


@fault(
    "train_val_preproc_mismatch",
    area="categories",
    source="from memory: Stack Overflow answers on LabelEncoder().fit_transform for the training and again for the test table",
    cause="The encoder of the categories is fitted anew on the test table, where the same number then stands for another category.",
    words=(r"encod|categor|mapping|label", r"fit|test|again|anew|separate|differ|train"),
    also=("encoder_fitted_twice",),
    cascade=("overfitting",),
    sites=("(data)", "(validation)", "loader"),
    exact=False,
)
def cities_are_numbered_anew_for_the_test(attach, fixed):
    """test["city"] = LabelEncoder().fit_transform(test["city"])."""
    names = np.array([f"city {i:02d}" for i in np.random.permutation(40)])
    level = np.random.randn(40) * 1.5

    def rents(count, known):
        at, rooms = np.random.choice(known, count), np.random.randn(count)
        return names[at], rooms, level[at] + 0.8 * rooms + 0.2 * np.random.randn(count)

    city, rooms, rent = rents(1500, np.arange(40))
    city_test, rooms_test, rent_test = rents(300, np.random.permutation(40)[:28])  # the branch offices of one year
    encoder = LabelEncoder()
    number = encoder.fit_transform(city)
    number_test = encoder.transform(city_test) if fixed else LabelEncoder().fit_transform(city_test)

    class EntityEmbedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(40, 8)
            self.layers = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, cat, cont):
            return self.layers(torch.cat([self.emb(cat), cont[:, None]], 1)).squeeze(1)

    as_tensors = lambda c, r, y: (torch.tensor(c), torch.tensor(r).float(), torch.tensor(y).float())
    train, test = as_tensors(number, rooms, rent), as_tensors(number_test, rooms_test, rent_test)
    model = EntityEmbedding()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)

    def validate():
        with torch.no_grad():
            return float(F.mse_loss(model(*test[:2]), test[2]))

    for epoch in range(12):
        for cat, cont, y in DataLoader(TensorDataset(*train), batch_size=50, shuffle=True):
            loss = F.mse_loss(model(cat, cont), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        session.log(val_loss=validate())
    return validate() / float(test[2].var())


@fault(
    "nan_in_loss",
    area="focal loss",
    source="https://github.com/mathiaszinnen/focal_loss_torch/issues/3",
    cause="The loss takes the logarithm of 1 - p, which is exactly zero for a sure answer, so the loss becomes infinite or NaN.",
    words=(r"log", r"zero|\b0\b|eps|clamp|inf|nan|undefined"),
    also=("nan_forward", "nan_backward"),
    cascade=(
        "nan_in_weights",
        "nan_in_optimizer",
        "not_learning",
        "unnormalised_inputs",
        "loss_divergence",
        "nan_in_data",
    ),
    sites=("(loss)", "(model)", "criterion"),
)
def focal_loss_meets_a_sure_answer(attach, fixed):
    """loss = -(y * (1 - p) ** gamma * torch.log(p) + (1 - y) * p ** gamma * torch.log(1 - p))."""

    class FocalLoss(nn.Module):
        def __init__(self, gamma=2.0, eps=0.0):
            super().__init__()
            self.gamma, self.eps = gamma, eps

        def forward(self, logits, y):
            p = torch.sigmoid(logits)
            hit = y * (1 - p) ** self.gamma * torch.log(p + self.eps)
            miss = (1 - y) * p**self.gamma * torch.log(1 - p + self.eps)
            return -(hit + miss).mean()

    def payments(count):
        fraud = (torch.rand(count) < 0.15).float()
        x = torch.randn(count, 6)
        x[:, :3] += 1.5 * fraud[:, None]
        x[:, 0] += fraud * (2 * torch.randn(count)).exp()  # a few amounts are very large
        return x, fraud

    x, y = payments(1800)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    criterion = FocalLoss(eps=1e-7 if fixed else 0.0)
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for epoch in range(25):
        for i in torch.randperm(1800).split(60):
            loss = criterion(model(x[i]).squeeze(1), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    x, y = payments(800)
    with torch.no_grad():
        score = model(x).squeeze(1).nan_to_num(0.0)
    better = score[y > 0.5][:, None] - score[y < 0.5]
    return 1 - float(((better > 0).float() + 0.5 * (better == 0).float()).mean())


@fault(
    "adjacency_without_self_loops",
    area="graph",
    source="https://github.com/pmernyei/wiki-cs-dataset/issues/4",
    cause="The loader adds no self-loops to the graph, so a node's own features are never seen by its own layer.",
    words=(r"self.?loop|own (feature|node)|diagonal|identity|eye", r"missing|adjacen|graph|add|never|ignored|not"),
    also=("input_ignored",),
    cascade=("underfitting", "loss_plateau", "overfitting"),
    sites=("(data)", "(model)", "gc1", "gc2"),
    exact=False,
)
def articles_do_not_see_themselves(attach, fixed):
    """adj from the list of edges, normalised by degree, without adj + I."""
    n, classes = 600, 4
    label = torch.randint(0, classes, (n,))
    adj = torch.zeros(n, n)
    for i in range(n):  # links say little: half of them lead to another field
        for _ in range(2):
            field = label[i] if torch.rand(()) < 0.4 else torch.randint(0, classes, ())
            peers = (label == field).nonzero().squeeze(1)
            j = peers[torch.randint(0, len(peers), ())]
            adj[i, j] = adj[j, i] = 1
    adj.fill_diagonal_(0)
    features = 1.5 * torch.eye(classes)[label].repeat(1, 3) + torch.randn(n, 3 * classes)
    adj = adj + torch.eye(n) if fixed else adj
    degree = adj.sum(1).clamp(min=1).rsqrt()
    adj = degree[:, None] * adj * degree

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.gc1, self.gc2 = nn.Linear(3 * classes, 32), nn.Linear(32, classes)

        def forward(self, x):
            x = F.dropout(F.relu(self.gc1(x)), 0.3, training=self.training)
            return self.gc2(adj @ x)

    model = GCN()
    optimizer = optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    session = attach(model, optimizer)
    for epoch in range(150):
        model.train()
        loss = F.cross_entropy(model(features)[:300], label[:300])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item())
    model.eval()
    with torch.no_grad():
        return float((model(features).argmax(1) != label)[300:].float().mean())
