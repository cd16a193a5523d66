"""Fourteenth hold-out: tables, graphs and recommenders."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_14.about import fault


@fault(
    "class_weights_swapped",
    area="emotions",
    source="https://github.com/amanshenoy/multilogue-net/issues/21",
    cause="The weights of the two classes have changed places, so the frequent class gets the large one.",
    words=(r"weight", r"class|swap|order|invers|revers|frequen|rare|minor|wrong"),
    also=("class_imbalance_collapse", "arguments_swapped"),
    cascade=("constant_output", "loss_plateau", "underfitting"),
    sites=("(loss)", "loss_fn", "loss_function"),
    exact=False,
)
def fear_gets_the_weight_of_its_absence(attach, fixed):
    """loss_weights = torch.FloatTensor([1 / 0.12, 1 / 0.88]) for labels of which 12 % are 1."""

    def utterances(count):
        fear = (torch.rand(count) < 0.12).long()
        text, audio = torch.randn(count, 10), torch.randn(count, 6)
        text[:, :3] += 0.7 * fear[:, None]
        audio[:, :2] += 0.9 * fear[:, None]
        return text, audio, fear

    class TwoStreams(nn.Module):
        def __init__(self):
            super().__init__()
            self.text, self.audio = nn.Linear(10, 24), nn.Linear(6, 24)
            self.smax_fc = nn.Sequential(nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 2))

        def forward(self, text, audio):
            return F.log_softmax(self.smax_fc(torch.cat([self.text(text), self.audio(audio)], 1)), 1)

    frequency = torch.tensor([0.88, 0.12])
    loss_weights = 1 / (frequency if fixed else frequency.flip(0))
    loss_function = nn.NLLLoss(loss_weights)
    model = TwoStreams()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    session = attach(model, optimizer)
    text, audio, label = utterances(1500)
    for epoch in range(10):
        model.train()
        for i in torch.randperm(1500).split(50):
            optimizer.zero_grad()
            loss = loss_function(model(text[i], audio[i]), label[i])
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    text, audio, label = utterances(2000)
    with torch.no_grad():
        found = model(text, audio).argmax(1)
    return 1 - float(torch.stack([(found == c)[label == c].float().mean() for c in (0, 1)]).mean())


@fault(
    "missing_zero_grad",
    area="regression",
    source="from memory: forum questions on a loss that goes up and down in long waves, with optimizer.zero_grad() above the loop over the batches",
    cause="The gradients are cleared once per epoch, so each step applies the sum of all since the epoch began.",
    words=(r"zero_grad|accumul|clear|sum of", r"grad|epoch|batch|step|once"),
    cascade=("loss_oscillation", "lr_too_high", "loss_divergence", "loss_spike", "exploding_gradient", "not_learning"),
    sites=("optimizer", "(loop)"),
)
def gradients_are_cleared_once_an_epoch(attach, fixed):
    """for epoch in ...: optimizer.zero_grad(); for X_batch, y_batch in ...: without it."""
    X = torch.randn(1000, 8)
    y = torch.sin(X[:, :1] + X[:, 1:2]) + 0.5 * X[:, 2:3] * X[:, 3:4] + 0.05 * torch.randn(1000, 1)
    model = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 1))
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    n_epochs, batch_size = 24, 32
    for epoch in range(n_epochs):
        optimizer.zero_grad()
        for k in range(0, 800, batch_size):
            X_batch, y_batch = X[k : k + batch_size], y[k : k + batch_size]
            optimizer.zero_grad() if fixed else None
            y_pred = model(X_batch)
            loss = loss_fn(y_pred, y_batch)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float(loss_fn(model(X[800:]), y[800:]) / y[800:].var())


@fault(
    "broadcast_loss",
    area="recommender",
    source="from memory: questions on a warning that the target size (64) differs from the input size (64, 1), after which all ratings are the mean",
    cause="The predictions have the shape (B, 1) and the ratings (B,), so each is compared with every other.",
    words=(r"broadcast|shape|squeeze|\(B, ?1\)|pairs|every|dimension|size",),
    cascade=("constant_output", "loss_plateau", "underfitting", "not_learning"),
    sites=("(loss)", "loss_fn", "(model)", "fc", "criterion"),
)
def ratings_meet_all_predictions(attach, fixed):
    """criterion(model(users, items), ratings), where the model ends in nn.Linear(32, 1)."""
    n_users, n_items = 40, 50
    taste, kind = torch.randn(n_users, 3), torch.randn(n_items, 3)

    class RecSys(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.user, self.item = nn.Embedding(n_users, dim), nn.Embedding(n_items, dim)
            self.fc = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, users, items):
            u, i = self.user(users), self.item(items)
            return self.fc(torch.cat([u, i, u * i], 1))

    def seen(count):
        users, items = torch.randint(0, n_users, (count,)), torch.randint(0, n_items, (count,))
        return users, items, 3 + (taste[users] * kind[items]).sum(1).tanh() * 2

    model, criterion = RecSys(), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for epoch in range(20):
        for users, items, ratings in DataLoader(TensorDataset(*seen(1920)), batch_size=64, shuffle=True):
            out = model(users, items)
            loss = criterion(out, ratings.view_as(out) if fixed else ratings)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    users, items, ratings = seen(500)
    with torch.no_grad():
        return float(criterion(model(users, items)[:, 0], ratings) / ratings.var())


@fault(
    "best_state_shares_memory",
    area="knowledge graph",
    source="https://github.com/thunlp/OpenKE/pull/131",
    cause="state_dict() returns references, so the best weights change with every step and are those of the last epoch in the end.",
    words=(r"copy|deepcopy|clone|reference|shar|state_dict", r"best|last|change|same|memory|weights|kept"),
    cascade=("overfitting",),
    sites=("(loop)", "(model)", "best_model"),
)
def best_embeddings_are_those_of_the_last_epoch(attach, fixed):
    """best_model = self.trainModel.state_dict()."""
    entities, relations, dim = 60, 3, 32
    place = torch.randn(entities, 2)
    move = torch.randn(relations, 2)

    def facts(count):
        head, relation = torch.randint(0, entities, (count,)), torch.randint(0, relations, (count,))
        near = torch.cdist(place[head] + move[relation], place)
        tail = torch.multinomial((-3 * near).softmax(1), 1)[:, 0]
        return head, relation, tail

    class DistMult(nn.Module):
        def __init__(self):
            super().__init__()
            self.ent, self.rel = nn.Embedding(entities, dim), nn.Embedding(relations, dim)
            self.map = nn.Linear(dim, dim)

        def forward(self, head, relation):
            return self.map(self.ent(head) * self.rel(relation)) @ self.ent.weight.t()

    class Train:
        def __init__(self, trainModel, epochs):
            self.trainModel, self.epochs = trainModel, epochs
            self.optimizer = torch.optim.Adam(trainModel.parameters(), lr=6e-3)
            self.session = attach(trainModel, self.optimizer)

        def valid(self, data):
            with torch.no_grad():
                return F.cross_entropy(self.trainModel(*data[:2]), data[2]).item()

        def run(self, data, valid_data):
            best, best_model = float("inf"), None
            for epoch in range(self.epochs):
                for i in torch.randperm(len(data[0])).split(40):
                    loss = F.cross_entropy(self.trainModel(data[0][i], data[1][i]), data[2][i])
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    self.session.log(loss=loss.item())
                val_loss = self.valid(valid_data)
                self.session.log(val_loss=val_loss)
                if val_loss < best:
                    best = val_loss
                    best_model = self.trainModel.state_dict()
                    best_model = copy.deepcopy(best_model) if fixed else best_model
            self.trainModel.load_state_dict(best_model)

    train = Train(DistMult(), epochs=34)
    train.run(facts(1200), facts(400))
    return min(train.valid(facts(600)), 100.0)


@fault(
    "edges_one_way",
    area="graphs",
    source="from memory: questions on an undirected graph whose edge_index holds each edge once, so that messages pass in one direction",
    cause="Each edge of the undirected graph is listed once, so messages pass from the smaller number to the larger only.",
    words=(r"edge|neighbou?r|message|graph", r"direct|once|one way|both|revers|undirected|symmetr|missing"),
    cascade=("overfitting", "underfitting", "loss_plateau"),
    sites=("(data)", "conv1", "conv2", "(model)", "edge_index"),
    exact=False,
)
def friends_are_listed_once(attach, fixed):
    """edge_index = torch.tensor(edges).t(), with pairs (i, j) where i < j."""
    nodes, classes = 600, 4
    label = torch.randint(0, classes, (nodes,))
    a, b = torch.randint(0, nodes, (2, 16000))
    keep = (a < b) & ((label[a] == label[b]) | (torch.rand(16000) < 0.06))
    edges = torch.stack([a[keep], b[keep]])
    edge_index = torch.cat([edges, edges.flip(0)], 1) if fixed else edges
    x = torch.randn(nodes, 16)
    x[torch.arange(nodes), label] += 0.8

    class SAGEConv(nn.Module):
        def __init__(self, inside, outside):
            super().__init__()
            self.lin_self, self.lin_neigh = nn.Linear(inside, outside), nn.Linear(inside, outside, bias=False)

        def forward(self, x, edge_index):
            source, target = edge_index
            total = torch.zeros_like(x).index_add(0, target, x[source])
            degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(source))).clamp(min=1)
            return self.lin_self(x) + self.lin_neigh(total / degree[:, None])

    class GraphSAGE(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = SAGEConv(16, 32), SAGEConv(32, classes)

        def forward(self, x, edge_index):
            h = F.dropout(F.relu(self.conv1(x, edge_index)), 0.3, self.training)
            return self.conv2(h, edge_index)

    order = torch.randperm(nodes)
    train, test = order[:200], order[200:]
    model = GraphSAGE()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    session = attach(model, optimizer)
    for epoch in range(120):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edge_index)[train], label[train])
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item())
    model.eval()
    with torch.no_grad():
        return (model(x, edge_index).argmax(1) != label)[test].float().mean().item()
