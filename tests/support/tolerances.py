"""The one table of tolerances: every test that compares numbers with a reference takes its own from here.

Errors are relative in the L2 norm, ``|found - expected| / |expected|``, unless the name says otherwise.
"""

#: Attention in float32 against the dense oracle in float64: output, dq, dk, dv and the sinks' gradient.
ATTENTION_FLOAT32 = 1e-6
#: The same in float64, which rules out that float32 hides a small mistake.
ATTENTION_FLOAT64 = 1e-12
#: The same in bfloat16, against the oracle on the inputs as bfloat16 holds them: its last bit is 4e-3.
ATTENTION_BFLOAT16 = 1e-2
#: Loss and every gradient of a packed micro-batch against its documents run alone, float64 weights. Norms, rotary
#: angles and the loss stay float32 inside Transformers.
MODEL = 1e-6
#: The same for mixtures of experts, whose matrix products see other groupings of the tokens.
MODEL_EXPERTS = 1e-5
#: Loss and every gradient of a trainer's step against the oracle; float32 weights, the oracle in float64.
TRAINER = 5e-6
#: Loss of steps after optimizer steps, against the oracle's own optimizer steps.
TRAINER_AFTER_STEPS = 2e-5
#: Evaluation in float32 against the oracle in float64.
EVALUATION = 2e-6
#: Losses of a resumed run against those of the uninterrupted one: the same operations on the same numbers.
RESUME = 0.0
#: Gradient checkpointing computes the same again.
CHECKPOINTING = 1e-6
#: Loss and every gradient of compiled decoder layers against the same layers uncompiled, float32.
COMPILED = 1e-5
#: Training under a split against one process over six steps, float64 weights and float32 inside: the worst of the loss,
#: the gradient norm, every gradient and every parameter's update, and their mean.
SPLITS = 1e-5
SPLITS_MEAN = 1e-6
#: The same for pipelines over five steps, the worst of them all; with Adam and sharded parameters as well.
PIPELINES = 1e-6
#: What a negative control must miss its reference by, at least, in units of the tolerance it violates.
NEGATIVE_CONTROL_FACTOR = 100.0
#: On a GPU in bf16: error of document attention over that of torch's fused kernel on the same tokens as one document.
GPU_BF16_OVER_PLAIN_KERNEL = 1.5
#: On a GPU in bf16: error of a fused kernel against the oracle, where there is no plain call to compare it with.
GPU_BF16 = 2e-2
#: Loss of a trainer's step on a GPU in float32 (TF32 off) against the oracle.
GPU_TRAINER = 2e-5
#: Linear cross-entropy by chunks of tokens in float32 against whole logits in float64: loss and gradients.
LOSS_FLOAT32 = 2e-6
#: The same in float64.
LOSS_FLOAT64 = 1e-12
#: The same in bfloat16, against whole logits of the inputs as bfloat16 holds them.
LOSS_BFLOAT16 = 1e-2
#: A model's loss and every gradient with the loss computed from hidden states against its own: both float32 (each is
#: about 5e-7 off), and the same in float64.
HEAD_LOSS_FLOAT32 = 2e-6
HEAD_LOSS_FLOAT64 = 1e-12
#: A model split over tensor-parallel ranks, in float32, against its documents alone in float64: loss and the worst
#: gradient, and the mean over gradients.
TENSOR_PARALLEL = 1e-5
TENSOR_PARALLEL_MEAN = 1e-6
#: The same under bfloat16 autocast, against one process under the same: sums are rounded in another order.
TENSOR_PARALLEL_BFLOAT16 = 3e-2
