"""The inside of `sandbox.py`: gives up what it may do, then runs the code on its standard input.

    python -I -S sandboxed.py CPU_SECONDS MEMORY_BYTES

It imports nothing but the standard library, as nothing else is needed to be trusted.
"""

import ctypes
import os
import resource
import signal
import sys

_REFUSED = 97
_NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000  # of unshare(2)
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # Landlock's system calls, on every architecture
_DIE_WITH_PARENT, _NO_NEW_PRIVILEGES = 1, 38  # of prctl(2)
_READ = 0b1101  # execute, read a file, read a folder
_ALL = 0b1111111111111  # all that the first version of Landlock knows, which needs Linux 5.13
_MOST_SAID = 1 << 16  # bytes of its output
_LIBC = ctypes.CDLL(None, use_errno=True)


def _need(failed: bool, what: str) -> None:
    if failed:
        sys.stderr.write(f"no {what}: {os.strerror(ctypes.get_errno())}\n")
        os._exit(_REFUSED)


def _to_child() -> None:
    """Go on in a child that ends with this process, which waits for it."""
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    _need(_LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0) != 0, "end with the parent")


def _isolate() -> None:
    _need(_LIBC.unshare(_NEW_USER | _NEW_PROCESSES | _NEW_NETWORK) != 0, "namespaces")
    _to_child()  # the first process of the namespace: at its end the kernel ends all others
    _to_child()
    handled = ctypes.c_uint64(_ALL)
    rules = _LIBC.syscall(_CREATE, ctypes.byref(handled), ctypes.sizeof(handled), 0)
    _need(rules < 0, "Landlock")
    for folder in filter(os.path.isdir, {sys.prefix, sys.base_prefix, "/usr/lib", "/lib"}):
        opened = os.open(folder, os.O_PATH)
        rule = _READ.to_bytes(8, "little") + opened.to_bytes(4, "little")
        _need(_LIBC.syscall(_ADD, rules, 1, rule, 0) != 0, "Landlock rule")
        os.close(opened)
    _need(_LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0, "end of privileges")
    _need(_LIBC.syscall(_RESTRICT, rules, 0) != 0, "Landlock")
    os.close(rules)


def _run(cpu_seconds: int, memory_bytes: int) -> None:
    # An answer may end this process early, so it passes only if this word is written at the end.
    word, _, text = sys.stdin.read().partition("\n")
    told = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _isolate()
    for what, limit in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, _MOST_SAID),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    exec(compile(text, "answer", "exec"), {"__name__": "__main__"})  # noqa: S102
    os.write(told, word.encode())


_run(int(sys.argv[1]), int(sys.argv[2]))
