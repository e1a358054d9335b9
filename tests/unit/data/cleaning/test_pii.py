from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.core.errors import UserError
from pipelines.data.cleaning.pii import Scrubber
from pipelines.recipe.cleaning_section import Pii

# Put together here, so that no scanner of this repository takes them for real ones.
GITHUB = "ghp_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hJ6"
AWS = "AKIA" + "Q3ZXW7PLKJ5H2MNB"
SLACK = "xoxb-" + "123456789012-" + "a1B2c3D4e5F6"
STRIPE = "sk_" + "live_" + "4eC39HqLyjWDarjtT1zdp7dc"
JWT = "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0." + "dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"
KEY_BODY = "MIIEpAIBAAKCAQEA0Z3VS5JJcds3xfnygWyF8PbnGy0AHB7MhgwMbRvI0MBZhpFC\n" * 3
PRIVATE_KEY = f"-----BEGIN RSA PRIVATE KEY-----\n{KEY_BODY}-----END RSA PRIVATE KEY-----"

FOUND = {
    "Write to jane.doe+news@mail.uni-koeln.de, please.": "Write to <EMAIL>, please.",
    "Jane <jane@doe.io> wrote:": "Jane <<EMAIL>> wrote:",
    "Call (415) 555-2671 after six.": "Call <PHONE> after six.",
    "Call 1-415-555-2671 or +44 20 7946 0958.": "Call <PHONE> or <PHONE>.",
    "tel: 4155552671": "tel: <PHONE>",
    "메일은 jane@doe.io로, 서버는 93.184.216.34입니다": "메일은 <EMAIL>로, 서버는 <IP>입니다",
    "The host 93.184.216.34 answered.": "The host <IP> answered.",
    "http://93.184.216.34:8080/x": "http://<IP>:8080/x",
    "from 2a00:1450:4001:82a::200e port 22": "from <IP> port 22",
    "Card 4111 1111 1111 1111, 12/27": "Card <CARD>, 12/27",
    "5500-0055-5555-5559 and 371449635398431": "<CARD> and <CARD>",
    "SSN 536-22-8726.": "SSN <US_SSN>.",
    "주민등록번호 971013-1019901": "주민등록번호 <KR_RRN>",
    f"token {GITHUB} here": "token <SECRET> here",
    f"aws_access_key_id={AWS}": "aws_access_key_id=<SECRET>",
    f"slack: {SLACK}.": "slack: <SECRET>.",
    f"{STRIPE}": "<SECRET>",
    f"Authorization: Bearer {JWT}": "Authorization: Bearer <SECRET>",
    f"key:\n{PRIVATE_KEY}\nend": "key:\n<SECRET>\nend",
    'api_key = "Zx9kQ2mN7pL4vR8tY1wB"': 'api_key = "<SECRET>"',
    "DB_PASSWORD=9f8a7b6c5d4e3f2a1b0c": "DB_PASSWORD=<SECRET>",
    '{"client_secret": "GxTq81LmZpW03bNs"}': '{"client_secret": "<SECRET>"}',
    "postgres://app:hunter22@db.internal/app": "postgres://app:<SECRET>@db.internal/app",
}

CLEAN = [
    # e-mail
    "someone@example.com, you@example.org, root@localhost",
    "@property\ndef shape(self): return a@b.T, (a @ b.dot(c)), x@w.transpose(0, 1)",
    "git clone git@github.com:owner/project.git",
    'src="/images/logo@2x.png"',
    # numbers
    "3.14159265358979323846, 2.718281828459045 and 6.02214076e23",
    "2024-01-15, 2024-01-15 12:30:45, 15/01/2024, 1998-2004, 1700000000",
    "ISBN 978-0-306-40615-7, ISBN 0-306-40615-2, ISSN 2049-3630",
    "4111111111111112 has a wrong check digit; 1234567890123456 no issuer",
    "4242 4242 4242 4242 4242 4242 is a row of a table",
    "주민등록번호 971013-1019902의 검사 숫자는 틀렸다",
    "212 555 1234 415 555 2671 650 253 0000 are columns",
    "pages 100-200, 300-400; lines 415-555-26710",
    "000-12-3456, 666-12-3456, 900-12-3456, 078-05-1120",
    "order 415555267112, build 20240115.3, id 00000000-0000-4000-8000-000000000000",
    # addresses
    "version 10.20.30.40, v12.34.56.78, Chrome/91.10.44.12, package==12.34.56.78",
    "section 1.2.3.4, 8.2.4.44 Bogus comment, 1.3.6.1.4.1.311",
    "192.168.1.1, 10.0.0.1, 127.0.0.1, 0.0.0.0, 203.0.113.9, 999.1.1.1, 93.184.216.340",
    "2001:db8::1, ::1, fe80::1, std::chrono::seconds, 12:30:45, aa:bb:cc:dd:ee:ff",
    # secrets
    "3f786850e387550fdab836ed7e6dc881de23001b",
    "commit = '3f786850e387550fdab836ed7e6dc881de23001b'",
    'password = "your-password-here"; token = get_token(request.headers, "authorization")',
    "https://user:password@host/path, https://user:${PASSWORD}@host/",
    "A file starts with -----BEGIN RSA PRIVATE KEY----- and is kept safe.",
    "pad_token_id = 50256, eos_token = '<|endoftext|>', secret_key = settings.SECRET_KEY",
]


def scrub(text, **values):
    return Scrubber(Pii(action="mask", **values)).scrub(text)


@pytest.mark.parametrize("text", FOUND)
def test_what_is_personal_is_masked(text):
    assert scrub(text).text == FOUND[text]


@pytest.mark.parametrize("text", CLEAN)
def test_what_only_looks_like_it_is_left_alone(text):
    assert scrub(text) == (text, Counter())


def test_counts_are_by_kind():
    text = "a@mail.com b@mail.com (415) 555-2671"
    assert scrub(text).counts == {"email": 2, "phone": 1}


@pytest.mark.parametrize("action", ["report", "drop"])
def test_only_mask_changes_a_text(action):
    text = "Jane <jane@doe.io>"
    assert Scrubber(Pii(action=action)).scrub(text) == (text, {"email": 1})


def test_only_the_kinds_asked_for_are_looked_for():
    text = f"jane@doe.io (415) 555-2671 93.184.216.34 {GITHUB}"
    assert scrub(text, kinds=("ip",)).text == f"jane@doe.io (415) 555-2671 <IP> {GITHUB}"
    assert scrub(text, kinds=("secret",)).counts == {"secret": 1}


@pytest.mark.parametrize(
    ("region", "text", "masked"),
    [
        ("KR", "연락처는 010-1234-5678입니다", "연락처는 <PHONE>입니다"),
        ("KR", "02-123-4567 / 01012345678", "<PHONE> / <PHONE>"),
        ("US", "010-1234-5678", "010-1234-5678"),
        ("DE", "030 901820", "<PHONE>"),
    ],
)
def test_a_number_without_plus_is_read_in_its_region(region, text, masked):
    assert scrub(text, phone_region=region).text == masked


def test_a_region_that_there_is_not():
    with pytest.raises(UserError, match=r"data\.pii\.phone_region = 'ZZ'"):
        Scrubber(Pii(action="mask", phone_region="ZZ"))


PIECES = [*FOUND, *CLEAN, " ", "\n", "=", '"', ":", "@", ".", "-", "1", "+", "<EMAIL>", "//", "x"]


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_a_masked_text_is_clean(text):
    masked = scrub(text).text
    assert scrub(masked) == (masked, Counter())


@given(st.text())
def test_any_text_can_be_scrubbed(text):
    masked, counts = scrub(text)
    assert counts or masked == text


HOSTILE = [
    "a" * 200_000 + "@",
    "@" * 100_000,
    "a.b-" * 50_000 + "@x",
    "1 " * 100_000,
    "1." * 100_000,
    "-----BEGIN PRIVATE KEY-----" * 4_000,
    "eyJ" * 60_000,
    "key=" * 50_000,
    "://a:" * 40_000 + "@",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.timeout(60)
def test_no_text_makes_the_search_slow(text):
    assert scrub(text).counts == {}


@pytest.mark.timeout(60)
def test_a_directory_of_many_people_is_masked_whole():
    text = "".join(f"Person {n}: person{n}@mail.com, 93.184.{n % 200}.34\n" for n in range(20_000))
    assert scrub(text).counts == {"email": 20_000, "ip": 20_000}
