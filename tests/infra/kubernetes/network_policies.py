"""Who reaches whom, by the network policies that an API server holds."""

import ipaddress
from dataclasses import dataclass, field
from typing import Any, Self

from tests.infra.kubernetes.control_plane import ControlPlane, Resource


@dataclass(frozen=True)
class Place:
    """Where a connection begins or ends: a pod, or an address beyond the cluster."""

    namespace: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    namespace_labels: dict[str, str] = field(default_factory=dict)
    named_ports: dict[str, int] = field(default_factory=dict)
    address: str = ""

    @classmethod
    def of_pod(cls, pod: Resource, namespace: Resource) -> Self:
        ports = [port for each in pod["spec"]["containers"] for port in each.get("ports", [])]
        return cls(
            namespace=namespace["metadata"]["name"],
            labels=pod["metadata"].get("labels", {}),
            namespace_labels=namespace["metadata"].get("labels", {}),
            named_ports={port["name"]: port["containerPort"] for port in ports if "name" in port},
        )


class Policies:
    """The network policies of a cluster, as Kubernetes defines their meaning."""

    def __init__(self, plane: ControlPlane) -> None:
        self._all: list[Resource] = plane.get("networkpolicies", "--all-namespaces")

    def let(self, source: Place, destination: Place, port: int) -> bool:
        """Whether a TCP connection comes about."""
        return self._side("Egress", source, destination, destination, port) and self._side(
            "Ingress", destination, source, destination, port
        )

    def _side(self, way: str, own: Place, other: Place, destination: Place, port: int) -> bool:
        """Whether the pod's own policies let it; a pod that none selects may do anything."""
        rules_key, peers_key = ("egress", "to") if way == "Egress" else ("ingress", "from")
        isolated = False
        for policy in self._all:
            spec, namespace = policy["spec"], policy["metadata"]["namespace"]
            if way not in spec["policyTypes"] or namespace != own.namespace:
                continue
            if not selects(spec["podSelector"], own.labels):
                continue
            isolated = True
            for rule in spec.get(rules_key) or []:
                peers = rule.get(peers_key)
                if (not peers or any(_is_peer(each, namespace, other) for each in peers)) and (
                    _has_port(rule.get("ports"), destination, port)
                ):
                    return True
        return not isolated


def selects(selector: Resource, labels: dict[str, str]) -> bool:
    """Whether a label selector means what has these labels."""
    holds: dict[str, Any] = {
        "In": lambda key, values: labels.get(key) in values,
        "NotIn": lambda key, values: labels.get(key) not in values,
        "Exists": lambda key, _: key in labels,
        "DoesNotExist": lambda key, _: key not in labels,
    }
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        holds[each["operator"]](each["key"], each.get("values"))
        for each in selector.get("matchExpressions", [])
    )


def _is_peer(peer: Resource, namespace: str, place: Place) -> bool:
    if block := peer.get("ipBlock"):
        if not place.address:
            return False
        address = ipaddress.ip_address(place.address)
        return address in ipaddress.ip_network(block["cidr"]) and not any(
            address in ipaddress.ip_network(each) for each in block.get("except", [])
        )
    if place.address:
        return False
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], place.namespace_labels):
            return False
    elif place.namespace != namespace:
        return False
    return selects(peer.get("podSelector", {}), place.labels)


def _has_port(ports: list[Resource] | None, destination: Place, port: int) -> bool:
    if not ports:
        return True
    for each in ports:
        if each.get("protocol", "TCP") != "TCP":
            continue
        wanted = each.get("port", port)
        if destination.named_ports.get(wanted, wanted) == port:
            return True
    return False
