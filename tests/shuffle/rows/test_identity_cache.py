"""Schemas remembered by object."""

from __future__ import annotations

import pyarrow as pa

from dask_gpurt.shuffle.rows import schema as schemas


def test_one_object_is_asked_once_and_an_equal_one_again():
    asked = []
    names = schemas.ByObject(lambda schema: asked.append(schema) or schema.names)
    first, equal = pa.schema([("a", pa.int8())]), pa.schema([("a", pa.int8())])
    assert names(first) == names(first) == names(equal) == ["a"]
    assert len(asked) == 2


def test_an_id_is_not_used_for_another_schema(monkeypatch):
    monkeypatch.setattr(schemas, "REMEMBERED", 4)
    names = schemas.ByObject(lambda schema: schema.names)
    # Each is forgotten by its maker at once, so that its address would be free for the next.
    assert [names(pa.schema([(str(i), pa.int8())])) for i in range(100)] == [[str(i)] for i in range(100)]
    assert len(names._found) <= 4
