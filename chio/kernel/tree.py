"""The process tree in memory: a mirror of the rows that admission looks at on every call.

The kernel is the only writer, so the mirror is exact as long as it is read again after a rollback (`reload`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from chio.errors import StateError
from chio.kernel.grants import Capability
from chio.kernel.store import Store


@dataclass(slots=True, eq=False)
class Node:
    """One process. `path` runs from itself up to root."""

    id: str
    parent: Node | None
    depth: int
    ceiling: int
    running: bool
    capability: Capability
    calls: int
    path: tuple[Node, ...] = ()
    children: list[Node] = field(default_factory=list)

    def subtree(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.subtree()

    @property
    def chain(self) -> list[Capability]:
        return [node.capability for node in self.path]

    def budget(self) -> list[tuple[int, int]]:
        return [(node.calls, node.ceiling) for node in self.path]

    def debit_path(self, grant: int) -> list[tuple[Node, int, int]]:
        """(node, grant position, max_invocations) of every grant from this one up to root that counts invocations."""
        found: list[tuple[Node, int, int]] = []
        position: int | None = grant
        for node in self.path:
            if position is None:
                break
            entry = node.capability.body.grants[position]
            if entry.max_invocations is not None:
                found.append((node, position, entry.max_invocations))
            position = entry.parent_grant
        return found


class Tree:
    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self.nodes: dict[str, Node] = {}
        for name, parent, depth, ceiling, state, capability_id, text, calls in store.processes():
            above = self.nodes[parent] if parent is not None else None
            capability = Capability.read(capability_id, text.encode())
            node = Node(name, above, depth, ceiling, state == "running", capability, calls)
            node.path = (node, *(above.path if above else ()))
            if above:
                above.children.append(node)
            self.nodes[name] = node
        if not self.nodes:
            raise StateError("the state has no processes", file=path, fix="restore it from a backup")
        self.revoked = store.revoked()

    def reload(self) -> None:
        """Read again what a rolled-back commit had changed here."""
        for name, calls in self._store.usage():
            self.nodes[name].calls = calls
        for name, _, _, _, state, *_ in self._store.processes():
            self.nodes[name].running = state == "running"
        self.revoked = self._store.revoked()

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]
