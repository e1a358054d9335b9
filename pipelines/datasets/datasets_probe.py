"""Asks, when a run is prepared, for what it needs of the dataset repository and its remote."""

from collections.abc import Iterable

from pipelines.core.errors import UnreachableError, UserError, one_line
from pipelines.core.settings import load_settings
from pipelines.core.writable_place import check_writable
from pipelines.datasets.dvc_objects import ObjectStore
from pipelines.datasets.repository import DatasetRepository
from pipelines.datasets.versions import MIRROR

_FIX = "fix PENSTOCK_DATASETS_REMOTE, AWS_ENDPOINT_URL, or the keys that AWS's own variables give"


def check_listings(hashes: Iterable[str]) -> None:
    """Read from the remote which files each of some dataset versions has.

    Args:
        hashes: DVC's, of the versions' whole trees.

    Raises:
        UserError: The remote does not have a version, or does not let this user read it.
        UnreachableError: It does not answer.
    """
    from botocore.exceptions import BotoCoreError

    remote = load_settings().datasets_remote
    store = ObjectStore(remote)
    try:
        for each in hashes:
            store.listing(each)
    except (OSError, BotoCoreError) as error:
        raise UnreachableError(f"{remote} does not answer: {one_line(error)}; {_FIX}") from error


def check_publishing() -> None:
    """Check that a dataset version could be pushed: its files, its commit and its tag.

    Raises:
        UserError: The remote or the repository can't be written; UnreachableError, where a later
            try may succeed.
    """
    settings = load_settings()
    ObjectStore(settings.datasets_remote)  # refuses an address of another kind
    check_writable(settings.datasets_remote, "PENSTOCK_DATASETS_REMOTE", _FIX)
    try:
        DatasetRepository(settings.datasets_url, settings.home / MIRROR).check_push()
    except OSError as error:
        raise UserError(
            f"PENSTOCK_DATASETS_URL = {settings.datasets_url} can't be written: {one_line(error)}; "
            "fix its owner or rights, or name another place"
        ) from error
