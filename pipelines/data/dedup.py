"""Exact duplicates: the first document of each content stays."""


class SeenDocuments:
    """Remembers contents by the first 16 bytes of their SHA-256: some 50 bytes a document."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def add(self, doc_id: str) -> bool:
        """Whether the document with this hex SHA-256 is new."""
        key = bytes.fromhex(doc_id[:32])
        if key in self._seen:
            return False
        self._seen.add(key)
        return True
