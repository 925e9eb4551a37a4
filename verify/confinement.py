"""Each launch record against the profile that it names: whether what was asked for is what the profile says, and held.

A record is the host's word, signed by the kernel. It says of each layer how that is known: `observed` from outside,
`installed` and not to be read back, `unobservable`, or `absent`. These stay apart in what is told here. What a host
cannot do without being caught is to run a program with less than its profile and say so: fewer fields, another source,
a weaker value. What it can do is to lie in every field alike; nothing in a file shows that.

A layer that the operator gave up by name (`--without`), and one that the profile calls best-effort and the machine
lacks, is no contradiction. It is named in the verdict, and `--require confined` does not hold.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from verify import shape
from verify.documents import LIMITS, Profiles
from verify.findings import Findings
from verify.history import Leaf
from verify.verdict import VerifyError

LAYERS = ("cgroup", "distinct-uids", "landlock", "seccomp")
_NAMESPACES = dict.fromkeys(("user", "pid", "mnt", "net", "ipc", "uts", "cgroup"), "own")
_DESCRIPTORS = {"0": "given", "1": "given", "2": "given"}
_FILE_RIGHTS = (
    "execute", "write_file", "read_file", "read_dir", "remove_dir", "remove_file", "make_char", "make_dir", "make_reg",
    "make_sock", "make_fifo", "make_block", "make_sym", "refer", "truncate", "ioctl_dev",
)  # fmt: skip
_SCOPES = ("abstract_unix_socket", "signal")
_TCP_RIGHTS = ("bind_tcp", "connect_tcp")
_PRIVATE_MOUNTS = ("/proc", "/dev/shm", "/tmp")  # made new for the attempt, and its own to write
_INSIDE_ID = 1000
_ABSENT = "absent"

_WORKER_ASKED = shape.record(
    {
        "command": shape.array(shape.string),
        "cwd": shape.text,
        "profile": shape.text,
        "profile_sha256": shape.nullable(shape.digest),
        "profile_resolved_sha256": shape.nullable(shape.digest),
        "timeout_seconds": shape.at_least(1),
        "limits": shape.object_of_anything,
        "without": shape.array(shape.one_of(*LAYERS)),
    }
)
_SERVER_ASKED = shape.record(
    {
        "command": shape.array(shape.string),
        "profile": shape.text,
        "profile_sha256": shape.digest,
        "profile_resolved_sha256": shape.digest,
        "without": shape.array(shape.one_of(*LAYERS)),
    }
)

_LANDLOCK = shape.record({"rights": shape.array(shape.text), "sha256": shape.digest})


class Confinement:
    """Judges each launch record. Contradictions go to `findings`."""

    CHECKS = ("confinement", "plan")

    def __init__(
        self, profiles: Profiles, plan: dict[str, Any] | None, config: dict[str, Any] | None, findings: Findings
    ) -> None:
        self._profiles = profiles
        self._findings = findings
        plan = plan or {"plan": {"workers": []}, "resolved": []}
        self._workers = {worker["process"]: worker for worker in plan["plan"]["workers"]}
        self._resolved = {entry.get("process"): entry for entry in plan["resolved"]}
        servers = config.get("servers", []) if config else []
        self._servers = {server["id"]: server for server in servers}
        self.sources: dict[str, set[str]] = {"observed": set(), "installed": set(), "unobservable": set()}
        self.weaker: dict[str, int] = {}  # what is missing, and in how many launches
        self.launches = 0

    def read(self, leaf: Leaf) -> bool:
        """One launch record; whether all that was asked for held when it was observed."""
        body, asked = leaf.body, leaf.body["asked"]
        self.launches += 1
        server = body["process_id"] is None
        try:
            (_SERVER_ASKED if server else _WORKER_ASKED)(asked, "asked")
            fields = _fields(body["fields"])
        except VerifyError as error:
            self._findings.refused("confinement", error, leaf.place)
            return False
        self._planned(leaf, server)
        for name, field in fields.items():
            if field["source"] in self.sources:
                self.sources[field["source"]].add(name)
        if not body["confined"]:
            self._unconfined(leaf, asked, server)
            return all(field["asked"] == field["value"] for field in fields.values() if field["source"] == "observed")
        profile = self._profiles.of(asked, leaf.place)
        if profile is not None:
            for why in _contradictions(fields, body, profile, self._writable(body), self._visible(body)):
                self._findings.fail("confinement", why, leaf.place)
            for missing in _missing(fields, asked["without"]):
                self.weaker[missing] = self.weaker.get(missing, 0) + 1
        return not any(_unmet(fields))

    def _visible(self, body: dict[str, Any]) -> list[str] | None:
        """The paths that the plan resolved to be seen; None where that is not known (a tool server's)."""
        binds = self._resolved.get(body["process_id"], {}).get("binds") if body["process_id"] is not None else None
        return binds if isinstance(binds, list) else None

    def _unconfined(self, leaf: Leaf, asked: dict[str, Any], server: bool) -> None:
        self.weaker["every layer"] = self.weaker.get("every layer", 0) + 1
        if server or asked["profile"] != "none" or asked["profile_sha256"] is not None:
            self._findings.fail("confinement", "it ran unconfined, and its profile is not `none`", leaf.place)

    def _writable(self, body: dict[str, Any]) -> int:
        """How many mounts beside the private ones it may write to: its exports directory; what a server was given."""
        if body["process_id"] is None:
            confinement = self._servers.get(body["server"], {}).get("confinement", {})
            return len(confinement.get("write", []))
        worker = self._workers.get(body["process_id"])
        return 1 if worker and worker["confinement"]["exports"] is not None else 0

    def _planned(self, leaf: Leaf, server: bool) -> None:
        """What was asked for is what the frozen plan, or the host config, asks for."""
        body, asked = leaf.body, leaf.body["asked"]
        if server:
            known = self._servers.get(body["server"], {})
            profile = known.get("confinement", {}).get("profile", "tool-server")
            if (known.get("command"), _name_of(profile)) != (asked["command"], asked["profile"]):
                self._findings.fail("plan", "a tool server's command or profile is not the config's", leaf.place)
            return
        worker = self._workers.get(body["process_id"])
        resolved = self._resolved.get(body["process_id"], {})
        if worker is None:
            self._findings.fail(
                "plan", f"a launch of `{body['process_id']}`, which the plan has no worker for", leaf.place
            )
            return
        if asked["profile"] != _name_of(worker["confinement"]["profile"]):
            self._findings.fail("plan", "`profile` of the launch is not the plan's", leaf.place)
        for name, planned in (
            ("command", worker["command"]),
            ("cwd", worker["cwd"]),
            ("timeout_seconds", worker["timeout_seconds"]),
            ("limits", worker["limits"]),
            ("profile_sha256", resolved.get("profile_sha256")),
        ):
            if asked[name] != planned:
                self._findings.fail("plan", f"`{name}` of the launch is not the plan's", leaf.place)
        if body["executable_sha256"] not in ("", resolved.get("program_sha256")):
            self._findings.fail("plan", "it ran another executable than the plan resolved to", leaf.place)


def _name_of(profile: Any) -> str:
    """A profile's name as a launch record has it: of one given by a path, the file's without its ending."""
    return str(profile).rpartition("/")[2].removesuffix(".yaml")


def _fields(listed: list[dict[str, Any]]) -> Mapping[str, dict[str, Any]]:
    fields = {field["name"]: field for field in listed}
    if len(fields) != len(listed):
        raise VerifyError("a field twice", check="confinement")
    return fields


def _unmet(fields: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Observed fields that were not what was asked for: then the worker was killed before its first instruction."""
    for name, field in fields.items():
        if field["source"] == "observed" and field["asked"] != field["value"] and name != "id_mapped_mounts":
            yield name


def _missing(fields: Mapping[str, dict[str, Any]], without: list[str]) -> Iterator[str]:
    """What a launch did without, by the operator's decision or for want of it on the machine."""
    for layer in without:
        yield f"{layer} (given up by name)"
    for name, field in fields.items():
        if field["source"] == _ABSENT and name not in without:
            yield f"{name} (not to be had)"
    landlock = fields.get("landlock")
    if landlock is not None and landlock["source"] != _ABSENT:
        lacking = sorted(_rights(landlock["asked"]) - _rights(landlock["value"]))
        yield from (f"landlock's {right} (not to be had)" for right in lacking)


def _contradictions(
    fields: Mapping[str, dict[str, Any]],
    body: dict[str, Any],
    profile: dict[str, Any],
    writable: int,
    visible: list[str] | None,
) -> Iterator[str]:
    """What the record says of itself that its profile does not allow."""
    asked = body["asked"]
    limits = {**profile["limits"], **asked.get("limits", {})}
    without = asked["without"]
    if set(limits) != set(LIMITS):
        yield "a limit that is not known"
        return
    if asked["profile"] != profile["name"]:
        yield "the profile's name is another"
    for name, wanted in _expected(profile, limits, asked).items():
        yield from _held(fields, name, *wanted)
    for name, field in fields.items():
        if field["source"] == "installed" and name != "landlock" and field["asked"] != field["value"]:
            yield f"`{name}` is not what was asked for"
    yield from _identity(fields, without)
    yield from _mounts(fields, writable, visible)
    yield from _executable(fields, body)
    yield from _seccomp(fields, profile, without)
    yield from _landlock(fields, profile, without)
    yield from _cgroup(fields, profile, limits, without)


def _expected(profile: dict[str, Any], limits: dict[str, Any], asked: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """(what has to be asked for, how it has to be known) of each field that follows from the profile alone."""
    expected: dict[str, tuple[Any, str]] = {
        "descriptors": (_DESCRIPTORS, "observed"),
        "environment": (sorted(profile["environment"]), "observed"),
        "rlimits": (
            {"open_files": limits["open_files"], "file_bytes": limits["file_bytes"], "core_bytes": 0},
            "observed",
        ),
        "capabilities": ([0] * 5, "observed"),
        "no_new_privs": (1, "observed"),
        "pid_inside": (2, "observed"),
        "namespaces": (_NAMESPACES, "observed"),
        "network_interfaces": (["lo"], "observed"),
        "local_addresses": (["127.0.0.1"] if profile["network"] == "loopback" else [], "observed"),
        "hostname": (profile["hostname"], "installed"),
        "securebits": ("locked", "installed"),
        "session_keyring": ("own", "installed"),
        "parent_death_signal": (9, "installed"),
        "scratch_bytes": (limits["scratch_bytes"], "installed"),
        "output_bytes": (limits["output_bytes"], "installed"),
    }
    if "timeout_seconds" in asked:
        expected["timeout_ms"] = (asked["timeout_seconds"] * 1000, "installed")
    return expected


def _held(fields: Mapping[str, dict[str, Any]], name: str, wanted: Any, *sources: str) -> Iterator[str]:
    field = fields.get(name)
    if field is None:
        yield f"`{name}` is missing"
    elif field["source"] not in sources:
        yield f"`{name}` is {field['source']}, where it has to be {' or '.join(sources)}"
    elif field["asked"] != wanted:
        yield f"`{name}` was asked to be weaker than, or another than, the profile's"


def _identity(fields: Mapping[str, dict[str, Any]], without: list[str]) -> Iterator[str]:
    """A uid and gid that are not root's, alone in their map, with no other group."""
    ids: list[Any] = []
    for name in ("uid", "gid"):
        found = fields.get(name, {"asked": None})["asked"]
        own = found[0] if isinstance(found, list) and len(found) == 4 else None
        if type(own) is not int or own <= 0:
            yield f"`{name}` is missing, or is root's"
            return
        ids.append(own)
        yield from _held(fields, name, [own] * 4, "observed")
    yield from _held(fields, "id_maps", [[_INSIDE_ID, own, 1] for own in ids], "observed")
    if "distinct-uids" not in without:
        yield from _held(fields, "groups", [], "observed")
        if "distinct-uids" in fields:
            yield "`distinct-uids` is absent, and nobody gave it up"


def _mounts(fields: Mapping[str, dict[str, Any]], writable: int, visible: list[str] | None) -> Iterator[str]:
    """Nothing can be written but what is private, and as many further places as plan or config name; of the machine,
    nothing is seen but what the plan resolved to. What covers a state (a mask) lets nothing run, nor does a socket."""
    field = fields.get("mounts")
    if field is None or field["source"] != "observed" or not isinstance(field["asked"], dict):
        yield "`mounts` is missing or not observed"
        return
    others = 0
    for path, options in field["asked"].items():
        if not isinstance(options, list) or "nosuid" not in options or not ("ro" in options or "rw" in options):
            yield f"the mount {path[:80]} is neither read-only nor known to be writable, or takes set-id bits"
            continue
        if "nodev" not in options and "noexec" not in options:
            yield f"the mount {path[:80]} takes devices and programs"
        if "rw" in options:
            others += path not in _PRIVATE_MOUNTS
        elif visible is not None and "noexec" not in options and path != "/" and path not in visible:
            yield f"the mount {path[:80]} is none that the plan resolved to"
    if "/" not in field["asked"] or others > writable:
        yield f"{others} writable mounts, where {writable} were given"


def _executable(fields: Mapping[str, dict[str, Any]], body: dict[str, Any]) -> Iterator[str]:
    field = fields.get("executable")
    if field is None or field["source"] != "observed" or not isinstance(field["value"], dict):
        yield "`executable` is missing or not observed"
    elif field["asked"] == field["value"] and field["value"].get("sha256") != body["executable_sha256"]:
        yield "the digest of the executable is not that of the program that ran"


def _seccomp(fields: Mapping[str, dict[str, Any]], profile: dict[str, Any], without: list[str]) -> Iterator[str]:
    if "seccomp" in without:
        yield from _given_up(fields, "seccomp")
        return
    yield from _held(fields, "seccomp", {"mode": 2, "filters": 1}, "observed")
    program = fields.get("seccomp_program")
    if program is None or program["source"] not in ("observed", "installed"):
        yield "`seccomp_program` is missing"
    elif not isinstance(program["asked"], dict) or program["asked"].get("list") != profile["seccomp"]["list"]:
        yield "the filter is of another list than the profile's"


def _landlock(fields: Mapping[str, dict[str, Any]], profile: dict[str, Any], without: list[str]) -> Iterator[str]:
    if "landlock" in without:
        yield from _given_up(fields, "landlock")
        return
    field = fields.get("landlock")
    if field is not None and field["source"] == _ABSENT and profile["landlock"] == "best-effort":
        return
    if field is None or field["source"] != "installed":
        yield "`landlock` is missing or not installed"
        return
    wanted = {*_FILE_RIGHTS, *_SCOPES, *(_TCP_RIGHTS if profile["network"] == "none" else ())}
    rights = _rights(field["value"])
    if not all(_is_landlock(said) for said in (field["asked"], field["value"])):
        yield "`landlock` is not names of rights and the digest of its rules"
    elif _rights(field["asked"]) != wanted or not rights <= wanted:
        yield "Landlock was asked to govern less than the profile's, or other things"
    elif profile["landlock"] == "required" and rights != wanted:
        yield "Landlock governs less than was asked for, and the profile requires all of it"
    elif _digest_of(field["asked"]) != _digest_of(field["value"]):
        yield "Landlock's rules are not those that were asked for"


def _is_landlock(said: Any) -> bool:
    try:
        _LANDLOCK(said, "landlock")
    except VerifyError:
        return False
    return len(_rights(said)) == len(said["rights"])


def _digest_of(said: Any) -> Any:
    return said.get("sha256") if isinstance(said, dict) else None


def _rights(said: Any) -> set[str]:
    """The rights that a side of the field names; none if it is not of that form."""
    listed = said.get("rights") if isinstance(said, dict) else None
    return {right for right in listed if isinstance(right, str)} if isinstance(listed, list) else set()


def _cgroup(
    fields: Mapping[str, dict[str, Any]], profile: dict[str, Any], limits: dict[str, Any], without: list[str]
) -> Iterator[str]:
    if "cgroup" in without:
        yield from _given_up(fields, "cgroup")
        return
    field = fields.get("cgroup")
    if field is not None and field["source"] == _ABSENT and profile["cgroup"] == "best-effort":
        return
    if field is None or field["source"] != "observed":
        yield "`cgroup` is missing or not observed"
        return
    counted = {name: limits[name] for name in ("memory_bytes", "pids", "cpu_quota_percent")}
    yield from _held(fields, "cgroup_limits", counted, "observed")
    yield from _held(fields, "cpu_seconds", limits["cpu_seconds"], "installed")
    yield from _held(fields, "swap_bytes", 0, "observed", "unobservable")


def _given_up(fields: Mapping[str, dict[str, Any]], layer: str) -> Iterator[str]:
    if fields.get(layer, {"source": None})["source"] != _ABSENT:
        yield f"`{layer}` was given up by name, and the record does not say that it is absent"
