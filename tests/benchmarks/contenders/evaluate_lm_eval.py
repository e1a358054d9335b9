"""lm-evaluation-harness: `HFLM.loglikelihood_rolling`, its model loaded beforehand."""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"

from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.evaluate_texts import read_texts, sums


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    texts = read_texts(folder, options)
    model = HFLM(
        str(folder / options["model"]),
        device="cpu",
        dtype="float32",
        batch_size=options["batch"],
    )
    requests = [
        Instance("loglikelihood_rolling", doc={}, arguments=(text,), idx=number)
        for number, text in enumerate(texts)
    ]

    def run_round() -> tuple[float, dict[str, Any]]:
        nats = [-each for each in model.loglikelihood_rolling(requests, disable_tqdm=True)]
        return len(texts), sums(nats, texts, options)

    return run_round


if __name__ == "__main__":
    serve(prepare)
