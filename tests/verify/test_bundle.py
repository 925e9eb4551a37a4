"""A bundle that is cut, spelt in another way or not signed is refused with the file, the place and the check."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.verify.bundled import GOOD, Run, decode, encode, entry, envelope, good, head, written
from tests.verify.observed import KERNEL
from verify.audit import audit
from verify.bundle import SECTIONS, Bundle
from verify.cli import main
from verify.conclusions import SCOPES
from verify.foundation import Trust
from verify.keys import Pins
from verify.verdict import Exit, VerifyError

PINS = GOOD.with_name("orders-pins.json")


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    _, pins = written(good(), tmp_path)
    return Trust.of_pins(Pins.from_file(pins))


def refusal(data: bytes, trust: Trust, folder: Path) -> VerifyError:
    """What a file of these bytes is refused with."""
    file = folder / "refused.chio"
    file.write_bytes(data)
    with pytest.raises(VerifyError) as refused:
        audit(str(file), trust)
    assert refused.value.file == str(file)
    assert refused.value.place or refused.value.check in ("signer_pin", "input")
    return refused.value


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_a_real_run_is_verified_under_its_own_pins() -> None:
    verdict = audit(str(GOOD), Trust.of_pins(Pins.from_file(str(PINS))))
    assert verdict.exit is Exit.VERIFIED
    assert verdict.figures["withheld"] == ["arguments:rogue/do"]


def test_no_byte_can_be_changed(trust: Trust, tmp_path: Path) -> None:
    data = good().assemble()
    random_bytes = random.Random(1)
    for at in [*range(0, 64), *(random_bytes.randrange(len(data)) for _ in range(150))]:
        changed = bytearray(data)
        changed[at] ^= 1 << random_bytes.randrange(8)
        refusal(bytes(changed), trust, tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 2, 100, 1000, 20_000, -1])
def test_a_bundle_that_was_cut_is_refused(keep: int, trust: Trust, tmp_path: Path) -> None:
    assert refusal(good().assemble()[:keep], trust, tmp_path).check in ("encoding", "sections")


def test_two_bundles_one_after_the_other_are_no_bundle(trust: Trust, tmp_path: Path) -> None:
    data = good().assemble()
    assert refusal(data + data, trust, tmp_path).check == "sections"


def test_something_else_than_a_bundle_is_refused(trust: Trust, tmp_path: Path) -> None:
    for data in (b"{}", b"\x00" * 100, b"\x9f" * 100, b"[" * 10_000, b"\xd2\x84", os.urandom(1000)):
        assert refusal(data, trust, tmp_path).check == "encoding"


def test_a_folder_a_pipe_and_nothing_are_refused(trust: Trust, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    for name in (tmp_path, tmp_path / "pipe", tmp_path / "absent"):
        with pytest.raises(VerifyError) as refused:
            audit(str(name), trust)
        assert (refused.value.check, refused.value.file) == ("input", str(name))
    os.close(writer)


# --- one encoding ----------------------------------------------------------------------------------------------------


def resigned(change: Callable[[dict[str, Any]], None], sections: dict[str, list[bytes]] | None = None) -> bytes:
    """The good bundle with another manifest, signed by the right key, over the same or other sections."""
    data = good().assemble()
    (_, _, payload, _), end = decode(data)
    manifest, _ = decode(payload)
    content = data[end:]
    if sections is not None:
        manifest["sections"] = [entry(name, items) for name, items in sections.items()]
        content = b"".join(b"".join(items) for items in sections.values())
    change(manifest)
    return envelope(encode(manifest), KERNEL) + content


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda manifest: manifest.update(schema="chio.bundle.v2"), "fields"),
        (lambda manifest: manifest.update(more=1), "fields"),
        (lambda manifest: manifest.pop("withheld"), "fields"),
        (lambda manifest: manifest.update(kernel_key=b"short"), "fields"),
        (lambda manifest: manifest["sections"].reverse(), "sections"),
        (lambda manifest: manifest["sections"].pop(), "sections"),
        (lambda manifest: manifest["sections"][2].update(items=1), "sections"),
        (lambda manifest: manifest["sections"][2].update(items=1000), "encoding"),
        (lambda manifest: manifest["sections"][2].update(bytes=2**62), "sections"),
        (lambda manifest: manifest["sections"][2].update(sha256=bytes(32)), "sections"),
    ],
)
def test_a_manifest_that_does_not_account_for_the_file_is_refused(
    change: Callable[[dict[str, Any]], None], check: str, trust: Trust, tmp_path: Path
) -> None:
    assert refusal(resigned(change), trust, tmp_path).check == check


def long_form(item: bytes) -> bytes:
    """The same byte string, its length in eight bytes."""
    text, _ = decode(item)
    return bytes([0x5B]) + len(text).to_bytes(8, "big") + text


@pytest.mark.parametrize(
    ("section", "spell"),
    [
        ("leaves", long_form),
        ("leaves", lambda item: b"\x5f" + item + b"\xff"),
        ("leaves", lambda item: encode(decode(item)[0].decode())),
        ("capabilities", long_form),
        ("arguments", lambda item: b"\x9f" + item[1:] + b"\xff"),
        ("arguments", lambda item: encode([*decode(item)[0], b""])),
        ("arguments", lambda item: encode(decode(item)[0][:2])),
        ("outputs", lambda item: encode([1, b"short", b""])),
        ("documents", lambda item: encode(["invented", b""])),
    ],
)
def test_a_section_in_another_spelling_is_refused_though_it_is_signed(
    section: str, spell: Callable[[bytes], bytes], trust: Trust, tmp_path: Path
) -> None:
    sections = good().sections()
    sections[section] = [spell(sections[section][0]), *sections[section][1:]]
    found = refusal(resigned(lambda manifest: None, sections), trust, tmp_path)
    assert found.check in ("encoding", "documents", "bootstrap", "capabilities")


def test_an_item_longer_than_any_can_be_is_refused_before_it_is_read(trust: Trust, tmp_path: Path) -> None:
    sections = good().sections()
    sections["leaves"][5] = head(2, 1 << 40)
    assert refusal(resigned(lambda manifest: None, sections), trust, tmp_path).check == "encoding"


def test_headers_beside_the_algorithm_are_refused(trust: Trust, tmp_path: Path) -> None:
    data = good().assemble()
    assert (
        refusal(data.replace(b"\x43\xa1\x01\x27\xa0", b"\x43\xa1\x01\x27\xa1\x00\x00", 1), trust, tmp_path).check
        == "encoding"
    )
    assert (
        refusal(data.replace(b"\x43\xa1\x01\x27\xa0", b"\x43\xa1\x01\x26\xa0", 1), trust, tmp_path).check == "encoding"
    )


def test_a_signature_made_for_something_else_does_not_pass(trust: Trust, tmp_path: Path) -> None:
    data = good().assemble()
    (_, _, payload, _), end = decode(data)
    protected = bytes.fromhex("a10127")
    for signed in (payload, encode(["Signature1", protected, b"", payload])):
        forged = b"\xd2" + encode([protected, {}, payload, KERNEL.sign(signed).signature])
        assert refusal(forged + data[end:], trust, tmp_path).check == "signer_pin"


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_what_was_proved_and_ends_with_zero() -> None:
    result = command("bundle", GOOD, "--pins", PINS)
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["result"] == "verified"
    assert len(document["proved"]) == sum(check["state"] == "passed" for check in document["checks"])


def test_each_narrower_command_tells_its_own_checks_and_no_others() -> None:
    for scope, names in SCOPES.items():
        document = json.loads(command(scope, GOOD, "--pins", PINS).stdout)
        told = {check["name"] for check in document["checks"]} | {one["name"] for one in document["observed"]}
        assert told <= set(names)
        assert {"signer_pin", "log"} < told


def test_a_key_and_a_run_can_stand_for_the_pins() -> None:
    pins = json.loads(PINS.read_text())
    result = command("bundle", GOOD, "--trusted-kernel-pubkey", pins["kernel_key"], "--runtime-id", pins["runtime_id"])
    assert result.exit_code == 0
    for half in (["--trusted-kernel-pubkey", pins["kernel_key"]], ["--runtime-id", pins["runtime_id"]], []):
        assert command("bundle", GOOD, *half).exit_code == 2


def test_what_is_withheld_fails_nothing_until_it_is_required() -> None:
    assert command("bundle", GOOD, "--pins", PINS, "--require", "outputs").exit_code == 0
    assert command("bundle", GOOD, "--pins", PINS, "--require", "arguments").exit_code == 3
    assert command("bundle", GOOD, "--pins", PINS, "--require", "confined", "--require", "durable").exit_code == 0
    assert command("bundle", GOOD, "--pins", PINS, "--require", "nothing").exit_code == 2


def test_a_kept_checkpoint_is_a_check_of_its_own(tmp_path: Path) -> None:
    note = tmp_path / "checkpoint.txt"
    note.write_text(Bundle.open(str(GOOD)).manifest["checkpoint"])
    assert command("bundle", GOOD, "--pins", PINS, "--require", "kept_checkpoints").exit_code == 3
    assert command("bundle", GOOD, "--pins", PINS, "--checkpoint", note, "--require", "kept_checkpoints").exit_code == 0


def weaker(run: Run) -> None:
    """The operator gave Landlock up by name, and the record says so."""
    for leaf in run.all("launch"):
        leaf.body["asked"]["without"] = ["landlock"]
        field = next(field for field in leaf.body["fields"] if field["name"] == "landlock")
        field.update(asked=True, value=False, source="absent", detail="given up by --without")


def test_a_layer_given_up_by_name_is_no_lie_and_not_confined(tmp_path: Path) -> None:
    run = good()
    weaker(run)
    bundle, pins = written(run, tmp_path)
    result = command("confinement", bundle, "--pins", pins)
    assert result.exit_code == 0
    (confined,) = (one for one in json.loads(result.stdout)["observed"] if one["name"] == "confined")
    assert not confined["holds"]
    assert "landlock (given up by name)" in confined["reason"]
    assert command("confinement", bundle, "--pins", pins, "--require", "confined").exit_code == 1


def test_a_volatile_state_is_told_and_fails_where_durable_is_required(tmp_path: Path) -> None:
    run = good()
    run.bootstrap["storage"]["volatile"] = True
    bundle, pins = written(run, tmp_path)
    assert command("bundle", bundle, "--pins", pins).exit_code == 0
    assert command("bundle", bundle, "--pins", pins, "--require", "durable").exit_code == 1


def test_the_sections_are_those_of_the_page_on_formats() -> None:
    assert tuple(section for section in Bundle.open(str(GOOD)).sections) == SECTIONS
