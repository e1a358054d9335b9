"""What keeps the platform's rows: Postgres in the object store, and a way back from there."""

import pytest

from tests.unit.infra.custom_resources import problems
from tests.unit.infra.manifests import Resource, one, render
from tests.unit.infra.test_kubernetes_values import OTHERS, changed

PLUGIN = "barman-cloud.cloudnative-pg.io"


@pytest.fixture(scope="module")
def resources() -> list[Resource]:
    return render("backup", "on-prem-s3", values=changed(OTHERS))


def test_postgres_is_archived_all_the_time_and_whole_each_night(resources: list[Resource]) -> None:
    assert [problem for each in resources for problem in problems(each)] == []
    (plugin,) = one(resources, "Cluster", "postgres")["spec"]["plugins"]
    assert plugin["isWALArchiver"] is True
    store = one(resources, "ObjectStore", plugin["parameters"]["barmanObjectName"])
    nightly = one(resources, "ScheduledBackup", "nightly")["spec"]
    assert nightly["cluster"]["name"] == "postgres"
    assert nightly["pluginConfiguration"]["name"] == plugin["name"] == PLUGIN
    where = store["spec"]["configuration"]
    assert where["destinationPath"] == f"s3://{OTHERS['bucket']}/postgres"
    assert where["endpointURL"] == OTHERS["s3-endpoint"]
    authority = one(resources, "Secret", where["endpointCA"]["name"])
    assert where["endpointCA"]["key"] in authority["data"]
    keys = one(resources, "ExternalSecret", where["s3Credentials"]["accessKeyId"]["name"])["spec"]
    assert {key["key"] for key in where["s3Credentials"].values()} == keys["target"]["template"][
        "data"
    ].keys()
    (rule,) = one(resources, "NetworkPolicy", "backup")["spec"]["egress"]
    assert rule == {
        "to": [{"ipBlock": {"cidr": OTHERS["s3-cidr"]}}],
        "ports": [{"port": int(OTHERS["s3-port"])}],
    }


def test_a_restored_postgres_reads_the_old_archive_and_writes_another() -> None:
    resources = render("backup", "restore")
    assert [problem for each in resources for problem in problems(each)] == []
    spec = one(resources, "Cluster", "postgres")["spec"]
    (before,) = spec["externalClusters"]
    assert spec["bootstrap"]["recovery"]["source"] == before["name"]
    fresh = one(render("backup"), "Cluster", "postgres")["spec"]
    assert spec["bootstrap"]["recovery"].items() >= fresh["bootstrap"]["initdb"].items()
    (writes,) = spec["plugins"]
    reads = before["plugin"]
    assert reads["name"] == writes["name"]
    assert one(resources, "ObjectStore", reads["parameters"]["barmanObjectName"])
    assert reads["parameters"]["serverName"] == "postgres"  # the cluster's name, by default
    assert writes["parameters"]["serverName"] != "postgres"
