import hashlib

from pipelines.run.records import TRAIN, VALIDATION, split_of, uniform

HASHES = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(5000)]


def test_the_fraction_is_kept_and_a_document_never_changes_sides() -> None:
    held_out = [doc_id for doc_id in HASHES if split_of(doc_id, 0.05) == VALIDATION]
    assert 200 < len(held_out) < 300
    # A larger fraction only adds documents to validation.
    assert all(split_of(doc_id, 0.1) == VALIDATION for doc_id in held_out)


def test_the_extremes_of_a_hash() -> None:
    assert uniform("0" * 64) == 0
    assert uniform("f" * 64) < 1
    assert split_of("f" * 64, 0.999) == TRAIN


def test_parts_of_a_hash_are_independent() -> None:
    low = [doc_id for doc_id in HASHES if uniform(doc_id) < 0.5]
    assert 0.45 < sum(uniform(doc_id, part=1) < 0.5 for doc_id in low) / len(low) < 0.55
