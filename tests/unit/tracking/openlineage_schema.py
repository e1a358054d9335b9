"""OpenLineage's published schema, and the events that its client wrote into a file.

The schemas in openlineage/ are OpenLineage's own (github.com/OpenLineage/OpenLineage, Apache 2.0).
"""

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from referencing import Registry, Resource

SCHEMAS = [json.loads(path.read_text()) for path in Path(__file__).parent.glob("openlineage/*")]
FACETS = {  # as events name them, and the definitions of their schemas
    "version": "DatasetVersionDatasetFacet",
    "parent": "ParentRunFacet",
    "errorMessage": "ErrorMessageRunFacet",
    "processing_engine": "ProcessingEngineRunFacet",
    "tags": "TagsRunFacet",  # the client's own version
}
# Of Airflow's provider alone: they are valid as the schema's facets of any name.
AIRFLOWS = {
    "airflow",
    "airflowDagRun",
    "airflowState",
    "airflow_mappedTask",
    "nominalTime",
    "unknownSourceAttribute",
}


def file_transport(file: Path) -> dict[str, str]:
    """The variables with which the client writes its events into a file."""
    values = {"TYPE": "file", "LOG_FILE_PATH": str(file), "APPEND": "true"}
    return {f"OPENLINEAGE__TRANSPORT__{name}": value for name, value in values.items()}


def read_valid(file: Path) -> list[dict[str, Any]]:
    """The events in a file; each must be valid, and so must each facet that we or Airflow set."""
    events = [json.loads(line) for line in file.read_text().splitlines()]
    resources = ((schema["$id"], Resource.from_contents(schema)) for schema in SCHEMAS)
    form = {"registry": Registry().with_resources(resources), "format_checker": FormatChecker()}
    by_definition = {name: schema["$id"] for schema in SCHEMAS for name in schema["$defs"]}
    main = {"$ref": by_definition["RunEvent"]}
    for event in events:
        Draft202012Validator(main, **form).validate(event)
        datasets = [*event["inputs"], *event["outputs"]]
        for facets in (event["run"]["facets"], *(each["facets"] for each in datasets)):
            for name in facets.keys() - AIRFLOWS:
                reference = f"{by_definition[FACETS[name]]}#/$defs/{FACETS[name]}"
                Draft202012Validator({"$ref": reference}, **form).validate(facets[name])
    return events


def versions(datasets: list[dict[str, Any]]) -> dict[str, str]:
    """The version of each dataset, by name."""
    return {each["name"]: each["facets"]["version"]["datasetVersion"] for each in datasets}
