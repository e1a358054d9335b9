"""Secrets in text: private keys, tokens of known services, passwords in URLs and assignments.

The tokens' patterns are those of detect-secrets, where it has them. Each is tried only where a
literal that all its tokens hold is in the text.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

from pipelines.data.cleaning.pii_spans import Span

_KEY_NAME = r"[A-Z0-9 ]{0,24}PRIVATE KEY(?: BLOCK)?-----"
_PRIVATE_KEY = re.compile(
    rf"-----BEGIN {_KEY_NAME}"
    rf"(?:(?:[^<>-]|-(?!-)){{16,20000}}+-----END {_KEY_NAME}|(?:\s+[A-Za-z0-9+/=]{{32,}}+)+)"
)
_URL_PASSWORD = re.compile(r"://[^\s:/?#@<>\"']{1,64}:([^\s:/?#@<>\"'{}$]{3,64})@[\w.-]")
_PLACEHOLDER = re.compile(
    r"\w*(?:pass|passwd|password|pwd|secret|token|key|guest)|x+", re.IGNORECASE
)
_VALUE = re.compile(r"[=:]\s{0,4}([\"']?)([\w+/=-]{16,200})\1(?=[\s,;)\]}]|$)", re.ASCII)
_SECRET_NAME = re.compile(
    r"(?:(?:api|access|auth|secret|private|account|encryption|signing|client|service)[_-]?key"
    r"|token|secret|passw(?:or)?d|pwd|credentials?)(?:[_-]\w{1,16})?[\"'\]]{0,2}\s*$",
    re.IGNORECASE,
)
_NAME_CHARACTERS = 32  # before an assignment, in which its name is looked for
_LEAST_DIGITS = 3  # in a random value whose letters are all of one case
_LEAST_ENTROPY = 3.3  # bits a character; 16 random hexadecimal digits have about 3.5
_JWT = re.compile(r"\beyJ[\w-]{8,}+\.eyJ[\w-]{8,}+\.[\w-]{16,}", re.ASCII)
_OWN_TOKENS = {
    "github_pat_": r"github_pat_\w{22,}",
    "AIza": r"\bAIza[\w-]{35}",
    "hf_": r"\bhf_[A-Za-z]{34}\b",
    "sk-": r"\bsk-(?:proj|ant|svcacct|admin)-[\w-]{20,}",
}


def find_secrets(text: str) -> Iterator[Span]:
    """Private keys, service tokens, and random values that a name or a URL calls secret."""
    if "PRIVATE KEY" in text:
        yield from (Span(*key.span(), "secret") for key in _PRIVATE_KEY.finditer(text))
    for literal, patterns in _token_patterns():
        if literal in text:
            for pattern in patterns:
                yield from (Span(*token.span(), "secret") for token in pattern.finditer(text))
    if "://" in text and "@" in text:
        for found in _URL_PASSWORD.finditer(text):
            if not _PLACEHOLDER.fullmatch(found[1]):
                yield Span(*found.span(1), "secret")
    for found in _VALUE.finditer(text):
        before = text[max(0, found.start() - _NAME_CHARACTERS) : found.start()]
        if _SECRET_NAME.search(before) and _is_random(found[2]):
            yield Span(*found.span(2), "secret")


@cache
def _token_patterns() -> tuple[tuple[str, tuple[re.Pattern[str], ...]], ...]:
    """Patterns of tokens, each under a literal that all its tokens hold."""
    from detect_secrets.plugins.aws import AWSKeyDetector
    from detect_secrets.plugins.azure_storage_key import AzureStorageKeyDetector
    from detect_secrets.plugins.github_token import GitHubTokenDetector
    from detect_secrets.plugins.gitlab_token import GitLabTokenDetector
    from detect_secrets.plugins.openai import OpenAIDetector
    from detect_secrets.plugins.pypi_token import PypiTokenDetector
    from detect_secrets.plugins.sendgrid import SendGridDetector
    from detect_secrets.plugins.slack import SlackDetector
    from detect_secrets.plugins.square_oauth import SquareOAuthDetector
    from detect_secrets.plugins.stripe import StripeDetector

    github, slack = tuple(GitHubTokenDetector.denylist), tuple(SlackDetector.denylist)
    aws = (re.compile(rf"\b{AWSKeyDetector.denylist[0].pattern}\b", re.ASCII),)
    gitlab = tuple(GitLabTokenDetector.denylist[:1])
    return (
        *((prefix, aws) for prefix in ("AKIA", "ASIA")),
        *((prefix, github) for prefix in ("ghp_", "gho_", "ghu_", "ghs_", "ghr_")),
        *((prefix, gitlab) for prefix in ("glpat-", "gldt-", "glrt-")),
        *((prefix, slack) for prefix in ("xox", "hooks.slack.com")),
        ("AccountKey=", tuple(AzureStorageKeyDetector.denylist)),
        ("T3BlbkFJ", tuple(OpenAIDetector.denylist)),
        ("pypi-Ag", tuple(PypiTokenDetector.denylist)),
        ("SG.", tuple(SendGridDetector.denylist)),
        ("sq0csp-", tuple(SquareOAuthDetector.denylist)),
        ("k_live_", tuple(StripeDetector.denylist)),
        ("eyJ", (_JWT,)),
        *((prefix, (re.compile(pattern, re.ASCII),)) for prefix, pattern in _OWN_TOKENS.items()),
    )


def _is_random(value: str) -> bool:
    """Letters and digits mixed as a generator mixes them, not words and a number."""
    digits = sum(map(str.isdigit, value))
    mixed = digits >= _LEAST_DIGITS or (digits and not value.islower() and not value.isupper())
    return bool(mixed) and any(map(str.isalpha, value)) and _entropy(value) >= _LEAST_ENTROPY


def _entropy(value: str) -> float:
    """Shannon entropy of the characters, in bits a character."""
    shares = (count / len(value) for count in Counter(value).values())
    return -sum(share * math.log2(share) for share in shares)
