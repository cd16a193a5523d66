import json

import numpy as np
import pytest
from tests.browser.sampled_runs import ATTACK, write_batched, write_header, write_odd, write_scored
from tests.views.web.asking import client_of

from sonde.analysis.samples import pick
from sonde.store import DebugOutputs
from sonde.views.web.sample_api import thinning
from sonde.views.web.sample_store import Kept, sample_from_text, sample_text


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("sampled")
    write_odd(root / "odd")
    write_scored(root / "lr_run_0", [[0.1, 0.2, 5.0, 0.3], [0.1, 0.1, 4.0, 0.2]])
    write_scored(root / "lr_run_1", [[0.3, 0.2, 6.0, 7.0], [0.3, 0.1, 5.0, 6.0]])
    write_header(root / "bare")
    write_batched(root / "batched")
    return root


@pytest.fixture(scope="module")
def ask(root):
    client = client_of(root)

    def get(topic, /, run="0-odd", **params):
        params = {"with" if name == "beside" else name.rstrip("_"): value for name, value in params.items()}
        return client.get(f"/api/run/{run}/{topic}", params=params)

    return get


def test_scores_are_sent_as_raw_floats(ask):
    sent = ask("scores", metric="my/score")
    assert sent.headers["content-type"] == "application/octet-stream"
    np.testing.assert_array_equal(np.frombuffer(sent.content, "<f4"), np.float32([np.nan, 0.2, 0.9, 0.4]))
    assert ask("score-ids").json()["ids"] == ["plain", ATTACK, '"7"', "7"]
    assert ask("score-ids", run="0-lr_run_0").json() == {"count": 4, "ids": None}


def test_repeats_are_averaged_and_their_spread_follows(ask):
    sent = ask("scores", run="0-lr_run_0", metric="loss", beside="0-lr_run_1", evaluation="0")
    mean, spread = np.frombuffer(sent.content, "<f4").reshape(2, 4)
    np.testing.assert_allclose(mean, [0.2, 0.2, 5.5, 3.65], rtol=1e-6)
    np.testing.assert_allclose(spread, np.std([[0.1, 0.2, 5, 0.3], [0.3, 0.2, 6, 7]], axis=0, ddof=1), rtol=1e-5)
    assert sorted(ask("evaluations", run="0-lr_run_0").json()["repeats"]) == ["0-lr_run_0", "0-lr_run_1"]
    drawn = ask("score-figure", run="0-lr_run_0", metric="loss", beside="0-lr_run_1").json()["data"]
    (mean,) = [trace for trace in drawn if trace.get("name") == "lr: mean of 2"]
    assert [count for _, count in mean["customdata"]] == [2, 2]


def test_filters_stack_and_agree_with_the_command_line(ask, root):
    found = ask("samples", run="0-lr_run_0", where=["loss > 0.1", "idx != 3"], metric="loss").json()
    assert [row["idx"] for row in found["rows"]] == ["2"]
    assert found["total"] == 1
    assert [each.idx for each in pick(root / "lr_run_0", "(loss > 0.1) and (idx != 3)")] == [2]
    mask = ask("score-mask", run="0-lr_run_0", where=["loss > 0.1"]).content
    assert list(mask) == [0, 0, 1, 1]


def test_a_filter_that_cannot_be_read_says_why(ask):
    refused = ask("samples", where="scor > 1")
    assert refused.status_code == 400
    assert "no column scor" in refused.json()["error"]
    assert ask("samples", metric="nope").status_code == 400


def test_failures_common_to_runs_respect_the_direction(ask):
    found = ask("common-failures", run="0-lr_run_0", metric="loss", percentile=40, beside="0-lr_run_1").json()
    assert found["failed"][2] == 2
    assert found["ids"][found["worst"][0]] == "2"
    assert found["direction"] == -1


def test_a_sample_is_described_without_its_tensors(ask):
    reply = ask("sample", idx="plain").json()
    names = [each["name"] for each in reply["captured"]]
    assert names == ["broken", "attention", "vision", "mask", "deep", "large", "nothing", "texts"]
    broken = dict(reply["captured"][0]["node"]["items"])
    assert broken["map"]["shape"] == [1, 5, 6, 6]
    assert broken["map"]["stats"]["nan"] == 1
    assert broken[ATTACK]["value"] == 3
    texts = dict(reply["captured"][7]["node"]["items"])
    assert texts["story"]["value"].startswith("word word")
    assert [item["value"] for _, item in texts["words"]["items"]] == ["a", "bc"]
    assert reply["previous"] is None
    assert reply["next"] == ATTACK
    assert reply["of"] == 4
    assert reply["scores"][0]["value"] is None


def test_texts_and_numbers_that_look_alike_are_kept_apart(ask):
    assert ask("sample", idx="7").json()["scores"][0]["value"] == 0.4
    assert ask("sample", idx='"7"').json()["scores"][0]["value"] == 0.9
    assert ask("sample", idx=ATTACK).json()["idx"] == ATTACK
    assert ask("sample", idx="8").status_code == 404
    assert ask("sample").status_code == 400
    assert ask("sample", idx='"').status_code == 400
    for name in (3, -2, "3", "-2", '"', "cat", "", "10 "):
        if name != "":
            assert sample_from_text(sample_text(name)) == name


def test_a_tensor_is_sent_with_its_shape(ask, root):
    sent = ask("tensor", idx="plain", debugger="deep")
    stored = DebugOutputs(root / "odd" / "epoch_0" / "debugger")["plain"]["deep"]
    assert json.loads(sent.headers["x-sonde-shape"]) == [2, 3, 4, 5, 6]
    np.testing.assert_array_equal(np.frombuffer(sent.content, "<f4").reshape(stored.shape), stored)
    part = ask("tensor", idx="plain", debugger="deep", fix="0:1,2:3")
    np.testing.assert_array_equal(np.frombuffer(part.content, "<f4").reshape(3, 5, 6), stored[1, :, 3])
    mask = ask("tensor", idx="plain", debugger="mask")
    assert np.frombuffer(mask.content, "<f4")[:6].tolist() == [0, 1, 2, 3, 4, 0]


def test_a_large_tensor_is_thinned_and_says_so(ask):
    sent = ask("tensor", idx="plain", debugger="large")
    steps, shape = (json.loads(sent.headers[f"x-sonde-{name}"]) for name in ("steps", "shape"))
    assert steps == [1, 2, 1] or steps == [1, 1, 2]
    values = np.frombuffer(sent.content, "<f4").reshape(shape)
    whole = np.arange(3 * 700 * 700, dtype=np.float32).reshape(3, 700, 700)
    np.testing.assert_array_equal(values, whole[:: steps[0], :: steps[1], :: steps[2]])
    assert thinning((5, 5), 100) == [1, 1]


@pytest.mark.parametrize(
    ("params", "status"),
    [
        ({"debugger": "nope"}, 404),
        ({"debugger": "broken", "path": "../../x"}, 404),
        ({"debugger": "deep", "fix": "9:0"}, 400),
        ({"debugger": "deep", "fix": "0:99"}, 400),
        ({"debugger": "deep", "fix": "x"}, 400),
        ({"debugger": "broken", "path": "note"}, 400),
        ({"debugger": "deep", "part": "../.."}, 400),
        ({"debugger": "deep", "evaluation": "../../etc"}, 404),
        ({"debugger": "deep", "idx": "nobody"}, 404),
    ],
)
def test_what_is_not_there_is_refused(ask, params, status):
    assert ask("tensor", **({"idx": "plain"} | params)).status_code == status


def test_a_value_of_a_whole_batch_is_marked(ask):
    (mine,) = ask("sample", run="0-batched", evaluation="0", idx="1").json()["captured"]
    described = dict(mine["node"]["items"])
    assert described["mean"] == {"kind": "value", "value": 0.5, "batch": 2}
    assert (described["channels"]["shape"], described["channels"]["batch"]) == ([2, 3], 2)
    sent = ask("tensor", run="0-batched", evaluation="0", idx="1", part="debugger", debugger="mine", path="channels")
    assert np.frombuffer(sent.content, "<f4").tolist() == [0, 1, 2, 3, 4, 5]


def test_what_is_missing_from_the_captures_is_reported(ask):
    assert ask("samples", run="0-batched", evaluation="0").json()["problems"] == [
        "The captures are not complete. 2 samples lack theirs. other: ValueError: no"
    ]
    (missing,) = ask("sample", run="0-batched", evaluation="0", idx="3").json()["problems"]
    assert "missing" in missing
    (failed,) = ask("sample", run="0-batched", evaluation="0", idx="0").json()["problems"]
    assert "Debugger 'other' failed on this sample. Its first error: ValueError: no" in failed


def test_pickled_pages_come_with_the_command_that_converts_them(ask):
    for answer in (
        ask("samples", run="0-batched", evaluation="1").json()["problems"][0],
        ask("sample", run="0-batched", evaluation="1", idx="0").json()["problems"][0],
        ask("contrast", run="0-batched", evaluation="1").json()["error"],
    ):
        assert "pickled pages (page_0.pkl)" in answer
        assert "sonde import-pages" in answer


def test_a_run_without_samples_is_not_an_error(ask):
    assert ask("evaluations", run="0-bare").json()["evaluations"] == []
    assert "sonde train" in ask("samples", run="0-bare").json()["error"]


def test_links_that_lead_out_are_not_followed(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    write_odd(outside / "odd")
    write_header(root / "run")
    (root / "run" / "epoch_0").symlink_to(outside / "odd" / "epoch_0")
    (root / "run" / "epoch_1").mkdir()
    (root / "run" / "epoch_1" / "debugger").mkdir()
    for page in (outside / "odd" / "epoch_0" / "debugger").iterdir():
        (root / "run" / "epoch_1" / "debugger" / page.name).symlink_to(page)
    client = client_of(root)
    assert [each["name"] for each in client.get("/api/run/0-run/evaluations").json()["evaluations"]] == ["1"]
    assert client.get("/api/run/0-run/scores", params={"evaluation": "0"}).status_code == 404
    assert client.get("/api/run/0-run/sample", params={"evaluation": "1", "idx": "plain"}).status_code == 404


def test_damaged_scores_name_their_file_and_hide_nothing_else(tmp_path):
    write_scored(tmp_path / "run", [[1.0], [2.0]])
    (tmp_path / "run" / "epoch_1" / "validation_scores.json").write_text("{")
    client = client_of(tmp_path)
    reply = client.get("/api/run/0-run/evaluations").json()["evaluations"]
    assert [each["scored"] for each in reply] == [True, False]
    assert "validation_scores.json" in reply[1]["problem"]
    assert client.get("/api/run/0-run/scores", params={"evaluation": "1"}).status_code == 422


def test_new_scores_are_seen_without_a_restart(tmp_path):
    write_scored(tmp_path / "run", [[1.0, 2.0]])
    client = client_of(tmp_path)
    assert len(client.get("/api/run/0-run/scores").content) == 8
    write_scored(tmp_path / "more", [[1.0, 2.0], [3.0, 4.0]])
    (tmp_path / "more" / "epoch_1").rename(tmp_path / "run" / "epoch_1")
    assert np.frombuffer(client.get("/api/run/0-run/scores").content, "<f4").tolist() == [3.0, 4.0]


def test_what_is_kept_is_made_anew_when_its_stamp_changes():
    kept, made = Kept(2), []

    def make(value):
        made.append(value)
        return value

    assert [kept.get("a", stamp, lambda stamp=stamp: make(stamp)) for stamp in (1, 1, 2)] == [1, 1, 2]
    kept.get("b", 0, lambda: make("b"))
    kept.get("c", 0, lambda: make("c"))
    kept.get("a", 2, lambda: make("again"))
    assert made == [1, 2, "b", "c", "again"]
