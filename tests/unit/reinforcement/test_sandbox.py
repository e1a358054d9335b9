"""What a model writes can do no harm, and passes only if it runs to its end."""

import time
from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.reinforcement import sandbox
from pipelines.reinforcement.sandbox import Limits, passes

LIMITS = Limits(cpu_seconds=2, seconds=5.0, memory_bytes=256 * 2**20)


@pytest.mark.parametrize(
    "code",
    ["assert 1 + 1 == 2", "import json, re, math, collections\nassert json.loads('[1]') == [1]"],
)
def test_right_code_passes(code: str) -> None:
    assert passes(code, LIMITS)


@pytest.mark.parametrize(
    "code",
    [
        "assert 1 + 1 == 3",
        "not Python",
        "import sys; sys.exit(0)",  # before the tests
        "import os; os._exit(0)",
        "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
        "open({secret!r}).read()",
        "open('/etc/passwd').read()",
        "open({folder!r} + '/made', 'w')",
        "import os; os.remove({secret!r})",
        "import subprocess; subprocess.run(['/bin/true'])",
        "x = bytearray(10**9)",
        "import os\nwhile True: os.write(2, b'x' * 10**6)",
    ],
)
def test_what_is_wrong_or_would_do_harm_fails(code: str, tmp_path: Path) -> None:
    import socket

    secret = tmp_path / "secret"
    secret.write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        names = {"port": port, "secret": str(secret), "folder": str(tmp_path)}
        for name, value in names.items():
            code = code.replace(f"{{{name}!r}}", repr(value)).replace(f"{{{name}}}", str(value))
        assert not passes(code, LIMITS)
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]
    assert secret.read_text() == "kept"


@pytest.mark.parametrize(
    ("code", "most"),
    [
        ("while True: pass", 4.5),  # by the processor's time
        ("import time; time.sleep(60)", 2.5),
        ("import os, time\nif not os.fork(): os.setsid()\ntime.sleep(60)", 2.5),
    ],
)
def test_what_does_not_end_is_ended_with_all_that_it_started(code: str, most: float) -> None:
    began = time.monotonic()
    assert not passes(code, LIMITS._replace(cpu_seconds=1, seconds=min(most - 0.5, 4.0)))
    assert time.monotonic() - began < most + 2  # on a busy machine


def test_where_the_kernel_lacks_something_no_code_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inside = Path(sandbox._PYTHON[-1]).read_text()
    lacking = tmp_path / "sandboxed.py"
    lacking.write_text(
        inside.replace("_CREATE, _ADD, _RESTRICT = 444", "_CREATE, _ADD, _RESTRICT = 9999")
    )
    monkeypatch.setattr(sandbox, "_PYTHON", (*sandbox._PYTHON[:-1], str(lacking)))
    made = tmp_path / "made"
    with pytest.raises(UserError, match="without danger: no Landlock: Function not implemented"):
        passes(f"open({str(made)!r}, 'w')", LIMITS)
    assert not made.exists()
