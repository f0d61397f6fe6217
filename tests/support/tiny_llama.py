"""A tiny Llama with seeded weights, and the loss of documents computed one at a time, without any packing."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

VOCABULARY = 128


def tiny_llama(seed: int = 0, **settings: Any) -> Any:
    """Build the model, float32, on the CPU, in evaluation mode, always with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        attn_implementation="sdpa",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **settings,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    torch.random.set_rng_state(state)
    return model


def random_documents(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    """Give every length a document of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def summed_loss(model: Any, document: Sequence[int]) -> torch.Tensor:
    """Sum the cross-entropy of one document by itself over its len - 1 predictions."""
    ids = torch.tensor([list(document)])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="sum")


def reference_loss(model: Any, documents: Sequence[Sequence[int]]) -> torch.Tensor:
    """Mean over all predictions of these documents, each computed alone."""
    total = torch.stack([summed_loss(model, d) for d in documents if len(d) > 1]).sum()
    return total / sum(len(d) - 1 for d in documents)
