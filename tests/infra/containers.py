"""Podman with a storage of its own, and in it what stands for the images of registries."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from infra.pip_settings import pip_settings
from pipelines.core.settings import PROJECT
from tests.infra.machine import CACHE

FOLDER = CACHE / "podman"
STAND_INS = Path(__file__).parent / "stand_ins"
BASE = "docker.io/library/python:3.11-slim-bookworm"
IMAGES = {
    "postgres": "docker.io/library/postgres:17-bookworm",
    "nginx": "docker.io/nginxinc/nginx-unprivileged:stable",
    "s3": "docker.io/chrislusf/seaweedfs:latest",
}
PLANTED = "planted-b4d1c6ae07"  # while images are built: tests look for it in the layers
# crun needs one hierarchy of control groups and the right to raise limits; runc needs neither.
_CONTAINERS_CONF = """[containers]
default_ulimits = ["nofile=20000:20000", "nproc=30000:30000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
_STORAGE_CONF = f"""[storage]
driver = "overlay"
graphroot = "{FOLDER}/storage"
runroot = "/run/penstock-infra-podman"
"""
# Debian as the official image has it: without pages to read, without translations.
_LEFT_OUT = ("doc", "man", "locale", "info", "i18n")
_PACKAGES = "python3,python3-venv,python3-pip,python-is-python3,ca-certificates,netbase"
_AUTHORITIES = Path("/usr/local/share/ca-certificates")
_BASE_DOCKERFILE = """FROM scratch
ADD base.tar /
COPY authorities/ /usr/local/share/ca-certificates/
RUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED && update-ca-certificates
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
CMD ["python3"]
"""


def environment() -> dict[str, str]:
    """What podman and Compose are started with."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "containers.conf").write_text(_CONTAINERS_CONF)
    (FOLDER / "storage.conf").write_text(_STORAGE_CONF)
    return os.environ | {
        "CONTAINERS_CONF": str(FOLDER / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(FOLDER / "storage.conf"),
        "BUILDAH_ISOLATION": "chroot",
    }


def podman(*arguments: str | Path, check: bool = True) -> str:
    """What podman prints.

    Raises:
        RuntimeError: it failed, with what it says.
    """
    done = subprocess.run(
        ["podman", *map(str, arguments)],
        env=environment(),
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    if check and done.returncode:
        raise RuntimeError(f"podman {' '.join(map(str, arguments))}:\n{done.stderr[-4000:]}")
    return done.stdout.strip()


def logs_of(prefix: str, lines: int) -> str:
    """The last lines that containers whose names begin so have printed, ended ones too."""
    names = podman("ps", "--all", f"--filter=name=^{prefix}", "--format={{.Names}}").split()
    told = []
    for name in names:
        done = subprocess.run(
            ["podman", "logs", f"--tail={lines}", name],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        told.append(f"--- {name}\n{done.stdout}")
    return "\n".join(told)


def digest(image: str) -> str:
    """The digest by which a file may name an image of this storage."""
    return podman("image", "inspect", "--format={{.Digest}}", image)


def base_image() -> str:
    """Build Debian's Python in the place of the official image, unless it is there; its digest."""
    with _one_builder():
        return _base_image()


def _one_builder() -> FileLock:
    """Of two processes that need an image the second waits for the first one's layers."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    return FileLock(FOLDER / "build.lock", is_singleton=True)


def _base_image() -> str:
    if not _has(BASE):
        folder = FOLDER / "base"
        (folder / "authorities").mkdir(parents=True, exist_ok=True)
        for certificate in _AUTHORITIES.glob("*.crt"):  # of a mirror that this machine goes through
            (folder / "authorities" / certificate.name).write_bytes(certificate.read_bytes())
        (folder / "Dockerfile").write_text(_BASE_DOCKERFILE)
        without = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _LEFT_OUT]
        make = ["mmdebstrap", "--quiet", "--variant=minbase", *without, f"--include={_PACKAGES}"]
        subprocess.run([*make, "bookworm", folder / "base.tar"], check=True)
        podman("build", "--squash", "--network=host", f"--tag={BASE}", folder)
    return digest(BASE)


def stand_in(name: str) -> str:
    """Build what stands in for an image of a registry, unless it is there; its digest."""
    image = IMAGES[name]
    with _one_builder():
        base_image()
        podman("build", *build_options(), "--format=docker", f"--tag={image}", STAND_INS / name)
    return digest(image)


def our_image(target: str) -> str:
    """Build an image of the commit that is checked out, by the project's script; its name.

    While it is built a secret lies in the checkout, which git ignores. An image of this commit is
    taken as it is: only to find that each layer is there would take half a minute. The images of
    earlier commits go, as each takes gigabytes.
    """
    name = f"localhost/penstock-{target}"
    bill = PROJECT / "build" / f"penstock-{target}.cdx.json"  # which the script writes
    with _one_builder():
        if not (_has(f"{name}:{tag()}") and bill.exists()):
            _build(target)
            before = (f"--filter=reference={name}", f"--filter=before={name}:{tag()}")
            if older := podman("images", "--quiet", *before).split():
                podman("rmi", *older, check=False)  # but one that a container runs
    return f"{name}:{tag()}"


def _build(target: str) -> None:
    secret = PROJECT / "infra" / "compose" / "secrets" / PLANTED
    secret.parent.mkdir(exist_ok=True)
    secret.write_text(PLANTED)
    try:
        subprocess.run(
            [PROJECT / "infra" / "images" / "build.sh", target, "--", *build_options()],
            env=environment() | {"ENGINE": "podman", "TAG": tag(), "PYTHON_DIGEST": base_image()},
            check=True,
            stdout=subprocess.DEVNULL,
        )
    finally:
        secret.unlink()


def tag() -> str:
    """Of our images: the commit that is checked out."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def build_options() -> Sequence[str]:
    """How builds reach the package index: as pip of this machine does, through a build secret."""
    settings = pip_settings()
    folders = [link for link in settings.get("find-links", "").split() if Path(link).is_dir()]
    wanted = {"index-url": settings.get("index-url", "https://pypi.org/simple")}
    if folders:
        wanted["find-links"] = " ".join(folders)
    if "cert" in settings:
        wanted["cert"] = "/etc/ssl/certs/ca-certificates.crt"
    if "trusted-host" in settings:
        wanted["trusted-host"] = settings["trusted-host"]
    conf = FOLDER / "pip.conf"
    conf.write_text(
        f"# {PLANTED}\n[global]\n" + "".join(f"{key} = {wanted[key]}\n" for key in wanted)
    )
    options = ["--network=host", "--pull=never", f"--secret=id=pip.conf,src={conf}"]
    options += [f"--volume={folder}:{folder}:ro" for folder in folders]
    if folders:  # where PyTorch's own host may be out of reach, the wheels lie in a folder
        options.append(f"--build-arg=TORCH_CPU_INDEX={wanted['index-url']}")
    return options


def _has(image: str) -> bool:
    return bool(podman("images", "--quiet", image))
