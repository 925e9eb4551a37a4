"""Constraints of grants: JSON Schemas (draft 2020-12) that the arguments must satisfy, every one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jsonschema_rs

from chio.errors import InputError
from chio.schema import Policy

if TYPE_CHECKING:
    from chio.kernel.grants import Capability


class Constraints:
    """Compiled schemas, by capability and grant. A capability never changes, so neither does an entry."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, int], list[jsonschema_rs.Validator]] = {}

    def hold(self, capability: Capability, position: int, arguments: dict[str, Any]) -> bool:
        schemas = capability.body.grants[position].constraints
        if not schemas:
            return True
        validators = self._compiled.get((capability.id, position))
        if validators is None:
            validators = [compiled(schema) for schema in schemas]
            self._compiled[capability.id, position] = validators
        return all(validator.is_valid(arguments) for validator in validators)


def compiled(schema: dict[str, Any]) -> jsonschema_rs.Validator:
    """A validator that looks nothing up outside the schema. Raises `ValueError` with the reason."""
    _refuse_remote(schema)
    try:
        return jsonschema_rs.Draft202012Validator(schema)
    except jsonschema_rs.ValidationError as error:
        raise ValueError(error.message) from error


def require_schemas(policy: Policy, file: str) -> None:
    """Raises `InputError` for a constraint of the policy that cannot be used."""
    for position, tool in enumerate(policy.capabilities.default.tools):
        if tool.constraints is None:
            continue
        try:
            compiled(tool.constraints)
        except ValueError as error:
            raise InputError(
                "a constraint is no JSON Schema that can be used",
                file=file,
                field=f"capabilities.default.tools[{position}].constraints",
                why=str(error).split("\n", maxsplit=1)[0],
                fix="write a self-contained schema of draft 2020-12",
            ) from error


def _refuse_remote(value: Any) -> None:
    if isinstance(value, dict):
        for name, member in value.items():
            if name in ("$ref", "$dynamicRef", "$schema", "$id") and isinstance(member, str):
                own = member.startswith("#") or (name == "$schema" and member == _DRAFT)
                if not own:
                    raise ValueError(f"{name} leads outside the schema: {member}")
            _refuse_remote(member)
    elif isinstance(value, list):
        for member in value:
            _refuse_remote(member)


_DRAFT = "https://json-schema.org/draft/2020-12/schema"
