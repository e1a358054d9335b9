from typing import Any

import pytest

from pipelines.core.errors import SharedError, UserError
from pipelines.training import __main__ as command


@pytest.mark.parametrize(("error", "tells"), [(UserError("mine"), True), (SharedError("x"), False)])
def test_a_process_tells_what_the_first_does_not_know(
    error: UserError, tells: bool, monkeypatch: Any, capsys: Any
) -> None:
    def fails(_job: Any, _last_step: int | None) -> None:
        raise error

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(command, "_train", fails)
    monkeypatch.setattr(command, "_LAST_WORDS_S", 0)
    with pytest.raises(SystemExit) as ended:
        command.main(["--recipe", "debug"])
    assert ended.value.code == 2
    assert (f"train: {error}\n" in capsys.readouterr().err) is tells
