"""Segments need no Sonde: this reads one statistic of one site with numpy and safetensors alone."""

import numpy as np
from tests.store.making import write_run

from sonde.store import open_run


# --8<-- the plain reader of docs/file-format.md
def read_series(run, site_key, column):
    import json
    from pathlib import Path

    import numpy as np
    from safetensors import safe_open

    steps, values = [], []
    for path in sorted(Path(run, "telemetry", "r00000").glob("seg-*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            meta = file.metadata()
            ids = {f"{site['name']}:{site['quantity']}": site["id"] for site in json.loads(meta["sites"])}
            at = np.searchsorted(file.get_tensor("site"), ids[site_key])
            first, last = file.get_tensor("offset")[at : at + 2].astype(int)
            row = meta["columns"].split(",").index(column)
            steps.append(file.get_tensor("step")[first:last])
            values.append(file.get_slice("stats")[row : row + 1, first:last][0])
    return np.concatenate(steps), np.concatenate(values)


# --8<--


def test_a_run_can_be_read_without_sonde(tmp_path):
    write_run(tmp_path / "run", range(50), 4, journal_bytes=1 << 13)
    steps, values = read_series(tmp_path / "run", "layer2.weight:gradient", "mean")
    ours = open_run(tmp_path / "run").series("layer2.weight:gradient", "mean")
    np.testing.assert_array_equal(steps, ours.steps)
    np.testing.assert_array_equal(values, ours.values)
