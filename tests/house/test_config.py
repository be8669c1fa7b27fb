from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from typing import Any

import dask
import pytest
from distributed import Scheduler, Worker

from dask_gpurt.config import DEFAULTS, Settings
from dask_gpurt.config_schema import leaves, read, schema, write
from dask_gpurt.errors import ConfigError, InstallError
from dask_gpurt.preload import dask_setup

jsonschema = pytest.importorskip("jsonschema")


def test_defaults_fit_the_schema() -> None:
    jsonschema.validate(DEFAULTS, schema())
    settings = Settings.load()
    assert settings.policy == "gpurt"
    assert settings.tiers.disk_reserve is None


def test_every_default_has_a_schema_with_a_description_and_back() -> None:
    def keys(tree: dict[str, Any], prefix: str = "") -> set[str]:
        return {
            k
            for name, v in tree.items()
            for k in (keys(v, f"{prefix}{name}.") if isinstance(v, dict) else {prefix + name})
        }

    assert keys(DEFAULTS["gpurt"]) == set(leaves())
    assert all(node["description"] for node in leaves().values())


def test_few_knobs() -> None:
    """Checklist O4: zero configuration; ten public knobs at the most. Expert ones are marked so in the schema."""
    public = [key for key, node in leaves().items() if not node.get("x-expert")]
    assert len(public) <= 10


def test_every_key_is_an_argument_of_the_preload() -> None:
    flags = {opt for p in dask_setup.params for opt in p.opts}
    assert flags == {"--gpurt-" + key.replace(".", "-") for key in leaves()}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"polcy": "stock"}, ["gpurt.polcy", "Did you mean gpurt.policy?"]),
        ({"policy": "stok"}, ["'stok'", "'gpurt', 'stock'", "Did you mean 'stock'?"]),
        ({"host-limit": 0.5}, ["Did you mean gpurt.tiers.host-limit?"]),
        ({"tiers.host-limit": 0}, ["gpurt.tiers.host-limit is 0", "> 0 and <= 1"]),
        ({"tiers.host-limit": "half"}, ["'half'", "a number"]),
        ({"tiers.disk-limit": "many"}, ["'many'", "200 GiB"]),
        ({"tiers.disk-reserve": -1}, ["-1", ">= 0"]),
        ({"tiers.disk-limit": " "}, ["gpurt.tiers.disk-limit is ' '", "200 GiB"]),
        ({"tiers.disk-reserve": "1e400"}, ["'1e400'", "200 GiB"]),
        ({"tiers.disk-limit": 10**30}, [str(10**30), "<= 1 EiB"]),
        ({"shuffle.receive-budget": "16 EiB"}, ["'16 EiB'", "<= 1 EiB"]),
        ({"tiers.directory": ["/tmp", "s3://bucket/x"]}, ["'s3://bucket/x'", "gpurt.tiers.object-store"]),
        ({"tiers.directory": ""}, ["gpurt.tiers.directory is ''", "null for the worker's local directory"]),
        ({"tiers.directory": ["/tmp", " "]}, ["gpurt.tiers.directory is ' '", "null for the worker's local"]),
        ({"tiers.enabled": 1}, ["true or false"]),
        ({"placement.candidates": True}, ["an integer"]),
        ({"placement.candidates": 1000}, [">= 2 and <= 64"]),
        ("tiers", ["'tiers', must be a mapping of keys to values"]),
        ({"tiers": "on"}, ["'on'", "mapping"]),
        ({"tiers": {"host-limt": 0.5}}, ["gpurt.tiers.host-limt", "Did you mean gpurt.tiers.host-limit?"]),
        ({"gpurt.tiers.host-limt": 0.5}, ["unknown key gpurt.tiers.host-limt", "Did you mean gpurt.tiers.host-limit?"]),
        ({"tiers.host-limit": float("nan")}, ["is nan", "> 0 and <= 1"]),
        ({"tiers.object-timeout": float("inf")}, ["is inf", "a number > 0"]),
        ({"tiers.object-timeout": 10**400}, [str(10**400), "a number > 0 and <= 86400"]),
        ({"tiers.object-timeout": 1e20}, ["is 1e+20", "a number > 0 and <= 86400"]),
        ({"trace.path": ""}, ["is ''", "such as 'run.trace', or null for no recording"]),
        ({"observe.cost-per-hour": 10**400}, [str(10**400), "must be a number >= 0"]),
        ({"observe.cost-per-hour": {"a": 10**400}}, [str(10**400), "for 'a', must be a number >= 0"]),
        ({"tiers.object-store": "mybucket"}, ["is 'mybucket', must be one like 's3://bucket/prefix'"]),
        ({"preflight-imports": [""]}, ["gpurt.preflight-imports[0] is '', must be one like 'numpy', 'package.module'"]),
    ],
)
def test_bad_settings_say_value_allowed_and_nearest(overrides: Any, says: list[str]) -> None:
    with pytest.raises(ConfigError) as e:
        Settings.load(overrides)
    for text in says:
        assert text in str(e.value)


@pytest.mark.parametrize(
    "key", ["policy", "tiers.disk-limit", "tiers.object-store", "shuffle.listen-ports", "x" * 9000]
)
def test_a_value_of_any_length_leaves_a_message_that_can_be_read(key: str) -> None:
    with pytest.raises(ConfigError) as e:
        Settings.load({key: "y" * 10_000})
    said = str(e.value)
    assert len(said) < 2000
    assert said.startswith(("gpurt.", "unknown key gpurt."))
    assert "must be" in said or "Allowed here" in said
    assert str(pickle.loads(pickle.dumps(e.value))) == said


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for p in parents:
        tree = tree[p]
    tree[leaf] = value


@pytest.mark.parametrize("value", [None, True, False, -1, 0, 1, 2, 0.5, 16, 65, "stock", "1 GiB", "x", [], {}])
@pytest.mark.parametrize("key", list(leaves()))
def test_own_check_agrees_with_jsonschema(key: str, value: Any) -> None:
    """Ours gives the better message; a real validator says whether it decides alike."""
    import copy

    tree = copy.deepcopy(DEFAULTS)
    _set(tree["gpurt"], key, value)
    try:
        jsonschema.validate(tree, schema())
        fits = True
    except jsonschema.ValidationError:
        fits = False
    try:
        Settings.load({key: value})
        ours = True
    except ConfigError as e:
        # bytes in words are beyond the schema
        ours = "number of bytes" in str(e)
    assert ours == fits


@pytest.mark.parametrize(
    "overrides",
    [
        {"tiers.host-limit": 0.25},
        {"gpurt.tiers.host_limit": 0.25},
        {"tiers": {"host_limit": 0.25}},
        {"gpurt": {"tiers": {"host-limit": 0.25}}},
        {"gpurt.tiers": {"host-limit": 0.25}, "shuffle": {}},
    ],
)
def test_overrides_dotted_nested_or_with_the_namespace(overrides: dict[str, Any]) -> None:
    assert Settings.load(overrides) == Settings.load({"tiers.host-limit": 0.25})


def test_the_keys_of_a_mapping_that_is_a_value_are_kept() -> None:
    prices = {"node_1.example.com": 1.0, "*": 2.0}
    assert Settings.load({"observe": {"cost-per-hour": prices}}).observe.cost_per_hour == prices
    with dask.config.set({"gpurt": {"observe": {"cost_per_hour": prices}}}):
        assert Settings.load().observe.cost_per_hour == prices


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tiers.directory", ["/tmp/a", "/tmp/b, c"]),
        ("tiers.directory", "/tmp/a"),
        ("tiers.directory", "123"),
        ("tiers.directory", "none"),
        ("tiers.directory", "['"),
        ("tiers.directory", None),
        ("tiers.host-limit", 0.5),
        ("tiers.disk-limit", "1 GiB"),
        ("tiers.disk-limit", 10**12),
        ("tiers.direct-io", True),
        ("tiers.codec", "none"),
        ("observe.cost-per-hour", {"*": 1.0, "node'1": 2}),
        ("observe.cost-per-hour", 3),
        ("trace.path", "(1, 2)"),
        ("shuffle.listen-ports", "40000:40100"),
        ("shuffle.listen-ports", 40000),
        ("policy", "stock"),
    ],
)
def test_an_argument_of_a_preload_means_what_was_given(key: str, value: Any) -> None:
    got = read(key, write(key, value))
    assert got == value
    Settings.load({key: got})


@pytest.mark.parametrize(
    ("value", "ports"),
    [(None, (0, 0)), (40000, (40000, 40000)), ("40000", (40000, 40000)), ("1:65535", (1, 65535))],
)
def test_ports(value: Any, ports: tuple[int, int]) -> None:
    assert Settings.load({"shuffle.listen-ports": value}).shuffle.listen_ports == ports


@pytest.mark.parametrize("value", [0, -1, 65536, "", "a", "1:", ":1", "2:1", "1:65536", "1:2:3"])
def test_ports_that_are_not(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"listen-ports is .*, must be .*40000:40100"):
        Settings.load({"shuffle.listen-ports": value})


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--gpurt-tiers-host-limt", "1"], "--gpurt-tiers-host-limt 1: "),
        (["--gpurt-tiers-enabled", "perhaps"], "'perhaps' is not a valid boolean"),
        (["--gpurt-observe-cost-per-hour", "{'*': 'much'}"], "must be a number >= 0"),
        (["--gpurt-tiers-directory", "[1]"], "gpurt.tiers.directory[0] is 1"),
    ],
)
@pytest.mark.parametrize("on_worker", [False, True])
def test_dask_starts_no_server_with_arguments_that_are_wrong(argv: list[str], says: str, on_worker: bool) -> None:
    """Dask itself would log them and start without the extension."""
    preload: dict[str, Any] = {"preload": ["dask_gpurt.preload"], "preload_argv": [argv]}

    async def start() -> None:
        async with (
            Scheduler(port=0, dashboard_address=":0", **({} if on_worker else preload)) as scheduler,
            Worker(scheduler.address, **preload),
        ):
            pass

    with pytest.raises(InstallError) as e:
        asyncio.run(start())
    assert says in str(e.value)


def test_underscore_and_yaml_layout() -> None:
    with dask.config.set({"gpurt.tiers.host_limit": 0.25}):
        assert Settings.load().tiers.host_limit == 0.25
    with dask.config.set({"gpurt.tiers.disk-limit": "2 GB"}):
        assert Settings.load().tiers.disk_limit == 2_000_000_000


def test_environment() -> None:
    code = "from dask_gpurt.config import Settings; print(Settings.load().tiers.host_limit)"
    env = {**os.environ, "DASK_GPURT__TIERS__HOST_LIMIT": "0.125"}
    out = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    assert out.strip() == "0.125"


def test_a_reset_configuration_means_defaults() -> None:
    with dask.config.set({"gpurt": {"policy": "stock"}}):
        assert Settings.load().policy == "stock"
        assert Settings.load().tiers.host_limit == 0.6


def test_settings_travel() -> None:
    settings = Settings.load({"policy": "stock"})
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_a_value_where_settings_belong_is_refused() -> None:
    """Dask replaces it by the defaults: ``DASK_GPURT=1`` looked like a switch, and did nothing."""
    program = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    from dask_gpurt.config import Settings\n"
        "assert 'DASK_GPURT is a switch' in str(seen[0].message), seen\n"
        "import dask\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        Settings.load()\n"
        "    except ValueError as e:\n"
        "        assert 'gpurt: is 1' in str(e) and 'dask gpurt enable' in str(e), e\n"
        "    else:\n"
        "        raise SystemExit('accepted')\n"
        "    dask.config.refresh()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "DASK_GPURT": "1"})


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("DASK_GPURT__TIERS", "False", "gpurt.tiers is False"),
        ("DASK_GPURT_POLICY", "stock", "write DASK_GPURT__ with two underscores"),
    ],
)
def test_variables_that_set_nothing_are_refused(variable: str, value: str, says: str) -> None:
    program = (
        "import dask, sys\n"
        "from dask_gpurt.config import Settings\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        Settings.load()\n"
        "    except ValueError as e:\n"
        "        assert sys.argv[1] in str(e), e\n"
        "    else:\n"
        "        raise SystemExit('accepted')\n"
        "    dask.config.refresh()\n"
    )
    subprocess.run([sys.executable, "-c", program, says], check=True, env={**os.environ, variable: value})


def test_a_folder_of_the_user_is_found_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that takes the scheduler's settings may have another home."""
    monkeypatch.setenv("HOME", "/home/scheduler")
    sent = pickle.dumps(Settings.load({"tiers.directory": "~/spill"}))
    monkeypatch.setenv("HOME", "/home/worker")
    assert pickle.loads(sent).tiers.folders == ("/home/worker/spill",)


def test_a_section_with_nothing_in_it_is_the_defaults() -> None:
    defaults = Settings.load()
    with dask.config.set({"gpurt": None}):
        assert Settings.load() == defaults
