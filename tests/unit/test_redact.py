from __future__ import annotations

import pytest

from kernel_tools.redact import redact, redact_all, register_secret
from kernel_tools.settings import Secret


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("GET http://h:9000/b/k.tar?X-Amz-Algorithm=A&X-Amz-Credential=AKIA%2F1&X-Amz-Signature=deadbeef", "deadbeef"),
        ("GET http://h:9000/b/k.tar?X-Amz-Algorithm=A&X-Amz-Credential=AKIA%2F1&X-Amz-Signature=deadbeef", "AKIA"),
        ("https://kkb-production.example/k/123/eyJhbGciOiJkaXIi.x-y/proxy/api", "eyJhbGci"),
        ("http://host:8888/lab?token=abcdef123456", "abcdef123456"),
        ("Authorization: token abcdef123456", "abcdef123456"),
        ("https://user:passw0rd@host/x", "passw0rd"),
        ("HF_TOKEN=hf_ABCDEFGHIJKLMNOPQRSTUVWX", "hf_ABC"),
    ],
)  # fmt: skip
def test_credential_shapes_are_masked(text, gone):
    assert gone not in redact(text)


def test_the_rest_of_a_line_stays_readable():
    line = redact("downloading http://h:9000/b/k.tar?X-Amz-Signature=aa to data/coins")
    assert line == "downloading http://h:9000/b/k.tar?*** to data/coins"


def test_a_registered_value_is_masked_raw_and_quoted():
    register_secret("s3cr/t+value")
    assert redact("s3cr/t+value and s3cr%2Ft%2Bvalue") == "*** and ***"


def test_a_secret_shows_itself_nowhere():
    secret = Secret("canary-value-1")
    shown = [repr(secret), str(secret), f"{secret}", f"{secret!r:>20}", "%s" % secret]  # noqa: UP031
    assert not any("canary" in text for text in shown)
    assert secret.reveal() == "canary-value-1"
    with pytest.raises(TypeError):
        __import__("pickle").dumps(secret)


def test_every_text_of_a_status_is_redacted_and_the_rest_kept():
    register_secret("canary-value-7")
    status = {"step": 3, "error": {"message": "canary-value-7"}, "ranks": ["canary-value-7", None]}
    assert redact_all(status) == {"step": 3, "error": {"message": "***"}, "ranks": ["***", None]}
