"""Runs in S3: a real server process that fails, hangs and is killed in between."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.store.making import write_run
from tests.waiting import PATIENCE_S, ask, wait_until

from sonde.store import open_run, verify
from sonde.store.remote import mirror, spool
from sonde.store.remote.follow import read_progress

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

_TRAINING = """
import sys, torch, sonde
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = sonde.watch(model, optimizer, run=sys.argv[1], diagnose=False)
for step in range(10**9):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == int(sys.argv[2]):
        session.flush()
        print(session.path, session.current_step, flush=True)
        sys.stdin.readline()
        break
session.close()
"""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """The process of an S3 server that keeps nothing when it is killed; a `gate` before it can hold requests back."""

    def __init__(self) -> None:
        self.port = _free_port()
        self.gate = Gate(self.port)
        self.start()

    def start(self) -> None:
        """Start the process, without any data."""
        command = [sys.executable, "-m", "moto.server", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._answers, "the S3 server")

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.gate.close()
        self.kill()


class Gate:
    """Passes connections on to the server: at once, slowly, later (`hang`), or not at all (`refuse`)."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.mode = "open"
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if self.mode == "refuse":
                client.close()
                continue
            try:
                other = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # killed
                client.close()
                continue
            for source, sink in ((client, other), (other, client)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while content := source.recv(1 << (10 if self.mode == "slow" else 16)):
                while self.mode in ("hang", "slow"):
                    time.sleep(0.02)
                    if self.mode == "slow":
                        break
                if self.mode == "refuse":
                    break
                sink.sendall(content)
        except OSError:
            pass
        for each in (source, sink):
            each.close()

    def close(self) -> None:
        self.mode = "refuse"
        self._server.close()


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    running.close()


@pytest.fixture
def bucket(server, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.gate.port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("SONDE_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("SONDE_CARRY_EVERY", "0.1")
    monkeypatch.setattr(mirror, "_FRESH_S", -1.0)
    server.gate.mode = "open"
    name = f"bucket-{tmp_path.name.replace('_', '-').lower()[:40].strip('-')}-{os.getpid()}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
    yield f"s3://{name}"
    mirror.close()


def test_a_training_that_is_killed_is_carried_to_its_last_step(bucket):
    command = [sys.executable, "-c", _TRAINING, f"{bucket}/run", "40"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
        path, step = ask(training).split()
        training.send_signal(signal.SIGKILL)
    wait_until(lambda: (progress := read_progress(Path(path))) is not None and progress.is_complete)
    run = open_run(f"{bucket}/run")
    assert run.steps[-1] >= int(step) - 1 >= 40
    assert run.status == "crashed"


def test_a_store_that_refuses_for_a_while_gets_everything_in_the_end(bucket, server, tmp_path, caplog):
    server.gate.mode = "refuse"
    place = Path(spool.local_place(f"{bucket}/run", resume=False, is_first=True))
    assert "does not answer" in caplog.text
    write_run(place, range(1, 30))
    progress = spool.push(place, patience_s=0.1)
    assert not progress.is_complete
    assert progress.left_files >= 3
    assert progress.error
    server.gate.mode = "open"
    assert spool.push(place).is_complete
    assert open_run(f"{bucket}/run").steps.tolist() == list(range(1, 30))


def test_a_carrier_that_is_killed_leaves_a_run_that_is_carried_on(bucket, server):
    place = Path(spool.local_place(f"{bucket}/run", resume=False, is_first=True))
    writer = write_run(place, range(1, 20), close=False)
    carrier = spool.CarrierProcess.start(place)
    wait_until(lambda: (progress := read_progress(place)) is not None and progress.passes > 0)
    os.kill(carrier._process.pid, signal.SIGKILL)
    carrier._process.wait(PATIENCE_S)
    carrier._process.stdin.close()
    assert set(range(1, 20)) <= set(open_run(f"{bucket}/run").steps.tolist())
    writer.close()
    assert spool.push(place).is_complete
    assert open_run(f"{bucket}/run").status == "finished"


def test_a_store_that_hangs_dies_and_comes_back_empty_and_slow_holds_nothing_up_and_gets_everything(
    bucket, server, caplog
):
    torch = pytest.importorskip("torch")
    import sonde

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        session.flush()

    def progress():
        return read_progress(session.path)

    direct = fsspec.filesystem(
        "s3", skip_instance_cache=True, use_listings_cache=False, endpoint_url=f"http://127.0.0.1:{server.port}"
    )
    session = sonde.watch(model, optimizer, run=f"{bucket}/run", diagnose=False, budget=None)
    train(20)
    wait_until(lambda: progress() is not None and progress().passes > 0)
    server.gate.mode = "hang"
    # A pass that is under way may still end. If training waited for the store, it would not get any further.
    train(20)
    wait_until(lambda: session.current_step == 40)
    server.kill()
    server.gate.mode = "open"
    train(20)
    wait_until(lambda: progress().error)
    assert session.current_step == 60
    server.start()
    direct.mkdir(bucket)
    assert not direct.find(bucket), "it has lost everything"
    server.gate.mode = "slow"
    session.close()
    wait_until(lambda: progress().is_complete)
    server.gate.mode = "open"
    assert open_run(f"{bucket}/run").steps.tolist() == list(range(61))
    assert verify(f"{bucket}/run").ok
    assert "Traceback" not in caplog.text


def test_a_closing_session_waits_only_as_long_as_it_says(bucket, server, caplog):
    place = Path(spool.local_place(f"{bucket}/run", resume=False, is_first=True))
    write_run(place, range(1, 5))
    server.gate.mode = "refuse"
    carrier = spool.CarrierProcess.start(place)
    began = time.monotonic()
    assert not carrier.close(wait_s=1.0)
    assert time.monotonic() - began < 10
    assert f"sonde push {place}" in caplog.text
    server.gate.mode = "open"
    wait_until(lambda: carrier._process.poll() is not None)
    assert open_run(f"{bucket}/run").steps.tolist() == [1, 2, 3, 4]
