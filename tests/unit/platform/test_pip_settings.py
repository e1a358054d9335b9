"""uv is told what pip knows."""

import os
import subprocess
import sys
from pathlib import Path

from pipelines.core.settings import PROJECT

SCRIPT = PROJECT / "infra" / "pip_settings.py"


def exports(config: str, tmp_path: Path, **variables: str) -> dict[str, str]:
    file = tmp_path / "pip.conf"
    file.write_text(config)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "UV_")) and name != "SSL_CERT_FILE"
    }
    environment = kept | {"PIP_CONFIG_FILE": str(file), "HOME": str(tmp_path)} | variables
    # The machine's own configuration is read too: only what the test sets is looked at.
    script = f'eval "$("{sys.executable}" "{SCRIPT}")"; env -0'
    output = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return dict(entry.split("=", 1) for entry in output.stdout.split("\0") if entry)


def test_a_configuration_file(tmp_path: Path) -> None:
    config = """
[global]
index-url = https://mirror.example/simple
extra-index-url =
    https://one.example/simple
    https://two.example/simple
find-links = /a /b
"""
    seen = exports(config, tmp_path)
    assert seen["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert seen["UV_INDEX"] == "https://one.example/simple https://two.example/simple"
    assert seen["UV_FIND_LINKS"] == "/a,/b"
    assert seen["UV_INDEX_STRATEGY"] == "unsafe-best-match"


def test_the_environment_wins_and_uvs_own_variables_win_over_all(tmp_path: Path) -> None:
    config = "[global]\nfind-links = /a\nindex-url = https://mirror.example/simple\n"
    seen = exports(config, tmp_path, PIP_FIND_LINKS="/c", UV_DEFAULT_INDEX="https://mine.example")
    assert seen["UV_FIND_LINKS"] == "/c"
    assert seen["UV_DEFAULT_INDEX"] == "https://mine.example"
