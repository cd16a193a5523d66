"""Relations between whole tables of a program: each with tables that look almost the same and are sound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from sonde.sensors import tables
from sonde.sensors.tables import Tables, collect

RNG = np.random.default_rng(0)
RAW, RAW_TEST = RNG.normal(size=(300, 4)) * [1, 5, 0.1, 30] + 7, RNG.normal(size=(90, 4)) * [1, 5, 0.1, 30] + 12
ORDER = RNG.permutation(200)


def standard(values, of=None):
    of = values if of is None else of
    return torch.tensor((values - of.mean(0)) / (of.std(0) + 1e-8), dtype=torch.float32)


def unit(values, of=None):
    of = values if of is None else of
    return torch.tensor((values - of.min(0)) / (of.max(0) - of.min(0)), dtype=torch.float32)


class Rows(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, at):
        return self.x[at]


def split(values):
    return {"train": values[:200], "test": values[200:]}


def verbs(scope, fed=None, target=None):
    tables = Tables()
    if fed is not None:
        tables.feed("train", [fed])
    if target is not None:
        tables.see_target(target)
    return [each.verb for each in tables.look([scope])]


FITTED_APART = {
    "standardised": {"x_train": standard(RAW), "x_test": standard(RAW_TEST)},
    "between 0 and 1": {"train": unit(RAW), "val": unit(RAW_TEST)},
    "one column": {"train_y": unit(RAW[:, 1]), "valid_y": unit(RAW_TEST[:, 1])},
    "with flags beside": {
        "x_train": torch.cat([standard(RAW), torch.randint(2, (300, 3))], 1),
        "x_test": torch.cat([standard(RAW_TEST), torch.randint(2, (90, 3))], 1),
    },
    "as a whole": {
        "x_train": standard(RNG.gamma(2, size=(300, 8)).reshape(-1, 1)).reshape(300, 8),
        "x_test": standard(RNG.gamma(3, size=(90, 8)).reshape(-1, 1)).reshape(90, 8),
    },
    "in numpy": {"X_train": standard(RAW).numpy(), "X_test": standard(RAW_TEST).numpy()},
    "in data sets": {"train_set": TensorDataset(standard(RAW)), "test_set": TensorDataset(standard(RAW_TEST))},
    "in loaders": {
        "train_loader": DataLoader(Rows(standard(RAW)), 10),
        "test_loader": DataLoader(Rows(standard(RAW_TEST)), 10),
    },
    "beside copies": {
        "train": standard(RAW).double().numpy(),
        "test": standard(RAW_TEST).double().numpy(),
        "x_train": standard(RAW),
        "x_test": standard(RAW_TEST),
        "summer": RAW,
        "winter": RAW_TEST,
    },
    "beside what they were": {
        "x_train": standard(RAW),
        "x_test": standard(RAW_TEST),
        "train_raw": RAW,
        "test_raw": RAW_TEST,
    },
}
SOUND = {
    "by the training data": {"x_train": standard(RAW), "x_test": standard(RAW_TEST, RAW)},
    "between 0 and 1 by the training data": {"x_train": unit(RAW), "x_test": unit(RAW_TEST, RAW)},
    "before the split": split(standard(RAW)),
    "neither is scaled": {"x_train": RAW, "x_test": RAW_TEST},
    "grids": {"x_train": torch.linspace(0, 1, 100), "x_test": torch.linspace(0, 1, 333)},
    "flags": {"x_train": torch.randint(2, (300, 6)).float(), "x_test": torch.randint(2, (90, 6)).float()},
    "pixels": {
        "train": (torch.randn(500, 9) + 0.5).clamp(0, 1),
        "test": (torch.randn(300, 9) + 0.5).clamp(0, 1),
    },
    "no name says what it is for": {"one": standard(RAW), "two": standard(RAW_TEST)},
    "two training sets": {"train_a": standard(RAW), "train_b": standard(RAW_TEST)},
    "other columns": {"x_train": standard(RAW), "y_test": standard(RAW_TEST[:, :1])},
    "drawn alike": {"x_train": torch.randn(1000, 5), "x_test": torch.randn(500, 5)},
    "scaled by the same numbers": {
        "x_train": standard(RAW),
        "x_test": standard(RAW + 1e-3),
        "train_raw": RAW,
        "test_raw": RAW + 1e-3,
    },
}


@pytest.mark.parametrize("name", FITTED_APART)
def test_data_that_were_scaled_by_numbers_of_their_own_are_found(name):
    assert verbs(FITTED_APART[name]) == ["data.fitted_apart"]


@pytest.mark.parametrize("name", SOUND)
def test_data_that_were_scaled_alike_or_not_at_all_are_not(name):
    assert verbs(SOUND[name]) == []


def test_tables_that_a_model_was_fed_need_no_name():
    one, two = standard(RAW), standard(RAW_TEST)
    tables = Tables()
    tables.feed("train", [one[5:20]])
    tables.feed("eval", [two[:30]])
    (found,) = tables.look([{"one": one, "two": two}])
    assert (found.about, found.data["other"], found.data["columns"]) == ("two", "one", 4)


def test_how_far_two_scalers_are_apart_is_measured_where_the_raw_data_are_there():
    near = RAW + 0.01 * RAW.std(0)
    for other, apart in ((RAW_TEST, True), (near, False)):
        scope = {"x_train": standard(RAW), "x_test": standard(other), "train": RAW, "test": other}
        found = Tables().look([scope])
        assert bool(found) is apart
        assert not found or found[0].data["apart"] > 0.5


NAMES = [f"item {number}" for number in RNG.integers(0, 40, 400)]
FEWER = [f"item {number}" for number in RNG.integers(0, 25, 100)]


def codes(names, of=None):
    book = {name: at for at, name in enumerate(sorted(set(of or names)))}
    return torch.tensor([book[name] for name in names])


@pytest.mark.parametrize(
    ("scope", "ill"),
    [
        ({"item": codes(NAMES), "title": NAMES, "test_item": codes(FEWER), "test_title": FEWER}, True),
        ({"item": codes(NAMES), "title": NAMES, "test_item": codes(FEWER, NAMES), "test_title": FEWER}, False),
        ({"item": codes(NAMES), "title": NAMES, "user": codes(FEWER), "user_name": FEWER}, False),
        ({"train": {"x": codes(NAMES), "t": NAMES}, "test": {"x": codes(FEWER).numpy(), "t": np.array(FEWER)}}, True),
        ({"item": codes(NAMES) * 3, "title": NAMES, "test_item": codes(FEWER), "test_title": FEWER}, False),
    ],
)
def test_names_that_are_numbered_anew_for_the_test_set_are_found(scope, ill):
    assert verbs(scope) == (["data.numbered_apart"] if ill else [])


@pytest.mark.parametrize("how", ["inputs only", "both", "neither", "unique rows are missing", "another target"])
def test_inputs_in_another_order_than_their_targets_are_found(how):
    x, y = torch.randn(300, 4), torch.randint(3, (300,))
    if how == "unique rows are missing":
        x = torch.randint(2, (300, 1)).float()
    x_train = x[:200] if how == "neither" else x[:200][ORDER]
    y_train = y[:200][ORDER] if how == "both" else torch.randint(3, (200,)) if how == "another target" else y[:200]
    scope = {"x": x, "y": y, "x_train": x_train, "y_train": y_train}
    found = verbs(scope, fed=x_train[:16], target=y_train[:16])
    assert found == (["data.shuffled_apart"] if how == "inputs only" else [])


@pytest.mark.parametrize(("negatives", "labelled", "ill"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_partners_in_another_order_are_found_unless_they_are_negatives(negatives, labelled, ill):
    pictures, texts = torch.randn(300, 5), torch.randn(300, 4)
    image, other = pictures[:200], texts[:200][ORDER]
    scope = {"pictures": pictures, "texts": texts, "image": image, "other": other}
    scope |= {"text": texts[:200]} if negatives else {}
    tables = Tables()
    tables.feed("train", [each[:16] for each in (image, other, *([texts[:200]] if negatives else []))])
    tables.see_target(torch.rand(16) if labelled else torch.arange(16))
    assert [each.verb for each in tables.look([scope])] == (["data.shuffled_apart"] if ill else [])


def test_tables_are_found_where_programs_keep_them():
    x, y = torch.randn(60, 3), torch.arange(60)
    part = Subset(TensorDataset(x, y), range(10, 50))
    model = torch.nn.Linear(3, 1)
    tables, texts = collect([{"part": part, "model": model, "few": x[:5], "words": ["a"] * 30, "mixed": [1, "a"] * 30}])
    assert [(each.path, each.rows, each.width) for each in tables] == [("part[0]", 40, 3), ("part[1]", 40, 1)]
    assert list(texts) == ["words"]


def test_columns_of_a_frame_are_tables():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"item": NAMES, "code": codes(NAMES).numpy(), "price": RNG.normal(size=400)})
    tables, texts = collect([{"train": frame}])
    assert [each.path for each in tables] == ["train['code']", "train['price']"]
    assert texts["train['item']"] == NAMES


WORDS = ["the", "cat", "dog", "sat", "ran", "on", "a", "mat", "road", "far"]
SENTENCES = [" ".join(RNG.choice(WORDS, RNG.integers(3, 7))) for _ in range(120)]
OTHERS = [" ".join(RNG.choice(WORDS[1:7], RNG.integers(3, 7))) for _ in range(40)]


def tokens(sentences, of=None, begins=()):
    known = {word: at + 3 for at, word in enumerate(dict.fromkeys(" ".join(of or sentences).split()))}
    rows = [[*begins, *(known.get(word, 1) for word in text.split())] for text in sentences]
    return torch.tensor([(row + [0] * 8)[:8] for row in rows])


@pytest.mark.parametrize(
    ("test", "ill"),
    [(tokens(OTHERS), True), (tokens(OTHERS, SENTENCES), False), (tokens(OTHERS, begins=(2,)), True)],
    ids=["anew", "by one vocabulary", "anew behind a mark"],
)
@pytest.mark.parametrize("lists", [True, False])
def test_words_that_are_numbered_anew_for_the_test_set_are_found(test, ill, lists):
    texts = (SENTENCES, OTHERS) if not lists else tuple([text.split() for text in each] for each in (SENTENCES, OTHERS))
    scope = {"train_texts": texts[0], "x_train": tokens(SENTENCES), "test_texts": texts[1], "x_test": test}
    assert verbs(scope) == (["data.numbered_apart"] if ill else [])


def test_questions_and_answers_have_vocabularies_of_their_own():
    scope = {"train_q": SENTENCES, "q_train": tokens(SENTENCES), "test_a": OTHERS, "a_test": tokens(OTHERS)}
    assert verbs(scope) == []


def test_tables_of_any_numbers_are_looked_at_without_a_failure():
    odd = torch.full((40, 3), float("nan"))
    scope = {
        "x_train": odd,
        "x_test": odd.clone(),
        "train_half": torch.randn(40, 3).half(),
        "test_half": torch.randn(40, 3).bfloat16(),
        "train_big": np.full((40, 2), 1e308),
        "test_big": np.full((40, 2), np.inf),
        "train_bytes": np.zeros((40, 2), ">f4"),
        "test_reversed": np.arange(80.0).reshape(40, 2)[::-1],
        "train_none": np.zeros((40, 0)),
        "test_whole": np.arange(40, dtype=np.uint64),
    }
    assert verbs(scope, fed=odd[:4], target=odd[:4]) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_part_is_found_where_a_search_from_row_to_row_finds_it(seed):
    generator = torch.Generator().manual_seed(seed)
    whole = (torch.rand(200, 1, generator=generator) < 0.1).long()
    start = int(torch.randint(0, 100, (1,), generator=generator))
    parts = whole[start : start + 90], (torch.rand(90, 1, generator=generator) < 0.1).long()
    for part in parts:
        rows = [at for at in range(111) if torch.equal(whole[at : at + 90], part)]
        wanted = rows[0] if rows and part.unique().numel() > 1 else None
        assert tables._part_of(tables.Table("part", part), tables.Table("whole", whole)) == wanted


def test_of_a_corpus_the_first_rows_are_read():
    corpus = [["a", "word"]] * 1000 + [[object()]] * 1000
    assert tables._texts(corpus) is corpus, "it is not copied"
    assert tables._texts(corpus[1:]) is None
    numbers = torch.arange(2000 * 2).reshape(2000, 2) % 2 + 5
    assert tables._book_of(corpus, tables.Table("ids", numbers)) is None, "two words are no vocabulary"
