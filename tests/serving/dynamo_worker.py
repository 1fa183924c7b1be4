"""A worker of Dynamo's that asks an engine port of ours; runs in Dynamo's environment, not in ours.

``python dynamo_worker.py URL MODEL FOLDER``, whose files are ``config.json``, ``tokenizer.json``.
Prints the usage of each answer.
"""

import asyncio
import json
import sys

import aiohttp
import uvloop
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import dynamo_worker


@dynamo_worker()
async def main(runtime, url, model, folder):
    endpoint = runtime.endpoint("eldr.backend.generate")
    async with aiohttp.ClientSession(base_url=url) as session:

        async def generate(request, context=None):
            body = {"model": model, "prompt": request["token_ids"], "ignore_eos": True}
            body["max_tokens"] = request["stop_conditions"]["max_tokens"]
            async with session.post("/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                usage = (await answer.json())["usage"]
            print(json.dumps(usage), flush=True)
            yield {"token_ids": [2] * usage["completion_tokens"], "finish_reason": "length"}

        await register_model(
            ModelInput.Tokens,
            ModelType.Completions,
            endpoint,
            folder,
            model,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=16,
            ignore_weights=True,
        )
        await endpoint.serve_endpoint(generate)


uvloop.install()
asyncio.run(main(*sys.argv[1:]))
