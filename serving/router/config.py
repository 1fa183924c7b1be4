"""What the router is started with."""

from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from eldr_sim.errors import InputError
from eldr_sim.inputs import read_text
from eldr_sim.kinds import AnyPath


def _engine_url(url: str) -> str:
    """Return an engine's base URL; ValueError if it is none, or holds a password."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not a base URL such as http://127.0.0.1:8000")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a URL with a user or a password; clients send their API key themselves")
    if parts.port is None and parts.netloc.endswith(":"):
        raise ValueError(f"{url!r} has no port behind the colon")
    return url.rstrip("/")


def _each_once(urls: list[str]) -> list[str]:
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if twice:
        raise ValueError(f"{twice[0]} is named twice")
    return urls


def _endpoint(text: str) -> str:
    """Return an endpoint of ZeroMQ to connect to; ValueError if it is none."""
    parts = urlsplit(text)
    tcp = parts.scheme == "tcp" and parts.hostname not in (None, "*") and parts.port
    if not (tcp or (parts.scheme in ("ipc", "inproc") and text.partition("://")[2])):
        raise ValueError(f"{text!r} is not an endpoint such as tcp://127.0.0.1:5557")
    return text


Urls = Annotated[list[Annotated[str, AfterValidator(_engine_url)]], AfterValidator(_each_once)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Mib = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Endpoints = Annotated[list[Annotated[str, AfterValidator(_endpoint)]], AfterValidator(_each_once)]


class ProxyConfig(BaseModel):
    """What the router is started with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"  #: where it listens
    port: int = Field(ge=0, le=65535)  #: where it listens; 0 takes a free one
    prefill_urls: Urls = []  #: prefill engines; none where the others compute prompts too
    decode_urls: Urls = Field(min_length=1)  #: engines that the policy chooses among
    #: Decode policy with its parameters, such as ``eldr:artifact=fit.npz``.
    policy: str = "round_robin"
    prefill_policy: str = "round_robin"  #: chooses among the prefill engines
    seed: int = Field(default=0, ge=0)  #: of a policy that draws
    #: What ``ELDR_SIM_CAPTURE`` names in the prefill engines; for policies that read signatures.
    capture: list[str] = []
    #: Where the engines that compute prompts publish what their KV caches hold (vLLM's
    #: ``--kv-events-config``), each in the order of its URL; for policies that read caches.
    kv_events: Endpoints = []
    #: Whether clients have prompts computed by engines not named here (``kv_transfer_params``).
    prefilled: bool = False
    #: How often the engines' metrics are read, ms, for policies that look at them.
    signal_interval_ms: float = Field(default=100.0, gt=0)
    #: File to which a line of JSON is appended for each request routed to a decode engine.
    log: str | None = None
    #: How often a request goes to another engine when one fails before its first token.
    retries: int = Field(default=1, ge=0)
    #: Host names besides IP addresses and localhost that requests may name.
    allowed_host: list[str] = []
    max_concurrent_requests: int = Field(default=4096, ge=1)  #: beyond it the answer is 429
    max_body_mib: Mib = 64.0  #: largest body of a request
    #: Bodies and unstreamed answers in memory, in all; beyond it the answer is 503.
    max_buffered_mib: Mib = 1024.0
    max_answer_mib: Mib = 64.0  #: largest answer of an engine that is not streamed
    #: Time that requests in progress have to end after SIGTERM.
    grace_period_s: float = Field(default=180.0, ge=0, allow_inf_nan=False)
    #: Longest time until a client has sent its headers, and after them its body. A connection that
    #: is kept alive is closed when it rests as long.
    request_timeout_s: Seconds = 30.0
    connect_timeout_s: Seconds = 5.0  #: longest time until an engine accepts a connection
    #: Longest time until the first token of a streamed answer, and of a prefill.
    first_token_timeout_s: Seconds = 120.0
    #: Longest time between tokens, and until a client takes what was sent to it.
    token_timeout_s: Seconds = 60.0
    answer_timeout_s: Seconds = 1800.0  #: longest time of an answer that is not streamed
    health_interval_s: Seconds = 1.0  #: time between two questions for an engine's health
    #: Longest time of an answer to them; two that fail in a row eject the engine.
    health_timeout_s: Seconds = 3.0


def make_config(**fields: Any) -> ProxyConfig:
    """Return a configuration; raises InputError if a field is not valid."""
    try:
        return ProxyConfig(**fields)
    except ValidationError as error:
        raise _input_error(error) from None


def read_config(path: AnyPath) -> ProxyConfig:
    """Read a JSON file with a `ProxyConfig`; raises InputError if it cannot be read or used."""
    try:
        return ProxyConfig.model_validate_json(read_text(path, "config"))
    except ValidationError as error:
        raise _input_error(error, f"{path}: ") from None


def _input_error(error: ValidationError, where: str = "") -> InputError:
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"])) or "config"
    return InputError(field, where + first["msg"].removeprefix("Value error, "))
