"""Lets the tests of this folder import their helpers, and keeps torch to one thread: two fight over a busy machine."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
