"""The way in with the component oidc: from a host of the gateway to who looks into the ID token."""

import re
from typing import Any

import pytest

from tests.unit.infra.manifests import Resource, config, one, pods, render
from tests.unit.infra.test_kubernetes_network import labels_of, selected


@pytest.fixture(scope="module")
def resources() -> list[Resource]:
    return render("oidc")


def test_each_route_but_airflows_and_the_programs_asks_for_a_login(
    resources: list[Resource],
) -> None:
    policy = one(resources, "SecurityPolicy", "login")["spec"]
    behind = {each["name"] for each in policy["targetRefs"]}
    routes = {r["metadata"]["name"]: r["spec"] for r in resources if r["kind"] == "HTTPRoute"}
    # Airflow has a login of its own, and MLflow one of its own for programs.
    assert behind == routes.keys() - {"to-https", "airflow", "mlflow-programs"}
    (match,) = routes["mlflow-programs"]["rules"][0].pop("matches")
    assert routes["mlflow-programs"] == routes["mlflow"]
    (header,) = match["headers"]
    basic, others = "Basic YTpi", ("Bearer YTpi", "Basic", "basically", "")
    assert header["name"] == policy["oidc"]["forwardIDToken"]["header"] == "Authorization"
    assert re.fullmatch(header["value"], basic)  # Envoy matches the whole value
    assert not any(re.fullmatch(header["value"], each) for each in others)
    listeners = {e["name"]: e for e in one(resources, "Gateway", "penstock")["spec"]["listeners"]}
    for name in behind:
        (parent,) = routes[name]["parentRefs"]
        assert routes[name]["hostnames"] == [listeners[parent["sectionName"]]["hostname"]]
        assert listeners[parent["sectionName"]]["protocol"] == "HTTPS"


def test_all_three_ask_the_same_provider_for_the_same_client(resources: list[Resource]) -> None:
    of_airflow, of_mlflow = config(resources, "airflow"), config(resources, "mlflow")
    told = {key: value for key, value in of_mlflow.items() if "_OIDC_" in key}
    assert len(told) == 4
    assert told.items() <= of_airflow.items()
    oidc = one(resources, "SecurityPolicy", "login")["spec"]["oidc"]
    assert oidc["provider"]["issuer"] == told["PENSTOCK_OIDC_ISSUER"]
    assert oidc["clientID"] == told["PENSTOCK_OIDC_CLIENT"]
    assert " ".join(oidc["scopes"]) == of_airflow["PENSTOCK_OIDC_SCOPE"]
    asked = {
        name: one(resources, "ExternalSecret", name)["spec"]["data"]
        for name in ("airflow-oidc", oidc["clientSecret"]["name"])
    }
    (airflow,), (gateway,) = asked.values()
    assert airflow["remoteRef"] == gateway["remoteRef"]
    assert gateway["secretKey"] == "client-secret"  # the key that Envoy Gateway reads
    provider = one(resources, "NetworkPolicy", "login")["spec"]["podSelector"]
    labels = labels_of(resources)
    assert {n for n, each in labels.items() if selected(provider, each)} == {"api-server", "mlflow"}


def test_the_gateway_reaches_rays_dashboard_by_its_proxy_over_tls(
    resources: list[Resource],
) -> None:
    (backend,) = one(resources, "HTTPRoute", "ray-dashboard")["spec"]["rules"][0]["backendRefs"]
    (port,) = one(resources, "Service", backend["name"])["spec"]["ports"]
    assert backend["port"] == port["port"]
    tls = one(resources, "BackendTLSPolicy", "ray-dashboard")["spec"]
    assert [each["name"] for each in tls["targetRefs"]] == [backend["name"]]
    certificate = one(resources, "Certificate", "ray-dashboard")["spec"]
    assert tls["validation"]["hostname"] in certificate["dnsNames"]
    (authority,) = tls["validation"]["caCertificateRefs"]
    assert authority["name"] == certificate["secretName"]
    of_ray = one(resources, "Certificate", "ray-https")["spec"]
    assert certificate["issuerRef"] == of_ray["issuerRef"]  # whose ca.crt the proxy trusts
    pod = pods(resources)["ray-dashboard"]["spec"]
    (container,) = pod["containers"]
    text = config(resources, "ray-dashboard")["ray-dashboard.conf"]
    assert re.findall(r"listen (\d+)", text) == [str(container["ports"][0]["containerPort"])]
    for service, listens in re.findall(r"proxy_pass https?://([\w-]+):(\d+)", text):
        (found,) = one(resources, "Service", service)["spec"]["ports"]
        assert str(found["port"]) == listens
    assert all(host in of_ray["dnsNames"] for host in re.findall(r"https://([\w-]+)", text))
    # Each file that the proxy reads is mounted, and the token is in none of them but the secret.
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes: dict[str, Any] = {each["name"]: each for each in pod["volumes"]}
    secret = volumes[mounts["/secrets"]]["secret"]["secretName"]
    (included,) = re.findall(r"include /secrets/([\w.-]+)", text)
    made = one(resources, "ExternalSecret", secret)["spec"]["target"]["template"]["data"]
    assert made == {included: 'proxy_set_header Authorization "Bearer {{ .token }}";'}
    assert volumes[mounts["/tls"]]["secret"]["secretName"] == certificate["secretName"]


def test_rays_own_pods_are_as_without_it(resources: list[Resource]) -> None:
    assert one(resources, "RayCluster", "ray") == one(render(), "RayCluster", "ray")
