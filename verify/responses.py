"""One response of the Chio kernel, bound to the request and context that a reviewer kept.

The response is what the worker received, `receipt_json` in it exactly as signed. Nothing of it is believed because it
stands there: the receipt is verified strictly, and each member of the response is held against the receipt or against
the reviewer's own documents. The checks, in order:

    signature, signer_pin   the receipt, under the pinned key, over the received bytes
    runtime_pin             its run is the context's
    caller                  its process and capability are the context's
    operation               its operation key is the request's
    recovery_policy         the request's
    route                   server and tool are the request's
    arguments               the commitment, opened with the disclosed salt, is to the request's arguments
    request_id              recomputed; the response's and the receipt's
    binding                 recomputed
    verdict                 the response's verdict and reason are what the receipt decided
    terminal_state          the same on both sides, and one that goes with the decision
    output                  what was released is what the receipt commits to, and nothing more
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from verify import canonical, shape
from verify.keys import PublicKey, read_small
from verify.receipts import Receipt, verify_receipt
from verify.requests import Context, Request
from verify.verdict import Unchecked, Verdict, VerifyError

SCHEMA = "chio.process.response-verification.v1"
MAX_RESPONSE_BYTES = 8 * 1024 * 1024
OUTCOME_UNKNOWN = "outcome_unknown_after_dispatch"
NOT_DISPATCHED = "not_dispatched"

# What a response cannot show, and where to look instead: the resource, the application, the log.
_UNCHECKED = ["execution_nonce", "resource_ownership", "application_correctness", "receipt_log_inclusion"]

_OUTPUTS = {
    "value": shape.record({"kind": shape.one_of("value"), "value": shape.anything}),
    "text": shape.record({"kind": shape.one_of("text"), "text": shape.string}),
    "withheld": shape.record(
        {
            "kind": shape.one_of("withheld"),
            "reason": shape.one_of("too_large"),
            "bytes": shape.at_least(0),
            "sha256": shape.digest,
        }
    ),
}


def output(value: Any, path: str) -> None:
    """The shape of a whole output object, whatever its kind."""
    shape.object_of_anything(value, path)
    kind = value.get("kind")
    _OUTPUTS[kind if kind in ("text", "withheld") else "value"](value, path)


RECONCILIATION = shape.record(
    {"outcome": shape.one_of("applied", "not_applied"), "by": shape.text, "record": shape.at_least(0)}
)
_RESPONSE = shape.record(
    {
        "request_id": shape.request_id,
        "verdict": shape.one_of("allow", "deny"),
        "output": shape.nullable(output),
        "reason": shape.nullable(shape.text),
        "terminal_state": shape.record({"state": shape.one_of("completed", "incomplete")}, {"reason": shape.text}),
        "receipt_json": shape.text,
        "execution_nonce_json": shape.anything,
    },
    {"reconciliation": RECONCILIATION},
)

# The receipt's decision -> the response's verdict, and what state and reason of it go with that.
_VERDICTS = {"allow": "allow", "deny": "deny", "incomplete": "deny"}


@dataclass(slots=True)
class ResponseVerdict:
    """What holds of one response. `receipt` is null when even its signature does not hold."""

    response: dict[str, Any]
    context: Context | None = None
    file: str = ""
    receipt: Receipt | None = None
    findings: Verdict = field(default_factory=lambda: Verdict("response"))

    @property
    def bound(self) -> bool:
        return not self.findings.failed and not self.findings.missing

    def document(self) -> dict[str, Any]:
        """`chio.process.response-verification.v1`."""
        reconciliation = ["reconciliation"] if "reconciliation" in self.response else []
        checks = self.findings.named()
        assert self.context is not None
        return {
            "schema": SCHEMA,
            "response_bound": self.bound,
            "runtime_id": self.context.runtime_id,
            "process_id": self.context.process_id,
            "request_id": self.response["request_id"],
            "receipt_id": self.receipt.id if self.receipt else None,
            **checks,
            "unchecked": [*checks["unchecked"], *reconciliation, *_UNCHECKED],
        }


def check_response(path: str, request: Request, context: Context, kernel_key: PublicKey) -> ResponseVerdict:
    """Judges the response in a file. Raises `VerifyError` only for a file that is no response at all."""
    try:
        return judge(read_small(path, MAX_RESPONSE_BYTES), request, context, kernel_key)
    except VerifyError as error:
        raise error.located(path) from error


def judge(text: bytes, request: Request, context: Context, kernel_key: PublicKey) -> ResponseVerdict:
    """`check_response` for the response's JSON text, which any client may have written anew around `receipt_json`."""
    verdict = _read(text, kernel_key)
    verdict.context = context
    if verdict.receipt is not None:
        _bind_caller(verdict.findings, verdict.receipt, request, context)
        _bind_call(verdict, verdict.receipt, request, context)
        _bind_outcome(verdict, verdict.receipt)
    return verdict


def judge_outcome(path: str, kernel_key: PublicKey) -> ResponseVerdict:
    """What a response in a file released, against its own receipt. Whose call it was is not asked."""
    try:
        verdict = _read(read_small(path, MAX_RESPONSE_BYTES), kernel_key)
    except VerifyError as error:
        raise error.located(path) from error
    verdict.file = path
    if verdict.receipt is not None:
        _bind_outcome(verdict, verdict.receipt)
    return verdict


def _read(text: bytes, kernel_key: PublicKey) -> ResponseVerdict:
    """The response and its receipt; `signature` and `signer_pin` are judged."""
    response = canonical.parse(text, canonical=False)
    _RESPONSE(response, "")
    verdict = ResponseVerdict(response)
    try:
        verdict.receipt = verify_receipt(response["receipt_json"].encode(), kernel_key)
    except VerifyError as error:
        verdict.findings.fail(error.check, error.located("", "receipt_json"))
    else:
        verdict.findings.passes("signature")
        verdict.findings.passes("signer_pin")
    return verdict


def _bind_caller(findings: Verdict, receipt: Receipt, request: Request, context: Context) -> None:
    body, call = receipt.body, receipt.body["call"]
    for name, signed, kept in (
        ("runtime_pin", body["runtime_id"], context.runtime_id),
        ("caller", (call["process_id"], body["capability_id"]), (context.process_id, context.capability_id)),
        ("operation", call["operation_key"], request.operation_key),
        ("recovery_policy", call["recovery_policy"], request.recovery_policy),
        ("route", (body["tool_server"], body["tool_name"]), (request.server_id, request.tool_name)),
    ):
        findings.run(name, lambda signed=signed, kept=kept: _same(signed, kept))  # type: ignore[misc]


def _bind_call(verdict: ResponseVerdict, receipt: Receipt, request: Request, context: Context) -> None:
    findings, body, call = verdict.findings, receipt.body, receipt.body["call"]

    def arguments() -> None:
        salt = _salt(receipt, "parameter_salt")
        _same(body["action"]["parameter_hash"], request.parameter_hash(salt))

    findings.run("arguments", arguments)

    def request_id() -> None:
        expected = context.request_id(request, call["dispatch"])
        _same(call["request_id"], expected)
        _same(verdict.response["request_id"], expected)

    findings.run("request_id", request_id)
    expected = context.binding(request, body["action"]["parameter_hash"])
    findings.run("binding", lambda: _same(call["binding"], expected))


def _bind_outcome(verdict: ResponseVerdict, receipt: Receipt) -> None:
    findings, body, response = verdict.findings, receipt.body, verdict.response

    def decided() -> None:
        _same(response["verdict"], _VERDICTS[body["decision"]["verdict"]])
        _same(response["reason"], body["decision"].get("reason"))

    def state() -> None:
        _same(response["terminal_state"], body["terminal_state"])
        require_state(body)
        if "reconciliation" in response:
            _same(body["terminal_state"].get("reason"), OUTCOME_UNKNOWN)

    findings.run("verdict", decided)
    findings.run("terminal_state", state)
    output, committed = response["output"], body["output"]

    def released() -> None:
        if output is None or committed is None:
            _same(output, committed)
            return
        salt = _salt(receipt, "output_salt")
        _same(output["kind"], committed["kind"])
        _same(hashlib.sha256(bytes.fromhex(salt) + canonical.encode(output)).hexdigest(), committed["hash"])

    findings.run("output", released)


def require_state(body: dict[str, Any]) -> None:
    """Whether a receipt's terminal state, reasons and output go with its decision (contract, section 4)."""
    decision, state = body["decision"], body["terminal_state"]
    decided = decision["verdict"]
    if decided == "incomplete":
        fits = state in (
            {"state": "incomplete", "reason": OUTCOME_UNKNOWN},
            {"state": "incomplete", "reason": NOT_DISPATCHED},
        ) and decision.get("reason") == state.get("reason")
    else:
        fits = state == {"state": "completed"} and ("reason" in decision) == (decided == "deny")
    if not fits:
        raise VerifyError("the terminal state is not one of this decision", check="response_binding")
    if (body["output"] is not None) != (decided == "allow"):
        raise VerifyError("an output where none can be, or none where one must be", check="response_binding")


def _salt(receipt: Receipt, name: str) -> str:
    salt: str | None = receipt.disclosed.get(name)
    if salt is None:
        raise Unchecked("its salt is withheld", required=True)
    return salt


def _same(found: Any, expected: Any) -> None:
    if found != expected:
        raise VerifyError(f"{_short(found)}, where {_short(expected)} was expected", check="response_binding")


def _short(value: Any) -> str:
    text = canonical.encode(list(value) if isinstance(value, tuple) else value).decode()
    return text if len(text) <= 160 else f"{text[:157]}..."
