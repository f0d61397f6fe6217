"""The half of ``WLBTrainer`` that writes and reads checkpoints, which any split of a run can go on from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, cast

import torch
from transformers import set_seed
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from hf_wlb.accounting import read_planner_state
from hf_wlb.argument_names import named_as_arguments
from hf_wlb.parallel import ParallelSizes, failing_together, gather_figures
from hf_wlb.parallel.checkpoint import (
    ELEMENTWISE_OPTIM_NAMES,
    can_save_in_parts,
    check_folder,
    check_names,
    check_optimizer,
    gather_adapters,
    has_optimizer,
    has_weights,
    load_adapters,
    load_optimizer,
    load_weights,
    save_optimizer,
    save_weights,
    saved_by_name,
    verify_groups,
    write_json,
)
from hf_wlb.trainer.layouts import under_this_layout
from hf_wlb.trainer.splitting import SplitModel

logger = logging.getLogger(__name__)

SIZES_NAME = "parallel_sizes.json"


class SplitCheckpoints(SplitModel):
    """``Trainer`` whose checkpoints do not depend on how its run is split.

    A checkpoint is what ``save_pretrained`` would write of the whole model, the optimizer's state by parameter name
    (see ``hf_wlb.parallel.checkpoint.optimizer``), and Trainer's other files. ``trainer_state.json`` comes last.

    Where parameters are split (FSDP, tensor parallel), every process must call ``save_model`` and ``push_to_hub``.

    Random states: a run of the same sizes gets back every process's own. Any other split starts anew from ``seed``,
    the step and the place of a process among those that hold different tokens; tensor-parallel ranks stay alike.
    """

    @property
    def _bare_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def _has_adapters(self) -> bool:
        return hasattr(self._bare_model, "get_base_model")  # PeftModel, which need not be installed

    def _check_checkpoints(self) -> None:
        """Refuses what could not be saved, or not be trained in parts; before the model is split.

        Raises:
            ValueError: Saying what to change.
        """
        if not self._splits:
            return
        if not self._has_adapters:
            check_names(self._bare_model)
        if self.optimizer is not None:
            check_optimizer(self.optimizer)
        elif self.optimizer_cls_and_kwargs is not None:
            check_optimizer(self.optimizer_cls_and_kwargs[0])
        else:
            check_optimizer(str(getattr(self.args.optim, "value", self.args.optim)))

    # ---- weights ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's; where parameters are split, all processes must call it together."""
        if self._splits or not (_internal_call and self.is_in_train):
            super().save_model(output_dir, _internal_call)
            return
        with failing_together():  # in a step all are here; a user may call it on the main process alone
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not self._splits or state_dict is not None:
            super()._save(output_dir, state_dict)
            return
        folder = str(self.args.output_dir if output_dir is None else output_dir)
        if self._has_adapters:
            adapters = gather_adapters(self._bare_model, self.layout)
            with failing_together():
                self._save_as_trainer(folder, adapters)
            return

        def beside() -> None:  # Trainer's files without the weights
            with _no_progress_bar():
                self._save_as_trainer(folder, {})

        save_weights(self._bare_model, self.layout, folder, leads=self.args.should_save, beside=beside)

    def _save_as_trainer(self, folder: str, state: dict[str, torch.Tensor]) -> None:
        super()._save(folder, state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Every process reads its own part; what is missing, or too much, is an error."""
        folder = resume_from_checkpoint
        with failing_together():
            if not os.path.isfile(os.path.join(folder, TRAINER_STATE_NAME)):
                raise ValueError(
                    f"{folder} holds no {TRAINER_STATE_NAME}, the last file that is written: it is no checkpoint of a "
                    "training run, or its writing was cut. Resume from an earlier one."
                )
            if not self._load_parts(folder):
                super()._load_from_checkpoint(folder, model)

    def _load_best_model(self) -> None:
        with failing_together():
            folder = str(self.state.best_model_checkpoint)
            if not self._load_parts(folder):
                super()._load_best_model()

    def _load_parts(self, folder: str) -> bool:
        """Whether the weights are read; if not, it is Trainer's business."""
        model = self._bare_model
        if self._has_adapters:
            if self._splits:
                load_adapters(model, self.layout, folder)
            return self._splits
        if not self._splits and not (has_weights(folder) and can_save_in_parts(model)):
            return False
        load_weights(model, self.layout, folder)
        return True

    # ---- optimizer, scheduler ----

    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Also refuses, before the first step, what could not be saved later."""
        if self._tied_ends is not None:
            self._tied_ends.agree_on_training()
        found = super()._prepare_for_training(max_steps, *args, **kwargs)  # type: ignore[no-untyped-call]
        if self.mesh.pp_size > 1:
            verify_groups(self.optimizer, self._bare_model, self.layout)
            if self.args.save_strategy != "no":
                check_folder(str(self.args.output_dir), self.mesh, leads=self.args.should_save)
        return cast(tuple[Any, Any], found)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not saved_by_name(self.optimizer):
            if self._splits:
                check_optimizer(self.optimizer)
            with failing_together():
                super()._save_optimizer_and_scheduler(output_dir)
            return
        save_optimizer(self.optimizer, self._bare_model, self.layout, output_dir, leads=self.args.should_save)
        with failing_together():
            if self.args.should_save:
                assert self.lr_scheduler is not None
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with failing_together():
            whole = os.path.isfile(os.path.join(checkpoint, OPTIMIZER_NAME))
            scheduler = os.path.join(checkpoint, SCHEDULER_NAME)
            if not os.path.isfile(scheduler) or not (whole or has_optimizer(checkpoint)):
                raise ValueError(
                    f"{checkpoint} holds no state of the optimizer and the scheduler (save_only_model?), so the run "
                    "cannot go on from it. To start a new run from its weights, load the model with from_pretrained."
                )
            if has_optimizer(checkpoint):
                load_optimizer(self.optimizer, self._bare_model, self.layout, checkpoint)
                assert self.lr_scheduler is not None
                self.lr_scheduler.load_state_dict(torch.load(scheduler, map_location="cpu", weights_only=True))
            elif self._splits:
                raise ValueError(
                    f"{checkpoint} holds {OPTIMIZER_NAME}, which a run whose parameters are split cannot read. Resume "
                    "it without fsdp and with pp_size=1 and tp_size=1, optim one of "
                    f"{', '.join(ELEMENTWISE_OPTIM_NAMES)}, and go on from the checkpoint that this writes."
                )
            else:
                super()._load_optimizer_and_scheduler(checkpoint)

    # ---- data ----

    def _load_planner_state(self, checkpoint: str, data: Any) -> None:
        """Lets the training data go on where they stood, for this run's replicas."""
        state = under_this_layout(read_planner_state(checkpoint, self.state.global_step), data)
        try:
            with named_as_arguments():
                data.load_state_dict(state)
        except ValueError as error:
            anew = "without the state (ignore_data_skip=True, which begins the epoch's documents anew)"
            raise ValueError(str(error).replace("without the state", anew)) from None

    # ---- random states ----

    def _save_rng_state(self, output_dir: str) -> None:
        with failing_together():
            super()._save_rng_state(output_dir)
            if self.args.should_save:
                write_json(os.path.join(output_dir, SIZES_NAME), asdict(self.mesh.sizes))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """See the class; all processes must call this together."""
        if checkpoint is None:
            return
        able = self._finds_own_rng_state(checkpoint)
        if all(row[0] for row in gather_figures([float(able)])):
            super()._load_rng_state(checkpoint)
            return
        token_rank = self.mesh.dp_rank * self.mesh.cp_size + self.mesh.cp_rank
        text = f"{self.args.seed} {self.state.global_step} {token_rank}"
        if self.mesh.pp_rank:
            text += f" stage {self.mesh.pp_rank}"
        set_seed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little"))
        if self.is_world_process_zero():
            logger.warning(
                "%s was not written by a run of %s, or lacks random states: they start anew from seed %d and step %d. "
                "Dropout will differ from that of the run that was saved; documents and their order do not.",
                checkpoint,
                self.mesh.sizes,
                self.args.seed,
                self.state.global_step,
            )

    def _finds_own_rng_state(self, checkpoint: str) -> bool:
        processes = self.args.world_size
        names = [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else ["rng_state.pth"]
        if not os.path.isfile(os.path.join(checkpoint, names[self.args.process_index if processes > 1 else 0])):
            return False
        sizes = os.path.join(checkpoint, SIZES_NAME)
        if not os.path.isfile(sizes):  # of a plain Trainer
            return not os.path.isfile(os.path.join(checkpoint, f"rng_state_{processes}.pth"))
        with open(sizes, encoding="utf-8") as file:
            saved, now = ParallelSizes(**json.load(file)), self.mesh.sizes
        alike = (saved.dp, saved.cp, saved.tp, saved.pp) == (now.dp, now.cp, now.tp, now.pp)
        return alike and (now.pp == 1 or saved == now)  # with a pipeline the order of ranks may be another


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Transformers shows one for writing no weights."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()
