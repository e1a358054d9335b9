"""Tasks of EleutherAI's lm-evaluation-harness on a model's folder, through its Python API.

The harness runs in its own process (this module as a command) because it changes global state such
as seeds, and because Hugging Face's libraries read only once, at import, whether they may use the
network. They may only for the harness's built-in tasks, whose data come from the hub.

A user's own task is a YAML file in the harness's format, with its data beside it:

    task: colours
    dataset_path: json
    dataset_kwargs: {data_files: {test: colours.jsonl}}

A package of a team's own brings one as an extension. Such a file is code, because its templates and
functions are run: trust it as much as the project.
"""

import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.core import extensions
from pipelines.core.errors import EXIT_USER_ERROR, UserError
from pipelines.core.product import PRODUCT
from pipelines.core.storage import read_json, write_json
from pipelines.evaluation.task_scores import TaskRow
from pipelines.recipe.recipe import Harness
from pipelines.run.verdict import HarnessScore

LOCAL_FORMATS = ("json", "csv", "parquet", "text")  # formats of a task file's data
_BATCH = 16
_RESAMPLES = 1000  # for the harness's bootstrap, if a metric has no closed standard error
_QUIET = {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_log = logging.getLogger(__name__)


class Found(NamedTuple):
    """What a model scored on tasks, and on each of their questions.

    `rows` has those metrics that are means over questions and of which more is better.
    """

    scores: tuple[HarnessScore, ...] = ()
    rows: tuple[TaskRow, ...] = ()


def run_harness(model_folder: Path, wanted: Harness, *, chat: bool) -> Found:
    """Score a model on tasks; the model is loaded in the same way as by a server.

    Args:
        model_folder: A folder in Hugging Face's format.
        wanted: The tasks.
        chat: Whether prompts are formatted with the tokenizer's chat template.

    Returns:
        Each metric of each task, with the harness's own standard error, in the harness's order;
        and the results that they are means of.

    Raises:
        UserError: A task does not exist, or its file or its data are wrong.
    """
    if not (wanted.tasks or wanted.files or wanted.extensions):
        return Found()
    from pipelines.models.served import let_go  # imports torch

    let_go()
    with tempfile.TemporaryDirectory() as scratch:
        request, answer = Path(scratch) / "request.json", Path(scratch) / "answer.json"
        values = {"model": str(model_folder.absolute()), "wanted": wanted.model_dump(mode="json")}
        write_json(request, values | {"chat": chat})
        offline = {} if wanted.tasks else {**_OFFLINE, "HF_DATASETS_CACHE": scratch}
        path = os.pathsep.join(filter(None, (str(PRODUCT), os.environ.get("PYTHONPATH"))))
        code = subprocess.run(
            [sys.executable, "-m", "pipelines.evaluation.harness", str(request), str(answer)],
            env={**os.environ, **_QUIET, **offline, "PYTHONPATH": path},
            stdout=sys.__stderr__,
            check=False,
        ).returncode
        if code == EXIT_USER_ERROR and answer.is_file():
            raise UserError(f"evaluate.harness: {read_json(answer)['error']}")
        if code:
            raise RuntimeError(f"lm-evaluation-harness ended with exit code {code}; see the log")
        found = read_json(answer)
        return Found(
            tuple(map(HarnessScore.model_validate, found["scores"])),
            tuple(TaskRow(*row) for row in found["rows"]),
        )


def read_task(path: Path) -> dict[str, Any]:
    """Return a task file in the form that the harness reads, with absolute paths of its data.

    Raises:
        UserError: The file is not a task, or its data are not files in its own folder.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        task: dict[str, Any] = load_yaml(path)
    except Exception as error:
        raise UserError(f"{path}: {_line(error)}") from error
    if not isinstance(task.get("task"), str):
        raise UserError(f"{path}: the file has no `task:` key with a name")
    given = task.get("dataset_kwargs") or {}
    if task.get("dataset_path") not in LOCAL_FORMATS or "data_files" not in given:
        raise UserError(
            f"{path}: a task file must have its data beside it: dataset_path must be one of "
            f"{', '.join(LOCAL_FORMATS)}, and dataset_kwargs must name data_files"
        )
    files = _absolute(given["data_files"], path)
    return task | {"dataset_kwargs": {**given, "data_files": files}}


def _absolute(files: Any, task: Path) -> Any:
    if isinstance(files, Mapping):
        return {split: _absolute(each, task) for split, each in files.items()}
    if isinstance(files, list):
        return [_absolute(each, task) for each in files]
    folder = task.parent.resolve()
    found = (folder / str(files)).resolve()
    if not (found.is_relative_to(folder) and found.is_file()):
        raise UserError(f"{task}: {files} is not a file beside it")
    return str(found)


def _evaluate(request: Mapping[str, Any]) -> Found:
    """Evaluate the tasks of a request; this runs in its own process."""
    import lm_eval
    from jinja2 import TemplateError
    from lm_eval.tasks import TaskManager

    wanted = Harness.model_validate(request["wanted"])
    manager = TaskManager(include_defaults=bool(wanted.tasks))
    try:
        own = (extensions.load("tasks", name) for name in wanted.extensions)
        tasks = [*wanted.tasks, *map(read_task, (*map(Path, wanted.files), *own))]
        manager.load(tasks)  # loaded again below; reports errors in tasks before the model loads
    except UserError:
        raise
    except Exception as error:
        raise UserError(_line(error)) from error
    from lm_eval.models.huggingface import HFLM  # takes seconds, so only for tasks without errors

    from pipelines.models.served import inference_device, load_served

    folder = request["model"]
    model = HFLM(
        pretrained=load_served(Path(folder), inference_device()).model,
        tokenizer=folder,
        backend="causal",
        batch_size=_BATCH,
    )
    try:
        found = lm_eval.simple_evaluate(
            model,
            tasks=tasks,
            task_manager=manager,
            limit=wanted.limit,
            apply_chat_template=request["chat"],
            bootstrap_iters=_RESAMPLES,
            log_samples=True,
        )
    except (TemplateError, KeyError, ValueError) as error:  # a document doesn't fit the template
        raise UserError(_line(error)) from error
    scores = _scores(found)
    return Found(tuple(scores), tuple(_rows(found["samples"], scores)))


def _rows(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], scores: Sequence[HarnessScore]
) -> Iterator[TaskRow]:
    """Yield the result on each question, of metrics that are their means."""
    for score in scores:
        metric, _, kind = score.metric.partition("/")
        asked = [each for each in samples.get(score.task, ()) if each["filter"] == (kind or "none")]
        values = {
            str(each["doc_id"]): float(each[metric])
            for each in asked
            if isinstance(each.get(metric), int | float)
        }
        is_whole = 0 < len(values) == len(asked)
        if not (score.higher_is_better and is_whole):
            continue
        if math.isclose(sum(values.values()) / len(values), score.value, abs_tol=1e-9):
            for question, value in values.items():
                yield TaskRow(f"{score.task}/{score.metric}", question, value)


def _scores(found: Mapping[str, Any]) -> list[HarnessScore]:
    """Return the harness's scores; `acc_stderr,none`, which may be `N/A`, belongs to `acc,none`."""
    scores = []
    for task, figures in found["results"].items():
        for key, value in figures.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = figures.get(f"{metric}_stderr,{kind}")
            scores.append(
                HarnessScore(
                    task=task,
                    metric=metric if kind == "none" else f"{metric}/{kind}",
                    value=value,
                    stderr=error if isinstance(error, int | float) else None,
                    documents=found["n-samples"].get(task, {}).get("effective"),
                    higher_is_better=found["higher_is_better"].get(task, {}).get(metric),
                )
            )
    return scores


def _line(error: Exception) -> str:
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return " ".join(text.split()) or type(error).__name__


def main(request: Path, answer: Path) -> int:
    """Read a request file and write the answer file; a user's error is also an answer."""
    logging.basicConfig(level=logging.INFO)
    try:
        found = _evaluate(read_json(request))
    except UserError as error:
        _log.exception("refused")
        write_json(answer, {"error": str(error)})
        return EXIT_USER_ERROR
    scores = [score.model_dump(mode="json") for score in found.scores]
    write_json(answer, {"scores": scores, "rows": found.rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
