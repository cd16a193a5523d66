import numpy as np
from tests.analysis.made_run import BROKEN, START, Recipe, write_run

from sonde.analysis import Newspaper
from sonde.records import Event
from sonde.store import open_run


def test_news_contain_only_what_is_new(tmp_path):
    recipe = Recipe(steps=40, nan_at=35, dies_at=None)
    writer = write_run(tmp_path / "run", Recipe(steps=30, nan_at=None, dies_at=None), close=False)
    run = open_run(tmp_path / "run")
    paper = Newspaper(run, sites=run.find("head.weight:gradient"), stat="norm")
    first = paper.read()
    assert (first.step, first.new_steps, first.nonfinite, first.worst) == (30, 30, 0, None)
    assert first.learning_rate == 1e-3
    assert first.values == {"head.weight:gradient": run.series("head.weight:gradient", "norm").values[-1]}
    assert paper.read() is None

    for block in list(recipe.blocks())[30:]:
        writer.take_block(block)
    writer.take_event(Event(event_type="note", message="hello", timestamp=START))
    run.refresh()
    second = paper.read()
    assert (second.step, second.new_steps, second.nonfinite) == (40, 10, 12)
    assert second.worst.site.name == f"{BROKEN}.weight"
    assert [event.message for event in second.events] == ["hello"]
    writer.close()


def test_skipping_to_the_end_leaves_the_latest_step(run):
    paper = Newspaper(run)
    paper.skip_to_end()
    news = paper.read()
    assert (news.step, news.new_steps, news.events) == (60, 1, ())
    assert np.isfinite(news.loss)
