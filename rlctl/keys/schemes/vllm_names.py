"""The names under which vLLM loads weights: Hugging Face's, with prefixes of its own for vision-language models.

vLLM maps the prefixes of either age of transformers onto its own (``hf_to_vllm_mapper`` of its model classes); names
that bear its own already pass through unchanged.
"""

from __future__ import annotations

from rlctl.keys.layout import Layout, Ref, alone, layout
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.schemes.hf import HEAD, HF_DROPS, renamed, tied_head
from rlctl.keys.shapes import Shapes, name_prefixes

PREFIXES = ("language_model.model.", "visual.")
VISION_HEAD = "language_model.lm_head.weight"


def vllm_names_layout(spec: ModelSpec, shapes: Shapes) -> Layout:
    """Return the form whose names vLLM takes as they are; experts apart."""
    if spec.vision is None:
        here, head = name_prefixes(spec, fused=False), HEAD
        names = {name: name for name in shapes}
    else:
        here, head = name_prefixes(spec, fused=False), VISION_HEAD
        names = {name: head if name == HEAD else renamed(name, here, PREFIXES) for name in shapes}
    stored = [alone(Ref(names[name]), name, shape) for name, shape in shapes.items()]
    return layout("vllm", [*stored, *tied_head(spec, shapes, head)], HF_DROPS)
