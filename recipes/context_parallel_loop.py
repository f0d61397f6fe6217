"""A training loop of one's own with planned micro-batches and context parallelism, without any Trainer.

A tiny Llama on the Python standard library, on one process or on several that share every micro-batch; both print the
same losses, to rounding:

    python recipes/context_parallel_loop.py
    torchrun --nproc_per_node 2 recipes/context_parallel_loop.py --cp_size 2

Processes that ``cp_size`` leaves over are data-parallel replicas. ``--device cuda`` takes a GPU for each process.
"""

from __future__ import annotations

import argparse
from itertools import islice

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_wlb import AnalyticWorkload, PackingConfig, WLBDataCollator, WLBDataLoader
from hf_wlb.attention import AttentionContext, check_isolation, register
from hf_wlb.data.text import load_documents
from hf_wlb.data.tokenization import tokenize_documents, train_byte_level_bpe
from hf_wlb.parallel import ParallelMesh, ParallelSizes, ProcessGroupExchange, process_count
from hf_wlb.presets import preset_config
from hf_wlb.sharding import Sharder, ShardingConfig


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp_size", type=int, default=1, help="Processes that share every micro-batch.")
    parser.add_argument("--max_steps", type=int, default=5, help="Optimizer steps.")
    parser.add_argument("--context_length", type=int, default=2048, help="Tokens of a micro-batch on average.")
    parser.add_argument("--micro_batches", type=int, default=2, help="Of a step on one replica.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="Where to train.")
    return parser.parse_args()


def main() -> None:
    """Trains and prints the loss of every step."""
    args = parse_arguments()
    if dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
        torch.cuda.set_device(device)

    # The same documents and the same model on every process.
    texts = load_documents(None).select(range(200))
    tokenizer = train_byte_level_bpe(texts["text"], vocab_size=512)
    documents = tokenize_documents(texts, tokenizer)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(preset_config("tiny", vocab_size=len(tokenizer))).to(device)
    check_isolation(model)  # refuses models in which documents would see each other
    register()
    model.set_attn_implementation("wlb")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    mesh = ParallelMesh.of(ParallelSizes.of(process_count(), cp_size=args.cp_size), device.type)
    workload = AnalyticWorkload.from_config(model.config, hardware="cpu" if device.type == "cpu" else "h100")
    sharder = Sharder(ShardingConfig(cp_size=args.cp_size), workload)
    loader = WLBDataLoader(
        documents,
        PackingConfig(
            context_length=args.context_length,
            micro_batches_per_replica=args.micro_batches,
            dp_size=mesh.dp_size,
            max_document_tokens=args.context_length,  # longer ones are split
        ),
        workload,
        collator=WLBDataCollator(sharder=sharder, cp_rank=mesh.cp_rank),
        dp_rank=mesh.dp_rank,
        device=device,
    )
    exchange = ProcessGroupExchange(mesh.cp_group) if args.cp_size > 1 else None
    context = AttentionContext(exchange=exchange)  # made once
    precision = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    micro_batches = iter(loader)
    for step in range(args.max_steps):
        of_step = list(islice(micro_batches, args.micro_batches))
        if not of_step:
            break  # the epoch is over
        # -100 marks tokens without a target; every token is on one process only, so sums over all are exact.
        targets = torch.stack([(micro_batch["labels"] != -100).sum() for micro_batch in of_step]).sum()
        add_up(targets)
        total = torch.zeros((), device=device)
        for micro_batch in of_step:
            with precision:
                output = model(**micro_batch, wlb_context=context, num_items_in_batch=targets.clamp(min=1))
            output.loss.backward()
            total += output.loss.detach()
        add_up(total, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
        if mesh.dp_rank == mesh.cp_rank == 0:
            print(f"step {step} loss {total.item():.5f} of {targets.item()} targets", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def add_up(*tensors: torch.Tensor) -> None:
    """Replaces tensors by their sums over all processes."""
    if process_count() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


if __name__ == "__main__":
    main()
