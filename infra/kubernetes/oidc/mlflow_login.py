"""MLflow's login by OpenID Connect: each request brings the ID token that the gateway got.

Who visits for the first time becomes a user of MLflow. Programs still log in with a user and a
password of MLflow's own.
"""

import json
import os
import secrets
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.request import urlopen

import jwt
from flask import Response, request
from mlflow.exceptions import MlflowException
from mlflow.server.auth import authenticate_request_basic_auth, store
from werkzeug.datastructures import Authorization

ISSUER = os.environ["PENSTOCK_OIDC_ISSUER"]
ALGORITHMS = ("RS256", "PS256", "ES256", "EdDSA")  # nobody but the provider can sign with these


def authenticate() -> Authorization | Response:
    """Return who sent the request; MLflow calls this as its `authorization_function`."""
    shown = request.authorization
    if shown is None or shown.type != "bearer":
        return authenticate_request_basic_auth()
    try:
        who = claims(shown.token or "")
    except jwt.PyJWTError as error:
        return Response(f"the ID token is refused: {error}", 401)
    groups = {*who.get("groups", [])}
    is_admin = os.environ["PENSTOCK_OIDC_ADMINS"] in groups
    if not is_admin and os.environ["PENSTOCK_OIDC_USERS"] not in groups:
        return Response("none of your groups has access", 403)
    name = f"oidc_{who['sub']}"  # the provider gives no other user the same
    remember(name, is_admin)
    return Authorization("bearer", {"username": name})


def claims(token: str) -> dict[str, Any]:
    """Return what an ID token says, whose signature, issuer, audience and end have been checked."""
    named = jwt.get_unverified_header(token).get("kid")
    # A provider that has one key need not name it.
    key = keys().get_signing_key(named) if named else keys().get_signing_keys()[0]
    found: dict[str, Any] = jwt.decode(
        token,
        key,
        algorithms=ALGORITHMS,
        issuer=ISSUER,
        audience=os.environ["PENSTOCK_OIDC_CLIENT"],
        options={"require": ["sub", "iss", "aud", "exp"]},
    )
    return found


@cache
def keys() -> jwt.PyJWKClient:
    """Return the provider's keys, which are asked for again every five minutes."""
    with urlopen(f"{ISSUER}/.well-known/openid-configuration", timeout=10) as answer:  # noqa: S310
        return jwt.PyJWKClient(json.load(answer)["jwks_uri"], timeout=10)


def remember(name: str, is_admin: bool) -> None:
    """See that MLflow has this user, with the right of today's groups."""
    if not store.has_user(name):
        with suppress(MlflowException):  # a page asks many things at once, and one comes first
            store.create_user(name, secrets.token_urlsafe(), is_admin)
    if store.get_user(name).is_admin != is_admin:
        store.update_user(name, is_admin=is_admin)
