"""datatrove's local executor: its own pipeline for MinHash deduplication, two workers."""

import shutil
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import MegatronDocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.logging import logger
from datatrove.utils.text import split_into_words

from tests.benchmarks.contender import Round, serve

BUCKETS = 16  # of eight hashes each: as near to a threshold of 0.8 as 128 permutations come


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    logger.disable("datatrove")
    split_into_words("Loaded before the workers are forked.")
    config = MinhashConfig(
        n_grams=options["ngram"],
        num_buckets=BUCKETS,
        hashes_per_bucket=options["permutations"] // BUCKETS,
        hash_config=HashConfig(precision=64),
    )
    work = folder / "datatrove"

    def at(name: str) -> str:
        return str(work / name)

    def run(pipeline: list[PipelineStep], tasks: int) -> Any:
        return LocalPipelineExecutor(
            pipeline,
            tasks=tasks,
            workers=options["workers"],
            skip_completed=False,
            start_method="fork",
            logging_dir=at("logs"),
        ).run()

    def run_round() -> tuple[float, dict[str, Any]]:
        shutil.rmtree(work, ignore_errors=True)
        workers = options["workers"]
        run(
            [
                JsonlReader(str(folder / "corpus")),
                GopherQualityFilter(),
                GopherRepetitionFilter(),
                JsonlWriter(at("filtered"), compression=None),
                MinhashDedupSignature(at("signatures"), config),
            ],
            workers,
        )
        run([MinhashDedupBuckets(at("signatures"), at("buckets"), config=config)], BUCKETS)
        run([MinhashDedupCluster(at("buckets"), at("removed"), config)], 1)
        run(
            [
                JsonlReader(at("filtered")),
                MinhashDedupFilter(at("removed")),
                MegatronDocumentTokenizer(
                    at("tokens"),
                    tokenizer_name_or_path=str(folder / "tokenizer" / "tokenizer.json"),
                    eos_token="<|endoftext|>",
                ),
            ],
            workers,
        )
        tokens = sum(path.stat().st_size for path in Path(at("tokens")).rglob("*.bin")) // 2
        return options["bytes"] / 1e6, {"tokens": tokens}

    return run_round


if __name__ == "__main__":
    serve(prepare)
