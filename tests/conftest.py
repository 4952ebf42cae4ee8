"""Every test runs on as many ranks as it names; see ``harness/``."""

pytest_plugins = ["tests.harness.plugin"]
