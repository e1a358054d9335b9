"""The one error that a user can fix; every other exception is the program's or the world's."""

EXIT_USER_ERROR = 2


def one_line(error: BaseException) -> str:
    """What an error says, on one line; its cause where it says nothing itself.

    Some object stores refuse without a message, which s3fs tells as the word "None".
    """
    said = " ".join(str(error).split())
    if said in ("", "None"):
        return one_line(error.__cause__) if error.__cause__ else type(error).__name__
    return said


class UserError(Exception):
    """Something a user got wrong: one line that says what, where and what to do.

    The command prints the line and exits with code 2; a DAG task fails with it and is not retried.
    """


class SharedError(UserError):
    """One that every process of a job raises alike, so that one of them tells it."""


class UnreachableError(UserError):
    """Something far away did not answer: one line, but a DAG task tries again."""
