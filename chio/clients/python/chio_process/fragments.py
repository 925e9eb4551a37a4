"""How a JSON document becomes fragments: canonical text (RFC 8785) and the places where it is cut.

Pure: no client, no I/O. The Node client's `fragments.js` does the same, byte for byte; `fixtures/vectors/snapshots`
holds both to it.

The text of a document is cut so that an edit moves only the cuts near it, and so that a part that appears twice is
cut the same way twice:

1. A container or string whose own text is larger than `least` is a *region*. A cut is made where a region begins and
   where it ends, so its fragments do not depend on what stands around it.
2. Inside a region of many small values, a cut may be made after any of them; inside a long string, before any
   character. Among those places the text itself chooses: a hash of the bytes just before (content-defined chunking),
   likely enough that a fragment is `least + spread` bytes long on average.
3. A fragment is at least `least` bytes long (but for the last) and less than `most + least`. What lies between two
   regions and is too short for one is *glue*: up to `glue` bytes of it are a part of their own, kept as text where the
   parts are listed; more than that joins the fragment that follows.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from hashlib import sha256
from zlib import crc32

MAX_DEPTH = 64  # levels of containers, an empty one included
MAX_SAFE_INTEGER = 2**53 - 1

_WINDOW = 256  # bytes before a cut between values that decide on it: long enough to tell runs of true and false apart
# A gear hash: each byte shifts the ones before it, so that after 32 bytes a byte has no more say.
_GEAR_WINDOW = 32
_GEAR = tuple(int.from_bytes(sha256(bytes([byte])).digest()[:4], "big") for byte in range(256))

_quoted = json.JSONEncoder(ensure_ascii=False).encode  # escapes exactly what RFC 8785 section 3.2.2.2 escapes


class NotJson(ValueError):
    """A value outside the canonical profile. `pointer()` says where it is (RFC 6901)."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.above: list[str | int] = []  # innermost first

    def pointer(self) -> str:
        steps = (str(step).replace("~", "~0").replace("/", "~1") for step in reversed(self.above))
        return "".join(f"/{step}" for step in steps)


class TooLarge(ValueError):
    """The canonical text is longer than it may be."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of text. `most - least` must exceed `2 * least`, so that a place to cut is always found in time."""

    least: int
    spread: int
    most: int
    glue: int


@dataclass(slots=True)
class Region:
    """A container or string larger than `Sizes.least`: `text[start:end]`.

    `ends` are the offsets behind each small value directly inside, `inner` the regions directly inside, both in order.
    """

    start: int
    end: int = 0
    is_string: bool = False
    ends: array[int] = field(default_factory=lambda: array("I"))
    inner: list[Region] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Part:
    """`text[start:end]`: a fragment, or glue."""

    start: int
    end: int
    glue: bool


@dataclass(frozen=True, slots=True)
class Text:
    """A document's canonical text, and its regions in one tree below a root that is the whole text."""

    data: bytearray
    root: Region


def encode(document: object, least: int, max_bytes: int) -> Text:
    """`document` as canonical text with its regions. Raises `NotJson`, and `TooLarge` as soon as it is known."""
    writer = _Writer(least, max_bytes)
    root = Region(0)
    writer.value(document, root, 0)
    root.end = len(writer.out)
    if root.end > max_bytes:
        raise TooLarge
    return Text(writer.out, root.inner[0] if root.end > least else root)


class _Writer:
    def __init__(self, least: int, max_bytes: int) -> None:
        self.out = bytearray()
        self._least = least
        self._max = max_bytes

    def value(self, value: object, around: Region, depth: int) -> None:
        """Writes `value`, and notes in `around` the region that it is or the offset behind it.

        Types are compared and not asked for with isinstance: what is read back must equal what was written.
        """
        out = self.out
        if type(value) is str:
            self._string(value, around)
            return
        if type(value) is int:
            if not -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
                raise NotJson("an integer beyond 2^53-1")
            out += b"%d" % value
        elif type(value) is dict or type(value) is list:
            if depth == MAX_DEPTH:
                raise NotJson(f"nested deeper than {MAX_DEPTH}")
            region = Region(len(out))
            if type(value) is dict:
                self._object(value, region, depth + 1)
            else:
                self._array(value, region, depth + 1)
            region.end = len(out)
            if region.end - region.start > self._least:
                around.inner.append(region)
                return
        elif value is None:
            out += b"null"
        elif type(value) is bool:
            out += b"true" if value else b"false"
        elif type(value) is float:
            out += number(value).encode()
        else:
            raise NotJson(f"a {type(value).__name__} is not JSON")
        if len(out) > self._max:
            raise TooLarge
        around.ends.append(len(out))

    def _array(self, items: list[object], region: Region, depth: int) -> None:
        out = self.out
        out += b"["
        for index, item in enumerate(items):
            if index:
                out += b","
            try:
                self.value(item, region, depth)
            except NotJson as error:
                error.above.append(index)
                raise
        out += b"]"

    def _object(self, members: dict[object, object], region: Region, depth: int) -> None:
        out = self.out
        out += b"{"
        for index, name in enumerate(self._sorted(members)):
            if index:
                out += b","
            try:
                self._string(name, region, ends=False)
                out += b":"
                self.value(members[name], region, depth)
            except NotJson as error:
                error.above.append(name)
                raise
        out += b"}"

    def _sorted(self, members: dict[object, object]) -> list[str]:
        """Names by UTF-16 code units (RFC 8785 section 3.2.3)."""
        if len(members) > self._max:
            raise TooLarge
        names: list[str] = []
        plain = True
        for name in members:
            if type(name) is not str:
                raise NotJson(f"a name of type {type(name).__name__}; names are strings")
            plain = plain and name.isascii()
            names.append(name)
        # surrogatepass: a lone surrogate is refused where the name is written, with its place.
        names.sort(key=None if plain else lambda name: name.encode("utf-16-be", "surrogatepass"))
        return names

    def _string(self, text: str, around: Region, *, ends: bool = True) -> None:
        out = self.out
        start = len(out)
        if start + len(text) > self._max:
            raise TooLarge
        try:
            out += _quoted(text).encode()
        except UnicodeEncodeError:
            raise NotJson("a lone surrogate in a string") from None
        if len(out) > self._max:
            raise TooLarge
        if len(out) - start > self._least:
            around.inner.append(Region(start, len(out), is_string=True))
        elif ends:
            around.ends.append(len(out))


def number(value: float) -> str:
    """`value` as ECMAScript writes it (RFC 8785 section 3.2.2.3). Raises `NotJson`.

    Python's shortest digits are the same ones; only the notation of small numbers differs. What is left after the
    refusals is below 2^53, where neither writes an exponent for a large number.
    """
    if not math.isfinite(value):
        raise NotJson("a number that is not finite")
    if value.is_integer():
        if abs(value) > MAX_SAFE_INTEGER:
            raise NotJson("a number beyond 2^53-1")
        return str(int(value))
    written = repr(value)
    mantissa, exponent, power = written.partition("e-")
    if not exponent:
        return written
    shift = int(power)
    if shift > 6:  # ECMA-262 Number::toString: a plain decimal down to 1e-6
        return f"{mantissa}e-{shift}"
    sign, digits = ("-", mantissa[1:]) if mantissa.startswith("-") else ("", mantissa)
    return f"{sign}0.{'0' * (shift - 1)}{digits.replace('.', '')}"


def split(text: Text, sizes: Sizes) -> list[Part]:
    """The parts of the text in order; together they are all of it."""
    splitter = _Splitter(text.data, sizes)
    splitter.region(text.root)
    splitter.finish(text.root.end)
    return splitter.parts


class _Splitter:
    def __init__(self, data: bytearray, sizes: Sizes) -> None:
        self.parts: list[Part] = []
        self._data = data
        self._sizes = sizes
        self._at = 0  # where the part begins that is not cut yet

    def region(self, region: Region) -> None:
        self._boundary(region.start)
        start = region.start
        for inner in region.inner:
            self._run(region, start, inner.start)
            self.region(inner)
            start = inner.end
        self._run(region, start, region.end)
        self._boundary(region.end)

    def finish(self, end: int) -> None:
        self._boundary(end)
        if self._at < end:
            self._cut(end)

    def _run(self, region: Region, start: int, end: int) -> None:
        """Cuts inside `text[start:end]`, which lies directly in `region`. None leaves less than `least` behind it."""
        sizes = self._sizes
        last = min(end, region.end - sizes.least)
        while True:
            first = max(start + 1, self._at + sizes.least)
            full = self._at + sizes.most
            if first > last:
                return
            choose = self._choose_in_string if region.is_string else self._choose_between_values
            chosen = choose(region, start, first, min(last, full), forced=full <= last)
            if chosen is None:
                return
            self._cut(chosen)

    def _choose_between_values(self, region: Region, start: int, first: int, last: int, *, forced: bool) -> int | None:
        """The first offset from `first` to `last` that the text chooses; without one, and `forced`, the last."""
        ends = region.ends
        low, high = bisect_left(ends, first), bisect_right(ends, last)
        previous = max(start, ends[low - 1]) if low else start
        for index in range(low, high):
            end = ends[index]
            window = self._data[max(start, end - _WINDOW) : end]
            # A long value is followed by a cut more likely than a short one: so much for each of its bytes.
            if crc32(window) * self._sizes.spread < (end - previous) << 32:
                return end
            previous = end
        return ends[high - 1] if forced and low < high else None

    def _choose_in_string(self, region: Region, start: int, first: int, last: int, *, forced: bool) -> int | None:
        data = self._data
        limit = (1 << 32) // self._sizes.spread
        mixed = 0
        offset = max(region.start, first - _GEAR_WINDOW)
        for byte in memoryview(data)[offset:last]:
            offset += 1
            mixed = (mixed << 1) + _GEAR[byte] & 0xFFFFFFFF
            if mixed < limit and offset >= first and data[offset] & 0xC0 != 0x80:
                return offset
        if not forced:
            return None
        while data[last] & 0xC0 == 0x80:  # inside a character
            last -= 1
        return last

    def _boundary(self, at: int) -> None:
        length = at - self._at
        if length >= self._sizes.least:
            self._cut(at)
        elif length:
            glued = self.parts[-1] if self.parts and self.parts[-1].glue else None
            start = self._at if glued is None else glued.start
            if at - start <= self._sizes.glue:
                if glued is not None:
                    self.parts.pop()
                self.parts.append(Part(start, at, True))
                self._at = at

    def _cut(self, at: int) -> None:
        self.parts.append(Part(self._at, at, False))
        self._at = at
