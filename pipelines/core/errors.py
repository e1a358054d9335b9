"""Errors that a user can fix; every other exception is a bug or a failure of the environment."""

EXIT_USER_ERROR = 2
_LONGEST = 2000  # characters of a message: a file may have a line of megabytes, which it quotes


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, or that of its cause if the message is empty.

    Some object stores refuse without a message, which s3fs reports as the word "None".
    """
    said = " ".join(str(error).split())
    if said in ("", "None"):
        return one_line(error.__cause__) if error.__cause__ else type(error).__name__
    return said


class UserError(Exception):
    """A mistake of the user, told in one line that says what is wrong, where, and what to do.

    The command prints the line and exits with code 2; a DAG task fails with it and is not retried.
    """

    def __init__(self, message: str) -> None:
        """Keep the message, on one line and cut where it quotes too much."""
        line = " ".join(part.strip() for part in message.splitlines())
        super().__init__(line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …")


class DamagedFileError(UserError, ValueError):
    """A file is not what its name or its place says."""


class SharedError(UserError):
    """A user error that every process of a job raises, so only one of them reports it."""


class UnreachableError(UserError):
    """A remote service did not answer: told in one line, but a DAG task is retried."""
