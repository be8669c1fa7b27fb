"""The help of `dask gpurt`: examples, and no summary that is cut."""

from __future__ import annotations

import errno
import importlib.util
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from dask_gpurt.cli import gpurt
from dask_gpurt.cli.base import split
from dask_gpurt.client.diagnose import diagnose
from dask_gpurt.observe.trace.reader import Trace

if TYPE_CHECKING:
    from pathlib import Path


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


@pytest.mark.parametrize("command", ["explain", "where"])
def test_an_address_alone_is_no_key(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    got = CliRunner().invoke(gpurt, [command, "tcp://host:1"])
    assert got.exit_code == 2
    assert "'tcp://host:1' is an address; name a KEY after it" in got.output


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_that_none_has(port: str) -> None:
    got = CliRunner().invoke(gpurt, ["status", f"tcp://127.0.0.1:{port}"])
    assert isinstance(got.exception, SystemExit), got.exception
    assert got.exit_code == 1
    assert f"port {port} is not one of 1 to 65535. Remedy: an address such as" in got.output


def test_wrong_input_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ValueError("no worker x. Must be an address or a name")

    monkeypatch.setattr("dask_gpurt.client.hold.release", refuse)
    monkeypatch.setattr("dask_gpurt.observe.trace.reader.Trace.load", lambda *args, **kwargs: Trace("run.trace"))
    monkeypatch.setenv("DASK_CONFIG", "/proc/none/dask")
    (tmp_path / "run.trace").touch()
    for arguments, said in (
        (["release", "tcp://host:1", "x"], "Error: no worker x."),
        (["trace", str(tmp_path / "run.trace"), "--chrome", str(tmp_path / "none" / "x.json")], "Error: [Errno 2]"),
        (["enable"], "Error: [Errno 2]"),
    ):
        got = CliRunner().invoke(gpurt, arguments)
        assert isinstance(got.exception, SystemExit), (arguments, got.exception)
        assert got.exit_code == 1
        assert said in got.output


def test_a_file_that_cannot_be_read_or_removed_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DASK_CONFIG", str(tmp_path))
    (tmp_path / "gpurt-preload.yaml").mkdir()  # which unlink refuses
    for arguments in (["trace", "/proc/self/mem"], ["replay", "/proc/self/mem"], ["disable"]):
        got = CliRunner().invoke(gpurt, arguments)
        assert isinstance(got.exception, SystemExit), (arguments, got.exception)
        assert got.exit_code == 1
        assert "Error: [Errno" in got.output


def test_a_drawing_never_replaces_its_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    path.write_bytes(b"recorded")
    monkeypatch.setattr("dask_gpurt.observe.trace.reader.Trace.load", lambda *args, **kwargs: Trace("run.trace"))
    got = CliRunner().invoke(gpurt, ["trace", str(path), "--chrome", str(tmp_path / "." / "run.trace")])
    assert got.exit_code == 1
    assert "which is the trace itself. Remedy: the name of another file" in got.output
    assert path.read_bytes() == b"recorded"


def test_the_benchmark_has_help_before_its_extra_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "duckdb" else find(name, *args)
    )
    shown = CliRunner().invoke(gpurt, ["bench", "tpch", "--help"])
    assert shown.exit_code == 0, shown.output
    assert "--scale" in shown.output
    assert "duckdb not installed" in CliRunner().invoke(gpurt, ["bench", "tpch"]).output


def test_no_time_is_endless() -> None:
    for arguments, exit_code, said in (
        (
            ["status", "tcp://127.0.0.1:1", "--timeout", "inf"],
            1,
            "timeout is inf, must be a number of seconds above 0, and",
        ),
        (["top", "tcp://127.0.0.1:1", "--interval", "inf"], 2, "inf is not in the range"),
    ):
        got = CliRunner().invoke(gpurt, arguments)
        assert isinstance(got.exception, SystemExit), (arguments, got.exception)
        assert got.exit_code == exit_code
        assert said in got.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["diagnose", "tcp://127.0.0.1:1", "--stall", "nan"], "nan is not a number above 0"),
        (["status", "tcp://127.0.0.1:1", "--timeout", "nan"], "nan is not a number above 0"),
        (["top", "tcp://127.0.0.1:1", "--interval", "nan"], "nan is not a number from 0"),
        (["replay", __file__, "--gate", "nan"], "nan is not a number above 0"),
    ],
)
def test_nan_is_no_number(arguments: list[str], said: str) -> None:
    """Nothing is more than that: a gate of it would let everything pass, and all would be a stall."""
    got = CliRunner().invoke(gpurt, arguments)
    assert got.exit_code == 2, got.output
    assert said in got.output


@pytest.mark.parametrize("seconds", [float("nan"), 0, -1.0, "30"])
def test_a_stall_is_a_time(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"stall_seconds is .*, must be a number of seconds above 0, and finite"):
        diagnose("tcp://127.0.0.1:1", stall_seconds=seconds)


@pytest.mark.parametrize("address", ["tcp://h:1", "h:8786", "10.0.0.1:8786", "[::1]:8786", "[fe80::1%eth0]:8786"])
def test_an_address_needs_no_scheme(address: str) -> None:
    assert split((address, "x")) == (address, ("x",))
    assert split(("[x]", "y")) == (None, ("[x]", "y"))


def test_a_reader_that_leaves_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as ``| head``."""

    def shut(*args: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("dask_gpurt.client.runs.runs", lambda *args, **kwargs: "the runs")
    monkeypatch.setattr("dask_gpurt.cli.asking.show", shut)
    got = CliRunner().invoke(gpurt, ["runs", "tcp://127.0.0.1:1"])
    assert got.exit_code == 1
    assert got.output == ""
