"""What a command that is refused says: one line, whoever refused it, and no traceback."""

import pytest

from chio.command import errors
from chio.errors import InputError
from confine import ConfineError


@pytest.mark.parametrize(
    "error",
    [InputError("a thing", why="it is wrong", fix="mend it"), ConfineError("a thing", path="/p", fix="mend it")],
)
def test_a_refusal_of_the_host_or_of_confinement_is_one_line_and_exit_1(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    @errors
    def command() -> int:
        raise error

    with pytest.raises(SystemExit) as ended:
        command()
    assert (ended.value.code, capsys.readouterr().err) == (1, f"chio: {error}\n")
