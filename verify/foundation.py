"""What the judgement of a run stands on: leaf 0, tokens and texts, each held against what signed or pinned it."""

from dataclasses import dataclass
from typing import Any

from verify.authority import Authority, read_authority, require_servers, require_tree
from verify.bundle import Bundle
from verify.documents import Documents
from verify.keys import Pins, PublicKey
from verify.leaves import LogLeaf, read_leaf_text
from verify.verdict import Verdict, VerifyError


@dataclass(frozen=True, slots=True)
class Trust:
    """What the auditor holds: the kernel's key, the run's id, and whatever else came with them."""

    kernel_key: PublicKey
    runtime_id: str
    pins: Pins | None = None
    checkpoints: tuple[tuple[str, bytes], ...] = ()  # (file, note) kept or witnessed elsewhere

    @classmethod
    def of_pins(cls, pins: Pins, checkpoints: tuple[tuple[str, bytes], ...] = ()) -> "Trust":
        return cls(pins.kernel_key, pins.runtime_id, pins, checkpoints)


@dataclass(frozen=True, slots=True)
class Foundation:
    """`config` and `plan` are null where they are not there or cannot be read."""

    bootstrap: dict[str, Any]
    authority: Authority
    documents: Documents
    config: dict[str, Any] | None
    plan: dict[str, Any] | None


def read_foundation(bundle: Bundle, trust: Trust, verdict: Verdict) -> Foundation:
    """Leaf 0, the tokens and the texts. Without a bootstrap that can be read there is nothing to go on with."""
    path = bundle.path
    first = next(iter(bundle.sections["leaves"]), None)
    if type(first) is not bytes:
        raise VerifyError("there is no leaf 0", check="bootstrap", place="leaf 0")
    try:
        leaf = read_leaf_text(first)
        if leaf.kind != "bootstrap":
            raise VerifyError(f"it is of type {leaf.kind}", check="bootstrap")
        require_servers(leaf.body)
    except VerifyError as error:
        raise error.located("", "leaf 0") from error
    bootstrap = leaf.body
    verdict.run("bootstrap", lambda: _certified(leaf, bundle, trust), file=path)
    documents = Documents.read(bundle.sections["documents"].load())
    found: dict[str, Any] = {"config": None, "plan": None}

    def pinned() -> None:
        found["config"] = documents.read_config()
        found["plan"] = documents.read_plan()
        documents.require_pinned(bootstrap)

    verdict.run("documents", pinned, file=path)
    texts = bundle.sections["capabilities"].load()
    if not all(type(text) is bytes for text in texts):
        raise VerifyError("a token that is no byte string", check="capabilities")
    authority = read_authority(bootstrap, texts, found["config"])
    verdict.passes("capabilities")
    config = found["config"]
    if config is None:
        verdict.leave("tree", "there is no config to hold it against", file=path)
    else:
        verdict.run("tree", lambda: require_tree(authority, config), file=path)
    return Foundation(bootstrap, authority, documents, config, found["plan"])


def _certified(leaf: LogLeaf, bundle: Bundle, trust: Trust) -> None:
    body, runtime_id = leaf.body, trust.runtime_id
    trust.kernel_key.verify_record("bootstrap", leaf.body_text, str(leaf.signature))
    if body["kernel_key"] != trust.kernel_key.hex:
        raise VerifyError("the bootstrap names another kernel key", check="bootstrap", place="leaf 0")
    if {body["runtime_id"], bundle.manifest["runtime_id"]} != {runtime_id}:
        raise VerifyError("it is of a run that is not the pinned one", check="runtime_pin", place="leaf 0")
    if body["log_origin"] != f"chio.invalid/{runtime_id}":
        raise VerifyError("the log is of another run", check="runtime_pin", place="leaf 0")
    if body["created_ms"] != body["time_ms"]:
        raise VerifyError("it was created at another time than its own", check="bootstrap", place="leaf 0")
    pins = trust.pins
    if pins is not None:
        for name, pinned in (
            ("log_key", pins.log_key.hex),
            ("authority_key", pins.authority_key.hex),
            ("config_digest", pins.config_digest),
            ("policy_digest", pins.policy_digest),
        ):
            if body[name] != pinned:
                raise VerifyError(f"its `{name}` is not the pinned one", check="bootstrap", place="leaf 0")
