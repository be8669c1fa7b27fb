"""`gpurt.policy`: what can be named there, what is said when it cannot, and that docs/policies.md runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed.utils_test import gen_cluster, inc

from dask_gpurt.config import Settings
from dask_gpurt.errors import ConfigError
from dask_gpurt.extension import GpurtScheduler
from dask_gpurt.placement.decide.policy import Cheapest, Policy, load

DOCS = Path(__file__).parents[3] / "docs" / "policies.md"

MODULE = """
class Good:
    asked = 0

    def decide(self, task, workers, far):
        Good.asked += 1
        return 0


class Declines:
    def decide(self, task, workers, far):
        return None


class Raises:
    def decide(self, task, workers, far):
        raise ZeroDivisionError("on purpose")


class Arguments:
    def __init__(self, must):
        pass

    def decide(self, task, workers, far):
        return 0


class Mute:
    pass


value = 1
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "gpurt_policies_for_test.py").write_text(MODULE)
    (tmp_path / "gpurt_broken_for_test.py").write_text("import no_such_thing_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "gpurt_policies_for_test"
    sys.modules.pop("gpurt_policies_for_test", None)
    sys.modules.pop("fewest_bytes", None)


def test_named(module: str) -> None:
    assert isinstance(load("gpurt"), Cheapest)
    good = load(f"{module}:Good")
    assert type(good).__name__ == "Good"
    assert isinstance(good, Policy)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "gpurt_policies_for_test:Goood",
            "has no Goood. Classes with a decide method there: Arguments, Declines, Good",
        ),
        ("gpurt_policies_for_test:Mute", "Mute has no method decide(task, workers, far)"),
        ("gpurt_policies_for_test:value", "has no method decide"),
        ("gpurt_policies_for_test:Arguments", "Arguments() failed: TypeError"),
        ("gpurt_broken_for_test:X", "importing gpurt_broken_for_test failed: ModuleNotFoundError"),
        ("gpurt_nowhere_for_test:X", "add its folder to PYTHONPATH"),
        ("nonsense", "must be 'gpurt', 'stock' or 'package.module:Class'"),
    ],
)
def test_what_cannot_be_named(module: str, name: str, says: str) -> None:
    with pytest.raises(ConfigError) as e:
        load(name)
    assert says in str(e.value)
    assert repr(name) in str(e.value)


@pytest.mark.parametrize("name", ["a.b:C", "gpurt", "stock", "_x.y2:Z_"])
def test_settings_take_them(name: str) -> None:
    assert Settings.load({"policy": name}).policy == name


@pytest.mark.parametrize("name", ["a.b", "a.b:", ":C", "a b:C", "a.b:C.D", "gpurt ", ".a:B", ""])
def test_settings_refuse(name: str) -> None:
    with pytest.raises(ConfigError, match=r"must be one like 'gpurt', 'stock', 'package\.module:Class'"):
        Settings.load({"policy": name})


async def _work(c: Any) -> list[int]:
    first = [c.submit(inc, i, key=f"first-{i}") for i in range(4)]
    return await c.gather([c.submit(inc, f, key=f"then-{i}") for i, f in enumerate(first)])


def _settings(module: str, cls: str) -> Settings:
    return Settings.load({"policy": f"{module}:{cls}", "tiers.enabled": False, "shuffle.enabled": False})


@pytest.mark.cluster
@pytest.mark.parametrize("cls", ["Good", "Declines", "Raises"])
def test_live(module: str, cls: str) -> None:
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
    async def live(c: Any, s: Any, a: Any, b: Any) -> None:
        plugin = GpurtScheduler(_settings(module, cls))
        await plugin.start(s)
        assert plugin.placement is not None
        assert plugin.placement.engine is not None
        plugin.placement.engine.budget.decision_seconds = float("inf")  # else an interrupted decision is stock's
        assert await _work(c) == [2, 3, 4, 5]
        statistics = plugin.placement.statistics()
        if cls == "Good":
            assert statistics["decisions"]["total"] >= 4
            assert sys.modules[module].Good.asked >= 4
            assert statistics["fallbacks"] == {}
        elif cls == "Declines":
            assert statistics["declined"]["policy"] >= 4
        else:
            assert statistics["fallbacks"]["decide_worker_non_rootish"]["exception"] >= 4
            assert "on purpose" in statistics["last_traceback"]
        await plugin.uninstall()

    live()


@pytest.mark.cluster
def test_one_that_is_not_there_stops_the_start(module: str) -> None:
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
    async def live(c: Any, s: Any, a: Any) -> None:
        plugin = GpurtScheduler(_settings(module, "Missing"))
        with pytest.raises(ConfigError, match="has no Missing"):
            await plugin.start(s)
        assert "decide_worker_non_rootish" not in s.__dict__
        assert await _work(c) == [2, 3, 4, 5]

    live()


def test_the_documented_example_runs(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(blocks) == 3
    (tmp_path / "fewest_bytes.py").write_text(blocks[0])
    scope: dict[str, Any] = {}
    exec(blocks[1], scope)
    results = scope["results"]
    assert list(results) == ["stock", "gpurt", "fewest_bytes:FewestBytes"]
    assert results["fewest_bytes:FewestBytes"].between_nodes_bytes < results["stock"].between_nodes_bytes
    exec(blocks[2], scope)
    assert scope["story"]["chosen"] in {c["address"] for c in scope["story"]["candidates"]}
    assert len(capsys.readouterr().out.splitlines()) == 4
