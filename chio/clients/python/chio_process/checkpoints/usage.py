"""What a record of progress has used so far. Restoring it never makes it less."""

from dataclasses import dataclass, fields
from typing import Self

from chio_process.checkpoints.document import MAX_INTEGER, JsonObject, checked_fields, checked_integer, invalid


@dataclass(frozen=True, slots=True)
class Usage:
    """Counters from 0 to 2^53-1. `cost_micro_units`: millionths of the currency that the application reckons in."""

    model_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_micro_units: int = 0

    def __post_init__(self) -> None:
        for name, count in self.to_document().items():
            checked_integer(count, name)

    def __add__(self, more: "Usage") -> "Usage":
        sums = {name: count + getattr(more, name) for name, count in self.to_document().items()}
        if max(sums.values()) > MAX_INTEGER:
            invalid("a usage counter would pass 2^53-1")
        return Usage(**sums)

    def merged(self, other: "Usage") -> "Usage":
        """The larger of each counter: two accounts of the same work, of which neither may be forgotten."""
        return Usage(**{name: max(count, getattr(other, name)) for name, count in self.to_document().items()})

    def covers(self, earlier: "Usage") -> bool:
        """Whether no counter is less than it was in `earlier`."""
        return self.merged(earlier) == self

    def to_document(self) -> JsonObject:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_document(cls, document: object) -> Self:
        return cls(**checked_fields(document, tuple(field.name for field in fields(cls)), "usage"))


NONE_USED = Usage()
