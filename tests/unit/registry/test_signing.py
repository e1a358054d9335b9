import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.registry.signing import SIGNATURE, ensure_key_pair, public_key, sign, verify


@pytest.fixture
def key(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    path = load_settings().signing_key
    ensure_key_pair(path)
    return path


@pytest.fixture
def model(tmp_path, key):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "README.md").write_text("# a model")
    sign(folder)
    return folder


def refused(model):
    with pytest.raises(UserError) as error:
        verify(model, "m@1")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_key_is_the_owners_alone_and_lasts(key):
    assert key.stat().st_mode & 0o777 == 0o600
    content = key.read_bytes(), public_key(key).read_bytes()
    ensure_key_pair(key)
    assert (key.read_bytes(), public_key(key).read_bytes()) == content
    public_key(key).unlink()
    ensure_key_pair(key)
    assert (key.read_bytes(), public_key(key).read_bytes()) == content


def test_a_public_key_alone_verifies_and_makes_no_other(key, model):
    key.unlink()
    ensure_key_pair(key)
    verify(model, "m@1")
    with pytest.raises(UserError, match="no key to sign the model with"):
        sign(model)


def test_openssfs_own_command_verifies_it(key, model):
    command = [Path(sys.prefix) / "bin" / "model_signing", "verify", "key", model]
    options = ["--signature", model / SIGNATURE, "--public_key", public_key(key)]
    assert subprocess.run([*command, *options]).returncode == 0
    (model / "config.json").write_text("[]")
    assert subprocess.run([*command, *options]).returncode != 0


def test_each_file_that_differs_is_named(model):
    (model / "config.json").write_text("[]")
    (model / "sub" / "README.md").rename(model / "CARD.md")
    assert refused(model) == (
        "m@1 is not what was signed: altered config.json; missing sub/README.md; extra CARD.md"
    )


def test_nothing_hides_among_gits_files(model):
    (model / ".gitignore").write_text("x")
    assert refused(model) == "m@1 is not what was signed: extra .gitignore"


def test_a_link_to_the_same_content_is_not_the_file(model, tmp_path):
    (model / "config.json").rename(tmp_path / "config.json")
    (model / "config.json").symlink_to(tmp_path / "config.json")
    assert "is a symlink" in refused(model)


def test_a_signature_that_lists_what_is_there_now_is_false(model):
    path = model / SIGNATURE
    bundle = json.loads(path.read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(
        json.dumps(statement | {"note": "mine"}).encode()
    ).decode()
    path.write_text(json.dumps(bundle))
    assert refused(model).startswith("m@1: its signature is invalid: ")


@pytest.mark.parametrize("content", ["", "{}", '{"dsseEnvelope": {"payload": "e30="}}'])
def test_a_signature_that_is_none(model, content):
    (model / SIGNATURE).write_text(content)
    assert refused(model).startswith("m@1: its signature cannot be read: ")


def test_a_model_without_a_signature(model):
    (model / SIGNATURE).unlink()
    assert refused(model).startswith("m@1 is not signed: ")


def test_another_key_is_said_to_be_one(key, model):
    key.unlink()
    public_key(key).unlink()
    ensure_key_pair(key)
    said = refused(model)
    assert said.startswith("m@1 was signed with a key that is not trusted here: none of ")
    assert f"{public_key(key)};" in said
    public_key(key).unlink()
    assert "no public key to verify m@1 with" in refused(model)
    public_key(key).write_text("nonsense")
    assert "not a public key in PEM" in refused(model)


def test_what_an_old_key_signed_is_trusted_while_its_public_half_is_kept(key, model):
    public_key(key).rename(key.with_name("model-signing.2025.pub"))
    key.unlink()
    ensure_key_pair(key)
    verify(model, "m@1")
    (model / "config.json").write_text("[]")
    assert refused(model) == "m@1 is not what was signed: altered config.json"
    sign(model)
    key.with_name("model-signing.2025.pub").unlink()
    verify(model, "m@1")


def test_a_key_that_is_given(tmp_path, monkeypatch, model):
    given = tmp_path / "given.pem"
    monkeypatch.setenv("PENSTOCK_SIGNING_KEY", str(given))
    ensure_key_pair(given)
    sign(model)
    verify(model, "m@1")
    given.write_text("nonsense")
    with pytest.raises(UserError, match="not a private key in PEM without a password"):
        sign(model)
