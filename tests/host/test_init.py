"""`chio process init`: what it makes, and every document that it takes none of."""

from __future__ import annotations

import copy
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host.commands import accepted, chio, contents, refused
from tests.kernel.serving import State, all_of, child, config, grant, mailbox, policy
from verify.keys import Pins

pytestmark = pytest.mark.timeout(60)

Change = Callable[[dict[str, Any], dict[str, Any]], None]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A folder with the two documents, and nothing else in it."""
    write(tmp_path, *default())
    return tmp_path


def default() -> tuple[dict[str, Any], dict[str, Any]]:
    host = config(
        child("a", *all_of("jobs"), share=5000),
        child("aa", "send_jobs", parent="a", share=2000),
        child("b", "receive_jobs", share=5000),
        mailboxes=[mailbox("jobs"), mailbox("more")],
        max_calls=100,
        max_processes=10,
    )
    return host, policy(grant(), delegation_depth_limit=4)


def write(folder: Path, host: dict[str, Any], rules: dict[str, Any]) -> None:
    (folder / "host.json").write_text(json.dumps(host))
    (folder / "policy.yaml").write_text(json.dumps(rules))


def init(folder: Path, state: Path | None = None, *options: str) -> tuple[object, ...]:
    return ("process", "init", "--config", folder / "host.json", "--state", state or folder / "state", *options)


# --- what it makes ---------------------------------------------------------------------------------------------------


def test_init_makes_a_private_state_and_prints_what_an_auditor_pins(documents: Path) -> None:
    made = accepted(*init(documents))
    state = documents / "state"
    pins = Pins.from_file(str(state / "pins.json"))
    assert made == {
        "initialized": True, "processes": 4, "kernel_key": pins.kernel_key.hex, "runtime_id": pins.runtime_id,
    }  # fmt: skip
    assert (state / "kernel.pub").read_text() == pins.kernel_key.hex + "\n"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    modes = {name: stat.S_IMODE((state / name).stat().st_mode) for name in os.listdir(state)}
    assert modes.pop(".chio-blobs") == 0o700
    assert modes == dict.fromkeys(
        (
            "authority.db", "bootstrap.json", "host.json", "kernel.pub", "keys.json", "lock", "pins.json",
            "policy.yaml", "receipts.ndjson",
        ),
        0o600,
    )  # fmt: skip
    assert (state / "host.json").read_bytes() == (documents / "host.json").read_bytes()
    assert (state / "policy.yaml").read_bytes() == (documents / "policy.yaml").read_bytes()


def test_no_key_is_in_the_database_and_none_in_what_an_auditor_gets(documents: Path) -> None:
    accepted(*init(documents))
    state = documents / "state"
    seeds = [value for name, value in json.loads((state / "keys.json").read_text()).items() if name != "schema"]
    assert len(seeds) == 3
    for name in set(os.listdir(state)) - {"keys.json", ".chio-blobs"}:
        data = (state / name).read_bytes()
        for seed in seeds:
            assert seed.encode() not in data
            assert bytes.fromhex(seed) not in data


def test_the_bootstrap_is_signed_and_says_how_the_state_is_kept(documents: Path) -> None:
    accepted(*init(documents))
    state = State(documents)
    signed = json.loads((state.path / "bootstrap.json").read_text())
    body = signed["body"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    state.kernel_key.verify_record("bootstrap", text, signed["signature"])
    assert body["schema"] == "chio.bootstrap.v1"
    assert body["storage"] == {
        "filesystem": body["storage"]["filesystem"], "journal_mode": "wal", "synchronous": "full", "volatile": False,
    }  # fmt: skip
    ceilings = [(entry["process_id"], entry["parent_id"], entry["ceiling"]) for entry in body["processes"]]
    assert ceilings == [("root", None, 100), ("a", "root", 50), ("aa", "a", 20), ("b", "root", 50)]
    assert state.log().leaves == [("bootstrap", body)]


def test_each_capability_is_signed_names_its_parents_and_is_no_wider(documents: Path) -> None:
    rules = policy(grant(ttl=60, max_invocations=7), grant("send_more", operations=["invoke"]), max_capability_ttl=3600)
    write(documents, default()[0], rules)
    accepted(*init(documents))
    state = State(documents)
    tokens = dict(state.rows("SELECT id, capability FROM process"))
    ids = dict(state.rows("SELECT id, capability_id FROM process"))
    for name, parent in (("root", None), ("a", "root"), ("aa", "a"), ("b", "root")):
        token = json.loads(tokens[name])
        text = json.dumps(token["body"], sort_keys=True, separators=(",", ":")).encode()
        assert state.pins.authority_key.verify_record("capability", text, token["signature"]) == ids[name]
        assert token["body"]["parent_capability_id"] == (ids[parent] if parent else None)
        if parent:
            above = json.loads(tokens[parent])["body"]
            assert token["body"]["depth"] == above["depth"] + 1
            assert token["body"]["expires_ms"] <= above["expires_ms"]
            for entry in token["body"]["grants"]:
                source = above["grants"][entry["parent_grant"]]
                assert (source["server"], source["tool"] in ("*", entry["tool"])) == (entry["server"], True)
                assert set(entry["operations"]) <= set(source["operations"])
                assert entry["expires_ms"] <= source["expires_ms"]
                assert entry["max_invocations"] == source["max_invocations"] == 7


def test_two_states_of_the_same_documents_share_no_key_and_no_identity(documents: Path) -> None:
    first = accepted(*init(documents, documents / "one"))
    second = accepted(*init(documents, documents / "two"))
    pins = [json.loads((documents / name / "pins.json").read_text()) for name in ("one", "two")]
    for name in ("runtime_id", "kernel_key", "log_key", "authority_key"):
        assert pins[0][name] != pins[1][name]
    for name in ("config_digest", "policy_digest"):
        assert pins[0][name] == pins[1][name]
    assert first["runtime_id"] != second["runtime_id"]


def test_an_empty_folder_is_taken_and_made_private(documents: Path) -> None:
    state = documents / "state"
    state.mkdir()
    state.chmod(0o755)
    accepted(*init(documents))
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


# --- documents that are refused --------------------------------------------------------------------------------------


def put(path: str, value: Any) -> Change:
    """Set one member of the host config (`host.`…) or the policy (`rules.`…); `None` takes it out."""

    def change(host: dict[str, Any], rules: dict[str, Any]) -> None:
        first, *names, last = path.split(".")
        target: Any = {"host": host, "rules": rules}[first]
        for name in names:
            target = target[int(name) if name.isdigit() else name]
        key: Any = int(last) if last.isdigit() else last
        if value is None:
            del target[key]
        else:
            target[key] = value

    return change


def children(*entries: dict[str, Any], max_calls: int = 100, max_depth: int = 4) -> Change:
    def change(host: dict[str, Any], rules: dict[str, Any]) -> None:
        host["children"] = list(entries)
        host["limits"].update(max_calls=max_calls, max_depth=max_depth)

    return change


def tools(*entries: dict[str, Any]) -> Change:
    def change(host: dict[str, Any], rules: dict[str, Any]) -> None:
        rules["capabilities"]["default"]["tools"] = list(entries)

    return change


HOST = "host.json"
POLICY = "policy.yaml"
TOOL = "capabilities.default.tools[0]"
MODE = "rules.kernel.durable_admission_mode"
TOOLS = "rules.capabilities.default.tools"


# What is changed; then the file and the field that the line names, and a word of why or of the fix.
def server(**changes: Any) -> dict[str, Any]:
    return {"id": "s", "command": ["true"], **changes}


def servers(*entries: dict[str, Any]) -> Change:
    return put("host.servers", list(entries))


REFUSED: dict[str, tuple[Change, str, str, str]] = {
    "an unknown field": (put("host.more", 1), HOST, "more", "unknown"),
    "an unknown field of the limits": (put("host.limits.more", 1), HOST, "limits.more", "unknown"),
    "an unknown field of a route": (put("host.children.0.tools.0.more", 1), HOST, "children[0].tools[0].more", ""),
    "no schema": (put("host.schema", None), HOST, "schema", "missing"),
    "another schema": (put("host.schema", "chio.process.host.v2"), HOST, "schema", "v2"),
    "no policy": (put("host.policy", None), HOST, "policy", "missing"),
    "no limits": (put("host.limits", None), HOST, "limits", "missing"),
    "no max_calls": (put("host.limits.max_calls", None), HOST, "limits.max_calls", "missing"),
    "calls in text": (put("host.limits.max_calls", "10"), HOST, "limits.max_calls", "int"),
    "half a call": (put("host.limits.max_calls", 1.5), HOST, "limits.max_calls", "int"),
    "a true number of calls": (put("host.limits.max_calls", True), HOST, "limits.max_calls", "int"),
    "no calls": (put("host.limits.max_calls", 0), HOST, "limits.max_calls", "1"),
    "no processes": (put("host.limits.max_processes", 0), HOST, "limits.max_processes", "1"),
    "fewer processes than children": (put("host.limits.max_processes", 3), HOST, "limits.max_processes", "3 children"),
    "a depth of 65": (put("host.limits.max_depth", 65), HOST, "limits.max_depth", "64"),
    "a negative depth": (put("host.limits.max_depth", -1), HOST, "limits.max_depth", "0"),
    "a depth over the policy's": (put("host.limits.max_depth", 5), HOST, "limits.max_depth", "depth_limit 4"),
    "blobs over a GiB": (put("host.limits.state", {"max_bytes": 2**30 + 1}), HOST, "limits.state.max_bytes", "<="),
    "too many blobs": (put("host.limits.state", {"max_blobs": 16_385}), HOST, "limits.state.max_blobs", "16384"),
    "33 mailboxes": (put("host.mailboxes", [mailbox(f"m{n}") for n in range(33)]), HOST, "mailboxes", "32"),
    "a mailbox twice": (put("host.mailboxes", [mailbox("jobs")] * 2), HOST, "mailboxes[1]", "jobs"),
    "a mailbox with a slash": (put("host.mailboxes", [mailbox("a/b")]), HOST, "mailboxes[0].id", ""),
    "a mailbox of 33 letters": (put("host.mailboxes", [mailbox("m" * 33)]), HOST, "mailboxes[0].id", ""),
    "257 pending messages": (
        put("host.mailboxes.0.limits", {"max_pending_messages": 257}),
        HOST, "mailboxes[0].limits.max_pending_messages", "256"),
    "messages over 64 KiB": (
        put("host.mailboxes.0.limits", {"max_message_bytes": 65_537}),
        HOST, "mailboxes[0].limits.max_message_bytes", "65536"),
    "a server that is nowhere": (servers(server(command=["no such program"])), HOST, "servers[0]", "no such program"),
    "a server without a command": (servers(server(command=[])), HOST, "servers[0].command", "1"),
    "a server called as ours": (servers(server(id="chio-ipc")), HOST, "servers[0].id", "chio-ipc"),
    "a server twice": (servers(server(), server()), HOST, "servers[1]", "`s`"),
    "a server with a space": (servers(server(id="a b")), HOST, "servers[0].id", ""),
    "33 servers": (servers(*(server(id=f"s{n}") for n in range(33))), HOST, "servers", "32"),
    "no patience": (servers(server(request_timeout_seconds=0)), HOST, "servers[0].request_timeout_seconds", "1"),
    "an hour and more": (
        servers(server(request_timeout_seconds=3601)), HOST, "servers[0].request_timeout_seconds", "3600"),
    "an unknown profile": (servers(server(confinement={"profile": "none such"})), HOST, "servers[0]", "none such"),
    "an unknown field of a server": (servers(server(env={})), HOST, "servers[0]", "env"),
    "a child called root": (children(child("root")), HOST, "children[0].id", "root"),
    "a child twice": (children(child("a"), child("a")), HOST, "children[1].id", "`a`"),
    "a child with a space": (children(child("a b")), HOST, "children[0].id", ""),
    "a child of 65 letters": (children(child("a" * 65)), HOST, "children[0].id", ""),
    "a child before its parent": (children(child("a", parent="b"), child("b")), HOST, "children[0].parent", "`b`"),
    "a child of nobody": (children(child("a", parent="nobody")), HOST, "children[0].parent", "`nobody`"),
    "a child of its own": (children(child("a", parent="a")), HOST, "children[0].parent", "`a`"),
    "a child too deep": (
        children(child("a"), child("b", parent="a", share=1000), max_depth=1), HOST, "children[1].parent", "depth 2"),
    "a route twice": (children(child("a", "send_jobs", "send_jobs")), HOST, "children[0].tools[1]", "send_jobs"),
    "a route to no tool": (children(child("a", "send_nothing")), HOST, "children[0].tools[0]", "chio-ipc/send_nothing"),
    "a route to every tool": (children(child("a", "*")), HOST, "children[0].tools[0]", "chio-ipc/*"),
    "a route to no server": (
        children({**child("a"), "tools": [{"server_id": "billing", "tool_name": "charge"}]}),
        HOST, "children[0].tools[0]", "billing/charge"),
    "a route to a reserved server": (
        children({**child("a"), "tools": [{"server_id": "chio-process", "tool_name": "cancel"}]}),
        HOST, "children[0].tools[0]", "chio-process/cancel"),
    "a route outside the parent's scope": (
        children(child("a", "send_jobs"), child("b", "ack_jobs", parent="a")), HOST, "children[1].tools[0]", "`a`"),
    "no share": (children(child("a", share=0)), HOST, "children[0].budget_share_bps", "1"),
    "a share over the whole": (children(child("a", share=10_001)), HOST, "children[0].budget_share_bps", "10000"),
    "siblings with more than there is": (
        children(child("a", share=6000), child("b", share=4001)), HOST, "children[1].budget_share_bps", "10001"),
    "a child with more than its parent": (
        children(child("a", share=1000), child("b", parent="a", share=1001)),
        HOST, "children[1].budget_share_bps", "1000"),
    "a share that vanishes": (children(child("a", share=99)), HOST, "children[0].budget_share_bps", "less than one"),
    "a policy that is not there": (put("host.policy", "nothing.yaml"), "nothing.yaml", "", "No such file"),
    "a policy that is a folder": (put("host.policy", "."), "", "", "Is a directory"),
    "an unknown field of the policy": (put("rules.more", 1), POLICY, "more", "unknown"),
    "an unknown field of a grant": (put(f"{TOOLS}.0.more", 1), POLICY, f"{TOOL}.more", "unknown"),
    "no kernel": (put("rules.kernel", None), POLICY, "kernel", "missing"),
    "another admission mode": (put(MODE, "some"), POLICY, "kernel.durable_admission_mode", "some"),
    "no admission mode": (put(MODE, None), POLICY, "kernel.durable_admission_mode", "missing"),
    "no grants at all": (put(TOOLS, None), POLICY, "capabilities.default.tools", "missing"),
    "a grant that outlives its capability": (tools(grant(ttl=3601)), POLICY, f"{TOOL}.ttl", "3601"),
    "a grant that never lives": (tools(grant(ttl=0)), POLICY, f"{TOOL}.ttl", "1"),
    "a ttl in text": (tools(grant(ttl="60")), POLICY, f"{TOOL}.ttl", "int"),
    "no operation": (tools(grant(operations=[])), POLICY, f"{TOOL}.operations", "1"),
    "an unknown operation": (tools(grant(operations=["read"])), POLICY, f"{TOOL}.operations[0]", "read"),
    "an operation twice": (tools(grant(operations=["invoke", "invoke"])), POLICY, f"{TOOL}.operations", "twice"),
    "no invocation": (tools(grant(max_invocations=0)), POLICY, f"{TOOL}.max_invocations", "1"),
    "constraints of text": (tools(grant(constraints="object")), POLICY, f"{TOOL}.constraints", "object"),
    "a schema that is none": (tools(grant(constraints={"type": "thing"})), POLICY, f"{TOOL}.constraints", "thing"),
    "a schema elsewhere": (
        tools(grant(constraints={"$ref": "file:///etc/passwd"})), POLICY, f"{TOOL}.constraints", "outside the schema"),
    "every server": (tools(grant(server="*")), POLICY, f"{TOOL}.server", "one server"),
    "a server that is not there": (tools(grant(server="billing")), POLICY, TOOL, "billing/*"),
    "a tool that is not there": (tools(grant("send_nothing")), POLICY, TOOL, "chio-ipc/send_nothing"),
    "a parent that may not delegate": (tools(grant(operations=["invoke"])), HOST, "children[0].tools[0]", "delegate"),
    "a parent that may not invoke": (tools(grant(operations=["delegate"])), HOST, "children[0].tools[0]", "invoke"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "file", "field", "word"), REFUSED.values(), ids=REFUSED)
def test_a_bad_document_is_one_line_with_file_field_and_fix_and_nothing_is_made(
    documents: Path, change: Change, file: str, field: str, word: str
) -> None:
    host, rules = copy.deepcopy(default())
    change(host, rules)
    write(documents, host, rules)
    before = contents(documents)
    line = refused(*init(documents))
    assert f"({documents / file}, {field}" in line
    assert word in line.replace(str(documents), "")
    assert contents(documents) == before


TEXTS: dict[str, tuple[str, str | bytes, str, str]] = {
    "an empty config": (HOST, "", "", "not JSON"),
    "a config that is no JSON": (HOST, "{", "", "not JSON"),
    "a config that is a list": (HOST, "[]", "", "object"),
    "a config that is no UTF-8": (HOST, b"\xff{}", "", "UTF-8"),
    "a config with a comment": (HOST, "{} // a host", "", "not JSON"),
    "a config with a duplicate field": (
        HOST, '{"schema": 1, "limits": {"max_calls": 1, "max_calls": 2}}', "limits.max_calls", "duplicate"),
    "a config with a duplicate in a list": (HOST, '{"children": [{}, {"id": 1, "id": 2}]}', "children[1].id", ""),
    "a config over a MiB": (HOST, " " * (1024 * 1024 + 1), "", "1048577 bytes"),
    "a config of 10,000 levels": (HOST, "[" * 10_000 + "]" * 10_000, "", "deep"),
    "a config with a number beyond 2^53": (HOST, '{"limits": {"max_calls": 9007199254740993}}', "", "2^53"),
    "an empty policy": (POLICY, "", "", "object"),
    "a policy that is no YAML": (POLICY, "kernel: {", "line 1", ""),
    "a policy that is no UTF-8": (POLICY, b"\xff\xfe\x00", "", ""),
    "a policy with a duplicate key": (POLICY, "kernel: {}\ncapabilities: {}\nkernel: {}\n", "line 3", "kernel"),
    "a policy with an alias": (POLICY, "kernel: &k {}\ncapabilities: *k\n", "line 2", "alias"),
    "a policy with a merge key": (POLICY, "kernel: {<<: {}}\n", "line 1", "merge"),
    "a policy with a tag": (POLICY, "kernel: !!python/object/apply:os.system [true]\n", "line 1", ""),
    "two policies in one": (POLICY, "kernel: {}\n---\nkernel: {}\n", "line 2", ""),
    "a policy of 10,000 levels": (POLICY, "[" * 10_000 + "]" * 10_000, "", ""),
    "a policy over a MiB": (POLICY, "#" * (1024 * 1024 + 1), "", "1048577 bytes"),
    "a policy with keys that are lists": (POLICY, "? [a]\n: 1\n", "", ""),
    "a policy that is a date": (POLICY, "2026-11-29", "", ""),
}  # fmt: skip


@pytest.mark.parametrize(("file", "text", "field", "word"), TEXTS.values(), ids=TEXTS)
def test_a_document_that_cannot_be_read_is_one_line_with_its_place_and_nothing_is_made(
    documents: Path, file: str, text: str | bytes, field: str, word: str
) -> None:
    (documents / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    before = contents(documents)
    line = refused(*init(documents))
    assert f"{documents}/{file}" in line
    assert field in line
    assert word in line
    assert contents(documents) == before


def test_what_a_document_says_never_reaches_the_terminal_raw(documents: Path) -> None:
    """A name with an escape sequence or a newline in it is shown, not obeyed, and the line stays one."""
    host, rules = default()
    host["\x1b[2J\nchio: all is well\u202e"] = 1
    write(documents, host, rules)
    line = refused(*init(documents))
    assert "all is well" in line


def test_a_config_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/host.json" in refused(*init(tmp_path))
    assert contents(tmp_path).keys() == {"."}


@pytest.mark.parametrize("missing", ["--config", "--state"])
def test_a_missing_option_is_wrong_usage(documents: Path, missing: str) -> None:
    arguments = list(init(documents))
    at = arguments.index(missing)
    assert chio(*arguments[:at], *arguments[at + 2 :]).exit_code == 2


# --- places that are refused -----------------------------------------------------------------------------------------


def a_file(state: Path) -> None:
    state.write_text("mine")


def a_folder_with_a_file(state: Path) -> None:
    state.mkdir()
    (state / "mine").write_text("mine")


def a_link_to_an_empty_folder(state: Path) -> None:
    (state.parent / "elsewhere").mkdir()
    state.symlink_to("elsewhere")


def a_link_to_nothing(state: Path) -> None:
    state.symlink_to("elsewhere")


PLACES = [a_file, a_folder_with_a_file, a_link_to_an_empty_folder, a_link_to_nothing]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__.replace("_", " "))
def test_a_place_that_is_taken_is_refused_and_left_as_it_is(documents: Path, place: Callable[[Path], None]) -> None:
    place(documents / "state")
    before = contents(documents)
    assert f"{documents}/state" in refused(*init(documents))
    assert contents(documents) == before


def test_a_state_is_never_made_over(documents: Path) -> None:
    accepted(*init(documents))
    before = contents(documents)
    assert "it holds a state already" in refused(*init(documents))
    assert contents(documents) == before


def test_a_place_whose_parent_is_not_there_is_refused(documents: Path) -> None:
    before = contents(documents)
    assert "parent" in refused(*init(documents, documents / "none" / "state"))
    assert contents(documents) == before


@pytest.fixture
def volatile() -> Iterator[Path]:
    """A folder on a tmpfs of the machine's; what is there is left alone."""
    with open("/proc/self/mounts") as mounts:
        if not any(line.split()[1:3] == ["/dev/shm", "tmpfs"] for line in mounts):
            pytest.skip("/dev/shm is no tmpfs here")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="chio-test-"))
    yield folder
    shutil.rmtree(folder)


def test_a_tmpfs_is_refused_unless_the_operator_accepts_the_loss_which_the_bootstrap_then_says(
    documents: Path, volatile: Path
) -> None:
    line = refused(*init(documents, volatile / "state"))
    assert f"{volatile}/state" in line
    assert "tmpfs" in line
    assert "--allow-volatile" in line
    assert contents(volatile).keys() == {"."}
    accepted(*init(documents, volatile / "state", "--allow-volatile"))
    bootstrap = json.loads((volatile / "state" / "bootstrap.json").read_text())
    assert bootstrap["body"]["storage"]["filesystem"] == "tmpfs"
    assert bootstrap["body"]["storage"]["volatile"] is True


def test_a_state_that_was_durable_is_not_served_from_a_tmpfs(documents: Path, volatile: Path) -> None:
    accepted(*init(documents))
    shutil.copytree(documents / "state", volatile / "state")
    plan = documents / "plan.json"
    worker = {"process": "a", "command": ["true"], "timeout_seconds": 5}
    plan.write_text(json.dumps({"schema": "chio.process.run.v2", "max_parallel": 1, "workers": [worker]}))
    before = contents(volatile)
    line = refused("process", "run", "--state", volatile / "state", "--plan", plan)
    assert "--allow-volatile" in line
    # It was looked into, through files of SQLite's own that are gone again.
    assert {name: entry[2] for name, entry in contents(volatile).items()} == {
        name: entry[2] for name, entry in before.items()
    }
