"""The blocks of docs/deploy/kubernetes.md: against schemas, and the containers' commands and probes as processes."""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from distributed import Client

import dask_gpurt
from tests.cluster.processes import processes

from .blocks import run_python, text

if TYPE_CHECKING:
    from collections.abc import Mapping

#: release of Kubernetes whose schemas are used; kubernetes-validate has them
RELEASE = "1.31"


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text(name)))


@pytest.mark.parametrize("name", ["manifests", "job", "networkpolicy"])
def test_manifests_fit_the_schemas(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in _documents(name):
        validate.validate(document, RELEASE, strict=True)
    wrong = copy.deepcopy(_documents(name)[-1])
    wrong["spec"]["podSelecter"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, RELEASE, strict=True)


def test_manifests_fit_each_other() -> None:
    service, *deployments = _documents("manifests")
    labels = [d["spec"]["template"]["metadata"]["labels"] for d in deployments]
    assert [d["spec"]["selector"]["matchLabels"] for d in deployments] == labels
    assert service["spec"]["selector"] == labels[0]
    (worker,) = deployments[1]["spec"]["template"]["spec"]["containers"]
    assert f"tcp://{service['metadata']['name']}:8786" in worker["args"]
    (job,) = _documents("job")
    assert f"tcp://{service['metadata']['name']}:8786" in _container(job)["args"][-1]
    labels.append(job["spec"]["template"]["metadata"]["labels"])
    (policy,) = _documents("networkpolicy")
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    assert all(chosen.items() <= own.items() for own in labels)


def _container(deployment: Mapping[str, Any]) -> dict[str, Any]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(container)


def _probed(container: Mapping[str, Any]) -> str:
    """The path that the readiness probe asks for; its port must be one of the container's."""
    probe = container["readinessProbe"]["httpGet"]
    assert probe["port"] in [port["name"] for port in container["ports"]]
    return str(probe["path"])


@pytest.mark.cluster
def test_the_containers_commands_run_and_their_probes_answer(tmp_path: Path) -> None:
    _, first, second = _documents("manifests")
    scheduler, worker = _container(first), _container(second)
    assert scheduler["args"][:2] == ["dask", "scheduler"]
    assert worker["args"][:3] == ["dask", "worker", "tcp://gpurt-scheduler:8786"]
    replaced = {"--dashboard-address": "127.0.0.1:0", "--local-directory": str(tmp_path / "spill")}
    arguments = [a for a in worker["args"][3:] if a.split("=")[0] not in replaced]
    with processes(tmp_path) as p:
        address = p.scheduler(*scheduler["args"][2:])
        port = _free_port()
        p.start(
            *("worker", address, "--host", "127.0.0.1", "--dashboard-address", f"127.0.0.1:{port}"),
            *("--local-directory", replaced["--local-directory"], *arguments),
        )
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            assert client.nthreads().popitem()[1] == 2
            status = dask_gpurt.status(client)
            assert all(set(w["parts"].values()) == {"on"} for w in status.workers.values())
            dashboard = client.scheduler_info()["services"]["dashboard"]
        for at, container in ((dashboard, scheduler), (port, worker)):
            assert _answer(f"http://127.0.0.1:{at}{_probed(container)}") == "ok"


@pytest.mark.cluster
def test_the_job_passes_unless_the_doctor_finds_a_failure(tmp_path: Path) -> None:
    (job,) = _documents("job")
    args = _container(job)["args"]
    with processes(tmp_path) as p:
        address = p.scheduler("--preload", "dask_gpurt.preload")
        p.worker(address)
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
        ran = _run([a.replace("tcp://gpurt-scheduler:8786", address) for a in args], tmp_path)
    failed = any(line.startswith("fail ") for line in ran.stdout.splitlines())
    assert "Disk" in ran.stdout
    assert ran.returncode == int(failed), ran.stdout + ran.stderr
    gone = _run([a.replace("tcp://gpurt-scheduler:8786", "tcp://127.0.0.1:1") for a in args], tmp_path)
    assert gone.returncode == 1


def _run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    return subprocess.run(
        command, env=environment, cwd=directory, timeout=120, capture_output=True, text=True, check=False
    )


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _answer(url: str) -> str:
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return str(reply.read().decode())
        except OSError:
            assert time.monotonic() < deadline, url
            time.sleep(0.05)


def _operator_spec(tmp_path: Path) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(
        run_python(text("operator") + "\nimport json\nprint(json.dumps(spec))\n", tmp_path)
    )
    return spec


def test_the_operators_resource_starts_the_extension(tmp_path: Path) -> None:
    pytest.importorskip("dask_kubernetes.operator")
    spec = _operator_spec(tmp_path)
    for role in ("scheduler", "worker"):
        (container,) = spec["spec"][role]["spec"]["containers"]
        assert container["args"][:2] == ["dask", role]
        assert {"name": "DASK_DISTRIBUTED__SCHEDULER__PRELOAD", "value": "dask_gpurt.preload"} in container["env"]


def test_the_operators_resource_fits_its_schema(tmp_path: Path) -> None:
    operator = pytest.importorskip("dask_kubernetes.operator")
    jsonschema = pytest.importorskip("jsonschema")
    try:
        schema = _schema(Path(operator.__file__).parent / "customresources")
    except FileNotFoundError as e:
        pytest.skip(f"the installed operator lacks a part of its schema: {e.filename}")
    spec = _operator_spec(tmp_path)
    jsonschema.validate(spec, schema)
    spec["spec"]["scheduler"]["spec"]["containers"][0]["args"] = "dask scheduler"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spec, schema)


def _schema(folder: Path) -> dict[str, Any]:
    """The schema of DaskCluster, with the references between the operator's files resolved."""
    found: dict[str, Any] = yaml.safe_load((folder / "daskcluster.yaml").read_text())
    (version,) = found["spec"]["versions"]
    return dict(_resolved(version["schema"]["openAPIV3Schema"], folder))


def _resolved(node: Any, folder: Path) -> Any:
    if isinstance(node, list):
        return [_resolved(one, folder) for one in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        file, _, path = node["$ref"].partition("#")
        target: Any = yaml.safe_load(
            (folder / file.rsplit("/", 1)[-1]).read_text()  # python://dask_kubernetes/operator/customresources/...
        )
        for part in filter(None, path.split("/")):
            target = target[part]
        return _resolved(target, folder)
    return {key: _resolved(value, folder) for key, value in node.items()}


def test_helm_values_name_the_image_of_this_version() -> None:
    (values,) = _documents("helm-values")
    image = {"repository": "registry.example.com/dask-gpurt", "tag": dask_gpurt.__version__}
    assert values["scheduler"]["image"] == values["worker"]["image"] == image
    assert f"{image['repository']}:{image['tag']}" in text("image")
    assert values["scheduler"]["extraArgs"] == ["--preload", "dask_gpurt.preload"]


def _chart() -> Path:
    """The folder of the chart dask/dask."""
    chart = os.environ.get("GPURT_DASK_CHART")
    if chart is None or shutil.which("helm") is None:
        pytest.skip("needs the command helm, and GPURT_DASK_CHART: a folder with the chart dask/dask")
    return Path(chart)


def _unknown(values: Mapping[str, Any], known: Mapping[str, Any], above: str = "") -> list[str]:
    """Keys that a chart does not have; it would ignore them. What it leaves open may have any."""
    out = []
    for key, value in values.items():
        if key not in known:
            out.append(above + key)
        elif isinstance(value, dict) and known[key]:
            out += _unknown(value, known[key], f"{above}{key}.")
    return out


def test_keys_that_a_chart_does_not_have_are_found() -> None:
    known = {"worker": {"image": {"tag": "x"}, "mounts": {}, "env": None}}
    assert _unknown({"worker": {"image": {"tag": "y"}, "mounts": {"volumes": []}, "env": {"A": 1}}}, known) == []
    assert _unknown({"worker": {"image": {"tags": "y"}}, "jupiter": {}}, known) == ["worker.image.tags", "jupiter"]


def test_helm_renders_the_values(tmp_path: Path) -> None:
    chart = _chart()
    (values,) = _documents("helm-values")
    assert _unknown(values, yaml.safe_load((chart / "values.yaml").read_text())) == []
    (tmp_path / "values.yaml").write_text(text("helm-values"))
    install = text("helm-install").splitlines()[-1].split()
    assert install[:2] == ["helm", "install"]
    assert install[3:] == ["dask/dask", "--values", "values.yaml"]
    done = subprocess.run(
        ["helm", "template", install[2], str(chart), "--values", "values.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    documents = [d for d in yaml.safe_load_all(done.stdout) if d]
    deployments = {d["metadata"]["labels"]["component"]: d for d in documents if d["kind"] == "Deployment"}
    assert sorted(deployments) == ["scheduler", "worker"]
    scheduler, worker = (_container(deployments[role]) for role in ("scheduler", "worker"))
    assert scheduler["args"][0] == "dask-scheduler"
    assert scheduler["args"][-2:] == ["--preload", "dask_gpurt.preload"]
    assert scheduler["image"] == worker["image"] == f"registry.example.com/dask-gpurt:{dask_gpurt.__version__}"
    service = next(d for d in documents if d["kind"] == "Service")
    assert worker["args"][:2] == ["dask-worker", f"{service['metadata']['name']}:8786"]
    assert worker["args"][-2:] == ["--local-directory", worker["volumeMounts"][0]["mountPath"]]
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents:
        validate.validate(document, RELEASE, strict=True)
