"""Several splits one after the other in the same processes, a few steps each: a script for torchrun.

    torchrun --nproc_per_node 2 -m tests.support.split_training FOLDER [--use_cpu]

Writes FOLDER/losses.json: losses, gradient norms and generated tokens by the name of the split.
"""

import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch

STEPS, MICRO_BATCHES = 4, 4
#: By number of processes.
SPLITS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "one, bf16": {"bf16": True}},
    2: {
        "dp2": {},
        "cp2": {"cp_size": 2},
        "tp2": {"tp_size": 2},
        "fsdp2": {"dp_shard_size": 2},
        "fsdp over cp2": {"cp_size": 2, "fsdp": True},
        "fsdp2, offloaded": {"dp_shard_size": 2, "fsdp": True, "fsdp_config": {"cpu_offload": True}},
        "tp2, bf16": {"tp_size": 2, "bf16": True},
        "fsdp2, bf16": {"dp_shard_size": 2, "bf16": True},
        "pp2": {"pp_size": 2},
        "pp2, bf16": {"pp_size": 2, "bf16": True},
        "pp2, bf16, compiled": {"pp_size": 2, "bf16": True, "torch_compile": True},
        "cp2, bf16, compiled": {"cp_size": 2, "bf16": True, "torch_compile": True},
        "tp2, bf16, compiled": {"tp_size": 2, "bf16": True, "torch_compile": True},
    },
}
ON_GPUS_ONLY = ("offloaded", "bf16", "compiled")


def model() -> Any:
    """Heads of 64, which fused kernels know."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.05,
    )
    return LlamaForCausalLM(config)


def run(folder: Path, world_size: int, use_cpu: bool, **options: Any) -> dict[str, Any]:
    """Losses and gradient norms of every step."""
    from hf_wlb import WLBTrainer, WLBTrainingArguments
    from tests.support.tiny_llama import random_documents

    sizes = [options.get(name, 1) for name in ("pp_size", "cp_size", "tp_size")]
    replicas = world_size // prod(sizes)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 200, (80,), generator=generator).tolist()
    args = WLBTrainingArguments(
        str(folder / "run"),
        context_length=256,
        max_document_tokens=256,
        packer="next-fit",
        gradient_accumulation_steps=MICRO_BATCHES // replicas,
        max_steps=STEPS,
        learning_rate=0.05,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=use_cpu,
        workload_crossover=256.0,
        **options,
    )
    args._n_gpu = min(args.n_gpu, 1)  # a single process would use all GPUs of the machine
    documents = [{"input_ids": document} for document in random_documents(lengths)]
    trainer = WLBTrainer(model(), args, train_dataset=documents, eval_dataset=documents[:8])
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    found: dict[str, Any] = {name: [row[name] for row in logs] for name in ("loss", "grad_norm")}
    return {**found, "eval_loss": trainer.evaluate()["eval_loss"]}


def main() -> None:
    """Runs all splits of as many processes."""
    import torch.distributed as dist
    from accelerate import PartialState

    folder, use_cpu = Path(sys.argv[1]), "--use_cpu" in sys.argv
    world_size = PartialState(cpu=use_cpu).num_processes
    wanted = {
        name: options
        for name, options in SPLITS[world_size].items()
        if not (use_cpu and any(word in name for word in ON_GPUS_ONLY))
    }
    found = {name: run(folder, world_size, use_cpu, **options) for name, options in wanted.items()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        (folder / f"losses_{world_size}.json").write_text(json.dumps(found), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
