"""The options of `watch`: groups that can be shared, and keywords that take precedence."""

from __future__ import annotations

import dataclasses

import pytest

import sonde
from sonde.options import DiagnosisOptions, Keywords, RecordingOptions, StorageOptions
from sonde.record.plan import Helpers
from sonde.testing import tiny_mlp

GROUPS = (RecordingOptions, Helpers, StorageOptions, DiagnosisOptions)


def test_every_option_is_a_keyword_of_the_same_type_and_in_one_place():
    fields = [each for group in GROUPS for each in dataclasses.fields(group)]
    fields += [each for each in dataclasses.fields(sonde.Options) if each.name in ("on_error", "enabled", "clock")]
    types = {each.name: each.type for each in fields}
    assert len(types) == len(fields)  # no name is in two groups
    assert {name: hint.__forward_arg__ for name, hint in Keywords.__annotations__.items()} == types


def test_a_keyword_takes_precedence_over_shared_options(tmp_path):
    shared = sonde.Options().replace(what=["gradients"], every=5, config={"lr": 0.1}, diagnose=False)
    sonde.watch(tiny_mlp(), run=tmp_path / "run", options=shared, every=7).close()
    header = sonde.open_run(tmp_path / "run").header
    assert header.config["watch"] == {
        "what": ["gradients"],
        "where": "*",
        "every": "every(7)",
        "histogram": True,
        "budget": None,
    }
    assert header.config["user"] == {"lr": 0.1}
    assert shared.recording.every == 5


def test_groups_can_be_given_whole(tmp_path):
    recording = RecordingOptions(what=["parameters"], histogram=False)
    options = sonde.Options(recording=recording, diagnosis=DiagnosisOptions(diagnose=False))
    with sonde.watch(tiny_mlp(), run=tmp_path / "run", options=options) as session:
        session.step()
    run = sonde.open_run(tmp_path / "run")
    assert {site.quantity for site in run.sites} == {"parameter"}
    assert run.header.config["watch"]["histogram"] is False


def test_an_unknown_keyword_is_a_type_error_as_for_any_function(tmp_path):
    with pytest.raises(TypeError, match=r"watch\(\) got an unexpected keyword argument 'evry'"):
        sonde.watch(tiny_mlp(), run=tmp_path / "run", evry=3)
    with pytest.raises(TypeError, match="'recording'"):
        sonde.Options().replace(recording=RecordingOptions())
    assert not (tmp_path / "run").exists()


def test_options_of_another_type_are_refused(tmp_path):
    with pytest.raises(sonde.OptionError, match=r"options takes sonde\.Options; got dict"):
        sonde.watch(tiny_mlp(), run=tmp_path / "run", options={"every": 3})


def test_a_session_that_is_switched_off_takes_every_call_and_writes_nothing(tmp_path):
    session = sonde.watch(None, run=tmp_path / "run", options=sonde.Options(enabled=False))
    session.log(loss="anything")
    session.record("a", object(), quantity="nothing")
    session.event("note")
    session.epoch(-1)
    session.step()
    session.subscribe(None)
    assert session.loading([1, 2]) == [1, 2]
    assert session.flush()
    assert session.save_bundle() == tmp_path / "run"
    assert (session.findings, session.current_step, session.dropped_steps) == ([], 0, 0)
    with pytest.raises(ZeroDivisionError), session:
        1 / 0  # noqa: B018
    assert session.is_closed
    session.log(loss=1)
    assert not (tmp_path / "run").exists()
