"""Airflow's login by OpenID Connect: people's groups at their provider give them their roles here.

Roles are set anew at each login. Programs go on with a user and a password of Airflow's own.
"""

import os
from pathlib import Path
from typing import Any

from airflow.providers.fab.auth_manager.security_manager.override import (
    FabAirflowSecurityManagerOverride,
)
from flask_appbuilder.const import AUTH_OAUTH


class Login(FabAirflowSecurityManagerOverride):
    """What the ID token says, whose signature, audience and nonce Authlib has checked."""

    def get_oauth_user_info(self, provider: str, resp: dict[str, Any]) -> dict[str, Any]:
        """Return the user who logs in, and the groups that have a role here."""
        who = resp["userinfo"]
        return {
            "username": f"{provider}_{who['sub']}",  # the provider gives no other user the same
            "email": who.get("email", f"{who['sub']}@{provider}"),
            "first_name": who.get("given_name") or who.get("name") or who["sub"],
            "last_name": who.get("family_name", "-"),
            "role_keys": who.get("groups", []),
        }


SECURITY_MANAGER_CLASS = Login
AUTH_TYPE = AUTH_OAUTH
AUTH_USER_REGISTRATION = True
AUTH_USER_REGISTRATION_ROLE = "Public"  # who is in neither group may see nothing
AUTH_ROLES_SYNC_AT_LOGIN = True
AUTH_ROLES_MAPPING = {
    os.environ["PENSTOCK_OIDC_ADMINS"]: ["Admin"],
    os.environ["PENSTOCK_OIDC_USERS"]: ["Op"],
}
OAUTH_PROVIDERS = [
    {
        "name": "oidc",
        "icon": "fa-key",
        "token_key": "access_token",
        "remote_app": {
            "client_id": os.environ["PENSTOCK_OIDC_CLIENT"],
            "client_secret": Path(os.environ["PENSTOCK_SECRETS"], "oidc-secret").read_text(),
            "server_metadata_url": (
                f"{os.environ['PENSTOCK_OIDC_ISSUER']}/.well-known/openid-configuration"
            ),
            "client_kwargs": {"scope": os.environ["PENSTOCK_OIDC_SCOPE"]},
        },
    }
]
