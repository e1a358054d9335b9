"""The loader of a registered model for `mlflow models serve` and `mlflow.pyfunc.load_model`.

MLflow imports this module by the name in a version's `MLmodel`, and calls `_load_pyfunc`. The
folder is verified before any of its files are read, as everywhere.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.data.tokens.chat_template import own_template
from pipelines.evaluation.generate import generate
from pipelines.registry.integrity import check_folder
from pipelines.registry.signing import verify

if TYPE_CHECKING:
    import pandas as pd


class PromptModel:
    """A model that continues prompts, or answers them if it has a chat template."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._chat = own_template(folder) is not None

    def predict(
        self, model_input: "pd.DataFrame", params: dict[str, Any] | None = None
    ) -> list[str]:
        """Return one text for each row.

        Args:
            model_input: A data frame with a column `prompt`.
            params: `max_tokens`, `temperature` and `seed`, as in the model's signature.
        """
        prompts = model_input["prompt"].tolist()
        return generate(self._folder, prompts, **(params or {}), chat=self._chat)


def _load_pyfunc(path: str) -> PromptModel:
    folder = Path(path)
    check_folder(folder, str(folder))
    verify(folder, str(folder))
    return PromptModel(folder)
