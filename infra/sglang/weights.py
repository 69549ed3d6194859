"""The set of named tensors that an engine can be updated with, checked before anything is sent.

SGLang dies on a tensor of a wrong shape and silently keeps the old values of a tensor that is left out, so an
update here is all of the checkpoint's tensors with their exact shapes in fp32, or nothing. Shapes come from the
headers of the checkpoint's safetensors files; torch is needed only to pack tensors.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def checkpoint_shapes(model_dir: Path | str) -> dict[str, Shape]:
    """Name → shape of every tensor in the ``*.safetensors`` files of a folder.

    Raises FileNotFoundError when there is none.
    """
    files = sorted(Path(model_dir).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors file in {model_dir}")
    shapes: dict[str, Shape] = {}
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            names = tensors.keys()
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    return shapes


def check_weights(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """The tensors to send: exactly the names and shapes of ``shapes``, all float32.

    ``lm_head.weight`` may be given for a model that ties it to the embedding; it is dropped if equal to it.
    Raises ValueError that names what is missing, unknown, of another shape or of another dtype.
    """
    import torch

    given = dict(tensors)
    if LM_HEAD in given and LM_HEAD not in shapes:
        head, embedding = given.pop(LM_HEAD), given.get(EMBEDDING)
        if embedding is None or not torch.equal(head, embedding):
            raise ValueError(f"{LM_HEAD} differs from {EMBEDDING}, but the engine's model ties them")
    if missing := sorted(shapes.keys() - given.keys()):
        raise ValueError(f"{len(missing)} weights are missing, first {missing[0]}")
    if unknown := sorted(given.keys() - shapes.keys()):
        raise ValueError(f"{len(unknown)} weights are not the model's, first {unknown[0]}")
    for name, tensor in given.items():
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the model's is {tuple(shapes[name])}")
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} is {tensor.dtype}; the engine's weights are torch.float32")
    return given


def pack_weights(tensors: Mapping[str, torch.Tensor]) -> str:
    """Base64 of a pickle that carries the values themselves, as ``/update_weights_from_tensor`` takes it.

    Each tensor is copied first: a view would carry its whole storage. SGLang's own serialiser shares file
    descriptors instead, which kills a server that isn't a child of the sender.
    """
    named = [(name, tensor.detach().cpu().contiguous().clone()) for name, tensor in tensors.items()]
    return base64.b64encode(pickle.dumps(named, protocol=5)).decode("ascii")
