"""Twelfth hold-out: tables and numbers."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_12.about import fault
from fault_programs.holdout_12.material import houses


@fault(
    "broadcast_loss",
    area="regression",
    source="https://discuss.pytorch.org/t/why-the-model-fail-to-converge-without-a-manul-weight-initialization/50431",
    cause="The output has the shape (n, 1) and the target (n,), because the result of x.squeeze() is dropped; the loss compares all pairs.",
    words=(r"broadcast|shape|squeeze|\(n, ?1\)|pairs|dimension",),
    also=("result_discarded",),
    cascade=("constant_output", "loss_plateau", "underfitting", "not_learning", "target_scale"),
    sites=("(loss)", "(model)", "layer1", "loss_fn"),
)
def linear_regression_squeezes_in_vain(attach, fixed):
    """x.squeeze() without an assignment at the end of forward()."""

    class Net(nn.Module):
        def __init__(self, input_dim, output_dim):
            super().__init__()
            self.layer1 = nn.Linear(input_dim, output_dim, bias=False)

        def forward(self, x):
            x = self.layer1(x)
            y = x.squeeze()
            return y if fixed else x

    data = np.random.randn(2000, 3)
    data[:, 2] = 5 * data[:, 0] + 3 * data[:, 1] + 0.1 * np.random.randn(2000)
    data = torch.tensor(data, dtype=torch.float32)
    train_x, train_y = data[:, :2], data[:, 2]
    net = Net(2, 1)
    criterion = nn.MSELoss()
    optimizer = optim.RMSprop(net.parameters(), lr=0.05)
    session = attach(net, optimizer)
    for epoch in range(12):
        for i in range(0, 2000, 100):
            net.zero_grad()
            pred = net(train_x[i : i + 100])
            loss = criterion(pred, train_y[i : i + 100])
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return (net(train_x).flatten() - train_y).square().mean().item() / train_y.var().item()


@fault(
    "lr_too_high",
    area="table classification",
    source="from memory: forum questions on a table with Adam(lr=0.1) or more, whose loss jumps at the start and then stays near that of guessing",
    cause="Adam's learning rate of 0.3 is a hundred times too high for this network.",
    words=(r"learning rate|\blr\b|step size|steps?", r"high|large|big|long|0\.3"),
    cascade=(
        "dead_relu",
        "loss_plateau",
        "constant_output",
        "loss_oscillation",
        "not_learning",
        "loss_spike",
        "exploding_activation",
        "underfitting",
        "large_initial_loss",
        "loss_divergence",
    ),
    sites=("optimizer", "(loop)", "(model)"),
    exact=False,
)
def wide_table_net_with_a_fast_adam(attach, fixed):
    """optim.Adam(model.parameters(), lr=0.3)."""
    x, price = houses(1500, 12)
    y = torch.bucketize(price, price.quantile(torch.tensor([0.25, 0.5, 0.75])))
    x_train, y_train, x_val, y_val = x[:1200], y[:1200], x[1200:], y[1200:]

    model = nn.Sequential()
    for i, (a, b) in enumerate([(12, 96), (96, 96), (96, 48)]):
        model.add_module(f"fc{i}", nn.Linear(a, b))
        model.add_module(f"act{i}", nn.ReLU())
        model.add_module(f"drop{i}", nn.Dropout(0.1))
    model.add_module("out", nn.Linear(48, 4))
    optimizer = optim.Adam(model.parameters(), lr=3e-3 if fixed else 0.3)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer)

    def accuracy():
        model.eval()
        with torch.no_grad():
            return (model(x_val).argmax(1) == y_val).float().mean().item()

    for epoch in range(10):
        model.train()
        for xb, yb in DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        session.log(val_acc=accuracy())
    return 1 - accuracy()


@fault(
    "graph_break_detach",
    area="multi-task",
    source="from memory: forum questions on backward() that only runs with requires_grad=True, since the loss is a new tensor made of a list of losses",
    cause="torch.tensor(losses, requires_grad=True) makes a new leaf, so no gradient reaches the model.",
    words=(r"torch\.tensor|new (tensor|leaf)|graph|detach|requires_grad|no gradient|never reach",),
    also=("unused_parameters",),
    cascade=("not_learning", "loss_plateau", "underfitting", "vanishing_gradient"),
    sites=("(loss)", "(loop)", "(model)"),
)
def losses_of_the_heads_become_a_new_tensor(attach, fixed):
    """torch.tensor([l1, l2, l3], requires_grad=True).mean().backward()."""
    x, price = houses(1000)
    targets = [price, x[:, 0] * x[:, 1], (x[:, 2] - x[:, 3]).abs()]

    class MultiTask(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
            self.heads = nn.ModuleList(nn.Linear(64, 1) for _ in targets)

        def forward(self, x):
            h = self.trunk(x)
            return [head(h).squeeze(1) for head in self.heads]

    def total_loss(outputs, wanted):
        losses = [nn.functional.mse_loss(o, w) for o, w in zip(outputs, wanted)]
        return torch.stack(losses).mean() if fixed else torch.tensor(losses, requires_grad=True).mean()

    model = MultiTask()
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(12):
        for i in torch.randperm(800).split(40):
            loss = total_loss(model(x[i]), [t[i] for t in targets])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        outputs = model(x[800:])
    return float(sum((o - t[800:]).square().mean() / t[800:].var() for o, t in zip(outputs, targets))) / 3


@fault(
    "class_imbalance_collapse",
    area="fraud",
    source="from memory: questions on weighted cross entropy whose weights are the counts of the classes instead of their inverse",
    cause="The class weights grow with the count of a class, so the rare classes count even less and are never answered.",
    words=(r"weight", r"class|rare|count|frequen|invers|imbalance|majority"),
    cascade=("constant_output", "loss_plateau", "underfitting"),
    sites=("(loss)", "(data)", "loss_fn", "criterion"),
    exact=False,
)
def weights_of_the_classes_are_their_counts(attach, fixed):
    """weight = counts / counts.sum() for a table with 90, 6 and 4 of 100."""

    def transactions(count, shares):
        y = torch.multinomial(torch.tensor(shares), count, replacement=True)
        centre = torch.zeros(3, 10)
        centre[1, :5], centre[2, 5:] = 0.9, -0.9
        return centre[y] + torch.randn(count, 10), y

    x, y = transactions(1600, [0.9, 0.06, 0.04])
    counts = torch.bincount(y, minlength=3).float()
    weight = counts.sum() / counts if fixed else counts
    weight = weight / weight.sum()

    class FraudNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(10)
            self.hidden = nn.Linear(10, 32)
            self.out = nn.Linear(32, 3)

        def forward(self, x):
            return self.out(torch.relu(self.hidden(self.bn(x))))

    model = FraudNet()
    criterion = nn.CrossEntropyLoss(weight=weight)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = attach(model, optimizer)
    for epoch in range(12):
        model.train()
        running = 0.0
        for xb, yb in DataLoader(TensorDataset(x, y), batch_size=80, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
            running += loss.item()
            session.log(loss=loss.item())
    model.eval()
    x, y = transactions(900, [1 / 3, 1 / 3, 1 / 3])
    with torch.no_grad():
        found = model(x).argmax(1)
    return 1 - float(np.mean([(found[y == c] == c).float().mean() for c in range(3)]))


@fault(
    "bad_init_scale",
    area="regression",
    source="from memory: a forum answer on torch.nn.init.normal_(m.weight), whose standard deviation is 1 if none is given",
    cause="init.normal_ without a std gives weights with standard deviation 1, so the tanh units start saturated.",
    words=(r"init|start|weights? (are|is)|std|standard deviation", r"large|scale|1\.0|big|wide|saturat|std"),
    cascade=(
        "saturated_activation",
        "underfitting",
        "loss_plateau",
        "large_initial_loss",
        "vanishing_gradient",
        "overfitting",
    ),
    sites=("(model)", "body", "net"),
    exact=False,
)
def init_function_names_no_standard_deviation(attach, fixed):
    """net.apply(init_weights) with nn.init.normal_(m.weight)."""
    x, y = houses(900)

    def init_weights(m):
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, std=m.in_features**-0.5 if fixed else 1.0)
            nn.init.zeros_(m.bias)

    net = nn.Sequential(
        nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)
    )
    net.apply(init_weights)
    optimizer = optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)
    for epoch in range(18):
        for i in torch.randperm(700).split(35):
            loss = nn.functional.huber_loss(net(x[i]).squeeze(-1), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float((net(x[700:]).squeeze(-1) - y[700:]).square().mean() / y[700:].var())


@fault(
    "label_shuffle_mismatch",
    area="regression",
    source="from memory: questions on np.random.shuffle(X) and np.random.shuffle(y), or two permutations, before the split",
    cause="Features and targets are put in order by two different permutations, so no row has its own target.",
    words=(
        r"shuffl|permut|order|row|belong|mismatch|pair",
        r"target|label|\by\b|separate|two|independent|differ|not.*(belong|match)",
    ),
    cascade=("not_learning", "underfitting", "loss_plateau", "overfitting", "constant_output"),
    sites=("(data)", "(loss)", "loader"),
    exact=False,
)
def rows_and_prices_are_shuffled_one_after_the_other(attach, fixed):
    """X = X[rng.permutation(n)]; y = y[rng.permutation(n)]."""
    x, y = houses(1000)
    X, y = x.numpy() * [3, 1, 40, 1, 0.2, 1, 7, 1] + 2, y.numpy()
    rng = np.random.RandomState(int(torch.randint(0, 10000, ())))
    order = rng.permutation(len(X))
    X = X[order]
    y = y[order] if fixed else y[rng.permutation(len(y))]
    split = 800
    scaler = StandardScaler().fit(X[:split])
    x_train = torch.tensor(scaler.transform(X[:split]), dtype=torch.float32)
    y_train = torch.tensor(y[:split], dtype=torch.float32).unsqueeze(1)

    class Regressor(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.fc3 = nn.Linear(8, 48), nn.Linear(48, 24), nn.Linear(24, 1)
            self.drop = nn.Dropout(0.1)

        def forward(self, x):
            x = torch.relu(self.fc1(x))
            return self.fc3(torch.relu(self.fc2(self.drop(x))))

    model, criterion = Regressor(), nn.MSELoss()
    optimizer = optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    session = attach(model, optimizer)
    for epoch in range(12):
        model.train()
        for xb, yb in DataLoader(TensorDataset(x_train, y_train), batch_size=40, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(mse=loss.item())
    model.eval()
    x, y = houses(300)
    seen = torch.tensor(scaler.transform(x.numpy() * [3, 1, 40, 1, 0.2, 1, 7, 1] + 2), dtype=torch.float32)
    with torch.no_grad():
        return float((model(seen).squeeze(1) - y).square().mean() / y.var())
