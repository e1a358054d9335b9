"""Schemas of the custom resources that the manifests use, for no package ships them.

Only fields that are used are listed, and no others pass. All that is rendered was held against the
operators' own definitions, in which an unknown field was an error: KubeRay 1.7.0, External Secrets
2.9.0, cert-manager 1.21.1, CloudNativePG 1.30.0, Kueue 0.19.2, Prometheus' operator 0.93.0, Gateway
API 1.6.1, Envoy Gateway 1.9.0.
"""

from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator

VERSION = "1.33"  # of Kubernetes, whose own resources a package has the schemas of
STRING = {"type": "string"}
NUMBER = {"type": "integer", "minimum": 0}
ANYTHING = {"type": "object"}


def fields(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """An object of these fields and no others."""
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


def list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


NAMED = fields({"name": STRING})
HERE = fields({"namespaces": fields({"from": {"const": "Same"}})})
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
OWNED = {"database": STRING, "owner": STRING, "secret": NAMED}
PLUGIN = {
    "name": {"const": "barman-cloud.cloudnative-pg.io"},
    "parameters": fields({"barmanObjectName": STRING}, serverName=STRING),
}
MATCH = ("type", "name", "value")
ROUTE = fields({"group": STRING, "kind": {"const": "HTTPRoute"}, "name": STRING})
IN_CORE = {"group": {"const": ""}, "name": STRING}  # Kubernetes' first API
KEY = fields({"name": STRING, "key": STRING})
GROUP = {"rayStartParams": {"type": "object", "additionalProperties": STRING}, "template": ANYTHING}
SPECS = {
    "ray.io/v1 RayCluster": fields(
        {
            "rayVersion": STRING,
            "authOptions": fields({"mode": {"enum": ["token"]}, "secretName": STRING}),
            "tlsOptions": fields({"enabled": {"const": True}}),
            "upgradeStrategy": fields({"type": {"enum": ["Recreate", "None"]}}),
            "headGroupSpec": fields(GROUP),
            "workerGroupSpecs": list_of(
                fields(
                    GROUP
                    | {"groupName": STRING}
                    | dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), NUMBER)
                )
            ),
        },
        enableInTreeAutoscaling={"type": "boolean"},
        autoscalerOptions=fields(
            {"version": {"enum": ["v1", "v2"]}},
            upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
            idleTimeoutSeconds=NUMBER,
            resources=ANYTHING,
            securityContext=ANYTHING,
            volumeMounts={"type": "array"},
        ),
        gcsFaultToleranceOptions=fields(
            {
                "redisAddress": STRING,
                "redisPassword": fields(
                    {"valueFrom": fields({"secretKeyRef": fields({"name": STRING, "key": STRING})})}
                ),
            }
        ),
    ),
    "gateway.networking.k8s.io/v1 Gateway": fields(
        {
            "gatewayClassName": STRING,
            "listeners": list_of(
                fields(
                    {
                        "name": STRING,
                        "port": PORT,
                        "protocol": {"enum": ["HTTP", "HTTPS"]},
                        "allowedRoutes": HERE,
                    },
                    hostname=STRING,
                    tls=fields(
                        {"mode": {"enum": ["Terminate"]}, "certificateRefs": list_of(NAMED)}
                    ),
                )
            ),
        }
    ),
    "gateway.networking.k8s.io/v1 HTTPRoute": fields(
        {
            "parentRefs": list_of(fields({"name": STRING, "sectionName": STRING})),
            "rules": list_of(
                fields(
                    {},
                    matches=list_of(
                        fields({"headers": list_of(fields(dict.fromkeys(MATCH, STRING)))})
                    ),
                    backendRefs=list_of(fields({"name": STRING, "port": PORT})),
                    filters=list_of(
                        fields(
                            {
                                "type": {"enum": ["RequestRedirect"]},
                                "requestRedirect": fields(
                                    {"scheme": {"const": "https"}, "statusCode": {"const": 301}}
                                ),
                            }
                        )
                    ),
                )
            ),
        },
        hostnames=list_of(STRING),
    ),
    "gateway.networking.k8s.io/v1 BackendTLSPolicy": fields(
        {
            "targetRefs": list_of(fields(IN_CORE | {"kind": {"const": "Service"}})),
            "validation": fields(
                {
                    "hostname": STRING,
                    "caCertificateRefs": list_of(fields(IN_CORE | {"kind": {"const": "Secret"}})),
                }
            ),
        }
    ),
    "gateway.envoyproxy.io/v1alpha1 SecurityPolicy": fields(
        {
            "targetRefs": list_of(ROUTE),
            "oidc": fields(
                {
                    "provider": fields({"issuer": {"type": "string", "pattern": "^https://"}}),
                    "clientID": STRING,
                    "clientSecret": NAMED,
                    "scopes": list_of(STRING),
                    "forwardIDToken": fields({"header": STRING}),
                    "cookieConfig": fields({"sameSite": {"enum": ["Lax", "Strict", "None"]}}),
                }
            ),
        }
    ),
    "kueue.x-k8s.io/v1beta2 ResourceFlavor": fields({}),
    "kueue.x-k8s.io/v1beta2 WorkloadPriorityClass": fields({}),
    "kueue.x-k8s.io/v1beta2 ClusterQueue": fields(
        {
            "cohortName": STRING,
            "preemption": fields({"withinClusterQueue": STRING, "reclaimWithinCohort": STRING}),
            "namespaceSelector": fields({"matchLabels": ANYTHING}),
            "resourceGroups": list_of(
                fields(
                    {
                        "coveredResources": list_of(STRING),
                        "flavors": list_of(
                            fields(
                                {
                                    "name": STRING,
                                    "resources": list_of(
                                        fields(
                                            {
                                                "name": STRING,
                                                "nominalQuota": {"type": ["integer", "string"]},
                                            }
                                        )
                                    ),
                                }
                            )
                        ),
                    }
                )
            ),
        }
    ),
    "kueue.x-k8s.io/v1beta2 LocalQueue": fields({"clusterQueue": STRING}),
    "snapscheduler.backube/v1 SnapshotSchedule": fields(
        {
            "claimSelector": fields({"matchLabels": ANYTHING}),
            "schedule": STRING,
            "retention": fields({"maxCount": NUMBER}),
        }
    ),
    "monitoring.coreos.com/v1 PodMonitor": fields(
        {
            "selector": fields({}, matchLabels=ANYTHING, matchExpressions=list_of(ANYTHING)),
            "podMetricsEndpoints": list_of(fields({"port": STRING, "interval": STRING})),
        }
    ),
    "monitoring.coreos.com/v1 PrometheusRule": fields(
        {
            "groups": list_of(
                fields(
                    {
                        "name": STRING,
                        "rules": list_of(
                            fields(
                                {
                                    "alert": STRING,
                                    "expr": STRING,
                                    "for": STRING,
                                    "labels": fields({"severity": {"enum": ["page", "ticket"]}}),
                                    "annotations": fields({"summary": STRING}),
                                }
                            )
                        ),
                    }
                )
            )
        }
    ),
    "external-secrets.io/v1 ExternalSecret": fields(
        {
            "refreshInterval": STRING,
            "secretStoreRef": fields({"kind": {"const": "ClusterSecretStore"}, "name": STRING}),
            "target": fields({"name": STRING}, template=fields({"type": STRING, "data": ANYTHING})),
            "data": list_of(fields({"secretKey": STRING, "remoteRef": fields({"key": STRING})})),
        }
    ),
    "cert-manager.io/v1 Issuer": {
        "oneOf": [
            fields({"selfSigned": fields({})}),
            fields({"ca": fields({"secretName": STRING})}),
        ]
    },
    "cert-manager.io/v1 Certificate": fields(
        {
            "secretName": STRING,
            "issuerRef": fields({"kind": {"enum": ["Issuer", "ClusterIssuer"]}, "name": STRING}),
            "privateKey": fields({"algorithm": STRING, "size": NUMBER}),
        },
        isCA={"type": "boolean"},
        commonName=STRING,
        dnsNames=list_of(STRING),
    ),
    "postgresql.cnpg.io/v1 Cluster": fields(
        {
            "instances": NUMBER,
            "storage": fields({"size": STRING}),
            "bootstrap": {
                "oneOf": [
                    fields({"initdb": fields(OWNED)}),
                    fields({"recovery": fields(OWNED | {"source": STRING})}),
                ]
            },
        },
        plugins=list_of(fields({"isWALArchiver": {"const": True}}, **PLUGIN)),
        externalClusters=list_of(fields({"name": STRING, "plugin": fields(PLUGIN)})),
        enablePDB={"type": "boolean"},
        imageName=STRING,
        resources=ANYTHING,
        inheritedMetadata=fields({"labels": ANYTHING}),
    ),
    "postgresql.cnpg.io/v1 ScheduledBackup": fields(
        {
            "schedule": {"type": "string", "pattern": r"^(\S+ ){5}\S+$"},
            "immediate": {"type": "boolean"},
            "backupOwnerReference": {"enum": ["none", "self", "cluster"]},
            "cluster": NAMED,
            "method": {"const": "plugin"},
            "pluginConfiguration": fields({"name": PLUGIN["name"]}),
        }
    ),
    "barmancloud.cnpg.io/v1 ObjectStore": fields(
        {
            "retentionPolicy": {"type": "string", "pattern": "^[1-9][0-9]*[dwm]$"},
            "configuration": fields(
                {
                    "destinationPath": {"type": "string", "pattern": "^s3://"},
                    "s3Credentials": fields({"accessKeyId": KEY, "secretAccessKey": KEY}),
                    "wal": fields({"compression": {"const": "gzip"}}),
                    "data": fields({"compression": {"const": "gzip"}}),
                },
                endpointURL=STRING,
                endpointCA=KEY,
            ),
        }
    ),
    "postgresql.cnpg.io/v1 Database": fields({"name": STRING, "owner": STRING, "cluster": NAMED}),
}


def problems(resource: dict[str, Any]) -> list[str]:
    """What a resource's schema says against it; of a RayCluster, also what its pods' say."""
    kind = f"{resource['apiVersion']} {resource['kind']}"
    if kind not in SPECS:
        try:
            kubernetes_validate.validate(resource, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [f"{kind}: {error.message}"]
        return []
    errors = Draft202012Validator(SPECS[kind]).iter_errors(resource.get("spec", {}))
    found = [f"{kind}: {error.json_path}: {error.message}" for error in errors]
    for name, template in pod_templates(resource).items():
        pod = {"apiVersion": "v1", "kind": "Pod"} | template
        found += problems(pod | {"metadata": template.get("metadata", {}) | {"name": name}})
    return found


def pod_templates(resource: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The templates of the pods that a resource makes, by what they are called."""
    name, spec = resource["metadata"]["name"], resource.get("spec", {})
    if resource["kind"] == "RayCluster":
        workers = {f"{name}-{g['groupName']}": g["template"] for g in spec["workerGroupSpecs"]}
        return workers | {f"{name}-head": spec["headGroupSpec"]["template"]}
    kinds = ("Deployment", "StatefulSet", "Job")
    return {name: spec["template"]} if resource["kind"] in kinds else {}
