"""OpenAI's SDK against the simulated server; `-m live`, where it is installed."""

import pytest

from eldr_sim.serving.simulated.server import Service
from eldr_sim.simulator.setup.config.run_config import RunConfig

from .test_simulated import in_background

CONFIG = RunConfig(
    trace="reference-moe", topology="2P2D", policy="jsq", warmup=0, output_len=60,
)  # fmt: skip
pytestmark = pytest.mark.live


def test_openai_s_sdk():
    openai = pytest.importorskip("openai")
    service = Service(CONFIG, speed=10.0)
    with in_background(service) as (url,):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        (model,) = client.models.list().data
        assert model.id == "Qwen3-30B-A3B"
        for n in range(1, 26):
            whole = client.completions.create(model=model.id, prompt="word " * n, max_tokens=n)
            assert whole.usage.completion_tokens == n
            messages = [{"role": "user", "content": "word " * n}]
            pieces = list(
                client.chat.completions.create(
                    model=model.id, messages=messages, max_completion_tokens=n, stream=True,
                    stream_options={"include_usage": True},
                )
            )  # fmt: skip
            assert pieces[-1].usage.completion_tokens == n
            said = "".join(p.choices[0].delta.content for p in pieces[:-1])
            assert said.split() == ["tok"] * n
            assert pieces[-2].choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="context length"):
            client.completions.create(model=model.id, prompt="x", max_tokens=10**6)
        stream = client.completions.create(
            model=model.id,
            prompt="x",
            max_tokens=5000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
        assert client.completions.create(model=model.id, prompt="x", max_tokens=2).choices
