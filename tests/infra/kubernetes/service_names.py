"""Answers DNS for services' names: python service_names.py ADDRESS FILE.

FILE is JSON, addresses by name; it is read at each question. It stands for the cluster's server of
names and its proxy of services: a name leads straight to the pods behind a service.
"""

import json
import socket
import struct
import sys
from pathlib import Path

A, NO_ERROR, NO_SUCH_NAME = 1, 0, 3


def answer(question: bytes, addresses: dict[str, list[str]]) -> bytes:
    """The message that answers one question."""
    labels, position = [], 12
    while length := question[position]:
        labels.append(question[position + 1 : position + 1 + length].decode())
        position += 1 + length
    (kind,) = struct.unpack_from("!H", question, position + 1)
    name = ".".join(labels).lower()
    found = addresses.get(name, []) if kind == A else []
    code = NO_ERROR if name in addresses else NO_SUCH_NAME
    head = question[:2] + struct.pack("!HHHHH", 0x8580 | code, 1, len(found), 0, 0)
    records = [
        struct.pack("!HHHIH", 0xC00C, A, 1, 1, 4) + socket.inet_aton(address) for address in found
    ]
    return head + question[12 : position + 5] + b"".join(records)


def main(address: str, file: Path) -> None:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 53))
    while True:
        question, asker = server.recvfrom(4096)
        server.sendto(answer(question, json.loads(file.read_text())), asker)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
