"""The data gate. Its library tells of some two hundred functions while it is imported: not here."""

import logging

logging.getLogger("great_expectations").setLevel(logging.WARNING)
