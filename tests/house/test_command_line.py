"""The help of `dask gpurt`: examples, and no summary that is cut."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dask_gpurt.cli import gpurt


def test_the_help_has_examples_and_whole_summaries() -> None:
    shown = CliRunner().invoke(gpurt, ["--help"], terminal_width=80).output
    assert "Examples:" in shown
    assert "dask gpurt status tcp://10.0.0.1:8786" in shown
    assert "DASK_SCHEDULER_ADDRESS" in shown
    commands = shown.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert {line.split()[0] for line in commands} == set(gpurt.commands)
    for line in commands:
        assert line.endswith("."), line
        assert not line.endswith("..."), line


@pytest.mark.parametrize("command", ["status", "top", "explain", "where", "report", "runs", "compare", "doctor"])
def test_what_asks_a_cluster_has_a_timeout_and_certificates(command: str) -> None:
    shown = CliRunner().invoke(gpurt, [command, "--help"]).output
    for option in ("--timeout", "--tls-ca-file", "--tls-cert", "--tls-key"):
        assert option in shown
    refused = CliRunner().invoke(gpurt, [command, "--timeout", "0", "x"])
    assert refused.exit_code == 2
    assert "is not in the range" in refused.output


def test_one_key_is_explained() -> None:
    got = CliRunner().invoke(gpurt, ["explain", "tcp://host:1", "a", "b"])
    assert got.exit_code == 2
    assert "one key is explained at a time, got 2" in got.output
