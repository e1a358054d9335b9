"""Figures as a person reads them."""


def file_size(count: float) -> str:
    """Bytes, in powers of a thousand: `1.4 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
