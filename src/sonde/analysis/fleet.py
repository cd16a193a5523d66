"""The same work on thousands of runs: on processes of this machine or on a Ray cluster, resumed where it stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from sonde.analysis import dataset
from sonde.core import files
from sonde.diagnosis import diagnose
from sonde.errors import MissingExtra, OptionError, RunDamaged, RunError, RunNotFound
from sonde.records import SEVERITIES
from sonde.store import open_run
from sonde.store.remote import mirror
from sonde.store.runs import find_runs

RESULTS: Final = "diagnoses.jsonl"
Line = dict[str, Any]
"""What became of one run: its labels, the fingerprint of what was read, its status, and a `problem`, if any."""
Task = Callable[[str], Line]
"""Works on the run at a folder or address. It is sent to other processes."""


def runs_below(places: Iterable[str]) -> list[str]:
    """Return the runs below folders and addresses, each once, by their absolute paths or addresses.

    Raises:
        RunNotFound: A folder does not exist, or there is no run at all.

    """
    found: dict[str, None] = {}
    places = list(places)
    for place in places:
        folder = mirror.local_path(place)
        if not mirror.is_mirrored(folder) and not folder.is_dir():
            raise RunNotFound(f"There is no folder {place}.")
        found.update((mirror.shown(path), None) for path in find_runs(folder.resolve()))
    if not found:
        raise RunNotFound(f"There are no runs below {', '.join(places)}.")
    return list(found)


# --------------------------------------------------------------------------------
# Work on all of them.


@dataclass(frozen=True, slots=True)
class Work:
    """What is left to do for runs that are new, changed or were live the last time."""

    task: Task
    todo: list[str]
    unchanged: int
    _keep: Callable[[Iterator[Line]], Iterator[Line]] = iter

    def run(self, engine: Engine) -> Iterator[Line]:
        """Do it; yield a line for each run as soon as it is done and kept."""
        return self._keep(engine(self.task, self.todo)) if self.todo else iter(())


Engine = Callable[[Task, Sequence[str]], Iterator[Line]]


def plan_export(places: Iterable[str], out: Path) -> Work:
    """Return the work of writing all runs below some places to a dataset.

    Raises:
        MissingExtra: pyarrow is not installed.
        OptionError: The folder `out` holds something else.
        RunNotFound: There are no runs.

    """
    runs = _outside(out, places)
    return _select(runs, dataset.open_dataset(out), partial(dataset.write_tables, out=out.resolve()))


def plan_diagnosis(places: Iterable[str], out: Path) -> Work:
    """Return the work of diagnosing all runs below some places; `out` keeps a line for each.

    Raises:
        OptionError: The folder `out` holds something else.
        RunNotFound: There are no runs.

    """
    runs = _outside(out, places)
    dataset.make_folder(out)
    known = {line["run_id"]: line["fingerprint"] for line in read_results(out) if line.get("status") != "live"}
    return _select(runs, known, judge_run, partial(_append, out))


def _outside(out: Path, places: Iterable[str]) -> list[str]:
    return [run for run in runs_below(places) if not Path(run).is_relative_to(out.resolve())]


def _select(
    runs: list[str], known: Mapping[str, str], task: Task, keep: Callable[[Iterator[Line]], Iterator[Line]] = iter
) -> Work:
    todo = [run for run in runs if known.get(dataset.labels_of(run)["run_id"]) != dataset.fingerprint(run)]
    return Work(task, todo, len(runs) - len(todo), keep)


def judge_run(place: str) -> Line:
    """Diagnose one run; return a line of the results."""
    # Taken before the run is read: what is written to it meanwhile is judged the next time.
    line: Line = dataset.labels_of(place) | {"fingerprint": dataset.fingerprint(place), "diagnosed": time.time()}
    try:
        run = open_run(place)
        line |= dataset.labels_of(place, run.header) | {"status": run.status, "created": run.header.created}
        diagnosis = diagnose(run)
        findings = [dataset.describe_finding(run, finding) for finding in diagnosis.findings]
        run.close()
        mirror.forget(run.path)
    except (RunError, OSError) as error:
        return line | {"problem": str(error), "findings": []}
    return line | {"steps": diagnosis.steps, "severity": diagnosis.severity, "findings": findings}


def _attempt(task: Task, place: str) -> Line:
    """Work on one run. A fault of ours on it does not end the work on the others."""
    try:
        return task(place)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is in the line
        return _failed(place, error)


def _failed(place: str, error: BaseException) -> Line:
    line = dataset.labels_of(place) | {"fingerprint": dataset.fingerprint(place), "diagnosed": time.time()}
    return line | {"problem": f"{type(error).__name__}: {error}", "findings": []}


# --------------------------------------------------------------------------------
# Engines.


def choose_engine(name: Literal["local", "ray"], jobs: int | None = None) -> Engine:
    """Return what the work runs on: up to `jobs` processes of this machine (by default all cores), or a Ray cluster."""
    return _on_ray if name == "ray" else partial(_in_processes, jobs=jobs or os.cpu_count() or 1)


def _in_processes(task: Task, places: Sequence[str], *, jobs: int) -> Iterator[Line]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    jobs = min(jobs, len(places))
    if jobs <= 1:
        yield from (_attempt(task, place) for place in places)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            for done in as_completed([pool.submit(_attempt, task, place) for place in places]):
                yield done.result()
        except BrokenProcessPool:
            raise RunError(
                "A process died, perhaps for lack of memory. What was done is kept: run the same command again, with "
                "fewer --jobs."
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _on_ray(task: Task, places: Sequence[str]) -> Iterator[Line]:
    """Work on a Ray cluster whose machines see the runs and the results at the same paths."""
    try:
        import ray
    except ImportError:
        raise OptionError("--engine ray needs ray, which is not installed. Run: pip install ray") from None
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", ignore_reinit_error=True, log_to_driver=False)
    except ConnectionError:
        raise OptionError("There is no Ray cluster. Start one with: ray start --head; or set RAY_ADDRESS.") from None

    @ray.remote  # type: ignore[untyped-decorator] # its types want one argument more
    def work(place: str) -> Line:
        return _attempt(task, place)

    waiting = {work.remote(place): place for place in places}
    try:
        while waiting:
            (done,), _ = ray.wait(list(waiting))
            place = waiting.pop(done)
            try:
                line = ray.get(done)
            except ray.exceptions.RayError as error:  # its machine died
                line = _failed(place, error)
            yield line
    finally:
        ray.shutdown()


# --------------------------------------------------------------------------------
# Results of a diagnosis of many runs.


def _append(out: Path, lines: Iterator[Line]) -> Iterator[Line]:
    """Write each result as it comes, so that nothing is lost when the work is interrupted."""
    _rewrite(out)
    with (out / RESULTS).open("a", encoding="utf-8", errors="backslashreplace") as file:
        for line in lines:
            file.write(files.text(line) + "\n")
            file.flush()
            yield line
    _rewrite(out)


def _rewrite(out: Path) -> None:
    """Leave one line per run: without results that were replaced, and without a line that was cut off."""
    results = read_results(out)
    with files.replacing(out / RESULTS) as file:
        file.writelines(f"{files.text(line)}\n".encode("utf-8", "backslashreplace") for line in results)


def read_results(out: Path) -> list[Line]:
    """Return the newest result of each run; none if nothing was diagnosed."""
    found: dict[str, Line] = {}
    if not (out / RESULTS).exists():
        return []
    with files.open_file(out / RESULTS) as file:
        for number, text in enumerate(file, 1):
            try:
                line = files.loads(text, f"{out / RESULTS}:{number}")
            except RunDamaged:
                continue  # cut off when the work was killed: the run is judged again
            if _is_result(line):
                found[line["run_id"]] = line
    return list(found.values())


def _is_result(line: Any) -> bool:
    return (
        isinstance(line, dict)
        and isinstance(line.get("run_id"), str)
        and isinstance(line.get("project"), str)
        and isinstance(line.get("findings"), list)
        and all(isinstance(each, dict) and "kind" in each and "time" in each for each in line["findings"])
    )


def sum_up(results: Iterable[Line]) -> list[Line]:
    """Return a row per kind of finding and project: in how many runs, since when, and until when; the most first."""
    runs_in: dict[str, int] = {}
    rows: dict[tuple[str, str], Line] = {}
    for line in results:
        runs_in[line["project"]] = runs_in.get(line["project"], 0) + 1
        for kind in {finding["kind"] for finding in line["findings"]}:
            each = [finding for finding in line["findings"] if finding["kind"] == kind]
            times = [finding["time"] for finding in each]
            new = {"finding": kind, "project": line["project"], "severity": "info", "runs": 0, "of": 0}
            row = rows.setdefault((kind, line["project"]), new | {"since": min(times), "latest": max(times)})
            row["runs"] += 1
            row["since"], row["latest"] = min(row["since"], *times), max(row["latest"], *times)
            row["severity"] = max(row["severity"], *(finding["severity"] for finding in each), key=SEVERITIES.index)
    for row in rows.values():
        row["of"] = runs_in[row["project"]]
    return sorted(rows.values(), key=lambda row: (-row["runs"], row["finding"], row["project"]))


def run_query(sql: str, out: Path) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Run SQL on the tables of a folder of results; return the names of the columns, and the rows.

    Raises:
        MissingExtra: DuckDB is not installed.
        OptionError: The folder holds no results, or the SQL is wrong.

    """
    try:
        import duckdb
        import pyarrow as _  # noqa: F401 - hands the results of diagnose to DuckDB
    except ImportError:
        raise MissingExtra("duckdb", "fleet", "Querying many runs") from None
    present = [name for name in dataset.TABLES if any((out / name).glob("*.parquet"))]
    if not present:
        require_results(out)
    with duckdb.connect() as connection:
        try:
            for name in present:
                place = str(out / name / "*.parquet").replace("'", "''")
                connection.execute(f"create view {name} as from read_parquet('{place}', union_by_name=true)")
            for name, table in _result_tables(out).items():
                connection.register(name, table)
            found = connection.execute(sql)
            return [column[0] for column in found.description or ()], found.fetchall()
        except duckdb.Error as error:
            raise OptionError(" ".join(str(error).split())) from None


def require_results(out: Path) -> None:
    """Raise OptionError where nothing was diagnosed."""
    if not (out / RESULTS).is_file():
        raise OptionError(f"{out} holds no results. Run: sonde fleet diagnose DIR... --out {out}")


def _result_tables(out: Path) -> dict[str, Any]:
    if not (out / RESULTS).is_file():
        return {}
    lines = read_results(out)
    about = {"status": "string", "severity": "string", "problem": "string", "steps": "int64"}
    about |= {"created": "float64", "diagnosed": "float64"}
    findings = [
        {name: line[name] for name in dataset.LABELS} | finding for line in lines for finding in line["findings"]
    ]
    return {
        "diagnosed_runs": dataset.make_table(dataset.LABELS | about, lines),
        "diagnosed_findings": dataset.make_table(dataset.FINDING_COLUMNS, findings),
    }
