"""Penstock's own sentences are whole; what is wrong with a user's own is one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.core.errors import UserError
from pipelines.recipe.bias_templates import (
    PARTICLES,
    BiasTemplate,
    Sentence,
    load_bias_templates,
)


def test_penstocks_own_are_balanced_and_in_both_languages() -> None:
    sets = load_bias_templates(None)
    assert [each.name for each in sets] == ["gender en", "gender ko", "age en", "age ko"]
    for each in sets:
        first, second = each.groups
        ascribed = [template.ascribed_to for template in each.templates]
        assert ascribed.count(first) == ascribed.count(second) == 6
        assert len(set(each.templates)) == 12
        hangul = any("가" <= letter <= "힣" for letter in each.templates[0].text)
        assert hangul == (each.language == "ko")


@pytest.mark.parametrize(
    ("term", "forms"),
    [
        ("삼촌", ["은", "이", "을", "과", "으로", "이랑"]),
        ("이모", ["는", "가", "를", "와", "로", "랑"]),
        ("딸", ["은", "이", "을", "과", "로", "이랑"]),  # 로 behind ㄹ
        ("형", ["은", "이", "을", "과", "으로", "이랑"]),
    ],
)
def test_a_particle_follows_how_the_term_ends(term: str, forms: list[str]) -> None:
    for pair, form in zip(PARTICLES, forms, strict=True):
        template = BiasTemplate(text=f"우리 {{term}}{{{pair}}} 안다.", ascribed_to="a")
        assert template.sentence(term) == Sentence(f"우리 {term}{form}", " 안다.")


def test_both_terms_of_a_pair_have_their_own_particle_and_the_same_continuation() -> None:
    korean = next(each for each in load_bias_templates(None) if each.name == "gender ko")
    uncle, aunt = (korean.templates[0].sentence(term) for term in ("삼촌", "이모"))
    assert (uncle.prompt, aunt.prompt) == ("우리 삼촌은", "우리 이모는")
    assert uncle.continuation == aunt.continuation


def one_set(**changes: Any) -> dict[str, Any]:
    texts = [("The {term} leads.", "men"), ("The {term} serves.", "women")]
    return {
        "name": "own",
        "language": "en",
        "groups": {"men": ["man"], "women": ["woman"]},
        "templates": [{"text": text, "ascribed_to": group} for text, group in texts],
    } | changes


def with_text(text: str) -> dict[str, Any]:
    whole = one_set()["templates"]
    return one_set(templates=[{"text": text, "ascribed_to": "men"}, *whole])


def load(folder: Path, values: Any) -> Any:
    path = folder / "own.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return load_bias_templates(str(path))


def test_a_users_own_file_is_read(tmp_path: Path) -> None:
    (found,) = load(tmp_path, {"sets": [one_set()]})
    assert found.pairs == [("man", "woman")]
    assert found.templates[0].sentence("man") == ("The man", " leads.")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", 'the file must be a JSON object with "sets"'),
        ("", "not valid JSON"),
        ({}, "sets: Field required"),
        ({"sets": []}, "sets: Tuple should have at least 1 item"),
        ({"sets": [one_set(groups={})]}, "set `own`: `groups` has nothing; it needs two groups"),
        (
            {"sets": [one_set(groups={"men": ["man", "boy"], "women": ["woman"]})]},
            "`groups` has men 2, women 1; it needs two groups with equally many terms",
        ),
        ({"sets": [one_set(groups={"men": ["man"], "women": [" "]})]}, "and ' ' are not a pair"),
        ({"sets": [one_set(groups={"men": ["man"], "women": ["man"]})]}, "are not a pair of terms"),
        ({"sets": [one_set(templates=[])]}, "no template is ascribed to 'men'"),
        (
            {"sets": [one_set(templates=one_set()["templates"][:1])]},
            "no template is ascribed to 'women'; without some for each group",
        ),
        (
            {"sets": [one_set(templates=[{"text": "The {term} is.", "ascribed_to": "boys"}])]},
            "`ascribed_to` names 'boys', which is not among its groups",
        ),
        ({"sets": [with_text("He leads.")]}, "template 'He leads.' needs {term} once"),
        ({"sets": [with_text("Here is the {term}")]}, "needs {term} once and text after it"),
        ({"sets": [with_text("A {term} is a {term}.")]}, "needs {term} once"),
        ({"sets": [with_text("A {person} is.")]}, "needs {term} once"),
        (
            {"sets": [with_text("A {term}{도/만} is.")]},
            "directly after {term} may stand one of {은/는}",
        ),
        ({"sets": [with_text("A {term}{은/는} is.")]}, "'man' does not end in a Hangul syllable"),
        ({"sets": [one_set(), one_set()]}, "two sets are named own"),
        ({"sets": [one_set(name="a/b")]}, "sets.0.name: String should match pattern"),
        ({"sets": [one_set(term="x")]}, "sets.0.term: Extra inputs are not permitted"),
        ({"sets": [{"name": "own"}]}, "sets.0.language: Field required"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, values: Any, said: str) -> None:
    with pytest.raises(UserError) as raised:
        load(tmp_path, values)
    assert str(raised.value).startswith(f"{tmp_path / 'own.json'}: ")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json: cannot be read .*evaluate\.bias\.templates"):
        load_bias_templates(str(tmp_path / "none.json"))
    (tmp_path / "latin.json").write_bytes(b'{"sets": "\xe9"}')
    with pytest.raises(UserError, match="not valid JSON"):
        load_bias_templates(str(tmp_path / "latin.json"))
