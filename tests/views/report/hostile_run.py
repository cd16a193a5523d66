"""A run whose every name, message and setting tries to be markup or script."""

from __future__ import annotations

import numpy as np

from sonde.core import schema
from sonde.records import Block, Event, Evidence, Finding, RunHeader, Site
from sonde.store import RunWriter

ATTACKS = (
    "<script>alert('script')</script>",
    '"><img src=x onerror=alert("image")>',
    "</script><script>alert('closed')</script>",
    "<a href=\"javascript:alert('link')\">click</a>",
    "`<!--` ]] \\u003cscript\\u003ealert(1)\\u003c/script\\u003e \u2028 \x1b[31m | ${alert(1)}",
)


def write_hostile_run(path, steps=40):
    names = [f"{attack}.{i}" for i, attack in enumerate(ATTACKS)]
    sites: list[Site] = []
    for name in names:
        for quantity in ("parameter", "gradient", "update"):
            sites.append(Site(id=len(sites), name=f"{name}.weight", quantity=quantity, shape=(4, 4), kind=ATTACKS[0]))
        sites.append(Site(id=len(sites), name=name, quantity="output", shape=(4, 4), kind=ATTACKS[1]))
        sites.append(Site(id=len(sites), name=f"loss {name}", quantity="scalar"))
    modules = [{"name": name, "kind": ATTACKS[1]} for name in names]
    parameters = [{"name": f"{name}.weight", "shape": [4, 4], "device": ATTACKS[2]} for name in names]
    header = RunHeader(
        schema_version=schema.SCHEMA_VERSION,
        created=1_700_000_000.0,
        sonde_version="0",
        model={"name": ATTACKS[0], "modules": modules, "parameters": parameters, "num_parameters": 80},
        environment={attack: attack for attack in ATTACKS},
        config={"nested": {attack: [attack] for attack in ATTACKS}},
    )
    writer = RunWriter(path, header)
    writer.take_sites(sites)
    for step in range(1, steps + 1):
        values = np.full(len(sites), 1.0 / step)
        rows = schema.rows_of_values(values)
        bins = np.zeros((len(sites), schema.NUM_BINS), np.uint64)
        bins[:, schema.ONE_BIN - 1] = 1
        ids = np.arange(len(sites), dtype=np.uint32)
        binned = np.ones(len(sites), np.bool_)
        writer.take_block(Block(step=step, time=float(step), sites=ids, rows=rows, bins=bins, binned=binned))
    for number, attack in enumerate(ATTACKS):
        writer.take_event(Event(event_type=attack, message=attack, step=number, timestamp=float(number)))
        writer.take_finding(hostile_finding(attack, number, names[number]))
    writer.close()


def hostile_finding(attack, step, site):
    return Finding(
        kind=attack,
        severity="critical",
        confidence=0.5,
        step=step,
        last_step=step + 5,
        sites=(site,),
        evidence=(Evidence(name=attack, value=float("nan"), threshold=1.0, relation=">"),),
        cause=attack,
        fix=attack,
        refute=attack,
        explains=(attack,),
    )
