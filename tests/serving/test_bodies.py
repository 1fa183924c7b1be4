"""Bodies that engines could not read are refused in one line, however they are coded."""

import codecs
import json

import pytest

from eldr_sim.serving.bodies import parse_body

from ..on_each import on_each

BODY = {"model": "m", "prompt": "café", "max_tokens": 3}


@on_each("handed_over", [False, True])
@on_each("raw", [
        codecs.BOM_UTF8 + json.dumps(BODY).encode(),
        codecs.BOM_UTF8,
        *(json.dumps(BODY, ensure_ascii=False).encode(code)
          for code in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1")),
    ])  # fmt: skip
def test_only_utf8_without_a_byte_order_mark_is_passed_on(raw, handed_over):
    """What is passed on is the client's bytes: engines read UTF-8 (RFC 8259, section 8.1)."""
    with pytest.raises(ValueError, match="body") as error:
        parse_body(raw, handed_over=handed_over)
    assert "\n" not in str(error.value)


def test_utf8_is_passed_on_as_it_came():
    raw = json.dumps(BODY, ensure_ascii=False).encode()
    assert parse_body(raw, handed_over=False).raw == raw
    assert parse_body(raw, handed_over=False).body == BODY
