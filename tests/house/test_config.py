from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import dask
import pytest

from dask_gpurt.config import DEFAULTS, Settings, leaves, schema
from dask_gpurt.errors import ConfigError
from dask_gpurt.preload import dask_setup

jsonschema = pytest.importorskip("jsonschema")


def test_defaults_fit_the_schema() -> None:
    jsonschema.validate(DEFAULTS, schema())
    settings = Settings.load()
    assert settings.policy == "gpurt"
    assert settings.tiers.disk_reserve == 2**30


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
        ({"tiers.enabled": 1}, ["true or false"]),
        ({"placement.candidates": True}, ["a integer"]),
        ({"placement.candidates": 1000}, [">= 2 and <= 64"]),
        ({"tiers": "on"}, ["'on'", "mapping"]),
    ],
)
def test_bad_settings_say_value_allowed_and_nearest(overrides: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ConfigError) as e:
        Settings.load(overrides)
    for text in says:
        assert text in str(e.value)


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


def test_underscore_and_yaml_layout() -> None:
    with dask.config.set({"gpurt.tiers.host_limit": 0.25}):
        assert Settings.load().tiers.host_limit == 0.25
    with dask.config.set({"gpurt.tiers.disk-limit": "2 GB"}):
        assert Settings.load().tiers.disk_limit == 2_000_000_000


def test_environment() -> None:
    code = "from dask_gpurt.config import Settings; print(Settings.load().tiers.host_limit)"
    import os

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
