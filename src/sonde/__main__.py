"""`python -m sonde` is the `sonde` command."""

from sonde.cli.main import run

if __name__ == "__main__":
    run()
