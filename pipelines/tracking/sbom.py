"""A model's bill of materials in CycloneDX: the data and parent it came of, the packages of the
environment that made it.

The same model gives the same bytes: `serialNumber` and `metadata.timestamp`, which CycloneDX leaves
to choice, are not written.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclonedx.model.component import Component

SBOM = "sbom.cdx.json"
_PINNED = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)", re.MULTILINE)


def bill_of_materials(
    name: str, model_hash: str, lock: Path, made_of: Mapping[str, str], git_commit: str | None
) -> dict[str, Any]:
    """The bill as JSON (CycloneDX 1.6).

    Args:
        name: Of the registered model.
        model_hash: Of its content.
        lock: The pinned packages, `name==version` a line.
        made_of: Data and parent models: what each is called, and the hash of its content.
        git_commit: Of the project.
    """
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6

    model = Component(
        name=name,
        version=model_hash,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref="model",
    )
    data = [
        Component(name=each, version=content, type=ComponentType.DATA, bom_ref=f"data:{each}")
        for each, content in made_of.items()
    ]
    penstock = Component(name="penstock", version=git_commit or "unknown", bom_ref="penstock")
    bom = Bom(components=[*data, penstock, *_packages(lock)], metadata=BomMetaData(component=model))
    bom.register_dependency(model, [*data, penstock])
    value: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    del value["serialNumber"], value["metadata"]["timestamp"]
    return value


def _packages(lock: Path) -> Iterator["Component"]:
    from cyclonedx.model.component import Component
    from packageurl import PackageURL

    for found in _PINNED.finditer(lock.read_text(encoding="utf-8")):
        purl = PackageURL("pypi", name=found["name"].lower(), version=found["version"])
        yield Component(
            name=found["name"], version=found["version"], purl=purl, bom_ref=purl.to_string()
        )
