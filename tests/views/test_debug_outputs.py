"""What debuggers captured of one sample, shown in a notebook or a terminal."""

import numpy as np
import pytest

from sonde.errors import OptionError
from sonde.store import BatchValue, PageWriter, load_debug_outputs
from sonde.views.debug_outputs import display_debug_outputs

pytest.importorskip("plotly")


@pytest.fixture
def sample(tmp_path):
    maps = np.zeros((1, 20, 5, 6), np.float32)
    maps[0, 13] = -2.0
    outputs = {
        "features": {
            "map": maps,
            "stats": {"mean": BatchValue(0.25, (16, 17)), "shape": [1, 20, 5, 6]},
            "layer": "conv",
        },
        "vector": np.arange(40.0),
        "failed": {"error": "ValueError: no <b>luck</b>"},
        "bad": {"map": np.full((4, 9), np.nan)},
    }
    with PageWriter(tmp_path, page_bytes=1 << 20) as pages:
        pages.add(17, outputs)
    return load_debug_outputs(tmp_path)[17]


def test_every_debugger_is_a_section_with_its_numbers_and_pictures(sample):
    view = display_debug_outputs(sample)
    sections = {section.title: section.blocks for section in view.document.sections}
    assert list(sections) == ["features", "vector", "failed", "bad"]
    table, figures = sections["features"]
    assert table.rows == [
        ["map", "1 x 20 x 5 x 6: -2.00 to 0, mean -0.100", ""],
        ["stats/mean", "0.250", "of the whole batch of 2 samples"],
        ["stats/shape", "[1, 20, 5, 6]", ""],
        ["layer", "conv", ""],
    ]
    (drawn,) = figures.draw()
    assert len(drawn.data) == 9
    assert "plane 13" in [each.text for each in drawn.layout.annotations], "the most active plane is among them"
    assert sections["bad"][0].rows[0][1] == "4 x 9: no finite element"
    (vector,) = sections["vector"][1].draw()
    assert list(vector.data[0].y) == list(range(40))


def test_it_shows_in_a_notebook_and_in_a_terminal(sample):
    view = display_debug_outputs(sample, title="Sample 17")
    html = view._repr_html_()
    assert 'sandbox="allow-scripts"' in html
    assert "<b>luck</b>" not in html
    assert "of the whole batch of 2 samples" in repr(view)
    assert repr(view).startswith("# Sample 17")


def test_what_a_debugger_has_just_returned_is_shown_too():
    torch = pytest.importorskip("torch")
    view = display_debug_outputs({"mine": {"map": torch.ones(2, 3, 4, 4, dtype=torch.bfloat16)}})
    assert "2 x 3 x 4 x 4: 1.00 to 1.00, mean 1.00" in repr(view)


def test_something_else_is_refused():
    with pytest.raises(OptionError, match=r"load_debug_outputs\(folder\)\[17\]; got int"):
        display_debug_outputs(17)
