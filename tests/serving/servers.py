"""Processes of real servers on loopback ports; their environments are made by install.sh."""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

KEPT = Path(os.environ.get("PENSTOCK_SERVING_CACHE", Path.home() / ".cache" / "penstock-serving"))
START_S = 600.0
# Without the first it ends with SIGILL and an empty log; the second in GiB.
VLLM_ON_CPU = os.environ | {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def environment(name: str) -> Path:
    """Return the folder of an environment; skips the test where it could not be installed."""
    if not (KEPT / name / "installed").is_file():
        pytest.skip(f"{name} is not installed in {KEPT} (make test-serving installs it)")
    return KEPT / name


def asked_of_vllm(jobs: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Return a folder with the answers to each job that vLLM could do: see vllm_answers.py."""
    script = Path(__file__).with_name("vllm_answers.py")
    answers = folder / "answers"
    answers.mkdir()
    with (folder / "log").open("wb") as log:
        subprocess.run(
            [environment("vllm") / "bin" / "python", script, answers],
            input=json.dumps(jobs).encode(),
            env=VLLM_ON_CPU,
            stdout=log,
            stderr=log,
            check=True,
        )
    return answers


def told_by_vllm(answers: Path, name: str) -> Any:
    """Return one of these answers; if there is none, the test fails with the log's end."""
    file = answers / name
    assert file.is_file(), (answers.parent / "log").read_text()[-4000:]
    return json.loads(file.read_text())


@contextmanager
def running(
    command: Sequence[str | Path],
    ready: str,
    log: Path,
    environ: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A server's process, from when the URL `ready` answers until the block ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*map(str, command)],
            cwd=log.parent,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        _wait(process, ready, log)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], ready: str, log: Path) -> None:
    limit = time.monotonic() + START_S
    with httpx.Client(trust_env=False, timeout=10) as client:
        while time.monotonic() < limit and process.poll() is None:
            try:
                if client.get(ready).is_success:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            time.sleep(0.5)
    pytest.fail(
        f"the server did not start (exit status {process.poll()}):\n{log.read_text()[-3000:]}"
    )
