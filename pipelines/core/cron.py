"""Times at which something is started, as a cron expression."""

import re

# Five fields of numbers, names, `*`, `,`, `-`, `/`, `#` and `L`, or a preset such as @daily.
_CRON = re.compile(r"@(hourly|daily|weekly|monthly|quarterly|yearly)|[\w*,/#-]+( +[\w*,/#-]+){4}")


def checked_cron(text: str) -> str:
    """Return the expression; raise ValueError if it is none, or names a day that never comes."""
    if not _CRON.fullmatch(text):
        raise ValueError(
            "not a cron expression of five fields (minute, hour, day, month, weekday), "
            "such as `0 3 * * *`"
        )
    if not text.startswith("@"):
        from croniter import croniter  # which Airflow asks too

        croniter(text).get_next()
    return text
