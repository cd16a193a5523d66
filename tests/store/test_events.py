import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sonde.core import files
from sonde.records import Event
from sonde.store import timeline
from sonde.store.timeline import EventFile

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def refuse(name):
    raise AssertionError(f"{name} is not JSON")


@given(st.text(), st.text(), st.none() | st.integers(), st.floats(), st.dictionaries(st.text(), anything, max_size=3))
def test_events_come_back_as_strict_json(event_type, message, step, timestamp, data):
    event = Event(event_type=event_type, message=message, step=step, timestamp=timestamp, data=data)
    line = timeline.encode_event(event)
    assert line.count(b"\n") == 1
    json.loads(line, parse_constant=refuse)
    back = timeline.decode_event(line, "here")
    assert (back.event_type, back.message, back.step) == (event_type, message, step)
    assert back.timestamp == timestamp or np.isnan(timestamp)
    assert back.data == files.plain(data)


def test_numbers_that_are_not_finite_become_words():
    event = Event(event_type="x", message="", timestamp=0.0, data={"a": np.float32("nan"), "b": [float("-inf")]})
    assert timeline.decode_event(timeline.encode_event(event), "here").data == {"a": "nan", "b": ["-inf"]}


def test_odd_data_does_not_cost_the_event():
    circle = []
    circle.append(circle)
    for data in ({"circle": circle}, {"digits": 10**5000}):
        event = Event(event_type="x", message="kept", timestamp=0.0, data=data)
        assert timeline.decode_event(timeline.encode_event(event), "here").message == "kept"
    odd = Event(event_type="x", message="", timestamp=0.0, data={"path": object, "set": {1}, "array": np.arange(3)})
    assert timeline.decode_event(timeline.encode_event(odd), "here").data["array"] == [0, 1, 2]


def test_a_line_that_is_being_written_is_left_for_later(tmp_path):
    path = tmp_path / "events.jsonl"
    line = timeline.encode_event(Event(event_type="x", message="whole", timestamp=0.0))
    follower = EventFile(path)
    assert not follower.refresh()
    path.write_bytes(line + line[:10])
    assert follower.refresh()
    assert not follower.refresh()
    assert len(follower.events) == 1
    path.write_bytes(line + line)
    assert follower.refresh()
    assert len(follower.events) == 2
    path.write_bytes(line)
    follower.refresh()
    assert len(follower.events) == 1


def test_a_bad_line_costs_only_itself(tmp_path):
    path = tmp_path / "events.jsonl"
    line = timeline.encode_event(Event(event_type="x", message="whole", timestamp=0.0))
    path.write_bytes(line + b"nonsense\n\n[]\n" + line)
    follower = EventFile(path)
    follower.refresh()
    assert len(follower.events) == 2
    assert [offset for offset, _ in follower.bad_lines] == [len(line), len(line) + 10]
