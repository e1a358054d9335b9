import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.core.errors import UserError
from pipelines.data.cleaning.decontaminate import EvaluationNgrams, Overlap, set_names

QUESTION = (
    "A train leaves the station at nine in the morning and travels north at sixty miles an hour; "
    "when does it reach a town that is two hundred and forty miles away?"
)
FILLER = "Some text that nobody would ask about, with quite a few words in it, as texts have. "


def brute(evaluation, text, n=13):
    """n-grams of plain words, by sets."""

    def ngrams(value):
        kept = "".join(c for c in value.lower() if c.isalnum() or c.isspace())
        words = kept.split()
        size = min(n, len(words)) or n
        return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]

    known = {ngram for value in evaluation for ngram in ngrams(value)}
    return sum(ngram in known for ngram in ngrams(text))


def test_a_quoted_question_is_found_whatever_its_case_and_punctuation():
    ngrams = EvaluationNgrams.build([QUESTION], 13)
    words = len(QUESTION.split())
    assert len(ngrams) == words - 12
    quoted = FILLER + QUESTION.upper().replace(" ", ",\n  ") + " " + FILLER
    found = ngrams.overlap(quoted)
    assert found.shared == words - 12
    assert 0 < found.share < 1
    assert ngrams.overlap(QUESTION) == Overlap(words - 12, 1.0)


@pytest.mark.parametrize(("length", "shared"), [(12, 0), (13, 1), (14, 2)])
def test_thirteen_words_in_a_row_are_one_ngram(length, shared):
    ngrams = EvaluationNgrams.build([QUESTION], 13)
    part = " ".join(QUESTION.split()[3 : 3 + length])
    assert ngrams.overlap(f"{FILLER} {part} {FILLER}").shared == shared


def test_a_text_of_fewer_words_matches_only_as_a_whole():
    ngrams = EvaluationNgrams.build(["What is the capital of France?"], 13)
    assert ngrams.overlap("what is the capital of france") == Overlap(1, 1.0)
    assert ngrams.overlap("What is the capital of France? Paris.").shared == 0
    assert ngrams.overlap(FILLER + "What is the capital of France?").shared == 0


def test_chinese_needs_no_spaces():
    question = "一列火车上午九点从车站出发以每小时六十英里的速度向北行驶"
    ngrams = EvaluationNgrams.build([question], 13)
    assert ngrams.overlap(f"下面是一个问题:{question}。请回答。").shared == len(question) - 12


def test_nothing_is_shared_with_nothing():
    assert EvaluationNgrams.build([], 13).overlap(QUESTION) == Overlap(0, 0.0)
    assert EvaluationNgrams.build(["", "..."], 13).overlap(QUESTION) == Overlap(0, 0.0)
    assert EvaluationNgrams.build([QUESTION], 13).overlap(" ?! ") == Overlap(0, 0.0)


WORDS = st.lists(st.sampled_from(["a", "b", "c,", "D!", "e"]), max_size=40).map(" ".join)


@given(st.lists(WORDS, max_size=4), WORDS, st.integers(5, 13))
def test_as_plain_sets_of_words_find_it(evaluation, text, n):
    assert EvaluationNgrams.build(evaluation, n).overlap(text).shared == brute(evaluation, text, n)


def test_many_ngrams_and_documents_as_plain_sets_find_them():
    rng = random.Random(3)
    vocabulary = [f"word{n}" for n in range(500)]
    texts = [" ".join(rng.choices(vocabulary, k=60)) for _ in range(90)]
    ngrams = EvaluationNgrams.build(texts[:60], 8)
    documents = texts[40:] + [" ".join(rng.sample(texts, 3)) for _ in range(20)]
    for text in documents:
        assert ngrams.overlap(text).shared == brute(texts[:60], text, 8)


def test_a_saved_file_is_mapped_and_says_the_same(tmp_path):
    built = EvaluationNgrams.build([QUESTION, FILLER], 9)
    built.save(tmp_path / "evaluation.npy")
    loaded = EvaluationNgrams.load(tmp_path / "evaluation.npy")
    assert (loaded.n, len(loaded)) == (9, len(built))
    assert loaded.overlap(FILLER + QUESTION) == built.overlap(FILLER + QUESTION)
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.npy"]
    stored = np.load(tmp_path / "evaluation.npy")
    assert (np.diff(stored[1:].astype(object)) > 0).all()


def test_the_order_of_texts_does_not_matter(tmp_path):
    for name, texts in (("one", [QUESTION, FILLER]), ("two", [FILLER, QUESTION, FILLER])):
        EvaluationNgrams.build(texts, 13).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("content", [b"", b"no array at all"])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "file.npy").write_bytes(content)
    with pytest.raises(UserError, match="not a file of n-grams"):
        EvaluationNgrams.load(tmp_path / "file.npy")


def test_an_array_of_something_else_is_refused(tmp_path):
    np.save(tmp_path / "file.npy", np.zeros(3))
    with pytest.raises(UserError, match="float64"):
        EvaluationNgrams.load(tmp_path / "file.npy")


def test_evaluation_sets_of_one_name_stay_two():
    paths = ["a/test.jsonl", "s3://bucket/b/test.jsonl", "c/*.jsonl", "folder/"]
    assert set_names(paths) == ["test.jsonl", "test.jsonl-2", "_.jsonl", "folder"]
