"""Print pip's settings, from its files and its environment, as shell exports for uv."""

import ast
import os
import shlex
import subprocess
import sys

# pip's option: uv's variable, and what stands between several values.
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
SECTIONS = ("global", "install", ":env:")  # a later one wins


def pip_settings() -> dict[str, str]:
    """Option to value, as `pip install` would see them."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[tuple[str, str], str] = {}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        found[section, option] = ast.literal_eval(value)
    return {
        option: found[section, option]
        for section in SECTIONS
        for option in VARIABLES
        if (section, option) in found
    }


def uv_variables(settings: dict[str, str]) -> dict[str, str]:
    """Return the same in uv's words; a variable that is set already stays."""
    variables = {}
    for option, value in settings.items():
        variable, separator = VARIABLES[option]
        variables[variable] = separator.join(value.split())
    if "extra-index-url" in settings:
        # pip takes the best version of all indexes; uv would stop at the first with the name.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {variable: value for variable, value in variables.items() if variable not in os.environ}


if __name__ == "__main__":
    for variable, value in uv_variables(pip_settings()).items():
        sys.stdout.write(f"export {variable}={shlex.quote(value)}\n")
