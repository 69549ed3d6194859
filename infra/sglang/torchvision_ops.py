"""Declares the two operators that torchvision registers fakes for, so that its CUDA wheel imports on CPU torch.

SGLang imports torchvision; the wheel on PyPI is built for CUDA and its compiled operators don't load beside CPU
torch, after which torchvision's own import fails on the missing schemas. ``autoload`` is a ``torch.backends`` entry
point: it runs at the end of ``import torch`` in every process of the environment, so it does nothing else, and
nothing at all beside a torch built for CUDA. It knows nothing of SGLang.
"""

from __future__ import annotations

from typing import Any

_kept: list[Any] = []  # a Library withdraws its schemas when it is collected


def autoload() -> None:
    """Declare ``torchvision::nms`` and ``torchvision::qnms`` (schemas only) beside a torch without CUDA."""
    import torch

    if torch.version.cuda is not None or _kept:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
