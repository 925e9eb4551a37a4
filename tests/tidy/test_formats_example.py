"""The worked example of docs/formats.md, recomputed from what the page says, and the page held against the code.

The recomputation uses hashlib, PyNaCl and rfc8785 alone, as a second verifier would. Then the product's own code must
give the same values, so that a format cannot change without the page.
"""

from __future__ import annotations

import base64
import json
import re
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import nacl.signing
import pytest
import rfc8785

from chio.kernel import log, receipts
from verify.keys import PublicKey
from verify.log import receipt_leaf, verify_checkpoint
from verify.receipts import verify_receipt

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
LEAVES = ("bootstrap", "attempt", "launch", "receipt", "exit", "attempt", "launch", "receipt", "receipt", "exit")


@cache
def example(name: str) -> str:
    """The fenced text after `<!-- example: name -->`, without its last newline."""
    found = re.search(rf"^<!-- example: {re.escape(name)} -->\n```\w*\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/formats.md has no example `{name}`"
    return found[1]


def document(name: str) -> Any:
    return json.loads(example(name))


def result(label: str) -> str:
    """The last cell of a row of the example's table."""
    found = re.search(rf"^\| {re.escape(label)} \|.*\| `([^`]+)` \|$", PAGE, re.MULTILINE)
    assert found, f"docs/formats.md has no row `{label}`"
    return found[1]


def digest(*parts: bytes) -> str:
    return sha256(b"".join(parts)).hexdigest()


def check_signature(key: str, message: bytes, signature: bytes) -> None:
    nacl.signing.VerifyKey(bytes.fromhex(key)).verify(message, signature)


def signed(kind: str, text: str, key: str) -> str:
    """Checks a `{"body",...,"signature"}` text under a key of the pins; the record's id."""
    record = json.loads(text)
    body = rfc8785.dumps(record["body"])
    assert body.decode() in text, "the body stands in the text as it was signed"
    message = f"chio/{kind}/v1".encode() + b"\0" + body
    check_signature(document("pins")[key], message, bytes.fromhex(record["signature"]))
    return digest(message)


def leaf_of(kind: str, text: str) -> str:
    """The leaf hash of a record's text, built as the page says."""
    record = json.loads(text)
    leaf = {"body": record["body"], "signature": record["signature"], "type": kind}
    return digest(b"\0", rfc8785.dumps(leaf))


def tree_root(hashes: list[bytes]) -> bytes:
    """RFC 9162, section 2.1.1, as it is written: split at the largest power of two that is less than the size."""
    if len(hashes) == 1:
        return hashes[0]
    half = 1 << ((len(hashes) - 1).bit_length() - 1)
    return sha256(b"\1" + tree_root(hashes[:half]) + tree_root(hashes[half:])).digest()


def test_every_example_text_is_canonical() -> None:
    for name in ("bootstrap", "capability root", "capability producer", "receipt", "output", "leaf 1", "leaf 4"):
        assert rfc8785.dumps(document(name)).decode() == example(name), name


def test_the_bootstrap_is_signed_and_says_what_the_pins_say() -> None:
    signed("bootstrap", example("bootstrap"), "kernel_key")
    body = document("bootstrap")["body"]
    pins = document("pins")
    assert {name: body[name] for name in pins if name != "schema"} == {
        name: value for name, value in pins.items() if name != "schema"
    }
    assert body["log_origin"] == f"chio.invalid/{pins['runtime_id']}"


def test_the_capabilities_form_the_chain_that_the_bootstrap_lists() -> None:
    root = signed("capability", example("capability root"), "authority_key")
    producer = signed("capability", example("capability producer"), "authority_key")
    assert producer == example("capability_id")
    assert document("capability producer")["body"]["parent_capability_id"] == root
    listed = {entry["process_id"]: entry["capability_id"] for entry in document("bootstrap")["body"]["processes"]}
    assert (listed["root"], listed["producer"]) == (root, producer)


def test_every_hash_of_the_receipt_is_the_one_computed_from_the_page() -> None:
    receipt = document("receipt")
    body, disclosed, call = receipt["body"], receipt["disclosed"], receipt["body"]["call"]
    names = [body["runtime_id"], call["process_id"], call["operation_key"]]
    parameter_hash = digest(bytes.fromhex(disclosed["parameter_salt"]), rfc8785.dumps(disclosed["parameters"]))
    bound = [*names, body["capability_id"], body["tool_server"], body["tool_name"], parameter_hash]
    computed = {
        "`request_id`": "process:" + digest(rfc8785.dumps(names)),
        "`parameter_hash`": parameter_hash,
        "`binding`": digest(rfc8785.dumps([*bound, call["recovery_policy"]])),
        "`output.hash`": digest(bytes.fromhex(disclosed["output_salt"]), example("output").encode()),
        "receipt id": signed("receipt", example("receipt"), "kernel_key"),
        "leaf hash": leaf_of("receipt", example("receipt")),
    }
    in_the_receipt = {
        "`request_id`": call["request_id"],
        "`parameter_hash`": body["action"]["parameter_hash"],
        "`binding`": call["binding"],
        "`output.hash`": body["output"]["hash"],
    }
    for label, value in computed.items():
        assert value == result(label) == in_the_receipt.get(label, value), label
    assert body["capability_id"] == example("capability_id")
    assert body["policy_hash"] == document("pins")["policy_digest"]


def test_the_leaves_shown_have_the_hashes_listed() -> None:
    hashes = example("leaf hashes").split("\n")
    assert len(hashes) == len(LEAVES)
    shown = {0: "bootstrap", 1: "leaf 1", 3: "receipt", 4: "leaf 4"}
    for index, name in shown.items():
        assert leaf_of(LEAVES[index], example(name)) == hashes[index], name
    assert document("receipt")["body"]["log_index"] == 3
    signed("exit", example("leaf 4"), "kernel_key")
    assert document("leaf 4")["body"]["launch_id"] == document("receipt")["body"]["attempt"]["launch_id"]


def test_the_checkpoint_is_signed_over_the_root_of_the_listed_leaves() -> None:
    pins, note = document("pins"), example("checkpoint") + "\n"
    text, _, line = note.partition("\n\n")
    origin, size, root = text.split("\n")
    hashes = [bytes.fromhex(one) for one in example("leaf hashes").split("\n")]
    assert (int(size), base64.b64decode(root)) == (len(hashes), tree_root(hashes))
    dash, name, encoded = line.rstrip("\n").split(" ")
    blob = base64.b64decode(encoded)
    key_id = sha256(name.encode() + b"\n\x01" + bytes.fromhex(pins["log_key"])).digest()[:4]
    assert (dash, name, blob[:4]) == ("\u2014", origin, key_id)
    check_signature(pins["log_key"], text.encode() + b"\n", blob[4:])


def test_the_product_computes_and_accepts_the_same_example() -> None:
    pins, receipt = document("pins"), document("receipt")
    body, disclosed, call = receipt["body"], receipt["disclosed"], receipt["body"]["call"]
    names = (body["runtime_id"], call["process_id"], call["operation_key"])
    assert receipts.request_id(*names, call["dispatch"]) == call["request_id"]
    parameter_hash = receipts.commitment(
        bytes.fromhex(disclosed["parameter_salt"]), rfc8785.dumps(disclosed["parameters"])
    )
    target = (body["capability_id"], body["tool_server"], body["tool_name"])
    assert receipts.binding(*names, *target, parameter_hash, call["recovery_policy"]) == call["binding"]
    verified = verify_receipt(example("receipt").encode(), PublicKey.from_hex(pins["kernel_key"]), pins["runtime_id"])
    assert verified.id == result("receipt id")
    hashed = log.leaf_hash("receipt", verified.body_text, verified.signature)
    assert hashed.hex() == result("leaf hash") == digest(b"\0", receipt_leaf(verified))
    checkpoint = verify_checkpoint(
        (example("checkpoint") + "\n").encode(), PublicKey.from_hex(pins["log_key"]), log.origin(pins["runtime_id"])
    )
    assert checkpoint.size == len(LEAVES)


def test_a_changed_example_is_noticed() -> None:
    changed = example("receipt").replace('"items":[2,3,5]', '"items":[2,3,6]')
    assert changed != example("receipt")
    disclosed = json.loads(changed)["disclosed"]
    salt, parameters = bytes.fromhex(disclosed["parameter_salt"]), rfc8785.dumps(disclosed["parameters"])
    assert digest(salt, parameters) != result("`parameter_hash`")
    with pytest.raises(nacl.exceptions.BadSignatureError):
        signed("exit", example("leaf 4").replace('"outcome":"exit_0"', '"outcome":"exit_1"'), "kernel_key")


def sources(*folders: str) -> str:
    return "\n".join(
        path.read_text(encoding="utf-8") for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))
    )


def missing(names: set[str]) -> list[str]:
    return sorted(name for name in names if not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", PAGE))


def test_the_page_describes_every_schema_that_the_product_names() -> None:
    names = set(re.findall(r"\"(chio\.[a-z.-]+\.v\d)\"", sources("chio", "confine", "verify")))
    assert {"chio.receipt.v1", "chio.process.run-report.v1", "chio.profile.v1"} <= names
    assert missing(names) == []


def test_the_page_describes_every_field_of_a_launch_record() -> None:
    names = set(re.findall(r"\bField\(\s*\"([\w-]+)\"", sources("confine")))
    assert {"mounts", "cgroup", "cgroup_limits", "swap_bytes"} <= names
    assert missing(names) == []


def test_the_page_describes_every_leaf_type_and_column_choice_of_the_database() -> None:
    schema = (ROOT / "chio" / "kernel" / "schema.sql").read_text(encoding="utf-8")
    types = re.search(r"type IN \(([^)]*)\)", schema)
    assert types
    assert missing(set(re.findall(r"'(\w+)'", types[1]))) == []


def test_the_page_names_every_code_that_a_client_may_see() -> None:
    declared = (ROOT / "chio" / "clients" / "node" / "index.d.ts").read_text(encoding="utf-8")
    codes = re.search(r"type WorkerErrorCode =(.*?);", declared, re.DOTALL)
    assert codes
    assert missing(set(re.findall(r"\| \"(\w+)\"", codes[1]))) == []
