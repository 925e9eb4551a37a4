"""One call of a whole run, as a reviewer asks after it who kept its request and context, and perhaps its response.

`verify.audit` has the log; here is only what the reviewer's own documents add: that this call is in it, that it is what
was asked for, and that the response is what the log says became of it. Where the observation of one call
(`verify.calls`) shows some leaves with proofs, a bundle has them all, so nothing later can be missing.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

from verify.authority import BUILT_IN_SERVERS, Authority
from verify.custody import NO_CLAIM, ORIGINAL, READBACK
from verify.history import Leaf, call_key
from verify.keys import PublicKey
from verify.log import receipt_leaf
from verify.requests import Context, Request
from verify.responses import NOT_DISPATCHED, judge
from verify.verdict import Unchecked, Verdict, VerifyError

CHECKS = ("original_request", "worker_response")


@dataclass(frozen=True, slots=True)
class Kept:
    """What the reviewer kept. `response` is (file, text)."""

    request: Request
    context: Context
    response: tuple[str, bytes] | None = None


class Inquiry:
    """Takes the leaves of one call out of the pass, and judges them at its end."""

    def __init__(self, kept: Kept, authority: Authority, kernel_key: PublicKey) -> None:
        self._kept = kept
        self._authority = authority
        self._kernel_key = kernel_key
        names = {"process_id": kept.context.process_id, "operation_key": kept.request.operation_key}
        self._key = call_key(names)
        self._intents: list[Leaf] = []
        self._receipts: list[Leaf] = []
        self._reconciliation: Leaf | None = None
        self._salt: bytes | None = None

    def read(self, leaf: Leaf, salt: bytes | None) -> None:
        """`salt` opens the arguments' commitment of a receipt, where they are shown."""
        if "call" not in leaf.body or call_key(leaf.body["call"]) != self._key:
            return
        match leaf.kind:
            case "intent":
                self._intents.append(leaf)
            case "receipt":
                self._receipts.append(leaf)
                self._salt = salt or self._salt
            case "reconciliation":
                self._reconciliation = leaf

    def tell(self, verdict: Verdict) -> None:
        verdict.run("original_request", self._original_request)
        verdict.run("worker_response", self._worker_response)
        verdict.figures["call"] = self._figures()

    def _original_request(self) -> None:
        request, context = self._kept.request, self._kept.context
        process = self._authority.processes.get(context.process_id)
        runtime_id = self._authority.bootstrap["runtime_id"]
        if process is None or (context.runtime_id, context.capability_id) != (runtime_id, process.capability.id):
            _refuse("the context is of no process of this run", "original_request")
        if not self._receipts:
            _refuse("the log has no outcome of a call of this process under this key", "original_request")
        body = self._receipts[-1].body
        if (body["tool_server"], body["tool_name"]) != (request.server_id, request.tool_name):
            _refuse("the call was of another route", "original_request")
        if body["call"]["recovery_policy"] != request.recovery_policy:
            _refuse("the call was made with another recovery policy", "original_request")
        salt = self._salt or self._salt_of_response()
        if salt is None:
            raise Unchecked("the call's arguments are not shown, and no response opens them", required=True)
        parameter_hash = request.parameter_hash(salt.hex())
        if body["action"]["parameter_hash"] != parameter_hash:
            _refuse("the call was made with other arguments", "original_request")
        if body["call"]["binding"] != context.binding(request, parameter_hash):
            _refuse("the binding is not this request's", "original_request")

    def _salt_of_response(self) -> bytes | None:
        """The salt that the response discloses: a wrong one opens nothing."""
        if self._kept.response is None:
            return None
        receipt = judge(self._kept.response[1], self._kept.request, self._kept.context, self._kernel_key).receipt
        salt = receipt.disclosed.get("parameter_salt") if receipt is not None else None
        return bytes.fromhex(salt) if salt is not None else None

    def _worker_response(self) -> None:
        if self._kept.response is None:
            raise Unchecked("no response was given")
        file, text = self._kept.response
        try:
            response = judge(text, self._kept.request, self._kept.context, self._kernel_key)
        except VerifyError as error:
            raise error.located(file) from error
        for check in response.findings.failed:
            _refuse(f"{check.name}: {check.reason}", "worker_response", file)
        if response.receipt is None or receipt_leaf(response.receipt) not in [leaf.text for leaf in self._receipts]:
            _refuse("its receipt is none of this call's in the log", "worker_response", file)
        told, record = response.response.get("reconciliation"), self._reconciliation
        if told is not None and (
            record is None
            or told != {"outcome": record.body["outcome"], "by": record.body["by"], "record": record.index}
        ):
            _refuse("its reconciliation is not the one in the log", "worker_response", file)
        if response.findings.missing:
            raise Unchecked("what it takes to check it is withheld", required=True)

    def _figures(self) -> dict[str, Any] | None:
        if not self._receipts:
            return None
        body = self._receipts[-1].body
        decision, external = body["decision"], body["tool_server"] not in BUILT_IN_SERVERS
        state = {"allow": "completed", "deny": None}.get(decision["verdict"], "unknown")
        if decision.get("reason") == NOT_DISPATCHED:
            state = "compensated"
        if self._reconciliation is not None:
            state = "reconciled"
        whole = not external or len(self._intents) == body["call"]["dispatch"]
        return {
            "request_id": body["call"]["request_id"],
            "state": state,
            "dispatches": len(self._intents) if external else 1,
            "custody_binding": NO_CLAIM if decision["verdict"] == "deny" else ORIGINAL if whole else READBACK,
            "leaves": [leaf.index for leaf in (*self._intents, *self._receipts)],
        }


def _refuse(why: str, check: str, file: str = "") -> NoReturn:
    raise VerifyError(why, check=check, file=file)
