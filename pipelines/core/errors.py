"""Errors that a user can fix; every other exception is a bug or a failure of the environment."""

EXIT_USER_ERROR = 2


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


class SharedError(UserError):
    """A user error that every process of a job raises, so only one of them reports it."""


class UnreachableError(UserError):
    """A remote service did not answer: told in one line, but a DAG task is retried."""
