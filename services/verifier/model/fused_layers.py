"""Whole layers of a slice by our kernels, on a CPU or a GPU, where their result is the same."""

from __future__ import annotations

from functools import partial

from torch import nn

from services.verifier.attention.calls import Calls
from services.verifier.kernels.native.layer_kernel import TOLERANCE, FusedLayer
from services.verifier.kernels.whole_layers import TrialPass, fuse
from services.verifier.model.pass_layouts import PassLayouts


def fuse_layers_of(decoder: nn.Module, layouts: PassLayouts, calls: Calls, trial_pass: TrialPass) -> tuple[int, str]:
    """Let them compute the layers of a decoder; how many they do, and why not the others.

    Args:
        trial_pass: as in ``whole_layers.fuse``.
    """
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return 0, f"{type(decoder).__name__} has no list of them"
    try:
        if layouts.triton is not None:
            from services.verifier.kernels.triton.decoder_layer import fuse_layers

            return fuse_layers(decoder, trial_pass, calls)
        assert layouts.kernel is not None
        return fuse(layers, partial(FusedLayer, layouts.kernel.library, calls=calls), trial_pass, TOLERANCE)
    except NotImplementedError as error:
        return 0, str(error)
