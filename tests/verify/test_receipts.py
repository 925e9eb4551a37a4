"""Every tampering names the check that must catch it."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.verify import signed
from verify.distinct import DistinctIds
from verify.keys import PublicKey
from verify.lines import MAX_LINE_BYTES
from verify.receipt_file import check_receipts, verify_receipts
from verify.receipts import LineChecker, verify_receipt
from verify.verdict import VerifyError

KEY = PublicKey.from_hex(signed.KERNEL_KEY)


def refusal(line: bytes, **options: Any) -> VerifyError:
    """How one line is refused; the quick reading of many lines must refuse it by the same check."""
    with pytest.raises(VerifyError) as refused:
        verify_receipt(line, KEY, **options)
    with pytest.raises(VerifyError) as quickly:
        LineChecker(KEY, options.get("runtime_id")).check(line)
    assert (quickly.value.check, quickly.value.what) == (refused.value.check, refused.value.what)
    return refused.value


# --- what is accepted ---


def test_six_lines_with_one_replay_are_five_receipts_in_exactly_the_contracts_document(tmp_path: Path) -> None:
    lines = [signed.receipt(signed.a_body(index)) for index in range(5)]
    assert verify_receipts(signed.write(tmp_path, *lines, lines[1]), signed.KERNEL_KEY) == {
        "schema": "chio.receipt.signatures.v1",
        "receipts_verified": 5,
        "trusted_kernel_key": signed.KERNEL_KEY,
        "checks": ["signature", "signer_pin", "action_parameter_hash"],
    }


def test_a_last_line_without_its_newline_is_verified_too(tmp_path: Path) -> None:
    path = tmp_path / "one.ndjson"
    path.write_bytes(signed.receipt())
    assert check_receipts(str(path), KEY).lines == 1


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("output", None),
        ("attempt", None),
        ("attempt.launch_id", None),
        ("evidence", []),
        ("evidence.0.detail", ...),
        ("decision.reason", ...),
        ("decision.guard", ...),
        ("terminal_state.reason", ...),
        ("decision.verdict", "incomplete"),
        ("call.recovery_policy", "known_outcome_only"),
        ("call.dispatch", 3),
        ("output.kind", "withheld"),
    ],
)
def test_each_form_that_a_receipt_may_take_is_accepted(path: str, value: Any) -> None:
    assert verify_receipt(signed.receipt(signed.changed(path, value)), KEY).arguments_disclosed


def test_the_id_is_the_digest_of_what_was_signed() -> None:
    import hashlib

    body_text = signed.jcs(signed.a_body())
    expected = hashlib.sha256(b"chio/receipt/v1\0" + body_text).hexdigest()
    assert verify_receipt(signed.receipt(), KEY).id == expected


# --- tampering without the key ---


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for name, item in value.items() for leaf in _leaves(item, (*path, name))]
    if isinstance(value, list):
        return [leaf for position, item in enumerate(value) for leaf in _leaves(item, (*path, position))]
    return [path]


_SAME_TYPE = {
    "decision.verdict": "deny",
    "terminal_state.state": "incomplete",
    "output.kind": "text",
    "call.recovery_policy": "known_outcome_only",
    "call.request_id": "process:" + "0" * 64,
    "runtime_id": signed.RUNTIME_ID.replace("7", "8"),
}
_CAUGHT_BEFORE_THE_SIGNATURE = {"schema": "fields", "kernel_key": "signer_pin"}


@pytest.mark.parametrize("path", [".".join(map(str, leaf)) for leaf in _leaves(signed.a_body())])
def test_every_member_of_the_body_is_covered_by_the_signature(path: str) -> None:
    before: Any = signed.a_body()
    for name in path.split("."):
        before = before[int(name)] if isinstance(before, list) else before[name]
    if isinstance(before, bool):
        after: Any = not before
    elif isinstance(before, int):
        after = before + 1
    else:
        after = _SAME_TYPE.get(path, "0" * 64 if len(before) == 64 else f"{before}x")
    tampered = signed.jcs(signed.changed(path, after))
    line = signed.line_of(tampered, signed.jcs(signed.disclosed()), signed.sign(signed.jcs(signed.a_body())))
    assert refusal(line).check == _CAUGHT_BEFORE_THE_SIGNATURE.get(path, "signature")


def test_every_changed_or_missing_byte_is_refused_but_in_the_output_salt() -> None:
    """The output salt is checked against an output, and a receipt alone has none."""
    line = signed.receipt()
    salt = line.index(signed.OUTPUT_SALT.encode())
    accepted = []
    for position in range(len(line)):
        for mutant in (
            line[:position] + bytes([line[position] ^ 1]) + line[position + 1 :],
            line[:position] + line[position + 1 :],
        ):
            try:
                verify_receipt(mutant, KEY)
            except VerifyError:
                continue
            accepted.append(position)
    assert accepted
    assert all(salt <= position < salt + len(signed.OUTPUT_SALT) for position in accepted)


def test_a_signature_of_another_key_is_refused() -> None:
    body_text = signed.jcs(signed.a_body())
    line = signed.line_of(body_text, signed.jcs(signed.disclosed()), signed.sign(body_text, signed.OTHER))
    assert refusal(line).check == "signature"


def test_a_receipt_of_another_key_is_refused_by_the_pin_although_its_signature_holds() -> None:
    body_text = signed.jcs(signed.changed("kernel_key", signed.OTHER_KEY))
    line = signed.line_of(body_text, signed.jcs(signed.disclosed()), signed.sign(body_text, signed.OTHER))
    assert verify_receipt(line, PublicKey.from_hex(signed.OTHER_KEY)).id
    assert refusal(line).check == "signer_pin"


def test_a_receipt_of_another_run_is_refused_by_the_runtime_pin() -> None:
    line = signed.receipt(signed.changed("runtime_id", "00000000-0000-4000-8000-000000000000"))
    assert verify_receipt(line, KEY).id
    assert refusal(line, runtime_id=signed.RUNTIME_ID).check == "runtime_pin"


@pytest.mark.parametrize("domain", [b"", b"chio/receipt/v1", b"chio/launch/v1\0", b"chio/receipt/v2\0"])
def test_a_signature_made_for_another_domain_is_refused(domain: bytes) -> None:
    body_text = signed.jcs(signed.a_body())
    line = signed.line_of(body_text, signed.jcs(signed.disclosed()), signed.sign(body_text, domain=domain))
    assert refusal(line).check == "signature"


@pytest.mark.parametrize(
    "shown",
    [
        {**signed.disclosed(), "parameters": {**signed.PARAMETERS, "message_key": "other"}},
        {**signed.disclosed(), "parameters": None},
        {**signed.disclosed(), "parameter_salt": "0" * 32},
    ],
)
def test_disclosed_arguments_that_were_not_signed_are_refused(shown: dict[str, Any]) -> None:
    assert refusal(signed.receipt(shown=shown)).check == "action_parameter_hash"


# --- what even the key must not be able to say ---


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", "chio.receipt.v2"),
        ("surprise", 1),
        ("action.surprise", 1),
        ("evidence.0.surprise", 1),
        ("policy_hash", ...),
        ("call.binding", ...),
        ("log_index", -1),
        ("log_index", True),
        ("log_index", "3"),
        ("time_ms", None),
        ("runtime_id", "7A2D4C1E-0F3B-4D5E-8A6B-9C0D1E2FE815"),
        ("runtime_id", "producer"),
        ("capability_id", "C" * 64),
        ("capability_id", "c" * 63),
        ("capability_id", "c" * 64 + "\n"),
        ("tool_name", ""),
        ("tool_name", "x" * 257),
        ("tool_name", " send_jobs"),
        ("tool_name", "send\u0000jobs"),
        ("decision.verdict", "maybe"),
        ("decision", "allow"),
        ("terminal_state.reason", None),
        ("output", {}),
        ("output.kind", "file"),
        ("call.process_id", "pro ducer"),
        ("call.request_id", "f" * 64),
        ("call.dispatch", 0),
        ("attempt.number", 0),
        ("attempt.launch_id", ...),
        ("evidence", {}),
        ("evidence.0.passed", 1),
        ("kernel_key", None),
    ],
)
def test_a_signed_body_of_another_shape_is_refused_and_the_member_named(path: str, value: Any) -> None:
    error = refusal(signed.receipt(signed.changed(path, value)))
    assert error.check == "fields"
    assert path.rsplit(".", maxsplit=1)[-1] in error.what


@pytest.mark.parametrize(
    "shown",
    [
        {**signed.disclosed(), "surprise": 1},
        {**signed.disclosed(), "parameter_salt": None},
        {**signed.disclosed(), "parameter_salt": "0" * 31},
        {**signed.disclosed(), "output_salt": "G" * 32},
        [],
        None,
    ],
)
def test_a_disclosed_part_of_another_shape_is_refused(shown: Any) -> None:
    body_text = signed.jcs(signed.a_body())
    assert refusal(signed.line_of(body_text, signed.jcs(shown), signed.sign(body_text))).check == "fields"


def _with_parameters(text: bytes) -> bytes:
    """A receipt whose arguments are this text, correctly committed to and signed."""
    body = signed.changed("action.parameter_hash", signed.commitment(signed.PARAMETER_SALT, text))
    body_text = signed.jcs(body)
    salts = f'{{"output_salt":"{signed.OUTPUT_SALT}","parameter_salt":"{signed.PARAMETER_SALT}","parameters":'
    return signed.line_of(body_text, salts.encode() + text + b"}", signed.sign(body_text))


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":0.5,"b":1e-7,"c":-1.25}',
        '{"\U0001f600":1,"\ue000":2}'.encode(),  # UTF-16 order: U+1F600 is D83D DE00
        b"[9007199254740991,-9007199254740991]",
        b"[" * 61 + b"]" * 61,
        '"\u2028\x7f\\u001f\\b"'.encode(),
    ],
)
def test_arguments_at_the_edge_of_the_profile_are_accepted(text: bytes) -> None:
    assert verify_receipt(_with_parameters(text), KEY).arguments_disclosed


@pytest.mark.parametrize(
    ("text", "check"),
    [
        (b'{"a":1,"a":1}', "text"),
        (b'{"a":{"b":1,"b":2}}', "text"),
        (b"[9007199254740992]", "text"),
        (b"[-9007199254740992]", "text"),
        (b"[1" + b"0" * 5000 + b"]", "text"),
        (b"[10000000000000000.0]", "text"),
        (b"[1e400]", "text"),
        (b"[NaN]", "text"),
        (b"[Infinity]", "text"),
        (b'["\\ud800"]', "text"),
        (b'{"\\udfff":1}', "text"),
        (b'["\xed\xa0\x80"]', "text"),
        (b'["\xff"]', "text"),
        (b'["\x00"]', "text"),
        (b'["\\x41"]', "text"),
        (b"[01]", "text"),
        (b"[1,]", "text"),
        (b"[" * 65 + b"]" * 65, "text"),
        (b"[" * 100_000 + b"]" * 100_000, "text"),
        (b'{"b":1,"a":2}', "canonical"),
        ('{"\ue000":2,"\U0001f600":1}'.encode(), "canonical"),
        (b"[1, 2]", "canonical"),
        (b"[1.0]", "canonical"),
        (b"[-0]", "canonical"),
        (b"[1E2]", "canonical"),
        (b'["\\u0041"]', "canonical"),
        (b'["\\/"]', "canonical"),
        (b'["\\u001F"]', "canonical"),
    ],
)
def test_signed_arguments_outside_the_profile_are_refused(text: bytes, check: str) -> None:
    assert refusal(_with_parameters(text)).check == check


def test_a_body_with_the_same_member_twice_is_refused_although_it_is_signed() -> None:
    body_text = signed.jcs(signed.a_body()).replace(b'"log_index":3', b'"log_index":3,"log_index":3')
    line = signed.line_of(body_text, signed.jcs(signed.disclosed()), signed.sign(body_text))
    assert refusal(line).check == "text"


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (b"", "text"),
        (b"{}", "fields"),
        (b"[]", "fields"),
        (b"null", "fields"),
        (b"\xef\xbb\xbf" + signed.receipt(), "text"),
        (signed.receipt()[:-1], "text"),
        (signed.receipt() + b"\r", "text"),
        (signed.receipt() + signed.receipt(), "text"),
        (b" " + signed.receipt(), "text"),
        (signed.receipt().replace(b'{"body"', b'{ "body"'), "canonical"),
        (signed.receipt().replace(b'{"body"', b'{"a":1,"body"'), "fields"),
        (signed.receipt()[:-1] + b',"z":1}', "fields"),
        (signed.receipt()[:-1] + b',"signature":""}', "text"),
        (signed.receipt().replace(b',"disclosed"', b',"disclosure"'), "fields"),
    ],
)
def test_a_line_that_is_not_one_receipt_is_refused(mutant: bytes, check: str) -> None:
    assert refusal(mutant).check == check


# --- withheld arguments ---


@pytest.mark.parametrize("absent", [("parameters",), ("parameter_salt",), tuple(signed.disclosed())])
def test_withheld_arguments_take_their_check_out_of_the_document(tmp_path: Path, absent: tuple[str, ...]) -> None:
    shown = {name: value for name, value in signed.disclosed().items() if name not in absent}
    path = signed.write(tmp_path, signed.receipt(signed.a_body(1)), signed.receipt(shown=shown))
    verdict = check_receipts(path, KEY)
    assert (verdict.withheld, verdict.withheld_line) == (1, 2)
    assert verdict.document()["checks"] == ["signature", "signer_pin"]


# --- whole files ---


def test_a_bad_line_is_named_with_its_file_check_and_what_to_do(tmp_path: Path) -> None:
    bad = signed.receipt().replace(b'"producer"', b'"consumer"')
    path = signed.write(tmp_path, signed.receipt(), signed.receipt(), bad, signed.receipt())
    with pytest.raises(VerifyError) as refused:
        check_receipts(path, KEY)
    assert (refused.value.file, refused.value.place, refused.value.check) == (path, "line 3", "signature")
    assert str(refused.value).endswith(f"({path}, line 3, check signature; {refused.value.fix})")
    assert refused.value.fix


@pytest.mark.parametrize("content", [b"", b"\n", b"\n" + signed.receipt()])
def test_a_file_without_receipts_or_with_an_empty_line_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "receipts.ndjson"
    path.write_bytes(content)
    with pytest.raises(VerifyError) as refused:
        check_receipts(str(path), KEY)
    assert refused.value.check == ("text" if content else "input")


@pytest.mark.parametrize("name", ["absent.ndjson", ".", "nul\0"])
def test_what_is_not_a_readable_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(VerifyError) as refused:
        check_receipts(f"{tmp_path}/{name}", KEY)
    assert refused.value.check == "input"


def test_an_endless_line_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "receipts.ndjson"
    with path.open("wb") as file:
        file.truncate(64 * MAX_LINE_BYTES)  # sparse
    tracemalloc.start()
    try:
        with pytest.raises(VerifyError) as refused:
            check_receipts(str(path), KEY)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_LINE_BYTES
    finally:
        tracemalloc.stop()
    assert (refused.value.check, refused.value.place) == ("text", "line 1")


def test_ten_thousand_levels_cost_a_refusal_and_no_crash() -> None:
    assert refusal(b'{"body":' * 10_000 + b"}" * 10_000).check == "text"


def test_distinct_ids_are_counted_exactly_when_they_no_longer_fit_in_memory() -> None:
    import hashlib

    ids = [hashlib.sha256(str(number % 1000).encode()).digest() for number in range(3500)]
    counter = DistinctIds(run_ids=64)
    for identity in ids:
        counter.add(identity)
    try:
        assert counter.count() == 1000
        assert counter.count() == 1000
    finally:
        counter.close()


def test_the_received_bytes_are_what_is_verified() -> None:
    receipt = verify_receipt(signed.receipt(), KEY)
    assert receipt.body_text == signed.jcs(signed.a_body())
    assert json.loads(receipt.body_text) == receipt.body
