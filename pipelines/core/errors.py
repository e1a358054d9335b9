"""The one error that a person can mend; every other exception is the program's or the world's."""

EXIT_USER_ERROR = 2


class UserError(Exception):
    """Something a person got wrong: one line that says what, where and what to do.

    The command prints the line and exits with code 2; a DAG task fails with it and is not retried.
    """


class SharedError(UserError):
    """One that every process of a job raises alike, so that one of them tells it."""


class UnreachableError(UserError):
    """Something far away did not answer: one line, but a DAG task tries again."""
