"""Print what an image consists of, Debian's packages and Python's, as a CycloneDX document.

Runs in the image, and needs nothing but Python: python - <infra/images/bill_of_materials.py
"""

import json
import subprocess
import sys
from importlib.metadata import distributions
from urllib.parse import quote


def debian_packages() -> list[dict[str, object]]:
    """Return a component for each package that dpkg has installed."""
    command = ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${Architecture}\n"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    packages = (line.split() for line in listing.splitlines())
    return [
        component(name, version, f"pkg:deb/debian/{name}@{quote(version)}?arch={architecture}")
        for name, version, architecture in packages
    ]


def python_packages() -> list[dict[str, object]]:
    """Return a component for each distribution on Python's path."""
    versions = {each.name.lower().replace("_", "-"): each.version for each in distributions()}
    return [
        component(name, version, f"pkg:pypi/{name}@{quote(version)}")
        for name, version in versions.items()
    ]


def component(name: str, version: str, purl: str) -> dict[str, object]:
    """Return a component as CycloneDX writes it; its package URL names it."""
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


if __name__ == "__main__":
    found = sorted([*debian_packages(), *python_packages()], key=lambda each: str(each["purl"]))
    document = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": found}
    json.dump(document, sys.stdout, indent=1)
