"""What CUDA_VISIBLE_DEVICES leaves of the devices."""

from __future__ import annotations

import pytest

from dask_gpurt.backends import cuda


@pytest.mark.parametrize(
    ("setting", "given"),
    [
        (None, None),
        ("", []),
        ("-1", []),
        ("-1,0", []),
        ("NoDevFiles", []),
        (" 1 , 0,", ["1", "0"]),
        ("GPU-1,-1,0", ["GPU-1"]),
        (",0", []),
    ],
)
def test_devices_up_to_a_word_that_hides_the_rest(setting: str | None, given: list[str] | None) -> None:
    assert cuda.given({} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}) == given
