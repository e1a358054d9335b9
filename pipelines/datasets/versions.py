"""Dataset versions: found by name, checked, and fetched. `dataset_publishing.py` makes them."""

import difflib
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from pipelines.core.checked_json import parse_model
from pipelines.core.errors import UserError
from pipelines.core.settings import Settings, load_settings
from pipelines.core.storage import write_json
from pipelines.datasets.dvc_objects import File, ObjectStore
from pipelines.datasets.repository import DatasetRepository, Tag
from pipelines.recipe.data_section import DATASET_NAME
from pipelines.run.records import DatasetRef, PreprocessRecord

MIRROR = "datasets-mirror.git"  # under the home: a copy of a repository that is elsewhere
VERSION_FILE = "version.json"
RECORD_FILE = "record.json"  # of preprocess, in a version's tree
TOKENIZER_FILE = "tokenizer/tokenizer.json"  # likewise
STREAMED = "object_store"  # the reader that needs no token shards on disk
_STREAMABLE = (".bin", ".mask")  # token shards and their loss masks
_LABEL = re.compile(rf"(?P<name>{DATASET_NAME})(@(?P<version>[0-9]+))?")


class DatasetVersion(BaseModel):
    """What is known of a version without its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: int
    directory_hash: str  # DVC's, of the whole tree
    bytes: int
    files: int
    dataset: DatasetRef
    stats: dict[str, Any]
    recipe: dict[str, Any]  # whole: what a run that this version starts does
    source: dict[str, Any]  # the fingerprint of what it was made of, in short
    extensions: dict[str, str] = {}  # and of each extension that made it
    validation: dict[str, Any]  # the record of the data gate
    run: dict[str, Any]  # which run made it, from which commit of the project
    git_revision: str = ""  # of the datasets repository; with `created`, known once it is there
    created: datetime | None = None

    @property
    def label(self) -> str:
        """`name@N`."""
        return f"{self.name}@{self.version}"

    @property
    def documents(self) -> int:
        """Rows of both splits."""
        return self.dataset.train.documents + self.dataset.validation.documents

    @property
    def tokens(self) -> int:
        """The number of tokens of both splits."""
        return self.dataset.train.tokens + self.dataset.validation.tokens

    def ref(self, remote: str) -> DatasetRef:
        """Return the record's reference to this very version."""
        named = {
            "name": self.name,
            "version": self.version,
            "git_revision": self.git_revision,
            "directory_hash": self.directory_hash,
            "remote": remote,
        }
        return self.dataset.model_copy(update=named)


def open_repository(settings: Settings) -> DatasetRepository:
    """Return the datasets repository, up to date."""
    repository = DatasetRepository(settings.datasets_url, settings.home / MIRROR)
    repository.refresh()
    return repository


def list_versions(name: str | None = None) -> list[DatasetVersion]:
    """Return the versions of one dataset, or of all, by name and number."""
    repository = open_repository(load_settings())
    return read_versions(repository, repository.tags(name))


def read_versions(repository: DatasetRepository, tags: list[Tag]) -> list[DatasetVersion]:
    """Return the records of versions."""
    if not tags:
        return []
    versions = []
    for tag, content in zip(tags, repository.read(tags, VERSION_FILE), strict=True):
        version = parse_model(content, DatasetVersion, f"{tag.name}@{tag.version}")
        made = {"git_revision": tag.commit, "created": tag.created}
        versions.append(version.model_copy(update=made))
    return versions


def find(label: str) -> DatasetVersion:
    """Return a version by `name@N`, or the newest by `name`.

    Raises:
        UserError: no dataset or version is called so; the line says what there is.
    """
    parts = _LABEL.fullmatch(label)
    if parts is None:
        raise UserError(
            f"{label!r} is no dataset version: write name@N, the name of a-z, 0-9, `-`, `_`, `.`"
        )
    repository = open_repository(load_settings())
    tags = repository.tags(parts["name"])
    if not tags:
        raise UserError(f"no dataset is named {parts['name']!r}; {_known_names(repository, label)}")
    numbers = {tag.version: tag for tag in tags}
    wanted = int(parts["version"]) if parts["version"] else max(numbers)
    if wanted not in numbers:
        known = ", ".join(map(str, sorted(numbers)[-10:]))
        raise UserError(f"{parts['name']} has no version {wanted}; it has {known}")
    return read_versions(repository, [numbers[wanted]])[0]


def newest(name: str) -> DatasetVersion | None:
    """Return the newest version of a dataset; None where there is none yet."""
    repository = open_repository(load_settings())
    return next(iter(read_versions(repository, repository.tags(name)[-1:])), None)


def verify(version: DatasetVersion) -> Iterator[tuple[File, str]]:
    """Hash every object of a version where it lies; yields the ones that are not sound, with why.

    Raises:
        UserError: the listing of the version's files is missing or damaged itself.
    """
    store = ObjectStore(load_settings().datasets_remote)
    yield from store.damaged(store.listing(version.directory_hash))


def read_tokenizer(version: DatasetVersion) -> str:
    """Return the text of the tokenizer.json of a version's data.

    Raises:
        UserError: it, or the listing of the version's files, is missing or damaged.
    """
    store = ObjectStore(load_settings().datasets_remote)
    files = store.listing(version.directory_hash)
    (found,) = (file for file in files if file.path == TOKENIZER_FILE)
    return store.read(found).decode()


def fetch(
    version: DatasetVersion,
    folder: Path,
    *,
    token_shards: bool = True,
    on_file: Callable[[int, int], None] = lambda *_: None,
) -> PreprocessRecord:
    """Copy a version's files into `folder` and check each; `record.json` comes last.

    Args:
        version: As `find` gives it.
        folder: Where its files go, under their own names.
        token_shards: Whether also these and their loss masks, which else are streamed when used.
        on_file: Called with the number of files that are there and of all.

    Returns:
        The record, which now also says name, version, and where the objects lie.

    Raises:
        UserError: an object is missing or damaged; it is named.
    """
    store = ObjectStore(load_settings().datasets_remote)
    files = store.listing(version.directory_hash)
    if not token_shards:
        files = [file for file in files if not file.path.endswith(_STREAMABLE)]
    (record_file,) = (file for file in files if file.path == RECORD_FILE)
    others = [file for file in files if file is not record_file]
    store.fetch(others, folder, lambda done: on_file(done, len(files)))
    record = parse_model(store.read(record_file), PreprocessRecord, version.label)
    record = record.model_copy(update={"dataset": version.ref(store.remote)})
    write_json(folder / RECORD_FILE, record.model_dump(mode="json"))
    on_file(len(files), len(files))
    return record


def _known_names(repository: DatasetRepository, label: str) -> str:
    names = sorted({tag.name for tag in repository.tags()})
    if close := difflib.get_close_matches(label.partition("@")[0], names, n=1, cutoff=0.5):
        return f"did you mean {close[0]}?"
    return (
        f"there are {', '.join(names)}" if names else "there is none yet; data_refresh makes them"
    )
