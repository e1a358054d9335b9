"""Finds personal numbers and secrets in text.

Personal numbers are cards, national ids, IP addresses and phone numbers.

Secrets are private keys, tokens of known services, and passwords in URLs and assignments.

Token patterns come from detect-secrets if it has them. A pattern is tried only if the text has a
literal that all its tokens contain.
"""

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

from pipelines.core.errors import UserError
from pipelines.recipe.cleaning_section import PiiKind


class Span(NamedTuple):
    """The characters from `start` up to `end`, and their kind."""

    start: int
    end: int
    kind: str  # one of `data.pii.kinds`


# `\w` is ASCII in these patterns, because Korean particles follow a number without a space.
# Five or more digits with little between them; no other text is checked.
_RUN = re.compile(r"\d(?:[ .()/-]{0,2}\d){4,}", re.ASCII)
_BEFORE, _AFTER = 3, 4  # characters around the digits that the patterns look at

# Digits beside other numbers, as in a table, are neither a card nor a phone number.
_ALONE_BEFORE = r"(?<![\w.,/+(-])(?<!\d[ .:-])"
_ALONE_AFTER = r"(?![\w-]|[.,:/]\d|[ .-]\d{3})"

_CARD = re.compile(
    rf"{_ALONE_BEFORE}(?:\d{{4}}([ -]?)\d{{4}}\1\d{{4}}\1\d{{4}}(?:\1?\d{{1,3}})?"
    rf"|3\d{{3}}([ -]?)\d{{6}}\2\d{{4,5}}){_ALONE_AFTER}",
    re.ASCII,
)
_ISSUED = re.compile(
    r"4\d{15}"  # Visa
    r"|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}"  # Mastercard
    r"|3[47]\d{13}"  # American Express
    r"|6(?:011|5\d\d|4[4-9]\d)\d{12}"  # Discover
    r"|35(?:2[89]|[3-8]\d)\d{12}"  # JCB
    r"|3(?:0[0-5]|[68]\d)\d{11}"  # Diners Club
    r"|62\d{14,17}"  # UnionPay
)
_US_SSN = re.compile(r"(?<![\w.-])\d{3}-\d{2}-\d{4}(?![\w-]|\.\d)", re.ASCII)
_KR_RRN = re.compile(r"(?<![\w.-])\d{6}-[1-8]\d{6}(?![\w-]|\.\d)", re.ASCII)
_IPV4 = re.compile(r"(?<![\w.+=~^<>-])\d{1,3}(?:\.\d{1,3}){3}(?![\w-]|\.\w)", re.ASCII)
_VERSION_BEFORE = re.compile(
    r"(?:\b(?:version|ver|v|release|build|firmware|revision|rev|section|chapter|§)\b\W{0,3}|[A-Za-z]/)$",
    re.IGNORECASE,
)
_IPV6 = re.compile(r"[23][0-9a-fA-F]{3}(?<![\w:.].{4}):[0-9a-fA-F:]{2,34}(?![\w:])", re.ASCII)
_GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")  # all routed addresses
_PHONE = re.compile(
    r"(?<![\w+])\+\d(?:[ .()/-]{0,2}\d){6,14}(?!\w|[.,-]\d)"
    rf"|{_ALONE_BEFORE}(?:"
    r"(?:1[ .-])?\(?\d{2,4}\)?[ .-]{1,2}\d{3,4}[ .-]\d{3,4}"
    r"|0\d{1,4}[ /-]\d{5,8}"
    rf"|\d{{9,11}}){_ALONE_AFTER}",
    re.ASCII,
)
_DECIMAL = re.compile(r"\+?\d+\.\d+")
_PHONE_WORD = re.compile(
    r"(?:phone|tel|telephone|call|fax|mobile|cell|전화|연락처|휴대폰|핸드폰|팩스)"
    r"\W{0,3}(?:no|number|번호)?\W{0,4}$",
    re.IGNORECASE,
)


class _Rule(NamedTuple):
    kind: str
    pattern: re.Pattern[str]
    is_valid: Callable[[re.Match[str]], bool]


class NumberRules:
    """The kinds of `data.pii.kinds` that are numbers, the most certain kinds first.

    Raises:
        UserError: `phone_region` is not a country.
    """

    def __init__(self, kinds: Sequence[PiiKind], phone_region: str) -> None:
        rules = (
            _Rule("card", _CARD, _is_card),
            _Rule("us_ssn", _US_SSN, _is_us_ssn),
            _Rule("kr_rrn", _KR_RRN, _is_kr_rrn),
            _Rule("ip", _IPV4, _is_personal_ipv4),
            _Rule("phone", _PHONE, partial(_is_phone, region=check_region(phone_region))),
        )
        self._rules = [rule for rule in rules if rule.kind in kinds]
        self._ipv6 = "ip" in kinds

    def __bool__(self) -> bool:
        """Return whether there is anything to look for."""
        return bool(self._rules)

    def find(self, text: str) -> Iterator[Span]:
        """Yield personal numbers; one may be found as two kinds, the more certain kind first."""
        for run in _RUN.finditer(text):
            start, end = max(0, run.start() - _BEFORE), run.end() + _AFTER
            for rule in self._rules:
                for found in rule.pattern.finditer(text, start, end):
                    if rule.is_valid(found):
                        yield Span(*found.span(), rule.kind)
        if self._ipv6 and ":" in text:
            for found in _IPV6.finditer(text):
                if _is_global_ipv6(found[0]):
                    yield Span(*found.span(), "ip")


def _is_card(found: re.Match[str]) -> bool:
    from stdnum import luhn

    digits = re.sub(r"\D", "", found[0])
    return bool(_ISSUED.fullmatch(digits)) and bool(luhn.is_valid(digits))


def _is_us_ssn(found: re.Match[str]) -> bool:
    from stdnum.us import ssn

    return bool(ssn.is_valid(found[0]))


def _is_kr_rrn(found: re.Match[str]) -> bool:
    from stdnum.kr import rrn

    return bool(rrn.is_valid(found[0]))


def _is_personal_ipv4(found: re.Match[str]) -> bool:
    """Return whether this is a public address and not a version or section that looks like one.

    Private, loopback, documentation and other special ranges identify nobody. Three numbers below
    10 at the start mean a section, a version or a public resolver.
    """
    if all(len(number) == 1 for number in found[0].split(".")[:3]):
        return False
    try:
        address = ipaddress.IPv4Address(found[0])
    except ValueError:
        return False
    before = found.string[max(0, found.start() - 16) : found.start()]
    return address.is_global and not address.is_multicast and not _VERSION_BEFORE.search(before)


def _is_global_ipv6(text: str) -> bool:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return address in _GLOBAL_IPV6 and address.is_global


def _is_phone(found: re.Match[str], region: str) -> bool:
    """Return whether the number can be dialled and is grouped as is usual in the region.

    Digits without separators are far more often something else, so they must begin with a trunk
    prefix, 0, or follow a word such as "phone".
    """
    from phonenumbers import Leniency, PhoneNumberMatcher

    number = found[0]
    if _DECIMAL.fullmatch(number):
        return False
    if number.isdigit() and number[0] != "0":
        before = found.string[max(0, found.start() - 24) : found.start()]
        if not _PHONE_WORD.search(before):
            return False
    return PhoneNumberMatcher(number, region, leniency=Leniency.STRICT_GROUPING).has_next()


def check_region(region: str) -> str:
    """Return the code of a country, or raise a UserError for one that no country has."""
    from phonenumbers import SUPPORTED_REGIONS

    if region not in SUPPORTED_REGIONS:
        raise UserError(
            f"data.pii.phone_region = {region!r}: no country has this code; "
            "write an ISO 3166 code such as US or KR"
        )
    return region


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
_NAME_CHARACTERS = 32  # before an assignment, where its name is searched
_LEAST_DIGITS = 3  # in a random value whose letters all have the same case
_LEAST_ENTROPY = 3.3  # bits a character; 16 random hexadecimal digits have about 3.5
_JWT = re.compile(r"\beyJ[\w-]{8,}+\.eyJ[\w-]{8,}+\.[\w-]{16,}", re.ASCII)
_OWN_TOKENS = {
    "github_pat_": r"github_pat_\w{22,}",
    "AIza": r"\bAIza[\w-]{35}",
    "hf_": r"\bhf_[A-Za-z]{34}\b",
    "sk-": r"\bsk-(?:proj|ant|svcacct|admin)-[\w-]{20,}",
}


def find_secrets(text: str) -> Iterator[Span]:
    """Yield private keys, service tokens, URL passwords and random values with secret names."""
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
    """Return token patterns, each with a literal that all its tokens contain."""
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
    """Return whether letters and digits are mixed at random, unlike words and a number."""
    digits = sum(map(str.isdigit, value))
    mixed = digits >= _LEAST_DIGITS or (digits and not value.islower() and not value.isupper())
    return bool(mixed) and any(map(str.isalpha, value)) and _entropy(value) >= _LEAST_ENTROPY


def _entropy(value: str) -> float:
    """Return the Shannon entropy of the characters, in bits a character."""
    shares = (count / len(value) for count in Counter(value).values())
    return -sum(share * math.log2(share) for share in shares)
