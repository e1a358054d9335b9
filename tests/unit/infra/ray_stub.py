"""A stub of `ray`, which the scripts start by Python as they do the real one."""

from pathlib import Path


def write_ray(path: Path, text: str) -> None:
    """Write a file that Python and a shell can start, and that does what the script `text` does."""
    command = f"os.execvp('bash', ['bash', '-c', {text!r}, 'ray', *sys.argv[1:]])"
    path.write_text(f"#!/usr/bin/env python\nimport os, sys\n{command}\n")
    path.chmod(0o755)
