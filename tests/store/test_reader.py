"""What a run shows: sites, series, moments, and tables, over all its ranks."""

import builtins

import numpy as np
import pytest
from tests.store.making import HEADER, make_block, write_run

from sonde.core import schema, statistics
from sonde.errors import MissingExtra, OptionError, RunNotFound, SelectionError
from sonde.records import Block, Event, Site, summarise
from sonde.store import RunWriter, open_run


def values_block(step, values, *, sites=None, **fields):
    """Make a block of the given elements, one list a site."""
    pairs = [summarise(np.array(v, dtype=np.float64)) for v in values]
    return Block(
        step=step,
        time=float(step),
        sites=np.arange(len(values), dtype=np.uint32) if sites is None else np.array(sites, dtype=np.uint32),
        rows=np.array([row for row, _ in pairs]),
        bins=np.array([b for _, b in pairs], dtype=np.uint64),
        binned=np.ones(len(values), dtype=bool),
        **fields,
    )


@pytest.fixture
def run(tmp_path):
    """A small model: a weight, its gradient and update, an output passed on by a second module, and a loss."""
    sites = [
        Site(id=0, name="fc.weight", quantity="parameter", aliases=("tied.weight",)),
        Site(id=1, name="fc.weight", quantity="update"),
        Site(id=2, name="fc.weight", quantity="gradient"),
        Site(id=3, name="fc", quantity="output"),
        Site(id=4, name="drop", quantity="output", same_as=3),
        Site(id=5, name="loss", quantity="scalar"),
        Site(id=6, name="fc", quantity="output", phase="eval"),
    ]
    writer = RunWriter(tmp_path / "run", HEADER)
    writer.take_sites(sites)
    for step in range(10):
        values = [[3.0, 4.0], [0.3, 0.4], [step, -step], [1.0, np.nan, 0.0], [1.0 / (step + 1)]]
        writer.take_block(values_block(step, values, sites=[0, 1, 2, 3, 5], epoch=step // 5, skipped=step == 4))
    writer.take_event(Event(event_type="note", message="halfway", step=5, timestamp=5.0, data={"x": float("inf")}))
    writer.close()
    return open_run(tmp_path / "run")


def test_what_a_run_says_about_itself(run):
    assert run.header == HEADER
    assert run.status == "finished"
    assert run.ranks == [0]
    assert run.steps.tolist() == list(range(10))
    assert run.blocks.epoch.tolist() == [0] * 5 + [1] * 5
    assert run.blocks.time.tolist() == list(range(10))
    assert np.flatnonzero(run.blocks.skipped).tolist() == [4]
    assert run.blocks.span.tolist() == [1] * 10
    assert run.events == [
        Event(event_type="note", message="halfway", step=5, timestamp=5.0, data={"x": "inf"}),
    ]
    assert run.problems == []
    assert run.dropped == 0
    assert run.nbytes > 1000
    assert "9 steps, 7 sites" in repr(run)  # step 0 is the state before the first


def test_no_run_is_an_error_that_names_the_path(tmp_path):
    with pytest.raises(RunNotFound, match=str(tmp_path)):
        open_run(tmp_path)
    with pytest.raises(RunNotFound):
        open_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("fc.weight:update", ["fc.weight:update"]),
        ("fc.weight", ["fc.weight:parameter", "fc.weight:update", "fc.weight:gradient"]),
        ("tied.weight", ["fc.weight:parameter"]),
        ("*:output*", ["fc:output", "drop:output", "fc:output@eval"]),
        ("fc", ["fc:output", "fc:output@eval"]),
        ("re:^(loss|drop):", ["drop:output", "loss:scalar"]),
    ],
)
def test_sites_are_found(run, pattern, keys):
    assert [site.key for site in run.find(pattern)] == keys


def test_what_is_not_found_names_what_is_near(run):
    with pytest.raises(SelectionError, match=r"fc\.wieght.*nearest: fc\.weight"):
        run.find("fc.wieght")
    with pytest.raises(SelectionError, match="not a regular expression"):
        run.find("re:(")
    with pytest.raises(SelectionError, match=r"means 3 sites.*fc\.weight:update"):
        run.series("fc.weight", "mean")


def test_series_are_what_the_elements_were(run):
    norm = run.series("fc.weight:parameter", "norm")
    assert norm.values.tolist() == [5.0] * 10
    assert norm.steps.tolist() == list(range(10))
    assert norm.spans.tolist() == [1] * 10
    assert run.series("fc.weight:gradient", "max", start=3, stop=6).values.tolist() == [3.0, 4.0, 5.0]
    assert run.series("fc:output", "nan").values.tolist() == [1.0] * 10
    assert run.series("loss", "value").values[1] == 0.5
    assert run.series(run.site("loss"), "mean").site.key == "loss:scalar"
    assert len(run.series("fc:output@eval", "mean")) == 0
    assert len(run.series("loss", "mean", rank=5)) == 0


def test_the_ratio_of_an_update_to_its_parameter(run):
    np.testing.assert_allclose(run.series("fc.weight:update", "ratio").values, [0.1] * 10)
    with pytest.raises(OptionError, match="of kind update, not of loss:scalar"):
        run.series("loss", "ratio")


def test_an_unknown_statistic_names_the_nearest(run):
    with pytest.raises(OptionError, match="nearest: mean"):
        run.series("loss", "maen")
    with pytest.raises(OptionError, match=r"'value' is a statistic of sites of kind scalar, not of fc\.weight:update"):
        run.series("fc.weight:update", "value")


def test_a_tensor_passed_on_is_read_where_it_was_recorded(run):
    passed = run.series("drop:output", "mean")
    assert passed.site.name == "drop"
    np.testing.assert_array_equal(passed.values, run.series("fc:output", "mean").values)
    assert run.at(2)[run.site("drop:output")].mean == 0.5


def test_all_statistics_agree_with_the_readings(run):
    for name in statistics.names():
        series = run.series("fc.weight:gradient", name).values
        single = [r.get(name) for r in run.readings("fc.weight:gradient")]
        expected = np.array([np.nan if value is None else value for value in single])
        # Numpy before 2 rounds the last bit of a square root differently in a column and in a single number.
        np.testing.assert_array_almost_equal_nulp(series, expected, nulp=1)


@pytest.mark.parametrize("name", [name for name in statistics.names() if statistics.find(name).of])
def test_the_columns_a_statistic_needs_are_all_it_needs(name):
    rng = np.random.default_rng(0)
    rows = np.array([summarise(rng.normal(size=5) * 3)[0] for _ in range(4)])
    poor = np.full_like(rows, np.nan)
    needs = list(statistics.find(name).needs)
    poor[:, needs] = rows[:, needs]
    np.testing.assert_array_equal(statistics.compute(name, rows), statistics.compute(name, poor))


def test_histograms(run):
    steps, bins = run.histogram("fc.weight:parameter", start=2, stop=4)
    assert steps.tolist() == [2, 3]
    assert bins.shape == (2, schema.NUM_BINS)
    assert bins[0, schema.ONE_BIN + 1] == 1
    assert bins[0, schema.ONE_BIN + 2] == 1


def test_one_moment_of_all_sites(run):
    found = run.at(7)
    assert [site.key for site in found] == [s.key for s in run.sites if s.phase == "train"]
    assert found[run.site("fc.weight:gradient")].max == 7.0
    assert run.at(99) == {}
    assert run.at(2**70) == {}
    assert run.at(-1) == {}


def test_ranks_are_merged_exactly(tmp_path):
    everything = {step: [] for step in range(5)}
    for rank in range(3):
        writer = RunWriter(tmp_path / "run", HEADER, rank=rank)
        # Ids are a rank's own: the same site has another one on each.
        writer.take_sites([Site(id=rank, name="x", quantity="value"), Site(id=9, name=f"only{rank}", quantity="value")])
        for step in range(5):
            values = np.random.default_rng([rank, step]).normal(size=4 + rank)
            everything[step].append(values)
            writer.take_block(values_block(step, [values, [1.0]], sites=[rank, 9]))
        writer.close()
    run = open_run(tmp_path / "run")
    assert [site.key for site in run.sites] == ["x:value", "only0:value", "only1:value", "only2:value"]
    for name in ("mean", "std", "norm", "count", "max", "abs_p50"):
        whole = [np.concatenate(everything[step]) for step in range(5)]
        pairs = [summarise(values) for values in whole]
        wanted = statistics.compute(name, np.array([r for r, _ in pairs]), np.array([b for _, b in pairs]))
        np.testing.assert_allclose(run.series("x", name).values, wanted, rtol=1e-12)
        np.testing.assert_allclose([reading.get(name) for reading in run.readings("x")], wanted, rtol=1e-12)
    assert run.series("x", "count", rank=2).values.tolist() == [6.0] * 5
    found = run.at(3)
    assert found[run.site("x")].count == 4 + 5 + 6
    np.testing.assert_array_equal(found[run.site("x")].bins, summarise(np.concatenate(everything[3]))[1])
    assert run.at(3, rank=1)[run.site("x")].count == 5
    assert len(found) == 4
    assert run.ranks_of(run.site("only1")) == [1]


def test_ranks_that_were_thinned_differently_are_merged_by_the_wider_window(tmp_path):
    for rank in range(2):
        writer = RunWriter(tmp_path / "run", HEADER, rank=rank)
        writer.take_sites([Site(id=0, name="layer0", quantity="output"), Site(id=1, name="fc", quantity="gradient")])
        if rank == 0:
            writer.take_block(values_block(0, [[1.0, 2.0, 3.0, 4.0]] * 2, span=4))
        for step in range(0 if rank else 4, 6):
            writer.take_block(values_block(step, [[10.0]] * 2))
        writer.close()
    for name, counts in (("layer0", [8.0, 2.0, 2.0]), ("fc", [4.0, 1.0, 1.0])):  # copies of a gradient count once
        series = open_run(tmp_path / "run").series(name, "count")
        assert series.steps.tolist() == [0, 4, 5]
        assert series.spans.tolist() == [4, 1, 1]
        assert series.values.tolist() == counts


def test_a_site_with_two_ids_is_one_site(tmp_path):
    write_run(tmp_path / "run", range(3), 1)
    writer = RunWriter(tmp_path / "run", HEADER, resume=True)
    writer.take_sites([Site(id=5, name="layer0.weight", quantity="gradient")])
    writer.take_block(make_block(3, 1, sites=np.array([5], dtype=np.uint32)))
    writer.close()
    run = open_run(tmp_path / "run")
    assert len(run.sites) == 1
    assert run.series("layer0.weight").steps.tolist() == [0, 1, 2, 3]
    assert len(run.at(3)) == len(run.at(1)) == 1


def test_sites_that_pass_on_each_other_in_a_circle_do_no_harm(tmp_path):
    writer = RunWriter(tmp_path / "run", HEADER)
    writer.take_sites([Site(id=i, name=f"s{i}", quantity="output", same_as=(i + 1) % 2) for i in range(2)])
    writer.take_sites([Site(id=2, name="s2", quantity="output", same_as=77)])
    writer.take_block(make_block(0, 3))
    writer.close()
    run = open_run(tmp_path / "run")
    assert len(run.series("s0", "mean")) == 1
    assert run.site("s2").same_as is None


def test_following_a_run_that_is_written(tmp_path):
    writer = write_run(tmp_path / "run", range(1), close=False, journal_bytes=1 << 12)
    run = open_run(tmp_path / "run")
    for step in range(1, 80):
        writer.take_block(make_block(step))
        assert run.refresh()
        assert run.steps[-1] == step
        assert len(run.series("layer0.weight", "mean")) == step + 1
    writer.take_event(Event(event_type="note", message="new", timestamp=0.0))
    assert run.refresh()
    assert run.events[-1].message == "new"
    writer.close()
    run.refresh()
    assert not run.refresh()
    assert run.status == "finished"
    assert run.steps.tolist() == list(range(80))


def test_a_query_survives_compaction_that_it_has_not_noticed(tmp_path):
    for step in range(6):
        write_run(tmp_path / "run", range(step, step + 1), 2, resume=True)
    run = open_run(tmp_path / "run")
    names = set(run._ranks.folders[0].segments)
    write_run(tmp_path / "run", range(6, 60), 2, resume=True, journal_bytes=1 << 12)
    assert not names & {path.name for path in run._ranks.folders[0].path.iterdir()}
    wanted = [make_block(step, 2).rows[0][9] for step in range(60)]
    np.testing.assert_array_equal(run.series("layer0.weight", "mean").values, wanted)
    assert len(run.at(3)) == 2


def test_a_deleted_run_still_shows_what_was_read(tmp_path):
    import shutil

    writer = write_run(tmp_path / "run", range(3), close=False)
    run = open_run(tmp_path / "run")
    writer.close()
    shutil.rmtree(tmp_path / "run")
    assert not run.refresh()
    assert len(run.series("layer0.weight")) == 3
    assert run.status == "crashed"


def test_a_run_that_is_being_deleted_still_shows_what_was_read(tmp_path):
    writer = write_run(tmp_path / "run", range(3), close=False)
    run = open_run(tmp_path / "run")
    writer.close()
    for path in run._ranks.folders[0].path.iterdir():
        path.unlink()  # as a deletion does, before it takes the folder away
    assert not run.refresh()
    assert list(run.steps) == [0, 1, 2]


def test_a_run_as_a_pandas_table(run):
    pandas = pytest.importorskip("pandas")
    frame = run.to_pandas()
    assert list(frame.columns)[:8] == ["step", "span", "time", "epoch", "rank", "site", "name", "quantity"]
    assert list(frame.columns)[8:] == list(schema.COLUMNS)
    assert len(frame) == 50
    loss = frame[frame.site == "loss:scalar"]
    assert loss["mean"].tolist() == [1 / (step + 1) for step in range(10)]
    assert loss["epoch"].tolist() == [0] * 5 + [1] * 5
    some = run.to_pandas("fc.weight:*", stats=["norm", "abs_p50"])
    assert list(some.columns)[8:] == ["norm", "abs_p50"]
    assert len(some) == 30
    assert isinstance(run.series("loss").to_pandas(), pandas.Series)
    with pytest.raises(OptionError):
        run.to_pandas(stats=["nope"])


def test_a_run_as_an_arrow_table(run):
    pytest.importorskip("pyarrow")
    found = run.to_arrow(stats=["mean"])
    assert found.num_rows == 50
    assert found.column("site").to_pylist()[0] == "fc.weight:parameter"
    assert found.column("epoch").null_count == 0


def test_an_empty_run_gives_empty_tables(tmp_path):
    write_run(tmp_path / "run", range(0), 2)
    run = open_run(tmp_path / "run")
    assert len(run.to_pandas()) == 0
    assert run.to_arrow().num_rows == 0
    assert len(run.series("layer0.weight")) == 0
    assert run.at(0) == {}
    RunWriter(tmp_path / "other", HEADER).close()
    assert open_run(tmp_path / "other").to_pandas().empty


def test_a_missing_package_names_the_command(run, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name in ("pandas", "pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for ask in (run.to_pandas, run.to_arrow, run.series("loss").to_pandas):
        with pytest.raises(MissingExtra, match="pip install"):
            ask()
