"""How a checkpoint stores the weights of each part of a model, and its KV cache.

A method says how what it quantizes is stored; lists of modules say what it leaves alone
(``ignore``, ``modules_to_not_convert``, ``exclude_modules``) or how each is stored
(``quantized_layers``). A part is stored as most of its layers are."""

import re
from collections import Counter
from typing import Any, Literal, NamedTuple

from eldr_sim.kernel_profiles.hf_config.keys import Keys
from eldr_sim.kernel_profiles.hf_config.layers import Layers

Part = Literal["attention", "state", "shared", "dense", "experts", "head"]

#: ModelOpt's algorithms, and the words of others for the same.
_ALGORITHMS = {
    "FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "FP8_PB_WO": "fp8_block",
    "FP8_PB_REAL": "fp8_block", "MXFP8": "mxfp8", "NVFP4": "nvfp4", "NVFP4_AWQ": "nvfp4",
    "W4A8_NVFP4_FP8": "nvfp4", "W4A16_NVFP4": "nvfp4_wo", "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4", "INT4_AWQ": "int4_g128", "W4A16_AWQ": "int4_g128",
    "W4A8_AWQ": "int4_g128", "W4A16": "int4_g128", "INT8_SQ": "int8",
    "W8A8_SQ_PER_CHANNEL": "int8", "W8A16": "int8_wo",
}  # fmt: skip
_METHODS = "none, fp8, mxfp4, gptq, awq, compressed-tensors, modelopt"
_MATRICES = re.compile(r"(^|[._])(norm|layernorm|bias|A_log|conv1d|indexer\w*|gate|router)(\W|$)"
                       r"|norm|in_proj_[ab]\b|\bb_proj|dt_bias|shared_expert_gate")  # fmt: skip
#: What names of modules and patterns for them say of the part they are of, the first that fits.
_PARTS: tuple[tuple[Part, str], ...] = (
    ("head", r"lm_head|^head$"),
    ("shared", r"shared_(expert|mlp)"),
    ("experts", r"experts"),
    ("state", r"linear_attn|mamba|mixer\.(in|out)_proj"),
    ("attention", r"self_attn|\battn\b|attention|mixer\.[qkvo]_proj"),
    ("dense", r"\bmlp|feed_forward|\bffn\b|mixer\.(up|down)_proj|(gate|up|down)_proj"),
)
_NOT_TEXT = re.compile(r"vision|visual|image|audio|projector|^mtp|\bmtp\b|embed|patch_merge")
_PROJECTION = re.compile(r"\w*(proj|in_proj_\w+|w[123])\b")


def stored_as(keys: Keys, layers: Layers, mlp: Part) -> dict[str, Any]:
    """Return the fields of how weights and KV cache are stored; InputError: a method, or a key of
    it, that is not known. ``mlp``: which MLPs most tokens pass beside experts."""
    quantization = keys.object("quantization_config")
    given = keys.get("expert_dtype")
    if given not in (None, "fp4"):
        raise keys.refusal(f"expert_dtype {given!r:.40}", "fp4")
    if not quantization.values:
        return {}
    parts = _Stored(quantization, layers, "linear_attn_config" in keys).parts()
    if given == "fp4" and parts["experts"] in ("fp8", "fp8_block"):
        parts["experts"] = "mxfp4"
    fields = {
        "expert_dtype": parts["experts"] if "moe" in layers.mlps else "bfloat16",
        "linear_dtype": parts["attention"],
        "mlp_dtype": parts[mlp],
        "state_dtype": parts["state"] if "state" in layers.mixers else None,
        "head_dtype": parts["head"],
    }
    for name in ("mlp_dtype", "state_dtype"):
        if fields[name] == fields["linear_dtype"]:
            fields[name] = None
    return fields | {"kv_cache_dtype": _kv_dtype(quantization)}


class _Stored(NamedTuple):
    """A configuration of quantization, and the layers that it is of."""

    keys: Keys
    layers: Layers
    one_name: bool  #: whether layers that keep a state name it ``self_attn``, too (KDA)

    def parts(self) -> dict[Part, str]:
        """Return how each part is stored."""
        every = dict.fromkeys(("attention", "state", "shared", "dense", "experts"), "bfloat16")
        dtypes: dict[Part, str] = every | {"head": "bfloat16"}  # type: ignore[assignment]
        keys = self.keys
        whole = self._method()
        left = [str(one) for name in ("ignore", "modules_to_not_convert", "exclude_modules")
                for one in keys.get(name, ())]  # fmt: skip
        listed = keys.get("quantized_layers", {})
        if whole == "mxfp4" and str(keys.get("quant_method")) == "mxfp4":
            dtypes["experts"] = whole  # as GPT-OSS: experts alone
        elif isinstance(whole, str) and not listed:
            dtypes |= {
                part: whole for part in dtypes if part not in {"head", *self._left_out(left)}
            }
        elif isinstance(whole, str):
            dtypes |= {part: whole for part in dtypes if part != "head"}
        elif whole:
            dtypes |= self._by_groups(whole, left)
        dtypes |= self._listed(listed)
        if keys.get("lm_head") is True and isinstance(whole, str):
            dtypes["head"] = whole
        return dtypes

    def _method(self) -> str | dict[str, str]:
        """Return how quantized matrices are stored: all alike, by target, or only as listed."""
        keys = self.keys
        method = str(keys.get("quant_method", "")).lower()
        algorithm = str(keys.get("quant_algo", "")).upper()
        keys.ignore("activation_scheme", "fmt", "scale_fmt", "producer", "version", "sym",
                    "desc_act", "damp_percent", "true_sequential", "checkpoint_format", "meta",
                    "quantization_status", "global_compression_ratio", "format", "static_groups",
                    "zero_point", "act_per_tensor", "weight_per_tensor", "moe_quant_algo",
                    "model_name_or_path", "model_file_base_name", "backend", "do_fuse", "exllama",
                    "pack_dtype", "is_marlin_format", "input_scale_ub", "sparsity_config",
                    "transform_config", "lm_head", "dynamic")  # fmt: skip
        if method == "mxfp4":
            return "mxfp4"
        if method in ("fp8", "fbgemm_fp8", "ptpc_fp8"):
            return self._fp8()
        if method.startswith(("gptq", "awq", "auto-round", "auto_round")):
            return self._few_bits(keys.one("bits", "w_bit", default=4),
                                  keys.one("group_size", "q_group_size", default=128))  # fmt: skip
        if method == "compressed-tensors" or (not algorithm and "config_groups" in keys):
            return self._groups()
        if algorithm in ("MIXED_PRECISION", "NONE"):
            keys.ignore("config_groups", "group_size")
            return {}
        if algorithm in _ALGORITHMS and (not method or method.startswith("modelopt")):
            keys.ignore("config_groups", "group_size")
            return _ALGORITHMS[algorithm]
        if algorithm and (not method or method.startswith("modelopt")):
            raise keys.refusal(f"quant_algo {algorithm!r:.40}", ", ".join(_ALGORITHMS))
        raise keys.refusal(f"quant_method {method!r:.40}", _METHODS)

    def _fp8(self) -> str:
        blocks = self.keys.get("weight_block_size")
        self.keys.ignore("config_groups", "group_size", "quant_algo")
        if blocks not in (None, [128, 128]):
            raise self.keys.refusal(f"weight_block_size {blocks!r:.40}", "[128, 128], or none")
        return "fp8_block" if blocks else "fp8"

    def _few_bits(self, bits: Any, group: Any) -> str:
        if bits == 8:
            return "int8_wo"
        if bits != 4:
            raise self.keys.refusal(f"bits {bits!r:.40}", "4, 8")
        sizes = {32: "int4", 64: "int4_g64", 128: "int4_g128"}
        if group not in sizes:
            raise self.keys.refusal(f"group_size {group!r:.40}", ", ".join(map(str, sizes)))
        return sizes[group]

    def _groups(self) -> dict[str, str]:
        """Return how compressed-tensors stores each target."""
        groups, dtypes = self.keys.object("config_groups"), {}
        for name in list(groups.values):
            one = groups.object(name)
            weights, inputs = one.object("weights"), one.get("input_activations")
            one.ignore("output_activations", "format", "input_activations")
            bits, kind = weights.get("num_bits"), weights.get("type")
            size, strategy = weights.get("group_size"), weights.get("strategy")
            weights.ignore("symmetric", "dynamic", "observer", "observer_kwargs", "actorder",
                           "block_structure", "scale_dtype", "zp_dtype")  # fmt: skip
            if (bits, kind) == (8, "float"):
                if weights.get("block_structure") not in (None, [128, 128]):
                    raise weights.refusal("block_structure", "[128, 128]")
                stored = "fp8_block" if strategy == "block" else "fp8"
            elif (bits, kind) == (8, "int"):
                stored = "int8" if inputs else "int8_wo"
            elif (bits, kind) == (4, "int"):
                stored = self._few_bits(4, size)
            elif (bits, kind, size) == (4, "float", 32):
                stored = "mxfp4"
            elif (bits, kind) == (4, "float"):
                stored = "nvfp4" if inputs else "nvfp4_wo"
            else:
                raise weights.refusal(f"{bits} bits of {kind!r:.40}", "4 or 8 bits, int or float")
            for target in one.get("targets", ["Linear"]):
                dtypes[str(target)] = stored
        if not dtypes:
            raise self.keys.refusal("config_groups is empty", "a group of weights")
        return dtypes

    def _by_groups(self, stored: dict[str, str], left: list[str]) -> dict[Part, str]:
        """Return how parts are stored by the targets of compressed-tensors."""
        dtypes: dict[Part, str] = {}
        out = self._left_out(left)
        for target, dtype in stored.items():
            if target == "Linear":
                dtypes |= {
                    part: dtype
                    for part in ("attention", "state", "shared", "dense", "experts")
                    if part not in out and part not in dtypes
                }
            else:
                part = _part_of(target)
                if part is None:
                    raise self.keys.refusal(f"target {target!r:.60}", "modules of the text model")
                dtypes[part] = dtype
        return dtypes

    def _listed(self, listed: Any) -> dict[Part, str]:
        """Return how parts are stored of which each module is listed."""
        votes: dict[Part, Counter[str]] = {}
        for name, said in dict(listed).items():
            part = _part_of(name)
            algorithm = str(said.get("quant_algo", "")).upper()
            if part is None:
                continue
            if algorithm not in _ALGORITHMS:
                raise self.keys.refusal(f"quant_algo {algorithm!r:.40}", ", ".join(_ALGORITHMS))
            votes.setdefault(part, Counter())[_ALGORITHMS[algorithm]] += 1
        return {part: counted.most_common(1)[0][0] for part, counted in votes.items()}

    def _left_out(self, patterns: list[str]) -> set[Part]:
        """Return the parts that most layers leave as they are, by lists of modules and patterns."""
        layers: dict[Part, dict[str, set[str]]] = {}
        for pattern in patterns:
            part = _part_of(pattern)
            if part is None:
                continue
            number = re.search(r"\.(\d+)[.*]", pattern.replace("\\", ""))
            name = _PROJECTION.search(pattern.rsplit(".", 1)[-1])
            at = number.group(1) if number else "all"
            for one in self._parts_at(part, at):
                named = layers.setdefault(one, {}).setdefault(at, set())
                named.add(name.group(0) if name else "all")
        left: set[Part] = set()
        for part, by_layer in layers.items():
            # One or two matrices of several (o_proj) do not make the part.
            few = 2 if part in ("attention", "state") else 1
            most = [at for at, names in by_layer.items() if "all" in names or len(names) >= few]
            if "all" in most or 2 * len(most) >= self._count(part):
                left.add(part)
        return left

    def _parts_at(self, part: Part, layer: str) -> list[Part]:
        """Return what a name is of in a layer, where states and attention may have one name."""
        if part != "attention" or not self.one_name:
            return [part]
        if layer == "all":
            return ["attention", "state"]
        mixers = self.layers.mixers
        known = int(layer) < len(mixers)  # others are of multi-token prediction
        return ["state" if known and mixers[int(layer)] == "state" else "attention"]

    def _count(self, part: Part) -> int:
        """Return how many layers have a part."""
        mixers, mlps = self.layers.mixers, self.layers.mlps
        state = mixers.count("state")
        counts = {"state": state, "attention": len(mixers) - state, "dense": mlps.count("dense")}
        return counts.get(part, mlps.count("moe"))


def _part_of(name: str) -> Part | None:
    """Return the part that a module, or a pattern for modules, is of; None: none of these."""
    plain = name.replace("\\", "")
    if _NOT_TEXT.search(plain) or _MATRICES.search(plain.removeprefix("re:").split("(")[0]):
        return None
    return next((part for part, words in _PARTS if re.search(words, plain)), None)


def _kv_dtype(keys: Keys) -> str:
    """Return how the checkpoint says that the KV cache is stored: vLLM and SGLang follow it where
    they are not told otherwise."""
    algorithm, scheme = keys.get("kv_cache_quant_algo"), keys.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        kind = f"{scheme.get('type')}{scheme.get('num_bits')}"
        scheme = {"float8": "FP8"}.get(kind, kind)
    said = {str(one).upper() for one in (algorithm, scheme) if one is not None} - {"NONE"}
    if said - {"FP8"}:
        raise keys.refusal(f"KV cache of {', '.join(sorted(said))}", "FP8, or none")
    return "fp8" if said else "bfloat16"
