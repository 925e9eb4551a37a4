"""One attested call: a `chio.process.call-observation.v2` against what a reviewer kept of it.

The reviewer brings the request, the context, the kernel's key and the run's id. Everything else comes from the
artifact and is believed only as far as those four carry it. Each check runs whatever became of the others:

    signer_pin            observation and embedded bootstrap are signed by the pinned key
    runtime_pin           all of it is of the pinned run, and the context is too
    original_request      request id, binding and argument commitment, recomputed from the reviewer's own documents
    issued_capability     a chain of tokens from the caller to root that the bootstrap certifies, and that allowed it
    worker_response       the embedded response answers this request, with the receipt that is in the log
    retained_operation    the log holds the receipt (and reconciliation) that go with the claimed state
    continuation_custody  the log shows the call's start as far as is claimed
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from verify import canonical, shape
from verify.capabilities import granted, verify_chain
from verify.custody import (
    LEAF,
    NO_CLAIM,
    ORIGINAL,
    READBACK,
    Custody,
    admitted_at_ms,
    read_custody,
    require_custody,
    require_retained,
)
from verify.keys import PublicKey, read_small
from verify.leaves import BOOTSTRAP
from verify.log import Checkpoint, receipt_leaf, verify_checkpoint
from verify.receipts import CALL
from verify.requests import Context, Request
from verify.responses import judge
from verify.verdict import Unchecked, Verdict, VerifyError

SCHEMA = "chio.process.call-verification.v1"
ARTIFACT_SCHEMA = "chio.process.call-observation.v2"
MAX_ARTIFACT_BYTES = 64 * 1024 * 1024
# A receipt's time is taken after the decision, in the same commit: by this much a grant may seem to have ended before.
_DECISION_MS = 1000

_UNCHECKED = ["physical_effects", "aggregate_usage", "confinement"]

_OBSERVATION = shape.record(
    {
        "schema": shape.one_of(ARTIFACT_SCHEMA),
        "runtime_id": shape.runtime_id,
        "time_ms": shape.at_least(0),
        "kernel_key": shape.digest,
        "bootstrap_json": shape.text,
        "request_sha256": shape.digest,
        "context_sha256": shape.digest,
        "call": CALL,
        "parameter_salt": shape.salt,
        "response_json": shape.nullable(shape.text),
        "capabilities_json": shape.array(shape.text),
        "operation": shape.nullable(
            shape.record({"state": shape.one_of("completed", "unknown", "compensated", "reconciled")})
        ),
        "custody_binding": shape.one_of(ORIGINAL, READBACK, NO_CLAIM),
        "leaves": shape.array(LEAF),
        "checkpoint": shape.text,
    }
)


@dataclass(frozen=True, slots=True)
class Observation:
    """An artifact, read and not yet believed."""

    body: dict[str, Any]
    body_text: bytes
    signature: str
    bootstrap: dict[str, Any]
    bootstrap_text: bytes
    bootstrap_signature: str
    custody: Custody

    @classmethod
    def from_file(cls, path: str) -> "Observation":
        try:
            return cls.read(read_small(path, MAX_ARTIFACT_BYTES).removesuffix(b"\n"))
        except VerifyError as error:
            raise error.located(path) from error

    @classmethod
    def read(cls, text: bytes) -> "Observation":
        members = canonical.split(text, ("body", "signature"))
        body = members["body"].value
        _OBSERVATION(body, "body")
        shape.signature(members["signature"].value, "signature")
        inner = canonical.split(body["bootstrap_json"].encode(), ("body", "signature"))
        BOOTSTRAP(inner["body"].value, "bootstrap_json.body")
        shape.signature(inner["signature"].value, "bootstrap_json.signature")
        return cls(
            body,
            members["body"].received,
            members["signature"].value,
            inner["body"].value,
            inner["body"].received,
            inner["signature"].value,
            read_custody(body["leaves"]),
        )

    def checkpoint(self) -> Checkpoint:
        log_key = PublicKey.from_hex(self.bootstrap["log_key"])
        return verify_checkpoint(self.body["checkpoint"].encode(), log_key, self.bootstrap["log_origin"])


@dataclass(slots=True)
class CallVerdict:
    """What holds of one artifact."""

    observation: Observation
    findings: Verdict = field(default_factory=lambda: Verdict("call"))

    def document(self) -> dict[str, Any]:
        """`chio.process.call-verification.v1`; `failed` is there only when something did."""
        body = self.observation.body
        checks = self.findings.named()
        return {
            "schema": SCHEMA,
            "runtime_id": body["runtime_id"],
            "process_id": body["call"]["process_id"],
            "request_id": body["call"]["request_id"],
            "observed_operation_state": body["operation"]["state"] if body["operation"] else None,
            "custody_binding": body["custody_binding"],
            "artifact_schema": ARTIFACT_SCHEMA,
            **checks,
            "unchecked": [*checks["unchecked"], *_UNCHECKED],
        }


def check_call(
    observation: Observation, request: Request, context: Context, kernel_key: PublicKey, runtime_id: str
) -> CallVerdict:
    """Judges one observation. A failed check is a finding, never an exception."""
    verdict = CallVerdict(observation)
    findings = verdict.findings
    findings.run("signer_pin", partial(_signer_pin, observation, kernel_key))
    findings.run("runtime_pin", partial(_runtime_pin, observation, context, runtime_id))
    findings.run("original_request", partial(_original_request, observation, request, context))
    findings.run("issued_capability", partial(_issued_capability, observation, request, context))
    findings.run("worker_response", partial(_worker_response, observation, request, context))
    findings.run("retained_operation", partial(_retained_operation, observation))
    findings.run("continuation_custody", partial(_continuation_custody, observation, request, context))
    return verdict


def _signer_pin(observation: Observation, kernel_key: PublicKey) -> None:
    for named in (observation.body["kernel_key"], observation.bootstrap["kernel_key"]):
        if named != kernel_key.hex:
            raise VerifyError(f"signed for the key {named}, which is not the pinned one", check="signer_pin")
    kernel_key.verify_record("observation", observation.body_text, observation.signature)
    kernel_key.verify_record("bootstrap", observation.bootstrap_text, observation.bootstrap_signature)


def _runtime_pin(observation: Observation, context: Context, runtime_id: str) -> None:
    leaves = [leaf.body for leaf in observation.custody.leaves if leaf.kind != "intent"]
    bodies = [observation.body, observation.bootstrap, *leaves]
    if any(named != runtime_id for named in (context.runtime_id, *(body["runtime_id"] for body in bodies))):
        raise VerifyError("something here is of a run that is not the pinned one", check="runtime_pin")
    if observation.bootstrap["log_origin"] != f"chio.invalid/{runtime_id}":
        raise VerifyError("the log is of another run", check="runtime_pin")


def _original_request(observation: Observation, request: Request, context: Context) -> None:
    body = observation.body
    receipt = observation.custody.receipt.body
    if body["request_sha256"] != request.digest:
        _refuse("the artifact is of another request", "original_request")
    if body["context_sha256"] != context.digest:
        _refuse("the artifact is of another context", "original_request")
    parameter_hash = request.parameter_hash(body["parameter_salt"])
    if receipt["action"]["parameter_hash"] != parameter_hash:
        _refuse("the receipt commits to other arguments", "original_request")
    if (receipt["tool_server"], receipt["tool_name"]) != (request.server_id, request.tool_name):
        _refuse("the receipt is of another route", "original_request")
    expected = {
        "process_id": context.process_id,
        "operation_key": request.operation_key,
        "request_id": context.request_id(request, body["call"]["dispatch"]),
        "binding": context.binding(request, parameter_hash),
        "dispatch": body["call"]["dispatch"],
        "recovery_policy": request.recovery_policy,
    }
    for name, value in expected.items():
        if body["call"][name] != value:
            _refuse(f"the call's {name} is not this request's", "original_request")


def _issued_capability(observation: Observation, request: Request, context: Context) -> None:
    chain = verify_chain(observation.body["capabilities_json"], observation.bootstrap)
    own = chain[0]
    if (own.body["process_id"], own.id) != (context.process_id, context.capability_id):
        _refuse("the first token is not the context's", "issued_capability")
    if observation.custody.receipt.body["capability_id"] != own.id:
        _refuse("the receipt names another capability", "issued_capability")
    if observation.custody.receipt.body["decision"]["verdict"] == "deny":
        return  # a refusal needs no grant
    admitted_ms = admitted_at_ms(observation.custody)
    at_ms = admitted_ms - _DECISION_MS if admitted_ms is not None else own.body["issued_ms"]
    if not granted(chain, request.server_id, request.tool_name, at_ms):
        _refuse("no grant of the caller covered this call when it was admitted", "issued_capability")


def _worker_response(observation: Observation, request: Request, context: Context) -> None:
    if observation.body["response_json"] is None:
        raise Unchecked("no response was attested")
    kernel_key = PublicKey.from_hex(observation.body["kernel_key"])
    response = judge(observation.body["response_json"].encode(), request, context, kernel_key)
    for check in response.findings.failed:
        _refuse(f"{check.name}: {check.reason}", "worker_response")
    if response.receipt is None or receipt_leaf(response.receipt) != observation.custody.receipt.text:
        _refuse("its receipt is not the one in the log", "worker_response")
    told = response.response.get("reconciliation")
    record = observation.custody.reconciliation
    if told is not None and (
        record is None or told != {"outcome": record.body["outcome"], "by": record.body["by"], "record": record.index}
    ):
        _refuse("its reconciliation is not the one in the log", "worker_response")
    if response.findings.missing:
        raise Unchecked("what it takes to check it is withheld", required=True)


def _retained_operation(observation: Observation) -> None:
    body = observation.body
    state = body["operation"]["state"] if body["operation"] else None
    require_retained(observation.custody, observation.checkpoint(), state, body["call"], observation.bootstrap)


def _continuation_custody(observation: Observation, request: Request, context: Context) -> None:
    require_custody(
        observation.custody, observation.checkpoint(), observation.body["custody_binding"], request, context
    )
    if observation.body["custody_binding"] == NO_CLAIM:
        raise Unchecked("a refusal claims no custody")  # that nothing is claimed was seen


def _refuse(why: str, check: str) -> NoReturn:
    raise VerifyError(why, check=check)
