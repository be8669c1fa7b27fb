from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def quiet():
    """Upstream warns at every shuffle."""
    logger = logging.getLogger("distributed.shuffle")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
