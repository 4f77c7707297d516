"""What a driver must know of a method, with its options, before it calls the hooks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """The value of `Method.capabilities`.

    mask_period: optimizer steps between two choices of the masks.
    acts_on_gradients: a training without `on_gradients` would be another method's.
    changes_only_weights: the method needs no products of its own, but for options that
        `Method.check_matrix` knows.
    needs_adamw: it works only with AdamW or its own variant of it, as `Method.optimizer` returns,
        because it has its own update rule or reads AdamW's moments.
    quantizes: operands are quantised with one scale per micro-batch, so that the size of a
        micro-batch changes the result.
    ends_dense: the trained model is dense; it is then also fine-tuned densely.
    calibration_sequences: the number of sequences that `Method.calibrate` needs before `convert`; 0
        if it is not needed.
    """

    mask_period: int = 1
    acts_on_gradients: bool = False
    changes_only_weights: bool = False
    needs_adamw: bool = False
    quantizes: bool = False
    ends_dense: bool = False
    calibration_sequences: int = 0
