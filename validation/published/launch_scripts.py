"""What InferenceX's launch scripts said of a run, where its labels do not.

TensorRT-LLM's scripts are ``benchmarks/dsr1_fp[48]_{b200,h200}_trt*.sh`` and
``gptoss_fp4_*_trt*.sh`` of github.com/SemiAnalysisAI/InferenceX on the day of the run:

- Until 17d5e204f (3 November 2025) they chose expert parallelism and data-parallel attention by
  lengths and streams; the labels are the configuration's, which knew neither.
- Until 64af5a771 (21 January 2026) ``max_num_tokens`` of DeepSeek-R1 held one prompt beside a token
  a stream; since then it is 8,192 at least.
- Since ec7bafaae (29 January 2026, FP8), 6eecc0e66 (3 February, NVFP4), 5d517074c and 0aae52d4c (5
  and 6 February, drafts) B200's capture prompts as CUDA graphs in pieces, take another
  ``MOE_BACKEND`` and, in FP8, let prompts wait for each other, each at some loads.

SGLang's of Qwen3.5 are ``benchmarks/qwen3.5_{bf16,fp8,fp4}_{b200,b300,h200}.sh`` of 9dc87a68c (20
February 2026) to 1b4c27d16 (18 April). FP8 on 4 Blackwell GPUs that cut the experts has three
drafts until then (``*-mtp``, 35d4bb367); later runs are the dump's, without. Prompts of a model
that can see run without graphs (``_handle_piecewise_cuda_graph`` of ``server_args.py``).

vLLM's of GPT-OSS capture steps of up to 2,048 tokens as CUDA graphs. So do those of MiniMax-M2.5
and Kimi-K2.5 on Blackwell since the day of :data:`_CAPTURES`, with steps of two prompts and an FP8
KV cache; all others vLLM's default, 512."""

from collections.abc import Mapping
from typing import NamedTuple

from eldr_sim.kernel_profiles.models import KVDtype
from eldr_sim.kernel_profiles.parallel import Parallelism

HOPPER = ("H100", "H200")

#: Kernels in the package's tables by TensorRT-LLM's backend; FlashInfer has TRTLLM's, too.
MOE_RUNNERS = {
    "CUTLASS": ("cutlass",),
    "DEEPGEMM": ("deepgemm",),
    "TRTLLM": ("min_latency", "flashinfer_trtllm"),
}
#: By model, precision and GPU: the day since which vLLM's script captures large steps (InferenceX
#: bddbf4031, 79bd988e9, 340d7854c, 22d0f12f7, 6c3acebfa).
_CAPTURES = {
    ("MiniMax-M2.5", "fp8", "B200"): "2026-04-03",
    ("MiniMax-M2.5", "fp4", "B200"): "2026-04-08",
    ("MiniMax-M2.5", "fp8", "B300"): "2026-04-17",
    ("MiniMax-M2.5", "fp4", "B300"): "2026-04-17",
    ("Kimi-K2.5", "fp4", "B200"): "2026-04-20",
}
_SHORT, _ANSWERS, _PROMPTS = (1024, 1024), (1024, 8192), (8192, 1024)


class Script(NamedTuple):
    """What a launch script said beside the labels."""

    moe_runner: str = ""  #: the kernel of :data:`MOE_RUNNERS`, if it is known
    piecewise_graphs: bool = False  #: prompts run as CUDA graphs in pieces
    waits: bool = False  #: prompts wait for each other, 40 steps at most
    least_tokens: int = 8192  #: that ``max_num_tokens`` is at least
    #: Tokens of a step and so on; 0 where another rule says them.
    chunk: int = 0
    recv_interval: int = 0
    memory_share: float = 0.0
    kv_dtype: KVDtype | None = None  #: of the KV cache; None where another rule says it
    seats: int = 0  #: most running requests; 0 for all streams
    captured: int = 512  #: vLLM's ``max_cudagraph_capture_size``


SAYS_NOTHING = Script()


def chosen_layout(
    record: Mapping[str, str], gpu: str, date: str, streams: int
) -> Parallelism | None:
    """Return how a script spread attention and experts while it chose that itself; else None.
    ``record``: labels of a co-located run; ``date``: its day, as ``2025-11-02``."""
    if record["backend"] != "trtllm" or not "" < date < "2025-11-03":
        return None
    gpus, lengths = int(record["tp_size"]), (int(record["isl"]), int(record["osl"]))
    if "gpt-oss" in record["model_path"]:
        spread, shared = gpu in HOPPER or streams >= 256, gpu not in HOPPER and streams >= 256
    elif "DeepSeek" not in record["model_path"]:
        return None
    elif record["precision"] == "fp8":
        least = {_SHORT: 32, _PROMPTS: 64} if gpu == "B200" else {_SHORT: 64, _PROMPTS: 32}
        spread, shared = True, streams > least.get(lengths, 64)
    else:
        shared = streams > 32 if lengths == _PROMPTS else streams >= 256
        least = {} if gpus == 4 else {_SHORT: 8, _ANSWERS: 16}
        spread = shared or streams > least.get(lengths, 32)
    return Parallelism(1, True, gpus) if shared and gpus > 1 else Parallelism(gpus, spread)


def script_of(
    record: Mapping[str, str], gpu: str, date: str, streams: int, layout: Parallelism, drafts: int
) -> Script:
    """Return what the script of the day said of a run, where one is read: see the module's text.
    ``layout``: of its decode or co-located workers; ``drafts``: of multi-token prediction."""
    if "Qwen3.5" in record["model_path"]:
        return _qwen_script(record, gpu, streams, layout, drafts)
    if "GLM-5" in record["model_path"] and record["backend"] == "sglang":
        # glm5_{fp8,nvfp4}_{b200,h200}.sh of ebb48d4bc, 13930ca61 and d43805fc3 (March 2026).
        script = Script(chunk=8192, recv_interval=1, memory_share=0.85, kv_dtype="bfloat16")
        if gpu in HOPPER:
            return script
        if record["precision"] == "fp4":
            return script._replace(chunk=131072, memory_share=0.8, kv_dtype="fp8")
        return script._replace(chunk=32768, kv_dtype="fp8")
    if record["backend"] == "vllm":
        model = record["model_path"].split("/")[-1]
        if date >= _CAPTURES.get((model, record["precision"], gpu), "2026-12"):
            return Script(chunk=2 * int(record["isl"]), kv_dtype="fp8", captured=2048)
        return Script(captured=2048 if model.startswith("gpt-oss") else 512)
    if record["backend"] != "trtllm" or "DeepSeek" not in record["model_path"]:
        return SAYS_NOTHING
    shared, fp4 = layout.data_parallel_size > 1, record["precision"] == "fp4"
    of_fp4 = "CUTLASS" if shared else "TRTLLM"
    if record["mode"] == "disagg":
        # Recipes of other repositories. What they take where engines share NVFP4 experts, CuteDSL's
        # kernel, is not published: who chooses it has it at least as fast as the best that is.
        return Script("TRTLLM" if fp4 and gpu not in HOPPER else "")
    least = 0 if "" < date < "2026-01-21" else 8192
    if gpu in HOPPER:
        return Script(least_tokens=least)
    lengths = int(record["isl"]), int(record["osl"])
    if fp4:
        graphs = lengths == _SHORT and layout.expert_parallel and layout.tensor_parallel_size == 8
        if drafts:
            graphs = lengths == _SHORT and (streams in (32, 64) or (streams == 128 and not shared))
            graphs |= lengths == _ANSWERS and streams == 64
        graphs &= date >= ("2026-02-06" if drafts else "2026-02-03")
        return Script(of_fp4, graphs, least_tokens=least)
    if date < ("2026-02-05" if drafts else "2026-01-29"):
        return Script("DEEPGEMM", least_tokens=least)
    if drafts:
        graphs = not shared and streams > {_SHORT: 4, _PROMPTS: 16}.get(lengths, 0)
        return Script("DEEPGEMM", graphs)
    graphs = streams >= {_SHORT: 64, _ANSWERS: 128, _PROMPTS: 64}.get(lengths, 0)
    graphs &= not (lengths == _ANSWERS and streams >= 256)
    runner = "DEEPGEMM" if layout.expert_parallel else "TRTLLM"
    return Script(runner, graphs, lengths == _SHORT and streams >= 64)


def qwen_drafts(record: Mapping[str, str], gpu: str, layout: Parallelism) -> int:
    """Return the drafts of a run of Qwen3.5 under SGLang."""
    recent = record["backend_version"].startswith("0.5.10")
    cut = gpu not in HOPPER and layout == Parallelism(4)
    return 3 if record["precision"] == "fp8" and cut and not recent else 0


def _qwen_script(
    record: Mapping[str, str], gpu: str, streams: int, layout: Parallelism, drafts: int
) -> Script:
    precision, version = record["precision"], record["backend_version"]
    script = Script(chunk=32768, recv_interval=30 if streams >= 16 else 10, memory_share=0.82,
                  kv_dtype="bfloat16" if precision == "bf16" else "fp8", seats=128)  # fmt: skip
    if gpu in HOPPER:
        return script._replace(chunk=16384, recv_interval=1, memory_share=0.8)
    if drafts:
        return script._replace(memory_share=0.8, seats=0)
    recent = version.startswith("0.5.10")
    if recent and precision == "fp8":
        return script._replace(chunk=16384, recv_interval=10, memory_share=0.8, seats=0)
    return script._replace(memory_share=0.8 if recent else 0.85) if precision == "fp4" else script
