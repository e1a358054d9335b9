"""Train or validation: decided by a document's content alone, so new data moves no old document."""

VALIDATION = "validation"
TRAIN = "train"
SPLITS = (TRAIN, VALIDATION)


def uniform(doc_id: str, part: int = 0) -> float:
    """A number in [0, 1) from a document's hash; different parts are independent."""
    return int(doc_id[part * 12 : part * 12 + 12], 16) / 16**12


def split_of(doc_id: str, validation_fraction: float) -> str:
    """The split of a document, by its hash."""
    return VALIDATION if uniform(doc_id) < validation_fraction else TRAIN
