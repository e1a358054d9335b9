"""A user's answer to whether a candidate becomes champion: `approval.json` in the workspace.

The answer holds for what was shown: this candidate against that champion. Where another run has
promoted its model meanwhile, the user is asked again.
"""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from pipelines.core.storage import read_json, write_json

_FILE = "approval.json"


class Answer(BaseModel):
    """Who decided what, and about which versions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    approved: bool
    by: str | None  # None: nobody answered in time
    at: str  # ISO 8601
    candidate: int  # version in the registry
    champion: int | None

    @property
    def words(self) -> str:
        """What the verdict says of it: `approved by ada`."""
        if self.by is None:
            return "refused, as nobody answered in time"
        return f"{'approved' if self.approved else 'refused'} by {self.by}"

    def write(self, workspace: Path) -> Self:
        """Keep the answer for every try that follows."""
        write_json(workspace / _FILE, self.model_dump())
        return self

    @classmethod
    def read(cls, workspace: Path) -> Self | None:
        """The answer, or None before there is one."""
        path = workspace / _FILE
        return cls.model_validate(read_json(path)) if path.is_file() else None


def forget_answer(workspace: Path) -> None:
    """A user clears a task that was finished: the question is put anew."""
    (workspace / _FILE).unlink(missing_ok=True)
