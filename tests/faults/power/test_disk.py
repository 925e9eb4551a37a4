"""The disk that loses its power: what it may lose, and what it may not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.faults.power.disk import SECTOR_BYTES, Disk
from tests.faults.power.events import Create, Event, MakeDirectory, Remove, Rename, Sync, Told, Truncate, Write
from tests.faults.power.states import states

ROOT = Path("/r")
Content = dict[str, bytes | None]


def left(*happened: Event, before: Iterable[tuple[str, bytes | None]] = ()) -> list[Content]:
    """Every distinct content that a power cut may leave, at whatever moment."""
    disk = Disk(ROOT)
    disk.start_from(before)
    return [dict(state.files()) for state in states(disk, list(enumerate(happened)), 1, lambda _: True)]


def at_the_end(*happened: Event, before: Iterable[tuple[str, bytes | None]] = ()) -> list[Content]:
    disk = Disk(ROOT)
    disk.start_from(before)
    found = states(disk, list(enumerate(happened)), 1, lambda _: True)
    return [dict(state.files()) for state in found if state.boundary == len(happened) - 1]


def test_a_write_that_is_not_synced_may_be_lost_and_may_be_there() -> None:
    found = left(Write("/r/f", 0, b"new"), before=[("f", b"old")])
    assert {content["f"] for content in found} == {b"old", b"new"}


def test_a_write_that_is_synced_is_there() -> None:
    found = at_the_end(Write("/r/f", 0, b"new"), Sync("/r/f"), before=[("f", b"old")])
    assert found == [{"f": b"new"}]


def test_a_sync_of_one_file_does_nothing_for_another() -> None:
    found = at_the_end(Write("/r/f", 0, b"new"), Sync("/r/g"), before=[("f", b"old"), ("g", b"")])
    assert {content["f"] for content in found} == {b"old", b"new"}


def test_a_large_write_is_torn_between_sectors_and_never_inside_one() -> None:
    old, new = b"o" * 3 * SECTOR_BYTES, b"n" * 3 * SECTOR_BYTES
    found = {content["f"] for content in left(Write("/r/f", 0, new), before=[("f", old)])}
    assert old[:SECTOR_BYTES] + new[SECTOR_BYTES:] in found
    assert new[: 2 * SECTOR_BYTES] + old[2 * SECTOR_BYTES :] in found
    assert all(len(set(text[at : at + SECTOR_BYTES])) == 1 for text in found if text for at in (0, 512, 1024))


def test_a_size_may_come_without_its_bytes() -> None:
    found = {content["f"] for content in left(Write("/r/f", 0, b"new"), before=[("f", b"")])}
    assert found == {b"", b"\0\0\0", b"new"}


def test_writes_between_two_syncs_come_in_any_order() -> None:
    found = at_the_end(Write("/r/f", 0, b"1"), Write("/r/g", 0, b"2"), Told(), before=[("f", b""), ("g", b"")])
    contents = {(content["f"], content["g"]) for content in found}
    assert {(b"", b""), (b"1", b""), (b"", b"2"), (b"1", b"2")} <= contents


def test_a_new_file_whose_directory_is_not_synced_may_have_no_name_however_well_it_is_synced() -> None:
    happened = (Create("/r/f", False), Write("/r/f", 0, b"x"), Sync("/r/f"))
    assert {content.get("f") for content in at_the_end(*happened)} == {None, b"x"}
    assert at_the_end(*happened, Sync("/r")) == [{"f": b"x"}]


def test_what_lies_in_a_directory_without_a_name_is_gone_with_it() -> None:
    happened = (MakeDirectory("/r/d"), Create("/r/d/f", False), Sync("/r/d/f"), Sync("/r/d"))
    assert {} in at_the_end(*happened)
    assert at_the_end(*happened, Sync("/r")) == [{"d": None, "d/f": b""}]


def test_a_rename_is_old_or_new_and_never_neither() -> None:
    before = [("new", b"1"), ("staged", b"2")]
    found = at_the_end(Rename("/r/staged", "/r/new"), before=before)
    assert sorted(map(sorted, found)) == [["new"], ["new", "staged"]]
    assert {content["new"] for content in found} == {b"1", b"2"}


def test_a_removal_that_is_not_synced_may_not_have_happened() -> None:
    found = at_the_end(Remove("/r/f"), before=[("f", b"x")])
    assert [content for content in found if content] == [{"f": b"x"}]
    assert {} in found


def test_a_truncation_is_pending_like_a_write() -> None:
    assert {content["f"] for content in left(Truncate("/r/f", 1), before=[("f", b"abc")])} == {b"a", b"abc"}


def test_calls_that_must_have_failed_change_nothing() -> None:
    happened = (Remove("/r/none"), Rename("/r/none", "/r/f"), MakeDirectory("/r/f"), Write("/r/no/f", 0, b"x"))
    assert left(*happened, before=[("f", b"x")]) == [{"f": b"x"}]


def test_a_state_is_judged_by_the_latest_cut_that_leaves_it() -> None:
    disk = Disk(ROOT)
    disk.start_from([("f", b"old")])
    found = states(disk, list(enumerate([Write("/r/f", 0, b"new"), Told(), Told()])), 1, lambda _: True)
    assert {state.boundary for state in found if state.bare} == {2}


def test_a_state_that_is_left_without_luck_stays_marked_when_luck_leaves_it_too() -> None:
    """Without its name a file is gone, however many of its bytes survive."""
    disk = Disk(ROOT)
    happened: list[Event] = [Create("/r/f", False), Write("/r/f", 0, b"x"), Told()]
    found = states(disk, list(enumerate(happened)), 1, lambda _: True)
    assert [state.bare for state in found if not state.files()] == [True]
