"""The load of the benchmark `serve`: clients that each ask again as soon as they are answered."""

import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.benchmarks.contender import Round

START_S = 300


def start_server(
    command: Sequence[str | Path], environ: Mapping[str, str], log: Path, port: int
) -> None:
    """Start a server and wait until it is ready; it ends with this process' group."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*map(str, command)],
            cwd=log.parent,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    limit = time.monotonic() + START_S
    while not _is_ready(port):
        if process.poll() is not None or time.monotonic() > limit:
            sys.stderr.write(f"{command[0]} did not start; see {log}\n")
            os.killpg(0, signal.SIGKILL)  # what it may have started, too
        time.sleep(0.5)


def round_of(port: int, model: str, token: str, options: dict[str, Any]) -> Round:
    """Return a round: what all clients together were answered."""

    def run_round() -> tuple[float, dict[str, Any]]:
        with ThreadPoolExecutor(options["clients"]) as pool:
            clients = [
                pool.submit(_client, port, model, token, options, number)
                for number in range(options["clients"])
            ]
            waits = [wait for each in clients for wait in each.result()]
        figures = {
            "first token ms": round(statistics.median(waits) * 1000, 2),
            "first token ms, 95%": round(statistics.quantiles(waits, n=20)[-1] * 1000, 2),
        }
        return len(waits), figures

    return run_round


def _client(port: int, model: str, token: str, options: dict[str, Any], number: int) -> list[float]:
    """One connection; returns the seconds from each request to its first token."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    waits = []
    for turn in range(options["requests"]):
        asked = {
            "model": model,
            "prompt": f"{options['prompt']} {number * options['requests'] + turn}",
            "max_tokens": options["tokens"],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        answer = connection.getresponse()
        events = []
        for line in answer:
            if not events and line.startswith(b"data:"):
                waits.append(time.perf_counter() - began)
            if line.startswith(b"data: {"):
                events.append(line)
        _check(answer.status, events, options["tokens"])
    connection.close()
    return waits


def _check(status: int, events: list[bytes], tokens: int) -> None:
    told = json.loads(events[-1].removeprefix(b"data: ")) if events else {}
    if status != 200 or (told.get("usage") or {}).get("completion_tokens") != tokens:
        raise SystemExit(f"not answered as asked: status {status}, at last {told}")


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
