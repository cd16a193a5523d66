"""Ask the viewer thousands of questions about many runs, with few file descriptors, and report what fails.

python -m tests.hostile.many_requests --requests 10000 --runs 50 --descriptors 256
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from tests.hostile.campaign import in_child
from tests.hostile.made import write_everything
from tests.hostile.reading import QUESTIONS, TOKEN, Place, spelled

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Server:
    """A viewer in a process of its own."""

    process: subprocess.Popen[str]
    port: int

    def descriptors(self) -> int:
        """Return how many files and connections it has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208 - vanishing entries are no matter


@contextmanager
def serving(root: Path, descriptors: int) -> Iterator[Server]:
    """Start `sonde view` with a limit of open files."""
    command = f'ulimit -n {descriptors} && exec "$0" -m sonde view "$1" --port 0 --no-browser --read-only-token {TOKEN}'
    process = subprocess.Popen(
        ["bash", "-c", command, sys.executable, str(root)], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        yield Server(process, urlsplit(line.split(" at ")[1].split()[0]).port or 0)
    finally:
        process.terminate()
        process.wait(30)


class Asking:
    """Asks from several threads, each with a connection that it keeps."""

    def __init__(self, server: Server, runs: list[str]) -> None:
        self._server, self._runs = server, runs
        self._local = threading.local()

    def ask(self, number: int) -> tuple[str, str]:
        """Ask one question, drawn by its number; return it, and what is wrong with the answer."""
        chance = random.Random(number)
        question = chance.choice(QUESTIONS)
        path, words = spelled(question, Place(Path(), *chance.sample(self._runs, 2)))
        address = f"/api/{quote(path)}?{urlencode(words, doseq=True)}"
        try:
            status, body = self._get(address)
        except (OSError, http.client.HTTPException) as error:
            self._local.connection = None
            return question, f"{type(error).__name__}: {error}"
        return question, "" if status == 200 else f"{status}: {body[:200]!r}"

    def _get(self, address: str) -> tuple[int, bytes]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=PATIENCE_S)
            self._local.connection = connection
        connection.request("GET", address, headers={"X-Sonde-Token": TOKEN})
        answer = connection.getresponse()
        return answer.status, answer.read()


def main() -> None:
    """Ask and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--descriptors", type=int, default=256)
    parser.add_argument("--threads", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(Path(scratch), given)
    print(json.dumps(figures))
    sys.exit(bool(figures["failures"]))


def measure(scratch: Path, given: argparse.Namespace) -> dict[str, object]:
    """Make the runs, ask, and return what came of it."""
    root = scratch / "runs"
    names = [f"run{number}" for number in range(given.runs)]
    in_child(lambda: write_everything(scratch / "one"))
    for name in names:
        shutil.copytree(scratch / "one", root / name)
    wrong: Counter[str] = Counter()
    most, began = 0, time.monotonic()
    with serving(root, given.descriptors) as server, ThreadPoolExecutor(given.threads) as pool:
        asking = Asking(server, names)
        for number, (question, failed) in enumerate(pool.map(asking.ask, range(given.requests)), 1):
            if failed:
                wrong[f"{question}: {failed}"] += 1
            if not number % 100:
                most = max(most, server.descriptors())
            if not number % 1000:
                print(f"{number} requests, {wrong.total()} failures, {server.descriptors()} descriptors", flush=True)
    for what, count in wrong.most_common(20):
        print(f"--- {count} x {what}")
    return {
        "requests": given.requests,
        "runs": given.runs,
        "descriptors": given.descriptors,
        "most_open": most,
        "failures": wrong.total(),
        "seconds": round(time.monotonic() - began),
    }


if __name__ == "__main__":
    os.environ.setdefault("SONDE_EXAMINE", "0")
    main()
