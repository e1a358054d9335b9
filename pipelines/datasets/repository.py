"""The datasets repository: a bare git repository whose annotated tags `name@N` are the versions.

On `main`, each dataset has a folder with its newest version's `data.dvc` and `version.json`. A
version is one commit and the tag on it, pushed together. Git creates a ref only where there is
none, so of two makers that both want N one is refused, and takes the next.
"""

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

from pipelines.core.errors import UnreachableError, UserError
from pipelines.core.storage import one_at_a_time, sync_folder
from pipelines.recipe.data_section import DATASET_NAME

_TAG = re.compile(rf"(?P<name>{DATASET_NAME})@(?P<version>[1-9][0-9]*)")
_LISTING = "--format=%(refname:strip=2) %(*objecttype) %(*objectname) %(taggerdate:unix)"
_MAIN = "refs/heads/main"
_AUTHOR, _ADDRESS = "Penstock", "penstock@localhost"
_IDENTITY = {
    **{f"GIT_{role}_NAME": _AUTHOR for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_EMAIL": _ADDRESS for role in ("AUTHOR", "COMMITTER")},
    "GIT_TERMINAL_PROMPT": "0",
}
# What git sets for its hooks would lead this git to another repository.
_ELSEWHERE = ("GIT_DIR", "GIT_COMMON_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX",
              "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES")  # fmt: skip
_NETWORK_TRIES = 3
_PROBE_S = 10.0
_DEAD_S = 10.0  # git keeps a lock of a ref for milliseconds
_URL = "see PENSTOCK_DATASETS_URL, and the rights of this machine's key or token"


@dataclass(frozen=True)
class Tag:
    """A version: its name, and where and when it was made."""

    name: str
    version: int
    commit: str
    created: datetime

    @property
    def label(self) -> str:
        """`name@N`."""
        return f"{self.name}@{self.version}"


class DatasetRepository:
    """The repository at a path or URL; of a remote one `mirror` is kept up to date here.

    Raises:
        UserError: the URL holds a password, which would be shown in process lists and logs.
    """

    def __init__(self, url: str, mirror: Path) -> None:
        self.url = _without_password(url)
        self._is_local = url.startswith("/")
        self._folder = Path(url) if self._is_local else mirror

    def refresh(self) -> None:
        """Fetch what others pushed; nothing to do for a repository on this machine."""
        if self._is_local:
            return
        self._make()
        with self._alone():
            self._fetch()

    def tags(self, name: str | None = None) -> list[Tag]:
        """Return the versions of one dataset, or of all, by name and number."""
        if not self._folder.is_dir():
            return []
        found = []
        for line in self._git("for-each-ref", _LISTING, "refs/tags").decode().splitlines():
            tag, kind, commit, seconds = line.split(" ")
            parts = _TAG.fullmatch(tag)
            if parts and kind == "commit" and name in (None, parts["name"]):
                made = datetime.fromtimestamp(int(seconds), UTC)
                found.append(Tag(parts["name"], int(parts["version"]), commit, made))
        return sorted(found, key=lambda tag: (tag.name, tag.version))

    def read(self, tags: Sequence[Tag], file: str) -> list[bytes]:
        """Return a file of each version's folder, in one call of git.

        Raises:
            UserError: a tag that looks like a version's is on something else.
        """
        names = "".join(f"{tag.commit}:{tag.name}/{file}\n" for tag in tags)
        found = BytesIO(self._git("cat-file", "--batch", given=names.encode()))
        contents = []
        for tag in tags:
            header = found.readline()
            if header.endswith(b" missing\n"):
                raise UserError(
                    f"{self.url}: the tag {tag.label} is no dataset version, as its commit has no "
                    f"{tag.name}/{file}; delete it"
                )
            contents.append(found.read(int(header.split()[-1])))
            found.readline()
        return contents

    def publish(self, name: str, version: int, files: Mapping[str, bytes]) -> Tag | None:
        """Commit `files` on `main` and tag the commit `name@version`, both or neither.

        Returns:
            The version; None where another maker was quicker: refresh, and try with the next.

        Raises:
            UserError: git can't write there.
        """
        self._make()
        label, now = f"{name}@{version}", int(time.time())
        # Each object is synced, so the makers take turns: what the slower ones write is in vain.
        with self._alone():
            if self._git("for-each-ref", f"refs/tags/{label}"):
                return None
            tip = self._git("for-each-ref", "--format=%(objectname)", _MAIN).decode().strip()
            commit = self._commit(tip, files, label)
            head = f"object {commit}\ntype commit\ntag {label}\n"
            text = f"{head}tagger {_AUTHOR} <{_ADDRESS}> {now} +0000\n\n{label}\n"
            tag = self._git("mktag", given=text.encode()).decode().strip()
            pushed = self._push(f"{commit}:{_MAIN}", f"{tag}:refs/tags/{label}")
        if not pushed:
            return None
        if self._is_local:
            os.sync()  # git syncs what a ref says, but not that it is there
        return Tag(name, version, commit, datetime.fromtimestamp(now, UTC))

    def check_push(self) -> None:
        """Check that a version could be pushed, without pushing anything.

        Raises:
            UserError: git can't write to a repository on this machine.
            UnreachableError: The server does not answer in time, or does not take a push.
        """
        self._make()
        commit = self._commit("", {}, "probe")  # no ref names it, so that git deletes it one day
        options = ("--dry-run", "--no-verify", "--no-signed", "--no-follow-tags")
        refs = f"{commit}:refs/heads/penstock-probe"
        try:
            done = _run(self._folder, "push", *options, self.url, refs, seconds=_PROBE_S)
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(f"{self.url}: no answer in {_PROBE_S:g} s; {_URL}") from error
        if done.returncode:
            reason = _reason(done)
            raise UnreachableError(f"{self.url}: no version can be pushed: {reason}; {_URL}")

    def _commit(self, tip: str, files: Mapping[str, bytes], message: str) -> str:
        """Return a commit that no ref names yet; its index is a temporary file."""
        with tempfile.TemporaryDirectory() as scratch:
            index = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
            if tip:
                self._git("read-tree", tip, variables=index)
            for path, content in files.items():
                blob = self._git("hash-object", "-w", "--stdin", given=content).decode().strip()
                entry = f"100644,{blob},{path}"
                self._git("update-index", "--add", "--cacheinfo", entry, variables=index)
            tree = self._git("write-tree", variables=index).decode().strip()
        parent = ["-p", tip] if tip else []
        return self._git("commit-tree", tree, *parent, "-m", message).decode().strip()

    def _push(self, *refs: str) -> bool:
        """Return whether the repository took the refs, all of them; False where one was there
        already.
        """
        # Whatever a user's own configuration says of hooks, signatures and tags to push along.
        options = ("--porcelain", "--atomic", "--no-verify", "--no-signed", "--no-follow-tags")
        done = _run(self._folder, "push", *options, self.url, *refs)
        if done.returncode and b"\n!\t" not in done.stdout:
            raise UnreachableError(f"{self.url}: the version can't be pushed: {_reason(done)}")
        return done.returncode == 0

    def _fetch(self) -> None:
        for again in reversed(range(_NETWORK_TRIES)):
            done = _run(
                self._folder, "fetch", "--quiet", "--prune", "--no-auto-gc", self.url,
                "+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*",
            )  # fmt: skip
            if done.returncode == 0:
                return
            if again:
                time.sleep(1)
        raise UnreachableError(
            f"{self.url}: can't be read, see PENSTOCK_DATASETS_URL: {_reason(done)}"
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for others here who change refs; drop the locks of a git that was killed, which
        would keep everyone out for ever.
        """
        with one_at_a_time(self._folder / "penstock.lock"):
            names = ("HEAD.lock", "packed-refs.lock", "refs/**/*.lock")
            for lock in (lock for name in names for lock in self._folder.glob(name)):
                with suppress(FileNotFoundError):  # its git has ended meanwhile
                    # Of the future where the clock was set back: no git lives there, either.
                    if abs(time.time() - lock.stat().st_mtime) > _DEAD_S:
                        lock.unlink()
            yield

    def _make(self) -> None:
        """An empty bare repository where there is none; whole, though two may make it at once."""
        if self._folder.exists():
            return
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder.parent) as scratch:
            made = Path(scratch) / "new"
            self._git("init", "--quiet", "--initial-branch=main", folder=made)
            # By itself git leaves tags and objects to the system, and a power cut makes them empty.
            self._git("config", "core.fsync", "all", folder=made)
            sync_folder(made)
            try:
                made.rename(self._folder)
            except OSError:
                if not self._folder.exists():
                    raise

    def _git(
        self,
        *arguments: str,
        given: bytes | None = None,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> bytes:
        done = _run(folder or self._folder, *arguments, given=given, variables=variables)
        if done.returncode:
            raise UserError(f"{folder or self._folder}: git {arguments[0]}: {_reason(done)}")
        return done.stdout


def _run(
    folder: Path,
    *arguments: str,
    given: bytes | None = None,
    variables: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> subprocess.CompletedProcess[bytes]:
    environment = {key: value for key, value in os.environ.items() if key not in _ELSEWHERE}
    return subprocess.run(
        ["git", "--git-dir", str(folder), *arguments],
        input=given or b"",
        env=environment | _IDENTITY | dict(variables or {}),
        capture_output=True,
        check=False,
        timeout=seconds,
    )


def _reason(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return next(
        (line for line in lines if line.startswith(("fatal:", "error:"))), "no reason given"
    )


def _without_password(url: str) -> str:
    parts = urlsplit(url) if "://" in url else None
    # Over HTTP a lone user name is mostly an access token.
    if parts and (parts.password or (parts.scheme.startswith("http") and parts.username)):
        raise UserError(
            "PENSTOCK_DATASETS_URL holds a password or token, which logs and process lists would "
            "show; leave it out and let git's credential helper or an SSH key answer"
        )
    return url
