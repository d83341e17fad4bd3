"""The only file that knows CPU from CUDA."""

import sys

import torch


def hide_broken_torchvision() -> None:
    """Call before transformers is first imported.

    PyPI's torchvision and its kin are CUDA builds: beside a CPU torch their import fails, and
    transformers, which sees them installed, imports them. None in sys.modules makes the import
    an ordinary ImportError, which transformers takes for "not installed".
    """
    if torch.version.cuda is None:
        for name in ("torchvision", "torchaudio", "torchcodec"):
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
