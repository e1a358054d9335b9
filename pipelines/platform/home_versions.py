"""The versions that last used a home: its databases are migrated forward only."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Self

from packaging.version import Version
from pydantic import AfterValidator, BaseModel

from pipelines.core.checked_json import read_model
from pipelines.core.errors import UserError
from pipelines.core.product import VERSION
from pipelines.core.storage import write_json

_FILE = "versions.json"  # in a home


def _checked(text: str) -> str:
    Version(text)  # else it raises a ValueError
    return text


_Version = Annotated[str, AfterValidator(_checked)]


class Versions(BaseModel):
    """Those of the programs whose data a home holds."""

    penstock: _Version
    airflow: _Version
    mlflow: _Version = "0"  # not noted by the first backups

    @classmethod
    def installed(cls) -> Self:
        """Return those that are installed."""
        airflow, mlflow = version("apache-airflow-core"), version("mlflow")
        return cls(penstock=VERSION, airflow=airflow, mlflow=mlflow)


def check_not_later(used: Versions, said: str) -> None:
    """Raise a UserError that begins with `said` if a later version was used than is installed."""
    for program, here in Versions.installed():
        if Version(there := getattr(used, program)) > Version(here):
            raise UserError(
                f"{said} {program} {there}, and {here} is installed, which can't read its "
                "databases; install the later one, or restore a backup from before it"
            )


def take_over(home: Path) -> None:
    """Note that these versions use a home from now on; raise UserError if later ones did."""
    path = home / _FILE
    if path.is_file():
        check_not_later(read_model(path, Versions), f"{home} was last used by")
    write_json(path, Versions.installed().model_dump())
