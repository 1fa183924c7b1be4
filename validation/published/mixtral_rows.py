"""Published runs of Mixtral on vLLM, and what other estimators predict of them.

inference-sim/training and inference-sim/sim-to-real-accuracy-validation publish means of
inference-perf's stages: vLLM 0.15.1, H100, bfloat16, 128 seats, 2,048 tokens a step, prefix cache
on, 100 different prompts in turn. Figures alone, their files have no licence. The requests of four
runs of Mixtral-8x7B on 2 GPUs (when they came, their lengths) lie in the former's history,
``replay_data`` of commit c4f0340; one of these, ``reasoning``, is of no use: 3,294 of its 4,800
requests failed.
"""

from __future__ import annotations

from typing import NamedTuple

#: Commit whose ``replay_data`` holds the requests.
COMMIT = "c4f0340"
#: Requests of stage 0 came within so many seconds.
STAGE_S = {"general": 600.0, "codegen": 600.0, "roleplay": 1200.0}
#: Tokens that each request generated, with end-of-sequence ignored. The files count those of its
#: text, tokenised again.
OUTPUT = {"general": 248, "codegen": 247, "roleplay": 251}


class Means(NamedTuple):
    """Means of a stage, ms: TTFT, time per output token behind the first, and E2E.

    Time per output token is mean E2E less mean TTFT over the mean of the files' output tokens, less
    one.
    """

    ttft: float
    tpot: float
    e2e: float


class MixtralRun(NamedTuple):
    """A stage of a run, and what published estimators say of it.

    ``recorded`` where the requests are those of this run, not of the run of the same load on
    2 GPUs.
    """

    model: str
    tensor_parallel_size: int
    load: str
    stage: int
    recorded: bool
    measured: Means
    blis_trained: Means
    blis_evolved: Means
    blis_roofline: Means
    llm_optimizer: Means


_SMALL, _LARGE = "Mixtral-8x7B", "Mixtral-8x22B"
RUNS = (
    MixtralRun(_SMALL, 2, "general", 0, True, Means(63.89, 19.38, 4795.97),
               Means(49.22, 20.89, 5208.98), Means(47.73, 20.83, 5193.38),
               Means(47.89, 9.66, 2432.86), Means(28.41, 1.62, 430.24)),
    MixtralRun(_SMALL, 2, "general", 1, True, Means(70.95, 20.72, 5135.71),
               Means(51.27, 21.65, 5399.95), Means(53.44, 20.93, 5224.02),
               Means(172.99, 10.67, 2809.57), Means(56.82, 1.67, 471.82)),
    MixtralRun(_SMALL, 2, "codegen", 0, True, Means(63, 18.44, 4518.52),
               Means(47.23, 20.71, 5142.23), Means(49.8, 20.8, 5168.38),
               Means(13.93, 8.72, 2158.31), Means(14.71, 1.59, 408.64)),
    MixtralRun(_SMALL, 2, "codegen", 1, True, Means(56.78, 19.36, 4753.59),
               Means(48.65, 21.22, 5268.94), Means(50.63, 20.89, 5189.43),
               Means(128.16, 10.28, 2657.7), Means(29.42, 1.62, 430.18)),
    MixtralRun(_SMALL, 2, "roleplay", 0, True, Means(60.51, 18.73, 4684.72),
               Means(49.08, 20.99, 5297.04), Means(50.49, 20.84, 5261.33),
               Means(178.48, 10.55, 2815.05), Means(19.66, 1.61, 422.83)),
    MixtralRun(_SMALL, 4, "general", 0, False, Means(37.66, 10.32, 2569.97),
               Means(33.15, 10.95, 2739.5), Means(34.74, 11.32, 2831.57),
               Means(26.68, 4.56, 1152.69), Means(7.1, 0.8, 204.72)),
    MixtralRun(_SMALL, 4, "general", 1, False, Means(36.77, 11.63, 2891.33),
               Means(34.01, 11.38, 2844.89), Means(36.01, 11.4, 2852.01),
               Means(81.3, 5.24, 1374.74), Means(14.2, 0.81, 215.12)),
    MixtralRun(_LARGE, 8, "general", 0, False, Means(63.93, 17.81, 4477.56),
               Means(42.43, 16.64, 4153.08), Means(45.91, 17.37, 4336.03),
               Means(49.76, 7.15, 1815.55), Means(27.3, 1.54, 409.37)),
    MixtralRun(_LARGE, 8, "general", 1, False, Means(61.01, 19.79, 4964.81),
               Means(46.41, 17.04, 4255.19), Means(46.3, 17.46, 4360.45),
               Means(134.09, 7.86, 2075.55), Means(54.6, 1.56, 442.23)),
    MixtralRun(_LARGE, 8, "codegen", 0, False, Means(68.19, 17.97, 4501.28),
               Means(41.07, 16.51, 4104.33), Means(44.02, 17.34, 4309.74),
               Means(12.45, 6.08, 1507.92), Means(14.13, 1.53, 392.01)),
    MixtralRun(_LARGE, 8, "codegen", 1, False, Means(53.16, 17.7, 4419.93),
               Means(42.09, 16.82, 4180.42), Means(42.12, 17.41, 4325.52),
               Means(66.15, 7.44, 1895.97), Means(28.26, 1.54, 409.02)),
    MixtralRun(_LARGE, 8, "roleplay", 0, False, Means(57.69, 17.76, 4509.58),
               Means(42.71, 16.65, 4207.03), Means(43.23, 17.33, 4375.79),
               Means(146.02, 7.72, 2075.11), Means(18.83, 1.53, 404.01)),
)  # fmt: skip
