"""Tests.  Without a GPU, kernels run in Triton's interpreter, to be asked for before anything imports Triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
