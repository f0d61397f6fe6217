"""Fine-tunes with TRL's ``SFTTrainer`` and the collator of hf_wlb: conversations without padding, kept apart.

Without arguments, a tiny Llama on questions and answers about the Python standard library, on the CPU:

    accelerate launch recipes/trl_sft.py
    accelerate launch recipes/trl_sft.py --lora_rank 8

``SFTTrainer`` decides which conversations come together (``per_device_train_batch_size`` of them in a micro-batch), so
micro-batches are not balanced; recipes/sft_chat.py balances them. Arguments are those of ``SFTConfig`` and of
recipes/sft_chat.py's conversations.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import recipe_parts as parts
from sft_chat import ChatArguments, build_model, hold_out, lora_config, prepare_chats
from trl import SFTConfig, SFTTrainer

from hf_wlb.data import WLBDataCollator
from hf_wlb.trainer import check_processes

DEMO = parts.CONFIGS / "trl_demo.yaml"


def parse_arguments(argv: Sequence[str]) -> tuple[ChatArguments, SFTConfig]:
    """Reads ``--config FILE`` and arguments over it; the demonstration's file where nothing of one's own is named."""
    recipe, training = parts.parse_arguments(argv, (ChatArguments, SFTConfig), DEMO)
    return recipe, training


def prepare(recipe: ChatArguments, training: SFTConfig) -> SFTTrainer:
    """Conversations, tokenizer and model in a trainer.

    Raises:
        ValueError, OSError: In words for the user, where a path, a column or a setting is wrong.
    """
    check_processes(training)
    if training.packing or training.padding_free:
        raise ValueError("packing and padding_free are for TRL's own collator; hf_wlb's does without padding anyway.")
    limit, training.max_length = training.max_length, None  # conversations are cut here, and counted, not there
    tokenizer, (documents, counts) = prepare_chats(recipe, training, limit)
    if training.process_index == 0:
        print(counts)
    train, held_out = hold_out(documents, recipe.held_out)
    rank, recipe.lora_rank = recipe.lora_rank, None  # SFTTrainer puts the adapters in
    return SFTTrainer(
        build_model(recipe, training.seed, tokenizer),
        training,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=WLBDataCollator(),
        processing_class=tokenizer,
        peft_config=None if rank is None else lora_config(rank),
    )


def main() -> None:
    """Trains from the arguments on the command line."""
    recipe, training = parse_arguments(sys.argv[1:])
    try:
        trainer = prepare(recipe, training)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if losses and training.process_index == 0:
        print(f"Loss: {losses[0]:.3f} -> {losses[-1]:.3f} in {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
