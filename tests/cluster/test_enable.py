"""`dask gpurt enable`: what it writes, what it keeps, and what it says of all that wins over it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import dask
import pytest
import yaml
from click.testing import CliRunner
from distributed import Client

import dask_gpurt
from dask_gpurt.cli import gpurt as commands

from .processes import processes

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

PRELOAD = "dask_gpurt.preload"


def gpurt(command: str, config: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dask", "gpurt", command],
        env={**os.environ, "DASK_CONFIG": str(config), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_cluster_that_is_started_afterwards_has_it(tmp_path: Path) -> None:
    config = tmp_path / "config"
    said = gpurt("enable", config).stdout
    assert f"wrote {config / 'gpurt-preload.yaml'}" in said
    assert "--preload on a command line wins over it" in said
    assert "dask_gpurt.load" in said
    with processes(tmp_path, {"DASK_CONFIG": str(config)}) as p:
        address = p.scheduler()
        p.worker(address)
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            assert "on 1 of 1 workers" in repr(dask_gpurt.status(client))
    assert "removed" in gpurt("disable", config).stdout
    assert "Nothing to do" in gpurt("disable", config).stdout
    assert list(config.iterdir()) == []


def test_a_file_that_wins_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("distributed: {scheduler: {preload: [json]}}")
    refused = gpurt("enable", tmp_path)
    assert refused.returncode == 1
    said = f"file {tmp_path / 'mine.yaml'} sets distributed.scheduler.preload to ['json'] and wins; add {PRELOAD} there"
    assert said in refused.stderr
    assert not (tmp_path / "gpurt-preload.yaml").exists()


def test_a_variable_that_wins_is_named(tmp_path: Path) -> None:
    refused = gpurt("enable", tmp_path, DASK_DISTRIBUTED__WORKER__PRELOAD="json")
    assert refused.returncode == 1
    assert (
        "variable DASK_DISTRIBUTED__WORKER__PRELOAD sets distributed.worker.preload to ['json'] and" in refused.stderr
    )
    assert not (tmp_path / "gpurt-preload.yaml").exists()
    for ours in (PRELOAD, "dask_gpurt.load"):
        both = gpurt("enable", tmp_path, DASK_DISTRIBUTED__WORKER__PRELOAD=f"['json', '{ours}']")
        assert both.returncode == 0, both.stderr
    before = (tmp_path / "gpurt-preload.yaml").read_text()
    assert gpurt("enable", tmp_path, DASK_DISTRIBUTED__WORKER__PRELOAD="json").returncode == 1
    assert (tmp_path / "gpurt-preload.yaml").read_text() == before


@pytest.mark.parametrize("what", ["a full disk", "another's file"])
def test_an_earlier_file_outlives_what_fails(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_CONFIG", str(tmp_path))
    monkeypatch.setattr(dask.config, "paths", [str(tmp_path)])
    ours = tmp_path / "gpurt-preload.yaml"
    ours.write_text("distributed: {scheduler: {preload: [json]}}")
    if what == "a full disk":

        def full(path: Path, text: str) -> None:
            path.touch()
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(type(ours), "write_text", full)
    else:
        (tmp_path / "a.yaml").write_text("{")
    done = CliRunner().invoke(commands, ["enable"])
    assert done.exit_code == 1
    assert ours.read_text() == "distributed: {scheduler: {preload: [json]}}"
    assert not list(tmp_path.glob("*.earlier"))


@pytest.mark.parametrize("command", ["enable", "disable"])
@pytest.mark.parametrize("variable", ["DASK_CONFIG", "HOME"])
def test_a_user_without_a_folder_is_told(variable: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a user without an entry in passwd and without HOME, and of a folder that no shell has expanded."""
    monkeypatch.setenv("DASK_CONFIG", "~/config" if variable == "DASK_CONFIG" else "")
    if variable == "HOME":
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    done = CliRunner().invoke(commands, [command])
    assert done.exit_code == 1
    assert done.output.startswith("Error: Dask's configuration directory is '~/")
    assert "Remedy: set DASK_CONFIG" in done.output


@pytest.mark.parametrize(
    ("text", "preload", "argv"),
    [
        ("[json]", ["json", PRELOAD], None),
        ("json", ["json", PRELOAD], None),
        (f"[{PRELOAD}, json]", ["json", PRELOAD], None),
        ("[dask_gpurt.load, json]", ["json", PRELOAD], None),
        ("[json, csv], preload-argv: [--x, '1']", ["json", "csv", PRELOAD], None),
        ("[json, csv], preload-argv: [[--x], []]", ["json", "csv", PRELOAD], [["--x"], [], []]),
        (f"[{PRELOAD}, json], preload-argv: [[--y], [--x]]", ["json", PRELOAD], [["--x"], ["--y"]]),
    ],
)
def test_what_others_preload_is_kept(text: str, preload: list[str], argv: list[list[str]] | None) -> None:
    from dask_gpurt.client.switch import _with_ours

    got = _with_ours(yaml.safe_load(f"distributed: {{scheduler: {{preload: {text}}}}}"), "scheduler")
    assert got["preload"] == preload
    assert got.get("preload-argv") == argv
