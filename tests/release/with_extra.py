"""What one extra gives beside the base. Run by check_wheel.py with the name of the extra."""

import importlib
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "store" / "golden_0_2"


def sonde(*words):
    done = subprocess.run([sys.executable, "-m", "sonde", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout


def view():
    sonde("report", "runs/golden", "--out", "report.html")
    assert "plotly" in Path("report.html").read_text().lower()
    server = subprocess.Popen(
        [sys.executable, "-m", "sonde", "view", "runs", "--port", "0", "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    threading.Timer(60, server.kill).start()
    try:
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http"))
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())  # keeps cookies
        assert b"<html" in browser.open(address, timeout=30).read()
        assert b"golden" in browser.open(f"{address.partition('?')[0]}api/runs", timeout=30).read()
    finally:
        server.terminate()


def notebook():
    importlib.import_module("sonde.views.notebook")
    import sonde as package

    assert package.open_run("runs/golden")._repr_html_()


def fleet():
    sonde("export", "runs/golden", "--to", "dataset", "--out", "fleet")
    sonde("fleet", "diagnose", "runs", "--out", "fleet")
    assert "golden" in sonde("fleet", "query", "select run from diagnosed_runs", "fleet")


def remote():
    """Push a run to an address and read it from there. The package is the one for S3, the store a folder."""
    importlib.import_module("s3fs")
    address = f"{(Path.cwd() / 'store').as_uri()}/golden"
    sonde("push", "runs/golden", "--to", address)
    assert importlib.import_module("sonde").open_run(address).sites


USES = {
    "view": view,
    "notebook": notebook,
    "export": lambda: sonde("export", "runs/golden", "--to", "parquet", "--out", "run.parquet"),
    "fleet": fleet,
    "remote": remote,
    "tensorboard": lambda: sonde("export", "runs/golden", "--to", "tensorboard", "--out", "logs"),
    "legacy": lambda: importlib.import_module("joblib"),
    "yaml": lambda: importlib.import_module("yaml"),
    "mcp": lambda: importlib.import_module("sonde.views.assistant"),
    "wandb": lambda: importlib.import_module("sonde").to_wandb,
    "mlflow": lambda: importlib.import_module("sonde").to_mlflow,
    "comet": lambda: importlib.import_module("sonde").to_comet,
}

shutil.copytree(GOLDEN, "runs/golden")
begin = time.perf_counter()
extra = sys.argv[1]
USES.get(extra, lambda: importlib.import_module(f"sonde.integrations.{extra}"))()
print(f"extra {extra}: works ({time.perf_counter() - begin:.1f} s)")
