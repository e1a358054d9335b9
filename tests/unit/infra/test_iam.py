"""The policies by which each part reaches S3, enforced by moto: what it needs, and no more."""

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws, settings
from moto.iam.policy_validation import IAMPolicyDocumentValidator

from pipelines.core.settings import PROJECT

POLICIES = {path.stem: path for path in (PROJECT / "infra" / "iam").glob("*.json")}
BUCKET = "penstock"
# part, folder of the bucket: what it may do there
MAY = {
    ("airflow", "sources"): {"get"},
    ("airflow", "datasets"): {"get", "put"},
    ("airflow", "mlflow"): {"get", "put", "delete"},
    ("airflow", "checkpoints"): set(),
    ("airflow", "code"): {"get"},
    **{(part, "code"): set[str]() for part in ("ray", "mlflow", "postgres")},
    ("ray", "sources"): {"get"},
    ("ray", "datasets"): {"get"},
    ("ray", "mlflow"): {"get", "put"},
    ("ray", "checkpoints"): {"get", "put", "delete"},
    ("mlflow", "sources"): set(),
    ("mlflow", "datasets"): set(),
    ("mlflow", "mlflow"): {"get"},
    ("mlflow", "checkpoints"): set(),
    **{(part, "postgres"): set[str]() for part in ("airflow", "ray", "mlflow")},
    ("postgres", "postgres"): {"get", "put", "delete"},
    **{("postgres", folder): set() for folder in ("sources", "datasets", "mlflow", "checkpoints")},
}


@pytest.mark.parametrize("part", POLICIES)
def test_a_policy_is_one_and_names_what_it_allows(part: str) -> None:
    text = POLICIES[part].read_text()
    IAMPolicyDocumentValidator(text).validate()
    for statement in json.loads(text)["Statement"]:
        assert statement["Effect"] == "Allow"
        assert not any("*" in action for action in statement["Action"])
        for resource in statement["Resource"]:
            assert resource.startswith(f"arn:aws:s3:::{BUCKET}")
            assert resource.count("*") <= 1 and not resource.startswith(f"arn:aws:s3:::{BUCKET}/*")
        assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "true"}}


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A client of each part's own keys, and `root`, whom nobody asks."""
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    with mock_aws():
        root = boto3.Session("root", "root", region_name="us-east-1")
        root.client("s3").create_bucket(Bucket=BUCKET)
        iam = root.client("iam")
        found = {"root": root.client("s3")}
        for part, path in POLICIES.items():
            iam.create_user(UserName=part)
            iam.put_user_policy(UserName=part, PolicyName=part, PolicyDocument=path.read_text())
            key = iam.create_access_key(UserName=part)["AccessKey"]
            found[part] = boto3.client(
                "s3",
                region_name="us-east-1",
                aws_access_key_id=key["AccessKeyId"],
                aws_secret_access_key=key["SecretAccessKey"],
            )
        yield found


@pytest.mark.long
@pytest.mark.parametrize(("part", "folder"), MAY, ids="-".join)
def test_a_part_can_do_what_it_may_and_no_more(
    part: str, folder: str, clients: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"Bucket": BUCKET, "Key": f"{folder}/a"}
    clients["root"].put_object(**place, Body=b"a")
    monkeypatch.setattr("moto.core.responses.ActionAuthenticatorMixin.request_count", 0)
    monkeypatch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    did = set()
    for name, call in {
        "get": lambda: clients[part].get_object(**place),
        "put": lambda: clients[part].put_object(**place, Body=b"b"),
        "delete": lambda: clients[part].delete_object(**place),
    }.items():
        try:
            call()
        except ClientError as error:
            assert error.response["Error"]["Code"] == "AccessDenied"
        else:
            did.add(name)
    assert did == MAY[part, folder]
