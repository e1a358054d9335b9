"""Reads documents from a source of a team's own package: docs/extensions.md."""

from collections.abc import Iterator
from functools import lru_cache

from pipelines.core import extensions
from pipelines.core.errors import UserError
from pipelines.data.normalize import Document
from pipelines.data.reading.inputs import Input
from pipelines.data.reading.instruction import Fields, record_document
from pipelines.recipe.section import Extension, repeated


def list_shards(extension: Extension) -> list[Input]:
    """Return the source's shards as inputs, in the source's own order.

    Raises:
        UserError: It is not installed, refuses its settings, or has no shard or two of one name.
    """
    found = [
        Input(each.name, each.name, each.bytes, (("identity", each.identity),))
        for each in _open(extension).shards()
    ]
    if not found:
        raise UserError(f"the extension {extension.name}: this source has no shard")
    if twice := repeated([each.path for each in found]):
        raise UserError(f"the extension {extension.name}: two shards are named {twice[0]}")
    return found


def shard_documents(extension: Extension, shard: str, fields: Fields) -> Iterator[Document]:
    """Yield the documents of a shard, named `shard:number`."""
    for number, record in enumerate(_open(extension).read(shard), 1):
        yield record_document(f"{shard}:{number}", 0, record, fields)


@lru_cache(maxsize=1)  # a worker keeps it between shards: it may hold a connection
def _open(extension: Extension) -> extensions.Source:
    made = extensions.load("sources", extension.name)
    source: extensions.Source = extensions.call(
        "sources", extension.name, made, **extension.settings
    )
    return source
