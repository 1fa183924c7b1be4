"""Bodies that engines could not read are refused in one line, however they are coded."""

import codecs
import json
import random

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


def test_the_fast_reader_of_json_reads_what_the_standard_one_reads():
    """Of 20,000 bodies with bytes changed, left out and added; and what it refuses is asked of the
    standard one: half a surrogate pair, as JavaScript may send it, is passed on."""
    rng, accepted = random.Random(0), 0
    marks = b'"\\{}[]:,019eE+-. \n\t\x00\x1f\x7f\xff\xc3utfn/'
    for _ in range(20_000):
        raw = bytearray(
            b'{"prompt":"\\u00e9\\ud83d\\ude00\xc3\xa9","max_tokens":64,"x":[1,-0.0,1.5e3,null]}'
        )
        for _ in range(rng.randrange(3)):
            at, byte = rng.randrange(len(raw)), rng.choice(marks)
            raw[at : at + rng.randrange(2)] = bytes([byte] * rng.randrange(2))
        try:
            found = repr(parse_body(bytes(raw), handed_over=False).body)
        except ValueError:
            continue
        accepted += 1
        assert found == repr(json.loads(raw.decode())), raw
    assert 5_000 < accepted < 19_000
    half = b'{"prompt":"\\ud83d","temperature":NaN}'
    assert parse_body(half, handed_over=False).body["prompt"] == "\ud83d"
