"""Forks evaluating processes on demand, so that a test can kill many of them without importing torch for each.

Reads one line per child: what writes (`writer`, `capture`, or `forgetful`, which never closes), how many captures it
may acknowledge, and the folder. Answers with the child's pid. The child captures datapoint after datapoint, those that
are stored already left out, and appends every one that was acknowledged to the file `<folder>.acked`; `done` comes
last. Where it may not go on it waits to be killed, so that no slow killer finds the work done.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from sonde.capture import Capture
from sonde.store.pages import PageWriter

COUNT = 400

forgotten = None


def outputs(at: int) -> dict[str, object]:
    return {"map": torch.full((3, 40 + at % 7), float(at)), "stats": {"at": at, "mean": at / 3}, "odd": (at % 2 == 1,)}


def evaluate(kind: str, most: int, folder: str) -> None:
    acked = os.open(f"{folder}.acked", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    left = most

    def acknowledge(word: object) -> None:
        nonlocal left
        os.write(acked, f"{word}\n".encode())
        left -= 1
        while not left:
            signal.pause()

    if kind == "writer":
        with PageWriter(folder, page_bytes=8_000, resume=True) as writer:
            for at in range(COUNT):
                if at not in writer.datapoints:
                    plain = {**outputs(at), "map": outputs(at)["map"].numpy()}
                    writer.add(at, plain, info={"score": at})
                    acknowledge(at)
    else:
        with Capture(page_bytes=8_000, on_error="raise") as capture:
            capture.open(folder, resume=True)
            for at in range(COUNT):
                if at not in capture.stored:
                    capture.add(at, outputs(at), info={"score": at})
                    if capture.flush():
                        acknowledge(at)
    acknowledge("done")


def forget(folder: str) -> None:
    global forgotten
    forgotten = Capture(page_bytes=8_000)
    forgotten.open(folder)
    for at in range(50):
        forgotten.add(at, outputs(at))


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    torch.set_num_threads(1)
    for line in sys.stdin:
        kind, most, folder = line.strip().split(maxsplit=2)
        pid = os.fork()
        if pid == 0 and kind == "forgetful":
            forget(folder)
            return
        if pid == 0:
            evaluate(kind, int(most), folder)
            os._exit(0)
        print(pid, flush=True)
    os._exit(0)  # tearing torch down takes a second


if __name__ == "__main__":
    main()
