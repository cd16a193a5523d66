"""These are programs that `make wheel-test` and `make compat` run in fresh environments, not tests."""

collect_ignore_glob = ["*.py"]
