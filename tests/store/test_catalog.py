import json
from dataclasses import replace

from tests.store.making import HEADER, Clock, make_block, write_run

from sonde.core.schema import row_of_value
from sonde.records import RunHeader, Site
from sonde.store import RunWriter, layout, lease, list_runs, open_run


def test_runs_are_found_below_a_folder_newest_first(tmp_path):
    for age, name in enumerate(("c", "group/b", "group/deep/a")):
        header = RunHeader(schema_version=1, created=1000.0 - age, sonde_version="0")
        writer = RunWriter(tmp_path / name, header)
        writer.close()
    (tmp_path / ".hidden").mkdir()
    write_run(tmp_path / ".hidden/run", range(1))
    write_run(tmp_path / "1/2/3/4/5/6/too_deep", range(1))
    assert [run.name for run in list_runs(tmp_path)] == ["c", "b", "a"]
    assert [run.name for run in list_runs(tmp_path, max_depth=0)] == ["c"]
    assert [run.path for run in list_runs(tmp_path / "c")] == [tmp_path / "c"]
    assert list_runs(tmp_path / "nowhere") == []


def test_a_run_in_a_few_words(tmp_path):
    clock = Clock()
    writer = RunWriter(tmp_path / "run", HEADER, clock=clock)
    writer.take_sites([Site(id=0, name="x", quantity="value"), Site(id=1, name="train/loss", quantity="scalar")])
    for step in range(7):
        block = make_block(step, 2)
        block.rows[1] = row_of_value(1.0 / (step + 1))
        clock.now += 3
        writer.take_block(block)
    live = list_runs(tmp_path, clock=clock)[0]
    assert (live.status, live.steps, live.last_step, live.model) == ("live", 7, 6, "Tiny")
    assert live.last_loss == 1 / 6
    writer.close()
    done = list_runs(tmp_path, clock=clock)[0]
    assert (done.status, done.steps, done.last_step, done.last_loss) == ("finished", 7, 6, 1 / 7)
    assert (done.created, done.updated, done.attempts) == (HEADER.created, clock.now, 1)


def test_a_run_whose_writer_left_no_word_is_looked_at(tmp_path):
    write_run(tmp_path / "run", range(5))
    (layout.rank_folder(tmp_path / "run", 0) / "writer.json").unlink()
    found = list_runs(tmp_path)[0]
    assert (found.status, found.steps, found.last_step) == ("crashed", 5, 4)


def test_a_writer_json_of_nonsense_does_no_harm(tmp_path):
    write_run(tmp_path / "run", range(5))
    path = layout.rank_folder(tmp_path / "run", 0) / "writer.json"
    whole = json.loads(path.read_text())
    for change in (
        {"beat": 10**400},
        {"loss": 10**400},
        {"beat": None},
        {"blocks": -1},
        {"last_step": "x"},
        {"loss": []},
    ):
        path.write_text(json.dumps({**whole, **change}))
        assert list_runs(tmp_path)[0].steps == 5
        assert open_run(tmp_path / "run").status == "crashed"


def test_a_damaged_run_is_listed_with_its_problem(tmp_path):
    write_run(tmp_path / "run", range(5))
    (tmp_path / "run/run.json").write_text("{")
    assert "run.json is not valid JSON" in list_runs(tmp_path)[0].problem


def test_a_loss_that_is_not_finite_is_nan(tmp_path):
    writer = RunWriter(tmp_path / "run", HEADER)
    writer.take_sites([Site(id=0, name="loss", quantity="scalar")])
    block = make_block(0, 1)
    block.rows[0] = row_of_value(float("nan"))
    writer.take_block(block)
    writer.close()
    loss = list_runs(tmp_path)[0].last_loss
    assert loss != loss


def test_the_last_loss_is_kept_when_later_blocks_have_none(tmp_path):
    writer = RunWriter(tmp_path / "run", HEADER)
    writer.take_sites([Site(id=0, name="loss", quantity="scalar"), Site(id=1, name="a", quantity="output")])
    block = make_block(0, 2)
    block.rows[0] = row_of_value(0.25)
    writer.take_block(block)
    later = make_block(1, 2)
    writer.take_block(
        replace(later, sites=later.sites[1:], rows=later.rows[1:], bins=later.bins[1:], binned=later.binned[1:])
    )
    writer.close()
    assert list_runs(tmp_path)[0].last_loss == 0.25


def test_the_worst_rank_decides_the_status_of_the_run(tmp_path):
    clock = Clock()
    for rank in range(2):
        write_run(tmp_path / "run", range(2), rank=rank, clock=clock)
    holder = lease.mine("failed", 0, clock())
    lease.write(layout.rank_folder(tmp_path / "run", 1), holder)
    assert list_runs(tmp_path, clock=clock)[0].status == "failed"
