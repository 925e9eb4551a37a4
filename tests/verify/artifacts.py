"""The attested calls of `fixtures/artifacts`, made anew: `python -m tests.verify.artifacts`.

    valid/calls/NAME      what must be accepted
    tampered/calls/NAME   changed by somebody without the keys
    lying/calls/NAME      signed by the right keys, and not true

Each folder holds `call.json` (the artifact) and the reviewer's `request.json` and `context.json`. `calls.json` has the
reviewer's two pins, what each good artifact says, and for each bad one the checks that refuse it. Every byte follows
from fixed keys, salts and times, so that a change of the format shows as a change of these files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.verify import observed
from tests.verify.observed import Parts, assemble, key_of, observation_body, parts, signed_text
from tests.verify.signed import jcs

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "artifacts"

Made = tuple[Parts, bytes, list[str], str]


def _forged(case: str, change: Callable[[dict[str, Any]], None]) -> tuple[Parts, bytes]:
    made = parts(case)
    artifact = json.loads(assemble(made))
    change(artifact["body"])
    return made, jcs(artifact)


def _lied(case: str, change: Callable[[Parts], None]) -> tuple[Parts, bytes]:
    made = parts(case)
    kept = parts(case)  # the reviewer's own documents do not follow the lie
    change(made)
    return kept, assemble(made)


def _another_key(made: Parts) -> None:
    for signs in ("observation", "bootstrap", "receipt"):
        made.keys[signs] = observed.STRANGER
    for body in (made.observation, made.bootstrap, made.log[made.own[-1]][1]):
        body["kernel_key"] = key_of(observed.STRANGER)


def _another_log(made: Parts) -> bytes:
    body = observation_body(made)
    made.log[1][1]["event"] = "ended"
    body["checkpoint"] = observation_body(made)["checkpoint"]
    return signed_text("observation", body, observed.KERNEL).encode()


def _said_completed(made: Parts) -> None:
    made.observation["operation"] = {"state": "completed"}


def _wider(made: Parts) -> None:
    made.tokens[0]["grants"][0]["max_invocations"] = 1000


def _other_arguments(made: Parts) -> None:
    made.log[made.own[-1]][1]["action"]["parameter_hash"] = "5" * 64


def _no_record(made: Parts) -> None:
    made.own.pop()


def _no_intent(made: Parts) -> None:
    del made.own[0]


def _claims_custody(made: Parts) -> None:
    made.observation["custody_binding"] = observed.ORIGINAL


def _other_response(made: Parts) -> None:
    assert made.response is not None
    made.response["output"] = {"kind": "value", "value": "something else"}


def tampered() -> Iterator[tuple[str, Made]]:
    """(name, (the reviewer's documents, artifact, checks that refuse it, what was done))."""
    other = json.loads(assemble(parts("unknown")))["body"]

    def state(body: dict[str, Any]) -> None:
        body["operation"]["state"] = "unknown"

    def no_response(body: dict[str, Any]) -> None:
        body["response_json"] = None

    def other_leaves(body: dict[str, Any]) -> None:
        body["leaves"], body["checkpoint"] = other["leaves"], other["checkpoint"]

    def custody(body: dict[str, Any]) -> None:
        body["custody_binding"] = observed.READBACK

    for name, change, checks, what in (
        ("state-changed", state, ["signer_pin", "retained_operation"], "completed was changed to unknown"),
        ("response-removed", no_response, ["signer_pin"], "the response was taken out"),
        (
            "leaves-of-another-call",
            other_leaves,
            ["signer_pin", "original_request", "worker_response", "retained_operation", "continuation_custody"],
            "leaves and checkpoint of another artifact",
        ),
        ("custody-changed", custody, ["signer_pin", "continuation_custody"], "the custody binding was changed"),
    ):
        yield name, (*_forged("completed", change), checks, what)
    made = parts("completed")
    anew = json.dumps(json.loads(assemble(made)), indent=1).encode()
    yield "written-anew", (made, anew, ["canonical"], "the same members, spaced by another tool")
    yield "another-key", (*_lied("completed", _another_key), ["signer_pin"], "another kernel's key signed all of it")


def lying() -> Iterator[tuple[str, Made]]:
    """The same, for a host that has the keys."""
    for name, case, change, checks, what in (
        ("unknown-told-as-completed", "unknown", _said_completed, ["retained_operation"], "the log says unknown"),
        ("intent-left-out", "completed", _no_intent, ["continuation_custody"], "claims the start, does not show it"),
        ("token-wider-than-parent", "completed", _wider, ["issued_capability"], "more invocations than root had"),
        (
            "other-arguments",
            "completed",
            _other_arguments,
            ["original_request", "worker_response", "continuation_custody"],
            "the receipt commits to arguments that were not asked for",
        ),
        (
            "reconciliation-not-in-log",
            "reconciled",
            _no_record,
            ["worker_response", "retained_operation"],
            "nobody's statement is in the log",
        ),
        ("refusal-with-custody", "refused", _claims_custody, ["continuation_custody"], "nothing was kept: nothing ran"),
        ("another-answer", "completed", _other_response, ["worker_response"], "not the output that was committed to"),
    ):
        yield name, (*_lied(case, change), checks, what)
    made = parts("completed")
    checks = ["retained_operation", "continuation_custody"]
    yield "not-in-the-log", (made, _another_log(parts("completed")), checks, "the checkpoint is of another log")


def files() -> dict[str, bytes]:
    """Every file below `fixtures/artifacts` that this makes, by its relative name."""
    index: dict[str, Any] = {
        "kernel_key": key_of(observed.KERNEL),
        "runtime_id": observed.RUNTIME_ID,
        "valid": [],
        "tampered": [],
        "lying": [],
    }
    made_files: dict[str, bytes] = {}

    def keep(kind: str, name: str, made: Parts, artifact: bytes, **says: Any) -> None:
        folder = f"{kind}/calls/{name}"
        made_files[f"{folder}/call.json"] = artifact + b"\n"
        made_files[f"{folder}/request.json"] = jcs(made.request) + b"\n"
        made_files[f"{folder}/context.json"] = jcs(made.context) + b"\n"
        index[kind].append({"name": name, **says})

    for case in observed.CASES:
        made = parts(case)
        operation = made.observation["operation"]
        says = {
            "observed_operation_state": operation["state"] if operation else None,
            "custody_binding": made.observation["custody_binding"],
        }
        keep("valid", case.replace("_", "-"), made, assemble(made), **says)
    for kind, found in (("tampered", tampered()), ("lying", lying())):
        for name, (made, artifact, checks, what) in found:
            keep(kind, name, made, artifact, fails=checks, what=what)
    made_files["calls.json"] = json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
    return made_files


def main() -> None:
    for name, content in files().items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    print(f"{len(files())} files below {FOLDER.name}")


if __name__ == "__main__":
    main()
