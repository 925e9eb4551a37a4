"""The commands as a person and a program meet them: real processes, real terminals."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import verify
from tests.verify import observed, signed
from verify.verdict import Exit

ROOT = Path(__file__).parents[2]
PACKAGE = Path(verify.__file__).parent
_RECEIPT_VERIFY = "import sys; sys.path.insert(0, {root!r}); from verify.cli import {name}; {name}()"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = _RECEIPT_VERIFY.format(root=str(ROOT), name=name)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def run_on_terminal(name: str, *arguments: str) -> tuple[int, str]:
    code = _RECEIPT_VERIFY.format(root=str(ROOT), name=name)
    ours, theirs = os.openpty()
    try:
        status = subprocess.run([sys.executable, "-c", code, *arguments], stdout=theirs, timeout=60, check=False)
    finally:
        os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # EIO is how a Linux terminal ends when its other side is closed
        pass
    finally:
        os.close(ours)
    return status.returncode, shown.decode().replace("\r\n", "\n")


@pytest.fixture
def receipts(tmp_path: Path) -> str:
    first, second = signed.receipt(signed.a_body(1)), signed.receipt(signed.a_body(2))
    return signed.write(tmp_path, first, second, first)


@pytest.fixture
def withheld(tmp_path: Path) -> str:
    return signed.write(tmp_path, signed.receipt(), signed.receipt(shown={"output_salt": None}))


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "kernel.pub"
    path.write_text(signed.KERNEL_KEY + "\n")
    return str(path)


def test_receipt_verify_prints_the_contracts_document_alone(receipts: str, key_file: str) -> None:
    done = run("receipt_verify", "--input", receipts, "--trusted-kernel-pubkey", key_file)
    assert (done.returncode, done.stderr) == (Exit.VERIFIED, "")
    assert json.loads(done.stdout) == {
        "schema": "chio.receipt.signatures.v1",
        "receipts_verified": 2,
        "trusted_kernel_key": signed.KERNEL_KEY,
        "checks": ["signature", "signer_pin", "action_parameter_hash"],
    }
    assert done.stdout.count("\n") == 1


def test_receipt_verify_indents_on_a_terminal(receipts: str) -> None:
    code, shown = run_on_terminal("receipt_verify", "--input", receipts, "--trusted-kernel-pubkey", signed.KERNEL_KEY)
    assert code == Exit.VERIFIED
    assert shown.startswith('{\n  "schema"')
    assert json.loads(shown)["receipts_verified"] == 2


def test_a_refused_file_prints_one_line_on_stderr_and_nothing_on_stdout(receipts: str) -> None:
    done = run("receipt_verify", "--input", receipts, "--trusted-kernel-pubkey", signed.OTHER_KEY)
    assert (done.returncode, done.stdout) == (Exit.REFUSED, "")
    assert done.stderr.startswith("chio: ")
    assert f"({receipts}, line 1, check signer_pin; " in done.stderr
    assert done.stderr.count("\n") == 1


def test_withheld_arguments_end_with_three_and_say_so(withheld: str, key_file: str) -> None:
    done = run("receipt_verify", "--input", withheld, "--trusted-kernel-pubkey", key_file)
    assert done.returncode == Exit.UNCHECKED
    assert json.loads(done.stdout)["checks"] == ["signature", "signer_pin"]
    assert "1 of 2 lines are withheld" in done.stderr
    assert "line 2" in done.stderr


def test_chio_verify_receipts_takes_pins_and_prints_json_when_piped(receipts: str, tmp_path: Path) -> None:
    done = run("main", "receipts", receipts, "--pins", signed.pins(tmp_path))
    assert done.returncode == Exit.VERIFIED
    told = json.loads(done.stdout)
    assert (told["schema"], told["subject"], told["result"]) == ("chio.verdict.v1", "receipts", "verified")
    assert told["figures"] == {"receipts_verified": 2, "lines": 3}
    states = {check["name"]: check["state"] for check in told["checks"]}
    assert states == {
        **dict.fromkeys(("text", "canonical", "fields", "signer_pin", "signature"), "passed"),
        **dict.fromkeys(("action_parameter_hash", "runtime_pin"), "passed"),
        **dict.fromkeys(("output", "receipt_log_inclusion"), "unchecked"),
    }


def test_chio_verify_receipts_refuses_another_run_than_the_pinned(receipts: str, tmp_path: Path) -> None:
    pins = signed.pins(tmp_path, runtime_id="00000000-0000-4000-8000-000000000000")
    done = run("main", "receipts", receipts, "--pins", pins)
    assert done.returncode == Exit.REFUSED
    assert done.stderr.startswith("chio-verify: ")
    assert "runtime_pin" in done.stderr
    assert json.loads(done.stdout)["result"] == "refused"


def test_a_required_check_that_was_not_made_ends_with_three(receipts: str) -> None:
    key = ("--trusted-kernel-pubkey", signed.KERNEL_KEY)
    done = run("main", "receipts", receipts, *key, "--require", "receipt_log_inclusion")
    assert done.returncode == Exit.UNCHECKED
    assert done.stderr.startswith("chio-verify: receipts alone do not show that none is missing")
    made = run("main", "receipts", receipts, *key, "--require", "signature")
    assert made.returncode == Exit.VERIFIED


def test_requiring_what_no_check_is_called_is_wrong_usage(receipts: str) -> None:
    done = run("main", "receipts", receipts, "--trusted-kernel-pubkey", signed.KERNEL_KEY, "--require", "nonsense")
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    assert "there is action_parameter_hash, canonical" in done.stderr


def test_a_response_is_held_against_the_receipt_that_the_file_has(tmp_path: Path) -> None:
    said = json.loads(observed.observation_body(observed.parts("completed"))["response_json"])
    path = signed.write(tmp_path, said["receipt_json"].encode())
    response = tmp_path / "response.json"
    key = ("--trusted-kernel-pubkey", observed.key_of(observed.KERNEL))
    response.write_bytes(signed.jcs(said))
    done = run("main", "receipts", path, *key, "--response", str(response))
    assert done.returncode == Exit.VERIFIED, done.stderr
    assert "What each given response released is what its receipt commits to, and nothing more" in done.stdout
    response.write_bytes(signed.jcs({**said, "output": {"kind": "value", "value": "something else"}}))
    done = run("main", "receipts", path, *key, "--response", str(response))
    assert done.returncode == Exit.REFUSED
    assert f"({response}, response_binding, check output; " in done.stderr
    response.write_text(observed.observation_body(observed.parts("unknown"))["response_json"])
    done = run("main", "receipts", path, *key, "--response", str(response))
    assert "check response_receipt" in done.stderr


def test_chio_verify_receipts_speaks_to_people_on_a_terminal_unless_asked_for_json(receipts: str) -> None:
    key = ("--trusted-kernel-pubkey", signed.KERNEL_KEY)
    code, shown = run_on_terminal("main", "receipts", receipts, *key)
    assert code == Exit.VERIFIED
    assert shown.startswith("receipts: verified\n\nProved:\n")
    assert "2 receipts in 3 lines are signed" in shown
    told = json.loads(run_on_terminal("main", "receipts", receipts, *key, "--json")[1])
    assert told["figures"]["receipts_verified"] == 2


def test_people_are_told_when_arguments_were_withheld(withheld: str) -> None:
    code, shown = run_on_terminal("main", "receipts", withheld, "--trusted-kernel-pubkey", signed.KERNEL_KEY)
    assert code == Exit.UNCHECKED
    assert shown.startswith("receipts: incomplete")
    assert "unchecked  action_parameter_hash  the arguments of 1 of 2 lines are withheld, line 2 first" in shown


@pytest.mark.parametrize("options", [(), ("--pins", "p", "--trusted-kernel-pubkey", "k")])
def test_not_exactly_one_source_of_keys_is_wrong_usage(receipts: str, options: tuple[str, ...]) -> None:
    done = run("main", "receipts", receipts, *options)
    assert done.returncode == Exit.USAGE


@pytest.mark.parametrize("arguments", [("--help",), ("receipts", "--help")])
def test_help_costs_no_cryptography_and_shows_an_example_or_the_statuses(arguments: tuple[str, ...]) -> None:
    done = run("main", *arguments)
    assert done.returncode == 0
    assert "Example: chio-verify receipts" in done.stdout or "Exit status: 0 verified" in done.stdout


def test_importing_the_commands_loads_nothing_that_verifies() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import verify.cli; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    modules = set(loaded.stdout.split())
    assert "verify.cli" in modules
    assert not modules & {"nacl", "rfc8785", "hashlib", "verify.keys", "verify.receipts", "verify.canonical"}


def test_the_package_stands_on_the_standard_library_and_three_others() -> None:
    allowed = {*sys.stdlib_module_names, "verify", "nacl", "rfc8785", "click"}
    modules = list(PACKAGE.glob("*.py"))
    assert len(modules) > 10
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            else:
                continue
            assert {name.partition(".")[0] for name in names} <= allowed, path.name


def test_the_public_door_is_short() -> None:
    assert verify.__all__ == ["Exit", "VerifyError"]
