"""A name server with one address for all names: `python -m tests.name_server LISTEN ADDRESS`."""

import socket
import sys

import dns.message
import dns.rdatatype
import dns.rrset


def main(listen: str, address: str) -> None:
    """Answer on port 53 for ever."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((listen, 53))
        while True:
            wire, client = server.recvfrom(4096)
            query = dns.message.from_wire(wire)
            answer = dns.message.make_response(query)
            (asked,) = query.question
            if asked.rdtype == dns.rdatatype.A:
                answer.answer.append(dns.rrset.from_text(asked.name, 0, "IN", "A", address))
            server.sendto(answer.to_wire(), client)


if __name__ == "__main__":
    main(*sys.argv[1:])
