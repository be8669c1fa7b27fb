"""Remember what follows from a schema by the schema object: to hash a schema takes 1 us a column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

T = TypeVar("T")
#: schemas remembered; then all are forgotten
LIMIT = 256


class ByObject(Generic[T]):
    """`make`, called once for each schema object that is in use. Any thread."""

    def __init__(self, make: Callable[[pa.Schema], T]) -> None:
        self._make = make
        self._found: dict[int, tuple[pa.Schema, T]] = {}

    def __call__(self, schema: pa.Schema) -> T:
        found = self._found.get(id(schema))
        if found is None:
            if len(self._found) >= LIMIT:
                self._found.clear()
            # Together, so that the object lives as long as its id is used.
            found = self._found[id(schema)] = (schema, self._make(schema))
        return found[1]
