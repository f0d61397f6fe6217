"""Counts the multiply-accumulates of a decoder from its Transformers config (read by attribute, no import).

One multiply-accumulate of a weight per token, or one of a (query, key) pair, is 2 FLOPs. Only matrix products
count: norms, activations, rotary embeddings, biases and the embedding look-up are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Families (model_type) whose count equals their model's own parameters, by tests/numerics/
# test_workload_configs.py. A gated MLP has three matrices (gate, up, down), a plain one two.
# fmt: off
GATED_MLP_FAMILIES = frozenset([
    "axk1", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "dots1",
    "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma2",
    "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granite", "granitemoe",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hy_v3", "hyperclovax", "internlm3", "llama", "mellum",
    "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "olmo", "olmo2", "olmo3",
    "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "sarvam_mla", "sarvam_moe",
    "seed_oss", "smollm3", "solar_open", "stablelm", "vaultgemma", "youtu",
])
PLAIN_MLP_FAMILIES = frozenset([
    "apertus", "arcee", "gpt2", "gpt_neox", "jais2", "nanochat", "nemotron", "phi", "starcoder2",
])
# fmt: on
# Their configs have no num_key_value_heads: every head has keys and values of its own.
_MULTI_HEAD_FAMILIES = frozenset({"gpt2", "gpt_neox"})
# Their configs have no layer_types: a sliding_window holds in every layer.
_UNIFORM_WINDOW_FAMILIES = frozenset({"ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"})

_MISSING = object()


@dataclass(frozen=True)
class LayerCount:
    """What one decoder layer multiplies.

    Attributes:
        weights: weights of its matrices that one token meets (routed experts: only those chosen).
        qk_width: query heads x width of a query, the products of one pair's score.
        v_width: query heads x width of a value, the products of one pair's output.
        window: keys a query sees at most, itself included; ``None`` for full attention.
        kv_width: numbers that a token's keys and values hold.
    """

    weights: int
    qk_width: int
    v_width: int
    window: int | None
    kv_width: int


@dataclass(frozen=True)
class ModelCount:
    """What a model multiplies: one ``LayerCount`` a layer, and the weights of the LM head."""

    layers: tuple[LayerCount, ...]
    head_weights: int
    num_attention_heads: int

    @property
    def weights(self) -> int:
        """Weights one token meets in the whole model, the LM head included."""
        return sum(layer.weights for layer in self.layers) + self.head_weights

    @property
    def key_value_width(self) -> int:
        """Numbers that a token's keys and values hold in all layers together."""
        return sum(layer.kv_width for layer in self.layers)


class ConfigReader:
    """Reads integers off a config under any of several names; says by name what is missing."""

    def __init__(self, config: Any) -> None:
        self.config = config
        model_type = getattr(config, "model_type", None)
        self.who = f"{type(config).__name__}" + (f" (model_type {model_type!r})" if model_type else "")

    def get(self, *names: str, default: Any = _MISSING) -> Any:
        """Value of the first of ``names`` that is there and not ``None``, else ``default`` if given."""
        for name in names:
            value = getattr(self.config, name, None)
            if value is not None:
                return value
        if default is _MISSING:
            also = f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""
            raise ValueError(
                f"The workload of {self.who} cannot be counted: it has no {names[0]}{also}. "
                f"Set it on the config, or build the workload from a measured profile."
            )
        return default

    def count(self, *names: str, default: Any = _MISSING) -> Any:
        """Like ``get``, for a whole number of at least 1 (a given ``default`` is returned as it is)."""
        value = self.get(*names, default=default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = next(name for name in names if getattr(self.config, name, None) is not None)
            raise ValueError(f"{found} of {self.who} must be a whole number of at least 1, not {value!r}.")
        return value


def count_model(config: Any, *, gated_mlp: bool | None = None) -> ModelCount:
    """Count the multiply-accumulates of a decoder-only model.

    Args:
        config: a Transformers config, or any object with its attributes.
        gated_mlp: whether an MLP has three matrices (gate, up, down) or two; ``None`` looks the family up.

    Raises:
        ValueError: naming the attribute that is missing, or the layer type or family that is not known.
    """
    if getattr(config, "hidden_size", None) is None and getattr(config, "text_config", None) is not None:
        config = config.text_config
    read = ConfigReader(config)
    if gated_mlp is None:
        gated_mlp = _is_gated(read)
    hidden = read.count("hidden_size")
    num_layers = read.count("num_hidden_layers")
    heads = read.count("num_attention_heads")
    attention = _attention_weights(read, hidden, heads)
    windows = _windows(read, num_layers)
    layers = tuple(
        LayerCount(
            weights=attention.weights + _mlp_weights(read, hidden, index, num_layers, gated_mlp),
            qk_width=attention.qk_width,
            v_width=attention.v_width,
            window=windows[index],
            kv_width=attention.kv_width,
        )
        for index in range(num_layers)
    )
    return ModelCount(layers, hidden * read.count("vocab_size"), heads)


def _is_gated(read: ConfigReader) -> bool:
    """Look the family up in the two tables above."""
    model_type = read.get("model_type")
    if model_type in GATED_MLP_FAMILIES:
        return True
    if model_type in PLAIN_MLP_FAMILIES:
        return False
    raise ValueError(
        f"The workload of {read.who} cannot be counted: this family is not known here. If its decoder layers "
        f"are attention plus an MLP (or experts), say gated_mlp=True (gate, up and down matrices) or "
        f"gated_mlp=False (two matrices); otherwise build the workload from a measured profile."
    )


def _attention_weights(read: ConfigReader, hidden: int, heads: int) -> LayerCount:
    """Weights and widths of an attention block, multi-head latent attention (DeepSeek's) included."""
    kv_rank = read.count("kv_lora_rank", default=None)
    if kv_rank is None:
        head_dim = read.count("head_dim", default=None)
        if head_dim is None:
            if hidden % heads:
                raise ValueError(
                    f"{read.who} has no head_dim, and its hidden_size {hidden} is no multiple of its "
                    f"num_attention_heads {heads}; set head_dim."
                )
            head_dim = hidden // heads
        multi_head = getattr(read.config, "model_type", None) in _MULTI_HEAD_FAMILIES
        kv_heads = heads if multi_head else read.count("num_key_value_heads")
        width = heads * head_dim
        return LayerCount(2 * hidden * head_dim * (heads + kv_heads), width, width, None, 2 * kv_heads * head_dim)
    qk_dim = read.count("qk_nope_head_dim") + read.count("qk_rope_head_dim")
    v_dim = read.count("v_head_dim")
    q_rank = read.count("q_lora_rank", default=None)
    queries = hidden * heads * qk_dim if q_rank is None else q_rank * (hidden + heads * qk_dim)
    down = hidden * (kv_rank + read.count("qk_rope_head_dim"))
    up = kv_rank * heads * (read.count("qk_nope_head_dim") + v_dim)
    weights, widths = queries + down + up + heads * v_dim * hidden, (heads * qk_dim, heads * v_dim)
    return LayerCount(weights, *widths, None, sum(widths))  # keys and values are expanded to every head


def _windows(read: ConfigReader, num_layers: int) -> list[int | None]:
    """The sliding window of every layer, ``None`` for full attention."""
    layer_types = read.get("layer_types", default=None)
    if layer_types is None:
        off = getattr(read.config, "use_sliding_window", True) is False
        window = None if off else read.count("sliding_window", default=None)
        if window is not None and getattr(read.config, "model_type", None) not in _UNIFORM_WINDOW_FAMILIES:
            read.get("layer_types")  # which layers slide cannot be guessed: refuse
        return [window] * num_layers
    if len(layer_types) != num_layers:
        raise ValueError(
            f"layer_types of {read.who} has {len(layer_types)} entries for num_hidden_layers={num_layers}."
        )
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(
            f"The workload of {read.who} cannot be counted: its layer_types hold {', '.join(unknown)}; "
            f"only full_attention and sliding_attention are known."
        )
    return [read.count("sliding_window") if kind == "sliding_attention" else None for kind in layer_types]


def _mlp_weights(read: ConfigReader, hidden: int, index: int, num_layers: int, gated: bool) -> int:
    """Weights of layer ``index``'s MLP that one token meets: of experts, chosen, shared and the router."""
    matrices = 3 if gated else 2
    experts = read.get("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", default=0)
    if not experts and read.get("num_experts_per_tok", default=0):
        experts = read.count("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not experts or not _is_sparse(read, index, num_layers):
        if getattr(read.config, "model_type", None) == "gpt2":  # n_inner is None: four times the hidden size
            return int(matrices * hidden * read.count("n_inner", default=4 * hidden))
        return int(matrices * hidden * read.count("intermediate_size"))
    active = read.count("num_experts_per_tok", "moe_k", "moe_topk")
    width = read.count("moe_intermediate_size", "intermediate_size")
    weights = hidden * experts + active * matrices * hidden * width
    shared_width = read.get("shared_expert_intermediate_size", "shared_intermediate_size", default=0)
    if shared_width:
        # Qwen's shared expert has a gate of its own, one output wide.
        gate = hidden if read.get("shared_expert_intermediate_size", default=0) else 0
        return int(weights + matrices * hidden * shared_width + gate)
    shared = read.get("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0)
    return int(weights + shared * matrices * hidden * width)


def _is_sparse(read: ConfigReader, index: int, num_layers: int) -> bool:
    """Whether layer ``index`` of a mixture of experts holds experts rather than a dense MLP."""
    kinds = read.get("mlp_layer_types", default=None)
    if kinds is not None:
        if len(kinds) != num_layers:
            raise ValueError(
                f"mlp_layer_types of {read.who} has {len(kinds)} entries for num_hidden_layers={num_layers}."
            )
        return bool(kinds[index] == "sparse")
    interval = read.get("moe_layer_interval", default=None)
    if interval is not None:
        last = read.get("moe_layer_end_index")
        last = num_layers - 1 if last == -1 else last
        return bool((index + 1) % interval == 0 and read.get("moe_layer_start_index") <= index <= last)
    if index < read.get("first_k_dense_replace", default=0):
        return False
    if index in read.get("mlp_only_layers", default=()):
        return False
    return bool((index + 1) % read.get("decoder_sparse_step", default=1) == 0)
