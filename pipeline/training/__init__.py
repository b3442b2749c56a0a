"""Training: the loss, packing, the DeepSpeed engine and checkpoints.

DeepSpeed picks its accelerator when it is first imported, which transformers does; so it is named here, before both.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
