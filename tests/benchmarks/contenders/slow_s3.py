"""A small S3 server: HeadObject and GetObject with Range, each answered after a fixed time.

`python -m tests.benchmarks.contenders.slow_s3 FOLDER SECONDS` prints its port and serves until its
stdin closes. An object's key is its path; its ETag stands for its size and time.
"""

import asyncio
import os
import sys
from email.utils import formatdate
from pathlib import Path


class SlowS3:
    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self._seconds = seconds

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in request[1:] if line)
                method, path, _ = request[0].split(" ")
                await asyncio.sleep(self._seconds)
                writer.write(self._answer(method, path, headers))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        _, _, key = path.lstrip("/").partition("?")[0].partition("/")
        file = self._folder / key
        if not file.is_file():
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        stat = file.stat()
        etag = f'"{stat.st_size:x}-{stat.st_mtime_ns:x}"'
        start, stop, status = 0, stat.st_size, "200 OK"
        if wanted := headers.get("range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), int(last) + 1, "206 Partial Content"
        answer = [
            f"HTTP/1.1 {status}",
            f"Content-Length: {stop - start}",
            f"ETag: {etag}",
            f"Last-Modified: {formatdate(stat.st_mtime, usegmt=True)}",
        ]
        if wanted:
            answer.append(f"Content-Range: bytes {start}-{stop - 1}/{stat.st_size}")
        head = "\r\n".join([*answer, "", ""]).encode()
        if method == "HEAD":
            return head
        with file.open("rb") as opened:
            return head + os.pread(opened.fileno(), stop - start, start)


async def main() -> None:
    store = SlowS3(Path(sys.argv[1]), float(sys.argv[2]))
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
