"""A user's answer to whether a candidate becomes champion: `approval.json` in the workspace.

The answer is only valid for the candidate and the champion that the user was shown. If another run
has promoted its model meanwhile, the user is asked again.
"""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from pipelines.core.checked_json import read_model
from pipelines.core.storage import write_json

_FILE = "approval.json"


class Answer(BaseModel):
    """Who gave which answer, and about which versions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    approved: bool
    by: str | None  # None: nobody answered in time
    at: str  # ISO 8601
    candidate: int  # version in the registry
    champion: int | None

    @property
    def words(self) -> str:
        """The text of the answer in the verdict, such as `approved by ada`."""
        if self.by is None:
            return "refused because nobody answered in time"
        return f"{'approved' if self.approved else 'refused'} by {self.by}"

    def write(self, workspace: Path) -> Self:
        """Write the answer, so that every later try finds it."""
        write_json(workspace / _FILE, self.model_dump())
        return self

    @classmethod
    def read(cls, workspace: Path) -> Self | None:
        """Return the answer, or None before there is one."""
        path = workspace / _FILE
        return read_model(path, cls) if path.is_file() else None


def forget_answer(workspace: Path) -> None:
    """Remove the answer, because a user who clears a finished task is asked again."""
    (workspace / _FILE).unlink(missing_ok=True)
