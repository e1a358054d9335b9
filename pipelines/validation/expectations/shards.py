"""The expectation that token shards are whole: their files, their indexes and their ids."""

from pathlib import Path
from typing import Any

import numpy as np
from great_expectations.core.metric_domain_types import MetricDomainTypes
from great_expectations.execution_engine import PandasExecutionEngine
from great_expectations.expectations.expectation import BatchExpectation
from great_expectations.expectations.metrics.metric_provider import metric_value
from great_expectations.expectations.metrics.table_metric_provider import TableMetricProvider

from pipelines.core.storage import md5
from pipelines.data.tokens.token_shards import ShardIndex, idx_path, mask_path, shard_prefix
from pipelines.validation.expectations.sentence import AssessedVariant

_CHUNK = 1 << 24  # ids looked at together


class ShardFaults(TableMetricProvider):
    """What is wrong with each shard of a table of them: `{file name: fault}`."""

    metric_name = "table.token_shard_faults"
    value_keys = ("vocab_size",)

    @metric_value(engine=PandasExecutionEngine)
    def _pandas(
        cls,
        execution_engine: Any,
        metric_domain_kwargs: dict[str, Any],
        metric_value_kwargs: dict[str, Any],
        metrics: dict[str, Any],
        runtime_configuration: Any,
    ) -> dict[str, str]:
        frame, _, _ = execution_engine.get_compute_domain(
            metric_domain_kwargs, domain_type=MetricDomainTypes.TABLE
        )
        rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
        faults = ((row["path"], _fault(row, **metric_value_kwargs)) for row in rows)
        return {Path(path).name: fault for path, fault in faults if fault}


class ExpectTokenShardsToBeIntact(AssessedVariant, BatchExpectation):
    """Expect each Megatron shard of a table to be what was written, and fit for a vocabulary.

    The files have their recorded MD5; the index can be read, agrees with itself, counts as many
    tokens as `.bin` holds and no empty document; every id lies in 0 to `vocab_size` - 1; a loss
    mask holds a 0 or a 1 for each token. Every byte is read.

        shards = pd.DataFrame(
            {"path": ["tokens/train-00000.bin"], "md5": [...], "index_md5": [...], "tokens": [...]}
        )
        batch = whole.get_batch({"dataframe": shards})
        batch.validate(ExpectTokenShardsToBeIntact(vocab_size=50257))

    The table's columns: `path` of the `.bin` file; its `md5`, null where it lies elsewhere and only
    the index is looked at; `index_md5`; `mask_md5` where there is one; `tokens`. The observed value
    is `{file name: what is wrong}`.

    Args:
        vocab_size: one more than the largest id allowed.
    """

    vocab_size: int

    metric_dependencies = ("table.token_shard_faults",)
    success_keys = ("vocab_size",)

    def sentence(self) -> str:
        """Return what is demanded."""
        return (
            "each token shard must have its recorded hashes, a consistent index and ids from 0 to "
            f"{self.vocab_size - 1}."
        )

    @classmethod
    def shown(cls, observed: Any) -> str:
        """Return the faults, each on its file."""
        return "; ".join(f"{name}: {fault}" for name, fault in observed.items()) or "all intact"

    def decide(self, metrics: dict[str, Any]) -> tuple[bool, Any]:
        """Return whether there are no faults, and the faults."""
        faults = metrics["table.token_shard_faults"]
        return not faults, faults


def _fault(row: dict[str, Any], vocab_size: int) -> str | None:
    """Return the first thing wrong with a shard, as the end of a sentence about it."""
    path = Path(row["path"])
    mask, index = mask_path(shard_prefix(path)), idx_path(shard_prefix(path))
    recorded = {path: row["md5"], index: row["index_md5"], mask: row.get("mask_md5")}
    for file, written in recorded.items():
        if written and (fault := _file_fault(file, written)):
            return fault
    try:
        fault = _index_fault(ShardIndex(index), row["tokens"])
    except ValueError as error:  # not an index, or numbers that lead out of it
        fault = str(error).replace(f"{path.parent}/", "")
    if fault or not row["md5"] or not row["tokens"]:
        return fault
    if row.get("mask_md5") and (fault := _mask_fault(mask, row["tokens"])):
        return fault
    return _id_fault(np.memmap(path, ShardIndex(index).dtype, "r"), row["tokens"], vocab_size)


def _file_fault(file: Path, written: str) -> str | None:
    if not file.is_file():
        return f"{file.name} is missing"
    found = md5(file)
    return None if found == written else f"{file.name} has the md5 {found}, not {written}"


def _index_fault(index: ShardIndex, tokens: int) -> str | None:
    offsets = index.document_offsets()
    if offsets[-1] != tokens:
        return f"its index counts {offsets[-1]} tokens, but {tokens} are recorded"
    if (empty := np.diff(offsets) < 1).any():
        return f"document {int(empty.argmax())} is empty"
    starts = index.pointers() // index.dtype.itemsize
    if not np.isin(offsets[:-1], starts).all() or (np.diff(starts, append=tokens) < 1).any():
        return "the sizes and the pointers of its index disagree"
    return None


def _id_fault(ids: Any, tokens: int, vocab_size: int) -> str | None:
    if len(ids) != tokens:
        return f"it holds {len(ids)} tokens, but {tokens} are recorded"
    for start in range(0, tokens, _CHUNK):
        chunk = np.asarray(ids[start : start + _CHUNK])
        if chunk.min() < 0 or chunk.max() >= vocab_size:
            place = int(((chunk < 0) | (chunk >= vocab_size)).argmax())
            return f"token {start + place} is {chunk[place]}, outside 0 to {vocab_size - 1}"
    return None


def _mask_fault(path: Path, tokens: int) -> str | None:
    if path.stat().st_size != tokens:
        return f"{path.name} has {path.stat().st_size} bytes for {tokens} tokens"
    mask = np.memmap(path, np.uint8, "r")
    largest = max(int(mask[at : at + _CHUNK].max()) for at in range(0, tokens, _CHUNK))
    return f"{path.name} holds a {largest}" if largest > 1 else None
