"""Random hostile inputs for the network surfaces: HTTP requests, engines' metrics,
KV events. Each
generator takes a ``random.Random`` and returns one input."""

import json

WEIRD = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308,
    float("nan"),
    float("inf"), "", "x", "²", "\0", "\ud800", "a" * 5000, "../../etc/passwd", "1e9", "NaN",
    [], [[]], {},
    {"a": 1}, [None], [1, "a"], ["a", ["b"]], [[1], [2]], [-1], [2**70], [True], {"type": "x"},
)  # fmt: skip
_NUMBERS = (
    "NaN", "+Inf", "-Inf", "-1", "-0", "1e400", "1e30", "0x10", "²", "٣", "1_000", "", "None",
    "1,5",
    "1 2 3", "9" * 400, "nan nan", "{", "1.7976931348623157e309",
)  # fmt: skip
_FIELDS = (
    "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "stream", "n",
    "user",
    "stream_options", "kv_transfer_params", "model", "stop", "logprobs", "ignore_eos", "tools",
    "best_of",
    "response_format", "echo", "seed", "priority", "temperature", "suffix", "logit_bias",
    "input", "tool_choice",
)  # fmt: skip
HEADERS = (
    (b"Content-Type", (b"application/json", b"text/plain", b"",
    b"application/json; charset=utf-16",
                       b"multipart/form-data", b"application/x-www-form-urlencoded", b"\xff")),
    (b"Host", (b"127.0.0.1", b"evil.example", b"", b"a:b", b"[::1", b"localhost:1",
    b"user@localhost",
               b"localhost/../x", b"127.0.0.1 evil", b"LOCALHOST", b"[::1]:80", b"xn--a")),
    (b"Origin", (b"null", b"http://evil.example", b"file://", b"http://localhost.evil.example",
    b"x",
                 b"http://", b"https://127.0.0.1:1", b"\xfe")),
    (b"Content-Encoding", (b"gzip", b"deflate", b"br", b"zstd", b"x", b"identity")),
    (b"Transfer-Encoding", (b"chunked", b"gzip, chunked", b"x")),
    (b"Content-Length", (b"0", b"-1", b"1e3", b"99999999999999999999", b"5, 5")),
    (b"X-Request-Id", (b"a" * 7000, b"\xc3\xa9", b"a\tb", b"")),
    (b"Authorization", (b"Bearer \xff", b"x" * 7000)),
    (b"Expect", (b"100-continue", b"x")),
    (b"Connection", (b"close", b"upgrade", b"keep-alive, x")),
    (b"Upgrade", (b"websocket", b"h2c")),
    (b"X-Worker", (b"0", b"-1", b"99", b"x", b"\xb2")),
)  # fmt: skip
PATHS = (
    b"/v1/completions", b"/v1/completions", b"/v1/chat/completions", b"/v1/chat/completions",
    b"/v1/responses", b"/tokenize", b"/detokenize", b"/v1/models", b"/health", b"/metrics",
    b"/points", b"/",
    b"/v1/../v1/models", b"/%2e%2e/etc/passwd", b"//", b"/v1/completions?x=" + b"a" * 2000, b"*",
    b"http://evil.example/",
)  # fmt: skip


#: What is no request, or two of them: other protocols, odd line ends, chunks and lengths that
#: contradict each other.
RAW = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 60,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/1.0\n\n", b"GET  /health  HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"get /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n", b"\r\n\r\n\r\n", b"\0" * 300,
    b"GET /health\r\n\r\n", b"GET /h\tealth HTTP/1.1\r\n\r\n", b"x" * 70_000,
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n folded: 1\r\nConnection: close\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"X: 1\r\n" * 3000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nNo colon\r\n\r\n", b"GET /health HTTP/1.1\r\nX: a\0b\r\n\r\n",
    *(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\n" + rest
        for rest in (
            b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"
            b"GET / HTTP/1.1\r\n\r\n",
            b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
            b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n",
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"Transfer-Encoding: chunked\r\n\r\n2;" + b"x" * 9000 + b"\r\n{}\r\n0\r\n\r\n",
            b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}}", b"Content-Length: +2\r\n\r\n{}",
            b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
        )
    ),
)  # fmt: skip


def json_value(rng, depth=0):
    """Return a value that JSON may hold, mostly an odd one."""
    kind = rng.random()
    if depth < 3 and kind < 0.15:
        return [json_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if depth < 3 and kind < 0.3:
        return {rng.choice(_FIELDS): json_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice(WEIRD)


def body(rng):
    """Return the body of a request: half of them nearly right, others no JSON at all."""
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.randrange(60))
    if kind < 0.15:
        return rng.choice(
            [b"[" * 40_000, b'{"a":' * 9000, b"9" * 9000, b"\xef\xbb\xbf{}", b'"\\ud800"']
        )
    right = {"prompt": "hello", "max_tokens": 3}
    if rng.random() < 0.4:
        right = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    for _ in range(rng.randrange(1, 4)):
        right[rng.choice(_FIELDS)] = json_value(rng)
    made = json.dumps(right).encode()
    if rng.random() < 0.1:
        at = rng.randrange(len(made))
        made = made[:at] + rng.randbytes(1) + made[at + 1 :]
    return made


def http_request(rng, port):
    """Return the bytes of a request, of several, or of none."""
    if rng.random() < 0.15:
        return rng.choice(RAW)
    path, sent = rng.choice(PATHS), body(rng)
    method = rng.choice([b"POST"] * 6 + [b"GET", b"PUT", b"OPTIONS", b"DELETE", b"X"])
    headers = {
        b"Host": b"127.0.0.1:%d" % port,
        b"Content-Type": b"application/json",
        b"Content-Length": b"%d" % len(sent),
        b"Connection": b"close",
    }
    extra = []
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        name, values = rng.choice(HEADERS)
        if rng.random() < 0.2:
            extra.append((name, rng.choice(values)))
        else:
            headers[name] = rng.choice(values)
    lines = [b"%b: %b" % pair for pair in (*headers.items(), *extra)]
    return b"\r\n".join([b"%b %b HTTP/1.1" % (method, path), *lines, b"", sent])


#: Other answers than vLLM's, which a proxy, another engine or another version may give.
OTHER_METRICS = (
    b"<!doctype html><html><body>502 Bad Gateway</body></html>", b'{"num_requests_waiting": 3}',
    b"\x1f\x8b\x08\x00" + b"\0" * 40, b"vllm:num_requests_waiting", b"vllm:num_requests_waiting  ",
    b"vllm:num_requests_waiting 3 # {trace_id=\"a\"} 0.5 1.0\n# EOF\n",
    b"vllm:num_requests_waiting 3 99999999999999999999999\n",
    b'vllm:num_requests_waiting{engine="' + b"a" * 20_000 + b'"} 3\n',
    b'vllm:num_requests_waiting{engine="0"} 3\nvllm:num_requests_waiting{engine="-1"} 4\n',
    "vllm:num_requests_waiting\u20283\u2029vllm:num_requests_running\u00a03".encode(),
    b'vllm:num_requests_waiting_bucket{le="+Inf"} 3\nvllm:num_requests_waiting_sum NaN\n',
    b"sglang:num_queue_reqs 3\nsglang:token_usage 1.5\nsglang:num_running_reqs -1\n",
    b"vllm:num_requests_waiting 9007199254740993\nvllm:num_requests_running 4611686018427387904\n",
    b'vllm:cache_config_info{num_gpu_blocks="0",block_size="0"} 1\nvllm:kv_cache_usage_perc 2\n',
    b'vllm:cache_config_info{num_gpu_blocks="1e3",block_size="16.0"} 0\n',
    b"vllm:num_requests_waiting 1\n" * 2_000,
)  # fmt: skip


def metrics_text(rng):
    """Return what an engine may answer to /metrics, as bytes."""
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.randrange(200))
    if kind < 0.2:
        return rng.choice(OTHER_METRICS)
    names = [
        "num_requests_waiting",
        "num_requests_running",
        "kv_cache_usage_perc",
        "cache_config_info",
    ]
    lines = [
        "# HELP vllm:x ²\n# TYPE vllm:num_requests_waiting " + rng.choice(["gauge", "counter", "²"])
    ]
    for name in names:
        labels = rng.choice(
            [
                "",
                '{engine="0"}',
                '{engine="0",model_name="a\\"b"}',
                "{",
                '{a="',
                "{=}",
                '{a="1",a="2"}',
            ]
        )
        if name == "cache_config_info":
            sizes = [rng.choice((*_NUMBERS, "100", "16")) for _ in range(2)]
            labels = f'{{num_gpu_blocks="{sizes[0]}",block_size="{sizes[1]}"}}'
        value = rng.choice(_NUMBERS if rng.random() < 0.15 else ("0", "3", "0.5"))
        if rng.random() < 0.97:
            lines += [f"vllm:{name}{labels} {value}"] * rng.choice([1, 1, 2, 50])
    rng.shuffle(lines)
    text = rng.choice(["\n", "\r\n", "\n\n"]).join(lines) + rng.choice(["", "\n", " # {} 1\n"])
    made = text.encode(rng.choice(["utf-8", "utf-8", "utf-8", "utf-16"]))
    if rng.random() < 0.2:
        at = rng.randrange(len(made))
        made = made[:at] + rng.randbytes(3) + made[at:]
    return made


def kv_message(rng):
    """Return the parts of a message of KV events."""
    import msgspec

    def odd(usual):
        return usual if rng.random() < 0.75 else rng.choice([w for w in WEIRD if packs(w)])

    def packs(value):
        try:
            msgspec.msgpack.encode(value)
        except (OverflowError, UnicodeEncodeError, ValueError):
            return False
        return True

    kind = rng.random()
    if kind < 0.1:
        return [rng.randbytes(rng.randrange(12)) for _ in range(rng.randrange(1, 6))]
    if kind < 0.2:
        return [b"", (0).to_bytes(8, "big"), rng.choice([
            b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 3000, b"\xdf\xff\xff\xff\xff", b"",
            rng.randbytes(40),
        ])]  # fmt: skip
    if kind < 0.3:
        events = rng.choice([
            [msgspec.msgpack.Ext(5, b"x" * 9)], [{"type": msgspec.msgpack.Ext(-1, b"\0" * 4)}],
            *(
                [{"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None,
                  "token_ids": [1, 2, 3, 4], "block_size": 2} | more]
                for more in (
                    {"block_hashes": [b"\0" * 32, b"\1" * 32]}, {"block_hashes": [1, 1]},
                    {"parent_block_hash": 1}, {"parent_block_hash": 2}, {"token_ids": [1, 2, 3]},
                    {"block_size": 4}, {"token_ids": list(range(4000)), "block_size": 2000},
                    {"token_ids": [2**63, 1, 2, 3]}, {"lora_name": "a"},
                    {"extra_keys": [["a"], None]},
                    {"block_hashes": []}, {"block_hashes": [1.0, 2.0]}, {"block_hashes": [-1, -2]},
                )
            ),
        ])  # fmt: skip
        return [b"", rng.randbytes(8), msgspec.msgpack.encode([0.0, events, None])]
    events = []
    for _ in range(rng.randrange(3)):
        stored = {
            "type": odd("BlockStored"), "block_hashes": odd([rng.randrange(9), rng.randrange(9)]),
            "parent_block_hash": odd(None), "token_ids": odd([1, 2, 3, 4]), "block_size": odd(2),
            "lora_id": odd(None), "medium": odd("GPU"), "extra_keys": odd(None),
            "group_idx": odd(None),
        }  # fmt: skip
        removed = {
            "type": "BlockRemoved",
            "block_hashes": odd([rng.randrange(9)]),
            "medium": odd("GPU"),
        }
        event = rng.choice([stored, stored, removed, {"type": "AllBlocksCleared"}, {"type": "New"}])
        for _ in range(rng.choice([0, 0, 1])):
            event.pop(rng.choice(sorted(event)), None)
        events.append(odd(list(event.values()) if rng.random() < 0.3 else event))
    batch = odd([odd(1.0), odd(events), odd(None)])
    number = odd(7)
    number = number if type(number) is int and 0 <= number < 2**64 else 0
    return [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode(batch)]
