"""What follows from an Arrow schema, found once for all shards that have it.

`schema_of` and `known_schema` give a `KnownSchema`, which is compared by identity: a dict of them costs no look at the
columns. It says of every column how its values are viewed without a copy, and which are pickled. `has_dictionary` finds
the types that no schema describes in full.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import pyarrow as pa


class Special(enum.Enum):
    """Columns whose values have a simple view that is not a numpy array of them."""

    TEXT = "text"
    BITS = "bits"


#: key of the metadata of a schema: JSON list of the names of the fields whose values are pickled
PICKLED = b"gpurt.pickled"
#: schemas remembered by object; then all are forgotten
REMEMBERED = 256
T = TypeVar("T")
#: how a column is viewed: as values of a dtype, in one of the special ways, or (None) not at all
View = np.dtype[Any] | Special | None


class ByObject(Generic[T]):
    """`make`, called once for each schema object that is in use. Any thread.

    By the object, as to hash a schema takes 1 us a column.
    """

    def __init__(self, make: Callable[[pa.Schema], T]) -> None:
        self._make = make
        self._found: dict[int, tuple[pa.Schema, T]] = {}

    def __call__(self, schema: pa.Schema) -> T:
        found = self._found.get(id(schema))
        if found is None:
            if len(self._found) >= REMEMBERED:
                self._found.clear()
            # Together, so that the object lives as long as its id is used.
            found = self._found[id(schema)] = (schema, self._make(schema))
        return found[1]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KnownSchema:
    """A schema that compares by identity.

    Equal schemas with equal pandas metadata are one object while it is in use.
    """

    schema: pa.Schema
    #: how each field is viewed
    kinds: tuple[View, ...]
    #: names of fields whose values are pickled, see `pickled_columns`
    pickled: frozenset[str]
    #: field -> pandas' dtype of it, as noted in the metadata
    dtypes: Mapping[str, str]


def schema_of(schema: pa.Schema) -> KnownSchema:
    """The one `KnownSchema` of all schemas that equal this one, metadata included."""
    # By fields: a schema with metadata has a hash only from pyarrow 22 on.
    return _known(tuple(schema), tuple((schema.metadata or {}).items()))


def pickled_in(metadata: Iterable[tuple[bytes, bytes]]) -> frozenset[str]:
    """Names of the pickled fields, by the metadata of a schema."""
    return frozenset(name for key, value in metadata if key == PICKLED for name in json.loads(value))


@functools.lru_cache(maxsize=256)
def _known(fields: tuple[pa.Field, ...], metadata: tuple[tuple[bytes, bytes], ...]) -> KnownSchema:
    import pyarrow as pa

    schema = pa.schema(fields, metadata=dict(metadata) or None)
    notes = (schema.pandas_metadata or {}).get("columns", ())
    dtypes = {note["field_name"]: note["numpy_type"] for note in notes}
    return KnownSchema(schema, tuple(_view(field.type) for field in schema), pickled_in(metadata), dtypes)


#: as `schema_of`, faster for a schema object that comes many times
known_schema = ByObject(schema_of)


def _view(kind: pa.DataType) -> View:
    import pyarrow as pa

    t = pa.types
    if t.is_large_string(kind):
        return Special.TEXT
    if t.is_boolean(kind):
        return Special.BITS
    if t.is_integer(kind) or t.is_floating(kind) or t.is_duration(kind) or (t.is_timestamp(kind) and not kind.tz):
        return np.dtype(kind.to_pandas_dtype())
    return None


def has_dictionary(kind: pa.DataType) -> bool:
    """Whether values of a type are stored, at any depth, as indices into a dictionary."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return pa.types.is_dictionary(kind) or any(has_dictionary(kind.field(i).type) for i in range(kind.num_fields))
