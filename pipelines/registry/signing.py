"""Signatures of model folders in OpenSSF's format (model-signing 1.0).

The signature, `model.sig`, is a Sigstore bundle with the SHA-256 of every other file of the folder.
Anyone with the public key can check it with OpenSSF's own command:

    model_signing verify key FOLDER --signature FOLDER/model.sig --public_key KEY.pub

When you change the key, keep the old public key beside the new one, under a name with the same
beginning (`model-signing.2025.pub` beside `model-signing.pem`), to still trust its signatures.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.core.storage import read_json, write_text
from pipelines.registry.integrity import REGISTERED_META

if TYPE_CHECKING:
    from model_signing import hashing, signing

SIGNATURE = "model.sig"
# MLflow writes a version's name and number to the second file when it loads a folder.
_NOT_SIGNED = (SIGNATURE, REGISTERED_META)


def ensure_key_pair(key: Path) -> None:
    """Create an elliptic-curve key if there is none; only the owner may read either half.

    A public key without a private key stays so: there, models are verified but not signed.
    """
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric import ec

    public = public_key(key)
    if public.exists():
        return
    if not key.exists():
        private = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()
        )
        write_text(key, private.decode(), mode=0o600)
    loaded = pem.load_pem_private_key(key.read_bytes(), password=None).public_key()
    spki = pem.PublicFormat.SubjectPublicKeyInfo
    write_text(public, loaded.public_bytes(pem.Encoding.PEM, spki).decode(), mode=0o600)


def public_key(key: Path) -> Path:
    """Return the path of the public half of a key."""
    return key.with_name(f"{key.name}.pub")


def sign(folder: Path) -> None:
    """Write `model.sig` into a folder, which signs all of its files.

    Raises:
        UserError: There is no key, or it is not a private key without a password.
    """
    _signer().sign(folder, folder / SIGNATURE)


def check_key() -> None:
    """Raise a UserError if there is no key, or it is not a private key without a password."""
    _signer()


def _signer() -> "signing.Config":
    from model_signing import signing

    key = load_settings().signing_key
    if not key.is_file():
        raise UserError(
            f"{key}: no key to sign the model with; `penstock down`, then `penstock up` makes one, "
            "or set PENSTOCK_SIGNING_KEY"
        )
    try:
        config = signing.Config().use_elliptic_key_signer(private_key=key)
    except (ValueError, TypeError) as error:  # TypeError: the key has a password
        raise UserError(f"{key}: not a private key in PEM without a password: {error}") from error
    return config.set_hashing_config(_hashing())


def verify(folder: Path, label: str) -> None:
    """Check that a folder has exactly the files that were signed.

    Args:
        folder: The folder, with `model.sig` in it.
        label: The model's name as a user writes it.

    Raises:
        UserError: There is no signature or no key, another key signed, or files differ, which the
            error names.
    """
    from cryptography.exceptions import InvalidSignature
    from model_signing import verifying

    signature = folder / SIGNATURE
    if not signature.is_file():
        raise UserError(f"{label} is not signed: {folder} has no {SIGNATURE}; register it again")
    signed, named = _signed_files(signature, label)
    public = _signers_key(named, label)
    config = verifying.Config().use_elliptic_key_verifier(public_key=public)
    try:
        config.set_hashing_config(_hashing()).verify(folder, signature)
    except InvalidSignature:
        raise UserError(f"{label}: its signature is invalid: {signature} was altered") from None
    except ValueError as error:
        reason = _differences(folder, signed) or str(error).strip().splitlines()[0]
        raise UserError(f"{label} is not what was signed: {reason}") from error


def _signers_key(named: str, label: str) -> Path:
    """Return the trusted public key with a fingerprint, which a signature names as its signer's."""
    key = load_settings().signing_key
    own = public_key(key)
    trusted = [own, *sorted(set(key.parent.glob(f"{key.stem}.*.pub")) - {own})]
    trusted = [each for each in trusted if each.is_file()]
    if not trusted:
        raise UserError(f"{own}: no public key to verify {label} with; copy the signer's key here")
    for each in trusted:
        if _fingerprint(each) == named:
            return each
    raise UserError(
        f"{label} was signed with a key that is not trusted here: none of "
        f"{', '.join(map(str, trusted))}; if the key was changed, put the old public key "
        f"beside it as {key.stem}.old.pub"
    )


def _fingerprint(public: Path) -> str:
    """Return a public key's fingerprint, as signatures name it.

    Raises:
        UserError: The file is not a public key in PEM.
    """
    from cryptography.hazmat.primitives import serialization as pem

    try:
        key = pem.load_pem_public_key(public.read_bytes())
    except ValueError as error:
        raise UserError(f"{public}: not a public key in PEM: {error}") from error
    spki = key.public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()


def _hashing() -> "hashing.Config":
    from model_signing import hashing

    # By default git's files are skipped, and any file could hide there.
    return hashing.Config().set_ignored_paths(paths=_NOT_SIGNED, ignore_git_paths=False)


def _signed_files(signature: Path, label: str) -> tuple[dict[str, str], str]:
    """Return hex digests by file from a signature, and its key's fingerprint.

    Do not trust them before it is verified.
    """
    try:
        values = read_json(signature)
        payload = values["dsseEnvelope"]["payload"]
        resources = json.loads(base64.b64decode(payload))["predicate"]["resources"]
        digests = {str(each["name"]): str(each["digest"]) for each in resources}
        return digests, str(values["verificationMaterial"]["publicKey"]["hint"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{label}: its signature cannot be read: {signature} was altered"
        ) from error


def _differences(folder: Path, signed: Mapping[str, str]) -> str:
    """Return the files that differ from the signed ones; OpenSSF's message is mostly hashes."""
    try:
        manifest = _hashing().hash(folder)
    except ValueError as error:  # a link, or there is no file
        return str(error)
    present = {each.identifier: each.digest.digest_hex for each in manifest.resource_descriptors()}
    words = {
        "altered": {name for name in signed if present.get(name, signed[name]) != signed[name]},
        "missing": signed.keys() - present.keys(),
        "extra": present.keys() - signed.keys(),
    }
    return "; ".join(f"{what} {', '.join(sorted(names))}" for what, names in words.items() if names)
